"""The guest's end of the link: a shell around `LinkCore`.

One core and one journal per machine, made by `/run`, and any number of sockets over
time.  A socket first has to pass the handshake, on its own, while an older one goes on;
the newest that passes becomes the link and the older one is closed.  At most
`_MAX_GREETINGS` sockets may be in the handshake, each for `_GREETING_S`: notebook code
can open sockets to the agent as well.

**Out.**  `emit` puts a message into the core, or behind it into the journal when the
core has enough, and asks for one flush in the next loop pass; all messages of a pass
leave with one write.  A flush moves at most `_BUDGET_BYTES` and goes on in a later pass,
so that other work has its turn.  While the socket's buffer is not empty nothing more is
taken from the core: what is not taken can still be overtaken by urgent messages.

**In.**  Frames are decoded as they come.  Acknowledgements ride on what is sent anyway;
if nothing is, one goes out `_ACK_S` later.  Sending one for each message would double
the frames of a round trip for nothing.

The frames are written with a WebSocket header made here.  tornado's `write_message`
makes a task and a copy per frame, which is a tenth of the guest's part of a round trip.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import zstandard
from tornado.iostream import StreamClosedError
from tornado.websocket import WebSocketHandler

from kernel_guest.identity import Identity
from kernel_guest.journal import Journal
from kernel_guest.shared.errors import Fault, LinkError, LinkProtocolError
from kernel_guest.shared.link import (
    Greeting,
    LinkCore,
    LinkIdentity,
    LinkLimits,
    Received,
    Refused,
    Role,
)
from kernel_guest.shared.messages import Channel, Lane, LinkMessage, gap

__all__ = ["LinkServer", "LinkSocket"]

log = logging.getLogger(__name__)

# At 4 MB/s, the line of a 2 GB machine (LM 4.4), this is 64 ms of traffic.
_BUDGET_BYTES = 256 * 1024
# Well below the time after which a gateway parks, far above a loop pass.
_ACK_S = 0.02
_GREETING_S = 10.0
# The smallest machine admits 8 connections (LM 4.4).
_MAX_GREETINGS = 4
# techniques 14: level 1 costs least and finds nearly all there is in notebook output.
_ZSTD_LEVEL = 1

# Outputs wait this long for company: a cell's busy, input and result then travel in one frame with
# its reply, and printed lines some dozen together.  Each frame costs a wakeup in every process on
# the way, about 0.5 ms of a round trip in all (2 cores, 2026-11-30); nobody sees 4 ms.
_GATHER_S = 0.004
_GATHER_BYTES = 64 * 1024

_CLOSE_PROTOCOL = 1002  # RFC 6455 7.4.1
_CLOSE_POLICY = 1008
_CLOSE_REPLACED = 4001
_CLOSE_LATE = 4002

OnMessage = Callable[[LinkMessage], None]


class LinkServer:
    """Owns core and journal; `on_message` gets every message that the gateway sends.

    Made on the running loop.

    The receiver of a message calls `consumed` once it no longer takes memory.
    """

    def __init__(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        # Kept: asking for the running loop is a system call each time (CPython 3.11).
        self._loop = asyncio.get_running_loop()
        self._core = LinkCore(role=Role.GUEST, identity=LinkIdentity(), verify=_nobody)
        self._journal: Journal | None = None
        self._urgent: deque[LinkMessage] = deque()
        self._socket: LinkSocket | None = None
        self._greeting: set[LinkSocket] = set()
        self._flush_due: asyncio.Handle | None = None
        self._gather_due: asyncio.TimerHandle | None = None
        self._ack_due: asyncio.TimerHandle | None = None
        self.refused = 0

    def __repr__(self) -> str:
        return f"<LinkServer {self._core} {self._journal}>"

    @property
    def core(self) -> LinkCore:
        """For health answers and tests; before `/run` one without identity."""
        return self._core

    @property
    def journal(self) -> Journal | None:
        """None before `/run`."""
        return self._journal

    def begin(self, identity: Identity, journal: Journal, limits: LinkLimits | None = None) -> None:
        """`/run` happened: from here on a gateway may attach."""
        payload = identity.payload
        self._core = LinkCore(
            role=Role.GUEST,
            limits=limits,
            identity=LinkIdentity(
                payload.kernel_session, payload.generation, payload.epoch, identity.boot_id
            ),
            verify=identity.verify,
            compress=zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress,
            decompress=_decompressor(),
        )
        self._journal = journal

    def emit(self, message: LinkMessage) -> None:
        """Send to the gateway, now or when one is there.  Never fails, never blocks."""
        if message.lane is Lane.URGENT:
            self._urgent.append(message)
        elif self._journal is not None:
            if self._journal.empty and self._core.wants_more:
                self._send(message)
            else:
                self._journal.append(message)
        if message.channel is Channel.IOPUB and self._core.queued_bytes < _GATHER_BYTES:
            self._schedule_gathered()
        else:
            self._schedule_flush()

    def consumed(self, message: LinkMessage) -> None:
        """A received message no longer takes memory here: the gateway gets its credit."""
        self._core.consumed(message.size_bytes, message.lane)
        self._schedule_ack()

    def close(self) -> None:
        """End all sockets and timers, delete the journal's files.  Idempotent."""
        for socket in [*self._greeting, self._socket]:
            if socket is not None:
                socket.end(_CLOSE_REPLACED, "agent ends")
        for handle in (self._flush_due, self._gather_due, self._ack_due):
            if handle is not None:
                handle.cancel()
        if self._journal is not None:
            self._journal.close()

    # --- sockets

    def on_open(self, socket: LinkSocket) -> Greeting | None:
        """A WebSocket was opened; the greeting to begin with, None if there are too many."""
        if len(self._greeting) >= _MAX_GREETINGS:
            return None
        self._greeting.add(socket)
        socket.deadline = self._loop.call_later(_GREETING_S, socket.end, _CLOSE_LATE, "no hello")
        return self._core.greet()

    def on_hello(self, socket: LinkSocket, greeting: Greeting, data: bytes) -> None:
        """The first frame of a socket.  Raises LinkProtocolError on garbage."""
        frame, event = self._core.answer(greeting, data)
        self._leave_greeting(socket)
        socket.push([frame])
        if isinstance(event, Refused):
            self.refused += 1
            socket.end(_CLOSE_POLICY, event.code)
            return
        old, self._socket = self._socket, socket
        log.info("link established, resumed=%s", event.resumed)
        if old is not None:
            old.end(_CLOSE_REPLACED, "replaced by a newer link")
        self._schedule_flush()

    def on_frame(self, socket: LinkSocket, data: bytes) -> None:
        """A frame of the established link.  Raises LinkProtocolError on garbage."""
        if socket is not self._socket:
            return
        for event in self._core.receive_frame(data):
            if isinstance(event, Received):
                self._on_message(event.message)
        self._schedule_ack()
        waiting = self._journal is not None and not self._journal.empty
        if waiting or self._urgent or self._core.queued_bytes:
            self._schedule_flush()  # what came may have brought credit

    def on_close(self, socket: LinkSocket) -> None:
        """A socket is gone, for whatever reason."""
        self._leave_greeting(socket)
        if socket is self._socket:
            self._socket = None
            self._core.disconnected()

    def on_writable(self, socket: LinkSocket) -> None:
        """The buffer of a socket is empty again."""
        if socket is self._socket:
            self._schedule_flush()

    def _leave_greeting(self, socket: LinkSocket) -> None:
        self._greeting.discard(socket)
        if socket.deadline is not None:
            socket.deadline.cancel()
            socket.deadline = None

    # --- pump

    def _schedule_flush(self) -> None:
        if self._flush_due is None:
            self._flush_due = self._loop.call_soon(self._flush)

    def _schedule_gathered(self) -> None:
        if self._gather_due is None and self._flush_due is None:
            self._gather_due = self._loop.call_later(_GATHER_S, self._flush)

    def _schedule_ack(self) -> None:
        if self._ack_due is None:
            self._ack_due = self._loop.call_later(_ACK_S, self._flush_ack)

    def _flush_ack(self) -> None:
        self._ack_due = None
        self._schedule_flush()

    def _flush(self) -> None:
        self._flush_due = None
        if self._gather_due is not None:
            self._gather_due.cancel()
            self._gather_due = None
        self._feed()
        socket = self._socket
        if socket is None or socket.busy or not self._core.wants_output:
            return
        socket.push(self._core.take_frames(_BUDGET_BYTES))
        if self._core.wants_output and not socket.busy:
            self._schedule_flush()

    def _feed(self) -> None:
        """Move from the journal into the core as much as it wants."""
        core, journal = self._core, self._journal
        while self._urgent and core.wants_more_of(Lane.URGENT):
            self._send(self._urgent.popleft())
        while journal is not None and not journal.empty and core.wants_more:
            message = journal.pop()
            assert message is not None, "it is not empty"
            self._send(message)

    def _send(self, message: LinkMessage) -> None:
        try:
            self._core.send(message)
        except LinkError as error:
            # Above a cap of the link: the place stays visible, with true counts.
            log.warning("%s", error)
            self._core.send(gap(1, message.size_bytes, message.lane))


class LinkSocket(WebSocketHandler):
    """One WebSocket at `/link`."""

    link: LinkServer
    deadline: asyncio.TimerHandle | None = None
    _greeting: Greeting | None = None
    _established = False
    _writing = False

    def initialize(self, link: LinkServer) -> None:
        """tornado passes what the route holds."""
        self.link = link

    def check_origin(self, origin: str) -> bool:
        """The signature decides who may speak, not a browser's word."""
        return True

    @property
    def busy(self) -> bool:
        """Whether written bytes still wait for the peer."""
        return self._writing

    def open(self, *_args: str, **_kwargs: str) -> None:
        """Upgraded: challenge."""
        self._greeting = self.link.on_open(self)
        if self._greeting is None:
            self.end(_CLOSE_POLICY, "too many handshakes")
            return
        self.push([self._greeting.frame])

    def on_message(self, message: str | bytes) -> None:
        """A frame; whatever is wrong with it closes this socket and nothing else."""
        try:
            if isinstance(message, str):
                raise LinkProtocolError(Fault.BAD_FRAME, "a text message")
            if self._established:
                self.link.on_frame(self, message)
            elif self._greeting is not None:
                # tornado switches no-delay off after the upgrade (techniques 1).
                self.set_nodelay(True)
                greeting, self._greeting = self._greeting, None
                self._established = True
                self.link.on_hello(self, greeting, message)
        except LinkProtocolError as error:
            log.warning("link closed: %s", error)
            self.end(_CLOSE_PROTOCOL, error.code)

    def on_close(self) -> None:
        """Told by tornado once."""
        self.link.on_close(self)

    def push(self, frames: list[bytes]) -> None:
        """Write binary messages with one call to the stream."""
        stream = self.ws_connection.stream if self.ws_connection is not None else None
        if stream is None or stream.closed():
            return
        try:
            sent = stream.write(b"".join(_framed(frames)))
        except StreamClosedError:
            return  # on_close follows
        if stream.writing():
            self._writing = True
            sent.add_done_callback(self._written)

    def end(self, code: int, reason: str) -> None:
        """Close, and stop counting as a link at once."""
        self.close(code, reason)
        self.link.on_close(self)

    def _written(self, _sent: asyncio.Future[None]) -> None:
        self._writing = False
        self.link.on_writable(self)


def _framed(frames: list[bytes]) -> list[bytes]:
    """Unmasked binary messages (RFC 6455 5.2), header and payload alternating."""
    framed = []
    for frame in frames:
        size = len(frame)
        if size < 126:
            framed.append(bytes((0x82, size)))
        elif size < 65536:
            framed.append(b"\x82\x7e" + size.to_bytes(2, "big"))
        else:
            framed.append(b"\x82\x7f" + size.to_bytes(8, "big"))
        framed.append(frame)
    return framed


def _decompressor() -> Callable[[bytes, int], bytes]:
    decompressor = zstandard.ZstdDecompressor()

    def decompress(data: bytes, max_bytes: int) -> bytes:
        # zstandard ignores the bound for a frame that declares its size itself.
        if zstandard.frame_content_size(data) > max_bytes:
            raise ValueError("declares more than it may inflate to")
        return decompressor.decompress(data, max_output_size=max_bytes)

    return decompress


def _nobody(_message: bytes, _signature: bytes) -> bool:
    return False
