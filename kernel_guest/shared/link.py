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

*Errors.*  A frame that breaks the protocol raises `LinkProtocolError` and is not taken: the core is
as after `disconnected()`, the shell closes the socket and may reconnect.  The peer then sends the
same frame again.  If that fails the same way, the peer or the stream is broken for good: a gateway
may try `attach_fresh()` once, and otherwise treats the guest as lost.  Content is not checksummed,
TLS and TCP do that.

Phases: DOWN -> GREETING -> UP, or REFUSED; from each back to DOWN.  Bounds: queues (`LinkFull`),
un-consumed messages (windows), one unfinished message per lane, frame, message and part caps.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

from kernel_guest.shared import hello as greeting
from kernel_guest.shared.chunks import Compress, Decompress
from kernel_guest.shared.errors import Fault, LinkProtocolError
from kernel_guest.shared.frames import DATA, FrameType, Pair, decode_frame
from kernel_guest.shared.hello import Hello, LinkIdentity, RefusalCode, Welcome
from kernel_guest.shared.limits import LinkLimits
from kernel_guest.shared.messages import Kind, Lane, LinkMessage
from kernel_guest.shared.records import (
    Established,
    Greeting,
    LaneStatistics,
    LinkEvent,
    LinkStatistics,
    Phase,
    Received,
    Refused,
    Role,
)
from kernel_guest.shared.stream import Stream

Prove = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes], bool]


_TAKES = {
    Role.GUEST: frozenset((Kind.JUPYTER, Kind.CALL, Kind.GAP)),
    Role.GATEWAY: frozenset((Kind.JUPYTER, Kind.REPLY, Kind.EVENT, Kind.GAP)),
}
"""Kinds that each role takes: only a gateway calls, only a guest replies and reports."""


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
        self._features = () if compress is None else (greeting.COMPRESSION_FEATURE + compression,)
        self._phase = Phase.DOWN
        self._stream = Stream(self.limits, _TAKES[role], compress, decompress)
        self._peer_boot_id = ""
        self._greeting: Greeting | None = None
        self._challenge: greeting.Challenge | None = None
        self._handshake_out: list[bytes] = []
        self._handshake_seen: list[bytes] = []
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
        return sum(out.queued_bytes for out in self._stream.out)

    @property
    def unacked_bytes(self) -> int:
        """Bytes (as cost) of messages framed and not yet consumed by the peer, both lanes."""
        return sum(out.unacked_bytes for out in self._stream.out)

    @property
    def idle(self) -> bool:
        """Nothing queued, unconsumed, unfinished or unacknowledged: parking delays nothing."""
        return not (self.queued_bytes or self.unacked_bytes or self._stream.ack_due) and not any(
            box.held_bytes or box.credit.waiting_bytes for box in self._stream.into
        )

    def wants_more_of(self, lane: Lane) -> bool:
        """Whether a journal should hand over more of this lane."""
        return self._stream.out[lane].queued_bytes < self.limits.low_water_bytes

    @property
    def wants_more(self) -> bool:
        """Whether a journal should hand over more of the ordered lane."""
        return self.wants_more_of(Lane.ORDERED)

    @property
    def wants_output(self) -> bool:
        """Whether `take_frames` would give something."""
        return bool(self._handshake_out) or (self._phase is Phase.UP and self._stream.ready)

    @property
    def accepted(self) -> Pair:
        """Messages ever taken by `send`, per lane."""
        urgent, ordered = self._stream.out
        return (urgent.accepted_total, ordered.accepted_total)

    @property
    def delivered(self) -> Pair:
        """Messages ever sent that the peer's application has consumed, per lane.

        Equal to `accepted` when nothing is under way; the n-th accepted message of a lane is
        acknowledged once `delivered` reaches n.
        """
        urgent, ordered = self._stream.out
        return (urgent.delivered_total, ordered.delivered_total)

    @property
    def received(self) -> Pair:
        """Messages ever received, per lane."""
        urgent, ordered = self._stream.into
        return (urgent.delivered_total, ordered.delivered_total)

    def statistics(self) -> LinkStatistics:
        """A record of the state."""
        return LinkStatistics(
            role=self.role.value,
            phase=self._phase.value,
            stream=self._stream.number,
            resumes=self._resumes,
            fresh_attachments=self._fresh,
            protocol_errors=self._protocol_errors,
            stray_frames=self._stray,
            urgent=self._stream.lane_statistics(Lane.URGENT),
            ordered=self._stream.lane_statistics(Lane.ORDERED),
        )

    def __repr__(self) -> str:
        return (
            f"<LinkCore {self.role.value} {self._phase.value} stream={self._stream.number}"
            f" queued={self.queued_bytes} unacked={self.unacked_bytes}"
            f" received={self.received} delivered={self.delivered}>"
        )

    # --- the application's side

    def send(self, message: LinkMessage) -> None:
        """Queue a message, in any phase.

        Raises `LinkFull` when the lane's queue is at its bound, `MessageRefused` when the
        message is above a cap.
        """
        self._stream.out[message.lane].push(message)

    def consumed(self, size_bytes: int, lane: Lane = Lane.ORDERED) -> None:
        """The application has drained so many bytes of the messages of a lane, in order.

        Grants credit, and lets the peer forget them.  Raises `ValueError` if that is more than
        was received.
        """
        if self._stream.into[lane].credit.consume(size_bytes) and self._phase is Phase.UP:
            self._stream.ack_due = True

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
        self._greeting = self._challenge = None
        self._stream.ack_due = False
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
            if len(data) and data[0] >= DATA:
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
        frames, self._handshake_out = self._handshake_out, []
        if self._phase is not Phase.UP:
            return frames
        left = budget_bytes
        while left > 0 and (frame := self._stream.next_data()):
            frames.append(frame)
            left -= len(frame)
        if self._stream.ack_due:
            frames.append(self._stream.take_ack())
        return frames

    def _receive_numbered(self, data: bytes | memoryview) -> list[LinkEvent]:
        frame = decode_frame(data, self.limits.chunk_bytes)
        if self._phase is not Phase.UP:
            raise LinkProtocolError(Fault.UNEXPECTED, "data before the handshake")
        if frame.stream != self._stream.number:
            self._stray += 1
            return []
        return [Received(message) for message in self._stream.receive(frame)]

    # --- handshake

    def _receive_handshake(self, data: bytes) -> list[LinkEvent]:
        if not data or len(data) > greeting.MAX_HANDSHAKE_BYTES:
            raise LinkProtocolError(Fault.BAD_FRAME, "empty, or an endless handshake")
        if data in self._handshake_seen:
            self._stray += 1
            return []
        event = self._on_hello(data) if self.role is Role.GUEST else self._on_guest_word(data)
        self._handshake_seen.append(data)
        return [] if event is None else [event]

    def _unexpected(self, data: bytes) -> LinkProtocolError:
        return LinkProtocolError(
            Fault.UNEXPECTED, f"frame type {data[0]} in phase {self._phase.value}"
        )

    # guest

    def greet(self) -> Greeting:
        """Begin a handshake on a further socket of the guest; send its `frame` there."""
        challenge = greeting.Challenge(
            greeting.VERSIONS,
            self._features,
            secrets.token_hex(greeting.NONCE_BYTES),
            self.identity.boot_id,
        )
        return Greeting(greeting.encode_challenge(challenge), challenge.nonce)

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
            return greeting.encode_refuse(code), Refused(code, greeting.REFUSAL_TEXTS[code])
        return self._accept(begun, said)

    def _on_hello(self, data: bytes) -> Established | Refused:
        if self._phase is not Phase.GREETING:
            raise self._unexpected(data)
        assert self._greeting is not None, "made by connected()"
        frame, event = self.answer(self._greeting, data)
        if isinstance(event, Refused):
            self._phase = Phase.REFUSED
        self._handshake_out.append(frame)
        return event

    def _unresumable(self, said: Hello) -> RefusalCode | None:
        if said.stream is None:
            return None
        known = said.stream == self._stream.number and self._stream.can_resume(said.received)
        return None if known else RefusalCode.STALE_STREAM

    def _accept(self, begun: Greeting, said: Hello) -> tuple[bytes, Established]:
        self.disconnected()
        self.identity = replace(self.identity, epoch=said.epoch)
        compressed = any(name in self._features for name in said.features)
        if said.stream is None:
            self._stream.begin(self._stream.number + 1, said.limits, compressed)
        else:
            self._stream.resume(said.received, said.limits, compressed)
        event = self._established(said.stream is not None, self.identity.boot_id)
        welcome = Welcome(
            nonce=begun.nonce,
            stream=self._stream.number,
            received=self._stream.frames_received,
            first_kept=self._stream.first_kept,
            limits=greeting.declared(self.limits),
        )
        return greeting.encode_welcome(welcome), event

    # gateway

    def _on_guest_word(self, data: bytes) -> Established | Refused | None:
        kind, challenged = data[0], self._challenge is not None
        if self._phase is Phase.GREETING:
            if kind == FrameType.CHALLENGE and not challenged:
                return self._on_challenge(data)
            if kind == FrameType.WELCOME and challenged:
                return self._on_welcome(greeting.decode_welcome(data))
            if kind == FrameType.REFUSE:
                return self._refused(*greeting.decode_refuse(data))
        raise self._unexpected(data)

    def _refused(self, code: str, text: str) -> Refused:
        self._phase = Phase.REFUSED
        return Refused(code, text)

    def _on_challenge(self, data: bytes) -> Refused | None:
        challenge = greeting.decode_challenge(data)
        version = greeting.common_version(greeting.VERSIONS, challenge.versions)
        if version is None:
            code = RefusalCode.NO_COMMON_VERSION
            return self._refused(code, greeting.REFUSAL_TEXTS[code])
        assert self._prove is not None, "checked in the constructor"
        body = greeting.encode_hello_body(self._make_hello(version, challenge))
        signature = self._prove(greeting.transcript(data, body))
        self._challenge = challenge
        self._handshake_out.append(greeting.encode_hello(body, signature))
        return None

    def _make_hello(self, version: int, challenge: greeting.Challenge) -> Hello:
        same_guest = self._knows(challenge)
        return Hello(
            version=version,
            features=self._common_features(challenge),
            kernel_session=self.identity.kernel_session,
            generation=self.identity.generation,
            epoch=self.identity.epoch,
            stream=self._stream.number if same_guest else None,
            received=self._stream.frames_received if same_guest else (0, 0),
            limits=greeting.declared(self.limits),
        )

    def attach_fresh(self) -> None:
        """Give up the stream: the next handshake asks for a new one.

        For a gateway that was refused with `stale_stream`, or that no longer trusts its state.
        The next `Established` has `restarted` set and gives the old stream's messages back.
        """
        self._peer_boot_id = ""

    def _knows(self, challenge: greeting.Challenge) -> bool:
        """Whether there is a stream with this very guest."""
        known = self._stream.number > 0 and self._peer_boot_id
        return bool(known) and challenge.boot_id == self._peer_boot_id

    def _common_features(self, challenge: greeting.Challenge) -> tuple[str, ...]:
        return tuple(name for name in challenge.features if name in self._features)

    def _on_welcome(self, welcome: Welcome) -> Established:
        assert self._challenge is not None, "checked by the caller"
        challenge, stream = self._challenge, self._stream
        if welcome.nonce != challenge.nonce:
            raise LinkProtocolError(Fault.BAD_HANDSHAKE, "WELCOME to another challenge")
        compressed = bool(self._common_features(challenge))
        if not self._knows(challenge):
            return self._adopt(welcome, challenge.boot_id, compressed)
        if welcome.stream != stream.number or not stream.can_resume(welcome.received):
            raise LinkProtocolError(Fault.BAD_HANDSHAKE, "WELCOME to another stream")
        stream.resume(welcome.received, welcome.limits, compressed)
        return self._established(True, challenge.boot_id)

    def _adopt(self, welcome: Welcome, boot_id: str, compressed: bool) -> Established:
        """A new stream, with a guest that knows nothing of us; what an earlier one was sent."""
        restarted = self._stream.number > 0
        in_flight, unsent = self._stream.abandon() if restarted else ((), ())
        self._stream.begin(welcome.stream, welcome.limits, compressed)
        self._peer_boot_id = boot_id
        event = self._established(False, boot_id)
        return replace(event, restarted=restarted, in_flight=in_flight, unsent=unsent)

    # both

    def _established(self, resumed: bool, boot_id: str) -> Established:
        self._phase = Phase.UP
        if resumed:
            self._resumes += 1
        else:
            self._fresh += 1
        return Established(resumed=resumed, boot_id=boot_id)


__all__ = [
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
