"""Real templates, machines and kernels for tests, without the agent.

    with templates.running() as template, template.machine(folder) as machine:
        async with machine.host() as host: ...

Everything that was started is ended and seen to be gone when its `with` ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from jupyter_client.asynchronous.client import AsyncKernelClient

from kernel_guest.kernel_host import KernelHost, SpawnedKernel
from kernel_guest.kernels import SpawnRequest

STAND_IN = Path(__file__).with_name("stand_in_template.py")
KEY = "0123456789abcdef"
DEADLINE_S = 20


def clean_environment() -> dict[str, str]:
    """Without the variable upon which ipykernel leaves descriptors 1 and 2 alone."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@dataclass
class TemplateProcess:
    """A template and the test's end of its control socket."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    ended: dict[int, int] = field(default_factory=dict)
    lost: bool = False  # the test has ended it in another way

    def receive(self) -> dict[str, Any]:
        data = self.control.recv(65536)
        assert data, "the template closed its control socket"
        message: dict[str, Any] = json.loads(data)
        if "exited" in message:
            self.ended[message["exited"]] = message["status"]
        return message

    def call(self, message: dict[str, Any], fds: list[int] | None = None) -> dict[str, Any]:
        socket.send_fds(self.control, [json.dumps(message).encode()], fds or [])
        while True:
            answer = self.receive()
            if "exited" not in answer:
                return answer

    def wait_ended(self, pid: int) -> int:
        """The wait status of a machine's init, once it has ended."""
        while pid not in self.ended:
            self.receive()
        return self.ended[pid]

    @contextmanager
    def machine(self, folder: Path, **options: Any) -> Iterator[Machine]:
        with (
            listener(folder / "agent.sock") as agent,
            listener(folder / "hook.sock") as hook,
            open(folder / "machine.log", "ab") as log,
        ):
            message = {
                "op": "machine",
                "microvm_id": folder.name,
                "folder": str(folder),
                "agent_fd": 0,
                "hook_fd": 1,
                "log_fd": 2,
                "cgroup": None,
                "env": {},
                **options,
            }
            answer = self.call(message, [agent.fileno(), hook.fileno(), log.fileno()])
        assert "pid" in answer, answer
        machine = Machine(self, folder, answer["pid"])
        try:
            yield machine
        finally:
            machine.end()


@dataclass
class Machine:
    """A machine's init; `connect` once to get the socket that its agent would hold."""

    template: TemplateProcess
    folder: Path
    pid: int
    agent: socket.socket | None = None
    lost: bool = False  # the test has ended its template

    def connect(self) -> socket.socket:
        self.agent = socket.socket(socket.AF_UNIX)
        self.agent.settimeout(DEADLINE_S)
        self.agent.connect(str(self.folder / "agent.sock"))
        _, fds, _, _ = socket.recv_fds(self.agent, 100, 1)
        return socket.socket(fileno=fds[0])

    @asynccontextmanager
    async def host(self) -> AsyncIterator[KernelHost]:
        host = KernelHost(self.connect())
        await host.open()
        try:
            yield host
        finally:
            await host.close()

    def log(self) -> str:
        names = ("machine.log", "kernel.log")
        paths = [self.folder / name for name in names]
        return "\n".join(path.read_text() for path in paths if path.exists())

    def end(self) -> None:
        if not self.lost:
            with suppress(ProcessLookupError):  # it may be ending, its agent's socket closed
                os.kill(self.pid, signal.SIGTERM)
            self.template.wait_ended(self.pid)
        if self.agent is not None:
            self.agent.close()


@contextmanager
def listener(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        made.listen()
        yield made


@contextmanager
def running_template(**env: str) -> Iterator[TemplateProcess]:
    """A stand-in template that has imported everything and answered a ping."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(DEADLINE_S)
    with ours:
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-Xfrozen_modules=off", str(STAND_IN), str(fd)]
            process = subprocess.Popen(command, pass_fds=[fd], env={**clean_environment(), **env})
        template = TemplateProcess(process, ours)
        try:
            assert template.call({"op": "ping"})["ok"]
            yield template
        finally:
            ours.close()
            assert process.wait(DEADLINE_S) == 0 or template.lost


@asynccontextmanager
async def client_of(
    kernel: SpawnedKernel, key: str = KEY, receive_messages: int = 0
) -> AsyncIterator[AsyncKernelClient]:
    """A stock asynchronous client that has seen the kernel's greeting on iopub.

    `receive_messages` bounds what libzmq takes for it ahead of being asked (0: no bound).
    """
    context = zmq.asyncio.Context()
    context.sockopts[zmq.RECONNECT_IVL] = 2
    context.sockopts[zmq.RCVHWM] = receive_messages
    client = AsyncKernelClient(context=context)
    info = {"transport": "ipc", "ip": kernel.connection.ip, **kernel.connection.ports()}
    client.load_connection_info({**info, "key": key, "signature_scheme": "hmac-sha256"})
    client.start_channels(hb=False)
    try:
        while (await client.get_iopub_msg(timeout=DEADLINE_S))["msg_type"] != "iopub_welcome":
            pass  # the kernel's "starting" may come first
        yield client
    finally:
        client.stop_channels()
        context.destroy(linger=0)


@dataclass
class Cell:
    """What one execute request brought back."""

    reply: dict[str, Any]
    outputs: list[tuple[str, Any]]

    @property
    def stdout(self) -> str:
        return "".join(c["text"] for kind, c in self.outputs if kind == "stream")

    @property
    def data(self) -> list[dict[str, Any]]:
        return [content["data"] for _, content in self.outputs if "data" in content]

    @property
    def status(self) -> str:
        return str(self.reply["status"])


async def run_cell(client: AsyncKernelClient, code: str, text: str = "") -> Cell:
    """Execute and collect until idle and, for output that comes from outside the kernel's own
    streams and may be late, until `text` was seen."""
    request = client.execute(code)
    outputs: list[tuple[str, Any]] = []
    cell = Cell({}, outputs)
    idle = False
    while not (idle and text in cell.stdout):
        message = await client.get_iopub_msg(timeout=DEADLINE_S)
        kind, content = message["msg_type"], message["content"]
        if message["parent_header"].get("msg_id") != request:
            continue
        if kind == "status":
            idle = idle or content["execution_state"] == "idle"
        elif kind != "execute_input":
            outputs.append((kind, content))
    reply = await client.get_shell_msg(timeout=DEADLINE_S)
    while reply["parent_header"]["msg_id"] != request:
        reply = await client.get_shell_msg(timeout=DEADLINE_S)
    cell.reply.update(reply["content"])
    return cell


@asynccontextmanager
async def kernel_in(
    machine: Machine, *, receive_messages: int = 0, **request: Any
) -> AsyncIterator[tuple[KernelHost, SpawnedKernel, AsyncKernelClient]]:
    """One kernel of a fresh machine, with a client."""
    async with machine.host() as host:
        kernel = await host.spawn(
            SpawnRequest(**{"key": KEY, "cwd": str(machine.folder), **request})
        )
        async with client_of(kernel, receive_messages=receive_messages) as client:
            yield host, kernel, client
