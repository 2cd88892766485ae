"""The kernel session: one kernel, whatever machine carries it.

Joins the pure parts (``lifecycle``, ``activity``, ``traffic``) with the shells
(``control``, ``link``). A front door makes one object per kernel id and keeps it
for the kernel's whole life. Every method is for the bridge's loop, unless it
says thread-safe.

    runner.py    what front doors call; launch, restart, release; what the link says
    booting.py   the steps of a start            record.py    facts and phase
    upkeep.py    repair, wake, sleep             ends.py      how a kernel ends
    traffic.py   messages (pure)                 machine.py   one machine

``release`` does not wait its turn behind a driver, which may be waiting for an
unreachable service: it ends the driver first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from gateway.activity import Activity, Rules
from gateway.bridge import bridge
from gateway.clock import Clock
from gateway.control import Control
from gateway.errors import GatewayError, KernelGone, LaunchFailed, MachineGone, WrongPhase
from gateway.events import EventSink
from gateway.lifecycle import Cause, Phase
from gateway.link_codec import LinkKey
from gateway.messages import Composer, Signer
from gateway.profiles import Profile
from gateway.session import booting, files
from gateway.session.booting import StartRequest
from gateway.session.ends import KILLED_STATUS, LOST_STATUS, Ends
from gateway.session.machine import Machine
from gateway.session.patience import Patience
from gateway.session.record import ALIVE, SLEEPING, Record
from gateway.session.smalltalk import Effect, SmallTalk
from gateway.session.status import injection
from gateway.session.teardown import tear_down
from gateway.session.traffic import Traffic
from gateway.session.upkeep import Upkeep
from kernel_guest.shared.messages import Channel, Kind, LinkMessage

__all__ = ["KernelSession", "OnMessage", "StartRequest"]

OnMessage = Callable[[Channel, tuple[bytes, ...]], None]

SIGNAL_TIMEOUT_S = 5.0
SHUTDOWN_TIMEOUT_S = 15.0


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
        self.on_message = on_message
        self._self_draining = self_draining or on_message is None
        self._record = record = Record(
            kernel_id, profile, control, clock, events, owner, bridge(), workspace_folder
        )
        self._traffic = Traffic(
            self._deliver, clock.now_s, SmallTalk(wake_for_completion=profile.wake_for_completion)
        )
        self._activity = Activity(Rules.of(profile), clock.monotonic_s())
        self._ends = Ends(record, self._traffic, self._activity, on_death)
        self._upkeep = Upkeep(record, self._traffic, self._activity, self._ends)
        self._cut = asyncio.Event()
        self._pid: int | None = None
        self._launching: asyncio.Task[Machine] | None = None
        self._releasing: asyncio.Task[None] | None = None
        self._kernel_gone: asyncio.Future[None] | None = None
        record.on_move = self._on_move

    def __repr__(self) -> str:
        record = self._record
        return f"<KernelSession {record.kernel_id} {record.phase.value} {record.machine!r}>"

    # -- memory reads, thread-safe

    def exit_status(self) -> int | None:
        """None while the kernel is (logically) alive, also asleep or unreachable."""
        return self._record.exit_status

    @property
    def phase(self) -> Phase:
        """Where the session's machine is."""
        return self._record.phase

    @property
    def reason(self) -> str:
        """Why the session is in this phase, for people; empty in ordinary phases."""
        return self._record.reason

    @property
    def kernel_info(self) -> dict[str, Any] | None:
        """Content of the last kernel_info_reply."""
        info = self._traffic.small_talk.kernel_info
        return dict(info) if info is not None else None

    @property
    def microvm_id(self) -> str | None:
        """The present machine's id."""
        machine = self._record.machine
        return machine.microvm_id if machine else None

    @property
    def events(self) -> EventSink:
        """Where lifecycle events go."""
        return self._record.events

    def statistics(self) -> dict[str, Any]:
        """Phase, generation, machine, link counters, outstanding requests; for status pages."""
        machine = self._record.machine
        return {
            "phase": self.phase.value,
            "reason": self.reason,
            "generation": self._record.generation,
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
            async with self._upkeep.turn:
                return await self._launch(request, Cause.LAUNCH)
        except BaseException as error:
            await asyncio.shield(self._release_after(error))
            raise

    async def restart_kernel(self, request: StartRequest) -> dict[str, Any]:
        """End the kernel process and start another on the same machine.

        If the machine is gone a new one is launched. Returns as ``start`` does.
        """
        async with self._upkeep.turn:
            self._ends.end_requests("the kernel was restarted", held_too=False)
            self._record.exit_status = None
            if self.phase is Phase.LOST:
                return await self._replace(request)
            if self.phase is Phase.FAILED:
                return await self._launch(request, Cause.LAUNCH)
            machine = await self._upkeep.come_up()
            info = await self._boot(machine, "restart", request)
            self._upkeep.begin()
            return info

    async def shutdown_kernel(self, now: bool) -> None:
        """End the kernel process; the machine stays. exit_status() is set afterwards.

        A sleeping machine is not woken for it: its kernel is ended logically, and
        really by the restart or release that follows.
        """
        record = self._record
        if record.exit_status is not None:
            return
        if record.machine is not None and self.phase in ALIVE - SLEEPING:
            await self._quietly(record.machine, "shutdown", {"now": now}, SHUTDOWN_TIMEOUT_S)
        status = KILLED_STATUS if now else 0
        self._ends.kernel_died(status, "the kernel was shut down", expected=True)

    async def release(self) -> None:
        """Terminate the machine and wait for the service's word, bounded. Idempotent.

        Safe in atexit. Raises TeardownPending or what the service answered.
        """
        if self.phase is Phase.STOPPED:
            return
        if self._releasing is None or self._releasing.done():
            self._releasing = self._record.home.spawn(self._release(), "release a machine")
        await asyncio.shield(self._releasing)

    # -- client to kernel

    def send(self, channel: Channel, parts: Sequence[bytes]) -> None:
        """Client to kernel. Never blocks, never raises for a machine that sleeps or is gone.

        Raises LinkFull above the bound (try again later) and MalformedMessage.
        """
        record = self._record
        effect = self._traffic.from_client(channel, parts, record.gate(), record.sink)
        if effect is Effect.KERNEL_ENDS:
            self._ends.kernel_died(0, "the kernel was shut down", expected=True)
        if effect is not None:
            return
        now_s = record.clock.monotonic_s()
        self._activity.client_sent(now_s)
        self._ends.note_requests(now_s)
        self._upkeep.drive()

    def consumed(self, size_bytes: int) -> None:
        """So many bytes given to ``on_message`` have left for their client, in order."""
        self._traffic.consumed(size_bytes)

    async def interrupt(self) -> None:
        """Stop what runs now. Does not wake an idle machine; does not raise when gone."""
        await self._tell_process("interrupt", {})

    async def signal(self, signum: int) -> None:
        """Deliver a signal to the kernel process. Does not wake an idle machine; never raises."""
        await self._tell_process("signal", {"signum": signum})

    async def _tell_process(self, op: str, args: dict[str, Any]) -> None:
        record = self._record
        if record.machine is None or record.exit_status is not None or self.phase not in ALIVE:
            return
        if self.phase in SLEEPING and not len(self._traffic.requests):
            return
        try:
            machine = await self._upkeep.awake() if self.phase in SLEEPING else record.machine
        except GatewayError as error:
            record.emit("notice", reason=f"{op}: {error.sentence}")
        else:
            await self._quietly(machine, op, args, SIGNAL_TIMEOUT_S)

    async def suspend(self) -> None:
        """Put the machine to sleep now (SuspendMicrovm). The next request wakes it.

        Raises WrongPhase, and what the service answers.
        """
        async with self._upkeep.turn:
            if self.phase is Phase.ASLEEP:
                return
            if self.phase not in (Phase.READY, Phase.PARKED):
                raise WrongPhase("suspend", self.phase.value)
            await self._upkeep.suspend()
        self._upkeep.drive()

    # -- files

    async def put_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a workspace file, in pieces of at most 1 MiB. Wakes."""
        machine = await self._upkeep.awake()
        await files.put(machine.link, path, data, mode)

    async def get_file(self, path: str, max_bytes: int) -> bytes:
        """Read a workspace file; raises GuestFault beyond ``max_bytes``. Wakes."""
        machine = await self._upkeep.awake()
        return await files.get(machine.link, path, max_bytes)

    async def list_files(self, globs: Sequence[str]) -> list[dict[str, Any]]:
        """Workspace files that match: ``{"path", "size", "mode"}``, at most 10 000. Wakes."""
        machine = await self._upkeep.awake()
        return await files.listing(machine.link, globs)

    # -- launching

    async def _launch(self, request: StartRequest, cause: Cause) -> dict[str, Any]:
        """From nothing to READY, with ``turn`` held."""
        record = self._record
        started_s = record.clock.monotonic_s()
        record.exit_status = None
        record.client_session = request.session
        record.move(cause)
        record.emit("launch_started")
        machine = await self._obtain()
        record.move(Cause.LAUNCH_ACCEPTED)
        await self._connect_first(machine)
        record.emit("launch_running", launch_duration_ms=record.since_ms(started_s))
        await self._fill_workspace(machine)
        info = await self._boot(machine, "start", request)
        record.move(Cause.LINK_OPEN)
        self._upkeep.begin()
        return info

    async def _connect_first(self, machine: Machine) -> None:
        """The upgrade is held until the machine runs; the service says why if it never does."""
        record = self._record
        patience = Patience(record.clock.monotonic_s(), record.profile.launch_timeout_s)
        try:
            await machine.open_link(patience)
        except MachineGone as error:
            raise LaunchFailed(machine.microvm_id, error.reason) from error

    async def _obtain(self) -> Machine:
        """A machine from the service; the task runs on if we are cancelled, for ``_release``."""
        record = self._record
        record.generation += 1
        record.key = key = record.key or LinkKey()
        work = booting.obtain_machine(record, key, self)
        self._launching = record.home.spawn(work, "launch a machine")
        machine = await asyncio.shield(self._launching)
        self._launching = None
        record.adopt(machine)
        return machine

    async def _replace(self, request: StartRequest) -> dict[str, Any]:
        """The machine is gone, the service said so: the next generation."""
        self._record.emit("replacement_requested", reason=self.reason)
        self._upkeep.stop()
        try:
            return await self._launch(request, Cause.REPLACE)
        except GatewayError as error:
            if self.phase in (Phase.REPLACING, Phase.CONNECTING):
                self._record.move(Cause.GIVE_UP, error.sentence)
            raise

    async def _fill_workspace(self, machine: Machine) -> None:
        record = self._record
        if record.profile.workspace == "upload" and record.workspace_folder is not None:
            await files.upload(
                machine.link, record.home, record.workspace_folder, record.profile.upload
            )

    async def _boot(self, machine: Machine, op: str, request: StartRequest) -> dict[str, Any]:
        """Start or restart the kernel process and wait for its kernel_info."""
        self._traffic.use_composer(Composer(Signer(request.key, request.signature_scheme)))
        self._traffic.kernel_ended()
        self._pid = None
        self._kernel_gone = gone = asyncio.get_running_loop().create_future()
        try:
            return await self._attended(machine, self._boot_steps(machine, op, request, gone))
        finally:
            self._kernel_gone = None
            if gone.done() and not gone.cancelled():
                gone.exception()  # seen: somebody else's error may have ended the boot
            gone.cancel()

    async def _boot_steps(
        self, machine: Machine, op: str, request: StartRequest, gone: asyncio.Future[None]
    ) -> dict[str, Any]:
        record = self._record
        name = request.kernel_name or record.profile.kernel_name
        self._pid = await booting.start_process(machine, op, request, name)
        record.emit("runtime_initialized")
        started_s = record.clock.monotonic_s()
        record.emit("runtime_healthcheck_started")
        assert record.sink is not None, "adopted with the machine"
        info = await booting.ask_kernel_info(self._traffic, record.sink, record.clock, gone)
        self._traffic.small_talk.kernel_info = info
        record.emit(
            "runtime_healthcheck_passed", healthcheck_duration_ms=record.since_ms(started_s)
        )
        return info

    async def _attended(
        self, machine: Machine, work: Coroutine[Any, Any, dict[str, Any]]
    ) -> dict[str, Any]:
        """Run what needs the link, and mend the link when it is cut meanwhile."""
        task = self._record.home.spawn(work, "boot a kernel")
        try:
            while True:
                cut = asyncio.ensure_future(self._cut.wait())
                await asyncio.wait({task, cut}, return_when=asyncio.FIRST_COMPLETED)
                cut.cancel()
                if task.done():
                    return task.result()
                self._cut.clear()
                await machine.look()
                await machine.open_link(Patience(self._record.clock.monotonic_s()))
        finally:
            task.cancel()

    # -- what the link says

    def on_link_message(self, message: LinkMessage) -> None:
        """From the link's reader."""
        sink = self._record.sink
        assert sink is not None, "adopted before its link was opened"
        if message.kind is Kind.JUPYTER:
            now_s = self._record.clock.monotonic_s()
            self._activity.kernel_sent(now_s)
            if self._traffic.from_kernel(message, sink):
                self._ends.note_requests(now_s)
            return
        sink.consumed(message.size_bytes, message.lane)
        facts = message.json()
        if message.kind is Kind.GAP:
            self._on_gap(facts)
        elif facts.get("name") == "kernel_exited" and isinstance(facts.get("data"), dict):
            self._on_kernel_exited(facts["data"])

    def on_link_cut(self, reason: str) -> None:
        """From the link's pumps: nobody asked for this."""
        self._cut.set()
        if self.phase is Phase.READY:
            self._record.emit("sandbox_suspect", reason=reason)
            self._record.move(Cause.LINK_CUT, reason)
            self._upkeep.drive()

    def _on_gap(self, facts: dict[str, Any]) -> None:
        messages, size_bytes = facts.get("messages"), facts.get("bytes")
        if not isinstance(messages, int) or not isinstance(size_bytes, int):
            return
        text = f"{messages} messages ({size_bytes} bytes) were dropped: the client was too slow"
        self._record.emit("gap", reason=text)
        self._traffic.say(Channel.IOPUB, "stream", {"name": "stderr", "text": f"[{text}]\n"})

    def _on_kernel_exited(self, facts: dict[str, Any]) -> None:
        if self._pid is not None and facts.get("pid") != self._pid:
            return
        status = _exit_status(facts)
        self._record.emit("kernel_exited", reason=f"status {status}")
        if self._kernel_gone is None:
            expected = facts.get("expected") is True
            self._ends.kernel_died(status, "the kernel died", expected=expected)
        elif not self._kernel_gone.done() and self._pid is not None:
            self._kernel_gone.set_exception(KernelGone(status))

    def _deliver(self, channel: Channel, parts: tuple[bytes, ...]) -> None:
        if self.on_message is not None:
            self.on_message(channel, parts)
        if self._self_draining:
            self._traffic.consumed(sum(map(len, parts)))

    # -- release

    async def _release_after(self, error: BaseException) -> None:
        """A start failed: nothing may be left. Trouble of the release itself is reported only."""
        try:
            await self.release()
        except GatewayError as trouble:
            self._record.emit("notice", reason=trouble.sentence)
        sentence = error.sentence if isinstance(error, GatewayError) else type(error).__name__
        self._record.reason = sentence

    async def _release(self) -> None:
        record = self._record
        started_s = record.clock.monotonic_s()
        self._upkeep.stop()
        self._ends.stop()
        record.move(Cause.STOP)
        if record.exit_status is None:
            record.exit_status = 0
        await self._adopt_late_launch()
        if record.machine is None:
            record.move(Cause.STOP_CONFIRMED)
            return
        await tear_down(record, record.machine, started_s)

    async def _adopt_late_launch(self) -> None:
        """A launch that was under way may still give a machine: it must be ended too."""
        launching, self._launching = self._launching, None
        if launching is None:
            return
        try:
            self._record.adopt(await launching)
        except GatewayError:
            return

    # -- small things

    async def _quietly(
        self, machine: Machine, op: str, args: dict[str, Any], timeout_s: float
    ) -> None:
        """A call whose failure only means that there is nobody left to do it."""
        try:
            await machine.link.call(op, args, timeout_s=timeout_s)
        except GatewayError as error:
            self._record.emit("notice", reason=f"{op}: {error.sentence}")

    def _on_move(self, before: Phase, after: Phase) -> None:
        said = injection(before, after, len(self._traffic.requests))
        if said is not None:
            self._traffic.say(Channel.IOPUB, "status", {"execution_state": said})


def _exit_status(facts: dict[str, Any]) -> int:
    """As Popen has it: negative for a signal. What the guest says is checked."""
    signum, code = facts.get("signal"), facts.get("exit_code")
    if isinstance(signum, int) and 0 < signum < 128:
        return -signum
    return code if isinstance(code, int) and -256 < code < 256 else LOST_STATUS
