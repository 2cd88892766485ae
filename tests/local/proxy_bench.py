"""What the proxy tests stand on: a machine that admits, a guest in this process, raw clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from gateway.local.clock import SystemClock
from gateway.local.faults import FaultBoard
from gateway.local.interfaces import (
    NotAdmittedError,
    ProxyLimits,
    RunningMachine,
    TokenRefusedError,
    TokenVerdict,
)
from gateway.local.proxy import MachineProxy

WITHIN_S = 10.0
GOOD = "a.good.token"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Grant:
    ports: set[int]

    def allows(self, port: int) -> bool:
        return port in self.ports


@dataclass
class Guest:
    """Stands for a RunningMachine: every port reaches a handler through a real socket."""

    handlers: dict[int, Handler] = field(default_factory=dict)
    servers: dict[int, asyncio.Server] = field(default_factory=dict)
    microvm_id: str = "microvm-1"
    pid: int = 1
    folder: Path = Path("/nowhere")

    async def listen(self, port: int, handler: Handler) -> None:
        self.servers[port] = await asyncio.start_server(self._closing(handler), "127.0.0.1", 0)

    def _closing(self, handler: Handler) -> Handler:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handler(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass  # the proxy broke off, as many tests want it to
            finally:
                writer.close()

        return handle

    async def open_port(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if port not in self.servers:
            raise ConnectionRefusedError(port)
        address = self.servers[port].sockets[0].getsockname()
        return await asyncio.open_connection(*address)


@dataclass
class Machine:
    """Stands for a ProxiedMachine; a test sets what it answers."""

    guest: Guest
    ports: set[int] = field(default_factory=lambda: {8080, 9090})
    inbound: list[int] = field(default_factory=list)
    gate: asyncio.Event | None = None
    dead: bool = False
    admissions: int = 0
    abandoned: int = 0
    microvm_id: str = "microvm-1"

    def read_token(self, token: str | None) -> Grant:
        if token is None or "." not in token:
            raise TokenRefusedError(TokenVerdict.MISSING)
        if token == "a.shell.token":
            raise TokenRefusedError(TokenVerdict.SHELL_ONLY)
        if token != GOOD:
            raise TokenRefusedError(TokenVerdict.FAILED)
        return Grant(self.ports)

    def note_inbound(self, size_bytes: int) -> None:
        self.inbound.append(size_bytes)

    async def admit(self) -> RunningMachine:
        self.admissions += 1
        if self.dead:
            raise NotAdmittedError("dead")
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.abandoned += 1
                raise
        return self.guest


@dataclass
class Bench:
    proxy: MachineProxy
    machine: Machine
    guest: Guest
    faults: FaultBoard
    port: int
    clients: list[Client] = field(default_factory=list)

    async def open(self) -> Client:
        """A raw client, closed with the bench if the test does not close it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        client = Client(reader, writer, self.port)
        self.clients.append(client)
        return client

    async def ask(self, *args: object, **kwargs: object) -> Answer:
        """One request on a connection of its own."""
        client = await self.open()
        try:
            await client.send(*args, **kwargs)  # type: ignore[arg-type]
            return await client.answer()
        finally:
            client.writer.close()


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


@dataclass
class Client:
    """A raw HTTP/1.1 client: sends what it is told, reads one answer."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    port: int

    async def send(
        self,
        target: str = "/",
        headers: dict[str, str] | list[tuple[str, str]] | None = None,
        body: bytes = b"",
        *,
        method: str = "GET",
        token: str | None = GOOD,
        host: str | None = None,
    ) -> None:
        pairs = list(headers.items()) if isinstance(headers, dict) else list(headers or [])
        pairs.insert(0, ("Host", host or f"127.0.0.1:{self.port}"))
        if token is not None:
            pairs.append(("X-aws-proxy-auth", token))
        if body and not any(key.lower() == "transfer-encoding" for key, _ in pairs):
            pairs.append(("Content-Length", str(len(body))))
        lines = [f"{method} {target} HTTP/1.1", *(f"{key}: {value}" for key, value in pairs)]
        self.writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        await self.writer.drain()

    async def head(self) -> tuple[int, list[tuple[str, str]]]:
        async with asyncio.timeout(WITHIN_S):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        status, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        pairs = [line.split(": ", 1) for line in lines]
        return int(status.split(" ")[1]), [(key.lower(), value) for key, value in pairs]

    async def answer(self, *, head_only: bool = False) -> Answer:
        status, headers = await self.head()
        async with asyncio.timeout(WITHIN_S):
            body = b"" if head_only or status in (204, 304) else await self._body(dict(headers))
        return Answer(status, headers, body)

    async def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readline()
            while (await self.reader.readline()).strip():
                pass
            return body
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        return await self.reader.read()

    async def rest(self) -> bytes:
        """Everything until the connection ends, whichever way."""
        pieces = []
        async with asyncio.timeout(WITHIN_S):
            with contextlib.suppress(ConnectionResetError):
                while more := await self.reader.read(65536):
                    pieces.append(more)
        return b"".join(pieces)


@contextlib.asynccontextmanager
async def bench(
    handler: Handler | None = None, limits: ProxyLimits | None = None
) -> AsyncIterator[Bench]:
    guest = Guest()
    if handler is not None:
        await guest.listen(8080, handler)
    machine = Machine(guest)
    faults = FaultBoard()
    proxy = MachineProxy(machine, limits or ProxyLimits(), SystemClock(), faults)
    port = await proxy.start()
    made = Bench(proxy, machine, guest, faults, port)
    try:
        yield made
    finally:
        for client in made.clients:
            client.writer.close()
        await proxy.close()
        for server in guest.servers.values():
            server.close()


async def echo_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers with the request head that arrived, as the body."""
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(head), head))
    await writer.drain()
    writer.close()


def sent_headers(answer: Answer) -> dict[str, str]:
    """The request's headers as the guest of `echo_request` got them."""
    lines = answer.body.decode("latin-1").split("\r\n")[1:-2]
    return {key.lower(): value for key, value in (line.split(": ", 1) for line in lines)}


async def switching(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accepts any upgrade and echoes bytes."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    )
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
