"""The link's shell over real WebSockets: opening, cuts, calls, and hostile guests."""

from __future__ import annotations

import asyncio
import contextlib
import http
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from gateway.bridge import bridge
from gateway.clock import ManualClock, SystemClock
from gateway.errors import (
    CallFailed,
    GatewayError,
    GuestFault,
    LinkRefused,
    OutcomeUnknown,
    TimedOut,
    Unreachable,
)
from gateway.link import Link
from gateway.link_codec import LinkKey, compress, decompress
from gateway.link_socket import MAX_FRAME_BYTES, ProxyAnswer, is_loopback
from kernel_guest.shared.link import LinkIdentity
from kernel_guest.shared.messages import Channel, Kind, call, jupyter, reply
from tests.gateway.wire_guest import SESSION, Owner, WireGuest, wire_guest

Steps = Callable[[WireGuest, Link, Owner], Coroutine[Any, Any, None]]
HEADERS = {"X-aws-proxy-auth": "a-token", "X-aws-proxy-port": "8080"}


def with_link(steps: Steps, **facts: Any) -> None:
    """Run a test on the bridge with a guest that listens and a link that is not open yet."""

    async def run() -> None:
        key, owner = LinkKey(), Owner()
        async with wire_guest(facts.pop("guest_key", key), **facts) as guest:
            link = Link(
                bridge(), SystemClock(), key, LinkIdentity(SESSION, 1, 1), owner, url=guest.url
            )
            try:
                await steps(guest, link, owner)
            finally:
                await link.close()

    bridge().call(run)


def output(number: int, size: int = 0) -> Any:
    return jupyter(Channel.IOPUB, (b"", b"%d" % number, b"{}", b"{}", b"x" * size))


def numbers(owner: Owner) -> list[int]:
    return [int(message.parts[1]) for message in owner.messages]


def test_it_opens_with_the_tokens_headers_and_carries_messages_both_ways() -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        established = await link.open(HEADERS, 10)
        assert (established.resumed, established.boot_id) == (False, "boot-1")
        assert link.is_open
        headers = guest.requests[0].headers
        assert headers["X-aws-proxy-auth"] == "a-token"
        assert headers["X-aws-proxy-port"] == "8080"
        assert "Sec-WebSocket-Extensions" not in headers
        assert "Sec-WebSocket-Protocol" not in headers
        await guest.send(*(output(n) for n in range(100)))
        await owner.until(lambda: len(owner.messages) == 100)
        link.send(output(7))
        answer = await link.call("echo", {"a": 1}, timeout_s=10)
        assert answer.result == {"op": "echo", "a": 1}
        assert [m.parts[1] for m in guest.received if m.kind is Kind.JUPYTER] == [b"7"]

    with_link(steps)


def test_cuts_lose_and_double_nothing_and_calls_survive_them() -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        await link.open(HEADERS, 10)
        later = asyncio.ensure_future(link.call("slow", timeout_s=30))
        for round_ in range(5):
            for n in range(20):
                guest.core.send(output(20 * round_ + n, 1000))
            await guest.flush()
            link.drop()
            await owner.until(lambda cuts=round_ + 1: len(owner.cuts) == cuts)
            assert (await link.open(HEADERS, 10)).resumed
        await owner.until(lambda: len(owner.messages) == 100)
        assert numbers(owner) == list(range(100))
        assert (await later).result["op"] == "slow"

    with_link(steps)


def test_closing_on_purpose_is_no_cut_and_keeps_what_is_queued() -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        await link.open(HEADERS, 10)
        await link.close()
        assert not link.is_open
        link.send(output(1))
        guest.core.send(output(2))
        assert (await link.open(HEADERS, 10)).resumed
        await owner.until(lambda: numbers(owner) == [2])
        await link.call("ping", timeout_s=10)
        assert [m.parts[1] for m in guest.received if m.kind is Kind.JUPYTER] == [b"1"]
        assert owner.cuts == []

    with_link(steps)


def test_a_guest_that_forgot_everything_is_told_apart() -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        await link.open(HEADERS, 10)
        await link.close()
        key = LinkKey()
        guest.core = WireGuest(key, boot_id="boot-2").core
        guest.core._verify = lambda message, signature: True
        link.send(output(1))
        established = await link.open(HEADERS, 10)
        assert established.restarted
        assert not established.resumed

    with_link(steps)


def test_credit_stops_a_guest_whose_client_does_not_read() -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        await link.open(HEADERS, 10)
        for n in range(60):
            guest.core.send(output(n, 1_000_000))
        await guest.flush()
        await link.call("ping", timeout_s=20)
        window = link.core.limits.ordered_window_bytes
        held = sum(message.size_bytes for message in owner.messages)
        assert held <= window + 1_000_000
        drained = 0
        while drained < 60:
            await owner.until(lambda seen=drained: len(owner.messages) > seen)
            message = owner.messages[drained]
            link.consumed(message.size_bytes, message.lane)
            drained += 1
        assert numbers(owner) == list(range(60))

    with_link(steps)


def test_acknowledgements_ride_along_instead_of_doubling_the_frames() -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        await link.open(HEADERS, 10)
        await link.call("ping", timeout_s=10)
        before = guest.frames
        for n in range(200):
            await guest.send(output(n))
            await owner.until(lambda seen=n: len(owner.messages) > seen)
            message = owner.messages[n]
            link.consumed(message.size_bytes, message.lane)
        # Generous: a busy computer needs many ACK_AFTER_S for 200 messages, but not 200 of them.
        assert guest.frames - before < 150
        async with asyncio.timeout(10):  # and they do come, with nothing else to ride on
            while guest.core.unacked_bytes:
                guest.news.clear()
                await guest.news.wait()

    with_link(steps)


# -- calls -----------------------------------------------------------------------------


def test_calls_fail_by_the_guests_word_by_time_and_by_loss() -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        await link.open(HEADERS, 10)
        guest.answer = lambda made: reply(made["id"], None, {"code": "no", "message": "m" * 9000})
        with pytest.raises(CallFailed) as caught:
            await link.call("x", timeout_s=10)
        assert (caught.value.op, caught.value.code) == ("x", "no")
        assert len(caught.value.message) == 500
        guest.answer = lambda made: None
        with pytest.raises(TimedOut):
            await link.call("x", timeout_s=0.05)
        waiting = asyncio.ensure_future(link.call("x", timeout_s=60))
        await asyncio.sleep(0)
        link.abandon("gone")
        with pytest.raises(OutcomeUnknown, match="gone"):
            await waiting

    with_link(steps)


def test_a_calls_deadline_is_of_the_clock() -> None:
    async def run() -> None:
        clock = ManualClock()
        link = Link(
            bridge(),
            clock,
            LinkKey(),
            LinkIdentity(SESSION, 1, 1),
            Owner(),
            url="http://127.0.0.1:1",
        )
        waiting = asyncio.ensure_future(link.call("x", timeout_s=3600))
        await clock.advance(3599)
        assert not waiting.done()
        await clock.advance(2)
        with pytest.raises(TimedOut):
            await waiting

    bridge().call(run)


@pytest.mark.parametrize(
    "answer",
    [
        reply(99, {}),
        reply(1, None, {"code": 5, "message": None}),
        reply(1, None, {}),
    ],
)
def test_invented_and_malformed_replies_do_no_harm(answer: Any) -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        await link.open(HEADERS, 10)
        guest.answer = lambda made: answer
        with contextlib.suppress(CallFailed, TimedOut):
            await link.call("x", timeout_s=0.2)
        guest.answer = lambda made: reply(made["id"], {"fine": True})
        assert (await link.call("y", timeout_s=10)).result == {"fine": True}

    with_link(steps)


# -- hostile and broken ends --------------------------------------------------------------


def test_a_call_from_the_guest_closes_the_socket() -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        await link.open(HEADERS, 10)
        await guest.send(call(1, "steal", {}))
        await owner.until(lambda: owner.cuts)
        assert "protocol" in owner.cuts[0]
        assert not link.is_open

    with_link(steps)


@pytest.mark.parametrize("data", [b"\x05garbage", "text", b"\x09", b""], ids=repr)
def test_garbage_on_an_open_link_closes_it(data: bytes | str) -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        await link.open(HEADERS, 10)
        assert guest.socket is not None
        await guest.socket.send(data)
        await owner.until(lambda: owner.cuts)
        assert (await link.open(HEADERS, 10)).resumed

    with_link(steps)


def test_a_frame_above_the_cap_closes_the_socket() -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        await link.open(HEADERS, 10)
        assert guest.socket is not None
        await guest.socket.send(bytes(MAX_FRAME_BYTES + 1))
        await owner.until(lambda: owner.cuts)

    with_link(steps)


def test_a_stranger_with_another_key_is_refused() -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        with pytest.raises(LinkRefused) as caught:
            await link.open(HEADERS, 10)
        assert caught.value.code == "bad_signature"
        assert not link.is_open

    with_link(steps, guest_key=LinkKey())


def test_a_stale_generation_is_refused() -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        with pytest.raises(LinkRefused) as caught:
            await link.open(HEADERS, 10)
        assert caught.value.code == "stale_generation"

    with_link(steps, generation=2)


async def say_garbage(socket: ServerConnection) -> None:
    await socket.send(b"\x01{}")
    await socket.wait_closed()


async def say_text(socket: ServerConnection) -> None:
    await socket.send("hello")
    await socket.wait_closed()


async def say_nothing(socket: ServerConnection) -> None:
    await socket.wait_closed()


async def hang_up(socket: ServerConnection) -> None:
    await socket.close()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (say_garbage, GuestFault),
        (say_text, GuestFault),
        (say_nothing, Unreachable),
        (hang_up, Unreachable),
    ],
)
def test_a_handshake_that_is_none(script: Any, kind: type[GatewayError]) -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        guest.script = script
        with pytest.raises(kind):
            await link.open(HEADERS, 0.5 if script is say_nothing else 10)
        assert not link.is_open
        assert owner.cuts == []
        guest.script = None
        assert not (await link.open(HEADERS, 10)).resumed

    with_link(steps)


@pytest.mark.parametrize("status", [403, 429, 502, 404])
def test_what_the_proxy_answers_is_told_with_status_and_text(status: int) -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        def refuse(socket: ServerConnection, request: Request) -> Response:
            answer = socket.respond(http.HTTPStatus(status), "Token authentication failed")
            answer.headers["Retry-After"] = "3"
            return answer

        guest.refuse = refuse
        with pytest.raises(ProxyAnswer) as caught:
            await link.open(HEADERS, 10)
        assert caught.value.status == status
        assert caught.value.retry_after_s == 3.0
        assert "Token authentication failed" in caught.value.sentence

    with_link(steps)


def test_a_redirect_is_not_followed() -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        def refuse(socket: ServerConnection, request: Request) -> Response:
            answer = socket.respond(http.HTTPStatus.FOUND, "")
            answer.headers["Location"] = "/elsewhere"
            return answer

        guest.refuse = refuse
        with pytest.raises(ProxyAnswer) as caught:
            await link.open(HEADERS, 10)
        assert caught.value.status == 302
        assert len(guest.requests) == 1

    with_link(steps)


def test_nobody_there() -> None:
    async def run() -> None:
        async with wire_guest(LinkKey()) as guest:
            url = guest.url
        link = Link(
            bridge(), SystemClock(), LinkKey(), LinkIdentity(SESSION, 1, 1), Owner(), url=url
        )
        with pytest.raises(Unreachable):
            await link.open(HEADERS, 5)
        named = Link(
            bridge(), SystemClock(), LinkKey(), LinkIdentity(SESSION, 1, 1), Owner(),
            url="http://no-such-host.invalid",
        )  # fmt: skip
        with pytest.raises(Unreachable):
            await named.open(HEADERS, 5)

    bridge().call(run)


def test_a_name_is_resolved_on_a_worker() -> None:
    async def steps(guest: WireGuest, link: Link, owner: Owner) -> None:
        link.url = guest.url.replace("127.0.0.1", "localhost")
        await link.open(HEADERS, 10)
        assert guest.requests[0].headers["Host"].startswith("localhost")

    with_link(steps)


# -- codec ------------------------------------------------------------------------------------


def test_compression_pays_and_inflation_is_bounded() -> None:
    text = b"line of output\n" * 100_000
    packed = compress(text)
    assert len(packed) < len(text) / 50
    assert decompress(packed, len(text)) == text
    with pytest.raises(ValueError, match="more than"):
        decompress(packed, len(text) - 1)
    with pytest.raises(Exception):  # noqa: B017 -- zstandard's own error
        decompress(b"no zstd", 100)


def test_compression_is_for_lines_not_for_loopback() -> None:
    def features(url: str) -> tuple[str, ...]:
        link = Link(
            bridge(), SystemClock(), LinkKey(), LinkIdentity(SESSION, 1, 1), Owner(), url=url
        )
        return link.core._features

    assert features("http://127.0.0.1:80") == ()
    assert features("https://x.lambda-microvm.us-east-1.on.aws") != ()
    assert is_loopback("http://[::1]:5")
    assert is_loopback("http://localhost")
    assert not is_loopback("https://10.0.0.1")


def test_the_key_is_never_shown() -> None:
    key = LinkKey()
    assert repr(key) == "<LinkKey>"
    assert len(key.public_bytes) == 32
