"""From an HTTP request to the input members of its operation.

Members are taken from the path, the query string and the JSON body as the input
shape says.  A body that is not JSON, or a member of the wrong JSON type, makes
the request unreadable (400 with a null message); what is readable but not
allowed is left for validation.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from botocore.model import Shape

from gateway.local.api.errors import UnreadableRequestError
from gateway.local.api.model import Match
from gateway.local.behaviours import implements

Members = dict[str, Any]

_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")


@implements("unparsable-400-null-message")
def parse_input(match: Match, query: str, body: bytes) -> Members:
    """The operation's input; absent and null members are left out.

    Raises UnreadableRequestError.
    """
    shape = match.operation.input_shape
    if shape is None:
        return {}
    document = read_document(body)
    pairs = _read_query(query)
    found: Members = {}
    for name, member in shape.members.items():
        value = _take(name, member, match.labels, pairs, document)
        if value is not None:
            found[name] = value
    return found


def _take(
    name: str,
    member: Shape,
    labels: Mapping[str, str],
    pairs: list[tuple[str, str]],
    document: Mapping[str, Any],
) -> Any:
    location = member.serialization.get("location")
    wire_name = member.serialization.get("name", name)
    if location == "uri":
        return labels.get(wire_name)
    if location == "querystring":
        return _from_query(member, [value for key, value in pairs if key == wire_name])
    return convert(member, document.get(wire_name))


def read_document(body: bytes) -> Mapping[str, Any]:
    """A body as a JSON object; no body is an empty one.  Raises UnreadableRequestError."""
    if not body:
        return {}
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise UnreadableRequestError from None
    if not isinstance(document, dict):
        raise UnreadableRequestError
    return document


def _read_query(query: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise UnreadableRequestError from None


def _from_query(member: Shape, values: list[str]) -> Any:
    if not values:
        return None
    if member.type_name == "list":
        return [_from_text(member.member, value) for value in values]
    return _from_text(member, values[-1])


def _from_text(member: Shape, text: str) -> Any:
    if member.type_name in ("integer", "long"):
        if not _INTEGER.fullmatch(text):
            raise UnreadableRequestError
        return int(text)
    if member.type_name == "boolean":
        if text not in ("true", "false"):
            raise UnreadableRequestError
        return text == "true"
    return text


def convert(shape: Shape, value: Any) -> Any:
    """A JSON value as the shape wants it; null stays None.  Raises UnreadableRequestError."""
    if value is None:
        return None
    return _CONVERTERS[shape.type_name](shape, value)


def _structure(shape: Shape, value: Any) -> Members:
    if not isinstance(value, dict):
        raise UnreadableRequestError
    found: Members = {}
    for name, member in shape.members.items():
        inner = convert(member, value.get(member.serialization.get("name", name)))
        if inner is not None:
            found[name] = inner
    return found


def _list(shape: Shape, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise UnreadableRequestError
    return [convert(shape.member, item) for item in value]


def _map(shape: Shape, value: Any) -> Members:
    if not isinstance(value, dict):
        raise UnreadableRequestError
    return {_encodable(key): convert(shape.value, item) for key, item in value.items()}


def _string(shape: Shape, value: Any) -> str:
    if not isinstance(value, str):
        raise UnreadableRequestError
    return _encodable(value)


def _encodable(text: str) -> str:
    """JSON can hold halves of surrogate pairs, which no file and no hook can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnreadableRequestError from None
    return text


def _integer(shape: Shape, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnreadableRequestError
    return value


def _boolean(shape: Shape, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UnreadableRequestError
    return value


_CONVERTERS: Mapping[str, Callable[[Shape, Any], Any]] = {
    "structure": _structure,
    "list": _list,
    "map": _map,
    "string": _string,
    "integer": _integer,
    "long": _integer,
    "boolean": _boolean,
}
