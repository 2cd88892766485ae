"""Message layouts: read, composed, signed, and routed back."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.session import Session

from gateway.messages import (
    DELIMITER,
    Composer,
    Header,
    MalformedMessage,
    ReplyRoutes,
    Signer,
    content_of,
    frames_of,
    header_of,
    parent_of,
    size_of,
    split_frames,
)

KEY = b"secret key"


def jupyter_session() -> Session:
    return Session(key=KEY, signature_scheme="hmac-sha256")


@given(st.lists(st.binary(max_size=40)), st.lists(st.binary(max_size=40), min_size=5))
def test_splitting_inverts_joining(identities: list[bytes], parts: list[bytes]) -> None:
    clean = [identity for identity in identities if identity != DELIMITER]
    assert split_frames(frames_of(clean, parts)) == (tuple(clean), tuple(parts))


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_garbage_is_malformed_and_nothing_else(frames: list[bytes]) -> None:
    try:
        _, parts = split_frames(frames)
    except MalformedMessage:
        assert DELIMITER not in frames or len(frames) - frames.index(DELIMITER) <= 5
    else:
        assert len(parts) >= 5


@given(st.tuples(*[st.binary(max_size=30)] * 5))
def test_headers_of_garbage_are_malformed_or_empty(parts: tuple[bytes, ...]) -> None:
    for read in (header_of, parent_of):
        with suppress(MalformedMessage):
            assert read(parts).msg_id == "" or b"msg_id" in parts[1] + parts[2]


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"{", "not JSON"),
        (b"[]", "not an object"),
        (b'{"msg_id": 1}', "not a string"),
        (b"[" * 100_000, "bytes"),
        (b"[" * 60_000, "not JSON"),
        (b'{"msg_id": "' + b"x" * 70_000 + b'"}', "bytes"),
    ],
)
def test_a_hostile_header_is_refused(header: bytes, problem: str) -> None:
    with pytest.raises(MalformedMessage, match=problem):
        header_of((b"", header, b"{}", b"{}", b"{}"))


def test_too_few_parts_are_malformed() -> None:
    with pytest.raises(MalformedMessage, match="2 parts"):
        content_of((b"", b"{}"))


def test_jupyter_accepts_what_we_compose_and_we_what_it_signs() -> None:
    theirs = jupyter_session()
    ours = Composer(Signer(KEY), session="kernel-session")
    parts = ours.compose("status", {"execution_state": "idle"}, now_s=1.0, parent_header=b'{"a":1}')
    message = theirs.deserialize(list(parts))
    assert message["header"]["session"] == "kernel-session"
    assert message["parent_header"] == {"a": 1}
    assert message["content"] == {"execution_state": "idle"}
    serialized = theirs.serialize(theirs.msg("execute_request", {"code": "1"}))
    cut = split_frames(serialized)[1]
    assert Signer(KEY).accepts(cut)
    assert header_of(cut).session == theirs.session
    assert content_of(cut) == {"code": "1"}


def test_a_changed_byte_or_another_key_is_not_accepted() -> None:
    parts = Composer(Signer(KEY)).compose("status", {}, now_s=0)
    assert Signer(KEY).accepts(parts)
    assert not Signer(b"other").accepts(parts)
    assert not Signer(KEY).accepts((*parts[:4], b'{"code": "rm"}'))


def test_an_empty_key_signs_nothing_and_accepts_everything() -> None:
    parts = Composer(Signer(b"")).compose("status", {}, now_s=0)
    assert parts[0] == b""
    assert Signer(b"").accepts(parts)


def test_the_key_is_in_no_repr() -> None:
    assert "secret" not in repr(Signer(KEY)) + repr(vars(Signer(KEY)))


@pytest.mark.parametrize("scheme", ["hmac-nothing", "rsa-sha256", ""])
def test_an_unknown_signature_scheme_is_refused(scheme: str) -> None:
    with pytest.raises(MalformedMessage, match="not known"):
        Signer(KEY, scheme)


@given(st.floats(min_value=0, max_value=4e9))
def test_dates_always_have_six_digits(now_s: float) -> None:
    parts = Composer(Signer(KEY)).compose("status", {}, now_s=now_s)
    fraction = json.loads(parts[1])["date"].rpartition(".")[2]
    assert len(fraction) == 7
    assert fraction.endswith("Z")


def test_replies_go_to_who_asked_also_a_while_after() -> None:
    routes = ReplyRoutes()
    routes.asked(Header("m1"), b"one")
    routes.asked(Header("m2"), b"two")
    assert routes.asker(Header("m1")) == b"one"
    assert routes.answered(Header("m1")) == b"one"
    assert routes.asker(Header("m1")) == b"one"
    assert routes.answered(Header("m2")) == b"two"


def test_an_unknown_parent_falls_back_to_its_session_then_to_nobody() -> None:
    routes = ReplyRoutes()
    assert routes.answered(Header("m9", "execute_request", "abc")) == b"abc"
    assert routes.asker(Header()) is None


def test_the_memory_of_routes_is_bounded() -> None:
    routes = ReplyRoutes(limit=10, answered_limit=5)
    for n in range(30):
        routes.asked(Header(f"m{n}"), b"client")
    assert len(routes) == 10
    assert routes.forgotten == 20
    for n in range(30):
        routes.answered(Header(f"m{n}"))
    assert len(routes) == 5


def test_sizes_count_all_parts() -> None:
    assert size_of((b"ab", b"", b"cde")) == 5


def test_requests_of_different_types_may_share_an_id() -> None:
    """A manager's control message bears the id of its client's first cell (see Header.key)."""
    routes = ReplyRoutes()
    routes.asked(Header("m0", "execute_request"), b"client")
    routes.asked(Header("m0", "shutdown_request"), b"manager")
    assert routes.answered(Header("m0", "shutdown_request")) == b"manager"
    assert routes.answered(Header("m0", "execute_request")) == b"client"
