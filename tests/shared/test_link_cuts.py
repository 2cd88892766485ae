"""A session cut at every frame boundary, and long outputs cut over and over."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator

import pytest

from kernel_guest.shared.limits import LinkLimits
from kernel_guest.shared.link import Role
from kernel_guest.shared.messages import Channel, LinkMessage, call, event, jupyter, reply
from tests.shared.pair import SMALL, ZLIB, Pair, make_gateway, make_guest, numbered

MIXED = (Channel.IOPUB, Channel.IOPUB, Channel.SHELL, Channel.STDIN, Channel.CONTROL)


def session() -> Iterator[tuple[Role, LinkMessage]]:
    """Requests, streams, displays with buffers, comm traffic, input, an interrupt."""
    chance = random.Random(3)
    for number in range(40):
        yield Role.GATEWAY, numbered(number, chance.randrange(300), Channel.SHELL)
        for _ in range(3):
            channel = chance.choice(MIXED)
            size = chance.choice([10, 200, 1_500])
            yield Role.GUEST, numbered(number, size, channel)
        parts = [b"", b"comm", b"{}", b"{}", b"{}", chance.randbytes(chance.randrange(600)), b""]
        yield Role.GUEST, jupyter(Channel.IOPUB, parts)
    yield Role.GATEWAY, call(1, "interrupt", {})
    yield Role.GUEST, reply(1, {})
    yield Role.GUEST, event("kernel_exited", {"exit_code": 0})


def run_session(cut_after: int | None, chance: random.Random) -> tuple[Pair, int]:
    """Play the session, cut once after so many frames; the pair and the number of frames."""
    pair = Pair(make_guest(SMALL, **ZLIB), make_gateway(SMALL, **ZLIB))
    pair.shake_hands()
    script, moved = list(session()), 0
    while script or pair.guest.wants_output or pair.gateway.wants_output or pair.in_flight:
        for _ in range(min(3, len(script))):
            role, message = script.pop(0)
            pair.core(role).send(message)
        for role in Role:
            pair.take(role, chance.choice([200, 1_000]))
            for _ in range(len(pair.wires[role].frames)):
                pair.deliver(role)
                moved += 1
                if moved == cut_after:
                    pair.cut()
                    pair.shake_hands()
                    break
    return pair, moved


def per_lane(pair: Pair, role: Role) -> list[list[LinkMessage]]:
    found = pair.messages(role)
    return [[m for m in found if m.lane == lane] for lane in (0, 1)]


def check_cuts(places: Iterator[int]) -> None:
    whole, _ = run_session(None, random.Random(1))
    expected = {role: per_lane(whole, role) for role in Role}
    assert sum(map(len, expected[Role.GATEWAY])) == 40 * 4 + 2
    for place in places:
        pair, _ = run_session(place, random.Random(1))
        for role in Role:
            assert per_lane(pair, role) == expected[role], place
            assert pair.core(role).idle
            assert pair.last_established(role).resumed


def test_a_cut_at_frame_boundaries_changes_nothing() -> None:
    _, total = run_session(None, random.Random(1))
    assert total > 300
    check_cuts(iter(range(1, total, 17)))


@pytest.mark.long
def test_a_cut_at_every_frame_boundary_changes_nothing() -> None:
    _, total = run_session(None, random.Random(1))
    check_cuts(iter(range(1, total)))


def print_lines(lines: int, cuts: int) -> int:
    """A kernel prints lines with comm messages between; the link is cut again and again.

    A journal feeds the core as it asks, as in the guest.  Returns the peak of memory.
    """
    chance = random.Random(7)
    limits = LinkLimits(batch_bytes=2_048)
    pair = Pair(make_guest(limits), make_gateway(limits))
    got = [0]

    def receive(role: Role, message: LinkMessage) -> None:
        assert message.parts[1] == b"%d" % got[0]
        got[0] += 1
        pair.consume_at_once(role, message)
        pair.events[role].clear()

    pair.on_received = receive
    pair.shake_hands()
    printed = 0
    tracemalloc.start()
    try:
        while got[0] < lines:
            while printed < lines and pair.guest.wants_more:
                pair.guest.send(numbered(printed, 30 if printed % 50 else 2_000))
                printed += 1
            pair.take(Role.GUEST, 16 * 1024)
            pair.deliver(Role.GUEST, chance.randrange(1, 8))
            pair.take(Role.GATEWAY)
            pair.deliver(Role.GATEWAY, chance.randrange(3))
            if pair.guest.statistics().resumes < got[0] * cuts // lines:
                pair.cut()
                pair.shake_hands()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        assert pair.guest.statistics().resumes >= cuts * 0.9
        assert pair.guest.statistics().fresh_attachments == 1


def test_cuts_amid_many_lines_lose_and_double_nothing() -> None:
    assert print_lines(10_000, 50) < 30_000_000


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_thousand_cuts_amid_200_000_lines(capsys: pytest.CaptureFixture[str]) -> None:
    peak = print_lines(200_000, 1_000)
    with capsys.disabled():
        print(f"\n200 000 lines, 1000 cuts: peak of both cores {peak / 1e6:.1f} MB")
    assert peak < 30_000_000
