"""The link core: handshake, orders, resume, fresh attachment, bounds."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kernel_guest.shared import frames as wire_frames
from kernel_guest.shared import hello
from kernel_guest.shared.errors import Fault, LinkFull, LinkProtocolError, MessageRefused
from kernel_guest.shared.limits import LinkLimits
from kernel_guest.shared.link import LinkCore, LinkIdentity, Phase, Refused, Role
from kernel_guest.shared.messages import Channel, Kind, Lane, LinkMessage, call, event, reply
from tests.shared.pair import (
    SESSION,
    SMALL,
    ZLIB,
    Pair,
    make_gateway,
    make_guest,
    number_of,
    numbered,
    numbers,
    prove,
    verify,
)


def lanes_of(frames: list[bytes]) -> list[int]:
    return [frame[2] for frame in frames if frame[0] == wire_frames.DATA]


# --- handshake


def test_both_sides_are_established_and_say_so() -> None:
    pair = Pair().open()
    assert pair.last_established(Role.GUEST).resumed is False
    assert pair.last_established(Role.GATEWAY).boot_id == "boot-1"
    assert repr(pair.guest).startswith("<LinkCore guest up stream=1 queued=0 unacked=0")
    assert pair.guest.statistics().fresh_attachments == 1
    assert not pair.guest.wants_output


def test_nothing_is_sent_before_the_handshake_has_passed() -> None:
    pair = Pair()
    pair.guest.send(numbered(1))
    assert not pair.guest.wants_output
    pair.connect()
    assert [frame[0] for frame in pair.guest.take_frames(10**6)] == [1]


@pytest.mark.parametrize(
    ("identity", "code"),
    [
        (LinkIdentity("another", 1, 5), "wrong_session"),
        (LinkIdentity(SESSION, 2, 5), "stale_generation"),
        (LinkIdentity(SESSION, 1, 4), "stale_epoch"),
    ],
)
def test_who_may_not_attach_is_refused_with_a_code(identity: LinkIdentity, code: str) -> None:
    guest = make_guest(identity=LinkIdentity(SESSION, 1, 5, "boot"))
    pair = Pair(guest, make_gateway(identity=identity))
    pair.connect()
    pair.pump()
    assert pair.refusal(Role.GUEST).code == code
    assert pair.refusal(Role.GATEWAY).code == code
    assert pair.gateway.phase is Phase.REFUSED
    assert pair.refusal(Role.GATEWAY).error().code == code


def test_a_wrong_signature_is_refused_before_anything_else_is_said() -> None:
    stranger = make_gateway(
        identity=LinkIdentity("another", 9, 9), prove=lambda message: prove(message, b"guess")
    )
    pair = Pair(gateway=stranger)
    pair.connect()
    pair.pump()
    assert pair.refusal(Role.GATEWAY).code == "bad_signature"


def test_a_guest_before_run_refuses() -> None:
    pair = Pair(make_guest(identity=LinkIdentity(boot_id="boot")))
    pair.connect()
    pair.pump()
    assert pair.refusal(Role.GATEWAY).code == "not_running"


def test_a_newer_epoch_is_remembered() -> None:
    pair = Pair(gateway=make_gateway(epoch=7)).open()
    pair.cut()
    pair.gateway = make_gateway(epoch=6)
    pair.connect()
    pair.pump()
    assert pair.refusal(Role.GATEWAY).code == "stale_epoch"


def test_versions_without_overlap_end_in_a_refusal_of_the_gateway() -> None:
    gateway = make_gateway()
    gateway.connected()
    challenge = hello.Challenge((7, 9), (), "nonce", "boot")
    events = gateway.receive_frame(hello.encode_challenge(challenge))
    assert [event.code for event in events if isinstance(event, Refused)] == ["no_common_version"]


def test_the_highest_common_version_is_chosen() -> None:
    assert hello.common_version((1, 3), (2, 5)) == 3
    assert hello.common_version((2, 5), (1, 3)) == 3
    assert hello.common_version((1, 1), (2, 2)) is None


def test_features_that_one_side_lacks_are_not_used() -> None:
    pair = Pair(make_guest(SMALL, **ZLIB), make_gateway(SMALL)).open()
    pair.guest.send(numbered(1, 5000))
    pair.pump()
    assert numbers(pair.messages(Role.GATEWAY)) == [1]


def test_a_signature_of_another_challenge_does_not_pass() -> None:
    guest, gateway = make_guest(), make_gateway()
    guest.connected(), gateway.connected()
    gateway.receive_frame(guest.take_frames(1)[0])
    recorded = gateway.take_frames(1)[0]
    guest.connected()
    assert [type(e) for e in guest.receive_frame(recorded)] == [Refused]


def test_repeated_handshake_frames_change_nothing() -> None:
    pair = Pair()
    pair.connect()
    for role in (Role.GUEST, Role.GATEWAY, Role.GUEST):
        pair.take(role)
        pair.deliver(role)
        pair.feed(
            Role.GUEST if role is Role.GATEWAY else Role.GATEWAY, pair.wires[role].arrived[-1]
        )
    assert pair.guest.established
    assert pair.gateway.established


def test_a_welcome_to_another_challenge_is_not_taken() -> None:
    pair = Pair()
    pair.connect()
    for role in (Role.GUEST, Role.GATEWAY):
        pair.take(role)
        pair.deliver(role)
    late = pair.guest.take_frames(0)[0]
    pair.connect()
    pair.take(Role.GUEST)
    pair.deliver(Role.GUEST)
    with pytest.raises(LinkProtocolError) as caught:
        pair.gateway.receive_frame(late)
    assert caught.value.fault is Fault.BAD_HANDSHAKE


@pytest.mark.parametrize("received", [(0, 1), (9, 0)])
def test_a_welcome_that_claims_what_was_never_sent_is_refused(received: tuple[int, int]) -> None:
    pair = Pair().open()
    pair.cut()
    pair.connect()
    for role in (Role.GUEST, Role.GATEWAY):
        pair.take(role, 0)
        pair.deliver(role)
    told = hello.decode_welcome(pair.guest.take_frames(0)[0])
    with pytest.raises(LinkProtocolError):
        pair.gateway.receive_frame(
            hello.encode_welcome(dataclasses.replace(told, received=received))
        )


@pytest.mark.parametrize("frame", [b"", b"\x01{}", b"\x03{}", b"\x04{}", b"\x00", b"\x07" * 60])
@pytest.mark.parametrize("role", list(Role))
def test_what_is_not_expected_ends_the_transport(role: Role, frame: bytes) -> None:
    pair = Pair().open()
    with pytest.raises(LinkProtocolError):
        pair.core(role).receive_frame(frame)
    assert pair.core(role).phase is Phase.DOWN
    assert pair.core(role).statistics().protocol_errors == 1
    pair.cut()
    pair.open()
    assert pair.last_established(role).resumed


def test_data_before_the_handshake_is_refused() -> None:
    spoken = Pair().open()
    spoken.guest.send(numbered(1))
    gateway = make_gateway()
    gateway.connected()
    with pytest.raises(LinkProtocolError) as caught:
        gateway.receive_frame(spoken.guest.take_frames(1)[0])
    assert caught.value.fault is Fault.UNEXPECTED


def test_frames_after_the_end_of_a_transport_are_dropped_and_counted() -> None:
    pair = Pair().open()
    pair.guest.send(numbered(1))
    frame = pair.guest.take_frames(1)[0]
    pair.cut()
    assert pair.gateway.receive_frame(frame) == []
    assert pair.gateway.statistics().stray_frames == 1


def test_a_stranger_does_not_disturb_the_established_link() -> None:
    pair = Pair().open()
    begun = pair.guest.greet()
    stranger = make_gateway(prove=lambda message: b"no")
    stranger.connected()
    stranger.receive_frame(begun.frame)
    answer, outcome = pair.guest.answer(begun, stranger.take_frames(1)[0])
    assert isinstance(outcome, Refused)
    assert answer[0] == wire_frames.FrameType.REFUSE
    with pytest.raises(LinkProtocolError):
        pair.guest.answer(pair.guest.greet(), b"\x02garbage")
    pair.guest.send(numbered(1))
    pair.pump()
    assert numbers(pair.messages(Role.GATEWAY)) == [1]


def test_a_newer_connection_that_passes_replaces_the_older_one() -> None:
    pair = Pair().open()
    pair.guest.send(numbered(1, 5000))
    pair.take(Role.GUEST)  # lost with the older socket
    begun = pair.guest.greet()
    pair.gateway.connected()
    pair.feed(Role.GATEWAY, begun.frame)
    welcome, outcome = pair.guest.answer(begun, pair.gateway.take_frames(1)[0])
    assert getattr(outcome, "resumed", None) is True
    pair.wires[Role.GUEST].frames.clear()
    pair.feed(Role.GATEWAY, welcome)
    pair.pump()
    assert numbers(pair.messages(Role.GATEWAY)) == [1]


def test_constructor_demands_what_the_role_needs() -> None:
    with pytest.raises(ValueError, match="prove"):
        LinkCore(role=Role.GATEWAY, identity=LinkIdentity(), verify=verify)
    with pytest.raises(ValueError, match="verify"):
        LinkCore(role=Role.GUEST, identity=LinkIdentity(), prove=prove)
    with pytest.raises(ValueError, match="together"):
        make_guest(compress=lambda body: body)


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
    pair = Pair().open()
    pair.guest.send(numbered(1))
    late = pair.guest.take_frames(10**6)
    pair.cut()
    pair.gateway = make_gateway()
    pair.open()
    for frame in late:
        pair.feed(Role.GATEWAY, frame)
    assert numbers(pair.messages(Role.GATEWAY)) == [1]


# --- bounds


def test_credit_stops_the_sender_until_the_application_has_consumed() -> None:
    pair = Pair(make_guest(SMALL), make_gateway(SMALL)).open()
    pair.on_received = lambda role, message: None
    for number in range(30):
        pair.guest.send(numbered(number, 700))
    pair.pump()
    first = pair.messages(Role.GATEWAY)
    assert sum(message.size_bytes for message in first) <= SMALL.ordered_window_bytes
    assert not pair.guest.wants_output
    pair.gateway.consumed(first[0].size_bytes)
    pair.pump()
    assert numbers(pair.messages(Role.GATEWAY)) == list(range(len(first) + 1))


def test_lanes_have_separate_credit() -> None:
    pair = Pair(make_guest(SMALL), make_gateway(SMALL)).open()
    pair.on_received = lambda role, message: None
    for number in range(30):
        pair.guest.send(numbered(number, 700))
    pair.guest.send(numbered(99, 10, Channel.CONTROL))
    pair.pump()
    assert 99 in numbers(pair.messages(Role.GATEWAY))


def test_a_message_above_the_window_travels_alone() -> None:
    pair = Pair(make_guest(SMALL), make_gateway(SMALL)).open()
    pair.guest.send(numbered(1, 10))
    pair.guest.send(numbered(2, 15_000))
    pair.guest.send(numbered(3, 10))
    pair.pump()
    assert numbers(pair.messages(Role.GATEWAY)) == [1, 2, 3]


def test_a_peer_that_ignores_credit_is_stopped() -> None:
    generous = dataclasses.replace(SMALL, ordered_window_bytes=10**6)
    pair = Pair(make_guest(generous), make_gateway(SMALL))
    pair.on_received = lambda role, message: None
    pair.open()
    pair.guest._stream.out[Lane.ORDERED].credit.window = 10**6
    for number in range(30):
        pair.guest.send(numbered(number, 700))
    with pytest.raises(LinkProtocolError) as caught:
        pair.pump()
    assert caught.value.fault is Fault.CREDIT_EXCEEDED


def test_a_peer_that_grants_the_moon_does_not_make_us_keep_it() -> None:
    pair = Pair(make_guest(dataclasses.replace(SMALL, ordered_window_bytes=2**40)), None)
    pair.gateway = make_gateway(SMALL)
    pair.on_received = lambda role, message: None
    pair.open()
    for number in range(40):
        pair.gateway.send(numbered(number, 700, Channel.SHELL))
    pair.pump()
    assert pair.gateway.unacked_bytes <= SMALL.ordered_window_bytes


def test_a_full_queue_refuses_and_low_water_asks_for_more() -> None:
    guest = make_guest(SMALL)
    assert guest.wants_more
    while guest.queued_bytes + 2000 < SMALL.queue_bytes:
        guest.send(numbered(1, 700))
    with pytest.raises(LinkFull) as caught:
        guest.send(numbered(1, 2000))
    assert caught.value.lane == "ordered"
    assert guest.queued_bytes <= SMALL.queue_bytes
    assert not guest.wants_more
    assert guest.wants_more_of(Lane.URGENT)
    guest.send(numbered(1, 700, Channel.CONTROL))


def test_messages_above_the_caps_are_refused_when_sent() -> None:
    guest = make_guest(SMALL)
    with pytest.raises(MessageRefused, match="bytes"):
        guest.send(numbered(1, SMALL.message_bytes + 1))
    with pytest.raises(MessageRefused, match="parts"):
        guest.send(dataclasses.replace(numbered(1), parts=(b"",) * (SMALL.parts + 1)))


def test_what_the_peer_does_not_take_becomes_a_gap_in_its_place() -> None:
    pair = Pair(make_guest(), make_gateway(SMALL)).open()
    pair.guest.send(numbered(1))
    pair.guest.send(numbered(2, 25_000))
    pair.guest.send(numbered(3))
    pair.pump()
    got = pair.messages(Role.GATEWAY)
    assert [message.kind for message in got] == [Kind.JUPYTER, Kind.GAP, Kind.JUPYTER]
    assert got[1].json() == {"messages": 1, "bytes": numbered(2, 25_000).size_bytes}


def test_reporting_more_than_was_received_is_a_mistake_of_the_caller() -> None:
    pair = Pair().open()
    with pytest.raises(ValueError, match="consumed"):
        pair.gateway.consumed(1)


def test_delivered_counts_what_the_peer_has_consumed() -> None:
    pair = Pair().open()
    pair.on_received = lambda role, message: None
    pair.guest.send(numbered(1))
    pair.guest.send(reply(1, {}))
    pair.pump()
    assert (pair.guest.accepted, pair.guest.delivered) == ((1, 1), (0, 0))
    assert pair.guest.unacked_bytes > 0
    assert not pair.guest.idle
    pair.gateway.consumed(pair.messages(Role.GATEWAY)[0].size_bytes, Lane.URGENT)
    pair.pump()
    assert pair.guest.delivered == (1, 0)
    assert pair.gateway.received == (1, 1)


def test_an_idle_link_is_silent() -> None:
    pair = Pair().open()
    pair.guest.send(numbered(1))
    pair.gateway.send(call(1, "activity", {}))
    pair.pump()
    assert pair.guest.idle
    assert pair.gateway.idle
    assert pair.guest.take_frames(10**6) == pair.gateway.take_frames(10**6) == []


@pytest.mark.parametrize(
    ("speaker", "message"),
    [
        (Role.GUEST, call(1, "start", {})),
        (Role.GATEWAY, reply(1, {})),
        (Role.GATEWAY, event("kernel_exited", {})),
    ],
)
def test_kinds_that_a_side_has_no_business_to_send_are_refused(
    speaker: Role, message: LinkMessage
) -> None:
    pair = Pair().open()
    pair.core(speaker).send(message)
    with pytest.raises(LinkProtocolError) as caught:
        pair.pump()
    assert caught.value.fault is Fault.BAD_MESSAGE


# --- compression


def test_compression_is_used_where_it_pays() -> None:
    pair = Pair(make_guest(SMALL, **ZLIB), make_gateway(SMALL, **ZLIB)).open()
    pair.guest.send(numbered(1, 5000))
    pair.take(Role.GUEST)
    assert sum(map(len, pair.wires[Role.GUEST].frames)) < 1000
    pair.pump()
    assert pair.messages(Role.GATEWAY) == [numbered(1, 5000)]


def test_what_does_not_shrink_is_sent_as_it_is() -> None:
    kept = dict(ZLIB, compress=lambda body: body + b"!")
    pair = Pair(make_guest(SMALL, **kept), make_gateway(SMALL, **ZLIB)).open()
    pair.guest.send(numbered(1, 3000))
    pair.pump()
    assert pair.messages(Role.GATEWAY) == [numbered(1, 3000)]


def test_a_bomb_ends_in_the_typed_error() -> None:
    bomb = dict(ZLIB, compress=lambda body: ZLIB["compress"](bytes(10_000_000)))
    asked: list[int] = []

    def decompress(body: bytes, max_bytes: int) -> bytes:
        asked.append(max_bytes)
        inflated: bytes = ZLIB["decompress"](body, max_bytes)
        return inflated

    limits = LinkLimits()
    pair = Pair(
        make_guest(limits, **bomb), make_gateway(limits, **dict(ZLIB, decompress=decompress))
    )
    pair.open()
    pair.guest.send(numbered(1, 100_000))
    with pytest.raises(LinkProtocolError) as caught:
        pair.pump()
    assert caught.value.fault is Fault.BAD_COMPRESSION
    assert asked == [100_000 + len(b"signature1{}{}") + 4 + 5 * 4]


def test_a_batch_is_compressed_as_a_whole() -> None:
    limits = LinkLimits()
    pair = Pair(make_guest(limits, **ZLIB), make_gateway(limits, **ZLIB)).open()
    sent = [numbered(number, 800) for number in range(60)]
    for message in sent:
        pair.guest.send(message)
    pair.take(Role.GUEST)
    assert sum(map(len, pair.wires[Role.GUEST].frames)) < 10_000
    pair.pump()
    assert pair.messages(Role.GATEWAY) == sent


# --- state


def test_statistics_are_plain_data() -> None:
    pair = Pair().open()
    pair.guest.send(numbered(1, 100))
    record = dataclasses.asdict(pair.guest.statistics())
    assert json.loads(json.dumps(record)) == record
    assert record["ordered"]["queued_messages"] == 1
    assert record["phase"] == "up"
