"""The agent: one asyncio process per machine that speaks for it.

It serves two inherited listeners, unix or TCP: the agent port (link, health, keep-awake)
and the hook port (hooks.py).  It is forked from the template and never forks: kernels
are made by the machine's init, which it asks over `host` (kernel_host.py).  When the
init is gone, the agent ends; when the agent is gone, the init ends the machine.

    gateway ─ WebSocket ─ link_server ─ calls ─ supervisor ─ kernel_host ─ init
                              │            └── workspace, checkpoint
                              └──────── traffic ─ channels ─ ipc ─ kernel

Importing this module makes nothing: no loop, no ZeroMQ context, no key.  It is imported
in the template, so that a fork of it serves within milliseconds.

The agent port's plain requests:

    GET /health      who this is, what it has received, how the kernel is
    GET /keepawake   204, and nothing else: its only purpose is to be traffic (LM 5.2)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.web import Application

from kernel_guest.channels import KernelChannels
from kernel_guest.checkpoint import Checkpointer, Saved, open_store
from kernel_guest.hooks import ClockWatch, after_resume, make_hook_application
from kernel_guest.http_basics import JsonHandler, NotFoundHandler, log_request, make_server
from kernel_guest.identity import Identity, IdentityHolder
from kernel_guest.journal import Journal, JournalLimits
from kernel_guest.jupyter_parts import Signer
from kernel_guest.kernel_calls import KernelCalls
from kernel_guest.kernel_host import KernelHost
from kernel_guest.kernels import SpawnRequest
from kernel_guest.link_server import LinkServer, LinkSocket
from kernel_guest.shared.errors import SharedError
from kernel_guest.shared.hello import VERSIONS
from kernel_guest.shared.limits import MAX_CHUNK_BYTES
from kernel_guest.shared.messages import Kind, LinkMessage
from kernel_guest.supervisor import KernelSupervisor, kernel_urls
from kernel_guest.traffic import KernelTraffic
from kernel_guest.workspace import Workspace

__all__ = ["Agent", "run_agent"]

log = logging.getLogger(__name__)

# A chunk with its header; handshakes are smaller.
_MAX_FRAME_BYTES = MAX_CHUNK_BYTES + 4096
_CLOSE_S = 2.0


def run_agent(
    agent_listener: socket.socket, hook_listener: socket.socket, host: socket.socket, folder: Path
) -> None:
    """The agent's life.  Called once, in a fork of the template; returns when it ends.

    It ends when the machine's init is gone or on SIGTERM.
    """
    _log_to_stderr()
    asyncio.run(_serve(agent_listener, hook_listener, host, folder))


async def _serve(
    agent_listener: socket.socket, hook_listener: socket.socket, host: socket.socket, folder: Path
) -> None:
    agent = Agent(KernelHost(host), folder)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await agent.open(agent_listener, hook_listener)
    try:
        waits = [asyncio.ensure_future(event.wait()) for event in (stop, agent.host.gone)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
    finally:
        await agent.close()


class Agent:
    """Joins the parts; the target of the hooks.  Made on the running loop."""

    def __init__(self, host: KernelHost, folder: Path) -> None:
        self.host = host
        self.folder = folder
        self.identity = IdentityHolder()
        self.link = LinkServer(self._on_message)
        self.traffic = KernelTraffic(self.link.emit, self.link.consumed)
        self.supervisor = KernelSupervisor(
            host, self.traffic, self.link.emit, self._set_signer, self.link.consumed
        )
        self.calls = KernelCalls(self.supervisor, self.link.emit, self.link.consumed)
        self._checkpointer: Checkpointer | None = None
        self._clocks = ClockWatch()
        self._validating = asyncio.Lock()
        self._servers: list[HTTPServer] = []
        self._open = False

    def __repr__(self) -> str:
        return f"<Agent {self.identity} {self.supervisor} {self.link}>"

    async def open(self, agent_listener: socket.socket, hook_listener: socket.socket) -> None:
        """Serve from here on."""
        await self.host.open()
        self._servers = [
            make_server(self._agent_application(), agent_listener),
            make_server(make_hook_application(self), hook_listener),
        ]
        self._open = True

    async def close(self) -> None:
        """Stop serving and let go of everything.  Idempotent."""
        self._open = False
        for server in self._servers:
            server.stop()
        self.link.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(*(server.close_all_connections() for server in self._servers))
        await self.calls.close()
        await self.supervisor.close()
        if self._checkpointer is not None:
            await self._checkpointer.close()
        await self.host.close()

    # --- the hooks' target

    @property
    def ready(self) -> bool:
        """The agent is forked from a template that is set up, so: once it serves."""
        return self._open and not self.host.gone.is_set()

    def run(self, microvm_id: str, payload: str) -> dict[str, Any]:
        """The first `/run`: everything that depends on identity is made here.

        Whatever fails does so before the identity is kept, so that a corrected `/run`
        (there is none on the real platform, which ends the machine) starts afresh.
        """
        identity = self.identity.prepare(microvm_id, payload)
        facts = identity.payload
        source = facts.workspace
        workspace = Workspace.open(source.source, source.path, self.folder, os.environ)
        uri, prefix = facts.store.uri, facts.store.prefix
        store = None if uri is None else open_store(uri, prefix)
        limits = JournalLimits(facts.journal.memory_bytes, facts.journal.disk_bytes)
        journal = Journal(limits, self.folder / "journal")
        self.identity.commit(identity)
        self._checkpointer = Checkpointer(workspace, store, facts.generation)
        self.link.begin(identity, journal)
        self.supervisor.begin(workspace, facts.generation)
        self.calls.begin(workspace, self._checkpointer)
        log.info("runs as %s, generation %d", microvm_id, facts.generation)
        return {"boot_id": identity.boot_id}

    async def validate(self, timeout_s: float) -> dict[str, Any]:
        """A kernel from fork to its greeting, then its end: what every start touches.

        One at a time, and only before `/run`: it belongs to the build of an image, and
        forged ones must not fill the machine with kernels.
        """
        async with self._validating:
            if self.identity.current is not None:
                return {"skipped": True}
            with tempfile.TemporaryDirectory(dir=self.folder, prefix="validate-") as folder:
                return await self._try_kernel(folder, timeout_s)

    async def _try_kernel(self, folder: str, timeout_s: float) -> dict[str, Any]:
        started_s = time.monotonic()
        spawned = await self.host.spawn(SpawnRequest(key="validate", cwd=folder))
        urls = kernel_urls(spawned)
        channels = KernelChannels(self.supervisor.context, urls, lambda channel, parts: None)
        try:
            await asyncio.wait_for(channels.wait_ready(), timeout_s)
        except TimeoutError as error:
            raise ValidationFailed("A kernel did not come up in time.") from error
        finally:
            channels.close()
            await self.host.kill(spawned.pid)
        return {"cold": spawned.cold, "seconds": round(time.monotonic() - started_s, 3)}

    async def checkpoint(self, timeout_s: float) -> Saved | None:
        """For suspend and terminate; None before `/run` or without a store."""
        checkpointer = self._checkpointer
        if checkpointer is None or not checkpointer.enabled:
            return None
        return await checkpointer.save(timeout_s)

    def resumed(self) -> None:
        """For `/resume`."""
        after_resume(self._clocks)

    # --- plumbing

    def health(self) -> dict[str, Any]:
        """The body of `GET /health`."""
        identity = self.identity.current
        urgent, ordered = self.link.core.received
        return {
            **_names(identity),
            "last_sequence": {"urgent": urgent, "ordered": ordered},
            "kernel": self.supervisor.phase.value,
            "version": metadata.version("microvm-kernel-gateway"),
            "protocol_versions": list(VERSIONS),
        }

    def _on_message(self, message: LinkMessage) -> None:
        if message.kind is Kind.JUPYTER:
            self.traffic.to_kernel(message)
        elif message.kind is Kind.CALL:
            self.calls.handle(message)
        else:
            log.warning("a gateway does not send %s", message.kind.name)
            self.link.consumed(message)

    def _set_signer(self, sign: Signer) -> None:
        if self.link.journal is not None:
            self.link.journal.set_signer(sign)

    def _agent_application(self) -> Application:
        return Application(
            [
                ("/link", LinkSocket, {"link": self.link}),
                ("/health", _Health, {"agent": self}),
                ("/keepawake", _KeepAwake),
            ],
            default_handler_class=NotFoundHandler,
            log_function=log_request,
            websocket_max_message_size=_MAX_FRAME_BYTES,
        )


class ValidationFailed(SharedError):  # noqa: N818 - named like its tree: what happened
    """`/validate` found that no kernel comes up."""

    code = "validation_failed"


class _Health(JsonHandler):
    def initialize(self, agent: Agent) -> None:
        self._agent = agent

    def get(self) -> None:
        self.answer(self._agent.health())


class _KeepAwake(JsonHandler):
    def get(self) -> None:
        self.clear_header("Content-Type")
        self.set_status(204)


def _names(identity: Identity | None) -> dict[str, Any]:
    if identity is None:
        return dict.fromkeys(("boot_id", "microvm_id", "generation", "kernel_session"))
    return {
        "boot_id": identity.boot_id,
        "microvm_id": identity.microvm_id,
        "generation": identity.payload.generation,
        "kernel_session": identity.payload.kernel_session,
    }


def _log_to_stderr() -> None:
    """The machine's log file is our stderr."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s agent %(levelname)s %(message)s"
    )
