"""Messages to chunks and back.

A *unit* is one message, or several small ones of the same lane that fit into one chunk.  Its
body is a series of records:

    kind u8 | channel u8 | parts u16 | length u32 for each part | the parts

and its first chunk begins with a prefix:

    body bytes u32 | raw bytes u32 | messages u32 | parts u32

Body and raw bytes differ when the body is compressed as a whole (flag COMPRESSED), which is
done only if it becomes smaller.  A unit of several messages is always one single chunk; only
a single message spans many.

Copies of a large message: the sender slices views and joins each chunk with its header once;
the receiver keeps views of the frames and joins each part once.  Compression adds one on
either side.

The receiver believes nothing: every number of the prefix is checked against the limits before
a byte is kept, and against the body afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import NamedTuple

from kernel_guest.shared.credit import message_cost
from kernel_guest.shared.errors import Fault, LinkProtocolError
from kernel_guest.shared.frames import COMPRESSED, FIRST, LAST
from kernel_guest.shared.limits import LinkLimits
from kernel_guest.shared.messages import Channel, Kind, Lane, LinkMessage

Buffer = bytes | bytearray | memoryview
Chunk = tuple[Buffer, ...]
Compress = Callable[[bytes], bytes]
Decompress = Callable[[bytes, int], bytes]
"""Body and the number of bytes that it may inflate to at most.  Must stop there, with any
exception or with a result of another length.  Beware of python-zstandard: `max_output_size` does
not bound a frame that declares its content size, so compare `frame_content_size` first."""

_PREFIX = Struct("!IIII")
PREFIX_BYTES = _PREFIX.size
_RECORD = Struct("!BBH")
_RECORD_BYTES = _RECORD.size
_LENGTH_BYTES = 4
_MERGE_BELOW_BYTES = 4096

_COMMON_PARTS = 16
_HEADS = tuple(Struct(f"!BBH{count}I") for count in range(_COMMON_PARTS))
_LENGTHS = tuple(Struct(f"!{count}I") for count in range(_COMMON_PARTS))
"""Ready-made formats for the usual part counts; building one costs as much as using it."""

ALL_KINDS = frozenset(Kind)
_CHANNELS = {int(channel): channel for channel in Channel}
_LANES = {int(lane): lane for lane in Lane}
_JUPYTER, _NONE = Kind.JUPYTER, Channel.NONE


class Prefix(NamedTuple):
    """What the first chunk of a unit declares."""

    body_bytes: int
    raw_bytes: int
    messages: int
    parts: int

    @property
    def cost(self) -> int:
        """Cost of the unit in terms of `credit`."""
        size = self.raw_bytes - _RECORD_BYTES * self.messages - _LENGTH_BYTES * self.parts
        return message_cost(size, self.messages, self.parts)


def cost_of(message: LinkMessage) -> int:
    """Cost of one message in terms of `credit`."""
    return message_cost(message.size_bytes, 1, len(message.parts))


def record_bytes(message: LinkMessage, cost: int) -> int:
    """Bytes of the record of a message of known cost."""
    parts = len(message.parts)
    return cost - message_cost(0, 1, parts) + _RECORD_BYTES + _LENGTH_BYTES * parts


# --- sending


def pack(
    messages: Sequence[LinkMessage],
    chunk_bytes: int,
    compress: Compress | None,
    compress_above_bytes: int,
) -> tuple[int, list[Chunk]]:
    """Make a unit of `messages`: its flags (COMPRESSED or 0) and its chunks."""
    buffers: list[Buffer] = []
    for message in messages:
        buffers.append(_record_head(message))
        buffers.extend(message.parts)
    raw_bytes = body_bytes = sum(map(len, buffers))
    flags = 0
    if compress is not None and raw_bytes > compress_above_bytes:
        smaller = compress(b"".join(buffers))
        if len(smaller) < raw_bytes:
            buffers, body_bytes, flags = [smaller], len(smaller), COMPRESSED
    parts = sum(len(message.parts) for message in messages)
    buffers.insert(0, _PREFIX.pack(body_bytes, raw_bytes, len(messages), parts))
    if PREFIX_BYTES + body_bytes <= chunk_bytes:
        return flags, [tuple(buffers)]
    return flags, split(buffers, chunk_bytes)


def _record_head(message: LinkMessage) -> bytes:
    parts = message.parts
    count = len(parts)
    layout = _HEADS[count] if count < _COMMON_PARTS else Struct(f"!BBH{count}I")
    return layout.pack(message.kind, message.channel, count, *map(len, parts))


def split(buffers: Sequence[Buffer], chunk_bytes: int) -> list[Chunk]:
    """Cut a series of buffers into chunks of `chunk_bytes`, without copying."""
    chunks: list[Chunk] = []
    current: list[Buffer] = []
    room = chunk_bytes
    for buffer in buffers:
        view = memoryview(buffer)
        while len(view) > room:
            chunks.append((*current, view[:room]))
            view = view[room:]
            current, room = [], chunk_bytes
        current.append(view)
        room -= len(view)
    chunks.append(tuple(current))
    return chunks


# --- receiving


class Assembler:
    """Puts the chunks of one lane together.  A chunk that raises has changed nothing."""

    def __init__(
        self,
        lane: int,
        limits: LinkLimits,
        decompress: Decompress | None,
        kinds: frozenset[Kind] = ALL_KINDS,
    ) -> None:
        """`kinds` are those that this side takes; any other is an error of the peer."""
        self._lane = _LANES[lane]
        self._kinds = {int(kind): kind for kind in kinds}
        self._limits = limits
        self._decompress = decompress
        self._prefix: Prefix | None = None
        self._flags = 0
        self._chunks: list[Buffer] = []
        self._got_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of an incomplete message."""
        return self._got_bytes

    def announced(self, flags: int, payload: memoryview) -> Prefix | None:
        """The checked prefix of the unit that this chunk begins; None if it continues one."""
        if not flags & FIRST:
            if self._prefix is None or flags & COMPRESSED != self._flags:
                raise LinkProtocolError(Fault.BAD_FRAME, "continues nothing")
            return None
        if self._prefix is not None or len(payload) < PREFIX_BYTES:
            raise LinkProtocolError(Fault.BAD_FRAME, "begins amid a message")
        prefix = Prefix._make(_PREFIX.unpack_from(payload))
        self._check_prefix(prefix, flags)
        return prefix

    def add(self, flags: int, payload: memoryview, prefix: Prefix | None) -> list[LinkMessage]:
        """Take a chunk, with what `announced` said of it; returns the messages it completes."""
        body = payload if prefix is None else payload[PREFIX_BYTES:]
        unit = prefix or self._prefix
        assert unit is not None, "announced() has accepted the chunk"
        got = self._got_bytes + len(body)
        if got > unit.body_bytes or (got == unit.body_bytes) != bool(flags & LAST):
            raise LinkProtocolError(Fault.BAD_FRAME, "body differs from what was declared")
        if flags & LAST:
            messages = self._open(unit, flags, [*self._chunks, body])
            if prefix is None:
                self.reset()
            return messages
        self._keep(body)
        self._prefix, self._flags, self._got_bytes = unit, flags & COMPRESSED, got
        return []

    def reset(self) -> None:
        """Forget an incomplete message."""
        self._prefix, self._flags, self._chunks, self._got_bytes = None, 0, [], 0

    def _keep(self, body: memoryview) -> None:
        """Keep a view; merge tiny ones, or a peer could make us hold an object per byte."""
        if len(body) >= _MERGE_BELOW_BYTES:
            self._chunks.append(body)
        elif self._chunks and isinstance(self._chunks[-1], bytearray):
            self._chunks[-1] += body
        else:
            self._chunks.append(bytearray(body))

    def _check_prefix(self, prefix: Prefix, flags: int) -> None:
        body, raw, messages, parts = prefix
        limits = self._limits
        overhead = _RECORD_BYTES * messages + _LENGTH_BYTES * parts
        compressed = bool(flags & COMPRESSED)
        if (
            not messages
            or raw < overhead
            or not body
            or (body >= raw if compressed else body != raw)
        ):
            raise LinkProtocolError(Fault.BAD_FRAME, "impossible sizes")
        if messages > 1 and not flags & LAST:
            raise LinkProtocolError(Fault.BAD_FRAME, "several messages over several frames")
        if raw - overhead > limits.message_bytes:
            raise LinkProtocolError(Fault.TOO_LARGE, f"message of {raw - overhead} bytes")
        if messages == 1 and parts > limits.parts:
            raise LinkProtocolError(Fault.TOO_LARGE, f"message of {parts} parts")
        if compressed and self._decompress is None:
            raise LinkProtocolError(Fault.BAD_COMPRESSION, "compression was not negotiated")

    def _open(self, unit: Prefix, flags: int, chunks: list[Buffer]) -> list[LinkMessage]:
        if flags & COMPRESSED:
            block = self._inflate(b"".join(chunks), unit.raw_bytes)
        elif len(chunks) == 1:
            block = bytes(chunks[0])
        else:
            return [self._long_record(Reader(chunks, unit.raw_bytes), unit)]
        messages, at, parts = [], 0, 0
        for _ in range(unit.messages):
            message, at = self._record(block, at)
            messages.append(message)
            parts += len(message.parts)
        if at != len(block) or parts != unit.parts:
            raise _differs()
        return messages

    def _inflate(self, body: bytes, raw_bytes: int) -> bytes:
        assert self._decompress is not None, "checked with the prefix"
        try:
            raw = self._decompress(body, raw_bytes)
        except Exception as error:  # whatever the injected codec raises is the peer's doing
            raise LinkProtocolError(Fault.BAD_COMPRESSION, type(error).__name__) from error
        if len(raw) != raw_bytes:
            raise LinkProtocolError(Fault.BAD_COMPRESSION, "inflated to another size")
        return raw

    def _record(self, block: bytes, at: int) -> tuple[LinkMessage, int]:
        """The record at an offset, and where it ends."""
        if at + _RECORD_BYTES > len(block):
            raise _differs()
        kind, channel, count = self._head(block, at)
        at += _RECORD_BYTES
        if at + _LENGTH_BYTES * count > len(block):
            raise _differs()
        lengths = _lengths(count).unpack_from(block, at)
        at += _LENGTH_BYTES * count
        parts = []
        for length in lengths:
            end = at + length
            parts.append(block[at:end])
            at = end
        if at > len(block):
            raise _differs()
        return LinkMessage(kind, channel, tuple(parts), self._lane), at

    def _long_record(self, reader: Reader, unit: Prefix) -> LinkMessage:
        """The one record of a unit of many chunks, each part copied once."""
        kind, channel, count = self._head(reader.take(_RECORD_BYTES), 0)
        lengths = _lengths(count).unpack(reader.take(_LENGTH_BYTES * count))
        parts = tuple(map(reader.take, lengths))
        if reader.left_bytes or count != unit.parts:
            raise _differs()
        return LinkMessage(kind, channel, parts, self._lane)

    def _head(self, block: bytes, at: int) -> tuple[Kind, Channel, int]:
        kind_number, channel_number, count = _RECORD.unpack_from(block, at)
        kind, channel = self._kinds.get(kind_number), _CHANNELS.get(channel_number)
        if kind is None or channel is None or (kind is _JUPYTER) == (channel is _NONE):
            raise LinkProtocolError(Fault.BAD_MESSAGE, "unknown kind or channel")
        if count > self._limits.parts:
            raise LinkProtocolError(Fault.TOO_LARGE, f"message of {count} parts")
        return kind, channel, count


def _lengths(count: int) -> Struct:
    return _LENGTHS[count] if count < _COMMON_PARTS else Struct(f"!{count}I")


def _differs() -> LinkProtocolError:
    return LinkProtocolError(Fault.BAD_MESSAGE, "records differ from what was declared")


class Reader:
    """Takes bytes off a series of buffers."""

    __slots__ = ("_at", "_buffers", "_index", "left_bytes")

    def __init__(self, buffers: Sequence[Buffer], total_bytes: int) -> None:
        self._buffers = buffers
        self._index = 0
        self._at = 0
        self.left_bytes = total_bytes

    def take(self, count: int) -> bytes:
        """The next `count` bytes, copied once; `LinkProtocolError` if there are fewer."""
        if count > self.left_bytes:
            raise LinkProtocolError(Fault.BAD_MESSAGE, "record beyond its unit")
        self.left_bytes -= count
        buffer, end = self._buffers[self._index], self._at + count
        if end <= len(buffer):
            found = bytes(buffer[self._at : end])
            self._at = end
            return found
        return self._take_across(count)

    def _take_across(self, count: int) -> bytes:
        pieces: list[memoryview] = []
        while count:
            rest = memoryview(self._buffers[self._index])[self._at :]
            piece = rest[:count]
            pieces.append(piece)
            count -= len(piece)
            if count:
                self._index, self._at = self._index + 1, 0
            else:
                self._at += len(piece)
        return b"".join(pieces)
