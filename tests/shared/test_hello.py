"""The handshake's values."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_guest.shared import hello
from kernel_guest.shared.errors import Fault, LinkProtocolError
from kernel_guest.shared.frames import FrameType
from kernel_guest.shared.hello import Challenge, Hello, LinkIdentity, RefusalCode, Welcome
from kernel_guest.shared.limits import LinkLimits

LIMITS = hello.declared(LinkLimits())
CHALLENGE = Challenge((1, 3), ("compress:zstd",), "00ff", "boot-1")
HELLO = Hello(1, ("compress:zstd",), "kernel-1", 2, 3, 4, (5, 6), LIMITS)
WELCOME = Welcome("00ff", 4, (5, 6), (7, 8), LIMITS)


def test_round_trips() -> None:
    assert hello.decode_challenge(hello.encode_challenge(CHALLENGE)) == CHALLENGE
    assert hello.decode_welcome(hello.encode_welcome(WELCOME)) == WELCOME
    assert hello.decode_hello(hello.encode_hello_body(HELLO)) == HELLO
    fresh = dataclasses.replace(HELLO, stream=None, received=(0, 0))
    assert hello.decode_hello(hello.encode_hello_body(fresh)) == fresh
    body = hello.encode_hello_body(HELLO)
    assert hello.split_hello(hello.encode_hello(body, b"signature")) == (body, b"signature")


@pytest.mark.parametrize("code", RefusalCode)
def test_every_refusal_has_a_text(code: RefusalCode) -> None:
    assert hello.decode_refuse(hello.encode_refuse(code)) == (code, hello.REFUSAL_TEXTS[code])


def test_members_of_a_later_version_are_ignored() -> None:
    for frame, decode in (
        (hello.encode_challenge(CHALLENGE), hello.decode_challenge),
        (hello.encode_welcome(WELCOME), hello.decode_welcome),
    ):
        later = frame[:1] + json.dumps(json.loads(frame[1:]) | {"later": [1]}).encode()
        assert decode(later) == decode(frame)


def test_the_signature_covers_challenge_and_answer_without_ambiguity() -> None:
    assert hello.transcript(b"ab", b"c") != hello.transcript(b"a", b"bc")
    assert hello.transcript(b"ab", b"c").startswith(hello.DOMAIN)


GUEST = LinkIdentity("kernel-1", 2, 3, "boot-1")


@pytest.mark.parametrize(
    ("changes", "signed", "code"),
    [
        ({}, True, None),
        ({"epoch": 4}, True, None),
        ({"epoch": 2}, True, RefusalCode.STALE_EPOCH),
        ({"generation": 1}, True, RefusalCode.STALE_GENERATION),
        ({"generation": 3}, True, RefusalCode.STALE_GENERATION),
        ({"kernel_session": "x"}, True, RefusalCode.WRONG_SESSION),
        ({"version": 2}, True, RefusalCode.NO_COMMON_VERSION),
        ({"kernel_session": "x", "version": 9, "epoch": 0}, False, RefusalCode.BAD_SIGNATURE),
    ],
)
def test_judgement(changes: dict[str, Any], signed: bool, code: RefusalCode | None) -> None:
    assert hello.judge(dataclasses.replace(HELLO, **changes), GUEST, signed) is code


def test_a_guest_without_identity_refuses_whatever_is_said() -> None:
    assert hello.judge(HELLO, LinkIdentity(), True) is RefusalCode.NOT_RUNNING


def broken(frame: bytes, **changes: Any) -> bytes:
    return json.dumps(json.loads(frame) | changes).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": [1]},
        {"versions": [1, -1]},
        {"versions": [1, True]},
        {"versions": "12"},
        {"features": [1]},
        {"features": ["x"] * 33},
        {"features": ["x" * 129]},
        {"nonce": 7},
        {"nonce": "x" * 129},
        {"boot_id": None},
    ],
)
def test_broken_challenges_are_refused(changes: dict[str, Any]) -> None:
    body = broken(hello.encode_challenge(CHALLENGE)[1:], **changes)
    with pytest.raises(LinkProtocolError) as caught:
        hello.decode_challenge(b"\x01" + body)
    assert caught.value.fault is Fault.BAD_HANDSHAKE


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "1"},
        {"fresh": 0},
        {"stream": 2**32},
        {"received": [0, 2**63]},
        {"limits": None},
        {"limits": {}},
        {"limits": {"chunk_bytes": 1, "message_bytes": 1, "parts": 1, "windows": [1, 1]}},
        {"limits": {"chunk_bytes": 2**30, "message_bytes": 1, "parts": 1, "windows": [1, 1]}},
    ],
)
def test_broken_hellos_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(LinkProtocolError):
        hello.decode_hello(broken(hello.encode_hello_body(HELLO), **changes))


@pytest.mark.parametrize(
    "frame",
    [
        b"\x02",
        b"\x02\x00",
        b"\x02\x00\x05abc",
        b"\x02\x00\x00" + b"s" * 1025,
        b"\x02\x00\x00" + b"s" * hello.MAX_HANDSHAKE_BYTES,
    ],
)
def test_hello_frames_of_impossible_length_are_refused(frame: bytes) -> None:
    with pytest.raises(LinkProtocolError):
        hello.split_hello(frame)


def test_a_welcome_without_a_stream_is_refused() -> None:
    body = broken(hello.encode_welcome(WELCOME)[1:], stream=0)
    with pytest.raises(LinkProtocolError):
        hello.decode_welcome(b"\x03" + body)


@given(data=st.binary(max_size=200), kind=st.sampled_from(list(FrameType)))
def test_garbage_gives_the_one_error(data: bytes, kind: FrameType) -> None:
    frame = bytes((kind,)) + data
    decoders = (
        hello.decode_challenge,
        hello.decode_welcome,
        hello.decode_refuse,
        hello.decode_hello,
    )
    for decode in decoders:
        with pytest.raises(LinkProtocolError):
            decode(frame)
