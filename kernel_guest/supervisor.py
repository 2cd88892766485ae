"""The life of the kernel process in this machine, as the agent runs it.

    NONE -> STARTING -> RUNNING -> EXITED
                ^___________________|        start again, or restart

STARTING lasts from the call until the kernel's subscription stands (channels.py); the
call is answered as soon as the process exists and its sockets are connected, and what
is sent meanwhile waits.  A kernel's end is always told by the machine's init.  Before
the event goes out everything the kernel still said is read, for at most `_DRAIN_S`, so
that `kernel_exited` comes after the last output.

Starts, restarts and shutdowns are carried out one after the other.  Signals are not
queued behind them: an interrupt must get through while a restart waits for its grace.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import zmq

from kernel_guest.channels import KernelChannels
from kernel_guest.jupyter_parts import make_signer
from kernel_guest.kernel_host import KernelHost, SpawnedKernel
from kernel_guest.kernels import SpawnRequest
from kernel_guest.shared.errors import SharedError
from kernel_guest.shared.messages import LinkMessage, event
from kernel_guest.traffic import KernelTraffic
from kernel_guest.workspace import Workspace

__all__ = ["KernelPhase", "KernelRefused", "KernelSupervisor", "StartArguments", "kernel_urls"]

log = logging.getLogger(__name__)

# A dead kernel's sockets are closed by the system at once; a forked child that keeps
# them open must not delay the news for long.
_DRAIN_S = 1.0
# After SIGKILL only a process in uninterruptible I/O lives on.
_KILL_S = 10.0
# Graceful shutdown: the client has sent shutdown_request before it calls; ipykernel
# leaves within 0.1 s of it, and waits 1 s for its sockets to drain at most.
_LEAVE_S = 2.0
_TERM_S = 1.0
_MAX_GRACE_S = 60.0


class KernelPhase(StrEnum):
    """Where the kernel process is; the word in the health answer."""

    NONE = "none"
    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"


class KernelRefused(SharedError):  # noqa: N818 - named like its tree: what happened
    """A call that makes no sense in this phase, or with these arguments."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class StartArguments:
    """What `start` and `restart` bring."""

    key: str = field(repr=False)
    signature_scheme: str = "hmac-sha256"
    kernel_name: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    extra_arguments: tuple[str, ...] = ()
    cwd: str = ""


@dataclass(slots=True)
class _Process:
    spawned: SpawnedKernel
    channels: KernelChannels
    expected_end: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class KernelSupervisor:
    """Starts, signals and ends the one kernel; announces its start and its end.

    `emit` takes the events.  `context` makes the ZeroMQ context on first use: none may
    exist in the template the agent was forked from.
    """

    def __init__(
        self,
        host: KernelHost,
        traffic: KernelTraffic,
        emit: Callable[[LinkMessage], None],
        set_signer: Callable[[Any], None],
        consumed: Callable[[LinkMessage], None],
    ) -> None:
        self._host = host
        self._traffic = traffic
        self._emit = emit
        self._set_signer = set_signer
        self._consumed = consumed
        self._workspace: Workspace | None = None
        self._generation = 0
        self._context: zmq.Context[Any] | None = None
        self._process: _Process | None = None
        self._phase = KernelPhase.NONE
        self._turn = asyncio.Lock()
        self._ended_early: dict[int, tuple[int | None, int | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        host.on_exit(self._on_exit)

    def __repr__(self) -> str:
        return f"<KernelSupervisor {self.phase} pid={self.pid}>"

    @property
    def phase(self) -> KernelPhase:
        """Where the kernel is."""
        process = self._process
        if self._phase is KernelPhase.STARTING and process is not None and process.channels.ready:
            self._phase = KernelPhase.RUNNING
        return self._phase

    @property
    def pid(self) -> int | None:
        """Process id of a living kernel."""
        return None if self._process is None else self._process.spawned.pid

    @property
    def context(self) -> zmq.Context[Any]:
        """The agent's one ZeroMQ context."""
        if self._context is None:
            self._context = zmq.Context()
        return self._context

    def begin(self, workspace: Workspace, generation: int) -> None:
        """`/run` happened."""
        self._workspace, self._generation = workspace, generation

    def start(self, arguments: StartArguments) -> Awaitable[dict[str, Any]]:
        """Start a kernel; raises KernelRefused if one runs, SpawnFailed, PathRefused.

        Not a coroutine function: messages behind the call must wait from now on, not
        from when a task has its turn.
        """
        self._traffic.hold()
        return self._replace(arguments, None)

    def restart(self, arguments: StartArguments, grace_s: float) -> Awaitable[dict[str, Any]]:
        """End the running kernel, if any, and start another."""
        self._traffic.hold()
        return self._replace(arguments, min(max(grace_s, 0.0), _MAX_GRACE_S))

    async def shutdown(self, *, now: bool) -> dict[str, Any]:
        """End the kernel process; the machine stays.  Ending an ended one is done."""
        async with self._turn:
            if not now and not await self._leaves(_LEAVE_S):
                await self.signal(signal.SIGTERM)
                await self._leaves(_TERM_S)
            await self._end(0.0)
        return {}

    async def interrupt(self) -> dict[str, Any]:
        """SIGINT to the kernel's group, or its own interrupt message."""
        process = self._process
        if process is not None and process.spawned.interrupt_mode == "message":
            return {"delivered": self._traffic.interrupt_by_message()}
        return await self.signal(signal.SIGINT)

    async def signal(self, number: int) -> dict[str, Any]:
        """A signal to the kernel's group; not delivered if there is no kernel."""
        process = self._process
        if process is None:
            return {"delivered": False}
        if number in (signal.SIGKILL, signal.SIGTERM):
            process.expected_end = True
        return {"delivered": await self._host.signal(process.spawned.pid, number)}

    def activity(self) -> dict[str, Any]:
        """The result of the `activity` call."""
        executing = list(self._traffic.requests.executing)
        return self._traffic.activity.report(self.pid, executing)

    async def close(self) -> None:
        """Let go of the sockets.  The machine ends the kernel."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._traffic.close()
        if self._process is not None:
            self._process.channels.close()
        if self._context is not None:
            self._context.destroy(linger=0)

    # --- start

    async def _replace(self, arguments: StartArguments, grace_s: float | None) -> dict[str, Any]:
        try:
            async with self._turn:
                if grace_s is not None:
                    await self._end(grace_s)
                if self._process is not None:
                    raise KernelRefused("already_running", f"A kernel runs with pid {self.pid}.")
                return await self._start(arguments)
        finally:
            self._traffic.release()

    async def _start(self, arguments: StartArguments) -> dict[str, Any]:
        try:
            sign = make_signer(arguments.key.encode(), arguments.signature_scheme)
        except ValueError as error:
            raise KernelRefused("bad_request", str(error)) from error
        request = self._request(arguments)
        before, self._phase = self._phase, KernelPhase.STARTING
        try:
            spawned = await self._host.spawn(request)
        except BaseException:
            self._phase = before
            raise
        channels = self._connect(spawned)
        self._process = _Process(spawned, channels)
        self._set_signer(sign)
        self._traffic.attach(channels, sign)
        self._emit(event("kernel_started", {"pid": spawned.pid, "cold": spawned.cold}))
        self._notice_early_end(spawned.pid)
        log.info("kernel %d started, cold=%s %s", spawned.pid, spawned.cold, spawned.reason)
        return {
            "pid": spawned.pid,
            "generation": self._generation,
            "cold": spawned.cold,
            "language": spawned.language,
            "interrupt_mode": spawned.interrupt_mode,
        }

    def _request(self, arguments: StartArguments) -> SpawnRequest:
        workspace = self._workspace
        if workspace is None:
            raise KernelRefused("not_running", "The machine has not been given an identity yet.")
        env = dict(arguments.env)
        return SpawnRequest(
            key=arguments.key,
            cwd=workspace.working_folder(arguments.cwd),
            signature_scheme=arguments.signature_scheme,
            kernel_name=arguments.kernel_name,
            env=env | workspace.kernel_env({**os.environ, **env}),
            extra_arguments=arguments.extra_arguments,
        )

    def _connect(self, spawned: SpawnedKernel) -> KernelChannels:
        urls = kernel_urls(spawned)
        return KernelChannels(self.context, urls, self._traffic.from_kernel, self._on_sent)

    def _on_sent(self, token: object) -> None:
        assert isinstance(token, LinkMessage), "the traffic sends link messages only"
        self._consumed(token)

    # --- end

    async def _end(self, grace_s: float) -> None:
        process = self._process
        if process is None:
            return
        process.expected_end = True
        if grace_s > 0 and await self._leaves(grace_s):
            return
        await self._host.kill(process.spawned.pid)
        if not await self._leaves(_KILL_S):
            raise KernelRefused("kernel_stuck", f"Kernel {process.spawned.pid} does not end.")

    async def _leaves(self, timeout_s: float) -> bool:
        process = self._process
        if process is None:
            return True
        process.expected_end = True
        try:
            await asyncio.wait_for(process.ended.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _on_exit(self, pid: int, code: int | None, number: int | None) -> None:
        if self._process is None or self._process.spawned.pid != pid:
            # Its end can be told before `spawn` has returned to us.
            self._ended_early[pid] = (code, number)
            return
        task = asyncio.create_task(self._finish(self._process, code, number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _notice_early_end(self, pid: int) -> None:
        ended = self._ended_early.get(pid)
        self._ended_early.clear()
        if ended is not None:
            self._on_exit(pid, *ended)

    async def _finish(self, process: _Process, code: int | None, number: int | None) -> None:
        if not await process.channels.drain(_DRAIN_S):
            log.info("kernel %d ended, a child of it keeps its sockets", process.spawned.pid)
        process.channels.close()
        self._traffic.detach()
        self._process, self._phase = None, KernelPhase.EXITED
        self._emit(
            event(
                "kernel_exited",
                {
                    "exit_code": code,
                    "signal": number,
                    "expected": process.expected_end,
                    "pid": process.spawned.pid,
                },
            )
        )
        process.ended.set()


def kernel_urls(spawned: SpawnedKernel) -> dict[str, str]:
    """Where the channels of a kernel connect to."""
    names = ("shell", "control", "stdin", "iopub")
    return {name: spawned.connection.url(name) for name in names}
