"""One connection of the proxy while HTTP heads and bodies pass: bytes in, bytes out.

A thin replacement of asyncio's streams, for two reasons: at the 101 the transport
is handed to the splice together with the bytes that were read too far, and the
end of a connection can be noticed while nobody reads.

Bounds: reading pauses above `READ_HIGH_BYTES`; `drain` waits while the transport
holds more than `WRITE_HIGH_BYTES`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

READ_HIGH_BYTES = 256 * 1024
WRITE_HIGH_BYTES = 256 * 1024


class Wire(asyncio.Protocol):
    """A connection.  `read` has one caller at a time, `drain` too."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._chunks: list[bytes] = []
        self._size_bytes = 0
        self._ended = False
        self._lost = False
        self._reader: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._on_gone: Callable[[], None] | None = None
        self._keep: object = None

    @classmethod
    async def adopt(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Wire:
        """Take over a connection that was opened as streams."""
        wire = cls()
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        transport.set_protocol(wire)
        wire.connection_made(transport)
        reader.feed_eof()
        if early := await reader.read(-1):
            wire.data_received(early)
        transport.resume_reading()
        wire._keep = writer  # from Python 3.13 on, a collected writer closes its transport
        return wire

    # -- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    def data_received(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size_bytes += len(data)
        if self._size_bytes > READ_HIGH_BYTES and self.transport is not None:
            self.transport.pause_reading()
        _wake(self._reader)

    def eof_received(self) -> bool:
        self._ended = True
        _wake(self._reader)
        self._tell_gone()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = self._lost = True
        _wake(self._reader)
        _wake(self._writable)
        self._tell_gone()

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        _wake(self._writable)
        self._writable = None

    # -- what the proxy calls

    @property
    def ended(self) -> bool:
        """Nothing more will come, though read bytes may be left."""
        return self._ended

    async def readable(self) -> bool:
        """Wait until there are bytes; False at the end of the stream."""
        while not self._chunks and not self._ended:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return bool(self._chunks)

    async def read(self) -> bytes:
        """Whatever has come, at least one byte; b"" at the end of the stream."""
        await self.readable()
        return self._take()

    def _take(self) -> bytes:
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        paused = self._size_bytes > READ_HIGH_BYTES
        self._chunks.clear()
        self._size_bytes = 0
        if paused and self.transport is not None:
            self.transport.resume_reading()
        return data

    def write(self, data: bytes) -> None:
        """Queue bytes; a connection that has gone swallows them (`drain` tells)."""
        if data and self.transport is not None and not self._lost:
            self.transport.write(data)

    async def drain(self) -> None:
        """Wait until there is room.  Raises ConnectionResetError when the peer has gone."""
        if self._writable is not None:
            await asyncio.shield(self._writable)
        if self._lost:
            raise ConnectionResetError("the connection has gone")

    def when_gone(self, callback: Callable[[], None] | None) -> None:
        """Call back once when the peer ends its side or the connection is lost; None forgets."""
        self._on_gone = callback
        if callback is not None and self._ended:
            self._tell_gone()

    def _tell_gone(self) -> None:
        callback, self._on_gone = self._on_gone, None
        if callback is not None:
            callback()

    def hand_over(self) -> tuple[asyncio.Transport, bytes]:
        """Give the transport away, paused, with the bytes that were not read."""
        assert self.transport is not None
        self.transport.pause_reading()
        data = b"".join(self._chunks)
        self._chunks.clear()
        return self.transport, data

    def close(self) -> None:
        """Close after what was written has gone out."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close now; bytes that have not gone out are dropped."""
        if self.transport is not None:
            self.transport.abort()


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
