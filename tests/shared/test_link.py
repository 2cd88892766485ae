"""The link core: orders, resume, fresh attachment."""

from __future__ import annotations

import pytest

from kernel_guest.shared import frames as wire_frames
from kernel_guest.shared.errors import Fault, LinkProtocolError
from kernel_guest.shared.link import Phase, Role
from kernel_guest.shared.messages import Channel, call, event
from tests.shared.pair import (
    SMALL,
    Pair,
    make_gateway,
    make_guest,
    number_of,
    numbered,
    numbers,
)


def lanes_of(frames: list[bytes]) -> list[int]:
    return [frame[2] for frame in frames if frame[0] == wire_frames.DATA]


# --- orders


def test_one_order_within_the_ordered_lane() -> None:
    pair = Pair().open()
    sent = [
        numbered(1, 900_000),
        event("kernel_exited", {"pid": 1}),
        numbered(2, 10, Channel.SHELL),
        numbered(3),
    ]
    for message in sent:
        pair.guest.send(message)
    pair.pump()
    assert pair.messages(Role.GATEWAY) == sent


def test_control_overtakes_a_long_output() -> None:
    pair = Pair(make_guest(SMALL), make_gateway(SMALL)).open()
    pair.guest.send(numbered(1, 4000))
    pair.take(Role.GUEST, 500)
    pair.guest.send(numbered(2, 10, Channel.CONTROL))
    pair.pump()
    assert numbers(pair.messages(Role.GATEWAY)) == [2, 1]


def test_a_long_urgent_message_alternates_with_the_ordered_lane() -> None:
    pair = Pair(make_guest(SMALL), make_gateway(SMALL)).open()
    pair.guest.send(numbered(1, 1000, Channel.STDIN))
    pair.guest.send(numbered(2, 1000))
    lanes = lanes_of(pair.guest.take_frames(10**6))
    assert lanes[:6] == [0, 1, 0, 1, 0, 1]


def test_all_small_urgent_messages_go_before_anything_ordered() -> None:
    pair = Pair(make_guest(SMALL), make_gateway(SMALL)).open()
    pair.guest.send(numbered(1, 50))
    for number in range(2, 6):
        pair.guest.send(numbered(number, 50, Channel.CONTROL))
    assert lanes_of(pair.guest.take_frames(10**6)) == [0, 0, 0, 0, 1]


def test_small_messages_share_a_frame() -> None:
    pair = Pair().open()
    for number in range(1000):
        pair.guest.send(numbered(number, 40))
    frames = pair.guest.take_frames(10**9)
    assert len(frames) < 10
    pair.wires[Role.GUEST].frames.extend(frames)
    pair.pump()
    assert numbers(pair.messages(Role.GATEWAY)) == list(range(1000))


def test_budget_is_kept_but_for_one_frame() -> None:
    pair = Pair(make_guest(SMALL), make_gateway(SMALL)).open()
    pair.guest.send(numbered(1, 4000))
    taken = pair.guest.take_frames(1000)
    assert 1000 <= sum(map(len, taken)) < 1000 + SMALL.chunk_bytes + wire_frames.HEADER_BYTES
    assert pair.guest.wants_output


# --- resume


def test_resume_sends_exactly_what_the_peer_lacks() -> None:
    pair = Pair(make_guest(SMALL), make_gateway(SMALL)).open()
    pair.guest.send(numbered(1, 3000))
    pair.take(Role.GUEST)
    total = len(pair.wires[Role.GUEST].frames)
    pair.deliver(Role.GUEST, 10)
    pair.cut()
    pair.open()
    assert numbers(pair.messages(Role.GATEWAY)) == [1]
    assert pair.guest.statistics().ordered.resent_frames == total - 10
    assert pair.gateway.statistics().ordered.duplicates == 0
    assert pair.last_established(Role.GUEST).resumed
    assert pair.last_established(Role.GATEWAY).resumed


@pytest.mark.parametrize("seen", range(0, 60, 7))
def test_a_cut_before_any_frame_loses_nothing(seen: int) -> None:
    pair = Pair(make_guest(SMALL), make_gateway(SMALL)).open()
    for number in range(12):
        pair.guest.send(numbered(number, number * 40))
        pair.gateway.send(numbered(number, number * 30, Channel.SHELL))
    pair.take(Role.GUEST)
    pair.deliver(Role.GUEST, seen)
    pair.cut()
    pair.open()
    assert numbers(pair.messages(Role.GATEWAY)) == list(range(12))
    assert numbers(pair.messages(Role.GUEST)) == list(range(12))


def test_a_lost_acknowledgement_leads_to_no_resend() -> None:
    pair = Pair().open()
    pair.guest.send(numbered(1))
    pair.take(Role.GUEST)
    pair.deliver(Role.GUEST)
    pair.cut()
    pair.open()
    assert numbers(pair.messages(Role.GATEWAY)) == [1]
    assert pair.guest.statistics().ordered.resent_frames == 0
    assert pair.guest.idle


def test_a_large_message_makes_progress_over_a_link_that_is_always_cut() -> None:
    """30 MB at 1 MB/s (LM 4.4), cut every second: about 4 chunks each time."""
    pair = Pair().open()
    pair.guest.send(numbered(1, 30_000_000))
    cuts = 0
    while not pair.messages(Role.GATEWAY):
        pair.take(Role.GUEST, 1_000_000)
        pair.deliver(Role.GUEST, 4)
        pair.cut()
        pair.shake_hands()
        cuts += 1
    assert 25 <= cuts <= 35
    assert pair.messages(Role.GATEWAY) == [numbered(1, 30_000_000)]


def test_duplicates_are_dropped() -> None:
    pair = Pair(make_guest(SMALL), make_gateway(SMALL)).open()
    pair.guest.send(numbered(1, 1000))
    pair.pump()
    for frame in pair.wires[Role.GUEST].arrived[-5:]:
        pair.feed(Role.GATEWAY, frame)
    assert numbers(pair.messages(Role.GATEWAY)) == [1]
    assert pair.gateway.statistics().ordered.duplicates > 0


def test_a_hole_is_an_error_and_heals_by_reconnecting() -> None:
    pair = Pair(make_guest(SMALL), make_gateway(SMALL)).open()
    pair.guest.send(numbered(1, 1000))
    _first, *rest = pair.guest.take_frames(10**6)
    with pytest.raises(LinkProtocolError) as caught:
        pair.gateway.receive_frame(rest[0])
    assert caught.value.fault is Fault.OUT_OF_ORDER
    assert pair.gateway.phase is Phase.DOWN
    pair.cut()
    pair.open()
    assert numbers(pair.messages(Role.GATEWAY)) == [1]


# --- fresh attachment and restarts


def test_a_gateway_without_state_gets_all_that_was_not_consumed_whole() -> None:
    pair = Pair(make_guest(SMALL), make_gateway(SMALL)).open()
    consumed_until = 3

    def consume_some(role: Role, message: object) -> None:
        if role is Role.GATEWAY and number_of(pair.messages(role)[-1]) < consumed_until:
            pair.consume_at_once(role, pair.messages(role)[-1])

    pair.on_received = consume_some
    for number in range(8):
        pair.guest.send(numbered(number, 700))
    pair.pump()
    assert pair.guest.delivered == (0, 3)
    pair.cut()
    pair.gateway = make_gateway(SMALL)
    pair.events[Role.GATEWAY].clear()
    pair.on_received = pair.consume_at_once
    pair.open()
    assert numbers(pair.messages(Role.GATEWAY)) == [3, 4, 5, 6, 7]
    assert pair.guest.delivered == pair.guest.accepted == (0, 8)
    assert pair.guest.statistics().stream == 2


def test_a_gateway_without_state_gets_a_half_sent_message_from_its_beginning() -> None:
    pair = Pair(make_guest(SMALL), make_gateway(SMALL)).open()
    pair.guest.send(numbered(1, 3000))
    pair.take(Role.GUEST, 1000)
    pair.deliver(Role.GUEST, 5)
    pair.cut()
    pair.gateway = make_gateway(SMALL)
    pair.open()
    assert pair.messages(Role.GATEWAY) == [numbered(1, 3000)]


def test_messages_that_shared_a_frame_are_consumed_one_by_one() -> None:
    pair = Pair().open()
    pair.on_received = lambda role, message: None
    for number in range(10):
        pair.guest.send(numbered(number))
    pair.pump()
    for message in pair.messages(Role.GATEWAY)[:4]:
        pair.gateway.consumed(message.size_bytes)
    pair.pump()
    pair.cut()
    pair.gateway = make_gateway()
    pair.events[Role.GATEWAY].clear()
    pair.open()
    assert numbers(pair.messages(Role.GATEWAY)) == list(range(4, 10))


def test_a_half_received_request_of_a_lost_gateway_is_forgotten() -> None:
    pair = Pair(make_guest(SMALL), make_gateway(SMALL)).open()
    pair.gateway.send(numbered(1, 1500, Channel.SHELL))
    pair.take(Role.GATEWAY)
    pair.deliver(Role.GATEWAY, 3)
    assert pair.guest.statistics().ordered.unfinished_bytes > 0
    pair.cut()
    pair.gateway = make_gateway(SMALL)
    pair.open()
    assert pair.guest.statistics().ordered.unfinished_bytes == 0
    pair.gateway.send(numbered(2, 1500, Channel.SHELL))
    pair.pump()
    assert numbers(pair.messages(Role.GUEST)) == [2]


def test_the_gateway_that_was_replaced_is_refused_as_stale() -> None:
    pair = Pair().open()
    older = pair.gateway
    pair.cut()
    pair.gateway = make_gateway()
    pair.open()
    pair.cut()
    pair.gateway = older
    pair.connect()
    pair.pump()
    assert pair.refusal(Role.GATEWAY).code == "stale_stream"
    older.attach_fresh()
    pair.open()
    assert pair.last_established(Role.GATEWAY).restarted


def test_a_restarted_guest_is_reported_with_what_it_may_have_had() -> None:
    pair = Pair(make_guest(SMALL), make_gateway(SMALL)).open()
    pair.on_received = lambda role, message: None  # the guest consumes nothing
    for number in range(12):
        pair.gateway.send(numbered(number, 700, Channel.SHELL))
    pair.pump()
    assert 0 < len(pair.messages(Role.GUEST)) < 12
    pair.cut()
    pair.guest = make_guest(SMALL, boot_id="boot-2")
    pair.open()
    told = pair.last_established(Role.GATEWAY)
    assert (told.resumed, told.restarted, told.boot_id) == (False, True, "boot-2")
    assert numbers(told.in_flight + told.unsent) == list(range(12))
    assert numbers(told.in_flight) == numbers(pair.messages(Role.GUEST))
    assert pair.gateway.queued_bytes == pair.gateway.unacked_bytes == 0


def test_what_was_queued_before_the_first_attachment_is_sent() -> None:
    pair = Pair()
    pair.gateway.send(call(1, "start", {}))
    pair.open()
    assert [message.json()["op"] for message in pair.messages(Role.GUEST)] == ["start"]
    assert not pair.last_established(Role.GATEWAY).restarted


def test_a_lost_welcome_does_not_confuse_the_next_attachment() -> None:
    pair = Pair()
    pair.guest.send(numbered(1))
    pair.connect()
    for role in (Role.GUEST, Role.GATEWAY):
        pair.take(role)
        pair.deliver(role)
    pair.take(Role.GUEST)  # WELCOME and message 1
    pair.cut()
    pair.open()
    assert numbers(pair.messages(Role.GATEWAY)) == [1]


def test_late_consumption_of_an_older_stream_is_accepted() -> None:
    pair = Pair().open()
    pair.on_received = lambda role, message: None
    pair.gateway.send(numbered(1, 100, Channel.SHELL))
    pair.pump()
    pair.cut()
    pair.gateway = make_gateway()
    pair.open()
    pair.gateway.send(numbered(2, 50, Channel.SHELL))
    pair.pump()
    for message in pair.messages(Role.GUEST):
        pair.guest.consumed(message.size_bytes)
    pair.pump()
    assert pair.gateway.delivered == (0, 1)
    assert pair.guest.idle


def test_frames_of_an_older_stream_are_dropped() -> None:
    """Even those that would be the next ones by their number."""
    pair = Pair().open()
    pair.guest.send(numbered(1))
    pair.pump()
    pair.guest.send(numbered(2))
    late = pair.guest.take_frames(10**6)
    pair.cut()
    pair.gateway = make_gateway()
    pair.open()
    for frame in late:
        pair.feed(Role.GATEWAY, frame)
    assert numbers(pair.messages(Role.GATEWAY)) == [1, 2]
    assert pair.gateway.statistics().stray_frames == 1
