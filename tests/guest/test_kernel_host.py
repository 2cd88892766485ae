"""The agent's side of the socket, against a machine that the test plays."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kernel_guest import kernel_host
from kernel_guest.kernel_host import KernelHost, MachineGone
from kernel_guest.kernels import SpawnFailed, SpawnRequest

REQUEST = SpawnRequest(key="k", cwd="/")
SPAWNED = {
    "pid": 7,
    "kind": "fork",
    "cold": False,
    "reason": "",
    "ip": "/run/k1",
    "number": 1,
    "interrupt_mode": "signal",
    "language": "python",
}


class PlayedMachine:
    """The other end, one line at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(await self.reader.readline())
        return message

    def send(self, message: dict[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")


def play(scenario: Callable[[KernelHost, PlayedMachine], Awaitable[None]]) -> None:
    @asynccontextmanager
    async def both() -> AsyncIterator[tuple[KernelHost, PlayedMachine]]:
        ours, theirs = socket.socketpair()
        host = KernelHost(ours)
        await host.open()
        machine = PlayedMachine(*await asyncio.open_unix_connection(sock=theirs))
        try:
            yield host, machine
        finally:
            await host.close()
            machine.writer.close()

    async def main() -> None:
        async with asyncio.timeout(10), both() as (host, machine):
            await scenario(host, machine)

    asyncio.run(main())


def test_a_spawn_is_asked_and_answered() -> None:
    async def scenario(host: KernelHost, machine: PlayedMachine) -> None:
        call = asyncio.create_task(host.spawn(REQUEST))
        message = await machine.receive()
        assert (message["op"], message["request"]["key"]) == ("spawn", "k")
        machine.send({"id": message["id"], "ok": SPAWNED})
        kernel = await call
        assert (kernel.pid, kernel.cold) == (7, False)
        assert kernel.connection.url("iopub") == "ipc:///run/k1-2"

    play(scenario)


def test_answers_find_their_calls_in_any_order() -> None:
    async def scenario(host: KernelHost, machine: PlayedMachine) -> None:
        calls = [asyncio.create_task(host.signal(pid, 2)) for pid in (1, 2)]
        messages = [await machine.receive() for _ in calls]
        for message in reversed(messages):
            machine.send({"id": message["id"], "ok": {"delivered": message["pid"] == 1}})
        assert [await call for call in calls] == [True, False]

    play(scenario)


def test_an_error_comes_back_as_its_type() -> None:
    async def scenario(host: KernelHost, machine: PlayedMachine) -> None:
        call = asyncio.create_task(host.spawn(REQUEST))
        error = {"code": "not_startable", "message": "Not so."}
        machine.send({"id": (await machine.receive())["id"], "error": error})
        with pytest.raises(SpawnFailed, match="Not so") as caught:
            await call
        assert caught.value.code == "not_startable"

    play(scenario)


def test_ends_are_told_to_every_listener_once() -> None:
    async def scenario(host: KernelHost, machine: PlayedMachine) -> None:
        seen: list[Any] = []
        done = asyncio.Event()
        host.on_exit(lambda *event: seen.append(event))
        host.on_exit(lambda *event: done.set())
        machine.send({"exited": 7, "code": None, "signal": 9})
        await done.wait()
        assert seen == [(7, None, 9)]

    play(scenario)


def test_a_machine_that_ends_fails_what_waits_and_what_comes() -> None:
    async def scenario(host: KernelHost, machine: PlayedMachine) -> None:
        call = asyncio.create_task(host.spawn(REQUEST))
        await machine.receive()
        machine.writer.close()
        with pytest.raises(MachineGone):
            await call
        await host.gone.wait()
        with pytest.raises(MachineGone):
            await host.kill(7)

    play(scenario)


def test_no_answer_is_an_error_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_host, "CALL_DEADLINE_S", 0.05)

    async def scenario(host: KernelHost, machine: PlayedMachine) -> None:
        with pytest.raises(MachineGone, match="within"):
            await host.signal(7, 2)
        late = await machine.receive()
        machine.send({"id": late["id"], "ok": {"delivered": True}})
        monkeypatch.setattr(kernel_host, "CALL_DEADLINE_S", 5.0)
        call = asyncio.create_task(host.signal(8, 2))
        message = await machine.receive()
        machine.send({"id": message["id"], "ok": {"delivered": False}})
        assert await call is False

    play(scenario)


def test_a_request_too_large_for_a_process_is_refused_here() -> None:
    async def scenario(host: KernelHost, machine: PlayedMachine) -> None:
        huge = SpawnRequest(key="k", cwd="/", env={"A": "x" * kernel_host.MAX_MESSAGE_BYTES})
        with pytest.raises(SpawnFailed, match="too many"):
            await host.spawn(huge)
        with pytest.raises(SpawnFailed, match="does not exist"):
            await host.spawn(SpawnRequest(key="k", cwd="/no/such/folder"))

    play(scenario)


def test_its_state_can_be_read() -> None:
    async def scenario(host: KernelHost, machine: PlayedMachine) -> None:
        assert repr(host) == "<KernelHost open waiting=0>"
        machine.writer.close()
        await host.gone.wait()
        assert repr(host) == "<KernelHost gone waiting=0>"

    play(scenario)
