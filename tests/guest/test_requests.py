"""At most once: ids, endings and their bounds."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from kernel_guest.requests import RequestMemory, Verdict
from kernel_guest.shared.messages import Channel, LinkMessage, jupyter


def ending(parent: str, msg_type: str, size: int = 10) -> LinkMessage:
    header = json.dumps({"msg_type": msg_type}).encode()
    parent_header = json.dumps({"msg_id": parent}).encode()
    channel = Channel.IOPUB if msg_type == "status" else Channel.SHELL
    return jupyter(channel, [b"", header, parent_header, b"{}", b"x" * size])


def test_the_life_of_a_request() -> None:
    memory = RequestMemory()
    assert memory.admit("a", "execute_request") is Verdict.NEW
    assert memory.admit("a", "execute_request") is Verdict.RUNNING
    assert memory.executing == ("a",)
    reply, idle = ending("a", "execute_reply"), ending("a", "status")
    memory.on_reply("a", reply)
    assert memory.admit("a", "execute_request") is Verdict.RUNNING
    memory.on_idle("a", idle)
    assert memory.executing == ()
    assert memory.running == 0
    assert memory.admit("a", "execute_request") is Verdict.ANSWERED
    assert memory.ending("a") == [reply, idle]


def test_idle_may_come_before_the_reply() -> None:
    memory = RequestMemory()
    memory.admit("a", "execute_request")
    memory.on_idle("a", ending("a", "status"))
    memory.on_reply("a", ending("a", "execute_reply"))
    assert len(memory.ending("a")) == 2
    assert memory.running == 0


def test_a_dead_kernel_leaves_unknown_outcomes() -> None:
    memory = RequestMemory()
    memory.admit("a", "execute_request")
    memory.admit("b", "execute_request")
    memory.on_reply("b", ending("b", "execute_reply"))
    memory.on_idle("b", ending("b", "status"))
    assert memory.on_kernel_exit() == ["a"]
    assert memory.admit("a", "execute_request") is Verdict.UNKNOWN
    assert memory.admit("b", "execute_request") is Verdict.ANSWERED


def test_input_replies_are_over_when_sent_and_still_remembered() -> None:
    memory = RequestMemory()
    memory.admit("i", "input_reply")
    memory.settle("i")
    memory.settle("i")
    assert memory.running == 0
    assert memory.admit("i", "input_reply") is Verdict.UNKNOWN


def test_old_ids_are_forgotten_at_the_bound() -> None:
    memory = RequestMemory(max_ids=3)
    for name in "abcd":
        memory.admit(name, "execute_request")
    assert memory.running == 3
    assert memory.admit("a", "execute_request") is Verdict.NEW
    assert memory.admit("d", "execute_request") is Verdict.RUNNING


def test_endings_are_dropped_oldest_first_and_large_ones_not_kept() -> None:
    one = ending("a", "execute_reply", 1000).size_bytes
    memory = RequestMemory(max_kept_bytes=2 * one)
    for name in "abc":
        memory.admit(name, "execute_request")
        memory.on_reply(name, ending(name, "execute_reply", 1000))
        memory.on_idle(name, ending(name, "status", 0))
    assert memory.kept_bytes <= 2 * one
    assert memory.admit("a", "execute_request") is Verdict.UNKNOWN
    assert memory.admit("c", "execute_request") is Verdict.ANSWERED
    memory.admit("h", "history_request")
    memory.on_reply("h", ending("h", "history_reply", 10**6))
    memory.on_idle("h", ending("h", "status"))
    assert [m.channel for m in memory.ending("h")] == [Channel.IOPUB]


def test_foreign_parents_change_nothing() -> None:
    memory = RequestMemory()
    memory.on_idle("?", ending("?", "status"))
    memory.on_reply("?", ending("?", "execute_reply"))
    assert memory.kept_bytes == 0
    assert memory.running == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["admit", "reply", "idle", "exit", "settle"]), st.integers(0, 8))
    )
)
def test_counts_agree_with_the_requests(steps: list[tuple[str, int]]) -> None:
    memory = RequestMemory(max_ids=5, max_kept_bytes=300)
    for what, number in steps:
        name = str(number)
        if what == "admit":
            memory.admit(name, "execute_request")
        elif what == "reply":
            memory.on_reply(name, ending(name, "execute_reply"))
        elif what == "idle":
            memory.on_idle(name, ending(name, "status"))
        elif what == "settle":
            memory.settle(name)
        else:
            memory.on_kernel_exit()
        requests = memory._requests
        assert len(requests) <= 5
        assert memory.running == sum(one.running for one in requests.values())
        assert len(memory.executing) == memory.running
        kept = sum(m.size_bytes for one in requests.values() for m in one.ending)
        assert memory.kept_bytes == kept <= 300


def test_another_message_under_a_known_key_is_no_repetition() -> None:
    """Two clients of one manager count message ids alike; only the signature tells them apart."""
    memory = RequestMemory()
    assert memory.admit("execute_request:a_0", "execute_request", b"first") is Verdict.NEW
    assert memory.admit("execute_request:a_0", "execute_request", b"first") is Verdict.RUNNING
    assert memory.admit("execute_request:a_0", "execute_request", b"second") is Verdict.NEW
    assert memory.running == 1
