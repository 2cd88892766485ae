"""The header of numbered frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_guest.shared.errors import Fault, LinkProtocolError
from kernel_guest.shared.frames import (
    ACK,
    DATA,
    FIRST,
    HEADER_BYTES,
    LAST,
    decode_frame,
    encode_header,
)

U64 = st.integers(0, 2**64 - 1)


@given(
    flags=st.integers(0, 7),
    lane=st.integers(0, 1),
    stream=st.integers(0, 2**32 - 1),
    sequence=st.integers(1, 2**64 - 1),
    received=st.tuples(U64, U64),
    consumed=st.tuples(U64, U64),
    payload=st.binary(min_size=1, max_size=50),
)
def test_data_round_trip(
    flags: int,
    lane: int,
    stream: int,
    sequence: int,
    received: tuple[int, int],
    consumed: tuple[int, int],
    payload: bytes,
) -> None:
    header = encode_header(DATA, flags, lane, stream, sequence, received, consumed)
    frame = decode_frame(header + payload, 50)
    assert frame[:7] == (DATA, flags, lane, stream, sequence, received, consumed)
    assert frame.payload == payload


def test_the_payload_is_a_view_and_no_copy() -> None:
    data = encode_header(DATA, FIRST | LAST, 1, 1, 1, (0, 0), (0, 0)) + b"payload"
    assert decode_frame(data, 100).payload.obj is data


def frame_of(kind: int = DATA, flags: int = 0, lane: int = 0, sequence: int = 1) -> bytearray:
    return bytearray(encode_header(kind, flags, lane, 1, sequence, (0, 0), (0, 0)))


def with_byte(data: bytearray, at: int, value: int) -> bytearray:
    data[at] = value
    return data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x05",
        frame_of()[: HEADER_BYTES - 1],
        frame_of(),  # data without payload
        frame_of(sequence=0) + b"x",
        frame_of(flags=8) + b"x",
        frame_of(lane=2) + b"x",
        with_byte(frame_of() + b"x", 3, 1),
        frame_of(kind=9) + b"x",
        frame_of(kind=ACK, sequence=1),
        frame_of(kind=ACK, sequence=0, flags=1),
        frame_of(kind=ACK, sequence=0, lane=1),
        frame_of(kind=ACK, sequence=0) + b"x",
    ],
)
def test_what_is_not_a_frame_is_refused(data: bytes) -> None:
    with pytest.raises(LinkProtocolError) as caught:
        decode_frame(data, 100)
    assert caught.value.fault is Fault.BAD_FRAME


def test_a_payload_above_the_cap_is_refused() -> None:
    with pytest.raises(LinkProtocolError) as caught:
        decode_frame(frame_of() + bytes(101), 100)
    assert caught.value.fault is Fault.TOO_LARGE
    assert caught.value.code == "too_large"
