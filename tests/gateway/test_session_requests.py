"""Unfinished requests: what finishes them, and how they end without their kernel."""

from __future__ import annotations

import pytest

from gateway.messages import Composer, MalformedMessage, Signer, header_of
from gateway.session.requests import Requests, endings
from kernel_guest.shared.errors import LinkFull
from kernel_guest.shared.messages import Channel

CLIENT = Composer(Signer(b"key"), "client")
KERNEL = Composer(Signer(b"key"), "kernel")
Parts = tuple[bytes, ...]


def request(msg_type: str = "execute_request") -> Parts:
    return CLIENT.compose(msg_type, {}, now_s=0)


def from_kernel(msg_type: str, parent: Parts, **content: object) -> Parts:
    return KERNEL.compose(msg_type, content, now_s=0, parent_header=parent[1])


def status(state: str, parent: Parts) -> Parts:
    return from_kernel("status", parent, execution_state=state)


@pytest.mark.parametrize("reply_first", [True, False])
def test_a_cell_is_finished_by_reply_and_idle_in_either_order(reply_first: bool) -> None:
    requests, cell = Requests(), request()
    requests.add(Channel.SHELL, cell)
    ends = [
        (Channel.SHELL, from_kernel("execute_reply", cell, status="ok")),
        (Channel.IOPUB, status("idle", cell)),
    ]
    if not reply_first:
        ends.reverse()
    requests.observe(Channel.IOPUB, status("busy", cell))
    assert not requests.observe(*ends[0])
    assert len(requests) == 1
    assert requests.observe(*ends[1])
    assert len(requests) == 0


def test_a_comm_message_is_finished_by_idle_and_a_control_request_by_its_reply() -> None:
    requests, comm, debug = Requests(), request("comm_msg"), request("debug_request")
    requests.add(Channel.SHELL, comm)
    requests.add(Channel.CONTROL, debug)
    requests.observe(Channel.IOPUB, status("idle", comm))
    assert header_of(comm).key not in requests
    requests.observe(Channel.CONTROL, from_kernel("debug_reply", debug))
    assert len(requests) == 0


def test_input_is_asked_for_answered_and_interrupted() -> None:
    requests, cell = Requests(), request()
    requests.add(Channel.SHELL, cell)
    assert requests.observe(Channel.STDIN, from_kernel("input_request", cell))
    assert requests.waiting_input
    assert requests.add(Channel.STDIN, request("input_reply")) is None
    assert not requests.waiting_input
    requests.observe(Channel.STDIN, from_kernel("input_request", cell))
    requests.observe(Channel.SHELL, from_kernel("execute_reply", cell))
    requests.observe(Channel.IOPUB, status("idle", cell))
    assert not requests.waiting_input


def test_a_hostile_kernel_changes_nothing_it_should_not() -> None:
    requests, cell = Requests(), request()
    requests.add(Channel.SHELL, cell)
    stranger = request()
    for channel, parts in [
        (Channel.IOPUB, status("idle", stranger)),
        (Channel.SHELL, from_kernel("execute_reply", stranger)),
        (Channel.CONTROL, from_kernel("execute_reply", cell)),  # not the channel it came on
        (Channel.STDIN, from_kernel("input_request", stranger)),
        (Channel.IOPUB, (b"", b'"status"', b"{", b"{}", b"{}")),
        (Channel.SHELL, (b"", b"{}", b"[]", b"{}", b"{}")),
        (Channel.SHELL, (b"",)),
        (Channel.STDIN, (b"", b"{}", b"null", b"{}", b"{}")),
    ]:
        assert not requests.observe(channel, parts)
    assert len(requests) == 1


def test_more_than_the_limit_is_refused_and_nonsense_too() -> None:
    requests = Requests(limit=2)
    for _ in range(2):
        requests.add(Channel.SHELL, request())
    with pytest.raises(LinkFull):
        requests.add(Channel.SHELL, request())
    with pytest.raises(MalformedMessage):
        requests.add(Channel.SHELL, (b"", b"no json", b"{}", b"{}", b"{}"))


def test_what_was_sent_may_have_run_and_what_was_held_did_not() -> None:
    requests, first, second = Requests(), request(), request("complete_request")
    sent = requests.add(Channel.SHELL, first)
    held = requests.add(Channel.SHELL, second)
    assert sent
    assert held
    sent.sent = True
    assert requests.end_all() == [sent, held]
    assert len(requests) == 0
    ends = endings(sent, "its machine is gone")
    assert [(end.channel, end.msg_type) for end in ends] == [
        (Channel.IOPUB, "error"),
        (Channel.SHELL, "execute_reply"),
        (Channel.IOPUB, "status"),
    ]
    assert ends[1].content["ename"] == "OutcomeUnknown"
    assert "may have run" in str(ends[1].content["evalue"])
    assert all(end.parent_header == first[1] for end in ends)
    reply, idle = endings(held, "gone")
    assert (reply.msg_type, reply.content["ename"]) == ("complete_reply", "NotExecuted")
    assert idle.content == {"execution_state": "idle"}


def test_what_a_client_has_seen_is_not_said_again() -> None:
    requests, cell, comm = Requests(), request(), request("comm_open")
    entry = requests.add(Channel.SHELL, cell)
    assert entry
    requests.observe(Channel.SHELL, from_kernel("execute_reply", cell))
    assert [end.msg_type for end in endings(entry, "x")] == ["status"]
    other = requests.add(Channel.SHELL, comm)
    assert other
    assert [end.msg_type for end in endings(other, "x")] == ["status"]
    requests.restore(requests.end_all())
    assert len(requests) == 2
    requests.forget(entry.key)
    assert len(requests) == 1
