"""The link between gateway and guest, as a pure protocol core.

No socket, no clock, no thread: a shell tells the core what happened to its WebSocket and what
arrived on it, and asks it what to send.  One class plays both roles.

Rules
-----
*Two lanes* each way (`messages.Lane`).  Within a lane messages arrive once, whole, in the order
in which they were sent.  Between lanes there is no order: URGENT goes first whenever it has
something, except that chunks of a long urgent message alternate with chunks of the other lane.
An interrupt waits for at most one chunk that is already on the wire.

*Numbers.*  Frames of a lane are numbered from 1.  Every frame carries two cumulative numbers per
lane: `received` (frames without a hole) and `consumed` (messages that the application has
drained, as it said by `consumed()`).  `received` ends resending, `consumed` ends keeping and is
what credit is made of (`credit`).

*Streams.*  The numbers belong to a stream, which the guest opens when a gateway attaches
"fresh", and names by a counter.  A gateway that still has its core resumes the stream; one that
lost it attaches fresh, and gets everything from the first message not consumed.  Frames of an
older stream are dropped and counted.

*Who keeps what, until when.*  The sender keeps a message until it is consumed, its frames until
they are received (`sequence`).  The receiver keeps an unfinished message until it is complete or
the stream ends.  So at any moment there is one copy of each message on at least one side:

    cut at any byte             the frame is not received: it is sent again after the resume,
                                from the first missing chunk of a long message
    frame received, ack lost    it is not sent again (the handshake says what was received), or
                                dropped as a duplicate
    gateway lost its core       fresh: received but not consumed messages come again, whole;
                                consumed ones whose acknowledgement was lost too come twice at
                                most, which the gateway's own record of message ids decides
    guest lost its core         the boot id differs: the gateway is told `resumed=False` and
                                gets back what the old guest may have had (`in_flight`: outcome
                                unknown) and what never left (`unsent`: not executed)

*Handshake* (`hello`).  It must be passed before any number counts.  On the guest it is apart from
the established transport: `greet()` and `answer()` serve a second socket while the first goes on,
so a stranger on the port disturbs nobody; only a HELLO that is accepted replaces the older one.
`connected()` with `receive_frame()` is the plain form for shells with one socket.

*Errors.*  A frame that breaks the protocol raises `LinkProtocolError` and has changed nothing but
the phase: the core is as after `disconnected()`, the shell closes the socket and may reconnect.

Phases: DOWN -> GREETING -> UP, or REFUSED; from each back to DOWN.  Bounds: queues (`LinkFull`),
un-consumed messages (windows), one unfinished message per lane, frame, message and part caps.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from kernel_guest.shared import hello as greeting
from kernel_guest.shared.chunks import Compress, Decompress
from kernel_guest.shared.errors import Fault, LinkProtocolError, LinkRefused
from kernel_guest.shared.frames import (
    HEADER_BYTES,
    LAST,
    FrameType,
    Pair,
    decode_frame,
    encode_header,
)
from kernel_guest.shared.hello import LinkIdentity, PeerLimits, RefusalCode
from kernel_guest.shared.limits import LinkLimits
from kernel_guest.shared.messages import Lane, LinkMessage
from kernel_guest.shared.sequence import Framing, Inbox, Outbox

Prove = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes], bool]


class Role(Enum):
    """Which side a core plays."""

    GUEST = "guest"
    GATEWAY = "gateway"


class Phase(Enum):
    """Where the present transport is."""

    DOWN = "down"
    GREETING = "greeting"
    UP = "up"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Established:
    """The handshake passed.

    `resumed`: the stream goes on, nothing is lost.  Otherwise it is a new stream, and for a
    gateway that had one before (`restarted`) the guest is another one: `in_flight` messages may
    or may not have been received, `unsent` ones never left.
    """

    resumed: bool
    boot_id: str
    restarted: bool = False
    in_flight: tuple[LinkMessage, ...] = ()
    unsent: tuple[LinkMessage, ...] = ()


@dataclass(frozen=True, slots=True)
class Received:
    """A message has arrived; call `consumed(message.size_bytes, message.lane)` when drained."""

    message: LinkMessage


@dataclass(frozen=True, slots=True)
class Refused:
    """The handshake failed.  Send what `take_frames` still gives, then close."""

    code: str
    text: str

    def error(self) -> LinkRefused:
        """As an exception."""
        return LinkRefused(self.code, self.text)


LinkEvent = Established | Received | Refused


@dataclass(frozen=True, slots=True)
class Greeting:
    """A handshake in progress on one socket of the guest; `frame` is its CHALLENGE."""

    frame: bytes
    features: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    """One lane of a core."""

    queued_messages: int
    queued_bytes: int
    unacked_bytes: int
    window_bytes: int
    accepted_messages: int
    delivered_messages: int
    resent_frames: int
    received_messages: int
    unconsumed_bytes: int
    unfinished_bytes: int
    duplicates: int


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """A core at one moment, for status pages and tests."""

    role: str
    phase: str
    stream: int
    resumes: int
    fresh_attachments: int
    protocol_errors: int
    stray_frames: int
    urgent: LaneStatistics
    ordered: LaneStatistics


class LinkCore:
    """One end of a link.  Not thread-safe: one loop owns it."""

    def __init__(
        self,
        *,
        role: Role,
        identity: LinkIdentity,
        limits: LinkLimits | None = None,
        prove: Prove | None = None,
        verify: Verify | None = None,
        compress: Compress | None = None,
        decompress: Decompress | None = None,
        compression: str = "zstd",
    ) -> None:
        """`prove` signs (gateway), `verify` checks message and signature (guest).

        `compress` and `decompress` come together or not at all; `compression` names the format
        in the negotiation.  Raises `ValueError` if something the role needs is missing.
        """
        if (role is Role.GATEWAY and prove is None) or (role is Role.GUEST and verify is None):
            raise ValueError("a gateway needs prove, a guest needs verify")
        if (compress is None) != (decompress is None):
            raise ValueError("compress and decompress come together")
        self.role = role
        self.identity = identity
        self.limits = limits or LinkLimits()
        self._prove = prove
        self._verify = verify
        self._compress = compress
        self._decompress = decompress
        self._features = () if compress is None else (greeting.COMPRESSION_FEATURE + compression,)
        self._phase = Phase.DOWN
        self._out = tuple(Outbox(lane, self.limits) for lane in Lane)
        self._in = tuple(Inbox(lane, self.limits) for lane in Lane)
        self._framing = self._framing_for(greeting.declared(self.limits), ())
        self._stream = 0
        self._peer_boot_id = ""
        self._handshake_out: list[bytes] = []
        self._handshake_seen: list[bytes] = []
        self._greeting: Greeting | None = None
        self._offered: tuple[str, ...] = ()
        self._greeting_boot_id = ""
        self._ack_due = False
        self._yield_to_ordered = False
        self._resumes = self._fresh = self._protocol_errors = self._stray = 0

    # --- state

    @property
    def phase(self) -> Phase:
        """Phase of the present transport."""
        return self._phase

    @property
    def established(self) -> bool:
        """Whether the handshake of the present transport has passed."""
        return self._phase is Phase.UP

    @property
    def queued_bytes(self) -> int:
        """Bytes (as cost) of messages not yet framed, both lanes."""
        return self._out[0].queued_bytes + self._out[1].queued_bytes

    @property
    def unacked_bytes(self) -> int:
        """Bytes (as cost) of messages framed and not yet consumed by the peer, both lanes."""
        return self._out[0].unacked_bytes + self._out[1].unacked_bytes

    @property
    def idle(self) -> bool:
        """Nothing queued, unconsumed, unfinished or unacknowledged: parking loses no time."""
        return not (self.queued_bytes or self.unacked_bytes or self._ack_due) and not any(
            box.held_bytes or box.credit.waiting_bytes for box in self._in
        )

    def wants_more_of(self, lane: Lane) -> bool:
        """Whether a journal should hand over more of this lane."""
        return self._out[lane].queued_bytes < self.limits.low_water_bytes

    @property
    def wants_more(self) -> bool:
        """Whether a journal should hand over more of the ordered lane."""
        return self.wants_more_of(Lane.ORDERED)

    @property
    def wants_output(self) -> bool:
        """Whether `take_frames` would give something."""
        if self._handshake_out:
            return True
        if self._phase is not Phase.UP:
            return False
        return self._ack_due or self._out[0].ready or self._out[1].ready

    @property
    def accepted(self) -> Pair:
        """Messages ever taken by `send`, per lane."""
        return (self._out[0].accepted_total, self._out[1].accepted_total)

    @property
    def delivered(self) -> Pair:
        """Messages ever sent that the peer's application has consumed, per lane.

        Equal to `accepted` when nothing is under way; the n-th accepted message of a lane is
        acknowledged once `delivered` reaches n.
        """
        return (self._out[0].delivered_total, self._out[1].delivered_total)

    @property
    def received(self) -> Pair:
        """Messages ever received, per lane."""
        return (self._in[0].delivered_total, self._in[1].delivered_total)

    def statistics(self) -> LinkStatistics:
        """A record of the state."""
        return LinkStatistics(
            self.role.value,
            self._phase.value,
            self._stream,
            self._resumes,
            self._fresh,
            self._protocol_errors,
            self._stray,
            self._lane_statistics(Lane.URGENT),
            self._lane_statistics(Lane.ORDERED),
        )

    def _lane_statistics(self, lane: Lane) -> LaneStatistics:
        out, into = self._out[lane], self._in[lane]
        return LaneStatistics(
            queued_messages=out.queued_messages,
            queued_bytes=out.queued_bytes,
            unacked_bytes=out.unacked_bytes,
            window_bytes=out.credit.window,
            accepted_messages=out.accepted_total,
            delivered_messages=out.delivered_total,
            resent_frames=out.resent_frames,
            received_messages=into.delivered_total,
            unconsumed_bytes=into.credit.waiting_bytes,
            unfinished_bytes=into.held_bytes,
            duplicates=into.duplicates,
        )

    def __repr__(self) -> str:
        return (
            f"<LinkCore {self.role.value} {self._phase.value} stream={self._stream}"
            f" queued={self.queued_bytes} unacked={self.unacked_bytes}"
            f" received={self.received} delivered={self.delivered}>"
        )

    # --- the application's side

    def send(self, message: LinkMessage) -> None:
        """Queue a message, in any phase.

        Raises `LinkFull` when the lane's queue is at its bound, `MessageRefused` when the
        message is above a cap.
        """
        self._out[message.lane].push(message)

    def consumed(self, size_bytes: int, lane: Lane = Lane.ORDERED) -> None:
        """The application has drained so many bytes of the messages of a lane, in order.

        Grants credit, and lets the peer forget them.  Raises `ValueError` if that is more than
        was received.
        """
        if self._in[lane].credit.consume(size_bytes) and self._phase is Phase.UP:
            self._ack_due = True

    # --- the transport's side

    def connected(self) -> None:
        """A fresh WebSocket is open; whatever was before is gone."""
        self.disconnected()
        self._phase = Phase.GREETING
        if self.role is Role.GUEST:
            self._greeting = self.greet()
            self._handshake_out.append(self._greeting.frame)

    def disconnected(self) -> None:
        """The transport is gone.  State is kept; the next handshake decides what is resent."""
        self._phase = Phase.DOWN
        self._greeting = None
        self._ack_due = False
        self._handshake_out.clear()
        self._handshake_seen.clear()

    def receive_frame(self, data: bytes | memoryview) -> list[LinkEvent]:
        """Take one binary WebSocket message; what it led to.

        Raises `LinkProtocolError`: close the socket.  The core is then as after
        `disconnected()`.  Frames that come after that, or after a refusal, are dropped.
        """
        if self._phase is Phase.DOWN or self._phase is Phase.REFUSED:
            self._stray += 1
            return []
        try:
            if len(data) and data[0] >= FrameType.DATA:
                return self._receive_numbered(data)
            return self._receive_handshake(bytes(data[: greeting.MAX_HANDSHAKE_BYTES + 1]))
        except LinkProtocolError:
            self._protocol_errors += 1
            self.disconnected()
            raise

    def take_frames(self, budget_bytes: int) -> list[bytes]:
        """The next frames to put on the wire, one WebSocket message each.

        At least one if there is anything, then as many as fit into the budget.  Taking is
        sending: a frame that was taken and not sent must be followed by `disconnected()`.
        """
        frames = self._handshake_out
        self._handshake_out = []
        if self._phase is not Phase.UP:
            return frames
        left = budget_bytes
        while left > 0 and (frame := self._next_data()):
            frames.append(frame)
            left -= len(frame)
        if self._ack_due:
            frames.append(self._header(FrameType.ACK, 0, 0, 0))
            self._ack_due = False
        return frames

    def _next_data(self) -> bytes | None:
        first = Lane.ORDERED if self._yield_to_ordered else Lane.URGENT
        for lane in (first, Lane(1 - first)):
            found = self._out[lane].next_frame(self._framing)
            if found is not None:
                flags, sequence, chunk = found
                self._yield_to_ordered = lane is Lane.URGENT and not flags & LAST
                self._ack_due = False
                return b"".join((self._header(FrameType.DATA, flags, lane, sequence), *chunk))
        return None

    def _header(self, frame_type: FrameType, flags: int, lane: int, sequence: int) -> bytes:
        urgent, ordered = self._in
        return encode_header(
            frame_type,
            flags,
            lane,
            self._stream,
            sequence,
            (urgent.received, ordered.received),
            (urgent.credit.consumed_messages, ordered.credit.consumed_messages),
        )

    def _receive_numbered(self, data: bytes | memoryview) -> list[LinkEvent]:
        frame = decode_frame(data, self.limits.chunk_bytes)
        if self._phase is not Phase.UP:
            raise LinkProtocolError(Fault.UNEXPECTED, "data before the handshake")
        if frame.stream != self._stream:
            self._stray += 1
            return []
        for lane in (0, 1):
            self._out[lane].acknowledge(frame.received[lane], frame.consumed[lane])
        if frame.type == FrameType.ACK:
            return []
        messages = self._in[frame.lane].accept(frame)
        self._ack_due = True
        return [Received(message) for message in messages]

    # --- handshake

    def _receive_handshake(self, data: bytes) -> list[LinkEvent]:
        if not data or len(data) > greeting.MAX_HANDSHAKE_BYTES:
            raise LinkProtocolError(Fault.BAD_FRAME, "empty, or an endless handshake")
        if data in self._handshake_seen:
            self._stray += 1
            return []
        event = self._handshake_event(data)
        self._handshake_seen.append(data)
        return [] if event is None else [event]

    def _handshake_event(self, data: bytes) -> LinkEvent | None:
        kind = data[0]
        if self._phase is Phase.GREETING and self.role is Role.GUEST and kind == FrameType.HELLO:
            assert self._greeting is not None, "made by connected()"
            frame, event = self.answer(self._greeting, data)
            self._handshake_out.append(frame)
            return event
        if self._phase is Phase.GREETING and self.role is Role.GATEWAY:
            if kind == FrameType.CHALLENGE and not self._handshake_seen:
                return self._on_challenge(data)
            if kind == FrameType.WELCOME and self._handshake_seen:
                return self._on_welcome(data)
            if kind == FrameType.REFUSE:
                return self._refused(*greeting.decode_refuse(data))
        raise LinkProtocolError(Fault.UNEXPECTED, f"frame type {kind} in {self._phase.value}")

    def _refused(self, code: str, text: str) -> Refused:
        self._phase = Phase.REFUSED
        return Refused(code, text)

    # guest

    def greet(self) -> Greeting:
        """Begin a handshake on a further socket of the guest; send its `frame` there."""
        challenge = greeting.Challenge(
            greeting.VERSIONS,
            self._features,
            secrets.token_hex(greeting.NONCE_BYTES),
            self.identity.boot_id,
        )
        return Greeting(greeting.encode_challenge(challenge), self._features)

    def answer(self, begun: Greeting, data: bytes) -> tuple[bytes, Established | Refused]:
        """Judge the first frame that came on the socket of `begun`; the frame to send back.

        On `Established` that socket is the link from now on: send the frame, then go on with
        `take_frames`, and close the older socket.  On `Refused` send the frame and close; the
        established transport, if any, is untouched.  Raises `LinkProtocolError` on garbage,
        which does not touch it either.
        """
        if not data or data[0] != FrameType.HELLO:
            raise LinkProtocolError(Fault.UNEXPECTED, "HELLO is due")
        assert self._verify is not None, "checked in the constructor"
        body, signature = greeting.split_hello(data)
        said = greeting.decode_hello(body)
        proven = self._verify(greeting.transcript(begun.frame, body), signature)
        code = greeting.judge(said, self.identity, proven) or self._unresumable(said)
        if code is not None:
            if begun is self._greeting:
                self._phase = Phase.REFUSED
            return greeting.encode_refuse(code), Refused(code, greeting.REFUSAL_TEXTS[code])
        return self._accept(said)

    def _unresumable(self, said: greeting.Hello) -> RefusalCode | None:
        if said.stream is None:
            return None
        known = said.stream == self._stream and all(
            out.can_resume(received) for out, received in zip(self._out, said.received, strict=True)
        )
        return None if known else RefusalCode.STALE_STREAM

    def _accept(self, said: greeting.Hello) -> tuple[bytes, Established]:
        self.disconnected()
        self.identity = replace(self.identity, epoch=said.epoch)
        resumed = said.stream is not None
        features = tuple(name for name in said.features if name in self._features)
        if not resumed:
            self._new_stream(self._stream + 1, features)
            for out in self._out:
                out.restart()
        self._establish(said.limits, features, said.received if resumed else None)
        welcome = greeting.encode_welcome(
            self._stream, self._frames_received(), self._first_kept(), self.limits
        )
        return welcome, Established(resumed=resumed, boot_id=self.identity.boot_id)

    def _frames_received(self) -> Pair:
        return (self._in[0].received, self._in[1].received)

    def _first_kept(self) -> Pair:
        return (self._out[0].received + 1, self._out[1].received + 1)

    # gateway

    def _on_challenge(self, data: bytes) -> Refused | None:
        challenge = greeting.decode_challenge(data)
        version = greeting.common_version(greeting.VERSIONS, challenge.versions)
        if version is None:
            code = RefusalCode.NO_COMMON_VERSION
            return self._refused(code, greeting.REFUSAL_TEXTS[code])
        assert self._prove is not None, "checked in the constructor"
        body = greeting.encode_hello_body(self._make_hello(version, challenge), self.limits)
        signature = self._prove(greeting.transcript(data, body))
        self._handshake_out.append(greeting.encode_hello(body, signature))
        self._greeting_boot_id = challenge.boot_id
        return None

    def _make_hello(self, version: int, challenge: greeting.Challenge) -> greeting.Hello:
        same_guest = self._stream and challenge.boot_id == self._peer_boot_id
        self._offered = tuple(name for name in challenge.features if name in self._features)
        return greeting.Hello(
            version=version,
            features=self._offered,
            kernel_session=self.identity.kernel_session,
            generation=self.identity.generation,
            epoch=self.identity.epoch,
            stream=self._stream if same_guest else None,
            received=self._frames_received() if same_guest else (0, 0),
            limits=greeting.declared(self.limits),
        )

    def _on_welcome(self, data: bytes) -> Established:
        welcome = greeting.decode_welcome(data)
        boot_id, known = self._greeting_boot_id, self._peer_boot_id
        resumed = bool(self._stream) and boot_id == known
        if resumed and (
            welcome.stream != self._stream
            or not all(
                out.can_resume(received)
                for out, received in zip(self._out, welcome.received, strict=True)
            )
        ):
            raise LinkProtocolError(Fault.BAD_HANDSHAKE, "WELCOME to another stream")
        lost: tuple[list[LinkMessage], list[LinkMessage]] = ([], [])
        if not resumed:
            lost = self._adopt_guest(welcome.stream, restarted=bool(known))
        self._peer_boot_id = boot_id
        self._establish(welcome.limits, self._offered, welcome.received if resumed else None)
        return Established(resumed, boot_id, bool(known) and not resumed, *map(tuple, lost))

    def _adopt_guest(
        self, stream: int, restarted: bool
    ) -> tuple[list[LinkMessage], list[LinkMessage]]:
        """Begin with a guest that knows nothing of us; what the one before it was sent."""
        in_flight: list[LinkMessage] = []
        unsent: list[LinkMessage] = []
        self._new_stream(stream, self._offered)
        if restarted:
            for out in self._out:
                maybe, never = out.abandon()
                in_flight += maybe
                unsent += never
        return in_flight, unsent

    # both

    def _new_stream(self, stream: int, features: tuple[str, ...]) -> None:
        self._stream = stream
        self._fresh += 1
        for box in self._in:
            box.restart(self._decompress if features else None)

    def _establish(
        self, peer: PeerLimits, features: tuple[str, ...], resume_at: Pair | None
    ) -> None:
        self._phase = Phase.UP
        self._framing = self._framing_for(peer, features)
        for lane, out in enumerate(self._out):
            out.credit.window = peer.windows[lane]
            if resume_at is not None:
                out.rewind(resume_at[lane])
        if resume_at is not None:
            self._resumes += 1
        self._ack_due = any(self._frames_received())

    def _framing_for(self, peer: PeerLimits, features: tuple[str, ...]) -> Framing:
        mine = self.limits
        return Framing(
            chunk_bytes=min(mine.chunk_bytes, peer.chunk_bytes),
            message_bytes=min(mine.message_bytes, peer.message_bytes),
            parts=min(mine.parts, peer.parts),
            batch_bytes=mine.batch_bytes,
            compress=self._compress if features else None,
            compress_above_bytes=mine.compress_above_bytes,
        )


__all__ = [
    "HEADER_BYTES",
    "Established",
    "Greeting",
    "LaneStatistics",
    "LinkCore",
    "LinkEvent",
    "LinkIdentity",
    "LinkLimits",
    "LinkStatistics",
    "Phase",
    "Received",
    "Refused",
    "Role",
]
