"""One lane, one direction: what is numbered, kept, resent, dropped.

Outbox (sender), from the newest to the oldest:

    queue    messages not yet framed: no frame of them has ever existed
    waiting  units framed, not completely sent on the present transport
    sent     units sent on it, not acknowledged as received
    held     units received by the peer, messages not yet consumed by its application

A unit moves downwards; a cut moves it from `sent` back to `waiting`, from the first frame that
the peer lacks.  Frames are dropped on reaching `held`, messages when they are consumed.

Inbox (receiver): the next expected sequence, one unfinished message, and the credit account.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kernel_guest.shared.chunks import (
    ALL_KINDS,
    PREFIX_BYTES,
    Assembler,
    Chunk,
    Compress,
    Decompress,
    cost_of,
    pack,
    record_bytes,
)
from kernel_guest.shared.credit import ReceiveCredit, SendCredit, message_cost
from kernel_guest.shared.errors import Fault, LinkFull, LinkProtocolError, MessageRefused
from kernel_guest.shared.frames import FIRST, LAST, Frame
from kernel_guest.shared.limits import LinkLimits
from kernel_guest.shared.messages import Kind, Lane, LinkMessage, gap

Priced = tuple[LinkMessage, int]
"""A message and its cost, which is wanted often and computed once."""


@dataclass(slots=True)
class Unit:
    """Messages that were framed together, with the frames while they may have to be resent."""

    first_sequence: int
    last_sequence: int
    flags: int
    chunks: list[Chunk]
    messages: deque[Priced]


@dataclass(frozen=True, slots=True)
class Framing:
    """How units are made: the smaller of both sides' bounds, and the negotiated compression."""

    chunk_bytes: int
    message_bytes: int
    parts: int
    batch_bytes: int
    compress: Compress | None
    compress_above_bytes: int


class Outbox:
    """Sender of one lane."""

    def __init__(self, lane: Lane, limits: LinkLimits) -> None:
        self.lane = lane
        self.queued_bytes = 0
        self.credit = SendCredit()
        self.received = 0
        self.consumed = 0
        self.accepted_total = 0
        self.delivered_total = 0
        self.resent_frames = 0
        self._limits = limits
        self._queue: deque[Priced] = deque()
        self._waiting: deque[Unit] = deque()
        self._sent: deque[Unit] = deque()
        self._held: deque[Unit] = deque()
        self._held_messages = 0
        self._offset = 0
        self._next_sequence = 1
        self._high_sequence = 0

    # application side

    def push(self, message: LinkMessage) -> None:
        """Queue a message; raises `LinkFull` or `MessageRefused`."""
        limits, parts, size = self._limits, len(message.parts), message.size_bytes
        if parts > limits.parts:
            raise MessageRefused("parts", parts, limits.parts)
        if size > limits.message_bytes:
            raise MessageRefused("bytes", size, limits.message_bytes)
        cost = message_cost(size, 1, parts)
        if self._queue and self.queued_bytes + cost > limits.queue_bytes:
            raise LinkFull(self.lane.name.lower(), self.queued_bytes, limits.queue_bytes)
        self._queue.append((message, cost))
        self.queued_bytes += cost
        self.accepted_total += 1

    @property
    def queued_messages(self) -> int:
        """Messages not yet framed."""
        return len(self._queue)

    @property
    def next_sequence(self) -> int:
        """Sequence of the next new frame."""
        return self._next_sequence

    @property
    def unacked_bytes(self) -> int:
        """Cost of messages framed and not yet consumed by the peer."""
        return self.credit.outstanding

    # transport side

    @property
    def ready(self) -> bool:
        """Whether `next_frame` would give one."""
        if self._waiting:
            return True
        return bool(self._queue) and self.credit.admits(self._queue[0][1])

    def next_frame(self, framing: Framing) -> tuple[int, int, Chunk] | None:
        """Flags, sequence and payload of the next frame to send; None if there is none."""
        if not self._waiting and not (self._queue and self._frame_more(framing)):
            return None
        unit, offset = self._waiting[0], self._offset
        sequence = unit.first_sequence + offset
        flags = unit.flags | (FIRST if offset == 0 else 0)
        chunk = unit.chunks[offset]
        if offset + 1 == len(unit.chunks):
            flags |= LAST
            self._sent.append(self._waiting.popleft())
            self._offset = 0
        else:
            self._offset = offset + 1
        self._count(sequence)
        return flags, sequence, chunk

    def _count(self, sequence: int) -> None:
        if sequence <= self._high_sequence:
            self.resent_frames += 1
        else:
            self._high_sequence = sequence

    def _frame_more(self, framing: Framing) -> bool:
        """Make a unit of the next messages; nothing is taken from the queue if that fails."""
        chosen = self._select(framing)
        if not chosen:
            return False
        flags, chunks = pack(
            [message for message, _ in chosen],
            framing.chunk_bytes,
            framing.compress,
            framing.compress_above_bytes,
        )
        for _, cost in chosen:
            self.queued_bytes -= self._queue.popleft()[1]
            self.credit.spend(cost)
        first = self._next_sequence
        self._next_sequence += len(chunks)
        self._waiting.append(Unit(first, self._next_sequence - 1, flags, chunks, deque(chosen)))
        return True

    def _select(self, framing: Framing) -> list[Priced]:
        """The messages of the next unit: one, or as many small ones as fit into one chunk."""
        chosen: list[Priced] = []
        total, room = 0, min(framing.batch_bytes, framing.chunk_bytes - PREFIX_BYTES)
        for message, cost in self._queue:
            room -= record_bytes(message, cost)
            if chosen and room < 0:
                break
            sent = self._fit(message, cost, framing)
            total += sent[1]
            if not self.credit.admits(total, len(chosen) + 1):
                break
            chosen.append(sent)
        return chosen

    def _fit(self, message: LinkMessage, cost: int, framing: Framing) -> Priced:
        """The message, or a gap in its place if the peer declared that it takes no such size."""
        if cost <= framing.message_bytes and len(message.parts) <= framing.parts:
            return message, cost
        size = message.size_bytes
        if size <= framing.message_bytes and len(message.parts) <= framing.parts:
            return message, cost
        instead = gap(1, size, self.lane)
        return instead, cost_of(instead)

    # acknowledgement

    def acknowledge(self, received: int, consumed: int) -> None:
        """Apply cumulative numbers of the peer; older ones change nothing.

        Raises `LinkProtocolError` for numbers that were never reached.
        """
        if received > self._high_sequence:
            raise LinkProtocolError(Fault.BAD_ACKNOWLEDGEMENT, f"received {received}")
        if received > self.received:
            self._acknowledge_received(received)
        if consumed > self.consumed:
            if consumed - self.consumed > self._held_messages:
                raise LinkProtocolError(Fault.BAD_ACKNOWLEDGEMENT, f"consumed {consumed}")
            self._acknowledge_consumed(consumed - self.consumed)

    def _acknowledge_received(self, received: int) -> None:
        self.received = received
        while self._sent and self._sent[0].last_sequence <= received:
            self._hold(self._sent.popleft())
        if self._sent:
            return
        while self._waiting and self._waiting[0].last_sequence <= received:
            self._hold(self._waiting.popleft())
            self._offset = 0
        if self._waiting:  # the peer may know more than we sent on this transport
            self._offset = max(self._offset, received + 1 - self._waiting[0].first_sequence)

    def _hold(self, unit: Unit) -> None:
        unit.chunks = []
        self._held.append(unit)
        self._held_messages += len(unit.messages)

    def _acknowledge_consumed(self, count: int) -> None:
        self.consumed += count
        self.delivered_total += count
        self._held_messages -= count
        for _ in range(count):
            unit = self._held[0]
            self.credit.release(unit.messages.popleft()[1])
            if not unit.messages:
                self._held.popleft()

    # after a cut

    def can_resume(self, received: int) -> bool:
        """Whether a peer that says it received so much can be served from here."""
        return self.received <= received <= self._high_sequence

    def rewind(self, received: int) -> None:
        """A new transport of the same stream: go on with the first frame the peer lacks."""
        self._acknowledge_received(received)
        self._sent.extend(self._waiting)
        self._waiting, self._sent = self._sent, deque()
        self._offset = 0
        if self._waiting:
            self._offset = max(0, received + 1 - self._waiting[0].first_sequence)

    def restart(self) -> None:
        """A new stream: number from 1 again, beginning with the first message not consumed."""
        again = self._framed()
        self._queue.extendleft(reversed(again))
        self.queued_bytes += sum(cost for _, cost in again)
        self._forget_frames()

    def abandon(self) -> tuple[list[LinkMessage], list[LinkMessage]]:
        """The peer is another one: give back what it may have had, and what never left."""
        in_flight = [message for message, _ in self._framed()]
        unsent = [message for message, _ in self._queue]
        self._queue.clear()
        self.queued_bytes = 0
        self._forget_frames()
        return in_flight, unsent

    def _framed(self) -> list[Priced]:
        units = (*self._held, *self._sent, *self._waiting)
        return [priced for unit in units for priced in unit.messages]

    def _forget_frames(self) -> None:
        for units in (self._held, self._sent, self._waiting):
            units.clear()
        self.received = self.consumed = self._held_messages = 0
        self._offset = self._high_sequence = 0
        self._next_sequence = 1
        self.credit.outstanding = 0


class Inbox:
    """Receiver of one lane."""

    def __init__(self, lane: Lane, limits: LinkLimits, kinds: frozenset[Kind] = ALL_KINDS) -> None:
        self.received = 0
        self.duplicates = 0
        self.delivered_total = 0
        self.credit = ReceiveCredit()
        self._lane = lane
        self._limits = limits
        self._window = limits.windows[lane]
        self._kinds = kinds
        self._assembler = Assembler(lane, limits, None, kinds)

    @property
    def held_bytes(self) -> int:
        """Bytes of an unfinished message."""
        return self._assembler.held_bytes

    def accept(self, frame: Frame) -> list[LinkMessage]:
        """Take a DATA frame; the messages that it completes.  A frame that raises was not taken."""
        if frame.sequence <= self.received:
            self.duplicates += 1
            return []
        if frame.sequence != self.received + 1:
            raise LinkProtocolError(Fault.OUT_OF_ORDER, f"{frame.sequence} after {self.received}")
        prefix = self._assembler.announced(frame.flags, frame.payload)
        if prefix is not None:
            self.credit.check(prefix.cost, self._window, prefix.messages)
        messages = self._assembler.add(frame.flags, frame.payload, prefix)
        self.received = frame.sequence
        for message in messages:
            size = message.size_bytes
            self.credit.deliver(size, message_cost(size, 1, len(message.parts)))
        self.delivered_total += len(messages)
        return messages

    def restart(self, decompress: Decompress | None) -> None:
        """A new stream: expect sequence 1, forget an unfinished message."""
        self.received = 0
        self.credit.reset()
        self._assembler = Assembler(self._lane, self._limits, decompress, self._kinds)
