"""From an operation's output to the bytes of an HTTP answer.

Bodies spell out unset members as null and carry members that the model does not
have (LM 2); timestamps are epoch seconds as JSON numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from botocore.model import Shape

from gateway.local.behaviours import implements


@implements("body-null-members", "body-epoch-numbers")
def output_body(shape: Shape | None, values: Mapping[str, Any]) -> bytes:
    """The JSON body: every member of the shape, unset ones null, extra ones as they are."""
    if shape is None:
        return b""
    document = {name: None for name, member in shape.members.items() if _in_body(member)}
    document.update(values)
    return json.dumps(document, separators=(",", ":")).encode()


@implements("error-type-header")
def error_answer(
    shape: Shape, message: str | None, members: Mapping[str, Any]
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a modelled error."""
    headers = {"x-amzn-ErrorType": shape.name}
    body: dict[str, Any] = {}
    for name, member in shape.members.items():
        value = message if name == "message" else members.get(name)
        if _in_body(member):
            body[name] = value
        elif value is not None:
            headers[member.serialization["name"]] = str(value)
    return shape.metadata["error"]["httpStatusCode"], headers, json.dumps(body).encode()


def plain_error(code: str, message: str | None) -> tuple[dict[str, str], bytes]:
    """Headers and body of an error that the model does not have (signatures)."""
    return {"x-amzn-ErrorType": code}, json.dumps({"message": message}).encode()


def _in_body(member: Shape) -> bool:
    return member.serialization.get("location") is None
