"""How a kernel ends, and what clients hear of it.

``exit_status`` is set first and at once. The endings of unfinished requests
follow ``POLLERS_FIRST_S`` later: nbclient polls once a second, and it must see a
dead kernel before it sees an error reply, or it reports a failed cell where it
should say ``DeadKernelError``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.activity import Activity
from gateway.lifecycle import Cause, Phase
from gateway.session.record import Record
from gateway.session.traffic import Traffic

__all__ = ["KILLED_STATUS", "LOST_STATUS", "POLLERS_FIRST_S", "Ends"]

# One poll a second, and half of one for a busy computer.
POLLERS_FIRST_S = 1.5
# Exit status of a kernel whose machine is gone; of a process ended by SIGKILL, as Popen has it.
LOST_STATUS = 1
KILLED_STATUS = -9


class Ends:
    """The ends of one session's kernels."""

    def __init__(
        self,
        record: Record,
        traffic: Traffic,
        activity: Activity,
        on_death: Callable[[int], None] | None,
    ) -> None:
        self._record = record
        self._traffic = traffic
        self._activity = activity
        self._on_death = on_death
        self._later: asyncio.Task[None] | None = None

    def kernel_died(self, status: int, reason: str, *, expected: bool = False) -> None:
        """The process ended, or its machine did. Tells ``on_death`` once, unless expected."""
        first = self._record.exit_status is None
        if first:
            self._record.exit_status = status
        self._traffic.kernel_ended()
        self.end_requests_later(reason)
        if first and not expected and self._on_death is not None:
            self._on_death(status)

    def lose(self, reason: str) -> None:
        """The service says that the machine is no more, or it is beyond use."""
        record = self._record
        record.move(Cause.SERVICE_TERMINAL, reason)
        record.emit("sandbox_lost", reason=reason)
        record.needs_machine().link.abandon(reason)
        self.kernel_died(LOST_STATUS, f"its machine is gone: {reason}")

    def end_requests_later(self, reason: str) -> None:
        """See the module's header."""
        if self._later is None or self._later.done():
            self._later = self._record.home.spawn(self._after_pollers(reason), "end requests")

    async def _after_pollers(self, reason: str) -> None:
        await self._record.clock.sleep_s(POLLERS_FIRST_S)
        self._later = None
        self.end_requests(reason, held_too=self._record.phase is Phase.LOST)

    def end_requests(self, reason: str, *, held_too: bool) -> None:
        """Now."""
        self.stop()
        self._traffic.end(reason, held_too=held_too)
        self.note_requests(self._record.clock.monotonic_s())

    def note_requests(self, now_s: float) -> None:
        """What is unfinished has changed: activity wants to know."""
        requests = self._traffic.requests
        self._activity.in_flight(len(requests), now_s)
        self._activity.waiting_input(requests.waiting_input, now_s)

    def stop(self) -> None:
        """Nothing follows later any more."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
