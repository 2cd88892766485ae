"""Machines: the shell around `lifecycle.py` that moves processes and sockets.

A `Machine` joins one lifecycle, one running machine of the engine and one proxy.
Each stimulus goes through `_apply`, which is synchronous: the table decides, the
record is written, the next deadline is armed, waiters are woken, and at most one
activity (launch, suspend, resume, end) is begun.  Ending is the only stimulus
that may arrive while another activity runs; it cancels that activity first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from gateway.local.behaviours import implements
from gateway.local.clock import Clock, Timer
from gateway.local.faults import FaultBoard
from gateway.local.hooks import HookOutcome, HookResult, call_hook
from gateway.local.interfaces import (
    Engine,
    EngineError,
    FaultPoint,
    ImageBuildError,
    MachineSpec,
    NotAdmittedError,
    PendingPolicy,
    ProxiedMachine,
    Proxy,
    ProxyLimits,
    RunningMachine,
    TokenGrant,
)
from gateway.local.lifecycle import (
    Action,
    Deadline,
    IdlePolicy,
    MachineLifecycle,
    Phase,
    Stimulus,
)
from gateway.local.settings import ServiceSettings
from gateway.local.state import MachineRecord, State
from gateway.local.tokens import TokenSmith

log = logging.getLogger(__name__)

#: Bounds a thaw or freeze that hangs; the engine's own work takes milliseconds.
ENGINE_LIMIT_S = 30.0
KILL_ATTEMPTS = 3

INTERNAL_ERROR = "Internal error of the local service; its log says more."

ProxyMaker = Callable[[ProxiedMachine, ProxyLimits, Clock, FaultBoard], Proxy]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every machine of a service shares."""

    engine: Engine
    state: State
    clock: Clock
    settings: ServiceSettings
    smith: TokenSmith
    faults: FaultBoard
    make_proxy: ProxyMaker


class Machine:
    """One machine, from RunMicrovm until nothing of it is left.

    Implements `ProxiedMachine` for its proxy.
    """

    def __init__(
        self,
        around: Surroundings,
        record: MachineRecord,
        spec: MachineSpec,
        *,
        payload: str | None,
        on_ended: Callable[[Machine], None],
    ) -> None:
        self.record = record
        self._around = around
        self._spec = spec
        self._payload = payload
        self._on_ended = on_ended
        self._running: RunningMachine | None = None
        self._starting: asyncio.Task[RunningMachine] | None = None
        self._activity: asyncio.Task[None] | None = None
        self._timer: Timer | None = None
        self._changed = asyncio.Event()
        self._opened = asyncio.Event()
        self._shown = deque([(around.clock.monotonic_s(), record)], maxlen=16)
        self._lifecycle = MachineLifecycle(
            policy=_idle_policy(record),
            maximum_duration_s=record.maximum_duration_s,
            now_s=around.clock.monotonic_s(),
            window_after_explicit=around.settings.window_after_explicit_suspend,
        )
        limits = around.settings.proxy_limits(record.memory_mib)
        self._proxy = around.make_proxy(self, limits, around.clock, around.faults)

    def __repr__(self) -> str:
        return f"<Machine {self.microvm_id} {self._lifecycle.phase.name}>"

    @property
    def microvm_id(self) -> str:
        return self.record.microvm_id

    @property
    def phase(self) -> Phase:
        return self._lifecycle.phase

    # -- what the API calls

    @implements("run-answers-pending")
    async def begin(self) -> None:
        """Open the endpoint and begin the launch.  Raises OSError if there is no port."""
        port = await self._proxy.start()
        self.record = replace(self.record, endpoint=f"http://127.0.0.1:{port}")
        self._shown.clear()
        self._note_record()
        self._arm()
        self._begin_activity(self._launch())
        self._opened.set()

    async def opened(self) -> None:
        """Return when the endpoint is known: for a second caller with the same clientToken."""
        async with asyncio.timeout(ENGINE_LIMIT_S):
            await self._opened.wait()

    def suspend(self) -> None:
        """Begin an explicit suspend.  Raises RefusedError."""
        self._apply(Stimulus.SUSPEND_ASKED)

    def resume(self) -> None:
        """Begin a resume, or join the one that runs.  Raises RefusedError."""
        self._apply(Stimulus.RESUME_ASKED)

    def terminate(self, reason: str | None = None) -> None:
        """Begin the end; idempotent."""
        self._apply(Stimulus.TERMINATE_ASKED, reason)

    def main_exited(self) -> None:
        """The engine says that the machine's init ended by itself."""
        self._apply(Stimulus.MAIN_EXITED)

    def crash(self) -> None:
        """Kill the machine's init, as if it had crashed (a fault); the engine notices."""
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._running.pid, signal.SIGKILL)

    @implements("state-eventually-consistent")
    def shown(self) -> MachineRecord:
        """The record as GetMicrovm sees it now: possibly a moment old (LM 3.4)."""
        horizon_s = self._around.clock.monotonic_s() - self._around.settings.state_lag_s
        seen = self._shown[0][1]
        for at_s, record in self._shown:
            if at_s <= horizon_s:
                seen = record
        return seen

    async def reached(self, *phases: Phase) -> Phase:
        """Return when the machine is in one of these phases; the caller brings the deadline."""
        while self.phase not in phases:
            await self._changed.wait()
        return self.phase

    # -- what the proxy calls (ProxiedMachine)

    def read_token(self, token: str | None) -> TokenGrant:
        return self._around.smith.read(token, self.microvm_id, self._around.clock.now_s())

    @implements("idle-by-inbound")
    def note_inbound(self, size_bytes: int) -> None:
        self._lifecycle.note_inbound(self._around.clock.monotonic_s())

    @implements(
        "pending-request-held-or-502",
        "held-while-resuming",
        "suspended-without-autoresume-502",
        "terminated-502",
        "request-while-suspending-waits",
        "no-ingress-502",
    )
    async def admit(self) -> RunningMachine:
        if self.record.ingress and all(arn.endswith("NO_INGRESS") for arn in self.record.ingress):
            raise NotAdmittedError("the machine has no ingress")
        try:
            async with asyncio.timeout(self._around.settings.held_request_s):
                return await self._until_running()
        except TimeoutError:
            raise NotAdmittedError("the request was held for too long") from None

    async def _until_running(self) -> RunningMachine:
        resumed = False
        while self.phase is not Phase.RUNNING:
            if not self._may_wait(resumed):
                raise NotAdmittedError(self.phase.state)
            if self.phase is Phase.SUSPENDED:
                self._apply(Stimulus.RESUME_ASKED)
                resumed = True
            await self._changed.wait()
        assert self._running is not None
        return self._running

    def _may_wait(self, resumed: bool) -> bool:
        """Whether a request may be held in this phase; a failed resume is not tried twice."""
        match self.phase:
            case Phase.LAUNCHING:
                return self._around.settings.pending_policy is PendingPolicy.HOLD
            case Phase.RESUMING:
                return True
            case Phase.SUSPENDING:
                return self._lifecycle.auto_resume
            case Phase.SUSPENDED:
                return self._lifecycle.auto_resume and not resumed
            case _:
                return False

    # -- the one way in

    def _apply(self, stimulus: Stimulus, reason: str | None = None) -> None:
        """Let the table decide and do what it says.  Raises RefusedError."""
        before = self.phase
        action = self._lifecycle.handle(stimulus, self._around.clock.monotonic_s(), reason)
        if self.phase is not before:
            log.info(
                "%s: %s -> %s (%s)", self.microvm_id, before.name, self.phase.name, stimulus.value
            )
            self._record_phase()
        self._arm()
        self._begin(action)

    def _record_phase(self) -> None:
        ended = self.phase is Phase.TERMINATED
        self.record = replace(
            self.record,
            state=self.phase.state,
            state_reason=self._lifecycle.reason,
            terminated_at=self._around.clock.now_s() if ended else None,
        )
        self._note_record()
        self._changed.set()
        self._changed = asyncio.Event()

    def _note_record(self) -> None:
        self._shown.append((self._around.clock.monotonic_s(), self.record))
        self._around.state.put_machine(self.record)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (deadline := self._lifecycle.deadline()) is not None:
            delay_s = deadline.at_s - self._around.clock.monotonic_s()
            self._timer = self._around.clock.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        """Time is up, unless bytes have come in since the timer was set."""
        deadline: Deadline | None = self._lifecycle.deadline()
        if deadline is None:
            return
        if deadline.at_s <= self._around.clock.monotonic_s():
            self._apply(deadline.stimulus)
        else:
            self._arm()

    def _begin(self, action: Action) -> None:
        match action:
            case Action.SUSPEND:
                self._begin_activity(self._suspend())
            case Action.RESUME:
                self._begin_activity(self._resume())
            case Action.END | Action.KILL:
                self._begin_activity(self._end(self._activity, with_hook=action is Action.END))
            case Action.NOTHING:
                pass

    def _begin_activity(self, activity: Coroutine[Any, Any, None]) -> None:
        self._activity = asyncio.create_task(activity, name=f"{self.microvm_id}")
        self._activity.add_done_callback(self._activity_done)

    def _activity_done(self, task: asyncio.Task[None]) -> None:
        """An activity that failed in a way nobody foresaw ends the machine."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: an activity failed", self.microvm_id, exc_info=error)
            self.terminate(INTERNAL_ERROR)

    # -- activities

    @implements(
        "pending-until-run-hook-200", "run-hook-failure-terminates", "launch-failure-reason"
    )
    async def _launch(self) -> None:
        try:
            await self._start()
            await self._around.clock.sleep_s(self._around.settings.launch_delay_s)
            failure = await self._run_hook()
        except (EngineError, ImageBuildError) as error:
            failure = str(error)
        if failure is None:
            self._apply(Stimulus.LAUNCHED)
        else:
            self._apply(Stimulus.LAUNCH_FAILED, failure)

    async def _start(self) -> None:
        engine, image = self._around.engine, self._spec.image
        if not engine.has_template(image):  # the service was restarted since the image was built
            await engine.prepare_image(image, call_hooks=False)
        # Shielded: a start that is cancelled half way would leave a process that nobody
        # knows.  Who ends the machine waits for it instead (see `_settle`).
        self._starting = asyncio.create_task(engine.start(self._spec))
        self._running = await asyncio.shield(self._starting)

    @implements("run-hook-body", "run-hook-payload-null")
    async def _run_hook(self) -> str | None:
        """Call /run; returns why the machine must end, or None."""
        body = {"microvmId": self.microvm_id, "runHookPayload": self._payload}
        if self._around.faults.take(FaultPoint.RUN_HOOK, self.microvm_id):
            return _hook_reason("Run", HookOutcome(HookResult.ANSWERED, 500), 0)
        timeout_s = self._spec.image.hooks.run_s
        outcome = await self._hook("run", timeout_s, body)
        return None if outcome is None or outcome.ok else _hook_reason("Run", outcome, timeout_s)

    @implements("suspend-hook-failure-keeps-running", "suspend-cuts-connections")
    async def _suspend(self) -> None:
        assert self._running is not None
        faulty = self._around.faults.take(FaultPoint.SUSPEND_HOOK, self.microvm_id)
        outcome = await self._hook("suspend", self._spec.image.hooks.suspend_s)
        if faulty or (outcome is not None and not outcome.ok):
            log.warning("%s: suspend hook failed: %s", self.microvm_id, outcome)
            self._apply(Stimulus.SUSPEND_FAILED)
            return
        await self._around.clock.sleep_s(self._around.settings.suspend_delay_s)
        try:
            await self._freeze()
        except EngineError as error:
            log.warning("%s: %s", self.microvm_id, error)
            self._apply(Stimulus.SUSPEND_FAILED)
            return
        self._apply(Stimulus.FROZEN)

    async def _freeze(self) -> None:
        assert self._running is not None
        if self._around.settings.cut_on_suspend:
            self._proxy.cut_connections()
        await _bounded(self._around.engine.freeze(self._running), "freezing")

    @implements("resume-hook-before-traffic", "resume-failure-stays-suspended")
    async def _resume(self) -> None:
        assert self._running is not None
        try:
            await self._around.clock.sleep_s(self._around.settings.resume_delay_s)
            await _bounded(self._around.engine.thaw(self._running), "thawing")
            faulty = self._around.faults.take(FaultPoint.RESUME_HOOK, self.microvm_id)
            outcome = await self._hook("resume", self._spec.image.hooks.resume_s)
            if not faulty and (outcome is None or outcome.ok):
                self._apply(Stimulus.RESUMED)
                return
            log.warning("%s: resume hook failed: %s", self.microvm_id, outcome)
            await _bounded(self._around.engine.freeze(self._running), "freezing")
        except EngineError as error:
            log.warning("%s: %s", self.microvm_id, error)
        self._apply(Stimulus.RESUME_FAILED)

    @implements("terminate-hook-best-effort")
    async def _end(self, earlier: asyncio.Task[None] | None, *, with_hook: bool) -> None:
        try:
            await self._settle(earlier)
            self._proxy.cut_connections()
            if with_hook:
                await self._hook("terminate", self._spec.image.hooks.terminate_s)
            await self._around.clock.sleep_s(self._around.settings.terminate_delay_s)
        finally:
            # Whatever went wrong above, the machine must not stay.
            await self._kill()
            self._apply(Stimulus.GONE)
            self._on_ended(self)

    async def _settle(self, earlier: asyncio.Task[None] | None) -> None:
        """Stop the activity that the end interrupts; a start is waited for, not cut."""
        if earlier is not None:
            earlier.cancel()
            await asyncio.wait([earlier])
        if self._running is None and self._starting is not None:
            await asyncio.wait([self._starting], timeout=ENGINE_LIMIT_S)
            self._starting.cancel()  # nothing, if it has come to its end
            with contextlib.suppress(EngineError, ImageBuildError, asyncio.CancelledError):
                self._running = await self._starting

    async def _kill(self) -> None:
        for _ in range(KILL_ATTEMPTS):
            try:
                if self._running is not None:
                    await _bounded(self._around.engine.kill(self._running), "killing")
                    self._running = None
            except EngineError as error:
                log.error("%s: %s", self.microvm_id, error)

    async def close(self) -> None:
        """Close the endpoint of an ended machine."""
        if self._timer is not None:
            self._timer.cancel()
        await self._proxy.close()

    @implements("hooks-only-if-enabled")
    async def _hook(
        self, name: str, timeout_s: float | None, body: dict[str, Any] | None = None
    ) -> HookOutcome | None:
        """Call a hook if the image enables it; None if it does not."""
        if timeout_s is None or self._running is None:
            return None
        port = self._spec.image.hooks.port
        return await call_hook(self._running, port, name, timeout_s=timeout_s, body=body)


@implements("run-hook-failure-text")
def _hook_reason(name: str, outcome: HookOutcome, timeout_s: float | None) -> str:
    hint = "Please check your hook endpoint and application logs for more details."
    if outcome.result is HookResult.ANSWERED:
        return f"{name} lifecycle hook returned HTTP status {outcome.status}. {hint}"
    if outcome.result is HookResult.TIMED_OUT:
        return f"{name} lifecycle hook timed out after PT{timeout_s:g}S. {hint}"
    return f"{name} lifecycle hook could not be reached. {hint}"


def _idle_policy(record: MachineRecord) -> IdlePolicy | None:
    if record.idle_policy is None:
        return None
    return IdlePolicy(
        max_idle_s=record.idle_policy["maxIdleDurationSeconds"],
        suspended_s=record.idle_policy["suspendedDurationSeconds"],
        auto_resume=record.idle_policy["autoResumeEnabled"],
    )


async def _bounded(work: Awaitable[None], what: str) -> None:
    try:
        async with asyncio.timeout(ENGINE_LIMIT_S):
            await work
    except TimeoutError:
        raise EngineError(f"{what} took longer than {ENGINE_LIMIT_S:g} s") from None
