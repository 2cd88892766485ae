"""Reading and writing single messages."""

from __future__ import annotations

import json

import pytest
from jupyter_client.session import Session

from kernel_guest.jupyter_parts import (
    CONTENT,
    HEADER,
    compose,
    is_type,
    make_signer,
    member,
    text,
    unknown_outcome,
)


@pytest.mark.parametrize("part", [b"", b"[]", b"1", b"{", b"\xff", b'{"b":1}'])
def test_nonsense_has_no_members(part: bytes) -> None:
    assert member(part, "a") is None
    assert text(part, "a") == ""


def test_only_text_is_text() -> None:
    assert text(b'{"a": 1}', "a") == ""
    assert text(b'{"a": "x"}', "a") == "x"


def test_a_type_is_recognised_in_any_spacing_and_not_elsewhere() -> None:
    assert is_type(b'{"msg_type":"status"}', "status")
    assert is_type(b'{"msg_type" :  "status", "a": 1}', "status")
    assert not is_type(b'{"msg_type": "stream", "session": "status"}', "status")


@pytest.mark.parametrize("key", [b"", b"secret"])
def test_signatures_are_those_of_a_session(key: bytes) -> None:
    session = Session(key=key)
    sign = make_signer(key, "hmac-sha256")
    parts = [b"{1}", b"{2}", b"{3}", b"{4}"]
    assert sign(parts) == session.sign(parts)


@pytest.mark.parametrize("scheme", ["", "hmac", "hmac-", "hmac-none", "md5", "rsa-sha256"])
def test_unknown_schemes_are_refused(scheme: str) -> None:
    with pytest.raises(ValueError, match="not supported"):
        make_signer(b"k", scheme)


def test_composed_messages_are_accepted_by_a_session() -> None:
    session = Session(key=b"k")
    sign = make_signer(b"k", "hmac-sha256")
    request = session.msg("execute_request", {})
    header = session.serialize(request)[2]
    reply, idle = unknown_outcome(sign, header)
    for parts in (reply, idle):
        message = session.deserialize(parts)
        assert message["parent_header"]["msg_id"] == request["header"]["msg_id"]
    assert text(reply[HEADER], "msg_type") == "execute_reply"
    assert json.loads(reply[CONTENT])["ename"] == "OutcomeUnknown"
    assert text(idle[CONTENT], "execution_state") == "idle"


def test_each_composed_message_has_its_own_id() -> None:
    sign = make_signer(b"k", "hmac-sha256")
    first = compose(sign, "interrupt_request", b"{}", {})
    second = compose(sign, "interrupt_request", b"{}", {})
    assert text(first[HEADER], "msg_id") != text(second[HEADER], "msg_id")
