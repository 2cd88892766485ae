"""The few things the guest reads in, or writes as, a Jupyter message.  Pure.

A message is `(signature, header, parent_header, metadata, content, *buffers)`.  A kernel
may send nonsense; reading it gives None, never an error.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

__all__ = [
    "CONTENT",
    "HEADER",
    "PARENT",
    "Signer",
    "compose",
    "is_type",
    "make_signer",
    "member",
    "request_key",
    "text",
    "type_and_id",
    "unknown_outcome",
]

HEADER, PARENT, METADATA, CONTENT = 1, 2, 3, 4

Signer = Callable[[Sequence[bytes]], bytes]
"""Signature, as sent, over header, parent header, metadata and content."""

# jupyter_client 8.10 `protocol_version`, 2026-11-30.
_PROTOCOL_VERSION = "5.5"


def member(part: bytes, name: str) -> Any:
    """A member of a JSON object; None if it is not there or the part is no object."""
    try:
        value = json.loads(part)
    except ValueError:
        return None
    return value.get(name) if isinstance(value, dict) else None


def text(part: bytes, name: str) -> str:
    """Like `member`, but a string; empty for anything else."""
    value = member(part, name)
    return value if isinstance(value, str) else ""


def request_key(header: bytes) -> str:
    """What names a request: type and id of its header, or of the parent header that echoes it.

    The id alone does not: jupyter_client gives each client a clone of the manager's Session that
    counts from zero again, so a manager's shutdown_request bears the id of its client's first
    cell (seen with 8.10, 2026-11-30).  Empty without an id.
    """
    msg_type, msg_id = type_and_id(header)
    return f"{msg_type}:{msg_id}" if msg_id else ""


def type_and_id(header: bytes) -> tuple[str, str]:
    """Both, parsed once: it is done for every request.  Empty where they are no text."""
    try:
        value = json.loads(header)
    except ValueError:
        return "", ""
    if not isinstance(value, dict):
        return "", ""
    msg_type, msg_id = value.get("msg_type"), value.get("msg_id")
    return msg_type if isinstance(msg_type, str) else "", msg_id if isinstance(msg_id, str) else ""


def is_type(header: bytes, msg_type: str) -> bool:
    """Whether a header bears this message type.

    Parses.  On a hot path look for the type in the raw bytes first: that is 20 times as
    fast, and on iopub nearly every message is something else.
    """
    return bool(member(header, "msg_type") == msg_type)


def make_signer(key: bytes, scheme: str) -> Signer:
    """The signer of a Session with this key; raises ValueError for an unknown scheme.

    An empty key means that nothing is signed, as in jupyter_client.
    """
    family, _, digest = scheme.partition("-")
    if family != "hmac" or digest not in hashlib.algorithms_available:
        raise ValueError(f"signature scheme {scheme[:40]!r} is not supported")

    def sign(parts: Sequence[bytes]) -> bytes:
        if not key:
            return b""
        return hmac.new(key, b"".join(parts), digest).hexdigest().encode()

    return sign


def compose(sign: Signer, msg_type: str, parent: bytes, content: dict[str, Any]) -> list[bytes]:
    """A signed message of the guest's own making, as an answer to `parent`."""
    header = {
        "msg_id": uuid.uuid4().hex,
        "msg_type": msg_type,
        "session": "kernel-guest",
        "username": "kernel",
        "date": datetime.now(UTC).isoformat(),
        "version": _PROTOCOL_VERSION,
    }
    signed = [json.dumps(header).encode(), parent, b"{}", json.dumps(content).encode()]
    return [sign(signed), *signed]


def unknown_outcome(sign: Signer, request_header: bytes) -> tuple[list[bytes], list[bytes]]:
    """Reply and idle for a repeated request whose ending the guest no longer knows."""
    msg_type = text(request_header, "msg_type").removesuffix("_request")
    error = {
        "status": "error",
        "ename": "OutcomeUnknown",
        "evalue": "The request was given to the kernel before; how it ended is not known.",
        "traceback": [],
    }
    reply = compose(sign, f"{msg_type}_reply", request_header, error)
    return reply, compose(sign, "status", request_header, {"execution_state": "idle"})
