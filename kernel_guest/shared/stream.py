"""The numbered part of a link: two lanes each way, and which of them speaks next.

`link` decides when a stream begins, resumes or ends; here is what travels while it is up.
"""

from __future__ import annotations

from kernel_guest.shared.chunks import Compress, Decompress
from kernel_guest.shared.frames import ACK, DATA, LAST, Frame, Pair, encode_header
from kernel_guest.shared.hello import PeerLimits, declared
from kernel_guest.shared.limits import LinkLimits
from kernel_guest.shared.messages import Kind, Lane, LinkMessage
from kernel_guest.shared.records import LaneStatistics
from kernel_guest.shared.sequence import Framing, Inbox, Outbox

_NOTHING: Pair = (0, 0)


class Stream:
    """Both directions of both lanes, under one stream number."""

    def __init__(
        self,
        limits: LinkLimits,
        kinds: frozenset[Kind],
        compress: Compress | None,
        decompress: Decompress | None,
    ) -> None:
        """`kinds` of messages are taken from the peer, others are refused."""
        self.number = 0
        self.ack_due = False
        self.out = (Outbox(Lane.URGENT, limits), Outbox(Lane.ORDERED, limits))
        self.into = (Inbox(Lane.URGENT, limits, kinds), Inbox(Lane.ORDERED, limits, kinds))
        self._limits = limits
        self._compress = compress
        self._decompress = decompress
        self._framing = self._framing_for(declared(limits), compressed=False)
        self._yield_to_ordered = False

    # --- while it is up

    @property
    def ready(self) -> bool:
        """Whether there is something to send."""
        return self.ack_due or self.out[0].ready or self.out[1].ready

    def next_data(self) -> bytes | None:
        """The next DATA frame; urgent first, long urgent messages alternating with ordered."""
        urgent, ordered = self.out
        for out in (ordered, urgent) if self._yield_to_ordered else (urgent, ordered):
            found = out.next_frame(self._framing)
            if found is not None:
                flags, sequence, chunk = found
                self._yield_to_ordered = out is urgent and not flags & LAST
                self.ack_due = False
                return b"".join((self._header(DATA, flags, out.lane, sequence), *chunk))
        return None

    def take_ack(self) -> bytes:
        """An ACK frame with the present numbers."""
        self.ack_due = False
        return self._header(ACK, 0, 0, 0)

    def receive(self, frame: Frame) -> list[LinkMessage]:
        """Apply a frame of this stream; the messages that it completes."""
        (urgent, ordered), received, consumed = self.out, frame.received, frame.consumed
        urgent.acknowledge(received[0], consumed[0])
        ordered.acknowledge(received[1], consumed[1])
        if frame.type == ACK:
            return []
        messages = self.into[frame.lane].accept(frame)
        self.ack_due = True
        return messages

    def _header(self, frame_type: int, flags: int, lane: int, sequence: int) -> bytes:
        urgent, ordered = self.into
        return encode_header(
            frame_type,
            flags,
            lane,
            self.number,
            sequence,
            (urgent.received, ordered.received),
            (urgent.credit.consumed_messages, ordered.credit.consumed_messages),
        )

    # --- begin, resume, end

    @property
    def frames_received(self) -> Pair:
        """Highest sequence without a hole, per lane."""
        return (self.into[0].received, self.into[1].received)

    @property
    def first_kept(self) -> Pair:
        """First sequence per lane that can still be resent."""
        return (self.out[0].received + 1, self.out[1].received + 1)

    def can_resume(self, received: Pair) -> bool:
        """Whether a peer that received so much can be served."""
        return all(out.can_resume(n) for out, n in zip(self.out, received, strict=True))

    def begin(self, number: int, peer: PeerLimits, compressed: bool) -> None:
        """A new stream: number from 1, beginning with the first message not consumed."""
        self.number = number
        for box in self.into:
            box.restart(self._decompress if compressed else None)
        for out in self.out:
            out.restart()
        self._agree(peer, compressed)

    def resume(self, received: Pair, peer: PeerLimits, compressed: bool) -> None:
        """Go on with the first frames that the peer lacks."""
        for out, number in zip(self.out, received, strict=True):
            out.rewind(number)
        self._agree(peer, compressed)

    def abandon(self) -> tuple[tuple[LinkMessage, ...], tuple[LinkMessage, ...]]:
        """Give back what an other peer may have received, and what was never framed."""
        in_flight: list[LinkMessage] = []
        unsent: list[LinkMessage] = []
        for out in self.out:
            maybe, never = out.abandon()
            in_flight += maybe
            unsent += never
        return tuple(in_flight), tuple(unsent)

    def _agree(self, peer: PeerLimits, compressed: bool) -> None:
        self._framing = self._framing_for(peer, compressed)
        for lane, out in enumerate(self.out):
            # What we keep is ours to bound: a peer that grants the moon gets our own window.
            out.credit.window = min(peer.windows[lane], self._limits.windows[lane])
        self._yield_to_ordered = False
        self.ack_due = self.frames_received != _NOTHING

    def _framing_for(self, peer: PeerLimits, compressed: bool) -> Framing:
        mine = self._limits
        return Framing(
            chunk_bytes=min(mine.chunk_bytes, peer.chunk_bytes),
            message_bytes=min(mine.message_bytes, peer.message_bytes),
            parts=min(mine.parts, peer.parts),
            batch_bytes=mine.batch_bytes,
            compress=self._compress if compressed else None,
            compress_above_bytes=mine.compress_above_bytes,
        )

    # --- state

    def lane_statistics(self, lane: Lane) -> LaneStatistics:
        """A record of one lane."""
        out, into = self.out[lane], self.into[lane]
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
