"""Frames of the link: one per binary WebSocket message.

The first byte is the type.  CHALLENGE, HELLO, WELCOME and REFUSE are described in `hello`.
DATA and ACK share a header of 48 bytes, big endian:

    type u8 | flags u8 | lane u8 | 0 u8 | stream u32 | sequence u64
    received[URGENT] u64 | received[ORDERED] u64 | consumed[URGENT] u64 | consumed[ORDERED] u64

`sequence` numbers the DATA frames of a lane from 1.  `received` is the highest sequence that
the writer of the frame has received without a hole; `consumed` is how many *messages* its
application has consumed.  Both are cumulative, so a lost or repeated acknowledgement is
harmless.  `stream` names the attachment the numbers belong to (see `link`).
An ACK has sequence 0, lane 0, no flags and no payload.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from kernel_guest.shared.errors import Fault, LinkProtocolError

FIRST = 1
LAST = 2
COMPRESSED = 4
_ALL_FLAGS = FIRST | LAST | COMPRESSED

_HEADER = Struct("!BBBBIQQQQQ")
HEADER_BYTES = _HEADER.size
LANES = 2

Pair = tuple[int, int]
"""One number per lane, indexed by `Lane`."""


class FrameType(IntEnum):
    """First byte of a frame."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSE = 4
    DATA = 5
    ACK = 6


DATA = int(FrameType.DATA)
ACK = int(FrameType.ACK)


class Frame(NamedTuple):
    """A decoded DATA or ACK frame; `payload` is a view into what was received."""

    type: int
    flags: int
    lane: int
    stream: int
    sequence: int
    received: Pair
    consumed: Pair
    payload: memoryview


def encode_header(
    frame_type: int,
    flags: int,
    lane: int,
    stream: int,
    sequence: int,
    received: Pair,
    consumed: Pair,
) -> bytes:
    """Header of a DATA or ACK frame."""
    return _HEADER.pack(frame_type, flags, lane, 0, stream, sequence, *received, *consumed)


def decode_frame(data: bytes | memoryview, max_payload_bytes: int) -> Frame:
    """Take a DATA or ACK frame apart; raises `LinkProtocolError` for anything else."""
    view = memoryview(data)
    payload_bytes = len(view) - HEADER_BYTES
    if payload_bytes < 0:
        raise LinkProtocolError(Fault.BAD_FRAME, "shorter than its header")
    if payload_bytes > max_payload_bytes:
        raise LinkProtocolError(Fault.TOO_LARGE, f"payload of {payload_bytes} bytes")
    kind, flags, lane, zero, stream, sequence, r0, r1, c0, c1 = _HEADER.unpack_from(view)
    if zero or lane >= LANES or flags & ~_ALL_FLAGS:
        raise LinkProtocolError(Fault.BAD_FRAME, "undefined header bits")
    if kind == DATA:
        if not sequence or not payload_bytes:
            raise LinkProtocolError(Fault.BAD_FRAME, "data without sequence or payload")
    elif kind != ACK or sequence or flags or lane or payload_bytes:
        raise LinkProtocolError(Fault.BAD_FRAME, "neither data nor acknowledgement")
    return Frame(kind, flags, lane, stream, sequence, (r0, r1), (c0, c1), view[HEADER_BYTES:])
