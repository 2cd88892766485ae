"""HTTP through the proxy, over real sockets: the checks, the bodies, the bounds."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.local.interfaces import ProxyLimits
from gateway.local.proxy import connection, exchange
from tests.local.proxy_bench import Bench, Client, bench, echo_request, sent_headers

PORT = "x-aws-proxy-port"


def test_a_granted_request_reaches_the_guest_without_the_platform() -> None:
    async def scenario() -> None:
        async with bench(echo_request) as b:
            answer = await b.ask("/a?b=c", {"X-Mine": "1", PORT: "8080"})
            assert answer.status == 200
            assert answer.body.startswith(b"GET /a?b=c HTTP/1.1\r\n")
            assert sent_headers(answer) == {
                "host": f"127.0.0.1:{b.port}",
                "x-mine": "1",
                "connection": "close",
            }
            assert answer.header("x-amzn-requestid")
            assert b.machine.inbound

    asyncio.run(scenario())


MISSING = b"Request missing authentication"
FAILED = b"Token authentication failed"
#: Each row breaks one thing and everything after it in the order of checks.
ORDER = [
    ({"token": None, "host": "evil", "headers": {PORT: "x"}}, 403, MISSING),
    ({"token": "junk", "host": "evil", "headers": {PORT: "x"}}, 403, MISSING),
    ({"token": "b.a.d", "host": "evil", "headers": {PORT: "x"}}, 403, FAILED),
    ({"token": "a.shell.token", "headers": {PORT: "x"}}, 502, b""),
    ({"host": "evil", "headers": {PORT: "x"}}, 403, FAILED),
    ({"headers": {PORT: "x"}}, 400, b"Invalid x-aws-proxy-port"),
    ({"headers": {PORT: "22"}}, 403, b"Access to port denied"),
    ({"headers": {PORT: "9090"}}, 502, b""),
]


@pytest.mark.parametrize(("asked", "status", "body"), ORDER)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_refusals_in_the_order_of_the_checks(
    asked: dict[str, object], status: int, body: bytes, method: str
) -> None:
    async def scenario() -> None:
        async with bench(echo_request) as b:
            client = await b.open()
            content = b"x" * 1000 if method == "POST" else b""
            await client.send(method=method, body=content, **asked)  # type: ignore[arg-type]
            answer = await client.answer(head_only=method == "HEAD")
            assert answer.status == status
            assert answer.body == (b"" if method == "HEAD" else body)
            assert answer.header("content-length") == str(len(body))
            assert answer.header("cache-control") == "private, no-store"
            assert answer.header("x-amzn-requestid")
            reached = status == 502 and body == b"" and asked.get("token") is None
            assert b.machine.admissions == (1 if reached and "token" not in asked else 0)
            # The connection survives a refusal.
            await client.send()
            assert (await client.answer()).status == 200
            client.writer.close()

    asyncio.run(scenario())


def test_a_machine_that_does_not_admit_is_an_empty_502() -> None:
    async def scenario() -> None:
        async with bench(echo_request) as b:
            b.machine.dead = True
            answer = await b.ask()
            assert (answer.status, answer.body) == (502, b"")

    asyncio.run(scenario())


def test_a_guest_that_closes_or_talks_nonsense_is_an_empty_502() -> None:
    answers = iter([b"", b"HELLO\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-", b"\x16\x03\x01"])

    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(next(answers))
        writer.close()

    async def scenario() -> None:
        async with bench(rude) as b:
            for _ in range(4):
                answer = await b.ask()
                assert (answer.status, answer.body) == (502, b"")

    asyncio.run(scenario())


def test_a_guest_that_breaks_off_cuts_the_client() -> None:
    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this")
        writer.close()

    async def scenario() -> None:
        async with bench(breaks) as b:
            client = await b.open()
            await client.send()
            assert b"only this" in await client.rest()

    asyncio.run(scenario())


def test_a_connection_carries_many_requests_pipelined_too() -> None:
    async def scenario() -> None:
        async with bench(echo_request) as b:
            client = await b.open()
            for number in range(3):
                await client.send(f"/{number}")
            for number in range(3):
                assert (await client.answer()).body.startswith(b"GET /%d " % number)
            await client.send("/last", {"Connection": "close"})
            assert (await client.answer()).header("connection") == "close"
            assert await client.rest() == b""

    asyncio.run(scenario())


async def digest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers with length and hash of a body of either framing."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    seen = hashlib.sha256()
    size = 0
    if b"transfer-encoding: chunked" in lines:
        while chunk := int(await reader.readline(), 16):
            data = await reader.readexactly(chunk)
            seen.update(data)
            size += chunk
            await reader.readline()
        await reader.readuntil(b"\r\n")
    else:
        length = next(int(x.split(b": ")[1]) for x in lines if x.startswith(b"content-length"))
        while size < length:
            data = await reader.read(65536)
            if not data:
                raise ConnectionResetError("the proxy broke off")
            seen.update(data)
            size += len(data)
    text = f"{size} {seen.hexdigest()}".encode()
    writer.write(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
        % (len(text), text)
    )
    await writer.drain()
    writer.close()


def expected(data: bytes) -> bytes:
    return f"{len(data)} {hashlib.sha256(data).hexdigest()}".encode()


def test_bodies_pass_in_both_framings() -> None:
    data = bytes(range(256)) * 40

    async def scenario() -> None:
        async with bench(digest) as b:
            client = await b.open()
            await client.send(method="POST", body=data)
            answer = await client.answer()
            assert answer.body == expected(data)
            assert answer.header("transfer-encoding") == "chunked"
            chunked = b"".join(
                b"%x\r\n%b\r\n" % (len(piece), piece)
                for piece in (data[i : i + 700] for i in range(0, len(data), 700))
            )
            await client.send(
                headers={"Transfer-Encoding": "chunked"}, method="POST", body=chunked + b"0\r\n\r\n"
            )
            assert (await client.answer()).body == expected(data)
            assert sum(b.machine.inbound) >= 2 * len(data)
            client.writer.close()

    asyncio.run(scenario())


def test_a_large_upload_streams_with_little_memory() -> None:
    """The guest reads nothing until the client is stuck: then only the buffers are full."""
    size = 64 * 1024 * 1024
    go = asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await digest(reader, writer)

    async def scenario() -> None:
        async with bench(late) as b:
            client = await b.open()
            client.writer.transport.set_write_buffer_limits(high=0)
            await client.send(headers={"Content-Length": str(size)}, method="PUT")
            block = b"\0" * (1024 * 1024)
            sent = 0
            stuck = False
            while sent < size:
                client.writer.write(block)
                sent += len(block)
                try:
                    await asyncio.wait_for(client.writer.drain(), None if stuck else 0.5)
                except TimeoutError:
                    stuck = True
                    # Kernel buffers of two sockets and ours; far from the whole body.
                    assert sum(b.machine.inbound) < 24 * 1024 * 1024
                    go.set()
            go.set()
            assert stuck
            assert (await client.answer()).body.startswith(str(size).encode())
            client.writer.close()

    asyncio.run(scenario())


def test_a_head_request_has_the_length_and_no_body() -> None:
    async def length(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 12345\r\n\r\n")
        writer.close()

    async def scenario() -> None:
        async with bench(length) as b:
            client = await b.open()
            for _ in range(2):
                await client.send(method="HEAD")
                answer = await client.answer(head_only=True)
                assert answer.header("content-length") == "12345"
            client.writer.close()

    asyncio.run(scenario())


def test_expect_100_continue_is_the_guests_to_answer() -> None:
    async def hundred(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"expect: 100-continue" in head.lower()
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(5)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" + body)
        writer.close()

    async def scenario() -> None:
        async with bench(hundred) as b:
            client = await b.open()
            headers = {"Expect": "100-continue", "Content-Length": "5"}
            await client.send(headers=headers, method="POST")
            assert (await client.head())[0] == 100
            client.writer.write(b"12345")
            assert (await client.answer()).body == b"12345"
            client.writer.close()

    asyncio.run(scenario())


def test_an_early_answer_to_an_upload_arrives() -> None:
    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        async with bench(refuses) as b:
            client = await b.open()
            await client.send(headers={"Content-Length": "100000"}, method="PUT")
            client.writer.write(b"x" * 1000)
            answer = await client.answer()
            assert (answer.status, answer.body) == (413, b"big")
            assert await client.rest() == b""  # the rest of the body has no reader

    asyncio.run(scenario())


def test_a_stream_passes_piece_by_piece() -> None:
    step = asyncio.Semaphore(0)

    async def events(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for number in range(3):
            writer.write(b"data: %d\n\n" % number)
            await writer.drain()
            await step.acquire()
        writer.close()

    async def scenario() -> None:
        async with bench(events) as b:
            client = await b.open()
            await client.send()
            assert (await client.head())[0] == 200
            for number in range(3):
                await client.reader.readuntil(b"data: %d\n\n" % number)
                step.release()
            await asyncio.wait_for(client.reader.readuntil(b"\r\n0\r\n\r\n"), 10)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "raw",
    [
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : h\r\n\r\n",
        b"GET http://h/ HTTP/1.1\r\nHost: h\r\n\r\n",
        b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS hello\r\n\r\n",
    ],
)  # fmt: skip
def test_ambiguous_or_broken_requests_never_reach_the_guest(raw: bytes) -> None:
    async def scenario() -> None:
        async with bench(echo_request) as b:
            client = await b.open()
            client.writer.write(raw)
            status, _ = await client.head()
            assert status in (400, 501)
            assert b.machine.admissions == 0
            await client.rest()

    asyncio.run(scenario())


def test_a_bad_chunk_aborts_the_exchange() -> None:
    got = asyncio.Event()

    async def reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read(-1) if not reader.at_eof() else b""
        assert not data.endswith(b"0\r\n\r\n")
        got.set()
        writer.close()

    async def scenario() -> None:
        async with bench(reads) as b:
            client = await b.open()
            headers = {"Transfer-Encoding": "chunked"}
            await client.send(headers=headers, method="POST", body=b"5\r\nabcdefgh\r\n")
            await asyncio.wait_for(got.wait(), 10)
            await client.rest()

    asyncio.run(scenario())


def test_an_oversized_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with bench(echo_request) as b:
            answer = await b.ask(headers={"X-Big": "x" * (exchange.MAX_HEAD_BYTES - 2000)})
            assert answer.status == 200
            client = await b.open()
            await client.send(headers={"X-Big": "x" * 2 * exchange.MAX_HEAD_BYTES})
            assert (await client.head())[0] == 431
            assert b.machine.admissions == 1
            await client.rest()

    asyncio.run(scenario())


def test_slow_heads_and_idle_connections_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_WITHIN_S", 0.1)
    monkeypatch.setattr(connection, "IDLE_S", 0.2)

    async def scenario() -> None:
        async with bench(echo_request) as b:
            slow, idle = await b.open(), await b.open()
            slow.writer.write(b"GET / HTTP/1.1\r\nHost:")
            assert await slow.rest() == b""
            assert await idle.rest() == b""

    asyncio.run(scenario())


def test_a_stalled_upload_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with bench(digest, ProxyLimits(quiet_socket_s=0.1)) as b:
            client = await b.open()
            await client.send(headers={"Content-Length": "10"}, method="POST", body=b"")
            answer = await client.answer()
            assert (answer.status, answer.body) == (502, b"")
            await client.rest()

    asyncio.run(scenario())


# -- held requests, suspended machines


def test_a_request_is_held_until_the_machine_admits_it() -> None:
    async def scenario() -> None:
        async with bench(echo_request) as b:
            b.machine.gate = asyncio.Event()
            held = asyncio.create_task(b.ask())
            await wait_for_admissions(b, 1)
            assert not held.done()
            b.machine.gate.set()
            assert (await held).status == 200

    asyncio.run(scenario())


async def wait_for_admissions(b: Bench, count: int) -> None:
    async with asyncio.timeout(10):
        while b.machine.admissions < count:  # noqa: ASYNC110 - the bench has no event for it
            await asyncio.sleep(0)


def test_a_client_that_leaves_abandons_its_held_request() -> None:
    async def scenario() -> None:
        async with bench(echo_request) as b:
            b.machine.gate = asyncio.Event()
            client = await b.open()
            await client.send()
            await wait_for_admissions(b, 1)
            client.writer.close()
            async with asyncio.timeout(10):
                while not b.machine.abandoned:  # noqa: ASYNC110
                    await asyncio.sleep(0)

    asyncio.run(scenario())


def test_a_cut_ends_running_requests_but_not_held_ones() -> None:
    started = asyncio.Event()

    async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/hang" in head:
            started.set()
            await reader.read()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def scenario() -> None:
        async with bench(hangs) as b:
            running = await b.open()
            await running.send("/hang")
            await asyncio.wait_for(started.wait(), 10)
            b.machine.gate = asyncio.Event()
            held = asyncio.create_task(b.ask("/held"))
            await wait_for_admissions(b, 2)
            b.proxy.cut_connections()
            assert await running.rest() == b""
            b.machine.gate.set()
            assert (await held).status == 200

    asyncio.run(scenario())


def test_a_client_that_leaves_ends_the_guests_work() -> None:
    ended = asyncio.Event()
    started = asyncio.Event()

    async def streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nfirst")
        started.set()
        await reader.read()
        ended.set()
        writer.close()

    async def scenario() -> None:
        async with bench(streams) as b:
            client = await b.open()
            await client.send()
            await asyncio.wait_for(started.wait(), 10)
            client.writer.close()
            await asyncio.wait_for(ended.wait(), 10)

    asyncio.run(scenario())


# -- caps


def test_one_connection_too_many_gets_429_while_it_is_one_too_many() -> None:
    async def scenario() -> None:
        async with bench(echo_request, ProxyLimits(max_connections=2)) as b:
            first, second = await b.open(), await b.open()
            for client in (first, second):
                await client.send()
                assert (await client.answer()).status == 200
            answer = await b.ask()
            assert (answer.status, answer.body) == (429, b"")
            assert (await b.ask(token=None)).status == 403  # the token is looked at first
            second.writer.close()
            async with asyncio.timeout(10):
                while (await b.ask()).status == 429:
                    pass
            first.writer.close()

    asyncio.run(scenario())


def test_requests_above_the_rate_get_429() -> None:
    async def scenario() -> None:
        async with bench(echo_request, ProxyLimits(requests_per_s=5.0)) as b:
            statuses = [(await b.ask()).status for _ in range(12)]
            assert statuses[:5] == [200] * 5
            assert statuses.count(429) >= 1
            assert b.machine.admissions == statuses.count(200)

    asyncio.run(scenario())


def test_bandwidth_shows_as_latency() -> None:
    async def scenario() -> None:
        limits = ProxyLimits(bandwidth_bytes_per_s=1_000_000.0)
        async with bench(digest, limits) as b:
            data = b"x" * 300_000
            began_s = asyncio.get_running_loop().time()
            answer = await b.ask(method="POST", body=data)
            took_s = asyncio.get_running_loop().time() - began_s
            assert answer.body == expected(data)
            assert took_s >= 0.2

    asyncio.run(scenario())


# -- ordered faults


def test_ordered_answers_come_instead_of_the_guests() -> None:
    from gateway.local.faults.plan import parse_fault

    async def scenario() -> None:
        async with bench(echo_request) as b:
            b.faults.add(parse_fault({"kind": "bad-gateway", "times": 2}))
            b.faults.add(parse_fault({"kind": "throttle"}))
            statuses = [(await b.ask()).status for _ in range(4)]
            assert statuses == [502, 502, 429, 200]
            b.faults.add(parse_fault({"kind": "bad-gateway", "microvm_id": "another"}))
            assert (await b.ask()).status == 200

    asyncio.run(scenario())


# -- the end


def test_close_ends_everything_and_can_be_called_twice() -> None:
    async def scenario() -> None:
        async with bench(echo_request) as b:
            b.machine.gate = asyncio.Event()
            client: Client = await b.open()
            await client.send()
            await wait_for_admissions(b, 1)
            await b.proxy.close()
            await b.proxy.close()
            assert await client.rest() == b""
            with pytest.raises(OSError):
                await b.open()
            assert "connections=0" in repr(b.proxy)

    asyncio.run(scenario())


def test_a_refused_request_that_waits_for_100_continue_is_answered_at_once() -> None:
    async def scenario() -> None:
        async with bench(echo_request) as b:
            client = await b.open()
            headers = {"Expect": "100-continue", "Content-Length": "50"}
            await client.send(headers=headers, method="POST", token=None)
            answer = await client.answer()
            assert (answer.status, answer.header("connection")) == (403, "close")
            assert await client.rest() == b""

    asyncio.run(scenario())


VALID = (
    b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:1\r\nContent-Length: 3\r\nX-aws-proxy-auth: a\r\n\r\nabc"
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_bytes_break_the_proxy(data: st.DataObject) -> None:
    """Whatever comes, the connection ends or is answered, and the next client is served."""
    noise = data.draw(st.lists(st.tuples(st.integers(0, len(VALID)), st.binary(max_size=8))))
    raw = VALID
    for at, extra in noise:
        raw = raw[:at] + extra + raw[at + len(extra) :]

    async def scenario() -> None:
        async with bench(echo_request) as b:
            client = await b.open()
            client.writer.write(raw)
            client.writer.write_eof()
            await client.rest()
            assert (await b.ask()).status == 200

    with no_errors_logged():
        asyncio.run(scenario())


@contextlib.contextmanager
def no_errors_logged() -> Iterator[None]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    assert [record.getMessage() for record in records] == []
