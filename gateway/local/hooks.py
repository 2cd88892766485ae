"""The HTTP client for lifecycle hooks (LM 7.2).

One POST on a fresh connection, answered within the hook's time limit or given
up.  Used for run, resume, suspend and terminate by machines.py and for ready and
validate by an engine's `prepare_image`.
"""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import h11

from gateway.local.behaviours import implements

_PATH = "/aws/lambda-microvms/runtime/v1/"
_READ_BYTES = 16 * 1024
_MAX_ANSWER_BYTES = 256 * 1024
_RETRY_S = 0.05


class HookResult(enum.Enum):
    ANSWERED = "answered"
    TIMED_OUT = "timed out"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class HookOutcome:
    """How a hook call ended; `status` only if it was answered."""

    result: HookResult
    status: int | None = None

    @property
    def ok(self) -> bool:
        return self.status == 200


class PortOpener(Protocol):
    """What is called: a RunningMachine, or whatever stands for one during a build."""

    async def open_port(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]: ...


@implements("hook-post-path", "hook-body-run-only")
async def call_hook(
    machine: PortOpener,
    port: int,
    name: str,
    *,
    timeout_s: float,
    body: Mapping[str, Any] | None = None,
) -> HookOutcome:
    """POST the hook `name` once; refused connections are retried within the limit.

    Never raises for what the guest does or fails to do: the outcome says it.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _call_until_reached(machine, port, name, body)
    except TimeoutError:
        return HookOutcome(HookResult.TIMED_OUT)


@implements("hook-503-retried")
async def poll_hook(
    machine: PortOpener, port: int, name: str, *, timeout_s: float, pause_s: float = 0.1
) -> HookOutcome:
    """POST `ready` or `validate` until the answer is not 503, within the limit (LM 7.2)."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                outcome = await _call_until_reached(machine, port, name, None)
                if outcome.status != 503:
                    return outcome
                await asyncio.sleep(pause_s)
    except TimeoutError:
        return HookOutcome(HookResult.TIMED_OUT)


async def _call_until_reached(
    machine: PortOpener, port: int, name: str, body: Mapping[str, Any] | None
) -> HookOutcome:
    """A guest that is not listening yet is tried again until the caller's limit."""
    while True:
        try:
            reader, writer = await machine.open_port(port)
        except OSError:
            await asyncio.sleep(_RETRY_S)
            continue
        try:
            return HookOutcome(
                HookResult.ANSWERED, await _exchange(reader, writer, port, name, body)
            )
        except (OSError, h11.ProtocolError):
            return HookOutcome(HookResult.UNREACHABLE)
        finally:
            writer.close()


async def _exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    port: int,
    name: str,
    body: Mapping[str, Any] | None,
) -> int:
    connection = h11.Connection(h11.CLIENT)
    writer.write(_request(connection, port, name, body))
    await writer.drain()
    status: int | None = None
    seen_bytes = 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(_READ_BYTES)
            seen_bytes += len(data)
            if seen_bytes > _MAX_ANSWER_BYTES:
                raise h11.RemoteProtocolError("the hook's answer is too long")
            connection.receive_data(data)
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.EndOfMessage):
            assert status is not None
            return status
        elif isinstance(event, h11.ConnectionClosed):
            raise h11.RemoteProtocolError("the hook closed without an answer")


def _request(
    connection: h11.Connection, port: int, name: str, body: Mapping[str, Any] | None
) -> bytes:
    content = json.dumps(body).encode() if body is not None else b""
    headers = [("Host", f"localhost:{port}"), ("Content-Length", str(len(content)))]
    if body is not None:
        headers.append(("Content-Type", "application/json"))
    pieces = [
        connection.send(h11.Request(method="POST", target=_PATH + name, headers=headers)),
        connection.send(h11.Data(data=content)) if content else b"",
        connection.send(h11.EndOfMessage()),
    ]
    return b"".join(piece or b"" for piece in pieces)
