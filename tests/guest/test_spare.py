"""The first kernel of a machine is prepared ahead, unless the request says otherwise."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kernel_guest import processes
from kernel_guest.kernel_host import KernelHost, SpawnedKernel
from kernel_guest.kernels import SpawnRequest
from kernel_guest.spare import ANSWER_S, configured
from tests.guest.machines import KEY, Machine, TemplateProcess, client_of, kernel_in, run_cell
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not processes.LINUX, reason="kernels are forked on Linux only")


def prepared(machine: Machine) -> int:
    """Wait until the spare listens; out: its pid, which is the one that is no agent."""
    wait_until(lambda: (machine.folder / "run" / "k0-5").exists(), within_s=20, what="the spare")
    (spare,) = (p for p in processes.descendants(machine.pid) if os.getsid(p) == p)
    return spare


@asynccontextmanager
async def spawned(
    machine: Machine, **request: Any
) -> AsyncIterator[tuple[KernelHost, SpawnedKernel]]:
    async with kernel_in(machine, **request) as (host, kernel, client):
        assert (await run_cell(client, "print(6 * 7)")).stdout == "42\n"
        yield host, kernel


def test_the_first_kernel_is_the_spare_and_the_second_a_fork(machine: Machine) -> None:
    async def scenario() -> None:
        pid = await asyncio.to_thread(prepared, machine)
        async with spawned(machine) as (host, first):
            assert (first.kind, first.pid, first.cold) == ("spare", pid, False)
            second = await host.spawn(SpawnRequest(key=KEY, cwd="/"))
            assert second.kind == "fork"
            async with client_of(second) as client:
                assert (await run_cell(client, "1")).status == "ok"
            ended: asyncio.Queue[Any] = asyncio.Queue()
            host.on_exit(lambda *event: ended.put_nowait(event))
            for kernel in (first, second):
                await host.kill(kernel.pid)
                async with asyncio.timeout(10):
                    assert await ended.get() == (kernel.pid, None, signal.SIGKILL)
            assert os.listdir(machine.folder / "run") == []

    asyncio.run(scenario())


def test_a_request_may_come_before_the_spare_is_ready(machine: Machine) -> None:
    async def scenario() -> None:
        async with spawned(machine) as (_, kernel):
            assert kernel.kind == "spare"

    asyncio.run(scenario())


def test_nothing_that_identifies_it_exists_before_the_request(machine: Machine) -> None:
    prepared(machine)
    assert "kernel-0.json" not in os.listdir(machine.folder / "run")


@pytest.mark.parametrize(
    "request_options",
    [
        {"extra_arguments": ("--no-stderr",)},
        {"env": {"HOME": "elsewhere"}},
        {"env": {"IPYTHONDIR": "elsewhere"}},
        {"env": {"VIRTUAL_ENV": "/elsewhere"}},
        {"env": {"LARGE": "x" * 100_000}},
        {"env": {"PYTHONHASHSEED": "1"}},
    ],
)
def test_a_request_that_it_cannot_serve_gets_another_kernel(
    machine: Machine, request_options: dict[str, Any], tmp_path: Path
) -> None:
    env = request_options.get("env", {})
    options = {
        **request_options,
        "env": {n: v.replace("elsewhere", str(tmp_path)) for n, v in env.items()},
    }

    async def scenario() -> None:
        pid = await asyncio.to_thread(prepared, machine)
        async with spawned(machine, **options) as (_, kernel):
            assert kernel.kind in ("fork", "cold")
            await asyncio.to_thread(
                wait_until, lambda: not os.path.exists(f"/proc/{pid}"), within_s=10
            )
            assert not [name for name in os.listdir(machine.folder / "run") if "k0" in name]

    asyncio.run(scenario())


def test_configuration_of_ipython_runs_in_the_kernels_own_circumstances(
    template: TemplateProcess, short_folder: Path
) -> None:
    profile = short_folder / "ipython" / "profile_default"
    profile.mkdir(parents=True)
    config = "import os; c.InteractiveShellApp.exec_lines = [f\"where = {os.environ['WHERE']!r}\"]"
    (profile / "ipython_config.py").write_text(config)
    env = {"IPYTHONDIR": str(short_folder / "ipython"), "WHERE": "machine"}
    with template.machine(short_folder, env=env) as machine:

        async def scenario() -> None:
            async with kernel_in(machine, env={"WHERE": "request"}) as (_, kernel, client):
                assert kernel.kind == "fork"
                assert (await run_cell(client, "print(where)")).stdout == "request\n"

        asyncio.run(scenario())


def test_startup_files_run_in_the_kernels_own_circumstances(
    template: TemplateProcess, short_folder: Path
) -> None:
    startup = short_folder / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "a.py").write_text("import os; where = os.getcwd(), os.environ['WHERE']")
    env = {"IPYTHONDIR": str(short_folder / "ipython"), "WHERE": "machine"}
    with template.machine(short_folder, env=env) as machine:

        async def scenario() -> None:
            async with kernel_in(machine, env={"WHERE": "request"}) as (_, kernel, client):
                assert kernel.kind == "spare"
                expected = f"{(str(short_folder), 'request')}\n"
                assert (await run_cell(client, "print(where)")).stdout == expected

        asyncio.run(scenario())


def test_a_spare_that_died_is_replaced(machine: Machine) -> None:
    async def scenario() -> None:
        os.kill(await asyncio.to_thread(prepared, machine), signal.SIGKILL)
        async with spawned(machine) as (_, kernel):
            assert kernel.kind == "fork"

    asyncio.run(scenario())


def test_a_spare_that_does_not_answer_is_replaced(machine: Machine) -> None:
    async def scenario() -> None:
        pid = await asyncio.to_thread(prepared, machine)
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(ANSWER_S + 10), spawned(machine) as (_, kernel):
            assert kernel.kind == "fork"
            assert pid not in processes.descendants(machine.pid)

    asyncio.run(scenario())


def test_a_machine_that_ends_unused_leaves_no_spare(
    template: TemplateProcess, short_folder: Path
) -> None:
    with template.machine(short_folder) as machine:
        pid = prepared(machine)
    assert not os.path.exists(f"/proc/{pid}")
    assert os.listdir(short_folder / "run") == []


def test_configuration_files_are_recognised(tmp_path: Path) -> None:
    folders = [str(tmp_path / "none"), str(tmp_path)]
    assert not configured(folders)
    (tmp_path / "ipython_kernel_config.json").touch()
    assert configured(folders)
