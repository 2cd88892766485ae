"""Faults on demand: orders, how long they last, and the endpoint's function."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.local.clock import ManualClock
from gateway.local.faults import FaultBoard, FaultError, handle_faults
from gateway.local.faults.plan import KINDS, FaultPlan, parse_fault
from gateway.local.interfaces import FaultPoint


def test_every_point_of_the_service_has_a_kind() -> None:
    assert {point.value for point in FaultPoint} <= KINDS
    board = FaultBoard()
    assert not board.take(FaultPoint.RUN_HOOK, "m")


def test_an_order_strikes_as_often_as_it_says_and_only_its_machine() -> None:
    board = FaultBoard()
    board.add(parse_fault({"kind": "run-hook", "times": 2, "microvm_id": "a"}))
    taken = [board.take(FaultPoint.RUN_HOOK, who) for who in ("b", "a", "a", "a")]
    assert taken == [False, True, True, False]
    board.add(parse_fault({"kind": "api-429"}))
    assert board.take(FaultPoint.API_THROTTLED)
    assert not board.take(FaultPoint.API_THROTTLED)


def test_the_oldest_order_that_fits_strikes_first() -> None:
    plan = FaultPlan()
    first = plan.add(parse_fault({"kind": "cut", "after_bytes": 1}), 0.0)
    second = plan.add(parse_fault({"kind": "cut", "after_bytes": 2}), 0.0)
    found = [plan.take("cut", "m", 0.0) for _ in range(3)]
    assert [fault.fault_id if fault else None for fault in found] == [first, second, None]


def test_seconds_end_an_order_and_listeners_hear_of_it() -> None:
    clock = ManualClock()
    board = FaultBoard(clock)
    heard: list[float | None] = []
    board.subscribe(lambda: heard.append(board.bandwidth("m")))
    board.add(parse_fault({"kind": "bandwidth", "bytes_per_s": 5, "seconds": 10}))
    board.add(parse_fault({"kind": "bad-gateway", "seconds": 5}))
    clock.advance(4.9)
    assert [board.take_answer("m", upgrade=False) for _ in range(3)] == [502] * 3
    clock.advance(0.1)
    assert board.take_answer("m", upgrade=True) is None
    assert heard[-1] == 5
    clock.advance(5.0)
    assert heard[-1] is None
    assert board.listed() == []
    assert clock.next_deadline_s() is None


def test_a_listener_can_leave() -> None:
    board = FaultBoard()
    calls: list[int] = []

    def listener() -> None:
        calls.append(1)

    board.subscribe(listener)
    number = board.add(parse_fault({"kind": "cut"}))
    board.unsubscribe(listener)
    board.unsubscribe(listener)
    board.use(number)
    board.use(number)  # it is gone: nothing happens
    assert calls == [1]


def test_a_refused_upgrade_leaves_plain_requests_alone() -> None:
    board = FaultBoard()
    board.add(parse_fault({"kind": "refuse-upgrade", "status": 503}))
    assert board.take_answer("m", upgrade=False) is None
    assert board.take_answer("m", upgrade=True) == 503


@pytest.mark.parametrize(
    ("order", "times"),
    [
        ({"kind": "cut"}, 1),
        ({"kind": "cut", "times": None}, None),
        ({"kind": "cut", "times": 3, "seconds": 1}, 3),
        ({"kind": "throttle", "seconds": 1.5}, None),
        ({"kind": "bandwidth", "bytes_per_s": 1}, None),
    ],
)
def test_how_often_an_order_strikes_by_default(order: dict[str, Any], times: int | None) -> None:
    assert parse_fault(order).times == times


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({}, "no fault None; there are: api-402"),
        ({"kind": "nonsense"}, "no fault 'nonsense'"),
        ({"kind": "cut", "bytes_per_s": 3}, "no parameter bytes_per_s"),
        ({"kind": "cut", "after_bytes": -1}, "-1 is not possible for after_bytes"),
        ({"kind": "cut", "after_bytes": True}, "True is not possible"),
        ({"kind": "cut", "after_bytes": 1.5}, "1.5 is not possible"),
        ({"kind": "cut", "direction": "up"}, "direction is to-guest or to-client, not 'up'"),
        ({"kind": "cut", "direction": ["up"]}, "direction is"),
        ({"kind": "cut", "close_frame": 1}, "1 is not possible for close_frame"),
        ({"kind": "cut", "times": 0}, "0 is not possible for times"),
        ({"kind": "cut", "microvm_id": 7}, "7 is not possible for microvm_id"),
        ({"kind": "bandwidth"}, "needs bytes_per_s"),
        ({"kind": "throttle", "seconds": "x"}, "'x' is not possible for seconds"),
    ],
)
def test_an_order_that_cannot_be_understood_says_why(order: dict[str, Any], words: str) -> None:
    with pytest.raises(FaultError) as refused:
        parse_fault(order)
    assert words in str(refused.value)


class Effects:
    def __init__(self) -> None:
        self.done: list[tuple[str, object]] = []

    def expire_tokens(self, microvm_id: str | None) -> None:
        self.done.append(("expire", microvm_id))

    async def kill_machine(self, microvm_id: str) -> None:
        self.done.append(("kill", microvm_id))

    def jump_clock(self, seconds: float) -> None:
        self.done.append(("jump", seconds))


def handle(board: FaultBoard, effects: Effects, request: dict[str, Any]) -> dict[str, Any]:
    return asyncio.run(handle_faults(board, effects, request))


def test_the_endpoint_orders_lists_and_clears() -> None:
    board, effects = FaultBoard(), Effects()
    order = {"kind": "cut", "after_bytes": 5, "direction": "to-guest", "microvm_id": "m"}
    assert handle(board, effects, {"op": "add", "fault": order}) == {"id": 1}
    assert handle(board, effects, {"op": "add", "fault": {"kind": "run-hook"}}) == {"id": 2}
    listed = handle(board, effects, {"op": "list"})
    assert listed["faults"] == [
        {
            "id": 1,
            "kind": "cut",
            "times": 1,
            "after_bytes": 5,
            "close_frame": False,
            "direction": "to-guest",
            "microvm_id": "m",
        },
        {"id": 2, "kind": "run-hook", "times": 1},
    ]
    assert {"kill-machine", "cut", "api-402"} <= set(listed["kinds"])
    assert handle(board, effects, {"op": "clear", "id": 1}) == {"cleared": 1}
    assert handle(board, effects, {"op": "clear"}) == {"cleared": 1}
    assert effects.done == []


def test_commands_are_carried_out_at_once() -> None:
    board, effects = FaultBoard(), Effects()
    for order in (
        {"kind": "expire-tokens"},
        {"kind": "expire-tokens", "microvm_id": "m"},
        {"kind": "kill-machine", "microvm_id": "m"},
        {"kind": "clock-jump", "seconds": -3600},
    ):
        assert handle(board, effects, {"op": "add", "fault": order}) == {"done": True}
    assert effects.done == [("expire", None), ("expire", "m"), ("kill", "m"), ("jump", -3600.0)]
    assert board.listed() == []


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({}, "no op None; there are: add, list, clear"),
        ({"op": "add"}, "needs a member 'fault'"),
        ({"op": "add", "fault": {"kind": "kill-machine"}}, "needs microvm_id"),
        ({"op": "add", "fault": {"kind": "clock-jump", "seconds": True}}, "needs seconds"),
        ({"op": "add", "fault": {"kind": "expire-tokens", "microvm_id": 3}}, "not possible"),
        ({"op": "clear", "id": "1"}, "not possible for id"),
    ],
)
def test_a_request_that_cannot_be_understood_says_why(request_: dict[str, Any], words: str) -> None:
    with pytest.raises(FaultError) as refused:
        handle(FaultBoard(), Effects(), request_)
    assert words in str(refused.value)
