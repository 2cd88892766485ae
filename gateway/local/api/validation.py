"""Constraints of the model, checked before everything else, in the service's words.

LM 3.3: `2 validation errors detected: Value null at 'a' failed to satisfy
constraint: Member must not be null; Value …`.  The value is shown unless the
shape is sensitive (recorded for `runHookPayload`, whose value is left out).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from botocore.model import Shape

from gateway.local.api.errors import ApiError, validation
from gateway.local.behaviours import implements

_SHOWN_CHARS = 1024


@implements("validation-texts", "validation-first")
def validate(shape: Shape | None, members: Mapping[str, Any]) -> ApiError | None:
    """The error for these members, or None if they satisfy every constraint."""
    if shape is None:
        return None
    found = list(_structure(shape, members, ""))
    if not found:
        return None
    noun = "error" if len(found) == 1 else "errors"
    return validation(f"{len(found)} validation {noun} detected: {'; '.join(found)}")


def _check(shape: Shape, value: Any, path: str) -> Iterator[str]:
    if value is None:
        yield _violation(shape, None, path, "Member must not be null")
        return
    yield from _CHECKS.get(shape.type_name, _nothing)(shape, value, path)


def _violation(shape: Shape, value: Any, path: str, constraint: str) -> str:
    shown = "Value" if shape.metadata.get("sensitive") else f"Value {_shown(value)}"
    if value is None:
        shown = "Value null"
    return f"{shown} at '{path}' failed to satisfy constraint: {constraint}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "'{" + ", ".join(f"{k}={v}" for k, v in value.items())[:_SHOWN_CHARS] + "}'"
    if isinstance(value, list):
        return "'[" + ", ".join(str(v) for v in value)[:_SHOWN_CHARS] + "]'"
    return f"'{str(value)[:_SHOWN_CHARS]}'"


def _structure(shape: Shape, value: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, member in shape.members.items():
        inner = f"{path}.{name}" if path else name
        if name in value:
            yield from _check(member, value[name], inner)
        elif name in shape.required_members:
            yield _violation(member, None, inner, "Member must not be null")
    if getattr(shape, "is_tagged_union", False) and len(value) != 1:
        yield _violation(shape, value, path, "Member must have exactly one member set")


def _list(shape: Shape, value: list[Any], path: str) -> Iterator[str]:
    yield from _length(shape, value, path)
    for number, item in enumerate(value, 1):
        yield from _check(shape.member, item, f"{path}.{number}.member")


def _map(shape: Shape, value: Mapping[str, Any], path: str) -> Iterator[str]:
    yield from _length(shape, value, path)
    for key, item in value.items():
        yield from _check(shape.key, key, f"{path}.{key}.key")
        yield from _check(shape.value, item, f"{path}.{key}.value")


def _string(shape: Shape, value: str, path: str) -> Iterator[str]:
    yield from _length(shape, value, path)
    pattern = shape.metadata.get("pattern")
    if pattern and not _compiled(pattern).fullmatch(value):
        text = f"Member must satisfy regular expression pattern: {pattern}"
        yield _violation(shape, value, path, text)
    allowed = shape.metadata.get("enum")
    if allowed and value not in allowed:
        text = f"Member must satisfy enum value set: [{', '.join(allowed)}]"
        yield _violation(shape, value, path, text)


def _length(shape: Shape, value: Any, path: str) -> Iterator[str]:
    for bound, wrong, word in _bounds(shape, len(value)):
        if wrong:
            text = f"Member must have length {word} than or equal to {bound}"
            yield _violation(shape, value, path, text)


def _number(shape: Shape, value: int, path: str) -> Iterator[str]:
    for bound, wrong, word in _bounds(shape, value):
        if wrong:
            text = f"Member must have value {word} than or equal to {bound}"
            yield _violation(shape, value, path, text)


def _bounds(shape: Shape, value: int) -> Iterator[tuple[int, bool, str]]:
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    if low is not None:
        yield low, value < low, "greater"
    if high is not None:
        yield high, value > high, "less"


def _nothing(shape: Shape, value: Any, path: str) -> Iterator[str]:
    return iter(())


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    r"""A pattern of the model as Python reads it.

    The model's dialect has \p{L}, \p{N} and \p{Z}; Python's `\w` covers letters and
    numbers (and the underscore, which the patterns in question allow anyway).
    """
    for theirs, ours in ((r"\p{L}", r"\w"), (r"\p{N}", r"\d"), (r"\p{Z}", r"\s")):
        pattern = pattern.replace(theirs, ours)
    return re.compile(pattern)


_CHECKS: Mapping[str, Callable[[Shape, Any, str], Iterator[str]]] = {
    "structure": _structure,
    "list": _list,
    "map": _map,
    "string": _string,
    "integer": _number,
    "long": _number,
}
