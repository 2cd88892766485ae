"""The handshake, as values and pure judgement.

    guest   -> CHALLENGE  versions, features, nonce, boot id
    gateway -> HELLO      version, features, who it is, what it has, its limits; signed
    guest   -> WELCOME    what it has, its limits, the stream          or  REFUSE code, text

Bodies are JSON objects of at most 16 KiB after the type byte; members that are not known are
ignored here, because a later version may add some.  HELLO is
``type | u16 length | body | signature``.  The gateway signs

    DOMAIN | u32 length | challenge frame | u32 length | hello body

so the signature covers nonce, boot id, kernel session, generation, epoch, version and features
at once: nothing can be replayed to another boot, nor weakened on the way.  It is Ed25519, made
and checked by injected callables; the guest knows only the public key, because notebook code can
reach the agent's port and read what the agent reads.

The guest checks the signature before it compares anything else, so a stranger learns nothing
about session, generation or epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from struct import Struct
from typing import Any

from kernel_guest.shared import strict
from kernel_guest.shared.errors import MAX_ERROR_TEXT, Fault, LinkProtocolError
from kernel_guest.shared.frames import FrameType, Pair
from kernel_guest.shared.limits import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, LinkLimits

VERSIONS: Pair = (1, 1)
"""Lowest and highest protocol version that this release speaks."""

DOMAIN = b"microvm-kernel-gateway link hello v1\0"
COMPRESSION_FEATURE = "compress:"
MAX_HANDSHAKE_BYTES = 16 * 1024
MAX_SIGNATURE_BYTES = 1024
NONCE_BYTES = 32
MAX_NAME_CHARS = 128
MAX_FEATURES = 32

_LENGTH16 = Struct("!H")
_LENGTH32 = Struct("!I")


class RefusalCode(StrEnum):
    """Why a handshake ends."""

    BAD_SIGNATURE = "bad_signature"
    STALE_EPOCH = "stale_epoch"
    STALE_GENERATION = "stale_generation"
    STALE_STREAM = "stale_stream"
    WRONG_SESSION = "wrong_session"
    NO_COMMON_VERSION = "no_common_version"
    NOT_RUNNING = "not_running"


REFUSAL_TEXTS = {
    RefusalCode.BAD_SIGNATURE: "the signature does not verify with the key of the run payload",
    RefusalCode.STALE_EPOCH: "a gateway with a newer lease has been here",
    RefusalCode.STALE_GENERATION: "this machine is another generation of the kernel session",
    RefusalCode.STALE_STREAM: "another gateway attached afresh; these numbers are of the past",
    RefusalCode.WRONG_SESSION: "this machine carries another kernel session",
    RefusalCode.NO_COMMON_VERSION: "no protocol version in common",
    RefusalCode.NOT_RUNNING: "the machine has not been given an identity yet",
}


@dataclass(frozen=True, slots=True)
class LinkIdentity:
    """Who this side is.  `boot_id` is the guest's only; a guest before `/run` has no session."""

    kernel_session: str = ""
    generation: int = 0
    epoch: int = 0
    boot_id: str = ""


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """What the other side declared that it takes."""

    chunk_bytes: int
    message_bytes: int
    parts: int
    windows: Pair


@dataclass(frozen=True, slots=True)
class Challenge:
    """First words of the guest."""

    versions: Pair
    features: tuple[str, ...]
    nonce: str
    boot_id: str


@dataclass(frozen=True, slots=True)
class Hello:
    """The gateway's answer.  `stream` None means fresh: it has no state of an earlier stream."""

    version: int
    features: tuple[str, ...]
    kernel_session: str
    generation: int
    epoch: int
    stream: int | None
    received: Pair
    limits: PeerLimits


@dataclass(frozen=True, slots=True)
class Welcome:
    """The guest's yes: the stream, what it has received of it and where its own frames begin.

    `nonce` is that of the challenge, so that a WELCOME cannot be taken for that of another
    socket.
    """

    nonce: str
    stream: int
    received: Pair
    first_kept: Pair
    limits: PeerLimits


def common_version(mine: Pair, other: Pair) -> int | None:
    """The highest version both speak."""
    best = min(mine[1], other[1])
    return best if best >= max(mine[0], other[0]) else None


def judge(hello: Hello, guest: LinkIdentity, signature_ok: bool) -> RefusalCode | None:
    """Why `guest` must refuse `hello`; None if it may not."""
    if not guest.kernel_session:
        return RefusalCode.NOT_RUNNING
    if not signature_ok:
        return RefusalCode.BAD_SIGNATURE
    if not VERSIONS[0] <= hello.version <= VERSIONS[1]:
        return RefusalCode.NO_COMMON_VERSION
    if hello.kernel_session != guest.kernel_session:
        return RefusalCode.WRONG_SESSION
    if hello.generation != guest.generation:
        return RefusalCode.STALE_GENERATION
    return RefusalCode.STALE_EPOCH if hello.epoch < guest.epoch else None


def transcript(challenge_frame: bytes, hello_body: bytes) -> bytes:
    """What the gateway signs."""
    pieces = [DOMAIN]
    for piece in (challenge_frame, hello_body):
        pieces += (_LENGTH32.pack(len(piece)), piece)
    return b"".join(pieces)


# --- encoding


def encode_challenge(challenge: Challenge) -> bytes:
    """CHALLENGE frame."""
    return _frame(
        FrameType.CHALLENGE,
        {
            "versions": challenge.versions,
            "features": challenge.features,
            "nonce": challenge.nonce,
            "boot_id": challenge.boot_id,
        },
    )


def encode_hello_body(hello: Hello) -> bytes:
    """Body of a HELLO, which is what gets signed."""
    return strict.dumps(
        {
            "version": hello.version,
            "features": hello.features,
            "kernel_session": hello.kernel_session,
            "generation": hello.generation,
            "epoch": hello.epoch,
            "fresh": hello.stream is None,
            "stream": hello.stream or 0,
            "received": hello.received,
            "limits": _limits_json(hello.limits),
        }
    )


def encode_hello(body: bytes, signature: bytes) -> bytes:
    """HELLO frame of a body and its signature."""
    return bytes((FrameType.HELLO,)) + _LENGTH16.pack(len(body)) + body + signature


def encode_welcome(welcome: Welcome) -> bytes:
    """WELCOME frame."""
    return _frame(
        FrameType.WELCOME,
        {
            "nonce": welcome.nonce,
            "stream": welcome.stream,
            "received": welcome.received,
            "first_kept": welcome.first_kept,
            "limits": _limits_json(welcome.limits),
        },
    )


def encode_refuse(code: RefusalCode) -> bytes:
    """REFUSE frame."""
    return _frame(FrameType.REFUSE, {"code": code.value, "text": REFUSAL_TEXTS[code]})


def declared(limits: LinkLimits) -> PeerLimits:
    """Our limits, as the other side will see them."""
    return PeerLimits(limits.chunk_bytes, limits.message_bytes, limits.parts, limits.windows)


def _frame(frame_type: FrameType, body: dict[str, Any]) -> bytes:
    return bytes((frame_type,)) + strict.dumps(body)


def _limits_json(limits: PeerLimits) -> dict[str, Any]:
    return {
        "chunk_bytes": limits.chunk_bytes,
        "message_bytes": limits.message_bytes,
        "parts": limits.parts,
        "windows": limits.windows,
    }


# --- decoding: raises LinkProtocolError and nothing else


def decode_challenge(data: bytes) -> Challenge:
    """Parse a CHALLENGE frame."""
    found = _members(data[1:])
    return Challenge(
        versions=_pair(found, "versions"),
        features=_features(found),
        nonce=found.text("nonce", MAX_NAME_CHARS),
        boot_id=found.text("boot_id", MAX_NAME_CHARS),
    )


def split_hello(data: bytes) -> tuple[bytes, bytes]:
    """Body and signature of a HELLO frame."""
    if not 3 <= len(data) <= MAX_HANDSHAKE_BYTES:
        raise _bad("HELLO of impossible length")
    (length,) = _LENGTH16.unpack_from(data, 1)
    body, signature = data[3 : 3 + length], data[3 + length :]
    if len(body) != length or len(signature) > MAX_SIGNATURE_BYTES:
        raise _bad("HELLO cut short, or an endless signature")
    return body, signature


def decode_hello(body: bytes) -> Hello:
    """Parse the body of a HELLO."""
    found = _members(body)
    stream = found.integer("stream", 0, 2**32 - 1)
    return Hello(
        version=found.integer("version"),
        features=_features(found),
        kernel_session=found.text("kernel_session", MAX_NAME_CHARS),
        generation=found.integer("generation"),
        epoch=found.integer("epoch"),
        stream=None if found.take("fresh", bool) else stream,
        received=_pair(found, "received"),
        limits=_peer_limits(found),
    )


def decode_welcome(data: bytes) -> Welcome:
    """Parse a WELCOME frame."""
    found = _members(data[1:])
    return Welcome(
        nonce=found.text("nonce", MAX_NAME_CHARS),
        stream=found.integer("stream", 1, 2**32 - 1),
        received=_pair(found, "received"),
        first_kept=_pair(found, "first_kept"),
        limits=_peer_limits(found),
    )


def decode_refuse(data: bytes) -> tuple[str, str]:
    """Code and text of a REFUSE frame; the code may be one that this release does not know."""
    found = _members(data[1:])
    return found.text("code", MAX_NAME_CHARS), found.text("text", MAX_ERROR_TEXT)


def _bad(detail: str) -> LinkProtocolError:
    return LinkProtocolError(Fault.BAD_HANDSHAKE, detail)


def _members(body: bytes) -> strict.Members:
    try:
        return strict.Members(strict.loads_object(body, MAX_HANDSHAKE_BYTES), _bad)
    except strict.StrictJSONError as error:
        raise _bad(str(error)) from error


def _pair(found: strict.Members, name: str) -> Pair:
    numbers = found.take(name, list)
    if len(numbers) != 2 or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise _bad(f"{name} must be two numbers")
    return (numbers[0], numbers[1])


def _features(found: strict.Members) -> tuple[str, ...]:
    features = found.take("features", list)
    if len(features) > MAX_FEATURES or not all(
        type(name) is str and len(name) <= MAX_NAME_CHARS for name in features
    ):
        raise _bad("features must be short names")
    return tuple(features)


def _peer_limits(found: strict.Members) -> PeerLimits:
    inner = strict.Members(found.take("limits", dict), _bad)
    return PeerLimits(
        chunk_bytes=inner.integer("chunk_bytes", MIN_CHUNK_BYTES, MAX_CHUNK_BYTES),
        message_bytes=inner.integer("message_bytes", 1, 2**31),
        parts=inner.integer("parts", 1, 65_535),
        windows=_pair(inner, "windows"),
    )
