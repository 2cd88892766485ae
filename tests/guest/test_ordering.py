"""Replies wait for their outputs, whatever order the sockets are read in."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from kernel_guest.ordering import QUIET_S, ReplyGate
from kernel_guest.shared.messages import Channel, LinkMessage, jupyter


def made(channel: Channel, what: str) -> LinkMessage:
    return jupyter(channel, [b"", json.dumps(what).encode(), b"{}", b"{}", b"{}"])


REPLY, IDLE = made(Channel.SHELL, "reply"), made(Channel.IOPUB, "idle")


def test_a_reply_waits_and_goes_directly_before_its_idle() -> None:
    gate = ReplyGate()
    assert gate.on_reply("a", REPLY, 0.0) == []
    assert gate.held == 1
    assert gate.on_idle("a", IDLE) == [REPLY, IDLE]
    assert gate.held == 0
    assert gate.next_deadline_s() is None


def test_an_idle_that_is_first_does_not_wait() -> None:
    gate = ReplyGate()
    assert gate.on_idle("a", IDLE) == [IDLE]
    assert gate.on_reply("a", REPLY, 0.0) == [REPLY]
    assert gate.on_reply("a", REPLY, 0.0) == []


def test_idle_of_another_request_releases_nothing() -> None:
    gate = ReplyGate()
    gate.on_reply("a", REPLY, 0.0)
    assert gate.on_idle("b", IDLE) == [IDLE]
    assert gate.held == 1


def test_without_idle_the_reply_goes_when_iopub_is_silent() -> None:
    gate = ReplyGate()
    gate.on_reply("a", REPLY, 10.0)
    assert gate.next_deadline_s() == 10.0 + QUIET_S
    gate.on_iopub(11.0)
    assert gate.expire(10.0 + QUIET_S) == []
    assert gate.next_deadline_s() == 11.0 + QUIET_S
    assert gate.expire(11.0 + QUIET_S) == [REPLY]


def test_a_newer_reply_waits_its_own_time() -> None:
    gate = ReplyGate()
    gate.on_reply("a", REPLY, 0.0)
    gate.on_reply("b", IDLE, 1.5)
    assert gate.expire(QUIET_S) == [REPLY]
    assert gate.expire(1.5 + QUIET_S) == [IDLE]


def test_a_second_reply_to_one_request_loses_neither() -> None:
    gate = ReplyGate()
    gate.on_reply("a", REPLY, 0.0)
    second = made(Channel.SHELL, "second")
    assert gate.on_reply("a", second, 0.0) == [REPLY]
    assert gate.on_idle("a", IDLE) == [second, IDLE]


def test_all_go_when_the_kernel_is_gone() -> None:
    gate = ReplyGate()
    gate.on_reply("a", REPLY, 0.0)
    gate.on_reply("b", IDLE, 0.0)
    assert gate.release_all() == [REPLY, IDLE]
    assert gate.release_all() == []


def test_memory_of_early_idles_is_bounded() -> None:
    gate = ReplyGate()
    for number in range(5_000):
        gate.on_idle(str(number), IDLE)
    assert len(gate._idle_first) == 1024


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), unique=True))
def test_everything_comes_out_once(steps: list[tuple[bool, int]]) -> None:
    gate = ReplyGate()
    out: list[LinkMessage] = []
    put: list[LinkMessage] = []
    for is_reply, number in steps:
        message = made(Channel.SHELL if is_reply else Channel.IOPUB, str(number))
        put.append(message)
        if is_reply:
            out += gate.on_reply(str(number), message, 0.0)
        else:
            out += gate.on_idle(str(number), message)
    out += gate.release_all()
    assert sorted(map(repr, out)) == sorted(map(repr, put))
