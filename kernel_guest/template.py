"""The preimported process of which machines, agents and kernels are forks.

It holds what a snapshot of a MicroVM holds: modules, and nothing that must differ between two
machines or that a fork cannot copy. Before each fork that is checked, not hoped
(`processes.fork`): one thread, no running event loop. A ZeroMQ context would show as its threads.
An InteractiveShell is never made here: its history starts a thread, and its singletons would be
the same in all kernels. `gc.freeze` moves everything loaded so far out of the collector's sight,
so that a collection in a kernel does not touch, and thereby copy, the shared pages.

What to import. MODULES is what the agent needs and what a kernel would otherwise load between its
fork and the end of its first cells; a test compares the list with a real kernel. The libraries of
a profile come on top, by name, in KERNEL_GUEST_PREIMPORT.

Libraries with threads of their own. OpenBLAS starts its workers when NumPy is loaded and ends
them in a fork handler, to start them again on demand; one fork that does nothing brings this
process into that state. Threads that survive it cannot be copied: the template says so and ends.

The control socket (`python -m kernel_guest template --control-fd N`, one end of a SOCK_SEQPACKET
pair, one JSON object a packet):

    {"op": "machine", "microvm_id", "folder", "agent_fd", "hook_fd", "log_fd", "cgroup", "env"}
        with descriptors attached, which the three `_fd` members index
        -> {"pid", "microvm_id"}, or {"error": {"code", "message"}, "microvm_id"}
    {"op": "ping"} -> {"ok": true, "modules": n, "stale": why its forks are cold, or ""}
        a stale template works, but slowly: whoever started it should start another
    when a machine's init has ended -> {"exited": pid, "status": wait status}
    end of the socket: every machine of this template is killed, then the template ends

A machine therefore never outlives the service that had it started.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import select
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kernel_guest import machine, processes
from kernel_guest.kernels import TemplateFacts
from kernel_guest.machine import Agent, Role
from kernel_guest.shared.errors import SharedError, error_body

MODULES = (
    # a kernel's start
    "IPython.core.completer",
    "IPython.core.completerlib",
    "IPython.core.debugger",
    "IPython.core.debugger_backport",
    "IPython.core.logger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "faulthandler",
    "ipykernel.debugger",
    "ipykernel.kernelapp",
    "pdb",
    "pydoc",
    "sqlite3",
    # the agent
    "jupyter_client.kernelspec",
    "kernel_guest.agent",
    "tornado.platform.asyncio",
    "zmq.asyncio",
)

# Longer than any message of ours; an environment is a few kilobytes.
_PACKET_BYTES = 256 * 1024
_PACKET_FDS = 3
_END_DEADLINE_S = 10.0


class CannotPreimport(SharedError):  # noqa: N818 - named like its tree: what happened
    """A library that the profile names cannot be imported here."""

    code = "cannot_preimport"


def preimport(libraries: tuple[str, ...] = ()) -> None:
    """Load everything a fork shall find loaded. Raises CannotPreimport, NotForkable."""
    for name in MODULES:
        importlib.import_module(name)
    for name in libraries:
        _preimport_library(name)
    _settle_library_threads()
    for path in [path for path, finder in sys.path_importer_cache.items() if finder is None]:
        del sys.path_importer_cache[path]  # a folder that is not there now may be there in a fork
    gc.collect()
    gc.freeze()


def _preimport_library(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        raise CannotPreimport(f"Cannot preimport {name!r}: {error!r}.") from error


def _settle_library_threads() -> None:
    """Fork once for the fork handlers' sake; see the module's header."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    trouble = processes.why_not_forkable()
    if trouble:
        raise processes.NotForkable(trouble)


def wanted_libraries(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The names in KERNEL_GUEST_PREIMPORT, separated by commas or spaces."""
    words = re.split(r"[,\s]+", environ.get("KERNEL_GUEST_PREIMPORT", ""))
    return tuple(word for word in words if word)


def make_template() -> TemplateFacts:
    """Turn this process into a template; out: what its forks cannot change."""
    facts = TemplateFacts.take(forks=processes.LINUX)
    preimport(wanted_libraries(os.environ))
    # What imports have set is no change: pydevd sets one of its own variables.
    return replace(facts, environ=dict(os.environ))


def serve(control_fd: int, agent: Agent | None = None) -> Role:
    """`template --control-fd N`: import everything, then fork machines until the socket closes."""
    control = socket.socket(fileno=control_fd)
    facts = make_template()
    return Template(control, facts, agent or _agent()).run


def become_machine(
    folder: Path, agent_listener: socket.socket, hook_listener: socket.socket
) -> Role:
    """The image's entry point: import everything, then be the one machine."""
    facts = make_template()
    setup = machine.MachineSetup(folder, agent_listener, hook_listener, facts, _agent())
    return partial(machine.begin, setup)


def _agent() -> Agent:
    module = importlib.import_module("kernel_guest.agent")
    run_agent: Agent = module.run_agent
    return run_agent


@dataclass(frozen=True, slots=True)
class MachineRequest:
    """One request of the control socket, with its descriptors."""

    microvm_id: str
    folder: Path
    agent_fd: int
    hook_fd: int
    log_fd: int
    cgroup: str | None
    env: Mapping[str, str]

    @classmethod
    def from_packet(cls, message: Mapping[str, Any], fds: list[int]) -> MachineRequest:
        """Raises KeyError, IndexError or TypeError for a malformed one."""
        return cls(
            microvm_id=message["microvm_id"],
            folder=Path(message["folder"]),
            agent_fd=fds[message["agent_fd"]],
            hook_fd=fds[message["hook_fd"]],
            log_fd=fds[message["log_fd"]],
            cgroup=message.get("cgroup"),
            env=dict(message.get("env", {})),
        )


class Template:
    """The loop of a template that forks machines."""

    def __init__(self, control: socket.socket, facts: TemplateFacts, agent: Agent) -> None:
        processes.become_subreaper()
        self._pid = os.getpid()
        self._control = control
        self._facts = facts
        self._agent = agent
        self._watch = processes.ChildWatch()

    def run(self) -> Role | None:
        """Serve until the control socket closes or SIGTERM; a Role is returned in a fork only."""
        try:
            role = self._serve_forever()
        except Exception:
            if os.getpid() == self._pid:
                processes.end_all_children((), _END_DEADLINE_S)
            raise
        if role is None and not processes.end_all_children((), _END_DEADLINE_S):
            sys.exit("kernel_guest: processes of this template's machines could not be killed")
        return role

    def _serve_forever(self) -> Role | None:
        sources = [self._control.fileno(), self._watch.fileno()]
        while True:
            readable, _, _ = select.select(sources, [], [])
            self._watch.drain()
            for pid, status in processes.reap():
                self._answer({"exited": pid, "status": status})
            if self._watch.terminated:
                return None
            if sources[0] not in readable:
                continue
            data, fds = self._receive()
            if not data:
                return None
            role = self._serve(data, fds)
            if role is not None:
                return role

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _PACKET_BYTES, _PACKET_FDS)
        except ConnectionResetError:  # closed with an answer unread
            return b"", []
        return data, fds

    def _serve(self, data: bytes, fds: list[int]) -> Role | None:
        role: Role | None = None
        microvm_id = None
        try:
            message = json.loads(data)
            microvm_id = message.get("microvm_id")
            if message["op"] == "ping":
                stale = self._facts.reason_for_cold(os.environ)
                self._answer({"ok": True, "modules": len(sys.modules), "stale": stale})
            elif message["op"] == "machine":
                role = self._fork_machine(MachineRequest.from_packet(message, fds))
            else:
                self._refuse(microvm_id, "bad_request", f"Unknown operation {message['op']!r}.")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            self._refuse(microvm_id, "bad_request", f"Malformed request: {error!r}.")
        except (processes.NotForkable, OSError) as error:
            self._refuse(microvm_id, "not_forkable", str(error))
        if role is None:
            for fd in fds:
                os.close(fd)
        return role

    def _fork_machine(self, request: MachineRequest) -> Role | None:
        pid = processes.fork(self._detach)
        if pid == 0:
            return partial(_become_machine, request, self._facts, self._agent)
        self._answer({"pid": pid, "microvm_id": request.microvm_id})
        return None

    def _detach(self) -> None:
        self._control.close()
        self._watch.detach()

    def _refuse(self, microvm_id: str | None, code: str, message: str) -> None:
        self._answer({**error_body(code, message), "microvm_id": microvm_id})

    def _answer(self, message: dict[str, Any]) -> None:
        # If the service is gone, the next recv reports the end of the socket.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(json.dumps(message).encode())


def _become_machine(request: MachineRequest, facts: TemplateFacts, agent: Agent) -> Role:
    """In a fresh fork of the template: join the machine's group first, then be its init."""
    if request.cgroup is not None:
        Path(request.cgroup, "cgroup.procs").write_text("0")
    os.setsid()
    processes.reset_signals()
    processes.redirect_standard_fds(request.log_fd)
    os.close(request.log_fd)
    os.environ.update(request.env)
    setup = machine.MachineSetup(
        folder=request.folder,
        agent_listener=socket.socket(fileno=request.agent_fd),
        hook_listener=socket.socket(fileno=request.hook_fd),
        facts=facts,
        agent=agent,
        spare=facts.forks,
    )
    return machine.begin(setup)
