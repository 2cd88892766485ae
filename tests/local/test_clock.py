"""The service's time."""

from __future__ import annotations

import asyncio

import pytest

from gateway.local.clock import Clock, ManualClock, SystemClock
from tests.local.in_process import run


def test_timers_fire_in_order_and_only_when_time_is_moved() -> None:
    clock, seen = ManualClock(), list[str]()
    clock.call_later(2, lambda: seen.append(f"b at {clock.monotonic_s()}"))
    clock.call_later(1, lambda: seen.append(f"a at {clock.monotonic_s()}"))
    cancelled = clock.call_later(1, lambda: seen.append("never"))
    cancelled.cancel()
    cancelled.cancel()
    assert clock.next_deadline_s() == 1
    clock.advance(0.5)
    assert seen == []
    clock.advance(5)
    assert seen == ["a at 1.0", "b at 2.0"]
    assert clock.monotonic_s() == 5.5
    assert clock.next_deadline_s() is None


def test_a_timer_may_set_the_next_one_within_one_advance() -> None:
    clock, seen = ManualClock(), list[float]()

    def tick() -> None:
        seen.append(clock.monotonic_s())
        clock.call_later(1, tick)

    clock.call_later(1, tick)
    clock.advance(3)
    assert seen == [1, 2, 3]


def test_the_wall_clock_may_jump_and_no_timer_notices() -> None:
    clock = ManualClock(start_s=1000)
    clock.call_later(10, lambda: pytest.fail("no time has passed"))
    clock.jump_wall(-500)
    assert clock.now_s() == 500
    clock.advance(1)
    assert clock.now_s() == 501


def test_sleepers_wake_when_their_time_comes() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        await clock.sleep_s(0)
        sleeper = asyncio.create_task(clock.sleep_s(5))
        await asyncio.sleep(0)
        clock.advance(4.9)
        await asyncio.sleep(0)
        assert not sleeper.done()
        clock.advance(0.1)
        await sleeper
        cut = asyncio.create_task(clock.sleep_s(5))
        await asyncio.sleep(0)
        cut.cancel()
        await asyncio.wait([cut])
        assert clock.next_deadline_s() is None

    run(scenario())


def test_the_system_clock_is_a_clock() -> None:
    async def scenario() -> None:
        clock: Clock = SystemClock()
        fired = asyncio.Event()
        before_s = clock.monotonic_s()
        clock.call_later(-1, fired.set)
        await fired.wait()
        await clock.sleep_s(-1)
        assert clock.monotonic_s() >= before_s
        now_s = clock.now_s()
        clock.jump_wall(3600)
        assert 3600 <= clock.now_s() - now_s < 3610

    run(scenario())
