"""Garbage at every place where the other side can put it.

Never a hang, never growth without bound, never an exception but the one typed error; and after
it a reconnection finds everything as it was.
"""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel_guest.shared.errors import LinkProtocolError
from kernel_guest.shared.frames import DATA, HEADER_BYTES
from kernel_guest.shared.link import LinkCore, Phase, Role
from kernel_guest.shared.messages import Channel
from tests.shared.pair import (
    SMALL,
    ZLIB,
    Pair,
    make_gateway,
    make_guest,
    numbered,
    numbers,
    other,
    survives,
)

FAST = settings(
    deadline=None, max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck)
)
LONG = settings(
    derandomize=False, deadline=None, max_examples=20_000, suppress_health_check=list(HealthCheck)
)


def greeting_guest() -> LinkCore:
    core = make_guest(SMALL, **ZLIB)
    core.connected()
    core.take_frames(1)
    return core


def greeting_gateway() -> LinkCore:
    core = make_gateway(SMALL, **ZLIB)
    core.connected()
    return core


def challenged_gateway() -> LinkCore:
    guest, core = make_guest(SMALL, **ZLIB), greeting_gateway()
    guest.connected()
    core.receive_frame(guest.take_frames(1)[0])
    core.take_frames(1)
    return core


def established(role: Role) -> LinkCore:
    pair = Pair(make_guest(SMALL, **ZLIB), make_gateway(SMALL, **ZLIB)).open()
    return pair.core(role)


STATES: list[Callable[[], LinkCore]] = [
    greeting_guest,
    greeting_gateway,
    challenged_gateway,
    lambda: established(Role.GUEST),
    lambda: established(Role.GATEWAY),
]

FIELDS = struct.Struct("!BBBBIQQQQQIIII")
NEAR = st.one_of(st.integers(0, 3), st.integers(0, 300), st.integers(0, 2**32 - 1))
SHAPED = st.builds(
    lambda kind, flags, lane, zero, stream, numbers, sizes, body: (
        FIELDS.pack(kind, flags, lane, zero, stream, *numbers, *sizes) + body
    ),
    st.sampled_from([5, 5, 5, 6, 7]),
    st.integers(0, 8),
    st.integers(0, 2),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([1, 1, 1, 2]),
    st.tuples(NEAR, *[st.sampled_from([0, 0, 0, 1, 2**63])] * 4),
    st.tuples(NEAR, NEAR, NEAR, NEAR),
    st.binary(max_size=80),
)
"""Frames whose fields are likely enough to pass the first checks."""


def check_garbage(make: Callable[[], LinkCore], frames: list[bytes]) -> None:
    core = make()
    for frame in frames:
        if not survives(core, frame):
            assert core.phase is Phase.DOWN
            assert core.receive_frame(frame) == []
    core.take_frames(10**6)
    lanes = core.statistics().urgent, core.statistics().ordered
    assert all(lane.unfinished_bytes <= SMALL.message_bytes for lane in lanes)


@pytest.mark.parametrize("make", STATES)
def test_garbage_ends_in_the_typed_error(make: Callable[[], LinkCore]) -> None:
    @FAST
    @given(frames=st.lists(st.one_of(st.binary(max_size=300), SHAPED), max_size=8))
    def check(frames: list[bytes]) -> None:
        check_garbage(make, frames)

    check()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("make", STATES)
def test_garbage_ends_in_the_typed_error_for_long(make: Callable[[], LinkCore]) -> None:
    @LONG
    @given(frames=st.lists(st.one_of(st.binary(max_size=300), SHAPED), max_size=8))
    def check(frames: list[bytes]) -> None:
        check_garbage(make, frames)

    check()


def damage(frame: bytes, chance: random.Random) -> bytes:
    """A flipped bit, a cut at any byte, a byte more, or a piece of another place."""
    kind = chance.randrange(4)
    if kind == 0:
        data = bytearray(frame)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        return bytes(data)
    if kind == 1:
        return frame[: chance.randrange(len(frame))]
    if kind == 2:
        return frame + chance.randbytes(chance.randrange(1, 300))
    at = chance.randrange(len(frame))
    return frame[at:] + frame[:at]


def damaged_conversation(seed: int) -> None:
    """A conversation in which frames are damaged on the way; each error is followed by a cut.

    Damage can change content unseen (TLS guards that, not the link), so only the kind of outcome
    is checked: accepted, or the typed error.
    """
    chance = random.Random(seed)
    pair = Pair(make_guest(SMALL, **ZLIB), make_gateway(SMALL, **ZLIB))
    for number in range(20):
        pair.guest.send(numbered(number, chance.randrange(2_000)))
        pair.gateway.send(numbered(number, chance.randrange(2_000), Channel.SHELL))
    for _ in range(30):
        with contextlib.suppress(LinkProtocolError):
            pair.shake_hands()
            for _ in range(chance.randrange(20)):
                role = chance.choice(list(Role))
                pair.take(role, 1_000)
                pair.deliver(role, chance.randrange(5))
            role = chance.choice(list(Role))
            pair.take(role, 1_000)
            for frame in pair.wires[role].frames:
                pair.feed(other(role), damage(frame, chance))
        pair.cut()


@pytest.mark.parametrize("seed", range(40))
def test_damaged_frames_raise_nothing_else(seed: int) -> None:
    damaged_conversation(seed)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_damaged_frames_raise_nothing_else_for_long() -> None:
    for seed in range(1_000, 6_000):
        damaged_conversation(seed)


@pytest.mark.parametrize("role", list(Role))
def test_a_frame_cut_at_every_byte_is_refused_and_then_resent(role: Role) -> None:
    pair = Pair().open()
    pair.core(role).send(numbered(1, 100))
    frame = pair.core(role).take_frames(1)[0]
    for length in range(len(frame)):
        pair.cut()
        pair.shake_hands()
        with pytest.raises(LinkProtocolError):
            pair.feed(other(role), frame[:length])
    pair.cut()
    pair.open()
    assert numbers(pair.messages(other(role))) == [1]


def test_endless_frames_are_refused_before_they_are_copied() -> None:
    core = greeting_gateway()
    big = bytes((1,)) + bytes(50_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(LinkProtocolError):
            core.receive_frame(big)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_hostile_peer_cannot_make_a_core_hold_more_than_its_bounds() -> None:
    """It begins messages of the largest size in both lanes and never ends them."""
    core = established(Role.GATEWAY)
    stream = core.statistics().stream
    for lane in (0, 1):
        sequence = 0
        body = bytes(100)
        prefix = struct.pack("!IIII", SMALL.message_bytes, SMALL.message_bytes, 1, 0)
        data = struct.pack("!BBBBIQQQQQ", DATA, 1, lane, 0, stream, 1, 0, 0, 0, 0) + prefix + body
        while survives(core, data):
            sequence += 1
            header = struct.pack("!BBBBIQQQQQ", DATA, 0, lane, 0, stream, sequence + 1, 0, 0, 0, 0)
            data = header + body
            assert sequence < 1_000
        held = core.statistics()
        assert (
            held.urgent.unfinished_bytes + held.ordered.unfinished_bytes <= 2 * SMALL.message_bytes
        )
        core._phase = Phase.UP  # as if it came back at once
    assert len(data) == HEADER_BYTES + 100
