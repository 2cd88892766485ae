"""The link core: who may attach, and what a handshake does to what was before."""

from __future__ import annotations

import dataclasses

import pytest

from kernel_guest.shared import frames as wire_frames
from kernel_guest.shared import hello
from kernel_guest.shared.errors import Fault, LinkProtocolError
from kernel_guest.shared.link import LinkCore, LinkIdentity, Phase, Refused, Role
from tests.shared.pair import (
    SESSION,
    SMALL,
    ZLIB,
    Pair,
    make_gateway,
    make_guest,
    numbered,
    numbers,
    prove,
    verify,
)

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
