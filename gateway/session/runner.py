"""The kernel session: one kernel, whatever machine carries it.

Joins the pure parts (``lifecycle``, ``activity``, ``traffic``) with the shells
(``control``, ``link``). Every method is for the bridge's loop, unless it says
thread-safe. A front door makes one object per kernel id and keeps it for the
kernel's whole life.

Who may change the phase: whoever holds ``_turn``. That is a public operation
(start, restart, suspend), or the *driver*, a task that runs while something is
to be repaired or woken and ends when nothing is. ``release`` alone does not
wait its turn: it ends the driver first, because a driver may be waiting for an
unreachable service.

What ends a kernel, and what follows: ``exit_status`` is set first, at once.
The endings of unfinished requests follow ``POLLERS_FIRST_S`` later: nbclient
polls once a second and must see a dead kernel before it sees an error reply,
or it reports a failed cell instead of ``DeadKernelError``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from gateway.activity import Action, Activity, GuestReport, Rules
from gateway.bridge import bridge
from gateway.clock import Clock
from gateway.control import Control
from gateway.errors import (
    GatewayError,
    GuestFault,
    KernelGone,
    LinkRefused,
    MachineGone,
    WrongPhase,
)
from gateway.events import EventSink
from gateway.lifecycle import Cause, Phase, step
from gateway.link_codec import LinkKey
from gateway.messages import Composer, Signer
from gateway.profiles import AGENT_PORT, Profile
from gateway.session import booting, files
from gateway.session.booting import StartRequest
from gateway.session.machine import Machine
from gateway.session.patience import Patience
from gateway.session.smalltalk import Effect, SmallTalk
from gateway.session.status import injection
from gateway.session.traffic import Gate, Sink, Traffic
from kernel_guest.shared.link import Established
from kernel_guest.shared.messages import Channel, Kind, LinkMessage

__all__ = ["KernelSession", "OnMessage", "StartRequest"]

OnMessage = Callable[[Channel, tuple[bytes, ...]], None]

# See the module's header. One poll a second, and half of one for a busy computer.
POLLERS_FIRST_S = 1.5
# Exit status of a kernel whose machine is gone; a process killed by SIGKILL has -9.
LOST_STATUS = 1
KILLED_STATUS = -9
SIGNAL_TIMEOUT_S = 5.0
SHUTDOWN_TIMEOUT_S = 15.0
RESTART_TIMEOUT_S = 60.0
SUSPEND_TIMEOUT_S = 60.0
# The control plane, or the machine's endpoint, does not answer: again after
# a second, doubling to half a minute.
SILENCE_FIRST_S = 1.0
SILENCE_MOST_S = 30.0
# A guest that breaks the protocol again and again is not worth a kernel.
MOST_FAULTS = 5

_ALIVE = frozenset(
    {
        Phase.CONNECTING,
        Phase.READY,
        Phase.PARKED,
        Phase.SUSPENDING,
        Phase.ASLEEP,
        Phase.WAKING,
        Phase.SUSPECT,
        Phase.UNREACHABLE,
    }
)
_SLEEPING = frozenset({Phase.PARKED, Phase.ASLEEP})
_DOUBTFUL = frozenset({Phase.SUSPECT, Phase.UNREACHABLE})


class KernelSession:
    """One kernel's machine, link and requests.

    ``on_message(channel, parts)`` is called on the bridge's loop for every
    message to the client: ``parts`` are signature, header, parent_header,
    metadata, content, buffers…, as on a ZMQ socket after ``<IDS|MSG>``. Who
    takes them calls ``consumed`` when they have left; with ``self_draining``
    that happens at once. ``on_death(exit_status)`` is called once per kernel
    process when it, or its machine, is gone and nobody asked for that.
    """

    def __init__(
        self,
        kernel_id: str,
        profile: Profile,
        control: Control,
        clock: Clock,
        events: EventSink,
        owner: str,
        *,
        workspace_folder: str | None = None,
        on_message: OnMessage | None = None,
        on_death: Callable[[int], None] | None = None,
        self_draining: bool = False,
    ) -> None:
        """Nothing happens yet. ``workspace_folder`` is the client's folder, absolute."""
        self.kernel_id = kernel_id
        self.profile = profile
        self.owner = owner
        self.events = events
        self.workspace_folder = workspace_folder
        self.on_message = on_message
        self.on_death = on_death
        self.control = control
        self.clock = clock
        self.home = bridge()
        self._self_draining = self_draining or on_message is None
        small_talk = SmallTalk(wake_for_completion=profile.wake_for_completion)
        self._traffic = Traffic(self._deliver, clock.now_s, small_talk)
        self._activity = Activity(Rules.of(profile), clock.monotonic_s())
        self._turn = asyncio.Lock()
        self._cut = asyncio.Event()
        self._phase = Phase.NEW
        self._phase_since_s = clock.monotonic_s()
        self._reason = ""
        self._generation = 0
        self._machine: Machine | None = None
        self._sink: Sink | None = None
        self._key: LinkKey | None = None
        self._pid: int | None = None
        self._exit: int | None = None
        self._client_session = ""
        self._launching: asyncio.Task[Machine] | None = None
        self._driver: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._releasing: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._kernel_gone: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<KernelSession {self.kernel_id} {self._phase.value} {self._machine!r}>"

    # -- memory reads, thread-safe

    def exit_status(self) -> int | None:
        """None while the kernel is (logically) alive, also asleep or unreachable."""
        return self._exit

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def reason(self) -> str:
        """Why the session is in this phase, for people; empty in ordinary phases."""
        return self._reason

    @property
    def kernel_info(self) -> dict[str, Any] | None:
        """Content of the last kernel_info_reply."""
        info = self._traffic.small_talk.kernel_info
        return dict(info) if info is not None else None

    @property
    def microvm_id(self) -> str | None:
        return self._machine.microvm_id if self._machine else None

    def statistics(self) -> dict[str, Any]:
        """Phase, generation, machine, link counters, outstanding requests; for status pages."""
        machine = self._machine
        return {
            "phase": self._phase.value,
            "reason": self._reason,
            "generation": self._generation,
            "microvm_id": self.microvm_id,
            "unfinished_requests": len(self._traffic.requests),
            "held_messages": self._traffic.held,
            "waiting_input": self._traffic.requests.waiting_input,
            "tokens_minted": machine.mints if machine else 0,
            "link": machine.link.core.statistics() if machine else None,
        }

    # -- start, restart, end

    async def start(self, request: StartRequest) -> dict[str, Any]:
        """Launch a machine (if there is none), start the kernel, wait for its kernel_info.

        Returns the content of the kernel's own kernel_info_reply. Raises from
        the error tree; whatever was launched is then released already.
        """
        try:
            async with self._turn:
                return await self._launch(request, Cause.LAUNCH)
        except BaseException as error:
            await asyncio.shield(self._release_after(error))
            raise

    async def restart_kernel(self, request: StartRequest) -> dict[str, Any]:
        """End the kernel process and start another on the same machine.

        If the machine is gone a new one is launched. Returns as ``start`` does.
        """
        async with self._turn:
            self._end_requests("the kernel was restarted", held_too=False)
            self._exit = None
            if self._phase is Phase.LOST:
                return await self._replace(request)
            if self._phase is Phase.FAILED:
                return await self._launch(request, Cause.LAUNCH)
            await self._come_up()
            assert self._machine is not None
            info = await self._boot(self._machine, "restart", request)
            self._open_gate()
            return info

    async def shutdown_kernel(self, now: bool) -> None:
        """End the kernel process; the machine stays. exit_status() is set afterwards."""
        if self._exit is not None:
            return
        if self._machine is not None and self._phase not in _SLEEPING:
            await self._quietly(self._machine.link, "shutdown", {"now": now}, SHUTDOWN_TIMEOUT_S)
        if self._exit is None:
            self._exit = KILLED_STATUS if now else 0
        self._traffic.kernel_ended()
        self._end_requests_later("the kernel was shut down")

    async def release(self) -> None:
        """Terminate the machine and wait for the service's word, bounded. Idempotent.

        Safe in atexit. Raises TeardownPending or what the service answered.
        """
        if self._phase is Phase.STOPPED:
            return
        if self._releasing is None or self._releasing.done():
            self._releasing = self.home.spawn(self._release(), f"release {self.kernel_id}")
        await asyncio.shield(self._releasing)

    # -- client to kernel

    def send(self, channel: Channel, parts: Sequence[bytes]) -> None:
        """Client to kernel. Never blocks, never raises for a machine that sleeps or is gone.

        Raises LinkFull above the bound (try again later) and MalformedMessage.
        """
        now_s = self.clock.monotonic_s()
        effect = self._traffic.from_client(channel, parts, self._gate(), self._sink)
        if effect is Effect.KERNEL_ENDS:
            self._exit = 0
        if effect is not None:
            return
        self._activity.client_sent(now_s)
        self._note_requests(now_s)
        self._drive()

    def consumed(self, size_bytes: int) -> None:
        """So many bytes given to ``on_message`` have left for their client, in order."""
        self._traffic.consumed(size_bytes)

    async def interrupt(self) -> None:
        """Stop what runs now. Does not wake an idle machine; does not raise when gone."""
        await self._tell_process("interrupt", {})

    async def signal(self, signum: int) -> None:
        """Deliver a signal to the kernel process. Does not wake; does not raise when gone."""
        await self._tell_process("signal", {"signum": signum})

    async def _tell_process(self, op: str, args: dict[str, Any]) -> None:
        machine = self._machine
        if machine is None or self._exit is not None or self._phase not in _ALIVE:
            return
        if self._phase in _SLEEPING:
            if not len(self._traffic.requests):
                return
            await self._awake()
        await self._quietly(machine.link, op, args, SIGNAL_TIMEOUT_S)

    async def suspend(self) -> None:
        """Put the machine to sleep now (SuspendMicrovm). The next request wakes it.

        Raises WrongPhase, and what the service answers.
        """
        async with self._turn:
            if self._phase is Phase.ASLEEP:
                return
            if self._phase not in (Phase.READY, Phase.PARKED):
                raise WrongPhase("suspend", self._phase.value)
            await self._suspend()
        self._drive()

    # -- files

    async def put_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a workspace file, in pieces of at most 1 MiB. Wakes."""
        machine = await self._awake()
        await files.put(machine.link, path, data, mode)

    async def get_file(self, path: str, max_bytes: int) -> bytes:
        """Read a workspace file; raises GuestFault beyond ``max_bytes``. Wakes."""
        machine = await self._awake()
        return await files.get(machine.link, path, max_bytes)

    async def list_files(self, globs: Sequence[str]) -> list[dict[str, Any]]:
        """Workspace files that match: ``{"path", "size", "mode"}``, at most 10 000. Wakes."""
        machine = await self._awake()
        return await files.listing(machine.link, globs)

    # -- launching

    async def _launch(self, request: StartRequest, cause: Cause) -> dict[str, Any]:
        started_s = self.clock.monotonic_s()
        self._exit = None
        self._move(cause)
        self.emit("launch_started")
        machine = await self._obtain(request)
        self._move(Cause.LAUNCH_ACCEPTED)
        patience = Patience(self.clock.monotonic_s(), self.profile.launch_timeout_s)
        await machine.open_link(patience)
        self.emit("launch_running", launch_duration_ms=self._since_ms(started_s))
        await self._fill_workspace(machine)
        info = await self._boot(machine, "start", request)
        self._move(Cause.LINK_OPEN)
        self._activity.woke(self.clock.monotonic_s())
        self._open_gate()
        self._watch()
        return info

    async def _obtain(self, request: StartRequest) -> Machine:
        """A machine from the service. Runs on as a task of its own if we are cancelled."""
        self._generation += 1
        self._key = self._key or LinkKey()
        self._client_session = request.session
        self._launching = self.home.spawn(
            booting.obtain_machine(self, self._key, self._generation), f"launch {self.kernel_id}"
        )
        self._machine = machine = await asyncio.shield(self._launching)
        self._sink = Sink(machine.link.send, machine.link.consumed)
        self._launching = None
        return machine

    async def _replace(self, request: StartRequest) -> dict[str, Any]:
        """The machine is gone, the service said so: the next generation."""
        self.emit("replacement_requested", reason=self._reason)
        self._stop_tasks()
        try:
            return await self._launch(request, Cause.REPLACE)
        except GatewayError as error:
            if (self._phase, Cause.GIVE_UP) in _GIVE_UPS:
                self._move(Cause.GIVE_UP, error.sentence)
            raise

    async def _fill_workspace(self, machine: Machine) -> None:
        if self.profile.workspace == "upload" and self.workspace_folder is not None:
            await files.upload(machine.link, self.home, self.workspace_folder, self.profile.upload)

    async def _boot(self, machine: Machine, op: str, request: StartRequest) -> dict[str, Any]:
        """Start or restart the kernel process and wait for its kernel_info."""
        signer = Signer(request.key, request.signature_scheme)
        self._traffic.use_composer(Composer(signer))
        self._traffic.kernel_ended()
        self._pid = None
        self._kernel_gone = asyncio.get_running_loop().create_future()
        try:
            return await self._attended(machine, self._boot_steps(machine, op, request))
        finally:
            self._kernel_gone.cancel()
            self._kernel_gone = None

    async def _boot_steps(self, machine: Machine, op: str, request: StartRequest) -> dict[str, Any]:
        kernel_name = request.kernel_name or self.profile.kernel_name
        self._pid = await booting.start_process(machine, op, request, kernel_name)
        self.emit("runtime_initialized")
        started_s = self.clock.monotonic_s()
        self.emit("runtime_healthcheck_started")
        assert self._sink is not None
        assert self._kernel_gone is not None
        info = await booting.ask_kernel_info(
            self._traffic, self._sink, self.clock, self._kernel_gone
        )
        self._traffic.small_talk.kernel_info = info
        self.emit("runtime_healthcheck_passed", healthcheck_duration_ms=self._since_ms(started_s))
        return info

    async def _attended(
        self, machine: Machine, work: Coroutine[Any, Any, dict[str, Any]]
    ) -> dict[str, Any]:
        """Run what needs the link, and mend the link when it is cut meanwhile."""
        task = self.home.spawn(work, f"boot {self.kernel_id}")
        try:
            while True:
                cut = asyncio.ensure_future(self._cut.wait())
                await asyncio.wait({task, cut}, return_when=asyncio.FIRST_COMPLETED)
                cut.cancel()
                if task.done():
                    return task.result()
                self._cut.clear()
                await machine.look()
                await machine.open_link(Patience(self.clock.monotonic_s()))
        finally:
            task.cancel()

    # -- what the link says

    def on_link_message(self, message: LinkMessage) -> None:
        """From the link's reader."""
        assert self._sink is not None
        if message.kind is Kind.JUPYTER:
            now_s = self.clock.monotonic_s()
            self._activity.kernel_sent(now_s)
            if self._traffic.from_kernel(message, self._sink):
                self._note_requests(now_s)
            return
        self._sink.consumed(message.size_bytes, message.lane)
        facts = message.json()
        if message.kind is Kind.GAP:
            self._on_gap(facts)
        elif facts.get("name") == "kernel_exited" and isinstance(facts.get("data"), dict):
            self._on_kernel_exited(facts["data"])

    def on_link_cut(self, reason: str) -> None:
        """From the link's pumps: nobody asked for this."""
        self._cut.set()
        if self._phase is Phase.READY:
            self.emit("sandbox_suspect", reason=reason)
            self._move(Cause.LINK_CUT, reason)
            self._drive()

    def _on_gap(self, facts: dict[str, Any]) -> None:
        messages, size_bytes = facts.get("messages"), facts.get("bytes")
        text = f"{messages} messages ({size_bytes} bytes) were dropped by the machine's journal"
        self.emit("gap", reason=text)
        stream = {"name": "stderr", "text": f"[{text}]\n"}
        self._traffic.say(Channel.IOPUB, "stream", stream)

    def _on_kernel_exited(self, facts: dict[str, Any]) -> None:
        if self._pid is not None and facts.get("pid") != self._pid:
            return
        status = _exit_status(facts)
        self.emit("kernel_exited", reason=f"status {status}")
        if self._kernel_gone is not None:
            if not self._kernel_gone.done():
                self._kernel_gone.set_exception(KernelGone(status))
            return
        self._kernel_died(status, "the kernel died", tell=facts.get("expected") is not True)

    def _kernel_died(self, status: int, reason: str, *, tell: bool) -> None:
        first = self._exit is None
        if first:
            self._exit = status
        self._traffic.kernel_ended()
        self._end_requests_later(reason)
        if first and tell and self.on_death is not None:
            self.on_death(status)

    def _deliver(self, channel: Channel, parts: tuple[bytes, ...]) -> None:
        if self.on_message is not None:
            self.on_message(channel, parts)
        if self._self_draining:
            self._traffic.consumed(sum(map(len, parts)))

    # -- endings of requests

    def _end_requests_later(self, reason: str) -> None:
        if self._ending is None or self._ending.done():
            self._ending = self.home.spawn(self._end_after_pollers(reason), "end requests")

    async def _end_after_pollers(self, reason: str) -> None:
        await self.clock.sleep_s(POLLERS_FIRST_S)
        self._end_requests(reason, held_too=self._phase is Phase.LOST)

    def _end_requests(self, reason: str, *, held_too: bool) -> None:
        ending, self._ending = self._ending, None
        if ending is not None and ending is not asyncio.current_task():
            ending.cancel()
        self._traffic.end(reason, held_too=held_too)
        self._note_requests(self.clock.monotonic_s())

    def _note_requests(self, now_s: float) -> None:
        requests = self._traffic.requests
        self._activity.in_flight(len(requests), now_s)
        self._activity.waiting_input(requests.waiting_input, now_s)

    # -- the driver: repair and wake

    def _gate(self) -> Gate:
        if self._phase is Phase.READY and self._exit is None:
            return Gate.OPEN
        if self._phase in _SLEEPING and self._exit is None:
            return Gate.QUIET
        return Gate.WAIT

    def _open_gate(self) -> None:
        """The link is up and the kernel runs: what waited goes out."""
        if self._sink is not None and self._gate() is Gate.OPEN:
            self._traffic.flush(self._sink)

    def _drive(self) -> None:
        """See that somebody is at work if there is work: cheap, called often."""
        if self._driver is None or self._driver.done():
            if self._must_drive():
                self._driver = self.home.spawn(self._drive_on(), f"drive {self.kernel_id}")

    def _must_drive(self) -> bool:
        if self._releasing is not None:
            return False
        if self._phase in _SLEEPING:
            return self._exit is None and self._traffic.wants_machine
        return self._phase in _DOUBTFUL or (self._gate() is Gate.OPEN and self._traffic.held > 0)

    async def _drive_on(self) -> None:
        while self._must_drive():
            async with self._turn:
                if self._phase in _DOUBTFUL:
                    await self._recover()
                elif self._phase in _SLEEPING and self._traffic.wants_machine:
                    await self._wake()
                elif self._gate() is Gate.OPEN:
                    await self._flush_slowly()

    async def _flush_slowly(self) -> None:
        """More was held than the link takes at once."""
        assert self._sink is not None
        while self._gate() is Gate.OPEN and not self._traffic.flush(self._sink):
            await self.clock.sleep_s(0.01)

    async def _wake(self) -> None:
        """From PARKED or ASLEEP to READY, or to doubt, or to loss."""
        machine = self._machine
        assert machine is not None
        started_s = self.clock.monotonic_s()
        self._move(Cause.WAKE)
        self.emit("resume_started")
        try:
            await machine.wake(Patience(started_s))
            established = await machine.open_link(Patience(self.clock.monotonic_s()))
        except MachineGone as error:
            self._lose(error.reason)
        except (LinkRefused, GuestFault) as error:
            self._lose(error.sentence)
        except GatewayError as error:
            self.emit("control_unreachable", reason=error.sentence)
            self._move(Cause.SERVICE_SILENT, error.sentence)
        else:
            self._connected(established)
            self.emit("resume_running", duration_ms=self._since_ms(started_s))

    async def _recover(self) -> None:
        """From doubt to certainty: one question, one attempt, and a pause if neither helped."""
        machine = self._machine
        assert machine is not None
        pause_s, faults = SILENCE_FIRST_S, 0
        while self._phase in _DOUBTFUL:
            try:
                await self._recover_once(machine)
            except MachineGone as error:
                self._lose(error.reason)
            except LinkRefused as error:
                self._lose(error.sentence)
            except GuestFault as error:
                faults += 1
                if faults >= MOST_FAULTS:
                    self._lose(error.sentence)
            except GatewayError as error:
                self._say_unreachable(error)
            if self._phase in _DOUBTFUL:
                await self.clock.sleep_s(pause_s)
                pause_s = min(SILENCE_MOST_S, 2 * pause_s)

    def _say_unreachable(self, error: GatewayError) -> None:
        if self._phase is Phase.SUSPECT:
            self.emit("control_unreachable", reason=error.sentence)
            self._move(Cause.SERVICE_SILENT, error.sentence)

    async def _recover_once(self, machine: Machine) -> None:
        info = await machine.look()
        while info.state == "SUSPENDING":
            await self.clock.sleep_s(0.1)
            info = await machine.look()
        if info.state == "SUSPENDED":
            self._traffic.dormant = self.profile.keep_awake == "never"
            self._move(Cause.SERVICE_SUSPENDED, "the service put the machine to sleep")
            return
        if self._phase is Phase.UNREACHABLE:
            self._move(Cause.SERVICE_RUNNING)
        self._connected(await machine.open_link(Patience(self.clock.monotonic_s())))

    def _connected(self, established: Established) -> None:
        """The link is open again: to the same guest, or to one that forgot everything."""
        self._move(Cause.LINK_OPEN)
        self._activity.woke(self.clock.monotonic_s())
        if established.restarted:
            self._kernel_died(LOST_STATUS, "the machine lost its kernel", tell=True)
        self._open_gate()

    def _lose(self, reason: str) -> None:
        """The service says that the machine is no more."""
        machine = self._machine
        assert machine is not None
        self._move(Cause.SERVICE_TERMINAL, reason)
        self.emit("sandbox_lost", reason=reason)
        machine.link.abandon(reason)
        self._kernel_died(LOST_STATUS, f"its machine is gone: {reason}", tell=True)

    async def _come_up(self) -> None:
        """READY from wherever, with ``_turn`` held. Raises WrongPhase or MachineGone."""
        if self._phase in _DOUBTFUL:
            await self._recover()
        if self._phase in _SLEEPING:
            await self._wake()
        if self._phase is Phase.LOST:
            raise MachineGone(self.microvm_id or "", self._reason)
        if self._phase is not Phase.READY:
            raise WrongPhase("reach the kernel", self._phase.value)

    async def _awake(self) -> Machine:
        """A machine that can be called."""
        if self._phase is not Phase.READY:
            async with self._turn:
                await self._come_up()
        assert self._machine is not None
        return self._machine

    # -- sleep

    def _watch(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = self.home.spawn(self._watch_on(), f"watch {self.kernel_id}")

    async def _watch_on(self) -> None:
        every_s = Rules.of(self.profile).keep_awake_every_s
        while self._phase in _ALIVE:
            pause_s = every_s
            if self._phase in (Phase.READY, Phase.PARKED) and not self._turn.locked():
                async with self._turn:
                    pause_s = min(every_s, await self._decide())
            await self.clock.sleep_s(max(pause_s, 0.01))

    async def _decide(self) -> float:
        """One decision, carried out; returns when to decide again."""
        now_s = self.clock.monotonic_s()
        if self._phase is Phase.READY:
            decision = self._activity.decide(now_s)
        elif self._phase is Phase.PARKED:
            decision = self._activity.decide_parked(now_s)
        else:
            return decision_pause(self.profile)
        try:
            await self._act(decision.action)
        except GatewayError as error:
            self.emit("notice", reason=error.sentence)
        return decision.again_in_s

    async def _act(self, action: Action) -> None:
        assert self._machine is not None
        now_s = self.clock.monotonic_s()
        if action is Action.KEEP_AWAKE:
            await self._machine.keep_awake()
            self._activity.kept_awake(self.clock.monotonic_s())
        elif action is Action.ASK_GUEST:
            await self._ask_activity(self._machine)
        elif action is Action.PARK:
            self._move(Cause.PARK)
            await self._machine.link.close()
            self._drive()
        elif action is Action.SUSPEND:
            self._traffic.dormant = True
            await self._suspend()
            self._drive()
        elif action is Action.NOTICE:
            bound_s = self.profile.max_unattended_awake_s
            self._activity.noticed(now_s)
            self.emit("notice", reason=f"busy and unattended for {bound_s:g} s: it will sleep")

    async def _ask_activity(self, machine: Machine) -> None:
        now_s = self.clock.monotonic_s
        try:
            answer = (await machine.link.call("activity", timeout_s=SIGNAL_TIMEOUT_S)).result
            report = GuestReport(
                executing=int(answer.get("executing", 0)),
                waiting_input=answer.get("waiting_input") is True,
                cpu_s=float(answer.get("kernel_cpu_s", 0)) + float(answer.get("children_cpu_s", 0)),
            )
        except (GatewayError, TypeError, ValueError):
            self._activity.guest_silent(now_s())
        else:
            self._activity.guest_says(report, now_s())

    async def _suspend(self) -> None:
        """With ``_turn`` held, from READY or PARKED."""
        machine = self._machine
        assert machine is not None
        started_s = self.clock.monotonic_s()
        self._move(Cause.SUSPEND)
        self.emit("suspend_started")
        await machine.link.close()
        try:
            info = await machine.suspend(SUSPEND_TIMEOUT_S)
        except MachineGone as error:
            self._lose(error.reason)
            raise
        except GatewayError:
            self._move(Cause.SERVICE_RUNNING)
            raise
        if info.state == "SUSPENDED":
            self._move(Cause.SERVICE_SUSPENDED)
            self.emit("suspend_complete", duration_ms=self._since_ms(started_s))
        else:
            self._move(Cause.SERVICE_RUNNING, f"the machine is {info.state}")

    # -- release

    async def _release_after(self, error: BaseException) -> None:
        """A start failed: nothing may be left. What the release itself meets is only reported."""
        try:
            await self.release()
        except GatewayError as trouble:
            self.emit("notice", reason=trouble.sentence)
        self._reason = error.sentence if isinstance(error, GatewayError) else type(error).__name__

    async def _release(self) -> None:
        started_s = self.clock.monotonic_s()
        self._stop_tasks()
        self._move(Cause.STOP)
        if self._exit is None:
            self._exit = 0
        await self._launched()
        if self._machine is None:
            self._move(Cause.STOP_CONFIRMED)
            return
        self.emit("teardown_started")
        self._machine.link.abandon("the kernel was released")
        try:
            await self._machine.terminate()
        except GatewayError as error:
            self._teardown_trouble(error, started_s)
            raise
        self._move(Cause.STOP_CONFIRMED)
        self.emit(
            "teardown_complete",
            teardown_duration_ms=self._since_ms(started_s),
            teardown_status="confirmed",
        )

    def _teardown_trouble(self, error: GatewayError, started_s: float) -> None:
        """Asked and not confirmed: what exists is kept in mind, a later release tries again."""
        self._move(Cause.STOP_UNCONFIRMED, error.sentence)
        self.emit(
            "teardown_pending",
            teardown_duration_ms=self._since_ms(started_s),
            teardown_status="unconfirmed",
            reason=error.sentence,
        )

    async def _launched(self) -> None:
        """A launch that was under way may still give a machine: it must be ended too."""
        launching, self._launching = self._launching, None
        if launching is None:
            return
        try:
            self._machine = await launching
        except GatewayError:
            return

    def _stop_tasks(self) -> None:
        for task in (self._driver, self._watcher, self._ending):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        self._driver = self._watcher = self._ending = None

    # -- small things

    async def _quietly(self, link: Any, op: str, args: dict[str, Any], timeout_s: float) -> None:
        """A call whose failure only means that there is nobody left to do it."""
        try:
            await link.call(op, args, timeout_s=timeout_s)
        except GatewayError as error:
            self.emit("notice", reason=f"{op}: {error.sentence}")

    def _move(self, cause: Cause, reason: str = "") -> None:
        before, since_s = self._phase, self._phase_since_s
        self._phase = step(before, cause)
        self._phase_since_s = self.clock.monotonic_s()
        self._reason = reason
        self.emit(
            "phase",
            previous_phase=before.value,
            reason=reason or None,
            duration_ms=round((self._phase_since_s - since_s) * 1000),
        )
        said = injection(before, self._phase, len(self._traffic.requests))
        if said is not None:
            self._traffic.say(Channel.IOPUB, "status", {"execution_state": said})

    def _since_ms(self, started_s: float) -> int:
        return round((self.clock.monotonic_s() - started_s) * 1000)

    def emit(self, name: str, **facts: Any) -> None:
        """An event with everything that is known: correlation, machine, profile."""
        machine = self._machine
        info = machine.info if machine else None
        profile = self.profile
        base = {
            "microvm_id": self.microvm_id,
            "endpoint": info.url if info else None,
            "profile": profile.name,
            "image": info.image_arn if info else profile.image_arn,
            "image_version": info.image_version if info else profile.image_version,
            "status": self._phase.value,
            "aws_state": info.state if info else None,
            "region": self.control.region or profile.region,
            "port": AGENT_PORT,
            "maximum_duration_seconds": profile.maximum_duration_s,
            "kernel_id": self.kernel_id,
            "client_session": self._client_session,
            "generation": self._generation,
            "owner": self.owner,
            "scope_fingerprint": profile.fingerprint(),
            "phase": self._phase.value,
        }
        self.events.emit(name, self.clock.now_s(), **{**base, **facts})


_GIVE_UPS = frozenset(
    (phase, Cause.GIVE_UP)
    for phase in (Phase.LAUNCHING, Phase.RESTORING, Phase.CONNECTING, Phase.REPLACING)
)


def decision_pause(profile: Profile) -> float:
    return Rules.of(profile).keep_awake_every_s


def _exit_status(facts: dict[str, Any]) -> int:
    """As Popen has it: negative for a signal. What the guest says is checked."""
    signum, code = facts.get("signal"), facts.get("exit_code")
    if isinstance(signum, int) and 0 < signum < 128:
        return -signum
    return code if isinstance(code, int) and -256 < code < 256 else LOST_STATUS
