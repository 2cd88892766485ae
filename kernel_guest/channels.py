"""The agent's sockets to one kernel: ZeroMQ over ipc, driven by the asyncio loop.

Four sockets per kernel: DEALER for shell, control and stdin, SUB for iopub.  Shell and
stdin bear the same identity, because the kernel routes an `input_request` to the
identity that sent the execute request.  The heartbeat is not used: the machine's init
reports a dead kernel.

**Reading.**  A ZeroMQ descriptor is edge-triggered and says "something changed", not
"readable".  So a wake-up drains until `EVENTS` no longer shows POLLIN, a drain is cut
after `_DRAIN` messages and continued in the next loop pass (other links want their
turn), and after every send the socket is looked at again, because sending may have
consumed the edge that announced an input.

**Bounds.**  `SUB` and `DEALER` take at most `_RECEIVE_HWM` messages before libzmq stops
reading the kernel's socket; from there on the pressure is the kernel's (its publisher
blocks, launcher.py).  The agent always reads: its journal decides what gives way, since
a blocked ipykernel publisher would only move the growth into the kernel's own queue.
Towards the kernel a channel holds what libzmq does not take (`_SEND_HWM` messages); the
owner is told by `on_sent` when a message is handed over, and grants credit only then,
so a kernel that does not read stops the gateway instead of filling the agent.

**Start.**  A subscription that reaches the publisher after its first message has lost
that message.  ipykernel greets each subscription with `iopub_welcome`; until then
nothing is sent on any channel.  A kernel that does not greet is let loose `_GRACE_S`
after its iopub socket was connected.  The greeting answers our own subscription and is
not passed on.

**End.**  When the kernel's process is gone its sockets are closed by the system, and
libzmq reports the disconnection after it has queued everything that was sent before.
`drain` waits for that report and reads the rest, so nothing a kernel said in its last
moment is lost.  A child that inherited the descriptors by `fork` keeps them open;
then `drain` ends at its deadline.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from kernel_guest.jupyter_parts import HEADER, is_type
from kernel_guest.shared.messages import Channel

__all__ = ["KernelChannels"]

DELIMITER = b"<IDS|MSG>"

# techniques 4: a drain of 256 keeps a loop pass around a millisecond.
_DRAIN = 256
_RECEIVE_HWM = 256
_SEND_HWM = 64
# libzmq's default of 100 ms would be a third of the whole start; the socket file of a
# forked kernel appears after 15-25 ms (techniques, 2026-11-30).  Retries end when the
# channels are closed, which the kernel's exit brings about.
_RECONNECT_MS = 1
# Time for a subscription to cross a connected ipc socket, with room for a busy machine.
_GRACE_S = 0.2
# As plain numbers: arithmetic on pyzmq's enums costs more than the calls they go to.
# A message sent or received part by part takes 8 and 12 us instead of the 37 and 26 of
# send_multipart and recv_multipart (pyzmq 27.3, 7 parts, 2026-11-30).
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)

_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

OnMessage = Callable[[Channel, Sequence[bytes]], None]
OnSent = Callable[[object], None]


class _Socket:
    """One ZeroMQ socket on the loop: drained on edges, sends what libzmq did not take."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: zmq.Socket[bytes],
        on_frames: Callable[[list[bytes]], None],
        on_sent: OnSent,
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._on_frames = on_frames
        self._on_sent = on_sent
        self._pending: deque[tuple[Sequence[bytes], object]] = deque()
        self._open = False
        self._closed = False
        self._again: asyncio.Handle | None = None
        self._option = cast(Callable[[int], int], socket.getsockopt)
        self._fd = self._option(zmq.FD)
        loop.add_reader(self._fd, self.turn)
        # What happened to the socket so far may have taken the first edge.
        self._continue()

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def more(self) -> bool:
        """Whether the last drain was cut and goes on in the next loop pass."""
        return self._again is not None

    def send(self, parts: Sequence[bytes], token: object) -> None:
        self._pending.append((parts, token))
        if self._open:
            self.turn()

    def open(self) -> None:
        self._open = True
        self.turn()

    def turn(self) -> None:
        """Move what can be moved now, both ways; continues by itself if it was cut."""
        if self._closed:
            return
        self._flush()
        if self._receive():
            self._continue()

    def disable_monitor(self) -> None:
        if not self._closed:
            self._socket.disable_monitor()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._again is not None:
            self._again.cancel()
        self._pending.clear()
        self._socket.close(linger=0)

    def _flush(self) -> None:
        if not self._open:
            return
        while self._pending:
            parts, token = self._pending[0]
            try:
                self._send(parts)
            except zmq.Again:
                return  # the edge that announces room wakes us
            self._pending.popleft()
            if token is not None:
                self._on_sent(token)

    def _send(self, parts: Sequence[bytes]) -> None:
        """Raises zmq.Again before the first part or not at all."""
        send, flags = self._socket.send, _NOBLOCK | _SNDMORE
        send(DELIMITER, flags)
        for part in parts[:-1]:
            send(part, flags)
        send(parts[-1], _NOBLOCK)

    def _receive(self) -> bool:
        """True if there is more than one drain took."""
        for _ in range(_DRAIN):
            if not self._option(_EVENTS) & _POLLIN:
                return False
            self._on_frames(self._receive_one())
            if self._closed:
                return False
        return True

    def _receive_one(self) -> list[bytes]:
        recv = self._socket.recv
        frame = recv(_NOBLOCK, False)
        frames = [frame.bytes]
        while frame.more:
            frame = recv(_NOBLOCK, False)
            frames.append(frame.bytes)
        return frames

    def _continue(self) -> None:
        if self._again is None:
            self._again = self._loop.call_soon(self._next)

    def _next(self) -> None:
        self._again = None
        self.turn()


class KernelChannels:
    """The sockets to one kernel process, from its spawn to its end.

    `urls` maps "shell", "control", "stdin" and "iopub" to ipc addresses.  `on_message`
    gets every message of the kernel but the greeting, as the frames after the
    delimiter; `on_sent` the token of each message libzmq took over.  Both are called on
    the loop.  Must be made on the running loop; `close` is idempotent.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        urls: Mapping[str, str],
        on_message: OnMessage,
        on_sent: OnSent = lambda token: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = context
        self._on_message = on_message
        self._on_sent = on_sent
        self._connected: set[Channel] = set()
        self._gone: set[Channel] = set()
        self._grace: asyncio.TimerHandle | None = None
        self._ready = asyncio.Event()
        self._ended = asyncio.Event()
        self._monitors: list[_Socket] = []
        identity = os.urandom(16).hex().encode()
        self._sockets = {
            Channel.IOPUB: self._make(Channel.IOPUB, zmq.SUB, urls["iopub"], b""),
            Channel.SHELL: self._make(Channel.SHELL, zmq.DEALER, urls["shell"], identity),
            Channel.CONTROL: self._make(Channel.CONTROL, zmq.DEALER, urls["control"], identity),
            Channel.STDIN: self._make(Channel.STDIN, zmq.DEALER, urls["stdin"], identity),
        }

    def __repr__(self) -> str:
        pending = {channel.name.lower(): s.pending for channel, s in self._sockets.items()}
        return f"<KernelChannels ready={self._ready.is_set()} pending={pending}>"

    @property
    def ready(self) -> bool:
        """Whether the subscription is known to stand, so that requests may go."""
        return self._ready.is_set()

    async def wait_ready(self) -> None:
        """Until `ready`.  The caller sets the deadline."""
        await self._ready.wait()

    def send(self, channel: Channel, parts: Sequence[bytes], token: object = None) -> None:
        """Queue one message for the kernel; it goes at once if the kernel is ready.

        `token`, unless None, is given to `on_sent` when libzmq has the message.
        """
        self._sockets[channel].send(parts, token)

    async def drain(self, timeout_s: float) -> bool:
        """Read what a dead kernel still had to say; False if the deadline came first."""
        self._check_ended()
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Drop the sockets and whatever is queued in them.  Idempotent."""
        if self._grace is not None:
            self._grace.cancel()
        # Reports end before their reader does: libzmq's thread, shared by all kernels,
        # would wait for ever to hand one over to nobody.
        for socket in self._sockets.values():
            socket.disable_monitor()
            socket.close()
        for monitor in self._monitors:
            monitor.close()

    def _make(self, channel: Channel, kind: int, url: str, identity: bytes) -> _Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _RECEIVE_HWM)
        socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        else:
            socket.setsockopt(zmq.ROUTING_ID, identity)
        self._monitor(channel, socket)
        socket.connect(url)
        receive = self._on_iopub if kind == zmq.SUB else self._receiver(channel)
        return _Socket(self._loop, socket, receive, self._on_sent)

    def _monitor(self, channel: Channel, socket: zmq.Socket[bytes]) -> None:
        pair = socket.get_monitor_socket(_MONITORED)

        def on_event(frames: list[bytes]) -> None:
            self._on_socket_event(channel, parse_monitor_message(frames)["event"])

        self._monitors.append(_Socket(self._loop, pair, on_event, self._on_sent))

    def _receiver(self, channel: Channel) -> Callable[[list[bytes]], None]:
        def receive(frames: list[bytes]) -> None:
            parts = _after_delimiter(frames)
            if parts is not None:
                self._on_message(channel, parts)

        return receive

    def _on_iopub(self, frames: list[bytes]) -> None:
        parts = _after_delimiter(frames)
        if parts is None:
            return
        if not self._ready.is_set():
            self._let_loose()
        if b"iopub_welcome" in parts[HEADER] and is_type(parts[HEADER], "iopub_welcome"):
            return
        self._on_message(Channel.IOPUB, parts)

    def _on_socket_event(self, channel: Channel, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected.add(channel)
            self._gone.discard(channel)
            if channel is Channel.IOPUB and not self._ready.is_set() and self._grace is None:
                self._grace = self._loop.call_later(_GRACE_S, self._let_loose)
        elif channel in self._connected:
            self._gone.add(channel)
            self._check_ended()

    def _check_ended(self) -> None:
        # A channel that was never connected had nothing to say.
        if self._gone >= self._connected:
            # The report came through one socket, the messages through another: one
            # more turn reads what was queued before it.
            self._finish()

    def _finish(self) -> None:
        for socket in self._sockets.values():
            socket.turn()
        if any(socket.more for socket in self._sockets.values()):
            self._loop.call_soon(self._finish)
            return
        self._ended.set()

    def _let_loose(self) -> None:
        self._ready.set()
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        for channel in (Channel.CONTROL, Channel.SHELL, Channel.STDIN):
            self._sockets[channel].open()


def _after_delimiter(frames: list[bytes]) -> list[bytes] | None:
    """The frames after `<IDS|MSG>`; None for what is not a Jupyter message."""
    try:
        index = frames.index(DELIMITER)
    except ValueError:
        return None
    parts = frames[index + 1 :]
    return parts if len(parts) >= 5 else None
