"""Messages of the link."""

from __future__ import annotations

import itertools

import pytest

from kernel_guest.shared.errors import LinkProtocolError
from kernel_guest.shared.messages import (
    Channel,
    Kind,
    Lane,
    LinkMessage,
    call,
    call_ids,
    event,
    gap,
    jupyter,
    reply,
)

PARTS = [b"signature", b"header", b"parent", b"metadata", b"content"]


@pytest.mark.parametrize(
    ("channel", "lane"),
    [
        (Channel.SHELL, Lane.ORDERED),
        (Channel.IOPUB, Lane.ORDERED),
        (Channel.STDIN, Lane.URGENT),
        (Channel.CONTROL, Lane.URGENT),
    ],
)
def test_the_lane_follows_from_the_channel(channel: Channel, lane: Lane) -> None:
    message = jupyter(channel, [*PARTS, b"buffer"])
    assert message == LinkMessage(Kind.JUPYTER, channel, (*PARTS, b"buffer"), lane)
    assert message.size_bytes == sum(map(len, PARTS)) + 6


@pytest.mark.parametrize(("channel", "parts"), [(Channel.NONE, PARTS), (Channel.SHELL, PARTS[:4])])
def test_what_is_no_jupyter_message_is_refused(channel: Channel, parts: list[bytes]) -> None:
    with pytest.raises(ValueError, match="not a Jupyter message"):
        jupyter(channel, parts)


def test_calls_and_replies() -> None:
    asked = call(7, "put_file", {"path": "a"}, b"data", Lane.ORDERED)
    assert asked.json() == {"id": 7, "op": "put_file", "args": {"path": "a"}}
    assert (asked.kind, asked.blob, asked.lane) == (Kind.CALL, b"data", Lane.ORDERED)
    assert reply(7, {"x": 1}).json() == {"id": 7, "ok": True, "result": {"x": 1}}
    failed = reply(7, None, {"code": "gone", "message": "no"})
    assert failed.json() == {"id": 7, "ok": False, "error": {"code": "gone", "message": "no"}}
    assert (failed.blob, failed.lane) == (b"", Lane.URGENT)


@pytest.mark.parametrize(("result", "error"), [(None, None), ({}, {})])
def test_a_reply_has_one_outcome(
    result: dict[str, int] | None, error: dict[str, int] | None
) -> None:
    with pytest.raises(ValueError, match="either"):
        reply(1, result, error)


def test_events_and_gaps_keep_the_order_of_outputs() -> None:
    assert event("kernel_exited", {"pid": 1}).json() == {
        "name": "kernel_exited",
        "data": {"pid": 1},
    }
    assert event("x", {}).lane is Lane.ORDERED
    assert gap(3, 900).json() == {"messages": 3, "bytes": 900}
    assert gap(3, 900).lane is Lane.ORDERED


@pytest.mark.parametrize(
    "message",
    [
        jupyter(Channel.SHELL, PARTS),
        LinkMessage(Kind.CALL, Channel.NONE, (), Lane.URGENT),
        LinkMessage(Kind.CALL, Channel.NONE, (b"[1]",), Lane.URGENT),
        LinkMessage(Kind.REPLY, Channel.NONE, (b"{",), Lane.URGENT),
    ],
)
def test_what_has_no_json_raises_the_typed_error(message: LinkMessage) -> None:
    with pytest.raises(LinkProtocolError):
        message.json()


def test_ids_of_two_gateways_do_not_meet() -> None:
    first, second = (set(itertools.islice(call_ids(), 100)) for _ in range(2))
    assert not first & second
