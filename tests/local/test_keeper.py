"""The keeper: whoever dies, and however, nothing of a machine is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import ANY

import psutil
import pytest

from gateway.local.engines import cgroups, keeper
from tests.local.engine_bench import (
    WAYS,
    ask,
    engine_bench,
    has_cgroups,
    mentions,
    until,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux processes")

#: A service that starts a machine with a daemon in it, says so, and waits to be killed.
SERVICE = """
import asyncio, json, sys
from pathlib import Path
from tests.local.engine_bench import EngineBench, ask
from gateway.local.engines.process import ProcessEngine

async def main(folder, way):
    engine = ProcessEngine(folder, use_cgroup=way == "cgroup", template_module="stand_in_guest")
    bench = EngineBench(folder, engine)
    machine, other = await bench.start(), await bench.start()
    beating = await bench.start_beating(machine)
    await bench.engine.freeze(machine)
    print(json.dumps({"daemon": beating.pid, "machine": machine.pid,
                      "keeper": engine._keeper.pid, "folders": [str(machine.folder)]}), flush=True)
    await asyncio.Event().wait()

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "cgroup" and not has_cgroups():
        pytest.skip("no writable cgroup v2 here")
    return str(request.param)


def start_service(folder: Path, way: str) -> tuple[subprocess.Popen[str], dict[str, int]]:
    service = subprocess.Popen(
        [sys.executable, "-c", SERVICE, str(folder), way], stdout=subprocess.PIPE, text=True
    )
    assert service.stdout is not None
    return service, json.loads(service.stdout.readline())


def test_a_killed_service_leaves_nothing_not_even_frozen_machines(way: str) -> None:
    with tempfile.TemporaryDirectory(prefix="mvm-") as name:
        folder = Path(name)
        service, pids = start_service(folder, way)
        group = json.loads((folder / "keeper.json").read_text())["cgroup"]
        assert (group is not None) == (way == "cgroup")
        with service:
            service.kill()
        wait_until(lambda: not psutil.pid_exists(pids["keeper"]), within_s=20)
        assert not psutil.pid_exists(pids["machine"])
        assert not psutil.pid_exists(pids["daemon"])
        assert mentions(folder) == []
        assert [
            path.name for path in folder.iterdir() if path.name[:2] == "m-" and path.is_dir()
        ] == []
        assert not (folder / "keeper.json").exists()
        assert group is None or not Path(group).exists()
        assert (folder / "keeper.log").read_text() == ""


def test_sweep_cleans_when_service_and_keeper_were_killed_together(way: str) -> None:
    with tempfile.TemporaryDirectory(prefix="mvm-") as name:
        folder = Path(name)
        service, pids = start_service(folder, way)
        with service:
            os.kill(pids["keeper"], signal.SIGSTOP)  # so that it cannot clean
            service.kill()
        os.kill(pids["keeper"], signal.SIGKILL)
        assert psutil.pid_exists(pids["machine"])
        keeper.sweep(folder / "keeper.json")
        wait_until(lambda: mentions(folder) == [], within_s=10, what="the end of every process")
        assert not psutil.pid_exists(pids["machine"])
        assert not psutil.pid_exists(pids["daemon"])
        assert not (folder / "keeper.json").exists()
        assert [
            path.name for path in folder.iterdir() if path.name[:2] == "m-" and path.is_dir()
        ] == []
        keeper.sweep(folder / "keeper.json")  # nothing to do is fine


def test_a_killed_keeper_ends_its_machines_and_is_replaced(way: str) -> None:
    async def scenario() -> None:
        async with engine_bench(way) as bench:
            machine = await bench.start()
            beating = await bench.start_beating(machine)
            state = json.loads((bench.folder / "keeper.json").read_text())
            os.kill(state["pid"], signal.SIGKILL)
            await asyncio.wait_for(bench.exited.wait(), 10)
            assert bench.exits == [(machine.microvm_id, signal.SIGKILL)]
            await bench.engine.kill(machine)
            assert not psutil.pid_exists(machine.pid)
            assert not psutil.pid_exists(beating.pid)
            again = await bench.start()
            assert json.loads((bench.folder / "keeper.json").read_text())["pid"] != state["pid"]
            assert await ask(again, "/health")

    asyncio.run(scenario())


def test_ctrl_c_in_the_terminal_does_not_reach_the_keeper() -> None:
    async def scenario() -> None:
        async with engine_bench() as bench:
            machine = await bench.start()
            pid = json.loads((bench.folder / "keeper.json").read_text())["pid"]
            assert os.getsid(pid) == pid
            for signum in (signal.SIGINT, signal.SIGHUP):
                os.kill(pid, signum)
            assert await ask(machine, "/health")
            assert await ask(await bench.start(), "/health")
            os.kill(pid, signal.SIGTERM)  # this one means it: clean and end
            await until(lambda: not psutil.pid_exists(machine.pid))

    asyncio.run(scenario())


def test_the_state_file_is_private_and_names_what_is_to_be_cleaned() -> None:
    async def scenario() -> None:
        async with engine_bench() as bench:
            machine = await bench.start()
            path = bench.folder / "keeper.json"
            assert path.stat().st_mode & 0o777 == 0o600
            wanted = {str(machine.folder): [machine.pid, ANY]}
            await until(lambda: json.loads(path.read_text())["machines"] == wanted)
            await bench.engine.kill(machine)
            await until(lambda: json.loads(path.read_text())["machines"] == {})

    asyncio.run(scenario())


def test_the_capability_report_says_how_machines_are_held(way: str) -> None:
    async def scenario() -> None:
        async with engine_bench(way) as bench:
            report = await bench.engine.capabilities()
            assert report.way == way
            assert report.catches_daemons
            assert not report.isolates
            assert "does not isolate" in report.sentence

    asyncio.run(scenario())


def test_a_group_is_found_below_our_own_in_hybrid_and_pure_systems() -> None:
    hybrid = (
        "30 29 0:26 / /sys/fs/cgroup/freezer rw,relatime shared:1 - cgroup cgroup rw,freezer\n"
        "31 29 0:27 / /sys/fs/cgroup/unified rw,relatime shared:2 - cgroup2 cgroup2 rw\n"
    )
    assert list(cgroups.mounted_hierarchies(hybrid)) == [(Path("/sys/fs/cgroup/unified"), "/")]
    nested = "31 29 0:27 /docker/1 /sys/fs/cgroup rw - cgroup2 cgroup rw,nsdelegate\n"
    assert list(cgroups.mounted_hierarchies(nested)) == [(Path("/sys/fs/cgroup"), "/docker/1")]
    assert cgroups.own_path("9:name=systemd:/x\n0::/user.slice/a\n") == "/user.slice/a"
    assert cgroups.own_path("9:name=systemd:/x\n") is None
