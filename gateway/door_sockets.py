"""ZMQ sockets on an asyncio loop, without loss and with memory bounded in bytes.

Three habits of ZMQ need care, and this module is where that care lives:

* **High-water marks.** The default of 1000 messages makes a PUB or ROUTER socket *drop* for a slow
  peer: a stock kernel loses up to a fifth of 20 000 flushed lines that way (JK 1.4). Outgoing
  marks are therefore 0. Then ZMQ queues without a bound, and it does not tell how much. So every
  ``MARK_BYTES`` one frame is sent as memory shared with ZMQ, whose tracker says when the slowest
  peer's connection has taken it; queues are first in, first out, so all before it is taken too.
  :attr:`Outbox.pending_bytes` is that count, and the door stops sending above its limit.
  Incoming marks stay at the default: a full ROUTER queue makes the client's DEALER wait, it loses
  nothing, and a mark of 0 would let a client fill our memory.
* **The file descriptor is edge-triggered** (techniques 4). It may stay silent while messages wait,
  so a reader loops on ``EVENTS``, looks again after each send on the same socket, and cuts a long
  drain into turns so that other sockets and links get theirs.
* **Contexts and forks.** A context does not survive a fork and holds 1023 sockets by default; five
  per kernel makes 200 kernels. :func:`door_context` makes one per process, with a raised limit.

Everything here runs on the bridge's loop.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import zmq

from gateway.clock import Clock

__all__ = ["Address", "CurveKeys", "Hold", "Outbox", "SocketReader", "door_context", "make_socket"]

#: Five sockets per kernel: room for some 6500 kernels. libzmq allocates slots lazily.
MAX_SOCKETS: Final = 32_768
#: Every so many bytes one frame is tracked: some 100 flushed lines. A tracker costs about 50 µs.
MARK_BYTES: Final = 64 * 1024
#: What the kernel's socket buffer holds of iopub. Left to itself it grows to megabytes, and with
#: it what a client has still to read when ZMQ believes it delivered: 6100 lines of 500 bytes
#: behind a slow reader, 3000 with this (2026-11-30, Linux 6.18). With 16 KiB a 20 MB message
#: takes 13 s instead of 0.02 s.
IOPUB_BUFFER_BYTES: Final = 64 * 1024
#: Frames from this size on are shared with ZMQ instead of copied (zmq.COPY_THRESHOLD is the same).
SHARE_BYTES: Final = 65_536
#: Messages per turn of a reader (techniques 4).
DRAIN_MESSAGES: Final = 256
#: A peer that has taken nothing for so long is not slow but stopped (suspended, in a debugger).
#: On two cores with a load of 8 a working client was seen to pause for 1.1 s (2026-11-30).
STALL_S: Final = 10.0
#: What a slow reader may still have before it when ZMQ has written everything: both socket buffers
#: and its own queue of 1000 messages (ZMQ's default mark); 3000 lines of 700 bytes were seen.
HIDDEN_BYTES: Final = 2 * 1024 * 1024
#: A reader that was less behind has read it all within any client's patience.
FAR_BEHIND_BYTES: Final = 1024 * 1024
#: A hold ends so long after the queue is empty, however slow the reader was.
HIDDEN_LIMIT_S: Final = 10.0
#: How long closing may go on delivering what is queued: a last idle or a shutdown_reply.
LINGER_MS: Final = 1_000

_context: tuple[int, zmq.Context[Any]] | None = None
_at_exit = False


def door_context() -> zmq.Context[Any]:
    """The process's context for door sockets; a fresh one after a fork."""
    global _context
    if _context is None or _context[0] != os.getpid():
        context: zmq.Context[Any] = zmq.Context(io_threads=1)
        context.max_sockets = MAX_SOCKETS
        _context = (os.getpid(), context)
    return _context[1]


def _stop_sharing() -> None:
    """From here on copy: pyzmq's collector of shared frames ends in its own atexit handler.

    Handlers run last in, first out, and pyzmq's was registered before ours, when it was imported.
    """
    global _at_exit
    _at_exit = True


atexit.register(_stop_sharing)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The key pair that a kernel's manager made; clients present the same pair (JK 1.3)."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a socket listens. ``place`` is an IP address, or for ipc a path prefix."""

    transport: str
    place: str
    port: int = 0

    @property
    def url(self) -> str:
        """What to bind and connect to; port 0 means that the system chooses (tcp only)."""
        if self.transport == "ipc":
            return f"ipc://{self.place}-{self.port}"
        return f"tcp://{self.place}:{self.port}"

    @property
    def path(self) -> str | None:
        """The socket's file, for ipc."""
        return f"{self.place}-{self.port}" if self.transport == "ipc" else None


def make_socket(
    kind: int, address: Address, curve: CurveKeys | None
) -> tuple[zmq.Socket[Any], Address]:
    """Make and bind one door socket; returns it with the address it got.

    Raises ``zmq.ZMQError`` when the port is taken or the path cannot be used.
    """
    socket: zmq.Socket[Any] = door_context().socket(kind)
    try:
        _configure(socket, kind, curve)
        return socket, bind(socket, address)
    except BaseException:
        socket.close(linger=0)
        raise


def _configure(socket: zmq.Socket[Any], kind: int, curve: CurveKeys | None) -> None:
    socket.linger = LINGER_MS
    socket.sndhwm = 0
    if kind == zmq.ROUTER:
        # A client that reconnects under its old identity takes over (JK 1.4).
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if kind == zmq.XPUB:
        # Each subscriber is announced, also the second one of the same topic: each gets a welcome.
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        socket.setsockopt(zmq.SNDBUF, IOPUB_BUFFER_BYTES)
    if curve is not None:
        socket.curve_secretkey = curve.secret
        socket.curve_publickey = curve.public
        socket.curve_server = True


def bind(socket: zmq.Socket[Any], address: Address) -> Address:
    """Bind, and say where: tcp port 0 gets a free port, ipc number 0 the first unused path."""
    if address.transport == "ipc":
        number = address.port or _free_number(address.place)
        bound = Address("ipc", address.place, number)
        socket.bind(bound.url)
        return bound
    socket.bind(address.url)
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    port = int(endpoint.rstrip(b"\0").rpartition(b":")[2])
    return Address("tcp", address.place, port)


def _free_number(place: str) -> int:
    number = 1
    while os.path.exists(f"{place}-{number}"):
        number += 1
    return number


class SocketReader:
    """Calls ``on_frames`` for every message of one socket, on the loop that made it.

    ``on_frames`` returns False to stop reading; :meth:`resume` goes on. Errors of ``on_frames`` are
    bugs and go to the loop's exception handler; the reader survives them.
    """

    def __init__(
        self, socket: zmq.Socket[Any], on_frames: Callable[[list[bytes]], bool | None]
    ) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = socket.fileno()
        self._scheduled = False
        self._paused = False
        self._closed = False
        self._loop.add_reader(self._fd, self._drain)
        self.look()

    def look(self) -> None:
        """Look for messages in the next turn: after a send, the edge may be gone."""
        if not (self._scheduled or self._paused or self._closed):
            self._scheduled = True
            self._loop.call_soon(self._scheduled_drain)

    def resume(self) -> None:
        """Read again after ``on_frames`` returned False."""
        self._paused = False
        self.look()

    def close(self) -> None:
        """Stop. Idempotent; the socket is closed by its owner."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)

    def _scheduled_drain(self) -> None:
        self._scheduled = False
        self._drain()

    def _drain(self) -> None:
        for _ in range(DRAIN_MESSAGES):
            if self._paused or self._closed or not self._readable():
                return
            self._paused = self._on_frames(self._socket.recv_multipart()) is False
        self.look()

    def _readable(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


# As plain numbers: `zmq.SNDMORE | flags` makes an enum member anew for each of the 28 parts that
# answer a cell, and send_multipart does so and checks each part's type again: 37 us a message
# instead of 8 (pyzmq 27.3, 2026-11-30).
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)


def _send_parts(socket: zmq.Socket[Any], frames: Sequence[bytes]) -> None:
    send = socket.send
    for frame in frames[:-1]:
        send(frame, _NOBLOCK_MORE)
    send(frames[-1], _NOBLOCK)


class Outbox:
    """The sending side of one socket, which knows how much its slowest peer has not taken."""

    def __init__(self, socket: zmq.Socket[Any], clock: Clock) -> None:
        self._socket = socket
        self._clock = clock
        self._unmarked_bytes = 0
        self._marked: deque[tuple[int, zmq.MessageTracker]] = deque()
        self._marked_bytes = 0
        self._moved_s = 0.0

    def __repr__(self) -> str:
        return f"<Outbox pending={self.pending_bytes}>"

    @property
    def pending_bytes(self) -> int:
        """What ZMQ holds for the slowest peer, exact to ``MARK_BYTES``."""
        while self._marked and self._marked[0][1].done:
            self._marked_bytes -= self._marked.popleft()[0]
            self._moved_s = self._clock.monotonic_s()
        return self._marked_bytes

    @property
    def behind(self) -> bool:
        """Whether the slowest peer has something to take, and is taking it."""
        return bool(self.pending_bytes) and self._clock.monotonic_s() - self._moved_s < STALL_S

    def hold(self) -> Hold | None:
        """What a message that must not overtake has to wait for; ``None``: nothing."""
        return Hold(self, self._clock) if self.behind else None

    def send(self, frames: Sequence[bytes], size_bytes: int) -> None:
        """Send a message; never blocks and never drops for a peer that is there.

        Raises ``zmq.ZMQError`` only for a closed socket.
        """
        self._unmarked_bytes += size_bytes
        if self._unmarked_bytes < MARK_BYTES and size_bytes < SHARE_BYTES:
            _send_parts(self._socket, frames)
        else:
            self._send_marked(frames)

    def _send_marked(self, frames: Sequence[bytes]) -> None:
        if _at_exit:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            return
        if not self._marked:
            self._moved_s = self._clock.monotonic_s()
        mark = zmq.Frame(frames[-1], track=True, copy=False)
        shared = [_shared(frame) for frame in frames[:-1]]
        self._socket.send_multipart([*shared, mark], zmq.NOBLOCK, copy=False)
        self._marked.append((self._unmarked_bytes, mark.tracker))
        self._marked_bytes += self._unmarked_bytes
        self._unmarked_bytes = 0


class Hold:
    """Lasts until a slow reader has read what was queued when the hold began.

    Until ZMQ's queue is empty, and then for as long as the reader will need for ``HIDDEN_BYTES`` at
    the rate at which it emptied the queue, if it was that far behind. For a reader that keeps up
    this is nothing; one that has stopped (see ``Outbox.behind``) is not waited for.
    """

    def __init__(self, outbox: Outbox, clock: Clock) -> None:
        self._outbox = outbox
        self._clock = clock
        self._begun_s = clock.monotonic_s()
        self._begun_bytes = outbox.pending_bytes
        self._until_s: float | None = None

    def is_over(self) -> bool:
        """Ask again until it is true; a memory read."""
        if self._outbox.pending_bytes:
            return not self._outbox.behind
        now_s = self._clock.monotonic_s()
        if self._until_s is None:
            self._until_s = now_s + self._extra_s(now_s - self._begun_s)
        return now_s >= self._until_s

    def _extra_s(self, taken_s: float) -> float:
        if self._begun_bytes < FAR_BEHIND_BYTES:
            return 0.0
        return min(taken_s * HIDDEN_BYTES / self._begun_bytes, HIDDEN_LIMIT_S)


def _shared(frame: bytes) -> zmq.Frame:
    """Large frames are shared, small ones copied, whatever the neighbours are."""
    return zmq.Frame(frame, copy=len(frame) < SHARE_BYTES)
