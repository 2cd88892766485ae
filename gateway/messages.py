"""Jupyter message layouts: what is read, what is composed, and who gets a reply.

On a ZMQ socket a message is a list of frames:

    identity*  <IDS|MSG>  signature  header  parent_header  metadata  content  buffer*

Everything after the delimiter is called *parts* here. Parts travel unchanged between a client and
its kernel, under one signature made with one key (JK 1.3), so nothing in this module re-encodes a
message: it reads headers, and it composes the few messages that the gateway itself has to say.

Headers are read with a size limit, because a guest may send anything; content is read by nobody
here. A message that breaks the layout raises :class:`MalformedMessage`, and the caller drops it
with a log line: one bad message of one client must not end a door.

``ReplyRoutes`` is the memory of who asked what. Its bound: ``limit`` requests without a reply and
``answered_limit`` with one (a late ``input_request`` of a thread still finds its client). When
full, the oldest request is forgotten, and its reply goes to the client that its session id names
(Jupyter clients use their session id as ZMQ identity), which is right for all but browsers behind a
server.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from gateway.errors import RemoteFault

__all__ = [
    "DELIMITER",
    "EMPTY_JSON",
    "Composer",
    "Header",
    "MalformedMessage",
    "ReplyRoutes",
    "Signer",
    "content_of",
    "frames_of",
    "header_of",
    "parent_of",
    "size_of",
    "split_frames",
]

DELIMITER: Final = b"<IDS|MSG>"
EMPTY_JSON: Final = b"{}"
#: Signature, header, parent header, metadata, content.
FIXED_PARTS: Final = 5
#: A header holds six short strings; ours are below 300 bytes. Guards against a hostile guest.
MAX_HEADER_BYTES: Final = 65_536
#: jupyter_client 8.10 speaks and writes this version in every header.
PROTOCOL_VERSION: Final = "5.4"


class MalformedMessage(RemoteFault):
    """A message that does not have the layout above; ``problem`` says where."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"A Jupyter message is malformed: {problem}.")
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a header that routing needs; empty strings where absent."""

    msg_id: str = ""
    msg_type: str = ""
    session: str = ""

    @property
    def key(self) -> str:
        """What names a request among all clients of a kernel.

        The id alone does not: jupyter_client gives each client a clone of the manager's Session
        that counts from zero again, so a manager's shutdown_request bears the id of its client's
        first cell (seen with 8.10, 2026-11-30).
        """
        return f"{self.msg_type}:{self.msg_id}"


# -- reading ------------------------------------------------------------------


def split_frames(frames: Sequence[bytes]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Cut a ZMQ message into (identities, parts). Raises ``MalformedMessage``."""
    try:
        cut = frames.index(DELIMITER)
    except ValueError:
        raise MalformedMessage("the delimiter is missing") from None
    parts = tuple(frames[cut + 1 :])
    if len(parts) < FIXED_PARTS:
        raise MalformedMessage(f"{len(parts)} parts instead of at least {FIXED_PARTS}")
    return tuple(frames[:cut]), parts


def frames_of(identities: Sequence[bytes], parts: Sequence[bytes]) -> list[bytes]:
    """The inverse of :func:`split_frames`."""
    return [*identities, DELIMITER, *parts]


def header_of(parts: Sequence[bytes]) -> Header:
    """Read the message's own header. Raises ``MalformedMessage``."""
    return _read_header(parts, 1, "header")


def parent_of(parts: Sequence[bytes]) -> Header:
    """Read the parent header; empty fields when it has none. Raises ``MalformedMessage``."""
    return _read_header(parts, 2, "parent header")


def content_of(parts: Sequence[bytes]) -> dict[str, Any]:
    """Decode the content of a small message. Raises ``MalformedMessage``."""
    return _read_object(parts, 4, "content")


def size_of(parts: Sequence[bytes]) -> int:
    """Bytes of all parts: the unit of every queue bound and credit."""
    return sum(map(len, parts))


def _read_header(parts: Sequence[bytes], index: int, name: str) -> Header:
    if len(parts) < FIXED_PARTS:
        raise MalformedMessage(f"{len(parts)} parts instead of at least {FIXED_PARTS}")
    raw = parts[index]
    if len(raw) > MAX_HEADER_BYTES:
        raise MalformedMessage(f"the {name} has {len(raw)} bytes")
    return _small_header(bytes(raw), name) if len(raw) <= SMALL_BYTES else _header(raw, name)


def _header(raw: bytes, name: str) -> Header:
    fields = _parse_object(raw, name)
    return Header(*(_text(fields, key, name) for key in ("msg_id", "msg_type", "session")))


# Every message that a cell causes bears the same parent header, and each is looked at by the door
# and by the session: 12 parses for a cell without this, 5 with it. At most 256 x 1 KiB.
SMALL_BYTES = 1024
_small_header = functools.lru_cache(maxsize=256)(_header)


def _read_object(parts: Sequence[bytes], index: int, name: str) -> dict[str, Any]:
    if len(parts) < FIXED_PARTS:
        raise MalformedMessage(f"{len(parts)} parts instead of at least {FIXED_PARTS}")
    return _parse_object(parts[index], name)


def _parse_object(raw: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"the {name} is not JSON") from error
    if not isinstance(value, dict):
        raise MalformedMessage(f"the {name} is not an object")
    return value


def _text(fields: Mapping[str, Any], key: str, name: str) -> str:
    value = fields.get(key, "")
    if not isinstance(value, str):
        raise MalformedMessage(f"{key} in the {name} is not a string")
    return value


# -- signing and composing ----------------------------------------------------


class Signer:
    """HMAC over header, parent header, metadata and content, as Jupyter's ``Session`` does it.

    An empty key means that messages are not authenticated; then every signature is empty and
    :meth:`accepts` says yes, as in jupyter_client.
    """

    def __init__(self, key: bytes, scheme: str = "hmac-sha256") -> None:
        kind, _, digest = scheme.partition("-")
        if kind != "hmac" or digest not in hashlib.algorithms_available:
            raise MalformedMessage(f"signature scheme {scheme!r} is not known")
        self._auth = hmac.new(key, digestmod=digest) if key else None

    def __repr__(self) -> str:
        return f"<Signer {'on' if self._auth else 'off'}>"

    def sign(self, four: Sequence[bytes]) -> bytes:
        """The signature of (header, parent_header, metadata, content), or ``b""``."""
        if self._auth is None:
            return b""
        digest = self._auth.copy()
        for part in four:
            digest.update(part)
        return digest.hexdigest().encode()

    def accepts(self, parts: Sequence[bytes]) -> bool:
        """Whether the first part is the signature of the next four. Constant time."""
        if self._auth is None:
            return True
        return hmac.compare_digest(parts[0], self.sign(parts[1:FIXED_PARTS]))


class Composer:
    """Composes signed messages in the name of the kernel.

    ``session`` is the kernel's own session id as far as it is known: a client may drop what comes
    from a foreign one (JK trap 9). Who calls: the door for welcomes and local answers.
    """

    def __init__(self, signer: Signer, session: str = "", username: str = "kernel") -> None:
        self._signer = signer
        self.session = session or uuid.uuid4().hex
        self._username = username

    def compose(
        self,
        msg_type: str,
        content: Mapping[str, Any],
        *,
        now_s: float,
        parent_header: bytes = EMPTY_JSON,
    ) -> tuple[bytes, ...]:
        """The parts of a new message; ``now_s`` is wall time, ``parent_header`` is copied raw."""
        header = {
            "msg_id": uuid.uuid4().hex,
            "msg_type": msg_type,
            "username": self._username,
            "session": self.session,
            "date": _timestamp(now_s),
            "version": PROTOCOL_VERSION,
        }
        four = (_dump(header), parent_header, EMPTY_JSON, _dump(content))
        return (self._signer.sign(four), *four)


def _dump(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _timestamp(now_s: float) -> str:
    """ISO 8601 with six digits and Z: without a fraction some clients fail (JK trap 13)."""
    return datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# -- who gets the reply -------------------------------------------------------


class ReplyRoutes:
    """Which ZMQ identity asked which request: a bounded memory (see the module's header)."""

    def __init__(self, limit: int = 20_000, answered_limit: int = 1_000) -> None:
        self._waiting: OrderedDict[str, bytes] = OrderedDict()
        self._answered: OrderedDict[str, bytes] = OrderedDict()
        self._limit = limit
        self._answered_limit = answered_limit
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._answered)

    def __repr__(self) -> str:
        return f"<ReplyRoutes waiting={len(self._waiting)} forgotten={self.forgotten}>"

    def asked(self, request: Header, identity: bytes) -> None:
        """A client sent the request with this header."""
        self._waiting[request.key] = identity
        if len(self._waiting) > self._limit:
            self._waiting.popitem(last=False)
            self.forgotten += 1

    def asker(self, parent: Header) -> bytes | None:
        """Who should get a message with this parent; ``None`` when nobody can be named."""
        known = self._waiting.get(parent.key) or self._answered.get(parent.key)
        return known or parent.session.encode() or None

    def answered(self, parent: Header) -> bytes | None:
        """Like :meth:`asker`, for the reply that ends the request."""
        identity = self.asker(parent)
        if self._waiting.pop(parent.key, None) and identity:
            self._answered[parent.key] = identity
            if len(self._answered) > self._answered_limit:
                self._answered.popitem(last=False)
        return identity
