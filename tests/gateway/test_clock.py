"""Time that a test owns, and time that nobody does."""

from __future__ import annotations

import asyncio

import pytest

from gateway.clock import Clock, ManualClock, SystemClock


def test_sleepers_wake_in_the_order_of_their_deadlines_and_again_within_one_advance() -> None:
    async def steps() -> list[tuple[str, float]]:
        clock, log = ManualClock(0.0), []

        async def sleeper(name: str, naps: list[float]) -> None:
            for nap_s in naps:
                await clock.sleep_s(nap_s)
                log.append((name, clock.monotonic_s()))

        tasks = [
            asyncio.create_task(sleeper("a", [5, 5])),
            asyncio.create_task(sleeper("b", [3, 3, 3])),
        ]
        await clock.advance(10)
        assert clock.sleepers == 0
        await asyncio.gather(*tasks)
        assert clock.monotonic_s() == 10
        return log

    assert asyncio.run(steps()) == [("b", 3), ("a", 5), ("b", 6), ("b", 9), ("a", 10)]


def test_the_wall_clock_jumps_and_nobody_wakes() -> None:
    async def steps() -> None:
        clock = ManualClock(100.0)
        task = asyncio.create_task(clock.sleep_s(1))
        await asyncio.sleep(0)
        clock.jump_wall(-3600)
        assert clock.now_s() == 100 - 3600
        assert clock.monotonic_s() == 100
        await asyncio.sleep(0)
        assert not task.done()
        await clock.advance(1)
        await task

    asyncio.run(steps())


@pytest.mark.parametrize("clock", [SystemClock(), ManualClock()])
def test_wait_for_gives_the_result_or_the_error(clock: Clock) -> None:
    async def value() -> int:
        return 7

    async def trouble() -> int:
        raise LookupError("x")

    async def steps() -> None:
        assert await clock.wait_for(value(), 1) == 7
        assert await clock.wait_for(value(), None) == 7
        with pytest.raises(LookupError):
            await clock.wait_for(trouble(), 1)

    asyncio.run(steps())


def test_wait_for_ends_the_loser() -> None:
    async def steps() -> None:
        clock = ManualClock()
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(clock.wait_for(never, 5))
        await clock.advance(4.9)
        assert not waiting.done()
        await clock.advance(0.2)
        with pytest.raises(TimeoutError):
            await waiting
        assert never.cancelled()

    asyncio.run(steps())


def test_a_sleep_of_nothing_yields_once() -> None:
    asyncio.run(ManualClock().sleep_s(0))
    asyncio.run(SystemClock().sleep_s(0))
    assert SystemClock().now_s() > 1.7e9
