"""The only source of time on the gateway's side.

Code takes a :class:`Clock` and never asks the ``time`` module itself, so that
a test owns the time. Two readings exist, because they break differently: the
wall clock may jump by hours in either direction (a laptop slept, somebody set
the date), the monotonic one may not, but it means nothing outside the process.
Deadlines are monotonic; only token expiry as told to people is wall time.

This module touches asyncio although its floor is pure: waiting is part of
time, and it must wait on the same clock that it reads.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any, TypeVar

__all__ = ["Clock", "ManualClock", "SystemClock"]

T = TypeVar("T")


class Clock(ABC):
    """Reads the time and waits for it."""

    @abstractmethod
    def now_s(self) -> float:
        """Wall time, seconds since the epoch."""

    @abstractmethod
    def monotonic_s(self) -> float:
        """Seconds that never run backwards within this process."""

    @abstractmethod
    async def sleep_s(self, seconds: float) -> None:
        """Return after ``seconds`` of this clock's time."""

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float | None) -> T:
        """Await, at most ``timeout_s`` of this clock's time; raises ``TimeoutError`` then.

        Who loses is cancelled and awaited, so nothing keeps running behind the caller.
        """
        if timeout_s is None:
            return await awaitable
        work = asyncio.ensure_future(awaitable)
        alarm = asyncio.ensure_future(self.sleep_s(timeout_s))
        try:
            await asyncio.wait({work, alarm}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise TimeoutError
            return work.result()
        finally:
            await _cancel(alarm)
            await _cancel(work)


async def _cancel(future: asyncio.Future[Any]) -> None:
    """End a future and wait until it has ended; its own error is its owner's business."""
    if not future.done():
        future.cancel()
        await asyncio.wait({future})


class SystemClock(Clock):
    """The computer's clocks."""

    def now_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()

    async def sleep_s(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float | None) -> T:
        # asyncio's own form, because it costs no second task on the warm path.
        return await asyncio.wait_for(awaitable, timeout_s)


class ManualClock(Clock):
    """Time that moves only when :meth:`advance` is called. For one event loop.

    ``advance`` wakes sleepers in the order of their deadlines and lets the loop
    run in between, so a sleeper that sleeps again inside the span is served too.
    """

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = start_s
        self._wall_offset_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now_s(self) -> float:
        return self._now_s + self._wall_offset_s

    def monotonic_s(self) -> float:
        return self._now_s

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock off by ``seconds``; nobody wakes from that."""
        self._wall_offset_s += seconds

    @property
    def sleepers(self) -> int:
        """How many waits are pending."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep_s(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._order), future))
        await future

    async def advance(self, seconds: float, *, settle_passes: int = 20) -> None:
        """Move time forward, waking whoever is due, each at its own moment."""
        target_s = self._now_s + seconds
        await _settle(settle_passes)
        while self._sleepers and self._sleepers[0][0] <= target_s:
            due_s, _, future = heapq.heappop(self._sleepers)
            self._now_s = max(self._now_s, due_s)
            if not future.done():
                future.set_result(None)
                await _settle(settle_passes)
        self._now_s = target_s


async def _settle(passes: int) -> None:
    for _ in range(passes):
        await asyncio.sleep(0)
