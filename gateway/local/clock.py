"""The local service's only source of time.

Everything in the service that waits or compares instants asks a `Clock`: the
idle policy, the suspended window, the maximum duration, token expiry, rate
buckets, artificial delays.  `SystemClock` is real time on the running asyncio
loop.  `ManualClock` moves only when a test calls `advance`, so tests of hours
of service time take milliseconds and never sleep.

Transport timers (connect and hook time limits on real sockets) use the real
loop and not this clock: bytes on a socket move in real time whatever a test
does to the service's time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A pending callback; `cancel` is idempotent and safe after it fired."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Wall time for what is shown, monotonic time for what is waited for."""

    def now_s(self) -> float:
        """Seconds since the epoch, as shown in API answers and tokens."""
        ...

    def monotonic_s(self) -> float:
        """Seconds on a scale that never goes back."""
        ...

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` on the loop after `delay_s`; never before this returns."""
        ...

    async def sleep_s(self, delay_s: float) -> None:
        """Return after `delay_s`; a delay of 0 or less yields to the loop once."""
        ...

    def jump_wall(self, delta_s: float) -> None:
        """Set the wall clock on or back without any time passing."""
        ...


class SystemClock:
    """Real time; timers live on the running asyncio loop."""

    def __init__(self) -> None:
        self._wall_offset_s = 0.0

    def now_s(self) -> float:
        return time.time() + self._wall_offset_s

    def monotonic_s(self) -> float:
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0.0, delay_s), callback)

    async def sleep_s(self, delay_s: float) -> None:
        await asyncio.sleep(max(0.0, delay_s))

    def jump_wall(self, delta_s: float) -> None:
        """Set the service's wall clock on or back (a fault on demand); no time passes."""
        self._wall_offset_s += delta_s


class _ManualTimer:
    """An entry of `ManualClock`'s heap; a cancelled one is skipped when due."""

    __slots__ = ("callback", "cancelled")

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class ManualClock:
    """Time that a test owns: nothing is due until `advance` is called."""

    def __init__(self, start_s: float = 1_790_000_000.0) -> None:
        self._wall_offset_s = start_s
        self._elapsed_s = 0.0
        self._order = itertools.count()
        self._heap: list[tuple[float, int, _ManualTimer]] = []

    def now_s(self) -> float:
        return self._wall_offset_s + self._elapsed_s

    def monotonic_s(self) -> float:
        return self._elapsed_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = _ManualTimer(callback)
        due_s = self._elapsed_s + max(0.0, delay_s)
        heapq.heappush(self._heap, (due_s, next(self._order), timer))
        return timer

    async def sleep_s(self, delay_s: float) -> None:
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self.call_later(delay_s, lambda: _resolve(woken))
        try:
            await woken
        finally:
            timer.cancel()

    def next_deadline_s(self) -> float | None:
        """Monotonic instant of the earliest live timer, or None."""
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def advance(self, delta_s: float) -> None:
        """Move time on, firing timers in order of their deadlines.

        Callbacks run inside this call; coroutines that they wake run when the
        caller next yields to the loop (see `advance_quietly` in the tests'
        support for a version that waits until the loop is quiet between
        deadlines).
        """
        target_s = self._elapsed_s + delta_s
        while (due_s := self.next_deadline_s()) is not None and due_s <= target_s:
            _, _, timer = heapq.heappop(self._heap)
            self._elapsed_s = max(self._elapsed_s, due_s)
            timer.callback()
        self._elapsed_s = target_s

    def jump_wall(self, delta_s: float) -> None:
        """Set the wall clock on or back without any time passing."""
        self._wall_offset_s += delta_s


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
