"""Freezing: every process of a machine stands still, daemons in their own session included."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.local.engines import process_tree
from gateway.local.engines.process_tree import Process, StopWalk, family_of, parse_stat
from tests.local.engine_bench import WAYS, Beating, engine_bench, facts, has_cgroups
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux processes")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "cgroup" and not has_cgroups():
        pytest.skip("no writable cgroup v2 here")
    return str(request.param)


def test_a_daemon_in_its_own_session_is_frozen_thawed_and_killed(way: str) -> None:
    async def scenario() -> None:
        async with engine_bench(way) as bench:
            machine = await bench.start()
            beating = await bench.start_beating(machine)
            assert os.getsid(beating.pid) not in (machine.pid, os.getsid(0))
            for _ in range(3):
                await bench.engine.freeze(machine)
                assert beating.is_still()
                await bench.engine.thaw(machine)
                await beating.beats()
            await bench.engine.freeze(machine)
            await bench.engine.kill(machine)
            assert not psutil.pid_exists(beating.pid)

    asyncio.run(scenario())


def test_only_the_frozen_machine_stands_still(way: str) -> None:
    async def scenario() -> None:
        async with engine_bench(way) as bench:
            image = bench.image()
            asleep, awake = await bench.start(image), await bench.start(image)
            one, two = await bench.start_beating(asleep), await bench.start_beating(awake)
            await bench.engine.freeze(asleep)
            await two.beats()
            assert one.is_still()
            assert (await facts(awake))["pid"] == awake.pid
            await bench.engine.kill(asleep)
            await two.beats()

    asyncio.run(scenario())


FORKING = """
import os, sys, time
open(sys.argv[1], "w").close()
while True:
    if os.fork():
        time.sleep(0.0005)
        os._exit(0)
    os.setsid()
    with open(sys.argv[1], "a") as file:
        file.write("x")
"""


def test_a_process_that_replaces_itself_all_the_time_is_caught(way: str) -> None:
    """The hardest case of a walk: the pid that was seen is gone, its child was not seen yet."""

    async def scenario() -> None:
        async with engine_bench(way) as bench:
            machine = await bench.start()
            path = bench.folder / "beats"
            # As a machine's child: forked by it, so it is told over its own socket.
            script = bench.folder / "forking.py"
            script.write_text(FORKING)
            await start_script(machine, script, path)
            runner = Beating(machine.pid, path)
            await runner.beats()
            for _ in range(5):
                await bench.engine.freeze(machine)
                assert runner.is_still()
                await bench.engine.thaw(machine)
                await runner.beats()
            await bench.engine.kill(machine)
            assert runner_is_gone(script)

    asyncio.run(scenario())


async def start_script(machine: object, script: Path, path: Path) -> None:
    from tests.local.engine_bench import ask

    await ask(machine, f"/script?{script},{path}")  # type: ignore[arg-type]


def runner_is_gone(script: Path) -> bool:
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return not any(str(script) in command for command in commands)


def test_what_was_stopped_before_the_freeze_stays_stopped_after_it() -> None:
    async def scenario() -> None:
        async with engine_bench("tree") as bench:
            machine = await bench.start()
            beating = await bench.start_beating(machine)
            os.kill(beating.pid, signal.SIGSTOP)
            stopped = psutil.Process(beating.pid)
            wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, within_s=5)
            await bench.engine.freeze(machine)
            await bench.engine.thaw(machine)
            await facts(machine)
            assert stopped.status() == psutil.STATUS_STOPPED

    asyncio.run(scenario())


def test_freezing_twice_and_thawing_twice_is_harmless(way: str) -> None:
    async def scenario() -> None:
        async with engine_bench(way) as bench:
            machine = await bench.start()
            beating = await bench.start_beating(machine)
            await bench.engine.freeze(machine)
            await bench.engine.freeze(machine)
            assert beating.is_still()
            await bench.engine.thaw(machine)
            await bench.engine.thaw(machine)
            await beating.beats()

    asyncio.run(scenario())


# -- the pure parts


def test_stat_is_parsed_whatever_the_command_is_called() -> None:
    fields = "S 10 11 12 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4711"
    assert parse_stat(f"7 (a) b ( c) {fields}") == Process(7, 10, 11, "S", "4711")


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(1, 30))
def test_a_family_is_the_root_and_what_descends_from_it(parents: list[int], root: int) -> None:
    table = {
        pid: Process(pid, min(parent, pid - 1), 0, "S", "0")
        for pid, parent in enumerate(parents, start=1)
    }
    family = [process.pid for process in family_of([root], table)]
    expected = {pid for pid in table if root in ancestry(pid, table)}
    assert set(family) == expected
    assert len(family) == len(set(family))
    order = {pid: index for index, pid in enumerate(family)}
    assert all(order[table[pid].ppid] < order[pid] for pid in family if pid != root)


def ancestry(pid: int, table: dict[int, Process]) -> list[int]:
    line = [pid]
    while line[-1] in table:
        line.append(table[line[-1]].ppid)
    return line


def test_a_walk_is_stable_only_after_two_equal_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [
        {1: Process(1, 0, 1, "S", "a")},
        {1: Process(1, 0, 1, "T", "a")},
        {1: Process(1, 0, 1, "T", "a"), 2: Process(2, 1, 1, "R", "b")},  # made before the stop
        {1: Process(1, 0, 1, "T", "a"), 2: Process(2, 1, 1, "T", "b")},
        {1: Process(1, 0, 1, "T", "a"), 2: Process(2, 1, 1, "T", "b")},
    ]
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(
        process_tree, "read_processes", lambda *, without: list(readings[len(steps)].values())
    )
    monkeypatch.setattr(process_tree, "send_signal", lambda p, s: sent.append((p.pid, s)))
    walk = StopWalk([1])
    steps: list[bool] = []
    while len(steps) < len(readings):
        steps.append(walk.step())
    assert steps == [False, False, False, False, True]
    assert sent == [(1, signal.SIGSTOP), (2, signal.SIGSTOP)]
    assert walk.stopped == {(1, "a"), (2, "b")}


def test_a_reused_pid_is_not_signalled() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        process = process_tree.read_process(child.pid)
        assert process is not None
        other = Process(child.pid, process.ppid, process.pgid, "S", "another start")
        process_tree.send_signal(other, signal.SIGKILL)
        assert child.poll() is None
        assert process_tree.still_there([other.key]) == []
        process_tree.kill_family([child.pid], within_s=5, between=lambda: child.poll())
    finally:
        child.kill()
        child.wait()
    process_tree.send_signal(process, signal.SIGKILL)  # gone: nothing happens


def test_ps_gives_the_same_table(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        found = process_tree.read_table_from_ps()[child.pid]
        assert (found.ppid, found.pgid) == (os.getpid(), os.getpgid(child.pid))
    finally:
        child.kill()
        child.wait()


def test_pauses_grow_and_end() -> None:
    seen = list(process_tree.pauses(0.0005))
    assert seen[0] == process_tree.POLL_FIRST_S
    assert all(before <= after for before, after in pairwise(seen))
