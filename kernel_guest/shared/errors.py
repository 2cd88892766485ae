"""What can go wrong between gateway and guest, as one tree of facts.

    SharedError
    ├── LinkError
    │   ├── LinkProtocolError   the peer broke the protocol: close the socket, state is kept
    │   ├── LinkFull            local: the send queue of a lane is at its bound
    │   ├── MessageRefused      local: a message above the size or part cap
    │   └── LinkRefused         the guest refused the handshake, with a typed code
    ├── PathRefused             a name that may not be used below a root
    ├── PayloadError            a run payload that does not validate
    └── ManifestError           a manifest that does not validate

Each error stores facts and composes its sentence from them, so that a caller branches on
`code` and never on prose.  `error_body` is the one JSON shape in which any of them, or an
error of the agent, travels: ``{"error": {"code", "message"}}``.
"""

# ruff: noqa: N818  # the names say what happened; a suffix on each would say nothing more

from __future__ import annotations

import json
from enum import StrEnum

MAX_ERROR_TEXT = 500
"""Characters of a peer's text that are kept: enough for a sentence, too few for a flood."""


class SharedError(Exception):
    """Base of the tree; never raised itself."""

    code: str = "error"


class LinkError(SharedError):
    """Anything that concerns the link."""

    code = "link_error"


class Fault(StrEnum):
    """Ways in which a peer can break the protocol."""

    BAD_FRAME = "bad_frame"
    BAD_HANDSHAKE = "bad_handshake"
    UNEXPECTED = "unexpected_frame"
    OUT_OF_ORDER = "out_of_order"
    BAD_ACKNOWLEDGEMENT = "bad_acknowledgement"
    CREDIT_EXCEEDED = "credit_exceeded"
    TOO_LARGE = "too_large"
    BAD_MESSAGE = "bad_message"
    BAD_COMPRESSION = "bad_compression"


class LinkProtocolError(LinkError):
    """The peer sent what the protocol forbids.

    Raised by the decoder and by `LinkCore.receive_frame`.  The caller closes the socket and
    connects again: sequence numbers and kept messages are as they were before the frame.
    """

    def __init__(self, fault: Fault, detail: str = "") -> None:
        self.fault = fault
        self.detail = detail
        super().__init__(f"link protocol: {fault.value}{': ' if detail else ''}{detail}")

    @property
    def code(self) -> str:  # type: ignore[override]
        """The fault, as the code of the JSON error shape."""
        return self.fault.value


class LinkFull(LinkError):
    """`LinkCore.send` was called although the queue of that lane is at its bound."""

    code = "link_full"

    def __init__(self, lane: str, queued_bytes: int, limit_bytes: int) -> None:
        self.lane = lane
        self.queued_bytes = queued_bytes
        self.limit_bytes = limit_bytes
        super().__init__(f"link queue {lane} holds {queued_bytes} of {limit_bytes} bytes")


class MessageRefused(LinkError):
    """A message that the link will not carry: too many bytes or too many parts."""

    code = "message_refused"

    def __init__(self, what: str, amount: int, limit: int) -> None:
        self.what = what
        self.amount = amount
        self.limit = limit
        super().__init__(f"message has {amount} {what}, the link carries at most {limit}")


class LinkRefused(LinkError):
    """The handshake ended in a refusal; `code` is one of `hello.RefusalCode`."""

    def __init__(self, code: str, text: str) -> None:
        self.code = code
        self.text = text[:MAX_ERROR_TEXT]
        super().__init__(f"link refused ({code}): {self.text}")


class PathRefused(SharedError):
    """A path from the other side that may not be used.  The path is shown escaped and cut."""

    code = "path_refused"

    def __init__(self, path: str, reason: str) -> None:
        self.path = path[:MAX_ERROR_TEXT]
        self.reason = reason
        super().__init__(f"path {self.path[:80]!a} refused: {reason}")


class PayloadError(SharedError):
    """A run payload that cannot be encoded or does not validate."""

    code = "bad_payload"


class ManifestError(SharedError):
    """A manifest that does not validate."""

    code = "bad_manifest"


def error_body(code: str, message: str) -> dict[str, dict[str, str]]:
    """The one JSON error shape, as a value."""
    return {"error": {"code": code, "message": message[:MAX_ERROR_TEXT]}}


def encode_error(code: str, message: str) -> bytes:
    """The one JSON error shape, as the body of an HTTP answer."""
    return json.dumps(error_body(code, message)).encode()
