"""Reading JSON that a stranger wrote: bounded, one type of error, no surprises.

Python's reader accepts NaN, duplicate members, any depth and any top-level value.  Here a
value is an object below a stated size, members are taken by name *and* type, and whatever is
left over can be refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
MAX_INTEGER = 2**63 - 1


class StrictJSONError(ValueError):
    """The text is not the JSON object that was asked for."""


def _no_constant(text: str) -> NoReturn:
    raise StrictJSONError(f"{text} is not JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise StrictJSONError("duplicate member")
    return found


def loads_object(data: bytes | memoryview | str, max_bytes: int) -> dict[str, Any]:
    """Parse one JSON object of at most `max_bytes`; raises `StrictJSONError` for all else."""
    if len(data) > max_bytes:
        raise StrictJSONError(f"{len(data)} bytes, at most {max_bytes} allowed")
    try:
        text = data if isinstance(data, str) else str(data, "utf-8")
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise StrictJSONError("not strict JSON") from error
    if not isinstance(value, dict):
        raise StrictJSONError("not an object")
    return value


def dumps(value: Any) -> bytes:
    """Compact UTF-8 JSON; NaN is refused and lone surrogates are escaped, so it always parses."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


class Members:
    """Takes the members of a parsed object one by one; `fail` makes the caller's own error."""

    def __init__(self, value: dict[str, Any], fail: Callable[[str], Exception]) -> None:
        self._left = dict(value)
        self._fail = fail

    def take(self, name: str, kind: type[T], default: T | None = None) -> T:
        """The member `name`, which must be exactly of `kind` (so a bool is no int)."""
        value = self._left.pop(name, default)
        if type(value) is not kind:
            raise self._fail(f"member {name} must be {kind.__name__}")
        return value

    def integer(self, name: str, low: int = 0, high: int = MAX_INTEGER) -> int:
        """An integer within bounds."""
        value = self.take(name, int)
        if not low <= value <= high:
            raise self._fail(f"member {name} must be between {low} and {high}")
        return value

    def text(self, name: str, max_chars: int, default: str | None = None) -> str:
        """A string of at most `max_chars` that can be encoded as UTF-8 and holds no NUL."""
        value = self.take(name, str, default)
        if len(value) > max_chars or "\0" in value or not _encodable(value):
            raise self._fail(f"member {name} must be clean text of at most {max_chars} characters")
        return value

    def optional_text(self, name: str, max_chars: int) -> str | None:
        """Like `text`, but null or absent is None."""
        if self._left.get(name) is None:
            self._left.pop(name, None)
            return None
        return self.text(name, max_chars)

    def end(self) -> None:
        """Refuse members that nobody asked for."""
        if self._left:
            raise self._fail(f"unknown member {ascii(sorted(self._left)[0])[:80]}")


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
