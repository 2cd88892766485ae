"""The shell around the link core, on real sockets and without a machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import pytest
import websockets
import zstandard
from tornado.web import Application

from kernel_guest.agent import Agent
from kernel_guest.http_basics import make_server
from kernel_guest.identity import IdentityHolder
from kernel_guest.journal import Journal, JournalLimits
from kernel_guest.link_server import LinkServer, LinkSocket, _decompressor
from kernel_guest.shared.link import LinkLimits
from kernel_guest.shared.messages import Channel, LinkMessage, event, jupyter, reply
from tests.guest.gateway_side import GatewaySide, Served, listener_at, open_socket


def output(number: int, size: int = 10) -> LinkMessage:
    header = b'{"msg_type":"display_data","n":%d}' % number
    return jupyter(Channel.IOPUB, [b"", header, b"{}", b"{}", b'{"data":"%s"}' % (b"x" * size)])


class Bench:
    """A served link and the gateway that may attach to it."""

    def __init__(self, served: Served, link: LinkServer, gateway: GatewaySide) -> None:
        self.served, self.link, self.gateway = served, link, gateway
        self.received: list[LinkMessage] = []

    def numbers(self) -> list[int]:
        return [got.header["n"] for got in self.gateway.got]


@asynccontextmanager
async def bench(
    folder: Path, limits: LinkLimits | None = None, journal: JournalLimits | None = None
) -> AsyncIterator[Bench]:
    received: list[LinkMessage] = []

    def on_message(message: LinkMessage) -> None:
        received.append(message)
        link.consumed(message)

    link = LinkServer(on_message)
    application = Application(
        [("/link", LinkSocket, {"link": link})], websocket_max_message_size=300_000
    )
    with listener_at(folder, "a.sock", tcp=False) as (listener, address):
        server = make_server(application, listener)
        gateway = GatewaySide()
        identity = IdentityHolder().prepare("m", gateway.payload())
        link.begin(identity, Journal(journal or JournalLimits(), folder / "journal"), limits)
        made = Bench(Served(cast(Agent, None), address, address), link, gateway)
        made.received = received
        try:
            yield made
        finally:
            await gateway.drop()
            link.close()
            server.stop()
            await server.close_all_connections()


def test_what_is_urgent_overtakes_what_waits(short_folder: Path) -> None:
    async def scenario() -> None:
        async with bench(short_folder) as made:
            for number in range(100):
                made.link.emit(output(number, 10_000))
            made.link.emit(reply(7, {"now": True}))
            await made.gateway.connect(made.served)
            await made.gateway.until(lambda: len(made.gateway.got) == 100)
            assert made.numbers() == list(range(100))
            assert made.gateway.replies[7].json()["result"] == {"now": True}
            assert made.gateway.first_index(7) < made.gateway.got[0].index

    asyncio.run(scenario())


def test_messages_larger_than_a_frame_and_many_small_ones_keep_their_order(
    short_folder: Path,
) -> None:
    async def scenario() -> None:
        async with bench(short_folder) as made:
            await made.gateway.connect(made.served)
            sizes = [10, 1_500_000, 0, 700_000, *([5] * 500), 3_000_000, 1]
            for number, size in enumerate(sizes):
                made.link.emit(output(number, size))
            await made.gateway.until(lambda: len(made.gateway.got) == len(sizes))
            assert made.numbers() == list(range(len(sizes)))
            assert [len(got.content["data"]) for got in made.gateway.got] == sizes

    asyncio.run(scenario())


def test_what_came_is_acknowledged_without_other_traffic(short_folder: Path) -> None:
    async def scenario() -> None:
        async with bench(short_folder) as made:
            await made.gateway.connect(made.served)
            made.gateway.post(Channel.SHELL, "execute_request", {"code": "1"})
            await made.gateway.flush()
            await made.gateway.until(lambda: made.gateway.core.idle)
            assert len(made.received) == 1

    asyncio.run(scenario())


def test_a_silent_link_sends_nothing(short_folder: Path) -> None:
    async def scenario() -> None:
        async with bench(short_folder) as made:
            await made.gateway.connect(made.served)
            made.link.emit(event("kernel_started", {"pid": 1}))
            await made.gateway.until(lambda: made.gateway.events and made.gateway.core.idle)
            link = made.link._socket
            assert link is not None
            assert link.ws_connection is not None
            before = link.ws_connection._wire_bytes_out
            await asyncio.sleep(0.1)  # five times the time after which acknowledgements go
            assert link.ws_connection._wire_bytes_out == before
            assert made.link._ack_due is None

    asyncio.run(scenario())


def test_a_message_above_the_cap_becomes_a_gap(short_folder: Path) -> None:
    async def scenario() -> None:
        limits = LinkLimits(message_bytes=100_000)
        async with bench(short_folder, limits) as made:
            await made.gateway.connect(made.served)
            large = output(1, 200_000)
            for one in (output(0), large, output(2)):
                made.link.emit(one)
            await made.gateway.until(lambda: len(made.gateway.got) == 2)
            assert made.numbers() == [0, 2]
            assert made.gateway.gaps == [{"messages": 1, "bytes": large.size_bytes}]

    asyncio.run(scenario())


def test_a_gateway_that_does_not_read_costs_bounded_memory(short_folder: Path) -> None:
    async def scenario() -> None:
        bounds = JournalLimits(memory_bytes=500_000, disk_bytes=10_000_000)
        async with bench(short_folder, journal=bounds) as made:
            await made.gateway.connect(made.served)
            made.gateway.reading.clear()
            for number in range(200):
                made.link.emit(output(number, 200_000))
                await asyncio.sleep(0)
            journal = made.link.journal
            assert journal is not None
            statistics = journal.statistics()
            assert statistics.memory_bytes <= 500_000
            assert statistics.disk_bytes <= 10_000_000
            core = made.link.core
            window = core.limits.ordered_window_bytes
            assert core.unacked_bytes + core.queued_bytes <= window + 2_000_000
            made.gateway.reading.set()
            await made.gateway.until(
                lambda: len(made.gateway.got) + sum(g["messages"] for g in made.gateway.gaps) == 200
            )
            numbers = made.numbers()
            assert numbers == sorted(numbers)

    asyncio.run(scenario())


def test_who_never_says_hello_is_shown_the_door(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernel_guest.link_server._GREETING_S", 0.05)

    async def scenario() -> None:
        async with bench(short_folder) as made:
            socket = await open_socket(made.served)
            await socket.recv()
            await asyncio.wait_for(socket.wait_closed(), 10)
            assert socket.close_code == 4002

    asyncio.run(scenario())


def test_a_frame_above_the_cap_closes_the_link_only(short_folder: Path) -> None:
    async def scenario() -> None:
        async with bench(short_folder) as made:
            await made.gateway.connect(made.served)
            raw = made.gateway._socket
            assert raw is not None
            with suppress(websockets.ConnectionClosed):
                await raw.send(b"\x10" * 400_000)
            await made.gateway.until(lambda: made.gateway.close_code is not None)
            await made.gateway.drop()
            await made.gateway.connect(made.served)
            made.link.emit(output(1))
            await made.gateway.until(lambda: made.numbers() == [1])

    asyncio.run(scenario())


def test_a_bomb_is_refused(short_folder: Path) -> None:
    bomb = zstandard.ZstdCompressor().compress(b"\0" * 50_000_000)
    decompress = _decompressor()
    started_s = time.monotonic()
    with pytest.raises(ValueError, match="more than"):
        decompress(bomb, 1000)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 50_000_000)
    with pytest.raises(zstandard.ZstdError):
        decompress(unsized, 1000)
    assert time.monotonic() - started_s < 1
    assert decompress(zstandard.compress(b"abc"), 3) == b"abc"
