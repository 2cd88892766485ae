"""The hook client against small servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.local.hooks import HookOutcome, HookResult, call_hook, poll_hook
from tests.local.in_process import run


class Target:
    """A port opener whose server answers each connection with the next of these bytes."""

    def __init__(self, answers: list[bytes | None]) -> None:
        self.answers = answers
        self.requests: list[bytes] = []
        self.refusals = 0
        self._port = 0
        self._served: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Target]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for _ in range(10):  # a connection that was just accepted comes to its handler
                await asyncio.sleep(0)
            for writer in self._served.values():
                writer.transport.abort()
            if self._served:
                await asyncio.wait(list(self._served))

    async def open_port(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert port == 9000
        if self.refusals:
            self.refusals -= 1
            raise ConnectionRefusedError
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._served[task] = writer
        with contextlib.suppress(OSError, EOFError):
            await self._answer(reader, writer)
        writer.close()
        del self._served[task]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        self.requests.append(head + await reader.readexactly(length))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await reader.read()  # until the client gives up
        else:
            writer.write(answer)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"


def outcome(answers: list[bytes | None], **options: float) -> tuple[HookOutcome, Target]:
    async def scenario() -> tuple[HookOutcome, Target]:
        async with Target(answers).serving() as target:
            limit_s = options.get("timeout_s", 5.0)
            return await call_hook(target, 9000, "run", timeout_s=limit_s, body={"a": 1}), target

    return run(scenario())


def test_a_call_is_a_post_with_a_json_body() -> None:
    result, target = outcome([OK])
    assert result == HookOutcome(HookResult.ANSWERED, 200)
    assert result.ok
    head, _, body = target.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /aws/lambda-microvms/runtime/v1/run HTTP/1.1\r\n")
    assert b"Host: localhost:9000" in head
    assert body == b'{"a": 1}'


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 500 No\r\nConnection: close\r\n\r\n", HookOutcome(HookResult.ANSWERED, 500)),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, HookOutcome(HookResult.ANSWERED, 200)),
        (b"", HookOutcome(HookResult.UNREACHABLE)),
        (b"garbage\r\n\r\n", HookOutcome(HookResult.UNREACHABLE)),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n" + b"x" * 999_999,
            HookOutcome(HookResult.UNREACHABLE),
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{}", HookOutcome(HookResult.UNREACHABLE)),
    ],
)
def test_answers(answer: bytes, expected: HookOutcome) -> None:
    assert outcome([answer])[0] == expected


def test_a_guest_that_does_not_answer() -> None:
    assert outcome([None], timeout_s=0.05)[0] == HookOutcome(HookResult.TIMED_OUT)


@pytest.mark.parametrize("ask", [call_hook, poll_hook])
def test_a_guest_that_does_not_listen_yet(ask: Callable[..., object]) -> None:
    async def scenario() -> None:
        async with Target([OK]).serving() as target:
            target.refusals = 2
            result = await ask(target, 9000, "ready", timeout_s=5)  # type: ignore[misc]
            assert result.ok
            target.refusals = 10_000
            late = await ask(target, 9000, "ready", timeout_s=0.1)  # type: ignore[misc]
            assert late.result is HookResult.TIMED_OUT

    run(scenario())


def test_503_means_ask_again_until_the_limit() -> None:
    async def scenario() -> None:
        async with Target([BUSY, BUSY, OK]).serving() as target:
            result = await poll_hook(target, 9000, "ready", timeout_s=5, pause_s=0)
            assert result.ok
            assert len(target.requests) == 3
            assert target.requests[0].endswith(b"\r\n\r\n")  # no body
        async with Target([BUSY]).serving() as target:
            result = await poll_hook(target, 9000, "ready", timeout_s=0.1, pause_s=0)
            assert result.result is HookResult.TIMED_OUT

    run(scenario())
