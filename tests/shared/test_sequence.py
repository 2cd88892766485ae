"""Outbox and inbox of one lane."""

from __future__ import annotations

import dataclasses

import pytest

from kernel_guest.shared.errors import Fault, LinkProtocolError
from kernel_guest.shared.frames import DATA, FIRST, LAST, Frame
from kernel_guest.shared.messages import Lane
from kernel_guest.shared.sequence import Framing, Inbox, Outbox
from tests.shared.pair import SMALL, number_of, numbered

FRAMING = Framing(
    chunk_bytes=SMALL.chunk_bytes,
    message_bytes=SMALL.message_bytes,
    parts=SMALL.parts,
    batch_bytes=SMALL.batch_bytes,
    compress=None,
    compress_above_bytes=0,
)


def outbox(*sizes: int) -> Outbox:
    box = Outbox(Lane.ORDERED, SMALL)
    box.credit.window = SMALL.ordered_window_bytes
    for number, size in enumerate(sizes):
        box.push(numbered(number, size))
    return box


def take(box: Outbox, count: int = 10**6) -> list[Frame]:
    frames: list[Frame] = []
    while len(frames) < count and (found := box.next_frame(FRAMING)):
        flags, sequence, chunk = found
        payload = memoryview(b"".join(chunk))
        frames.append(Frame(DATA, flags, 1, 1, sequence, (0, 0), (0, 0), payload))
    return frames


def test_frames_are_numbered_and_marked() -> None:
    frames = take(outbox(300, 300))
    assert [frame.sequence for frame in frames] == list(range(1, len(frames) + 1))
    half = len(frames) // 2
    assert [frame.flags for frame in frames] == 2 * [FIRST, *[0] * (half - 2), LAST]


def test_a_compressor_that_fails_loses_no_message() -> None:
    def fail(body: bytes) -> bytes:
        raise MemoryError

    box = outbox(300, 10)
    before = box.queued_bytes
    with pytest.raises(MemoryError):
        box.next_frame(dataclasses.replace(FRAMING, compress=fail))
    assert (box.queued_messages, box.queued_bytes, box.unacked_bytes) == (2, before, 0)
    inbox = Inbox(Lane.ORDERED, SMALL)
    got = [number_of(message) for frame in take(box) for message in inbox.accept(frame)]
    assert got == [0, 1]


def test_a_rewind_begins_with_the_first_missing_frame() -> None:
    box = outbox(1_000, 1_000)
    total = len(take(box))
    for received in (0, 1, 5, 9, 10, 15, total):
        assert box.can_resume(received)
        box.rewind(received)
        again = take(box)
        assert [frame.sequence for frame in again] == list(range(received + 1, total + 1))
    assert box.resent_frames > 0


def test_a_rewind_amid_a_message_that_was_not_sent_to_its_end() -> None:
    box = outbox(1_000)
    take(box, 4)
    box.rewind(2)
    assert [frame.sequence for frame in take(box, 3)] == [3, 4, 5]


@pytest.mark.parametrize("received", [0, 2, 100])
def test_a_peer_that_claims_too_little_or_too_much_cannot_resume(received: int) -> None:
    box = outbox(1_000)
    take(box, 6)
    box.acknowledge(3, 0)
    assert not box.can_resume(received)


@pytest.mark.parametrize(("received", "consumed"), [(7, 0), (6, 1), (2**63, 0), (0, 2**63)])
def test_acknowledging_what_was_never_reached_is_an_error(received: int, consumed: int) -> None:
    box = outbox(1_000, 10)
    take(box, 6)
    with pytest.raises(LinkProtocolError) as caught:
        box.acknowledge(received, consumed)
    assert caught.value.fault is Fault.BAD_ACKNOWLEDGEMENT


def test_consuming_more_than_was_received_is_an_error() -> None:
    box = outbox(60, 60, 60)
    take(box)
    box.acknowledge(2, 1)
    with pytest.raises(LinkProtocolError):
        box.acknowledge(2, 3)
    box.acknowledge(3, 3)


def test_older_acknowledgements_change_nothing() -> None:
    box = outbox(60, 60)
    take(box)
    box.acknowledge(2, 2)
    box.acknowledge(1, 1)
    assert (box.received, box.consumed, box.unacked_bytes) == (2, 2, 0)


def test_a_late_acknowledgement_may_know_more_than_was_resent() -> None:
    """Then what it covers is not resent."""
    box = outbox(1_000, 500, 10)
    total = len(take(box))
    box.rewind(0)
    take(box, 2)
    box.acknowledge(5, 0)
    assert take(box, 1)[0].sequence == 6
    box.rewind(5)
    box.acknowledge(total - 1, 0)
    assert [frame.sequence for frame in take(box)] == [total]


def test_frames_go_when_received_and_messages_when_consumed() -> None:
    box = outbox(1_000)
    total = len(take(box))
    box.acknowledge(total, 0)
    assert box._held[0].chunks == []
    assert box.unacked_bytes > 1_000
    box.acknowledge(total, 1)
    assert box.unacked_bytes == 0
    assert not box._held


def test_a_restart_numbers_from_one_with_what_was_not_consumed() -> None:
    box = outbox(10, 500, 10, 10)
    take(box, 4)
    box.acknowledge(1, 1)
    queued = box.queued_bytes
    box.restart()
    assert box.queued_bytes > queued
    assert box.unacked_bytes == 0
    inbox = Inbox(Lane.ORDERED, SMALL)
    frames = take(box)
    got = [number_of(message) for frame in frames for message in inbox.accept(frame)]
    assert (frames[0].sequence, got) == (1, [1, 2, 3])
    assert box.queued_bytes == 0


def test_abandoning_tells_what_may_have_arrived_from_what_never_left() -> None:
    box = outbox(10, 500, 700, 10)
    take(box, 3)
    box.acknowledge(1, 1)
    in_flight, unsent = box.abandon()
    assert [number_of(message) for message in in_flight] == [1]
    assert [number_of(message) for message in unsent] == [2, 3]
    assert (box.queued_bytes, box.unacked_bytes, box.ready) == (0, 0, False)


def test_the_inbox_drops_what_it_has_and_refuses_a_hole() -> None:
    frames = take(outbox(300))
    inbox = Inbox(Lane.ORDERED, SMALL)
    inbox.accept(frames[0])
    assert inbox.accept(frames[0]) == []
    assert inbox.duplicates == 1
    with pytest.raises(LinkProtocolError) as caught:
        inbox.accept(frames[2])
    assert caught.value.fault is Fault.OUT_OF_ORDER
    assert inbox.received == 1
    assert inbox.accept(frames[1]) == []
    assert [number_of(message) for message in inbox.accept(frames[2])] == [0]
