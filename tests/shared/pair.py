"""Two link cores and the channel between them, entirely in the test's hands."""

from __future__ import annotations

import hashlib
import hmac
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from kernel_guest.shared.errors import LinkProtocolError
from kernel_guest.shared.limits import LinkLimits
from kernel_guest.shared.link import (
    Established,
    LinkCore,
    LinkEvent,
    LinkIdentity,
    Received,
    Refused,
    Role,
)
from kernel_guest.shared.messages import Channel, LinkMessage, jupyter

KEY = b"test key of the gateway"
SESSION = "kernel-1"
BIG_BUDGET = 2**40

SMALL = LinkLimits(
    chunk_bytes=128,
    message_bytes=20_000,
    parts=40,
    queue_bytes=60_000,
    low_water_bytes=2_000,
    urgent_window_bytes=4_000,
    ordered_window_bytes=9_000,
    batch_bytes=100,
    compress_above_bytes=200,
)
"""Everything happens early: chunks of 128 bytes, windows of a few messages."""


def prove(message: bytes, key: bytes = KEY) -> bytes:
    """Stands for Ed25519, which the standard library does not have."""
    return hmac.digest(key, message, hashlib.sha256)


def verify(message: bytes, signature: bytes) -> bool:
    return hmac.compare_digest(prove(message), signature)


def inflate(body: bytes, max_bytes: int) -> bytes:
    inflater = zlib.decompressobj()
    raw = inflater.decompress(body, max_bytes + 1)
    if len(raw) > max_bytes or not inflater.eof:
        raise ValueError("more than declared, or cut short")
    return raw


ZLIB: dict[str, Any] = {
    "compress": lambda body: zlib.compress(body, 1),
    "decompress": inflate,
    "compression": "zlib",
}


def make_guest(limits: LinkLimits | None = None, boot_id: str = "boot-1", **more: Any) -> LinkCore:
    more.setdefault("identity", LinkIdentity(SESSION, 1, 1, boot_id))
    more.setdefault("verify", verify)
    return LinkCore(role=Role.GUEST, limits=limits, **more)


def make_gateway(limits: LinkLimits | None = None, epoch: int = 1, **more: Any) -> LinkCore:
    more.setdefault("identity", LinkIdentity(SESSION, 1, epoch))
    more.setdefault("prove", prove)
    return LinkCore(role=Role.GATEWAY, limits=limits, **more)


def numbered(number: int, size: int = 0, channel: Channel = Channel.IOPUB) -> LinkMessage:
    """A message that can be told from all others; `size` bytes of content that says its number."""
    label = b"%d" % number
    content = (label + b" ") * (size // (len(label) + 1)) + b"." * (size % (len(label) + 1))
    return jupyter(channel, [b"signature", label, b"{}", b"{}", content])


def number_of(message: LinkMessage) -> int:
    return int(message.parts[1])


class Wire:
    """One direction of a transport: frames that were taken and have not arrived."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.arrived: list[bytes] = []


class Pair:
    """A guest and a gateway, joined by a channel that moves only when told."""

    def __init__(self, guest: LinkCore | None = None, gateway: LinkCore | None = None) -> None:
        self.guest = guest or make_guest()
        self.gateway = gateway or make_gateway()
        self.events: dict[Role, list[LinkEvent]] = {Role.GUEST: [], Role.GATEWAY: []}
        self.on_received: Callable[[Role, LinkMessage], None] = self.consume_at_once
        self.wires = {Role.GUEST: Wire(), Role.GATEWAY: Wire()}

    def core(self, role: Role) -> LinkCore:
        return self.guest if role is Role.GUEST else self.gateway

    def consume_at_once(self, role: Role, message: LinkMessage) -> None:
        self.core(role).consumed(message.size_bytes, message.lane)

    def connect(self) -> None:
        """Open a fresh transport; the handshake is still to be moved."""
        self.wires = {Role.GUEST: Wire(), Role.GATEWAY: Wire()}
        self.guest.connected()
        self.gateway.connected()

    def cut(self) -> None:
        """Lose whatever is under way."""
        self.guest.disconnected()
        self.gateway.disconnected()
        self.wires = {Role.GUEST: Wire(), Role.GATEWAY: Wire()}

    def take(self, role: Role, budget_bytes: int = BIG_BUDGET) -> None:
        """Put frames of `role` on the wire."""
        self.wires[role].frames.extend(self.core(role).take_frames(budget_bytes))

    def deliver(self, role: Role, count: int = 1) -> None:
        """Let frames that `role` sent arrive."""
        wire = self.wires[role]
        for _ in range(min(count, len(wire.frames))):
            frame = wire.frames.popleft()
            wire.arrived.append(frame)
            self.feed(other(role), frame)

    def feed(self, role: Role, frame: bytes) -> None:
        """Hand one frame to `role` and note its events."""
        for event in self.core(role).receive_frame(frame):
            self.events[role].append(event)
            if isinstance(event, Received):
                self.on_received(role, event.message)

    def pump(self, budget_bytes: int = BIG_BUDGET) -> None:
        """Move everything until both are quiet."""
        while self.guest.wants_output or self.gateway.wants_output or self.in_flight:
            for role in Role:
                self.take(role, budget_bytes)
                self.deliver(role, len(self.wires[role].frames))

    @property
    def in_flight(self) -> bool:
        return any(wire.frames for wire in self.wires.values())

    def open(self) -> Pair:
        """Connect and shake hands."""
        self.connect()
        self.pump()
        assert self.guest.established
        assert self.gateway.established
        return self

    def shake_hands(self) -> None:
        """Connect and move the handshake only."""
        self.connect()
        for role in (Role.GUEST, Role.GATEWAY, Role.GUEST):
            self.take(role, 0)
            self.deliver(role)

    def messages(self, role: Role) -> list[LinkMessage]:
        return [e.message for e in self.events[role] if isinstance(e, Received)]

    def last_established(self, role: Role) -> Established:
        return [e for e in self.events[role] if isinstance(e, Established)][-1]

    def refusal(self, role: Role) -> Refused:
        return [e for e in self.events[role] if isinstance(e, Refused)][-1]


def other(role: Role) -> Role:
    return Role.GATEWAY if role is Role.GUEST else Role.GUEST


def numbers(messages: Iterable[LinkMessage]) -> list[int]:
    return [number_of(message) for message in messages]


def survives(core: LinkCore, frame: bytes) -> bool:
    """Whether a frame is accepted; the only other outcome may be the one typed error."""
    try:
        core.receive_frame(frame)
    except LinkProtocolError:
        return False
    return True
