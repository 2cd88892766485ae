"""WebSockets through the proxy: handshake, splice, quiet cut, suspend, ordered cuts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.local.faults.plan import parse_fault
from gateway.local.interfaces import ProxyLimits
from gateway.local.proxy.wire import WRITE_HIGH_BYTES
from tests.local.proxy_bench import GOOD, UPGRADE, Bench, Client, Handler, bench, switching

SUBPROTOCOL = "Sec-WebSocket-Protocol"
MARKED = f"lambda-microvms, lambda-microvms.authentication.{GOOD}"


async def opened(b: Bench, headers: dict[str, str] | None = None) -> Client:
    """A raw client behind its 101."""
    client = await b.open()
    await client.send("/link", headers or UPGRADE)
    status, _ = await client.head()
    assert status == 101
    return client


# -- handshake


def test_bytes_pass_both_ways_and_count_as_inbound() -> None:
    async def scenario() -> None:
        async with bench(switching) as b:
            client = await opened(b)
            before = sum(b.machine.inbound)
            client.writer.write(b"hello")
            assert await client.reader.readexactly(5) == b"hello"
            assert sum(b.machine.inbound) == before + 5
            assert "splices=1" in repr(b.proxy)

    asyncio.run(scenario())


def test_the_marker_is_answered_and_the_guest_sees_no_subprotocol() -> None:
    seen: list[bytes] = []

    async def scenario() -> None:
        async with bench(remembering(seen)) as b:
            client = await b.open()
            await client.send("/", {**UPGRADE, SUBPROTOCOL: MARKED}, token=None)
            status, headers = await client.head()
            assert status == 101
            assert ("sec-websocket-protocol", "lambda-microvms") in headers
            assert b"protocol" not in seen[0].lower()
            assert GOOD.encode() not in seen[0]

    asyncio.run(scenario())


def test_an_application_protocol_passes_and_the_guests_choice_wins() -> None:
    seen: list[bytes] = []

    async def scenario() -> None:
        async with bench(remembering(seen, b"Sec-WebSocket-Protocol: app\r\n")) as b:
            client = await b.open()
            await client.send("/", {**UPGRADE, SUBPROTOCOL: f"{MARKED}, app"}, token=None)
            _, headers = await client.head()
            assert [value for name, value in headers if name == SUBPROTOCOL.lower()] == ["app"]
            assert b"\r\nSec-WebSocket-Protocol: app\r\n" in seen[0]

    asyncio.run(scenario())


def remembering(seen: list[bytes], extra: bytes = b"") -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\n" + extra + b"\r\n"
        )
        await reader.read()

    return handle


@pytest.mark.parametrize(
    ("protocols", "token", "status"),
    [
        (f"lambda-microvms.authentication.{GOOD}", None, 403),
        ("lambda-microvms", None, 403),
        (f"{MARKED}, lambda-microvms.port.x", None, 400),
        (f"{MARKED}, lambda-microvms.port.22", None, 403),
        (f"{MARKED}, lambda-microvms.port.9090", None, 502),
        (f"{MARKED}, lambda-microvms.port.8080", None, 101),
        ("lambda-microvms", GOOD, 101),
    ],
)
def test_subprotocol_handshakes_that_fail_and_succeed(
    protocols: str, token: str | None, status: int
) -> None:
    async def scenario() -> None:
        async with bench(switching) as b:
            client = await b.open()
            await client.send("/", {**UPGRADE, SUBPROTOCOL: protocols}, token=token)
            assert (await client.head())[0] == status

    asyncio.run(scenario())


def test_a_guest_that_refuses_the_upgrade_answers_normally() -> None:
    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone")

    async def scenario() -> None:
        async with bench(refuses) as b:
            client = await b.open()
            await client.send("/", UPGRADE)
            answer = await client.answer()
            assert (answer.status, answer.body) == (404, b"none")

    asyncio.run(scenario())


def test_an_upgrade_that_nobody_asked_for_is_a_fault_of_the_guest() -> None:
    async def scenario() -> None:
        async with bench(switching) as b:
            assert (await b.ask()).status == 502
            assert (await b.ask(headers={"Connection": "Upgrade", "Upgrade": "h2c"})).status == 502

    asyncio.run(scenario())


def test_bytes_sent_behind_the_heads_are_not_lost() -> None:
    async def eager(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\n\r\nfirst"
        )
        assert await reader.readexactly(5) == b"early"
        writer.write(b"second")
        await reader.read()

    async def scenario() -> None:
        async with bench(eager) as b:
            client = await b.open()
            await client.send("/", UPGRADE)
            client.writer.write(b"early")
            assert (await client.head())[0] == 101
            assert await client.reader.readexactly(11) == b"firstsecond"

    asyncio.run(scenario())


def test_a_real_client_and_a_real_server_talk() -> None:
    async def scenario() -> None:
        async with websocket_bench() as (b, address):
            async with connect(address, subprotocols=["lambda-microvms", *ITEMS]) as link:
                assert link.subprotocol == "lambda-microvms"
                for message in ("text", b"\0" * 1_000_000, "", b"end"):
                    await link.send(message)
                    assert await link.recv() == message
                await (await link.ping())
            with pytest.raises(InvalidStatus) as refused:
                await connect(address)
            assert refused.value.response.status_code == 403
            assert refused.value.response.body == b"Request missing authentication"
            assert b.proxy.machine is b.machine

    asyncio.run(scenario())


ITEMS = [f"lambda-microvms.authentication.{GOOD}"]


@contextlib.asynccontextmanager
async def websocket_bench(
    limits: ProxyLimits | None = None,
) -> AsyncIterator[tuple[Bench, str]]:
    """A bench whose guest echoes messages with a real WebSocket server."""

    async def echo(link: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            async for message in link:
                await link.send(message)

    guest = serve(echo, "127.0.0.1", 0, max_size=None, ping_interval=None)
    async with guest as server, bench(limits=limits) as b:
        b.guest.servers[8080] = server.server
        yield b, f"ws://127.0.0.1:{b.port}/link"


def dial(address: str) -> connect:
    return connect(
        address,
        additional_headers={"X-aws-proxy-auth": GOOD},
        compression=None,
        ping_interval=None,
        max_size=None,
    )


# -- the open socket


def test_both_sides_have_nagle_off() -> None:
    sockets: list[socket.socket] = []

    async def scenario() -> None:
        async with bench(switching) as b:
            await opened(b)
            (splice,) = b.proxy._splices
            sockets.extend(x.transport.get_extra_info("socket") for x in splice._legs.values())
            flags = [s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in sockets]
            assert flags == [1, 1]

    asyncio.run(scenario())


def test_a_slow_reader_stops_the_writer_and_memory_stays_bounded() -> None:
    async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
        )
        writer.transport.set_write_buffer_limits(high=0)
        block = b"\0" * 65536
        for _ in range(64 * 16):
            writer.write(block)
            await writer.drain()

    async def scenario() -> None:
        async with bench(floods) as b:
            client = await opened(b)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            (splice,) = b.proxy._splices
            transports = [leg.transport for leg in splice._legs.values()]
            async with asyncio.timeout(10):
                while not any(leg._reasons for leg in splice._legs.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            assert max(t.get_write_buffer_size() for t in transports) <= 3 * WRITE_HIGH_BYTES
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert len(await client.rest()) == 64 * 1024 * 1024

    asyncio.run(scenario())


def test_a_quiet_socket_is_cut_without_a_close_frame_and_a_ping_keeps_it() -> None:
    async def scenario() -> None:
        limits = ProxyLimits(quiet_socket_s=0.4)
        async with websocket_bench(limits) as (_, address), dial(address) as link:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            while loop.time() < began_s + 1.0:
                await (await link.ping())  # as often as it can: far below the limit
            quiet_s = loop.time()
            with pytest.raises(ConnectionClosed) as cut:
                await asyncio.wait_for(link.recv(), 10)
            assert loop.time() - quiet_s >= 0.3
            assert cut.value.rcvd is None

    asyncio.run(scenario())


def test_suspend_cuts_open_sockets() -> None:
    async def scenario() -> None:
        async with websocket_bench() as (b, address):
            async with dial(address) as link:
                await link.send("x")
                await link.recv()
                b.proxy.cut_connections()
                with pytest.raises(ConnectionClosed) as cut:
                    await asyncio.wait_for(link.recv(), 10)
                assert cut.value.rcvd is None
            async with dial(address) as again:
                await again.send("y")
                assert await again.recv() == "y"

    asyncio.run(scenario())


def test_the_end_of_one_side_reaches_the_other() -> None:
    ended = asyncio.Event()

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
        )
        assert await reader.read() == b"last words"
        writer.write(b"and an answer")
        ended.set()

    async def scenario() -> None:
        async with bench(waits) as b:
            client = await opened(b)
            client.writer.write(b"last words")
            client.writer.write_eof()
            await asyncio.wait_for(ended.wait(), 10)
            assert await client.rest() == b"and an answer"
            async with asyncio.timeout(10):
                while b.proxy._splices:  # noqa: ASYNC110
                    await asyncio.sleep(0)

    asyncio.run(scenario())


def test_each_socket_takes_a_connection() -> None:
    async def scenario() -> None:
        async with bench(switching, ProxyLimits(max_connections=1)) as b:
            client = await opened(b)
            assert (await b.ask()).status == 429
            client.writer.close()
            async with asyncio.timeout(10):
                while b.proxy._splices:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            await opened(b)

    asyncio.run(scenario())


# -- ordered faults


def test_an_ordered_refusal_hits_upgrades_only() -> None:
    async def scenario() -> None:
        async with bench(switching) as b:
            b.faults.add(parse_fault({"kind": "refuse-upgrade", "status": 503}))
            client = await b.open()
            await client.send("/", UPGRADE)
            assert (await client.answer()).status == 503
            await opened(b)

    asyncio.run(scenario())


@pytest.mark.parametrize("direction", ["to-client", "to-guest"])
@pytest.mark.parametrize("after_bytes", [0, 1, 4, 5])
def test_a_cut_at_byte_n_of_a_new_socket(direction: str, after_bytes: int) -> None:
    async def scenario() -> None:
        async with bench(switching) as b:
            order = {"kind": "cut", "direction": direction, "after_bytes": after_bytes}
            b.faults.add(parse_fault(order))
            client = await opened(b)
            client.writer.write(b"hello")
            got = await client.rest()
            assert got == b"hello"[:after_bytes] if direction == "to-client" else len(got) <= 5
            assert b.faults.listed() == []
            again = await opened(b)  # once means once
            again.writer.write(b"hello")
            assert await again.reader.readexactly(5) == b"hello"

    asyncio.run(scenario())


def test_a_cut_of_an_open_socket_counts_from_the_order() -> None:
    async def scenario() -> None:
        async with bench(switching) as b:
            client = await opened(b)
            client.writer.write(b"before")
            assert await client.reader.readexactly(6) == b"before"
            b.faults.add(parse_fault({"kind": "cut", "after_bytes": 3}))
            client.writer.write(b"after")
            assert await client.rest() == b"aft"

    asyncio.run(scenario())


def test_a_cut_now_cuts_now() -> None:
    async def scenario() -> None:
        async with bench(switching) as b:
            client = await opened(b)
            b.faults.add(parse_fault({"kind": "cut"}))
            assert await client.rest() == b""

    asyncio.run(scenario())


@pytest.mark.parametrize("after_bytes", [0, 3])
def test_a_cut_that_is_ordered_three_times_strikes_three_sockets(after_bytes: int) -> None:
    async def scenario() -> None:
        async with bench(switching) as b:
            first, second = await opened(b), await opened(b)
            b.faults.add(parse_fault({"kind": "cut", "after_bytes": after_bytes, "times": 3}))
            for client in (first, second):
                client.writer.write(b"hello")
                assert await client.rest() == b"hello"[:after_bytes]
            assert [fault.times for fault in b.faults.listed()] == [1]
            third = await opened(b)
            third.writer.write(b"hello")
            assert await third.rest() == b"hello"[:after_bytes]
            fourth = await opened(b)
            fourth.writer.write(b"hello")
            assert await fourth.reader.readexactly(5) == b"hello"

    asyncio.run(scenario())


def test_a_cut_with_close_frame_is_seen_as_one() -> None:
    async def scenario() -> None:
        async with websocket_bench() as (b, address):
            order = {"kind": "cut", "after_bytes": 40, "close_frame": True}
            b.faults.add(parse_fault(order))
            async with dial(address) as link:
                got = await echoes_until_closed(link)
            assert 2 <= got <= 4
            assert link.close_code == 1011

    asyncio.run(scenario())


async def echoes_until_closed(link: ClientConnection) -> int:
    """How many 16-byte messages came back before the end."""
    count = 0
    with contextlib.suppress(ConnectionClosed):
        while True:
            await link.send(b"x" * 16)
            await asyncio.wait_for(link.recv(), 10)
            count += 1
    return count


def test_an_ordered_bandwidth_holds_until_it_is_cleared() -> None:
    async def scenario() -> None:
        async with bench(switching) as b:
            client = await opened(b)
            number = b.faults.add(parse_fault({"kind": "bandwidth", "bytes_per_s": 400_000}))
            loop = asyncio.get_running_loop()

            async def round_trip_s() -> float:
                began_s = loop.time()
                client.writer.write(b"x" * 50_000)
                await client.reader.readexactly(50_000)
                return loop.time() - began_s

            slow_s = sum([await round_trip_s() for _ in range(3)])
            assert slow_s >= 0.4  # 300 kB in both directions together, less the first pieces
            b.faults.clear(number)
            assert await round_trip_s() + await round_trip_s() < slow_s

    asyncio.run(scenario())
