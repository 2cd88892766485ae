"""Messages to chunks and back, and what a hostile peer may not do to it."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_guest.shared.chunks import (
    PREFIX_BYTES,
    Assembler,
    cost_of,
    pack,
    record_bytes,
    split,
)
from kernel_guest.shared.errors import Fault, LinkProtocolError
from kernel_guest.shared.frames import COMPRESSED, FIRST, LAST
from kernel_guest.shared.limits import LinkLimits
from kernel_guest.shared.messages import Channel, Kind, Lane, LinkMessage
from tests.shared.pair import SMALL, ZLIB, numbered

PARTS = st.lists(st.binary(max_size=300), max_size=40)
MESSAGES = st.builds(
    lambda parts: LinkMessage(Kind.JUPYTER, Channel.IOPUB, tuple(parts), Lane.ORDERED), PARTS
)


def assemble(
    assembler: Assembler, flags: int, chunks: list[tuple[bytes, ...]]
) -> list[LinkMessage]:
    messages = []
    for index, chunk in enumerate(chunks):
        both = flags | (FIRST if index == 0 else 0) | (LAST if index == len(chunks) - 1 else 0)
        payload = memoryview(b"".join(chunk))
        messages += assembler.add(both, payload, assembler.announced(both, payload))
    return messages


@given(message=MESSAGES, chunk_bytes=st.integers(64, 2_000), squeeze=st.booleans())
def test_one_message_round_trip(message: LinkMessage, chunk_bytes: int, squeeze: bool) -> None:
    compress = ZLIB["compress"] if squeeze else None
    flags, chunks = pack([message], chunk_bytes, compress, 100)
    sizes = [sum(map(len, chunk)) for chunk in chunks]
    assert set(sizes[:-1]) <= {chunk_bytes}
    assert 0 < sizes[-1] <= chunk_bytes
    assembler = Assembler(Lane.ORDERED, SMALL, ZLIB["decompress"])
    assert assemble(assembler, flags, chunks) == [message]
    assert assembler.held_bytes == 0


@given(messages=st.lists(MESSAGES, min_size=1, max_size=10), squeeze=st.booleans())
def test_several_messages_in_one_chunk(messages: list[LinkMessage], squeeze: bool) -> None:
    compress = ZLIB["compress"] if squeeze else None
    flags, chunks = pack(messages, 10**6, compress, 100)
    assert len(chunks) == 1
    assembler = Assembler(Lane.ORDERED, LinkLimits(), ZLIB["decompress"])
    assert assemble(assembler, flags, chunks) == messages


@given(message=MESSAGES)
def test_costs_agree_on_both_sides(message: LinkMessage) -> None:
    _, chunks = pack([message], 10**6, None, 0)
    payload = memoryview(b"".join(chunks[0]))
    prefix = Assembler(Lane.ORDERED, SMALL, None).announced(FIRST | LAST, payload)
    assert prefix is not None
    assert prefix.cost == cost_of(message)
    assert record_bytes(message, cost_of(message)) == prefix.raw_bytes


@given(sizes=st.lists(st.integers(0, 50), min_size=1), chunk_bytes=st.integers(1, 60))
def test_split_keeps_all_bytes(sizes: list[int], chunk_bytes: int) -> None:
    buffers = [bytes((index % 256,)) * size for index, size in enumerate(sizes)]
    chunks = split(buffers, chunk_bytes)
    assert b"".join(piece for chunk in chunks for piece in chunk) == b"".join(buffers)
    assert all(sum(map(len, chunk)) == chunk_bytes for chunk in chunks[:-1])


def test_a_large_message_is_copied_once_on_each_side() -> None:
    size = 20_000_000
    message = numbered(1, size)
    limits = LinkLimits()
    assembler = Assembler(Lane.ORDERED, limits, None)
    tracemalloc.start()
    try:
        _, chunks = pack([message], limits.chunk_bytes, None, 0)
        assert tracemalloc.get_traced_memory()[0] < 200_000  # views only
        assert assemble(assembler, 0, chunks) == [message]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * size + 2_000_000  # the frames as they came, and the message


# --- hostile input


def payload(
    body: bytes,
    messages: int = 1,
    parts: int = 0,
    raw: int | None = None,
    declared: int | None = None,
) -> memoryview:
    length = len(body) if declared is None else declared
    raw_bytes = length if raw is None else raw
    return memoryview(struct.pack("!IIII", length, raw_bytes, messages, parts) + body)


def record(kind: int = 1, channel: int = 2, parts: tuple[bytes, ...] = ()) -> bytes:
    lengths = [len(part) for part in parts]
    return struct.pack(f"!BBH{len(parts)}I", kind, channel, len(parts), *lengths) + b"".join(parts)


def fault_of(flags: int, data: memoryview, limits: LinkLimits = SMALL) -> Fault:
    assembler = Assembler(Lane.ORDERED, limits, ZLIB["decompress"])
    with pytest.raises(LinkProtocolError) as caught:
        assembler.add(flags, data, assembler.announced(flags, data))
    assert assembler.held_bytes == 0
    return caught.value.fault


WHOLE = FIRST | LAST


@pytest.mark.parametrize(
    ("flags", "data", "fault"),
    [
        (0, payload(record()), Fault.BAD_FRAME),  # continues nothing
        (LAST, payload(record()), Fault.BAD_FRAME),
        (WHOLE, payload(record())[: PREFIX_BYTES - 1], Fault.BAD_FRAME),
        (WHOLE, payload(record(), messages=0), Fault.BAD_FRAME),
        (WHOLE, payload(b""), Fault.BAD_FRAME),
        (WHOLE, payload(record(), raw=10), Fault.BAD_FRAME),  # not compressed, yet two sizes
        (WHOLE, payload(record(), parts=2**30), Fault.BAD_FRAME),  # parts need bytes
        (WHOLE, payload(record(), messages=2**30), Fault.BAD_FRAME),
        (WHOLE, payload(record(), declared=100), Fault.BAD_FRAME),  # ends too early
        (FIRST, payload(record()), Fault.BAD_FRAME),  # complete, yet not the last
        (WHOLE, payload(record() + b"x", declared=4), Fault.BAD_FRAME),  # goes on too long
        (FIRST, payload(record(), messages=2, declared=100), Fault.BAD_FRAME),
        (FIRST, payload(record(), declared=2**31), Fault.TOO_LARGE),
        (FIRST, payload(record(), declared=1_000, parts=41), Fault.TOO_LARGE),
        (WHOLE | COMPRESSED, payload(b"x" * 50, raw=20), Fault.BAD_FRAME),  # grew
        (WHOLE | COMPRESSED, payload(b"x" * 50, raw=200), Fault.BAD_COMPRESSION),
        (WHOLE, payload(record(kind=9)), Fault.BAD_MESSAGE),
        (WHOLE, payload(record(channel=9)), Fault.BAD_MESSAGE),
        (WHOLE, payload(record(channel=0)), Fault.BAD_MESSAGE),  # Jupyter without a channel
        (WHOLE, payload(record(kind=2, channel=1)), Fault.BAD_MESSAGE),  # a call with one
        (WHOLE, payload(record() + b"x"), Fault.BAD_MESSAGE),  # bytes left over
        (WHOLE, payload(record(parts=(b"abc",)), parts=0), Fault.BAD_MESSAGE),
        (WHOLE, payload(record(), messages=1, parts=0)[:-1], Fault.BAD_FRAME),
        (WHOLE, payload(struct.pack("!BBH", 1, 2, 9) + bytes(20)), Fault.BAD_MESSAGE),
        (WHOLE, payload(struct.pack("!BBHI", 1, 2, 1, 99)), Fault.BAD_MESSAGE),
        (WHOLE, payload(record() + b"xx", messages=2)[:-1], Fault.BAD_FRAME),
    ],
)
def test_impossible_units_are_refused(flags: int, data: memoryview, fault: Fault) -> None:
    assert fault_of(flags, data) is fault


def test_too_many_parts_within_a_batch_are_refused() -> None:
    many = record(parts=(b"",) * (SMALL.parts + 1))
    data = payload(many + record(), messages=2, parts=SMALL.parts + 1)
    assert fault_of(WHOLE, data) is Fault.TOO_LARGE


def test_a_long_record_that_lies_about_its_parts_is_refused() -> None:
    message = numbered(1, 5_000)
    _, chunks = pack([message], 1_000, None, 0)
    broken = [b"".join(chunk) for chunk in chunks]
    broken[0] = (
        broken[0][:PREFIX_BYTES] + struct.pack("!BBH", 1, 2, 4) + broken[0][PREFIX_BYTES + 4 :]
    )
    with pytest.raises(LinkProtocolError):
        assemble(Assembler(Lane.ORDERED, SMALL, None), 0, [(piece,) for piece in broken])


def test_a_chunk_that_raises_has_changed_nothing() -> None:
    message = numbered(1, 3_000)
    _, chunks = pack([message], 500, None, 0)
    frames = [memoryview(b"".join(chunk)) for chunk in chunks]
    assembler = Assembler(Lane.ORDERED, SMALL, None)
    assembler.add(FIRST, frames[0], assembler.announced(FIRST, frames[0]))
    for flags, data in [(FIRST, frames[0]), (LAST, frames[1]), (COMPRESSED, frames[1])]:
        with pytest.raises(LinkProtocolError):
            assembler.add(flags, data, assembler.announced(flags, data))
    for frame in frames[1:-1]:
        assert assembler.add(0, frame, assembler.announced(0, frame)) == []
    last = frames[-1]
    assert assembler.add(LAST, last, assembler.announced(LAST, last)) == [message]


def test_compression_that_was_not_negotiated_is_refused() -> None:
    assembler = Assembler(Lane.ORDERED, SMALL, None)
    with pytest.raises(LinkProtocolError) as caught:
        assembler.announced(WHOLE | COMPRESSED, payload(b"x" * 10, raw=100))
    assert caught.value.fault is Fault.BAD_COMPRESSION


def test_chunks_of_one_byte_do_not_become_an_object_each() -> None:
    limits = LinkLimits()
    assembler = Assembler(Lane.ORDERED, limits, None)
    first = payload(b"", declared=500_000)
    tracemalloc.start()
    try:
        assembler.add(FIRST, first, assembler.announced(FIRST, first))
        for _ in range(100_000):
            one = memoryview(b"x")
            assembler.add(0, one, assembler.announced(0, one))
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()
