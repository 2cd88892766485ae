"""A whole local service inside the test's own loop, over an engine that a test scripts.

The sockets are real (unix and TCP), the proxy and the API are the real ones; only
the machines are not: each is two small servers that answer hooks and requests as
`Script` says.  Time is whatever clock the test brings.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import boto3
import h11
from botocore.config import Config

from gateway.local.api.context import Context
from gateway.local.client import ServiceInfo, StateFolder
from gateway.local.clock import Clock, ManualClock
from gateway.local.faults import FaultBoard
from gateway.local.fleet import Fleet, Launch
from gateway.local.images.catalog import Catalog
from gateway.local.interfaces import (
    EngineError,
    HookSettings,
    ImageBuildError,
    ImageSpec,
    MachineSpec,
    RunningMachine,
)
from gateway.local.machines import Machine
from gateway.local.proxy import MachineProxy
from gateway.local.service import Parts, Service
from gateway.local.settings import ServiceSettings

T = TypeVar("T")

BASE_IMAGE = "arn:aws:lambda:us-east-1:aws:microvm-image:al2023-1"
ROLE = "arn:aws:iam::000000000000:role/local-build"
ARN = "arn:aws:lambda:us-east-1:000000000000:microvm-image:"
LIMIT_S = 10.0
ALL_HOOKS = HookSettings(
    ready_s=5.0, validate_s=5.0, run_s=5.0, resume_s=5.0, suspend_s=5.0, terminate_s=5.0
)


def run(scenario: Coroutine[Any, Any, T], within_s: float = 30.0) -> T:
    """Run a test's coroutine with a deadline."""

    async def bounded() -> T:
        async with asyncio.timeout(within_s):
            return await scenario

    return asyncio.run(bounded())


@dataclass
class Script:
    """What the engine and its guests do, and what they were asked."""

    statuses: dict[str, int] = field(default_factory=dict)
    hanging: set[str] = field(default_factory=set)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    engine_calls: list[str] = field(default_factory=list)
    build_failure: str | None = None
    failing: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    start_gate: asyncio.Event | None = None
    build_gate: asyncio.Event | None = None
    called: asyncio.Event = field(default_factory=asyncio.Event)

    def hooks(self) -> list[str]:
        return [name for name, _ in self.calls]

    async def until_called(self, name: str) -> None:
        """Return when the hook has been called."""
        async with asyncio.timeout(LIMIT_S):
            while name not in self.hooks():
                self.called.clear()
                await self.called.wait()


class ScriptedMachine:
    """Implements RunningMachine."""

    def __init__(self, spec: MachineSpec, script: Script) -> None:
        self.microvm_id = spec.microvm_id
        self.folder = spec.folder
        self.pid = 0
        self.alive = True
        self.awake = asyncio.Event()
        self.awake.set()
        self._script = script
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True)
        for port in (8080, 9000):
            path = str(self.folder / f"{port}.sock")
            self._servers.append(await asyncio.start_unix_server(self._serve, path))

    async def stop(self) -> None:
        self.alive = False
        self.awake.set()
        for server in self._servers:
            server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def open_port(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(str(self.folder / f"{port}.sock"))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            connection = h11.Connection(h11.SERVER)
            request, body = await _read_request(connection, reader)
            await self.awake.wait()
            status = await self._answer(request.target.decode(), body)
            writer.write(_response(connection, status, request.target))
            await writer.drain()
        except (OSError, h11.ProtocolError, EOFError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, target: str, body: bytes) -> int:
        name = target.rpartition("/")[2]
        if not target.startswith("/aws/lambda-microvms/runtime/v1/"):
            return 200
        self._script.calls.append((name, json.loads(body) if body else None))
        self._script.called.set()
        if name in self._script.hanging:
            await asyncio.Event().wait()
        return self._script.statuses.get(name, 200)


async def _read_request(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> tuple[h11.Request, bytes]:
    request: h11.Request | None = None
    body = b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(65536)
            if not data and request is None:
                raise EOFError
            connection.receive_data(data)
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert request is not None
            return request, body
        else:
            raise EOFError


def _response(connection: h11.Connection, status: int, body: bytes) -> bytes:
    head = h11.Response(
        status_code=status, headers=[("Content-Length", str(len(body))), ("Connection", "close")]
    )
    return (
        (connection.send(head) or b"")
        + (connection.send(h11.Data(data=body)) or b"")
        + (connection.send(h11.EndOfMessage()) or b"")
    )


class ScriptedEngine:
    """Implements Engine."""

    def __init__(self, script: Script) -> None:
        self.on_exit: Callable[[str, int], None] = lambda microvm_id, status: None
        self.script = script
        self.templates: set[tuple[str, str]] = set()
        self.machines: dict[str, ScriptedMachine] = {}

    def has_template(self, image: ImageSpec) -> bool:
        return image.key in self.templates

    async def prepare_image(self, image: ImageSpec, *, call_hooks: bool = True) -> None:
        self.script.engine_calls.append(f"prepare hooks={call_hooks}")
        if self.script.build_gate is not None:
            await self.script.build_gate.wait()
        if self.script.build_failure is not None:
            raise ImageBuildError(self.script.build_failure)
        self.templates.add(image.key)

    async def release_image(self, image: ImageSpec) -> None:
        self.templates.discard(image.key)

    async def start(self, machine: MachineSpec) -> RunningMachine:
        self.script.engine_calls.append("start")
        if self.script.start_gate is not None:
            await self.script.start_gate.wait()
        self._fail("start")
        running = ScriptedMachine(machine, self.script)
        await running.start()
        self.machines[machine.microvm_id] = running
        return running

    async def freeze(self, machine: RunningMachine) -> None:
        self._fail("freeze")
        self.machines[machine.microvm_id].awake.clear()

    async def thaw(self, machine: RunningMachine) -> None:
        self._fail("thaw")
        self.machines[machine.microvm_id].awake.set()

    async def kill(self, machine: RunningMachine) -> None:
        self._fail("kill")
        await self.machines.pop(machine.microvm_id).stop()

    def _fail(self, what: str) -> None:
        self.script.engine_calls.append(what)
        if what in self.script.broken:
            raise ZeroDivisionError(what)
        if what in self.script.failing:
            raise EngineError(f"{what} failed")

    async def close(self) -> None:
        while self.machines:
            await self.machines.popitem()[1].stop()


@dataclass
class House:
    """A running service and everything that a test may look at."""

    service: Service
    info: ServiceInfo
    engine: ScriptedEngine
    script: Script
    clock: Clock
    faults: FaultBoard
    folder: Path

    @property
    def context(self) -> Context:
        assert self.service.context is not None
        return self.service.context

    @property
    def fleet(self) -> Fleet:
        return self.context.fleet

    @property
    def catalog(self) -> Catalog:
        return self.context.catalog

    def spec(self, hooks: HookSettings = ALL_HOOKS, memory_mib: int = 2048) -> ImageSpec:
        """An image whose template runs, without having been built."""
        image = ImageSpec(f"{ARN}direct", "1.0", Path("/"), self.folder, memory_mib, hooks)
        self.engine.templates.add(image.key)
        return image

    async def launch(
        self,
        *,
        image: ImageSpec | None = None,
        idle: tuple[int, int, bool] | None = None,
        payload: str | None = "hello",
        maximum_s: int = 28_800,
        ingress: tuple[str, ...] = ("HTTP_INGRESS",),
    ) -> Machine:
        """A machine that is PENDING, not by the API but as the API would launch it."""
        names = ("maxIdleDurationSeconds", "suspendedDurationSeconds", "autoResumeEnabled")
        policy = dict(zip(names, idle, strict=True)) if idle else None
        launch = Launch(image or self.spec(), maximum_s, ingress, (), payload, idle_policy=policy)
        machine = self.fleet.make(launch)
        await self.fleet.begin(machine)
        return machine

    def client(self, **changed: Any) -> Any:
        """A boto3 client of this service; close it."""
        values: dict[str, Any] = {
            "endpoint_url": self.info.endpoint_url,
            "region_name": self.info.region,
            "aws_access_key_id": self.info.access_key_id,
            "aws_secret_access_key": self.info.secret_access_key,
            "config": Config(retries={"total_max_attempts": 1}, read_timeout=20),
        }
        return boto3.client("lambda-microvms", **{**values, **changed})

    async def call(self, operation: str, /, **members: Any) -> Any:
        """Call an operation through boto3, in a thread."""
        with contextlib.closing(self.client()) as client:
            return await asyncio.to_thread(getattr(client, operation), **members)

    async def active_image(self, name: str = "env", **members: Any) -> str:
        """Create an image over the API and wait until it can be run."""
        await self.call("create_microvm_image", **image_request(self.folder, name, **members))
        await settled(self.catalog)
        return f"{ARN}{name}"


def image_request(prefix_home: Path, name: str, **members: Any) -> dict[str, Any]:
    """A CreateMicrovmImage request for an environment that exists."""
    prefix = prefix_home / "prefix"
    (prefix / "bin").mkdir(parents=True, exist_ok=True)
    python = prefix / "bin" / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    request = {
        "name": name,
        "codeArtifact": {"uri": prefix.as_uri()},
        "baseImageArn": BASE_IMAGE,
        "buildRoleArn": ROLE,
        "hooks": {
            "port": 9000,
            "microvmImageHooks": {"ready": "ENABLED", "validate": "ENABLED"},
            "microvmHooks": dict.fromkeys(("run", "resume", "suspend", "terminate"), "ENABLED"),
        },
    }
    return {**request, **members}


async def spin_until(condition: Callable[[], bool]) -> None:
    """Give the loop its turns until something inside this process has come about."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110  # what is awaited has no event, and no time passes
            await asyncio.sleep(0)


async def settled(catalog: Catalog) -> None:
    """Return when no build and no deletion goes on."""
    async with asyncio.timeout(LIMIT_S):
        await catalog.settled()


@contextlib.asynccontextmanager
async def house(
    settings: ServiceSettings | None = None,
    *,
    clock: Clock | None = None,
    folder: Path | None = None,
) -> AsyncIterator[House]:
    """A service in a folder of its own (or the given one), ended at the end of the block."""
    script = Script()
    engine = ScriptedEngine(script)
    used_clock = clock or ManualClock()
    faults = FaultBoard(used_clock)
    parts = Parts(lambda state_dir: engine, MachineProxy, faults, used_clock)
    with tempfile.TemporaryDirectory(prefix="h-") as made:
        home = folder or Path(made)
        service = Service(StateFolder(home), settings or ServiceSettings(), parts)
        async with service.serving() as info:
            yield House(service, info, engine, script, used_clock, faults, home)
