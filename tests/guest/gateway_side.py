"""The other end of the link for tests: `LinkCore` as the gateway, over a real WebSocket.

    async with serving(machine) as agent, gateway.link(agent) : ...

Nothing here imports the gateway package: what is tested is the guest against the protocol.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import websockets
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from jupyter_client.session import Session

from kernel_guest.agent import Agent
from kernel_guest.hooks import HOOK_PATH
from kernel_guest.kernel_host import KernelHost
from kernel_guest.shared.link import LinkCore, LinkIdentity, LinkLimits, Received, Refused, Role
from kernel_guest.shared.messages import Channel, Kind, Lane, LinkMessage, call, jupyter
from kernel_guest.shared.payload import (
    JournalBounds,
    RunPayload,
    Store,
    Workspace,
    encode_key,
    encode_payload,
)
from tests.guest.machines import Machine

KEY = "0123456789abcdef"
DEADLINE_S = 30.0
SESSION = "session-1"


@dataclass
class Served:
    """An agent that serves in this process, and how to reach it."""

    agent: Agent
    address: str | int
    hook_address: str | int

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.http("GET", path, **options)

    async def http(self, method: str, path: str, **options: Any) -> httpx.Response:
        return await _http(self.address, method, path, **options)

    async def hook(self, name: str, body: Any = None, **options: Any) -> httpx.Response:
        data = b"" if body is None else json.dumps(body).encode()
        options = {"content": data, **options}
        return await _http(self.hook_address, "POST", f"{HOOK_PATH}/{name}", **options)


async def _http(address: str | int, method: str, path: str, **options: Any) -> httpx.Response:
    if isinstance(address, str):
        transport = httpx.AsyncHTTPTransport(uds=address)
        base = "http://guest"
    else:
        transport = httpx.AsyncHTTPTransport()
        base = f"http://127.0.0.1:{address}"
    async with httpx.AsyncClient(transport=transport, base_url=base, timeout=DEADLINE_S) as client:
        return await client.request(method, path, **options)


@contextmanager
def listener_at(folder: Path, name: str, tcp: bool) -> Iterator[tuple[socket.socket, str | int]]:
    if tcp:
        with socket.create_server(("127.0.0.1", 0)) as made:
            yield made, made.getsockname()[1]
        return
    path = str(folder / name)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)
        made.listen(128)
        yield made, path


@asynccontextmanager
async def serving(machine: Machine, *, tcp: bool = False) -> AsyncIterator[Served]:
    """An `Agent` on the test's loop, with a real machine behind it."""
    with (
        listener_at(machine.folder, "a.sock", tcp) as (agent_listener, address),
        listener_at(machine.folder, "h.sock", tcp) as (hook_listener, hook_address),
    ):
        agent = Agent(KernelHost(machine.connect()), machine.folder)
        await agent.open(agent_listener, hook_listener)
        try:
            yield Served(agent, address, hook_address)
        finally:
            await agent.close()


class CallFailedError(Exception):
    def __init__(self, error: dict[str, str]) -> None:
        super().__init__(f"{error['code']}: {error['message']}")
        self.code = error["code"]


class LinkRefusedError(Exception):
    pass


@dataclass
class Got:
    """One Jupyter message as it came."""

    channel: Channel
    parts: tuple[bytes, ...]
    index: int
    header: dict[str, Any] = field(init=False)
    parent: dict[str, Any] = field(init=False)
    content: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.header, self.parent, _, self.content = (json.loads(p) for p in self.parts[1:5])

    @property
    def kind(self) -> str:
        return str(self.header["msg_type"])

    @property
    def parent_id(self) -> str:
        return str(self.parent.get("msg_id", ""))


class GatewaySide:
    """A gateway that keeps its core over any number of sockets."""

    def __init__(
        self, *, compress: bool = True, epoch: int = 1, limits: LinkLimits | None = None
    ) -> None:
        self.private = Ed25519PrivateKey.generate()
        self.session = Session(key=KEY.encode())
        self.epoch = epoch
        self.compress = compress
        self.core = self.fresh_core(limits)
        self.got: list[Got] = []
        self.events: list[tuple[str, dict[str, Any], int]] = []
        self.gaps: list[dict[str, int]] = []
        self.replies: dict[int, LinkMessage] = {}
        self._reply_index: dict[int, int] = {}
        self.reading = asyncio.Event()
        self.reading.set()
        self._index = 0
        self._calls = 0
        self._changed = asyncio.Event()
        self._socket: websockets.ClientConnection | None = None
        self._pump: asyncio.Task[None] | None = None
        self.established = 0
        self.close_code: int | None = None

    def fresh_core(self, limits: LinkLimits | None = None) -> LinkCore:
        codec: dict[str, Any] = {}
        if self.compress:
            codec = {
                "compress": zstandard.ZstdCompressor(level=1).compress,
                "decompress": lambda data, bound: zstandard.ZstdDecompressor().decompress(data),
            }
        return LinkCore(
            role=Role.GATEWAY,
            identity=LinkIdentity(SESSION, 1, self.epoch),
            limits=limits,
            prove=self.private.sign,
            **codec,
        )

    def payload(self, **changes: Any) -> str:
        values: dict[str, Any] = {
            "kernel_session": SESSION,
            "generation": 1,
            "epoch": 1,
            "public_key": encode_key(self.private.public_key().public_bytes_raw()),
            "time_s": time.time(),
            **changes,
        }
        return encode_payload(RunPayload(**values))

    async def run(self, served: Served, **changes: Any) -> dict[str, Any]:
        body = {"microvmId": "microvm-1", "runHookPayload": self.payload(**changes)}
        answer = await served.hook("run", body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    # --- transport

    async def connect(self, served: Served) -> None:
        """Open a socket and pass the handshake."""
        socket = await open_socket(served)
        before = self.established
        self.core.connected()
        self._socket = socket
        self._pump = asyncio.create_task(self._read(socket))
        await self.until(lambda: self.established > before or self._pump_ended())
        if self._pump.done():
            await self._pump

    def _pump_ended(self) -> bool:
        return self._pump is not None and self._pump.done()

    async def drop(self) -> None:
        """Cut the line without a word."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])
        if self._socket is not None:
            self._socket.transport.abort()
            await self._socket.wait_closed()
        self.core.disconnected()

    @asynccontextmanager
    async def link(self, served: Served) -> AsyncIterator[GatewaySide]:
        await self.connect(served)
        try:
            yield self
        finally:
            await self.drop()

    async def flush(self) -> None:
        while self.core.wants_output and self._socket is not None:
            for frame in self.core.take_frames(1024 * 1024):
                await self._socket.send(frame)

    async def _read(self, socket: websockets.ClientConnection) -> None:
        try:
            async for data in socket:
                await self.reading.wait()
                assert isinstance(data, bytes)
                for happened in self.core.receive_frame(data):
                    if isinstance(happened, Refused):
                        raise LinkRefusedError(happened.code)
                    if isinstance(happened, Received):
                        self._take(happened.message)
                    else:
                        self.established += 1
                self._changed.set()
                await self.flush()
            self.close_code = socket.close_code
        except websockets.ConnectionClosed as closed:
            self.close_code = closed.rcvd.code if closed.rcvd else None
        finally:
            self._changed.set()

    def _take(self, message: LinkMessage) -> None:
        self.core.consumed(message.size_bytes, message.lane)
        self._index += 1
        if message.kind is Kind.JUPYTER:
            self.got.append(Got(message.channel, message.parts, self._index))
        elif message.kind is Kind.REPLY:
            self.replies[message.json()["id"]] = message
            self._reply_index[message.json()["id"]] = self._index
        elif message.kind is Kind.EVENT:
            value = message.json()
            self.events.append((value["name"], value["data"], self._index))
        elif message.kind is Kind.GAP:
            self.gaps.append(message.json())

    # --- application

    async def until(self, condition: Callable[[], Any], within_s: float = DEADLINE_S) -> Any:
        async with asyncio.timeout(within_s):
            while not (value := condition()):
                self._changed.clear()
                await self._changed.wait()
        return value

    def first_index(self, call_id: int) -> int:
        """When a reply came, in the count of all messages."""
        return self._reply_index[call_id]

    def post_call(
        self, op: str, args: dict[str, Any], blob: bytes = b"", lane: Lane = Lane.URGENT
    ) -> int:
        self._calls += 1
        self.core.send(call(self._calls, op, args, blob, lane))
        return self._calls

    async def result(self, call_id: int) -> tuple[dict[str, Any], bytes]:
        message = await self.until(lambda: self.replies.get(call_id))
        value = message.json()
        if not value["ok"]:
            raise CallFailedError(value["error"])
        return value["result"], message.blob

    async def call(
        self, op: str, blob: bytes = b"", lane: Lane = Lane.URGENT, **args: Any
    ) -> dict[str, Any]:
        call_id = self.post_call(op, args, blob, lane)
        await self.flush()
        return (await self.result(call_id))[0]

    async def start(self, **args: Any) -> dict[str, Any]:
        return await self.call("start", **{"key": KEY, "kernel_name": None, **args})

    def post(self, channel: Channel, msg_type: str, content: dict[str, Any], **more: Any) -> str:
        message = self.session.msg(msg_type, content, **more)
        parts = self.session.serialize(message)[1:]
        self.core.send(jupyter(channel, parts))
        return str(message["header"]["msg_id"])

    async def request(
        self, msg_type: str, content: dict[str, Any], channel: Channel = Channel.SHELL
    ) -> str:
        msg_id = self.post(channel, msg_type, content)
        await self.flush()
        return msg_id

    async def execute(self, code: str, **more: Any) -> Cell:
        return await self.finish(await self.begin(code, **more))

    async def begin(self, code: str, **more: Any) -> str:
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": True}
        return await self.request("execute_request", content | more)

    async def finish(self, msg_id: str) -> Cell:
        await self.until(lambda: self.cell(msg_id).done)
        return self.cell(msg_id)

    def cell(self, msg_id: str) -> Cell:
        return Cell([got for got in self.got if got.parent_id == msg_id])

    def event(self, name: str) -> dict[str, Any] | None:
        return next((data for found, data, _ in self.events if found == name), None)


@dataclass
class Cell:
    """What came for one request, in order."""

    messages: list[Got]

    @property
    def kinds(self) -> list[str]:
        return [got.kind for got in self.messages]

    @property
    def reply(self) -> Got | None:
        found = [got for got in self.messages if got.kind.endswith("_reply")]
        return found[0] if found else None

    @property
    def done(self) -> bool:
        return self.reply is not None and any(
            got.kind == "status" and got.content["execution_state"] == "idle"
            for got in self.messages
        )

    @property
    def stdout(self) -> str:
        return "".join(got.content["text"] for got in self.messages if got.kind == "stream")

    @property
    def status(self) -> str:
        assert self.reply is not None
        return str(self.reply.content["status"])

    @property
    def value(self) -> str:
        found = [got for got in self.messages if got.kind == "execute_result"]
        return str(found[0].content["data"]["text/plain"])


async def open_socket(served: Served) -> websockets.ClientConnection:
    options: dict[str, Any] = {"compression": None, "max_size": 2**20, "ping_interval": None}
    if isinstance(served.address, str):
        return await websockets.unix_connect(served.address, "ws://guest/link", **options)
    return await websockets.connect(f"ws://127.0.0.1:{served.address}/link", **options)


__all__ = [
    "KEY",
    "CallFailedError",
    "GatewaySide",
    "JournalBounds",
    "LinkRefusedError",
    "Served",
    "Store",
    "Workspace",
    "listener_at",
    "open_socket",
    "serving",
    "suppress",
]
