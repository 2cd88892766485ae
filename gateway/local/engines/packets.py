"""JSON packets with file descriptors over a SOCK_SEQPACKET pair, for an asyncio loop.

One packet is one message, so there is no framing; end-of-file means that the
other process has gone.  Used towards the keeper and towards each template.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from gateway.local.interfaces import EngineError

Packet = dict[str, Any]

PACKET_BYTES = 256 * 1024
#: How long the other process may leave its queue full.
SEND_WITHIN_S = 10.0


def make_pair() -> tuple[socket.socket, socket.socket]:
    """(our end, non-blocking; the other process's end)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


class PacketChannel:
    """Our end of a pair.  Packets that answer a request go to `request`, others to a callback.

    `is_notice` tells a packet that came by itself from an answer.  `on_closed` is
    called once when the other process has gone, never after `close`.
    """

    def __init__(
        self,
        ours: socket.socket,
        *,
        on_notice: Callable[[Packet], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._socket = ours
        self._loop = asyncio.get_running_loop()
        self._on_notice = on_notice
        self._on_closed = on_closed
        self._turn = asyncio.Lock()
        self._answer: asyncio.Future[Packet] | None = None
        self._open = True
        self._loop.add_reader(ours, self._read)

    @property
    def is_open(self) -> bool:
        return self._open

    async def request(self, packet: Packet, fds: Sequence[int] = (), *, within_s: float) -> Packet:
        """Send and wait for the answer; one request at a time, others queue.

        Raises EngineError when the other process has gone or does not answer in time;
        in the second case the channel is closed, because answers carry no number.
        """
        async with self._turn:
            self._answer = self._loop.create_future()
            try:
                await self._send(packet, fds)
                return await asyncio.wait_for(self._answer, within_s)
            except TimeoutError as error:
                self.close()
                raise EngineError(f"no answer to {packet['op']!r} within {within_s:g} s") from error
            finally:
                self._answer = None

    async def tell(self, packet: Packet) -> None:
        """Send a packet that has no answer.  Raises EngineError when nobody is there."""
        async with self._turn:
            await self._send(packet, ())

    async def _send(self, packet: Packet, fds: Sequence[int]) -> None:
        data = json.dumps(packet).encode()
        async with asyncio.timeout(SEND_WITHIN_S):
            while True:
                if not self._open:
                    raise EngineError("the process at the other end has gone")
                try:
                    socket.send_fds(self._socket, [data], list(fds))
                    return
                except BlockingIOError:
                    await self._writable()
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise EngineError("the process at the other end has gone") from error

    async def _writable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._socket, _resolve, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, PACKET_BYTES, 1)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data, fds = b"", []
        for fd in fds:
            os.close(fd)
        if data:
            self._take(json.loads(data))
        else:
            self._lost()

    def _take(self, packet: Packet) -> None:
        if "exited" in packet or self._answer is None or self._answer.done():
            self._on_notice(packet)
        else:
            self._answer.set_result(packet)

    def _lost(self) -> None:
        was_open = self._open
        self.close()
        if was_open:
            self._on_closed()

    def close(self) -> None:
        """Close our end: the other process sees end-of-file.  Idempotent."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._socket)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(EngineError("the process at the other end has gone"))
            with contextlib.suppress(asyncio.InvalidStateError):
                self._answer.exception()
        self._socket.close()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
