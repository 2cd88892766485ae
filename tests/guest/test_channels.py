"""Channels to real kernels, and to publishers that behave in ways a kernel may."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from jupyter_client.session import Session

from kernel_guest.channels import KernelChannels
from kernel_guest.kernel_host import KernelHost, SpawnedKernel
from kernel_guest.kernels import CHANNELS, SpawnRequest
from kernel_guest.shared.messages import Channel
from tests.guest.machines import KEY, Machine

DEADLINE_S = 20.0


class Collected:
    """What came, and a way to wait for it."""

    def __init__(self) -> None:
        self.messages: list[tuple[Channel, list[bytes]]] = []
        self.sent: list[object] = []
        self._changed = asyncio.Event()

    def on_message(self, channel: Channel, parts: Sequence[bytes]) -> None:
        self.messages.append((channel, list(parts)))
        self._changed.set()

    def on_sent(self, token: object) -> None:
        self.sent.append(token)
        self._changed.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def kinds(self, channel: Channel) -> list[str]:
        return [json.loads(p[1])["msg_type"] for found, p in self.messages if found is channel]

    def text(self) -> str:
        contents = [json.loads(p[4]) for found, p in self.messages if found is Channel.IOPUB]
        return "".join(content.get("text", "") for content in contents)


@asynccontextmanager
async def zmq_context() -> AsyncIterator[zmq.Context[Any]]:
    context = zmq.Context()
    try:
        yield context
    finally:
        # Waits for libzmq's threads: a channel that is not closed would hang here.
        context.term()


@asynccontextmanager
async def channels_to(urls: dict[str, str], collected: Collected) -> AsyncIterator[KernelChannels]:
    async with zmq_context() as context:
        channels = KernelChannels(context, urls, collected.on_message, collected.on_sent)
        try:
            yield channels
        finally:
            channels.close()
            channels.close()


def urls_of(kernel: SpawnedKernel) -> dict[str, str]:
    return {name: kernel.connection.url(name) for name in CHANNELS}


@asynccontextmanager
async def kernel(
    machine: Machine, collected: Collected
) -> AsyncIterator[tuple[KernelHost, SpawnedKernel, KernelChannels]]:
    async with machine.host() as host:
        spawned = await host.spawn(SpawnRequest(key=KEY, cwd=str(machine.folder)))
        async with channels_to(urls_of(spawned), collected) as channels:
            yield host, spawned, channels


SESSION = Session(key=KEY.encode())


def request(msg_type: str, **content: Any) -> list[bytes]:
    return list(SESSION.serialize(SESSION.msg(msg_type, content))[1:])


def test_requests_wait_for_the_subscription_and_the_greeting_is_kept_back(
    machine: Machine,
) -> None:
    async def scenario() -> None:
        got = Collected()
        async with kernel(machine, got) as (_, _, channels):
            channels.send(Channel.SHELL, request("kernel_info_request"), "shell")
            channels.send(Channel.CONTROL, request("kernel_info_request"), "control")
            assert not channels.ready
            assert got.sent == []
            await got.until(lambda: got.kinds(Channel.SHELL) and got.kinds(Channel.CONTROL))
            # Busy and idle of both; "starting" may come before anybody subscribed.
            await got.until(lambda: got.kinds(Channel.IOPUB).count("status") >= 4)
            assert channels.ready
            assert sorted(map(str, got.sent)) == ["control", "shell"]
            assert "iopub_welcome" not in got.kinds(Channel.IOPUB)

    asyncio.run(scenario())


def test_input_is_routed_to_the_stdin_channel(machine: Machine) -> None:
    async def scenario() -> None:
        got = Collected()
        async with kernel(machine, got) as (_, _, channels):
            channels.send(
                Channel.SHELL, request("execute_request", code="print(input())", allow_stdin=True)
            )
            await got.until(lambda: got.kinds(Channel.STDIN) == ["input_request"])
            channels.send(Channel.STDIN, request("input_reply", value="typed"))
            await got.until(lambda: got.text() == "typed\n")

    asyncio.run(scenario())


def test_what_a_kernel_said_before_it_was_killed_is_read(machine: Machine) -> None:
    async def scenario() -> None:
        got = Collected()
        async with kernel(machine, got) as (host, spawned, channels):
            ended = asyncio.Event()
            host.on_exit(lambda *_: ended.set())
            code = "for i in range(2000): print(i, flush=True)\nprint('end', flush=True)"
            channels.send(Channel.SHELL, request("execute_request", code=code))
            await got.until(lambda: "execute_reply" in got.kinds(Channel.SHELL))
            await host.signal(spawned.pid, signal.SIGKILL)
            await asyncio.wait_for(ended.wait(), DEADLINE_S)
            assert await channels.drain(DEADLINE_S)
            assert got.text().endswith("end\n")
            assert got.text().count("\n") == 2001

    asyncio.run(scenario())


def test_drain_ends_at_its_deadline_if_a_child_keeps_the_sockets(machine: Machine) -> None:
    async def scenario() -> None:
        got = Collected()
        async with kernel(machine, got) as (host, spawned, channels):
            ended = asyncio.Event()
            host.on_exit(lambda *_: ended.set())
            code = "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(60)\nprint(1)"
            channels.send(Channel.SHELL, request("execute_request", code=code))
            await got.until(lambda: "1" in got.text())
            await host.signal(spawned.pid, signal.SIGKILL)
            await asyncio.wait_for(ended.wait(), DEADLINE_S)
            assert not await channels.drain(0.05)

    asyncio.run(scenario())


def test_many_kernels_one_after_the_other_on_one_context(machine: Machine) -> None:
    """libzmq's thread must survive the end of each: it serves the next one."""

    async def scenario() -> None:
        async with machine.host() as host, zmq_context() as context:
            for _ in range(12):
                got = Collected()
                spawned = await host.spawn(SpawnRequest(key=KEY, cwd=str(machine.folder)))
                channels = KernelChannels(context, urls_of(spawned), got.on_message)
                channels.send(Channel.SHELL, request("kernel_info_request"))
                await got.until(lambda got=got: got.kinds(Channel.SHELL))
                await host.kill(spawned.pid)
                channels.close()

    asyncio.run(scenario())


class Publisher:
    """The sockets of a kernel that does what the test says."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.urls = {name: f"ipc://{folder}/{name}" for name in CHANNELS}
        kinds = {"shell": zmq.ROUTER, "control": zmq.ROUTER, "stdin": zmq.ROUTER}
        self.sockets = {name: self.context.socket(kind) for name, kind in kinds.items()}
        self.sockets["iopub"] = self.context.socket(zmq.XPUB)
        for name, made in self.sockets.items():
            made.setsockopt(zmq.LINGER, 0)
            made.setsockopt(zmq.SNDHWM, 10)
            made.setsockopt(zmq.RCVHWM, 10)
            if name == "iopub":
                made.setsockopt(zmq.XPUB_NODROP, 1)
            made.bind(self.urls[name])

    def publish(self, *frames: bytes) -> bool:
        try:
            self.sockets["iopub"].send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def publisher(short_folder: Path) -> Any:
    made = Publisher(short_folder)
    yield made
    made.close()


def plain(number: int, msg_type: str = "stream", size: int = 0) -> list[bytes]:
    header = json.dumps({"msg_type": msg_type, "n": number}).encode()
    return [b"topic", b"<IDS|MSG>", b"", header, b"{}", b"{}", b"{}", b"x" * size]


def test_a_kernel_that_does_not_greet_is_let_loose_after_a_moment(publisher: Publisher) -> None:
    async def scenario() -> None:
        got = Collected()
        async with channels_to(publisher.urls, got) as channels:
            channels.send(Channel.SHELL, request("kernel_info_request"), 1)
            await asyncio.wait_for(channels.wait_ready(), DEADLINE_S)
            await got.until(lambda: got.sent == [1])

    asyncio.run(scenario())


def test_what_is_not_a_message_is_ignored(publisher: Publisher) -> None:
    async def scenario() -> None:
        got = Collected()
        async with channels_to(publisher.urls, got) as channels:
            await asyncio.wait_for(channels.wait_ready(), DEADLINE_S)
            publisher.publish(b"nothing")
            publisher.publish(b"<IDS|MSG>", b"too", b"short")
            publisher.publish(b"t", b"<IDS|MSG>", b"", b"\xff", b"\xff", b"", b"")
            publisher.publish(*plain(1))
            await got.until(lambda: len(got.messages) == 2)
            assert got.messages[0][1] == [b"", b"\xff", b"\xff", b"", b""]

    asyncio.run(scenario())


def test_a_reader_that_stops_stops_the_publisher(publisher: Publisher) -> None:
    async def scenario() -> None:
        got = Collected()
        async with channels_to(publisher.urls, got) as channels:
            await asyncio.wait_for(channels.wait_ready(), DEADLINE_S)
            # The loop does not run while we publish: nobody reads.
            published = 0
            while publisher.publish(*plain(published, size=4096)):
                published += 1
                assert published < 5_000, "the publisher was never stopped"
            await got.until(lambda: len(got.messages) == published)
            numbers = [json.loads(parts[1])["n"] for _, parts in got.messages]
            assert numbers == list(range(published))

    asyncio.run(scenario())


def test_a_kernel_that_does_not_read_stops_the_sender(publisher: Publisher) -> None:
    async def scenario() -> None:
        got = Collected()
        async with channels_to(publisher.urls, got) as channels:
            await asyncio.wait_for(channels.wait_ready(), DEADLINE_S)
            for number in range(2_000):
                channels.send(Channel.SHELL, [*plain(number, size=4096)[2:]], number)
            assert len(got.sent) < 1_500
            assert "'shell': 0" not in repr(channels)
            shell = publisher.sockets["shell"]
            for number in range(2_000):
                while not shell.poll(0):  # noqa: ASYNC110 - passes of the sender's loop
                    await asyncio.sleep(0)
                frames = shell.recv_multipart()
                assert json.loads(frames[3])["n"] == number
            assert got.sent == list(range(2_000))

    asyncio.run(scenario())


def test_close_forgets_what_was_queued(publisher: Publisher) -> None:
    async def scenario() -> None:
        got = Collected()
        async with channels_to(publisher.urls, got) as channels:
            channels.send(Channel.SHELL, request("kernel_info_request"), 1)
        channels.send(Channel.SHELL, request("kernel_info_request"), 2)
        assert got.sent == []

    asyncio.run(scenario())


def test_nothing_is_there_to_connect_to(short_folder: Path) -> None:
    async def scenario() -> None:
        got = Collected()
        urls = {name: f"ipc://{short_folder}/{name}" for name in CHANNELS}
        async with channels_to(urls, got) as channels:
            assert await channels.drain(1.0)
            assert not channels.ready

    asyncio.run(scenario())
