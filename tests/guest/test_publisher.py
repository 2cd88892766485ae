"""Output of a kernel whose reader is slow, stopped or late: all of it, in order, in bounds."""

from __future__ import annotations

import asyncio
import re
import signal
import struct
import time
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.asynchronous.client import AsyncKernelClient

from kernel_guest.kernel_host import SpawnedKernel
from kernel_guest.publisher import TEXT_CHARS
from tests.guest.machines import DEADLINE_S, Machine, kernel_in, run_cell

# The cell counts in a file what it has handed over, so that the test sees it held up.
HELD_UP = """
import os, struct
counter = os.open({path!r}, os.O_WRONLY | os.O_CREAT)
for i in range({count}):
    {emit}
    os.pwrite(counter, struct.pack("<Q", i + 1), 0)
"""

SETTLED_S = 0.3
MIB = 1024 * 1024


async def held_up(path: Path) -> int:
    """Wait until the cell's counter stands still; out: where."""
    deadline = time.monotonic() + DEADLINE_S
    last, since = 0, time.monotonic()
    while not last or time.monotonic() - since < SETTLED_S:
        assert time.monotonic() < deadline, "the cell was never held up"
        now = counted(path)
        if now != last:
            last, since = now, time.monotonic()
        await asyncio.sleep(0.01)
    return last


def counted(path: Path) -> int:
    data = path.read_bytes() if path.exists() else b""
    return int(struct.unpack("<Q", data)[0]) if len(data) == 8 else 0


async def collect(client: AsyncKernelClient, request: str) -> list[dict[str, Any]]:
    """Every message of `request` on iopub up to its idle."""
    messages = []
    while True:
        message = await client.get_iopub_msg(timeout=DEADLINE_S)
        if message["parent_header"].get("msg_id") == request:
            messages.append(message)
            if message["content"].get("execution_state") == "idle":
                return messages


def text_of(messages: list[dict[str, Any]]) -> str:
    return "".join(m["content"]["text"] for m in messages if m["msg_type"] == "stream")


def resident_bytes(kernel: SpawnedKernel) -> int:
    return int(psutil.Process(kernel.pid).memory_info().rss)


def start_held_up(client: AsyncKernelClient, machine: Machine, count: int, emit: str) -> str:
    path = str(machine.folder / "counter")
    return str(client.execute(HELD_UP.format(path=path, count=count, emit=emit)))


def test_every_flushed_line_arrives_once_and_in_order(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine, receive_messages=10) as (_, _, client):
            count = 3000
            request = start_held_up(client, machine, count, "print(i, flush=True)")
            assert await held_up(machine.folder / "counter") < count
            messages = await collect(client, request)
            assert text_of(messages).split() == [str(i) for i in range(count)]
            reply = await client.get_shell_msg(timeout=DEADLINE_S)
            assert reply["content"]["status"] == "ok"

    asyncio.run(scenario())


def test_a_held_up_cell_can_be_interrupted_and_its_idle_is_not_lost(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine, receive_messages=10) as (host, kernel, client):
            request = start_held_up(client, machine, 10**9, "print(i, flush=True)")
            await held_up(machine.folder / "counter")
            await host.signal(kernel.pid, signal.SIGINT)
            messages = await collect(client, request)
            lines = re.findall(r"\d+", text_of(messages))
            assert lines == [str(i) for i in range(len(lines))]
            kinds = [message["msg_type"] for message in messages]
            assert kinds[-2:] == ["error", "status"]
            assert messages[-2]["content"]["ename"] == "KeyboardInterrupt"

    asyncio.run(scenario())


def test_text_without_flush_is_bounded_in_memory(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine, receive_messages=10) as (_, kernel, client):
            line = "x" * 1023
            await run_cell(client, f"line = {line!r}")
            before = resident_bytes(kernel)
            count = 150 * 1024  # 150 MiB
            request = start_held_up(client, machine, count, "print(line)")
            assert await held_up(machine.folder / "counter") < count
            assert resident_bytes(kernel) - before < 100 * MIB
            total = sum(
                len(m["content"]["text"])
                for m in await collect(client, request)
                if m["msg_type"] == "stream"
            )
            assert total == count * 1024

    asyncio.run(scenario())


def test_large_displays_are_bounded_in_memory(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine, receive_messages=1) as (_, kernel, client):
            await run_cell(client, "from IPython.display import display; block = 'x' * 10_000_000")
            before = resident_bytes(kernel)
            emit = "display({'text/plain': f'{i:04}' + block}, raw=True)"
            request = start_held_up(client, machine, 30, emit)
            assert await held_up(machine.folder / "counter") < 30
            assert resident_bytes(kernel) - before < 160 * MIB
            numbers = [
                int(message["content"]["data"]["text/plain"][:4])
                for message in await collect(client, request)
                if message["msg_type"] == "display_data"
            ]
            assert numbers == list(range(30))

    asyncio.run(scenario())


def test_the_control_channel_answers_while_a_cell_is_held_up(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine, receive_messages=10) as (_, _, client):
            start_held_up(client, machine, 10**9, "print(i, flush=True)")
            await held_up(machine.folder / "counter")
            for kind in ("kernel_info_request", "shutdown_request"):
                client.control_channel.send(client.session.msg(kind, {"restart": False}))
                reply = await client.get_control_msg(timeout=DEADLINE_S)
                assert reply["content"]["status"] == "ok"

    asyncio.run(scenario())


def test_large_text_comes_in_pieces(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine) as (_, _, client):
            cell = await run_cell(client, "print('0123456789' * 350_000)")
            assert cell.stdout == "0123456789" * 350_000 + "\n"
            sizes = [len(content["text"]) for _, content in cell.outputs]
            assert max(sizes) <= TEXT_CHARS

    asyncio.run(scenario())


def test_characters_are_not_cut_at_read_boundaries(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine) as (_, _, client):
            code = "import os; data = ('ü€' * 50_000 + 'END').encode()\n"
            code += "while data: data = data[os.write(1, data):]"
            cell = await run_cell(client, code, "END")
            assert cell.stdout == "ü€" * 50_000 + "END"
            assert "ü" not in machine.log()

    asyncio.run(scenario())


def test_what_was_said_before_the_end_arrives_after_it(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine, receive_messages=10) as (host, kernel, client):
            ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            host.on_exit(lambda *event: ended.set_result(event))
            count = 400
            request = client.execute(f"for i in range({count}): print(i, flush=True)\nexit()")
            messages = await collect(client, request)
            assert text_of(messages).split() == [str(i) for i in range(count)]
            async with asyncio.timeout(DEADLINE_S):
                assert await ended == (kernel.pid, 0, None)

    asyncio.run(scenario())


def test_threads_publish_beside_a_held_up_cell(machine: Machine) -> None:
    """Several threads wait for room; all of them get it."""

    async def scenario() -> None:
        async with kernel_in(machine, receive_messages=10) as (_, _, client):
            code = (
                "import threading\n"
                "from IPython.display import display\n"
                "def work(name):\n"
                "    for i in range(600): display({'text/plain': f'{name}{i}'}, raw=True)\n"
                "threads = [threading.Thread(target=work, args=(n,)) for n in 'abc']\n"
                "for t in threads: t.start()\n"
                "for t in threads: t.join()\n"
            )
            seen = [
                message["content"]["data"]["text/plain"]
                for message in await collect(client, client.execute(code))
                if message["msg_type"] == "display_data"
            ]
            for name in "abc":
                own = [text for text in seen if text.startswith(name)]
                assert own == [f"{name}{i}" for i in range(600)]

    asyncio.run(scenario())


def test_a_forked_child_prints_while_the_parent_is_held_up(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine, receive_messages=10) as (_, _, client):
            code = (
                "import multiprocessing\n"
                "context = multiprocessing.get_context('fork')\n"
                "child = context.Process(target=print, args=('child',))\n"
                "for i in range(2000):\n"
                "    print(i, flush=True)\n"
                "    if i == 1000: child.start()\n"
                "child.join(); print('code', child.exitcode)\n"
            )
            cell = await run_cell(client, code, "child")
            # A child sends each write at once, its line ends too, in between the parent's lines.
            numbers = re.findall(r"\d+", cell.stdout)
            assert numbers == [*map(str, range(2000)), "0"]

    asyncio.run(scenario())
