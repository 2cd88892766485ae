"""An engine over the stand-in guest, and a check that nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gateway.local.engines import cgroups
from gateway.local.engines.process import ProcessEngine
from gateway.local.interfaces import HookSettings, ImageSpec, MachineSpec, RunningMachine

WITHIN_S = 10.0
STAND_IN = Path(__file__).parent / "stand_in"
WAYS = ("cgroup", "tree")
_numbers = itertools.count()


def has_cgroups() -> bool:
    """Whether this computer lets us use cgroup v2; containers often do not."""
    try:
        cgroups.remove(cgroups.make_root(f"microvm-test-probe-{next(_numbers)}"))
    except cgroups.NoCgroupError:
        return False
    return True


@dataclass
class EngineBench:
    folder: Path
    engine: ProcessEngine
    exits: list[tuple[str, int]] = field(default_factory=list)
    exited: asyncio.Event = field(default_factory=asyncio.Event)

    def image(self, name: str = "image", **settings: Any) -> ImageSpec:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        environment = {"PYTHONPATH": str(STAND_IN), **settings.pop("environment", {})}
        prefix = settings.pop("prefix", Path(sys.prefix))
        hooks = HookSettings(**settings)
        return ImageSpec(name, "1", prefix, folder, hooks=hooks, environment=environment)

    def spec(self, image: ImageSpec | None = None) -> MachineSpec:
        number = next(_numbers)
        return MachineSpec(
            f"microvm-{number}",
            image or self.image(),
            self.folder / f"m-{number}",
            self.folder / f"m-{number}.log",
        )

    async def start(self, image: ImageSpec | None = None) -> RunningMachine:
        return await self.engine.start(self.spec(image))

    async def start_beating(self, machine: RunningMachine) -> Beating:
        path = self.folder / f"beats-{next(_numbers)}"
        pid = int(await ask(machine, f"/daemon?{path}"))
        beating = Beating(pid, path)
        await beating.beats()
        return beating


@dataclass
class Beating:
    """A daemon of a machine: its file grows as long as it runs."""

    pid: int
    path: Path

    def count(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    async def beats(self) -> None:
        """Return when the file has grown."""
        before = self.count()
        await until(lambda: self.count() > before)

    def is_still(self, over_s: float = 0.05) -> bool:
        """Whether the file stays as it is; the daemon writes each 2 ms when it runs."""
        before = self.count()
        with contextlib.suppress(psutil.TimeoutExpired):
            psutil.Process(self.pid).wait(over_s)  # the one wait that a stopped process allows
        return self.count() == before


async def until(condition: Any, within_s: float = WITHIN_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the world outside has no event
            await asyncio.sleep(0.002)


async def ask(machine: RunningMachine, target: str, port: int = 8080) -> bytes:
    """GET from the stand-in; the body."""
    reader, writer = await machine.open_port(port)
    writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    async with asyncio.timeout(WITHIN_S):
        answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n\r\n")[2]


async def facts(machine: RunningMachine) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(await ask(machine, "/health"))
    return result


@contextlib.asynccontextmanager
async def engine_bench(way: str = "tree", **settings: Any) -> AsyncIterator[EngineBench]:
    """An engine that is closed at the end; then no process, folder or cgroup may be left."""
    settings.setdefault("template_module", "stand_in_guest")
    with tempfile.TemporaryDirectory(prefix="mvm-") as name:
        folder = Path(name)
        engine = ProcessEngine(folder, use_cgroup=way == "cgroup", **settings)
        bench = EngineBench(folder, engine)

        def on_exit(microvm_id: str, status: int) -> None:
            bench.exits.append((microvm_id, status))
            bench.exited.set()

        engine.on_exit = on_exit
        before = set(psutil.Process().children(recursive=True))
        try:
            yield bench
        finally:
            groups = [keeper.group for keeper in [engine._keeper] if keeper]
            await engine.close()
        assert not any(group and group.exists() for group in groups)
        assert set(psutil.Process().children(recursive=True)) <= before
        assert mentions(folder) == []
        assert not (folder / "keeper.json").exists()
        assert machine_folders(folder) == []


def machine_folders(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("m-*") if path.is_dir()]


def mentions(folder: Path) -> list[int]:
    """Pids of processes whose command line or environment names the folder."""
    mark = str(folder)
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = [*process.cmdline(), *process.environ().values()]
            if process.pid != psutil.Process().pid and any(mark in word for word in words):
                found.append(process.pid)
    return found
