"""The machine's init: parent of the agent and of every kernel, reaper of everything else.

    template ──fork──▶ machine (this) ──fork──▶ agent          asyncio; speaks to the world
                              │
                              ├──fork──▶ Python kernel          launcher, in this same image;
                              │                                 the first one ahead (`spare`)
                              └──fork+exec──▶ other kernels

The machine is single-threaded and only ever waits in one `select`: for a line from the agent, for
a child that ended, for SIGTERM. So it can fork at any moment, and nothing that notebook code does
can hold it up. Kernels are forked from here and never from the agent, whose threads, loop and
sockets must not be copied.

Ends. The agent's end is the machine's end (status 1): without it nobody can reach the kernels.
SIGTERM and SIGINT end everything (status 0). A kernel's end is reported and nothing else happens.
Before the machine exits it kills and reaps everything below it (`processes`), children in
sessions of their own included.

A fork does not return into the loop: the child leaves it with a *role*, a callable that
`__main__` runs once the stack has unwound. So the bottom of a kernel's stack is the interpreter's
own, no `finally` of the parent runs in a child, and a kernel ends as an interpreter ends: atexit
callbacks, thread joins and all.

Buffers. Lines from the agent are bounded by MAX_MESSAGE_BYTES; what waits for the agent grows by
one short line for each call and each kernel that ended, so it is bounded by the agent's own calls.
The kernels' log is cut when it passes LOG_BYTES.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from kernel_guest import launcher, processes
from kernel_guest.kernels import (
    LOG_NAME,
    MAX_MESSAGE_BYTES,
    Kind,
    Launch,
    SpawnFailed,
    SpawnRequest,
    TemplateFacts,
    kernel_environment,
    plan,
    remove_files,
)
from kernel_guest.spare import NUMBER, Seat, Spare

Role = Callable[[], Any]
Agent = Callable[[socket.socket, socket.socket, socket.socket, Path], None]

# What a kernel writes past Jupyter's streams is diagnosis for us, not output: keep the latest.
LOG_BYTES = 4 * 1024 * 1024
_LOG_CHECK_S = 30.0

# Killed processes are reaped within milliseconds unless one hangs in the kernel (dead NFS).
_END_DEADLINE_S = 10.0

# exec of a missing program fails at once; a child that cannot even say so is not waited for.
_EXEC_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class MachineSetup:
    """What a machine consists of before its first process exists."""

    folder: Path
    agent_listener: socket.socket
    hook_listener: socket.socket
    facts: TemplateFacts
    agent: Agent
    spare: bool = False
    """Whether to prepare the first kernel before it is asked for (`spare`)."""


def begin(setup: MachineSetup) -> Role:
    """Turn this process into a machine's init, with its agent forked.

    Out: the role of whichever process returns: the machine's loop, or the agent.
    Called once, by a fork of the template or by the image's own entry point.
    """
    processes.become_subreaper()
    _make_folders(setup.folder)
    ours, theirs = socket.socketpair()
    agent = processes.fork(ours.close)
    if agent == 0:
        os.setpgrp()
        processes.reset_signals()
        return partial(setup.agent, setup.agent_listener, setup.hook_listener, theirs, setup.folder)
    for inherited in (theirs, setup.agent_listener, setup.hook_listener):
        inherited.close()
    return Machine(setup, ours, agent).run


def _make_folders(folder: Path) -> None:
    for name in ("workspace", "run", "journal"):
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "run").chmod(0o700)


class Machine:
    """The loop of the machine's init."""

    def __init__(self, setup: MachineSetup, host: socket.socket, agent_pid: int) -> None:
        self._folder = setup.folder
        self._facts = setup.facts
        self._host = host
        self._host.setblocking(False)
        self._pid = os.getpid()
        self._agent_pid = agent_pid
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._kernels: dict[int, Launch] = {}
        self._spawned = 0
        self._spares = setup.spare
        self._spare: Spare | None = None
        self._dropped_pid = 0
        self._watch = processes.ChildWatch()

    def run(self) -> Role:
        """Serve until the end, which is a SystemExit; returns only in a forked kernel."""
        try:
            return self._serve_forever()
        except Exception:
            traceback.print_exc()
            self._end(1)

    def _serve_forever(self) -> Role:
        role = self._prepare_spare()
        while role is None:
            readable = self._wait()
            self._look_after_children()
            self._bound_log()
            self._flush()
            role = self._hear_spare(readable)
            if role is None and self._host.fileno() in readable:
                role = self._receive()
        return role

    def _wait(self) -> list[int]:
        sources = [self._host.fileno(), self._watch.fileno()]
        timeout_s = _LOG_CHECK_S if self._kernels else None
        if self._spare is not None:
            sources.append(self._spare.channel.fileno())
            timeout_s = self._spare.remaining_s()
        writers = [self._host.fileno()] if self._outgoing else []
        readable, _, _ = select.select(sources, writers, [], timeout_s)
        return readable

    def _prepare_spare(self) -> Role | None:
        if not self._spares:
            return None
        ours, theirs = socket.socketpair()
        env = kernel_environment(os.environ, {})
        pid = processes.fork(self._detach)
        if pid == 0:
            ours.close()
            return partial(launcher.run_spare, Seat(self._folder, theirs))
        theirs.close()
        self._spare = Spare(pid, ours, env)
        return None

    def _hear_spare(self, readable: list[int]) -> Role | None:
        """The spare took its request, or it is gone and a fork must do."""
        spare = self._spare
        if spare is None:
            return None
        if spare.channel.fileno() in readable:
            took = spare.answered()
        elif spare.remaining_s() == 0:
            took = False
        else:
            return None
        return self._settle_spare(spare, took)

    def _settle_spare(self, spare: Spare, took: bool) -> Role | None:
        self._spare = None
        if spare.launch is not None and took:
            spare.close()
            self._started(spare.call_id, spare.launch, spare.pid)
            return None
        self._drop(spare)
        if spare.launch is None:
            return None
        return self._answering(spare.call_id, partial(self._start, spare.launch.request))

    def _look_after_children(self) -> None:
        self._watch.drain()
        for pid, status in processes.reap():
            self._on_exit(pid, status)
        if self._watch.terminated:
            self._end(0)

    def _on_exit(self, pid: int, status: int) -> None:
        if pid == self._agent_pid:
            self._end(1)
        if pid == self._dropped_pid:
            remove_files(self._folder, NUMBER)
        launch = self._kernels.pop(pid, None)
        if launch is not None:
            launch.remove_files()
            code, number = processes.exit_code_and_signal(status)
            self._send({"exited": pid, "code": code, "signal": number})

    def _receive(self) -> Role | None:
        try:
            data = self._host.recv(65536)
        except (BlockingIOError, ConnectionResetError):
            return None  # after a reset the next call reports the end of the stream
        if not data:
            self._end(1)
        self._incoming += data
        while (end := self._incoming.find(b"\n")) >= 0:
            line = bytes(self._incoming[:end])
            del self._incoming[: end + 1]
            role = self._serve(json.loads(line))
            if role is not None:
                return role
        if len(self._incoming) > MAX_MESSAGE_BYTES:
            self._end(1)
        return None

    def _serve(self, message: dict[str, Any]) -> Role | None:
        call_id = message["id"]
        if message["op"] == "spawn":
            return self._answering(call_id, partial(self._spawn, message["request"]))
        if message["op"] == "signal":
            self._answer(call_id, delivered=self._signal(message["pid"], message["signum"]))
            return None
        error = SpawnFailed("bad_request", f"Unknown operation {message['op']!r}.")
        self._send({"id": call_id, "error": error.to_json()})
        return None

    def _answering(self, call_id: int, work: Callable[[int], Role | None]) -> Role | None:
        """Run `work`; what cannot be started is an answer, not the end of the machine."""
        try:
            return work(call_id)
        except SpawnFailed as error:
            self._send({"id": call_id, "error": error.to_json()})
            return None

    def _spawn(self, data: dict[str, Any], call_id: int) -> Role | None:
        request = SpawnRequest.from_json(data)
        spare = self._spare
        if spare is None or spare.launch is not None:
            return self._start(request, call_id)
        launch = plan(NUMBER, request, self._folder, self._facts)
        if launch.kind is Kind.FORK:
            launch.write_connection_file()
            if spare.ask(call_id, launch):
                return None
        self._spare = None
        self._drop(spare)
        return self._start(request, call_id)

    def _drop(self, spare: Spare) -> None:
        spare.drop()
        self._dropped_pid = spare.pid  # its files are removed when it can make no more

    def _start(self, request: SpawnRequest, call_id: int) -> Role | None:
        self._spawned += 1
        launch = plan(self._spawned, request, self._folder, self._facts)
        try:
            launch.write_connection_file()
            forks = launch.kind is Kind.FORK
            pid = processes.fork(self._detach) if forks else self._execute(launch)
        except (OSError, processes.NotForkable) as error:
            launch.remove_files()
            raise SpawnFailed("not_startable", f"Cannot start a kernel: {error}.") from error
        if pid == 0:
            return partial(launcher.run, launch)
        self._started(call_id, launch, pid)
        return None

    def _started(self, call_id: int, launch: Launch, pid: int) -> None:
        self._kernels[pid] = launch
        self._answer(call_id, **launch.spawned(pid))

    def _execute(self, launch: Launch) -> int:
        """Start `launch.argv` and see it running. Raises OSError if it is not executable."""
        reader, writer = os.pipe()  # both ends close on exec
        try:
            pid = processes.fork(self._detach)
            if pid == 0:
                launcher.execute(launch, writer)
        finally:
            os.close(writer)
        ready, _, _ = select.select([reader], [], [], _EXEC_DEADLINE_S)
        trouble = os.read(reader, 4096).decode(errors="replace") if ready else "no sign of life"
        os.close(reader)
        if trouble:
            processes.kill_quietly(pid, signal.SIGKILL)
            raise OSError(f"{launch.argv[0]}: {trouble}")
        return pid

    def _signal(self, pid: int, number: int) -> bool:
        if pid not in self._kernels:
            return False
        # A kernel that was forked a moment ago has no group of its own yet.
        return processes.kill_group(pid, number) or processes.kill_quietly(pid, number)

    def _answer(self, call_id: int, **result: Any) -> None:
        self._send({"id": call_id, "ok": result})

    def _send(self, message: dict[str, Any]) -> None:
        self._outgoing += json.dumps(message).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        # A broken pipe is the end of the agent, which the next recv or reap reports.
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            if self._outgoing:
                del self._outgoing[: self._host.send(self._outgoing)]

    def _bound_log(self) -> None:
        path = self._folder / LOG_NAME
        with suppress(FileNotFoundError):
            if path.stat().st_size > LOG_BYTES:
                os.truncate(path, 0)  # writers append, so they go on at the new end

    def _detach(self) -> None:
        """Let go, in a child, of what belongs to the machine."""
        self._host.close()
        self._watch.detach()
        if self._spare is not None:
            self._spare.close()

    def _end(self, status: int) -> NoReturn:
        if os.getpid() != self._pid:  # a fork that failed on its way out of here
            os._exit(processes.EX_CHILD)
        if self._spare is not None:
            self._drop(self._spare)
        groups = [self._agent_pid, *self._kernels]
        if not processes.end_all_children(groups, _END_DEADLINE_S):
            print("kernel_guest: processes of this machine could not be killed", file=sys.stderr)
            status = 1
        for number in (NUMBER, *(launch.number for launch in self._kernels.values())):
            remove_files(self._folder, number)
        sys.exit(status)
