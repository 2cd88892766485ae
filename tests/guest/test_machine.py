"""The machine's init, on real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernel_guest import processes
from kernel_guest.kernels import SpawnFailed, SpawnRequest, UnknownKernel
from kernel_guest.machine import LOG_BYTES
from tests.guest.machines import (
    KEY,
    Machine,
    TemplateProcess,
    client_of,
    kernel_in,
    run_cell,
)
from tests.support.waiting import wait_until

# A grandchild in a session of its own, and one that is stopped.
HIDE = """
import os, signal, subprocess
subprocess.run(["sh", "-c", "setsid sleep 1000 &"])
stopped = subprocess.Popen(["sleep", "1000"], start_new_session=True)
os.kill(stopped.pid, signal.SIGSTOP)
"""


def alive(pids: set[int]) -> list[int]:
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_a_forked_kernel_executes_and_its_end_is_reported(machine: Machine) -> None:
    async def scenario() -> None:
        async with machine.host() as host:
            ended: asyncio.Queue[tuple[int, int | None, int | None]] = asyncio.Queue()
            host.on_exit(lambda *event: ended.put_nowait(event))
            kernel = await host.spawn(SpawnRequest(key=KEY, cwd=str(machine.folder)))
            assert not kernel.cold
            async with client_of(kernel) as client:
                reply = await client.execute_interactive("x = 6 * 7", timeout=10)
                assert reply["content"]["status"] == "ok"
            assert await host.kill(kernel.pid)
            async with asyncio.timeout(10):
                assert await ended.get() == (kernel.pid, None, signal.SIGKILL)
            assert not await host.kill(kernel.pid)
            assert os.listdir(machine.folder / "run") == []

    asyncio.run(scenario())


def test_a_kernel_can_be_killed_before_it_has_come_up(machine: Machine) -> None:
    async def scenario() -> None:
        async with machine.host() as host:
            for _ in range(10):
                ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                host.on_exit(lambda *event, f=ended: f.done() or f.set_result(event))
                kernel = await host.spawn(SpawnRequest(key=KEY, cwd="/"))
                assert await host.kill(kernel.pid)
                async with asyncio.timeout(10):
                    assert await ended == (kernel.pid, None, signal.SIGKILL)

    asyncio.run(scenario())


def test_each_kernel_has_its_own_place_and_key(machine: Machine) -> None:
    async def scenario() -> None:
        async with machine.host() as host:
            first = await host.spawn(SpawnRequest(key="first", cwd="/"))
            second = await host.spawn(SpawnRequest(key="second", cwd="/"))
            assert first.connection != second.connection
            async with client_of(second, "second") as client:
                assert (await run_cell(client, "1")).status == "ok"
            async with client_of(first, "first") as client:
                assert (await run_cell(client, "1")).status == "ok"

    asyncio.run(scenario())


@pytest.mark.skipif(not processes.LINUX, reason="needs a child subreaper and /proc")
@pytest.mark.parametrize("how", ["terminate", "agent ends", "agent closes the socket"])
def test_the_end_of_a_machine_leaves_nothing(
    template: TemplateProcess, short_folder: Path, how: str
) -> None:
    async def scenario(machine: Machine) -> None:
        async with machine.host() as host:
            kernel = await host.spawn(SpawnRequest(key=KEY, cwd="/"))
            async with client_of(kernel) as client:
                await run_cell(client, HIDE)
            below = processes.descendants(machine.pid)
            assert len(below) == 4  # agent, kernel and the two that hide
            if how == "terminate":
                os.kill(machine.pid, signal.SIGTERM)
            elif how == "agent ends":
                assert machine.agent is not None
                machine.agent.send(b"exit")
            else:
                await host.close()
            async with asyncio.timeout(10):
                await host.gone.wait()
        status = await asyncio.to_thread(template.wait_ended, machine.pid)
        assert os.waitstatus_to_exitcode(status) == (0 if how == "terminate" else 1)
        assert alive(below) == []
        assert os.listdir(short_folder / "run") == []

    with template.machine(short_folder) as machine:
        asyncio.run(scenario(machine))


def test_orphans_of_a_kernel_are_reaped(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine) as (_, _, client):
            code = "import subprocess; subprocess.run(['sh', '-c', 'true & echo $!'])"
            pid = (await run_cell(client, code, "\n")).stdout.strip()
            await asyncio.to_thread(
                wait_until, lambda: not os.path.exists(f"/proc/{pid}"), within_s=10
            )

    asyncio.run(scenario())


def test_a_kernel_runs_where_and_as_it_was_told(machine: Machine) -> None:
    async def scenario() -> None:
        (machine.folder / "deep").mkdir()
        cwd = str(machine.folder / "deep")
        async with kernel_in(machine, cwd=cwd, env={"GREETING": "hello"}) as (_, _, client):
            code = "import os; print(os.getcwd(), os.environ['GREETING'])"
            assert (await run_cell(client, code)).stdout == f"{cwd} hello\n"

    asyncio.run(scenario())


@pytest.fixture
def spec_machine(template: TemplateProcess, short_folder: Path) -> Iterator[Machine]:
    """A machine whose environment has kernelspecs of its own."""
    share = short_folder / "share"
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    for name, command in {"other": argv, "missing": ["/no/such/program"]}.items():
        (share / "kernels" / name).mkdir(parents=True)
        spec = {
            "argv": command,
            "display_name": name,
            "language": "snake",
            "interrupt_mode": "message",
            "env": {"FROM_SPEC": "yes"},
        }
        (share / "kernels" / name / "kernel.json").write_text(json.dumps(spec))
    with template.machine(short_folder, env={"JUPYTER_PATH": str(share)}) as machine:
        yield machine


def test_another_kernelspec_runs_as_an_ordinary_process(spec_machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(spec_machine, kernel_name="other") as (host, kernel, client):
            assert (kernel.cold, kernel.language) == (True, "snake")
            assert kernel.interrupt_mode == "message"
            code = "import os, sys; print(type(sys.stdout).__module__, os.environ['FROM_SPEC'])"
            assert (await run_cell(client, code)).stdout == "ipykernel.iostream yes\n"
            code = "import os; print(os.getsid(0) == os.getpid(), os.readlink('/proc/self/fd/0'))"
            assert (await run_cell(client, code)).stdout == "True /dev/null\n"
            ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            host.on_exit(lambda *event: ended.set_result(event))
            await host.kill(kernel.pid)
            async with asyncio.timeout(10):
                assert await ended == (kernel.pid, None, signal.SIGKILL)

    asyncio.run(scenario())


def test_what_cannot_be_started_is_said_and_leaves_nothing(spec_machine: Machine) -> None:
    async def scenario() -> None:
        async with spec_machine.host() as host:
            request = {"key": KEY, "cwd": "/"}
            with pytest.raises(SpawnFailed, match="No such file") as caught:
                await host.spawn(SpawnRequest(**request, kernel_name="missing"))
            assert caught.value.code == "not_startable"
            with pytest.raises(UnknownKernel) as unknown:
                await host.spawn(SpawnRequest(**request, kernel_name="cobol"))
            assert {"other", "missing"} <= set(unknown.value.available)
            # The spare kernel's own sockets are there or not yet.
            run = os.listdir(spec_machine.folder / "run")
            assert [name for name in run if not name.startswith("k0-")] == []
            # It serves on.
            kernel = await host.spawn(SpawnRequest(**request))
            async with client_of(kernel) as client:
                assert (await run_cell(client, "1")).status == "ok"

    asyncio.run(scenario())


def test_garbage_on_the_socket_is_answered_or_ends_the_machine(machine: Machine) -> None:
    with machine.connect() as host:
        host.settimeout(10)
        host.sendall(b'{"op": "dance", "id": 5}\n')
        answer = json.loads(host.recv(65536))
        assert (answer["id"], answer["error"]["code"]) == (5, "bad_request")
        host.sendall(b'{"op": "spawn", "id": 6, "request": {}}\n')
        assert json.loads(host.recv(65536))["error"]["code"] == "bad_request"
        below = processes.descendants(machine.pid)
        assert below
        host.sendall(b"not json\n")
        assert os.waitstatus_to_exitcode(machine.template.wait_ended(machine.pid)) == 1
        assert alive(below) == []


def test_a_request_may_come_in_pieces(machine: Machine) -> None:
    with machine.connect() as host:
        host.settimeout(10)
        for piece in (b'{"op": "sig', b'nal", "id": 1, "pid": 1, ', b'"signum": 15}\n{"op"'):
            host.sendall(piece)
        assert json.loads(host.recv(65536)) == {"id": 1, "ok": {"delivered": False}}


def test_the_log_of_kernels_is_bounded(machine: Machine) -> None:
    log = machine.folder / "kernel.log"
    log.write_bytes(b"x" * (LOG_BYTES + 1))

    async def scenario() -> None:
        async with machine.host() as host:
            await host.spawn(SpawnRequest(key=KEY, cwd="/"))
            await host.signal(1, signal.SIGTERM)  # any message makes the machine look
            assert log.stat().st_size < LOG_BYTES

    asyncio.run(scenario())


def test_the_machines_folders_are_private(machine: Machine) -> None:
    with machine.connect() as host:
        assert isinstance(host, socket.socket)
        for name in ("workspace", "run", "journal"):
            assert (machine.folder / name).stat().st_mode & 0o777 == 0o700
