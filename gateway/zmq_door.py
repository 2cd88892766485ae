"""The provisioner door: five local ZMQ sockets in front of one kernel session.

    client DEALER ──▶ ROUTER shell ─┐                 ┌─▶ ROUTER shell ──▶ the client that asked
    client DEALER ──▶ ROUTER ctrl ──┼─▶ session.send  │   ROUTER control ──▶ likewise
    client DEALER ──▶ ROUTER stdin ─┘   on_message ───┼─▶ ROUTER stdin ──▶ whose cell asks
    client REQ ─────▶ ROUTER hb (echo)                └─▶ XPUB iopub ──▶ every subscriber

Rules, and where they come from (JK 1.3, 1.4):

* **Constant ports.** Bound once, before anybody can know the numbers, and kept for the life of
  the kernel id: across restart, autorestart, sleep and a replacement machine.
* **Bytes pass through unchanged.** Messages are signed end to end with the manager's key. The door
  checks a request's signature before it forwards it: another user of this computer who can reach a
  TCP port but does not hold the key must neither wake a machine nor fill a queue.
* **Replies go back to who asked**, by the parent's ``msg_id``
  (:class:`~gateway.messages.ReplyRoutes` states its memory). A reply whose asker is unknown, or
  has left, is dropped and counted: that is what a kernel's own ROUTER does. An ``input_request``
  goes to the client that sent the cell; the kernel's iopub messages go to all.
* **Heartbeat is answered here**, asleep or not, while the kernel is logically alive.
* **Welcome** (JEP 65). Each new subscription gets an ``iopub_welcome`` of the door's own, signed
  with the kernel's key; the guest's own welcomes are dropped.
* **A reply does not overtake its outputs.** The link keeps the kernel's order; here the two part,
  and a client that finds the reply first may stop collecting (nbclient waits 4 s for the rest). So
  a shell reply is held while the outputs before it are still being taken, but not for a client
  that has stopped taking. Control and stdin never wait.
* **Backpressure.** What the session delivers is sent at once while ZMQ holds less than
  ``limit_bytes`` for the slowest client, else it waits in the door's queue, and the session is told
  with ``consumed`` only what has left that queue. So the session's credit window bounds the queue,
  and further output stays in the guest's journal. The whole bound: limit + window + one message.
  A client that stops reading for good therefore stops the output of its neighbours too, once that
  much is waiting; dropping for one subscriber only is nothing that PUB sockets can be told.
  In the other direction a request that the session cannot take (``LinkFull``) stops the reading of
  its socket, which makes the client's own socket wait; the door tries again after a moment.

A door belongs to the bridge's loop: made, used and closed there.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import zmq

from gateway.clock import Clock
from gateway.door_sockets import Address, CurveKeys, Hold, Outbox, SocketReader, bind, make_socket
from gateway.messages import (
    Composer,
    MalformedMessage,
    ReplyRoutes,
    Signer,
    frames_of,
    header_of,
    parent_of,
    size_of,
    split_frames,
)
from kernel_guest.shared.errors import LinkFull, MessageRefused
from kernel_guest.shared.messages import Channel

__all__ = ["CHANNEL_NAMES", "DoorSession", "DoorSettings", "ZmqDoor"]

#: The five sockets, in the order in which connection files list them.
CHANNEL_NAMES: Final = ("shell", "iopub", "stdin", "hb", "control")
_KINDS: Final = dict.fromkeys(CHANNEL_NAMES, zmq.ROUTER) | {"iopub": zmq.XPUB}
_URGENT: Final = frozenset({Channel.CONTROL, Channel.STDIN})
_CHANNELS: Final = {"shell": Channel.SHELL, "stdin": Channel.STDIN, "control": Channel.CONTROL}

#: Bytes that ZMQ may hold for the slowest client (one larger message may go alone): some 25 000
#: lines. More waits in the guest's journal, where the order is kept.
DEFAULT_LIMIT_BYTES: Final = 16 * 1024 * 1024
#: How soon to look again whether a slow client has read, or the link has room: the first time,
#: and at most (it doubles). ZMQ's trackers and the link have no event for it; the wait occurs only
#: while something is blocked.
RETRY_FIRST_S: Final = 0.001
RETRY_MOST_S: Final = 0.032


class DoorSession(Protocol):
    """What the door needs of a kernel session."""

    def send(self, channel: Channel, parts: Sequence[bytes]) -> None:
        """Client to kernel.

        Raises ``LinkFull`` when it cannot take more now, ``MalformedMessage`` and
        ``MessageRefused`` for what it will never take.
        """

    def consumed(self, size_bytes: int) -> None:
        """So many bytes given to ``ZmqDoor.deliver`` have left the door."""


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """Where a door listens and how its messages are signed."""

    signer: Signer
    transport: str = "tcp"
    place: str = "127.0.0.1"
    ports: Mapping[str, int] = field(default_factory=dict)  # shell_port and so on; 0: choose
    curve: CurveKeys | None = None
    limit_bytes: int = DEFAULT_LIMIT_BYTES


class ZmqDoor:
    """Five bound sockets. Who calls: the provisioner, always on the bridge's loop.

    ``alive`` is asked before each heartbeat echo.
    """

    def __init__(
        self,
        settings: DoorSettings,
        clock: Clock,
        log: logging.Logger | logging.LoggerAdapter[Any],
        *,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._log = log
        self._alive = alive
        self._session: DoorSession | None = None
        self._composer = Composer(settings.signer)
        self._routes = ReplyRoutes()
        self._sockets: dict[str, zmq.Socket[Any]] = {}
        self._addresses: dict[str, Address] = {}
        self._readers: dict[str, SocketReader] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._waiting: deque[tuple[Channel, tuple[bytes, ...], int]] = deque()
        self._waiting_bytes = 0
        self._refused: dict[str, tuple[bytes, ...]] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._retry_s = RETRY_FIRST_S
        self._hold: Hold | None = None
        self._knows_kernel = False
        self._counts = dict.fromkeys(("requests", "messages", "dropped", "unsigned"), 0)

    def __repr__(self) -> str:
        ports = {name: address.port for name, address in self._addresses.items()}
        return f"<ZmqDoor {self._settings.transport} {ports}>"

    # -- life ---------------------------------------------------------------------

    async def open(self) -> None:
        """Bind all five. Raises ``zmq.ZMQError`` (nothing stays open) when one cannot be bound."""
        try:
            for name in CHANNEL_NAMES:
                self._open_one(name, self._settings.ports.get(f"{name}_port", 0))
        except BaseException:
            self._close_sockets()
            raise

    def _open_one(self, name: str, port: int) -> None:
        wanted = Address(self._settings.transport, self._settings.place, port)
        socket, address = make_socket(_KINDS[name], wanted, self._settings.curve)
        self._sockets[name], self._addresses[name] = socket, address
        self._outboxes[name] = Outbox(socket, self._clock)
        self._readers[name] = SocketReader(socket, self._handler(name))

    def _handler(self, name: str) -> Callable[[list[bytes]], bool | None]:
        if name == "hb":
            return self._on_heartbeat
        if name == "iopub":
            return self._on_subscription
        return lambda frames: self._on_request(name, frames)

    async def close(self) -> None:
        """Close all sockets; what is queued is still delivered for a second. Idempotent."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._waiting.clear()
        self._refused.clear()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for reader in self._readers.values():
            reader.close()
        for name, socket in self._sockets.items():
            socket.close()
            _unlink(self._addresses[name].path)
        self._readers.clear()
        self._outboxes.clear()
        self._sockets.clear()

    def rebind(self) -> None:
        """Make lost ipc paths again: a manager deletes them between the halves of a restart.

        Connections that exist are not touched. Who calls: the provisioner, before each launch.
        """
        for name, address in self._addresses.items():
            if address.path is not None and not os.path.exists(address.path):
                self._sockets[name].unbind(address.url)
                bind(self._sockets[name], address)

    @property
    def ports(self) -> dict[str, int]:
        """``{"shell_port": 1234, …}`` for a connection file."""
        return {f"{name}_port": self._addresses[name].port for name in CHANNEL_NAMES}

    def attach(self, session: DoorSession) -> None:
        """Requests go to this session from now on; its messages come to :meth:`deliver`."""
        self._session = session
        self._knows_kernel = False
        self._look_again()

    def use_signer(self, signer: Signer) -> None:
        """The manager's key changed (it may, until clients exist)."""
        self._settings = replace(self._settings, signer=signer)
        self._composer = Composer(signer, self._composer.session)

    def statistics(self) -> dict[str, Any]:
        """Counters and queue sizes, for status pages and tests. On the bridge, like everything."""
        return self._counts | {
            "waiting_bytes": self._waiting_bytes,
            "unread_bytes": self._unread_bytes(),
            "routes": len(self._routes),
        }

    # -- kernel → clients ---------------------------------------------------------

    def deliver(self, channel: Channel, parts: Sequence[bytes]) -> None:
        """A message of the kernel; the session's ``on_message``. Never blocks, never raises for
        what a guest sent."""
        size_bytes = size_of(parts)
        if channel not in _URGENT and (self._waiting or self._is_blocked(channel)):
            self._waiting.append((channel, tuple(parts), size_bytes))
            self._waiting_bytes += size_bytes
            self._look_again()
        else:
            self._pass_on(channel, parts, size_bytes)

    def _is_blocked(self, channel: Channel) -> bool:
        """Whether the next message in order has to wait; for replies, see the module's header."""
        if not self._sockets:
            return False
        if self._unread_bytes() > self._settings.limit_bytes:
            return True
        if channel is not Channel.SHELL:
            return False
        if self._hold is None:
            self._hold = self._outboxes["iopub"].hold()
        if self._hold is None:
            return False
        if self._hold.is_over():
            self._hold = None
            return False
        return True

    def _unread_bytes(self) -> int:
        return sum(outbox.pending_bytes for outbox in self._outboxes.values())

    def _pass_on(self, channel: Channel, parts: Sequence[bytes], size_bytes: int) -> None:
        if self._sockets:
            self._send(channel, parts, size_bytes)
        if self._session is not None:
            self._session.consumed(size_bytes)

    def _send(self, channel: Channel, parts: Sequence[bytes], size_bytes: int) -> None:
        try:
            if channel is Channel.IOPUB:
                self._publish(parts, size_bytes)
            else:
                self._reply(channel, parts, size_bytes)
        except MalformedMessage as problem:
            self._counts["dropped"] += 1
            self._log.warning("Dropped a message of the kernel: %s", problem)

    def _publish(self, parts: Sequence[bytes], size_bytes: int) -> None:
        header = header_of(parts)
        if header.msg_type == "iopub_welcome":
            return
        if not self._knows_kernel and header.session:
            self._composer.session = header.session
            self._knows_kernel = True
        self._counts["messages"] += 1
        topic = f"kernel.{header.msg_type}".encode()
        self._outboxes["iopub"].send(frames_of([topic], parts), size_bytes)
        self._readers["iopub"].look()

    def _reply(self, channel: Channel, parts: Sequence[bytes], size_bytes: int) -> None:
        parent = parent_of(parts)
        asking = channel is Channel.STDIN
        identity = self._routes.asker(parent) if asking else self._routes.answered(parent)
        if identity is None:
            self._counts["dropped"] += 1
            self._log.debug("Dropped a %s message that answers nobody", channel.name.lower())
            return
        self._counts["messages"] += 1
        self._send_to(channel.name.lower(), identity, parts, size_bytes)

    def _send_to(self, name: str, identity: bytes, parts: Sequence[bytes], size_bytes: int) -> None:
        self._outboxes[name].send(frames_of([identity], parts), size_bytes)
        self._readers[name].look()

    # -- clients → kernel ---------------------------------------------------------

    def _on_request(self, name: str, frames: list[bytes]) -> bool:
        """One request; returns False when reading has to pause."""
        try:
            identities, parts = split_frames(frames)
            if not identities or not self._settings.signer.accepts(parts):
                self._refuse_unsigned(name)
                return True
            return self._accept(name, identities[0], parts)
        except MalformedMessage as problem:
            self._counts["dropped"] += 1
            self._log.warning("Dropped a %s request: %s", name, problem)
            return True

    def _refuse_unsigned(self, name: str) -> None:
        """Count it; log the first only: who has no key may send as many as they like."""
        self._counts["unsigned"] += 1
        if self._counts["unsigned"] == 1:
            self._log.warning("Dropped a %s request with an invalid signature", name)

    def _accept(self, name: str, identity: bytes, parts: tuple[bytes, ...]) -> bool:
        header = header_of(parts)
        self._counts["requests"] += 1
        if name != "stdin":
            self._routes.asked(header, identity)
        return self._forward(name, parts)

    def _forward(self, name: str, parts: tuple[bytes, ...]) -> bool:
        """Hand a request to the session, or keep it and pause its socket."""
        if self._session is not None and self._taken(self._session, name, parts):
            return True
        self._refused[name] = parts
        self._look_again()
        return False

    def _taken(self, session: DoorSession, name: str, parts: tuple[bytes, ...]) -> bool:
        """False when it has to be offered again; what the link can never carry is dropped."""
        try:
            session.send(_CHANNELS[name], parts)
        except LinkFull:
            return False
        except (MalformedMessage, MessageRefused) as problem:
            self._counts["dropped"] += 1
            self._log.warning("Dropped a %s request: %s", name, problem)
        return True

    def _on_heartbeat(self, frames: list[bytes]) -> None:
        if self._alive():
            self._outboxes["hb"].send(frames, size_of(frames))
            self._readers["hb"].look()

    def _on_subscription(self, frames: list[bytes]) -> None:
        """An event of the XPUB socket: one byte 1 (subscribe) or 0, then the topic."""
        if frames[0][:1] != b"\x01":
            return
        topic = frames[0][1:]
        text = topic.decode("utf-8", errors="replace")
        now_s = self._clock.now_s()
        welcome = self._composer.compose("iopub_welcome", {"subscription": text}, now_s=now_s)
        # As ipykernel does it: the topic itself is the first frame, unless it is empty.
        prefix = [topic] if topic else []
        self._outboxes["iopub"].send(frames_of(prefix, welcome), size_of(welcome))
        self._readers["iopub"].look()

    # -- going on after a stop ----------------------------------------------------

    def _look_again(self) -> None:
        """Try blocked work again soon. One timer for both directions, only while blocked."""
        if self._retry is None and self._sockets and (self._waiting or self._refused):
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(self._retry_s, self._try_blocked)

    def _try_blocked(self) -> None:
        self._retry = None
        before = len(self._waiting) + len(self._refused)
        self._send_waiting()
        for name in list(self._refused):
            if self._forward(name, self._refused.pop(name)):
                self._readers[name].resume()
        moved = len(self._waiting) + len(self._refused) < before
        self._retry_s = RETRY_FIRST_S if moved else min(2 * self._retry_s, RETRY_MOST_S)
        self._look_again()

    def _send_waiting(self) -> None:
        while self._waiting and not self._is_blocked(self._waiting[0][0]):
            channel, parts, size_bytes = self._waiting.popleft()
            self._waiting_bytes -= size_bytes
            self._pass_on(channel, parts, size_bytes)


def _unlink(path: str | None) -> None:
    if path is not None and os.path.exists(path):
        os.unlink(path)
