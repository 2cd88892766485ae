"""The link core: credit, queues, caps, compression."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kernel_guest.shared.errors import Fault, LinkFull, LinkProtocolError, MessageRefused
from kernel_guest.shared.limits import LinkLimits
from kernel_guest.shared.link import Role
from kernel_guest.shared.messages import Channel, Kind, Lane, LinkMessage, call, event, reply
from tests.shared.pair import (
    SMALL,
    ZLIB,
    Pair,
    make_gateway,
    make_guest,
    numbered,
    numbers,
)

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
