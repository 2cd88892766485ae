"""The bridge: from any loop, any thread, after a fork, and at interpreter exit."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from gateway.bridge import Bridge, bridge


@pytest.fixture
def home() -> Iterator[Bridge]:
    made = Bridge(workers=2)
    yield made
    made.close()


async def where() -> str:
    return threading.current_thread().name


def test_one_bridge_per_process() -> None:
    assert bridge() is bridge()
    assert bridge().alive


def test_call_and_run_come_from_plain_code_and_from_several_loops(home: Bridge) -> None:
    assert home.call(where) == "microvm-bridge"
    for _ in range(2):  # two loops, the first one closed by then
        assert asyncio.run(home.run(where())) == "microvm-bridge"

    async def nested() -> str:
        return await home.run(where())

    assert home.call(nested) == "microvm-bridge"


def test_call_from_the_loop_itself_is_refused(home: Bridge) -> None:
    async def steps() -> None:
        home.call(where)

    with pytest.raises(RuntimeError, match="block the loop"):
        home.call(steps)


def test_errors_and_cancellation_cross_over(home: Bridge) -> None:
    ended = threading.Event()

    async def trouble() -> None:
        raise LookupError("x")

    async def forever() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    async def cancel_it() -> None:
        task = asyncio.ensure_future(home.run(forever()))
        await home.run(where())  # the other is under way by now
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with pytest.raises(LookupError):
        home.call(trouble)
    asyncio.run(cancel_it())
    assert ended.wait(10)


def test_workers_carry_results_and_errors_and_do_not_block_the_loop(home: Bridge) -> None:
    gate = threading.Event()

    async def steps() -> tuple[str, str]:
        blocked = asyncio.ensure_future(home.work(gate.wait))
        name = await home.work(lambda: threading.current_thread().name)
        gate.set()
        assert await blocked
        with pytest.raises(ZeroDivisionError):
            await home.work(lambda: 1 // 0)
        return name, await where()

    name, loop_name = home.call(steps)
    assert name.startswith("microvm-worker-")
    assert loop_name == "microvm-bridge"


def test_a_job_that_was_cancelled_before_its_turn_does_not_run(home: Bridge) -> None:
    gate, ran = threading.Event(), []
    running = [home.submit(gate.wait) for _ in range(2)]
    waiting = home.submit(lambda: ran.append(1))
    assert waiting.cancel()
    gate.set()
    for future in running:
        future.result(10)
    home.submit(lambda: None).result(10)
    assert ran == []


def test_post_keeps_the_order(home: Bridge) -> None:
    seen: list[int] = []
    for number in range(100):
        home.post(seen.append, number)

    async def steps() -> None:
        home.post(seen.append, 100)

    home.call(steps)
    assert seen == list(range(101))


def test_spawned_tasks_are_kept_until_they_end(home: Bridge) -> None:
    async def steps() -> str:
        return await home.spawn(where(), "a task")

    assert home.call(steps) == "microvm-bridge"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_makes_its_own() -> None:
    code = """
import os
from gateway.bridge import bridge
async def pid(): return os.getpid()
first = bridge()
assert first.call(pid) == os.getpid()
child = os.fork()
if child == 0:
    ok = bridge() is not first and bridge().call(pid) == os.getpid()
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert bridge() is first and first.call(pid) == os.getpid()
"""
    # In a process of its own: forking the test runner with its threads is another matter.
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_it_works_in_atexit() -> None:
    code = """
import atexit, asyncio, socket
from gateway.bridge import bridge
home = bridge()
server = socket.create_server(("127.0.0.1", 0))
async def later():
    reader, writer = await asyncio.open_connection(*server.getsockname())
    writer.close()
    found = await home.work(lambda: socket.getaddrinfo("localhost", 80))
    return bool(found)
def end():
    print("done" if home.call(later) else "no", flush=True)
atexit.register(end)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout == "done\n", done.stderr
