"""Calls: each answered exactly once, whatever the handler does."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from kernel_guest.kernel_calls import KernelCalls
from kernel_guest.shared.messages import Channel, Kind, Lane, LinkMessage, call
from kernel_guest.supervisor import KernelRefused, KernelSupervisor


class Supervisor:
    """Answers as the test says, where the real one would wait for processes."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.error: BaseException | None = None

    async def interrupt(self) -> dict[str, Any]:
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        return {"delivered": True}

    def activity(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"executing": 0}


class Bench:
    def __init__(self) -> None:
        self.supervisor = Supervisor()
        self.emitted: list[LinkMessage] = []
        self.consumed: list[LinkMessage] = []
        self.calls = KernelCalls(
            cast(KernelSupervisor, self.supervisor), self.emitted.append, self.consumed.append
        )

    def results(self) -> list[dict[str, Any]]:
        return [message.json() for message in self.emitted]

    async def settle(self) -> None:
        while self.calls._tasks:
            await asyncio.wait(self.calls._tasks)


def test_the_answer_goes_on_the_lane_of_the_call() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.calls.handle(call(1, "activity", {}))
        bench.calls.handle(call(2, "activity", {}, lane=Lane.ORDERED))
        assert [message.lane for message in bench.emitted] == [Lane.URGENT, Lane.ORDERED]
        assert bench.results()[0] == {"id": 1, "ok": True, "result": {"executing": 0}}
        assert len(bench.consumed) == 2

    asyncio.run(scenario())


def test_credit_comes_when_the_call_is_done() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.calls.handle(call(1, "interrupt", {}))
        await asyncio.sleep(0)
        assert (bench.emitted, bench.consumed) == ([], [])
        bench.supervisor.go_on.set()
        await bench.settle()
        assert bench.results()[0]["result"] == {"delivered": True}
        assert len(bench.consumed) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KernelRefused("why", "because"), "why"),
        (OSError(28, "No space left on device"), "os_error"),
        (RuntimeError("secret"), "internal"),
    ],
)
def test_errors_become_answers(
    error: Exception, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.supervisor.error = error
        bench.supervisor.go_on.set()
        bench.calls.handle(call(1, "interrupt", {}))
        bench.calls.handle(call(2, "activity", {}))
        await bench.settle()
        assert [result["error"]["code"] for result in bench.results()] == [code, code]
        assert all("secret" not in result["error"]["message"] for result in bench.results())

    with caplog.at_level(logging.CRITICAL if code != "internal" else logging.ERROR):
        asyncio.run(scenario())
    assert bool(caplog.records) == (code == "internal")


def test_calls_are_bounded() -> None:
    async def scenario() -> None:
        bench = Bench()
        for number in range(65):
            bench.calls.handle(call(number, "interrupt", {}))
        assert [result["error"]["code"] for result in bench.results()] == ["too_many_calls"]
        bench.supervisor.go_on.set()
        await bench.settle()
        assert len(bench.emitted) == 65

    asyncio.run(scenario())


def test_before_run_there_are_no_files() -> None:
    async def scenario() -> None:
        bench = Bench()
        for number, op in enumerate(("put_file", "get_file", "list_files", "checkpoint")):
            bench.calls.handle(call(number, op, {"path": "a", "globs": ["*"]}))
        await bench.settle()
        assert {result["error"]["code"] for result in bench.results()} == {"not_running"}
        assert len(bench.emitted) == 4

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "head", [b"", b"[]", b"{", b'{"op":"activity","args":{}}', b'{"id":"1","args":{}}', b'{"id":1}']
)
def test_what_is_no_call_is_dropped_with_its_credit(head: bytes) -> None:
    bench = Bench()
    bench.calls.handle(LinkMessage(Kind.CALL, Channel.NONE, (head,), Lane.URGENT))
    assert bench.emitted == []
    assert len(bench.consumed) == 1


def test_close_ends_what_runs() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.calls.handle(call(1, "interrupt", {}))
        await bench.calls.close()
        assert bench.emitted == []
        await bench.calls.close()

    asyncio.run(scenario())
