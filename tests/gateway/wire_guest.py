"""A guest end of the link over a real WebSocket, for tests of the gateway's shell.

Same core, same signatures and codec as the real guest; it runs no kernel. What it
does with a message is up to the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from gateway.link_codec import LinkKey, compress, decompress
from kernel_guest.shared.link import LinkCore, LinkIdentity, Received, Role
from kernel_guest.shared.messages import Kind, LinkMessage, reply

SESSION = "kernel-1"

Refusal = Callable[[ServerConnection, Request], Response | None]


class WireGuest:
    """One core over successive sockets. ``script`` replaces the protocol with anything at all."""

    def __init__(self, key: LinkKey, *, generation: int = 1, boot_id: str = "boot-1") -> None:
        self.core = LinkCore(
            role=Role.GUEST,
            identity=LinkIdentity(SESSION, generation, 1, boot_id),
            verify=verifier(key),
            compress=compress,
            decompress=decompress,
        )
        self.received: list[LinkMessage] = []
        self.answer: Callable[[dict[str, Any]], LinkMessage | None] = answer_all
        self.script: Callable[[ServerConnection], Any] | None = None
        self.refuse: Refusal | None = None
        self.requests: list[Request] = []
        self.socket: ServerConnection | None = None
        self.url = ""
        self.frames = 0
        self.news = asyncio.Event()

    async def send(self, *messages: LinkMessage) -> None:
        for message in messages:
            self.core.send(message)
        await self.flush()

    async def flush(self) -> None:
        if self.socket is not None:
            for frame in self.core.take_frames(2**30):
                await self.socket.send(frame)

    async def cut(self) -> None:
        assert self.socket is not None
        self.socket.transport.abort()

    def process_request(self, socket: ServerConnection, request: Request) -> Response | None:
        self.requests.append(request)
        return self.refuse(socket, request) if self.refuse else None

    async def serve_socket(self, socket: ServerConnection) -> None:
        if self.script is not None:
            await self.script(socket)
            return
        self.socket = socket
        self.core.connected()
        try:
            await self.flush()
            async for data in socket:
                assert isinstance(data, bytes)
                self.frames += 1
                for event in self.core.receive_frame(data):
                    if isinstance(event, Received):
                        self.take(event.message)
                self.news.set()
                await self.flush()
        except ConnectionClosed:
            pass
        if self.socket is socket:
            self.socket = None
            self.core.disconnected()

    def take(self, message: LinkMessage) -> None:
        self.received.append(message)
        self.core.consumed(message.size_bytes, message.lane)
        if message.kind is Kind.CALL and (made := self.answer(message.json())) is not None:
            self.core.send(made)


def answer_all(call: dict[str, Any]) -> LinkMessage:
    return reply(call["id"], {"op": call["op"], **call["args"]})


def verifier(key: LinkKey) -> Callable[[bytes, bytes], bool]:
    public = Ed25519PublicKey.from_public_bytes(key.public_bytes)

    def verify(message: bytes, signature: bytes) -> bool:
        try:
            public.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    return verify


@asynccontextmanager
async def wire_guest(key: LinkKey, **facts: Any) -> AsyncIterator[WireGuest]:
    guest = WireGuest(key, **facts)
    async with serve(
        guest.serve_socket,
        "127.0.0.1",
        0,
        process_request=guest.process_request,
        compression=None,
        max_size=None,
        close_timeout=1,
    ) as server:
        host, port = server.sockets[0].getsockname()
        guest.url = f"http://{host}:{port}"
        yield guest


class Owner:
    """Logs what the link tells its owner."""

    def __init__(self) -> None:
        self.messages: list[LinkMessage] = []
        self.cuts: list[str] = []
        self.news = asyncio.Event()

    def on_link_message(self, message: LinkMessage) -> None:
        self.messages.append(message)
        self.news.set()

    def on_link_cut(self, reason: str) -> None:
        self.cuts.append(reason)
        self.news.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.news.clear()
                await self.news.wait()
