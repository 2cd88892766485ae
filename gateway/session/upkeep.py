"""Keeping a session's machine reachable, awake or asleep: the driver and the watcher.

The *driver* is a task that runs while there is something to repair or to wake
and ends when there is not. ``drive`` is cheap and called after everything that
may have made work for it. The *watcher* lives as long as the machine and carries
out what ``activity`` decides.

Who may change the phase: whoever holds ``turn``. That is a public operation of
the session, the driver, or the watcher.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.activity import Action, Activity, GuestReport, Rules
from gateway.errors import GatewayError, GuestFault, LinkRefused, MachineGone, WrongPhase
from gateway.lifecycle import Cause, Phase
from gateway.session.ends import LOST_STATUS, Ends
from gateway.session.machine import Machine
from gateway.session.patience import Patience
from gateway.session.record import ALIVE, DOUBTFUL, SLEEPING, Record
from gateway.session.traffic import Gate, Traffic

if TYPE_CHECKING:
    from kernel_guest.shared.link import Established

__all__ = ["Upkeep"]

SUSPEND_TIMEOUT_S = 60.0
ACTIVITY_TIMEOUT_S = 5.0
# Neither the service nor the machine's endpoint answers: again after this, doubling.
SILENCE_FIRST_S = 0.5
SILENCE_MOST_S = 30.0
SUSPENDING_POLL_S = 0.1
# The link was full when held messages went out: look again.
FULL_POLL_S = 0.01
# A guest that breaks the protocol so often in a row is not worth a kernel.
MOST_FAULTS = 5
SHORTEST_WATCH_S = 0.01


class Upkeep:
    """For one session, on the bridge's loop."""

    def __init__(self, record: Record, traffic: Traffic, activity: Activity, ends: Ends) -> None:
        self._record = record
        self._traffic = traffic
        self._activity = activity
        self._ends = ends
        self._rules = Rules.of(record.profile)
        self._driver: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._stopped = False
        self.turn = asyncio.Lock()

    def stop(self) -> None:
        """End both tasks for good; ``resume`` undoes it for another machine."""
        self._stopped = True
        for task in (self._driver, self._watcher):
            if task is not None:
                task.cancel()
        self._driver = self._watcher = None

    def begin(self) -> None:
        """A machine is up: watch it."""
        self._stopped = False
        self._activity.woke(self._record.clock.monotonic_s())
        self.open_gate()
        if self._watcher is None or self._watcher.done():
            self._watcher = self._record.home.spawn(self._watch(), "watch a machine")

    # -- the driver

    def drive(self) -> None:
        """See that somebody is at work if there is work."""
        if (self._driver is None or self._driver.done()) and self._must_drive():
            self._driver = self._record.home.spawn(self._drive(), "drive a machine")

    def _must_drive(self) -> bool:
        record = self._record
        if self._stopped:
            return False
        if record.phase in SLEEPING:
            return record.exit_status is None and self._traffic.wants_machine
        if record.phase in DOUBTFUL:
            return True
        return record.gate() is Gate.OPEN and self._traffic.held > 0

    async def _drive(self) -> None:
        while self._must_drive():
            async with self.turn:
                if self._record.phase in DOUBTFUL:
                    await self._recover()
                elif self._record.phase in SLEEPING and self._must_drive():
                    await self._wake()
                elif not self.open_gate():
                    await self._record.clock.sleep_s(FULL_POLL_S)

    def open_gate(self) -> bool:
        """Send what waited, if the kernel can be reached; False if the link was full."""
        sink = self._record.sink
        if sink is None or self._record.gate() is not Gate.OPEN:
            return True
        return self._traffic.flush(sink)

    async def come_up(self) -> Machine:
        """READY from wherever, with ``turn`` held. Raises MachineGone or WrongPhase."""
        record = self._record
        if record.phase in DOUBTFUL:
            await self._recover()
        if record.phase in SLEEPING:
            await self._wake()
        if record.phase in DOUBTFUL:
            await self._recover()
        machine = record.needs_machine()
        if record.phase is Phase.LOST:
            raise MachineGone(machine.microvm_id, record.reason)
        if record.phase is not Phase.READY:
            raise WrongPhase("reach the kernel", record.phase.value)
        return machine

    async def awake(self) -> Machine:
        """A machine that can be called; wakes it. Raises MachineGone or WrongPhase."""
        if self._record.phase is Phase.READY:
            return self._record.needs_machine()
        async with self.turn:
            return await self.come_up()

    # -- waking

    async def _wake(self) -> None:
        """From PARKED or ASLEEP to READY, or to doubt, or to loss."""
        record = self._record
        machine = record.needs_machine()
        started_s = record.clock.monotonic_s()
        record.move(Cause.WAKE)
        record.emit("resume_started")
        try:
            await machine.wake(Patience(started_s))
            established = await machine.open_link(Patience(record.clock.monotonic_s()))
        except MachineGone as error:
            self._ends.lose(error.reason)
        except (LinkRefused, GuestFault) as error:
            self._ends.lose(error.sentence)
        except GatewayError as error:
            record.emit("control_unreachable", reason=error.sentence)
            record.move(Cause.SERVICE_SILENT, error.sentence)
        else:
            self._connected(established)
            record.emit("resume_running", duration_ms=record.since_ms(started_s))

    def _connected(self, established: Established) -> None:
        """The link is open again: to the same guest, or to one that forgot everything."""
        self._record.move(Cause.LINK_OPEN)
        self._activity.woke(self._record.clock.monotonic_s())
        if established.restarted:
            self._ends.kernel_died(LOST_STATUS, "the machine lost its kernel")
        self.open_gate()

    # -- doubt

    async def _recover(self) -> None:
        """From doubt to certainty: ask, try, and pause between rounds that did not help."""
        record = self._record
        pause_s, faults = SILENCE_FIRST_S, 0
        while record.phase in DOUBTFUL:
            faults += await self._recover_once()
            if faults >= MOST_FAULTS:
                self._ends.lose("the machine keeps breaking the link's protocol")
            if record.phase in DOUBTFUL:
                await record.clock.sleep_s(pause_s)
                pause_s = min(SILENCE_MOST_S, 2 * pause_s)

    async def _recover_once(self) -> int:
        """One round; returns how often the guest broke the protocol in it."""
        try:
            await self._ask_and_reconnect(self._record.needs_machine())
        except MachineGone as error:
            self._ends.lose(error.reason)
        except LinkRefused as error:
            self._ends.lose(error.sentence)
        except GuestFault:
            return 1
        except GatewayError as error:
            if self._record.phase is Phase.SUSPECT:
                self._record.emit("control_unreachable", reason=error.sentence)
                self._record.move(Cause.SERVICE_SILENT, error.sentence)
        return 0

    async def _ask_and_reconnect(self, machine: Machine) -> None:
        """GetMicrovm first: a new connection would wake a machine that went to sleep."""
        record = self._record
        info = await machine.look()
        while info.state == "SUSPENDING":
            await record.clock.sleep_s(SUSPENDING_POLL_S)
            info = await machine.look()
        if info.state == "SUSPENDED":
            self._traffic.dormant = record.profile.keep_awake == "never"
            record.move(Cause.SERVICE_SUSPENDED, "the service put the machine to sleep")
            return
        if record.phase is Phase.UNREACHABLE:
            record.move(Cause.SERVICE_RUNNING)
        self._connected(await machine.open_link(Patience(record.clock.monotonic_s())))

    # -- sleep

    async def suspend(self) -> None:
        """With ``turn`` held, from READY or PARKED. Raises what the service answers."""
        record = self._record
        machine = record.needs_machine()
        started_s = record.clock.monotonic_s()
        record.move(Cause.SUSPEND)
        record.emit("suspend_started")
        await machine.rest()
        try:
            info = await machine.suspend(SUSPEND_TIMEOUT_S)
        except MachineGone as error:
            self._ends.lose(error.reason)
            raise
        except GatewayError:
            record.move(Cause.SERVICE_RUNNING)
            raise
        if info.state != "SUSPENDED":
            record.move(Cause.SERVICE_RUNNING, f"the machine is {info.state}")
            return
        record.move(Cause.SERVICE_SUSPENDED)
        record.emit("suspend_complete", duration_ms=record.since_ms(started_s))

    async def _watch(self) -> None:
        every_s = self._rules.keep_awake_every_s
        while self._record.phase in ALIVE:
            pause_s = every_s
            if not self.turn.locked():
                async with self.turn:
                    pause_s = min(every_s, await self._decide())
                self.drive()
            await self._record.clock.sleep_s(max(pause_s, SHORTEST_WATCH_S))

    async def _decide(self) -> float:
        """One decision, carried out; returns when to decide again."""
        phase, now_s = self._record.phase, self._record.clock.monotonic_s()
        if phase is Phase.READY:
            decision = self._activity.decide(now_s)
        elif phase is Phase.PARKED:
            decision = self._activity.decide_parked(now_s)
        else:
            return self._rules.keep_awake_every_s
        try:
            await self._act(decision.action)
        except GatewayError as error:
            self._record.emit("notice", reason=error.sentence)
        return decision.again_in_s

    async def _act(self, action: Action) -> None:
        record, machine = self._record, self._record.needs_machine()
        if action is Action.KEEP_AWAKE:
            await machine.keep_awake()
            self._activity.kept_awake(record.clock.monotonic_s())
        elif action is Action.ASK_GUEST:
            await self._ask_guest(machine)
        elif action is Action.PARK:
            record.move(Cause.PARK)
            await machine.rest()
        elif action is Action.SUSPEND:
            self._traffic.dormant = True
            await self.suspend()
        elif action is Action.NOTICE:
            self._activity.noticed(record.clock.monotonic_s())
            bound_s = record.profile.max_unattended_awake_s
            record.emit("notice", reason=f"busy, and unattended for {bound_s:g} s: it will sleep")

    async def _ask_guest(self, machine: Machine) -> None:
        try:
            answer = await machine.link.call("activity", timeout_s=ACTIVITY_TIMEOUT_S)
            report = _report(answer.result)
        except (GatewayError, TypeError, ValueError):
            self._activity.guest_silent(self._record.clock.monotonic_s())
        else:
            self._activity.guest_says(report, self._record.clock.monotonic_s())


def _report(facts: dict[str, object]) -> GuestReport:
    """Raises ValueError or TypeError for numbers that are none."""
    return GuestReport(
        executing=int(str(facts.get("executing", 0))),
        waiting_input=facts.get("waiting_input") is True,
        cpu_s=float(str(facts.get("kernel_cpu_s", 0))) + float(str(facts.get("children_cpu_s", 0))),
    )
