"""The agent's side of the socket to its machine: ask for kernels, signal them, hear their end.

One stream socket, one JSON object a line. Calls carry an id and are answered in order; the end of
a kernel arrives unasked. Only the machine is the kernels' parent, so only it can tell a process
that has ended from another one that got the same pid: every signal goes through it.

If the machine is gone there is nobody left to answer and the machine's other processes are being
killed: every waiting call fails with `MachineGone`, and the agent should end too.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernel_guest.kernels import (
    MAX_MESSAGE_BYTES,
    Connection,
    SpawnFailed,
    SpawnRequest,
    spawn_failure,
)
from kernel_guest.shared.errors import SharedError

# A fork takes milliseconds and a kernelspec lookup tens of them; a frozen machine may take longer,
# but then the agent is frozen with it and its clock has stood still for the most part.
CALL_DEADLINE_S = 10.0

OnExit = Callable[[int, int | None, int | None], None]


class MachineGone(SharedError):  # noqa: N818 - named like its tree: what happened
    """The machine's init no longer answers."""

    code = "machine_gone"


@dataclass(frozen=True, slots=True)
class SpawnedKernel:
    """A kernel process that exists. Its sockets may not be bound yet: connect with a short
    ZMQ_RECONNECT_IVL (2 ms), since libzmq's default waits 100 ms after a first refusal."""

    pid: int
    kind: str
    cold: bool
    reason: str
    connection: Connection
    interrupt_mode: str
    language: str


class KernelHost:
    """Asyncio client of the machine. Make it on the loop that uses it, `await open()`, `close()`.

    `on_exit` callbacks get (pid, exit code or None, signal or None), once for each kernel.
    """

    def __init__(self, host: socket.socket) -> None:
        self._socket = host
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._callbacks: list[OnExit] = []
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self.gone = asyncio.Event()

    def __repr__(self) -> str:
        state = "gone" if self.gone.is_set() else "open" if self._task else "new"
        return f"<KernelHost {state} waiting={len(self._waiting)}>"

    async def open(self) -> None:
        """Start reading. Called once by the agent when its loop runs."""
        self._socket.setblocking(False)
        reader, self._writer = await asyncio.open_unix_connection(
            sock=self._socket, limit=MAX_MESSAGE_BYTES
        )
        self._task = asyncio.create_task(self._read(reader), name="kernel host")

    async def close(self) -> None:
        """Stop reading and close the socket, upon which the machine ends. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._writer is not None:
            self._writer.close()
        self._fail_waiting()

    def on_exit(self, callback: OnExit) -> None:
        """Have `callback` called on the loop for every kernel that ends."""
        self._callbacks.append(callback)

    async def spawn(self, request: SpawnRequest) -> SpawnedKernel:
        """Start a kernel process. Raises UnknownKernel, SpawnFailed or MachineGone."""
        request.check()
        result = await self._call("spawn", request=request.to_json())
        return SpawnedKernel(
            pid=result["pid"],
            kind=result["kind"],
            cold=result["cold"],
            reason=result["reason"],
            connection=Connection(result["ip"]),
            interrupt_mode=result["interrupt_mode"],
            language=result["language"],
        )

    async def signal(self, pid: int, signum: int) -> bool:
        """Signal a kernel's process group; False if that kernel has already ended."""
        result = await self._call("signal", pid=pid, signum=int(signum))
        return bool(result["delivered"])

    async def kill(self, pid: int) -> bool:
        """SIGKILL for the kernel's process group; its end is reported to `on_exit`."""
        return await self.signal(pid, signal.SIGKILL)

    async def _call(self, op: str, **arguments: Any) -> dict[str, Any]:
        line = json.dumps({"op": op, "id": self._next_id, **arguments}).encode() + b"\n"
        if len(line) > MAX_MESSAGE_BYTES:
            raise SpawnFailed("bad_request", f"The request has {len(line)} bytes, too many.")
        if self.gone.is_set() or self._writer is None:
            raise MachineGone("The machine's init is gone.")
        answer = self._waiting[self._next_id] = asyncio.get_running_loop().create_future()
        call_id, self._next_id = self._next_id, self._next_id + 1
        self._writer.write(line)
        try:
            async with asyncio.timeout(CALL_DEADLINE_S):
                message = await answer
        except TimeoutError as error:
            raise MachineGone(f"No answer to {op} within {CALL_DEADLINE_S:g} s.") from error
        finally:
            self._waiting.pop(call_id, None)
        if "error" in message:
            raise spawn_failure(message["error"])
        return dict(message["ok"])

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._on_message(json.loads(line))
        except ConnectionError:
            pass  # the same as an end of file: the machine is gone
        finally:
            self.gone.set()
            self._fail_waiting()

    def _on_message(self, message: dict[str, Any]) -> None:
        if "exited" in message:
            for callback in self._callbacks:
                callback(message["exited"], message["code"], message["signal"])
            return
        answer = self._waiting.get(message["id"])
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _fail_waiting(self) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(MachineGone("The machine's init is gone."))
