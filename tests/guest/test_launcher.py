"""Kernels of our launcher, forked and cold, driven as a client drives them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient

from kernel_guest.kernels import SpawnRequest
from tests.guest.machines import (
    DEADLINE_S,
    KEY,
    Machine,
    client_of,
    kernel_in,
    run_cell,
    running_template,
)

# An interrupt takes milliseconds; the cells would last a minute. Room for a busy test machine.
INTERRUPT_S = 10


async def control(client: AsyncKernelClient, kind: str, content: dict[str, Any]) -> Any:
    request = client.session.msg(kind, content)
    client.control_channel.send(request)
    reply = await client.get_control_msg(timeout=DEADLINE_S)
    assert reply["parent_header"]["msg_id"] == request["header"]["msg_id"]
    return reply["content"]


async def until(client: AsyncKernelClient, kind: str) -> dict[str, Any]:
    while True:
        message = await client.get_iopub_msg(timeout=DEADLINE_S)
        if message["msg_type"] == kind:
            content: dict[str, Any] = message["content"]
            return content


def test_input_reaches_the_cell(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine) as (_, _, client):
            client.execute("answer = input('name? ')", allow_stdin=True)
            question = await client.get_stdin_msg(timeout=DEADLINE_S)
            assert question["content"]["prompt"] == "name? "
            client.input("Ada")
            await client.get_shell_msg(timeout=DEADLINE_S)
            assert (await run_cell(client, "print(answer)")).stdout == "Ada\n"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "code",
    ["while True: pass", "import time; time.sleep(60)", "await __import__('asyncio').sleep(60)"],
)
def test_interrupt(machine: Machine, code: str) -> None:
    async def scenario() -> None:
        async with kernel_in(machine) as (host, kernel, client):
            client.execute(f"print('running', flush=True)\n{code}", stop_on_error=False)
            await until(client, "stream")
            assert await host.signal(kernel.pid, signal.SIGINT)
            async with asyncio.timeout(INTERRUPT_S):
                reply = await client.get_shell_msg(timeout=DEADLINE_S)
            assert reply["content"]["ename"] in ("KeyboardInterrupt", "CancelledError")
            assert (await run_cell(client, "1")).status == "ok"

    asyncio.run(scenario())


def test_an_interrupt_stops_the_kernels_children_too(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine) as (host, kernel, client):
            client.execute(
                "print('running', flush=True)\n"
                "import subprocess; subprocess.run(['sleep', '60']).returncode"
            )
            await until(client, "stream")
            await host.signal(kernel.pid, signal.SIGINT)
            reply = await client.get_shell_msg(timeout=DEADLINE_S)
            assert reply["content"]["ename"] == "KeyboardInterrupt"

    asyncio.run(scenario())


def test_the_debugger_stops_at_a_breakpoint(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine) as (_, _, client):

            async def debug(seq: int, command: str, **arguments: Any) -> Any:
                request = {"type": "request", "seq": seq, "command": command}
                reply = await control(client, "debug_request", {**request, "arguments": arguments})
                assert reply["success"], reply
                return reply.get("body")

            code = "a = 1\nb = a + 1\n"
            await debug(1, "initialize", clientID="test", adapterID="")
            await debug(2, "attach")
            source = (await debug(3, "dumpCell", code=code))["sourcePath"]
            lines = [{"line": 2}]
            await debug(4, "setBreakpoints", source={"path": source}, breakpoints=lines)
            await debug(5, "configurationDone")
            client.execute(code)
            while (event := await until(client, "debug_event"))["event"] != "stopped":
                pass
            thread = event["body"]["threadId"]
            frames = (await debug(6, "stackTrace", threadId=thread))["stackFrames"]
            assert frames[0]["line"] == 2
            await debug(7, "continue", threadId=thread)
            reply = await client.get_shell_msg(timeout=DEADLINE_S)
            assert reply["content"]["status"] == "ok"

    asyncio.run(scenario())


def test_a_subshell_answers_while_the_main_shell_is_busy(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine) as (_, _, client):
            # A subshell asked for before the kernel is up is lost (ipykernel 7.4).
            await run_cell(client, "import threading; gate = threading.Event()")
            created = await control(client, "create_subshell_request", {})
            waiting = client.execute("gate.wait(20)")
            content = {"code": "gate.set()", "silent": False, "user_expressions": {}}
            request = client.session.msg("execute_request", content)
            request["header"]["subshell_id"] = created["subshell_id"]
            client.shell_channel.send(request)
            replies = [await client.get_shell_msg(timeout=DEADLINE_S) for _ in range(2)]
            parents = [reply["parent_header"]["msg_id"] for reply in replies]
            assert sorted(parents) == sorted([request["header"]["msg_id"], waiting])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os; os._exit(3)", (3, None)),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", (None, signal.SIGSEGV)),
    ],
)
def test_an_end_is_reported_as_it_happened(
    machine: Machine, code: str, expected: tuple[int | None, int | None]
) -> None:
    async def scenario() -> None:
        async with kernel_in(machine) as (host, kernel, client):
            ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            host.on_exit(lambda *event: ended.set_result(event))
            client.execute(code)
            async with asyncio.timeout(DEADLINE_S):
                assert await ended == (kernel.pid, *expected)

    asyncio.run(scenario())


def test_shutdown_request_runs_exit_hooks_and_ends_with_zero(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine) as (host, kernel, client):
            ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            host.on_exit(lambda *event: ended.set_result(event))
            note = machine.folder / "note"
            code = f"import atexit, pathlib; atexit.register(pathlib.Path({str(note)!r}).touch)"
            await run_cell(client, code)
            reply = await control(client, "shutdown_request", {"restart": False})
            assert reply["status"] == "ok"
            async with asyncio.timeout(DEADLINE_S):
                assert await ended == (kernel.pid, 0, None)
            assert note.exists()
            assert os.listdir(machine.folder / "run") == []

    asyncio.run(scenario())


def test_extra_arguments_are_the_kernels_own(machine: Machine) -> None:
    async def scenario() -> None:
        arguments = ("--IPythonKernel.filter_internal_frames=False", "--no-stdout")
        async with kernel_in(machine, extra_arguments=arguments) as (_, _, client):
            code = "k = get_ipython().kernel; import sys; k.filter_internal_frames, sys.argv[3:]"
            (data,) = (await run_cell(client, code)).data
            assert data["text/plain"] == str((False, list(arguments)))

    asyncio.run(scenario())


PRIVATE = """
import json, multiprocessing, os, random, sys, tempfile, time, numpy
print(json.dumps({
    "random": random.random(), "numpy": numpy.random.random(),
    "authkey": multiprocessing.current_process().authkey.hex(),
    "session": get_ipython().kernel.session.session, "ident": get_ipython().kernel.ident,
    "zone": time.tzname[0], "temp": tempfile.gettempdir(), "backend": None,
}))
"""


@pytest.fixture(scope="module")
def numeric_template() -> Iterator[Any]:
    """A template with the libraries of a profile."""
    with running_template(KERNEL_GUEST_PREIMPORT="numpy, pandas, matplotlib.pyplot") as template:
        yield template


@pytest.fixture
def numeric_machine(numeric_template: Any, short_folder: Path) -> Iterator[Machine]:
    with numeric_template.machine(short_folder) as machine:
        yield machine


def test_forks_share_no_randomness_and_read_the_environment_again(
    numeric_machine: Machine,
) -> None:
    async def scenario() -> None:
        async with numeric_machine.host() as host:
            seen = []
            for zone in ("XST", "YST"):
                env = {"TZ": f"{zone}-5", "TMPDIR": str(numeric_machine.folder)}
                request = SpawnRequest(key=KEY, cwd="/", env=env)
                kernel = await host.spawn(request)
                assert not kernel.cold, kernel.reason
                async with client_of(kernel) as client:
                    seen.append(json.loads((await run_cell(client, PRIVATE)).stdout))
            first, second = seen
            assert (first["zone"], second["zone"]) == ("XST", "YST")
            assert first["temp"] == str(numeric_machine.folder)
            for name in ("random", "numpy", "authkey", "session", "ident"):
                assert first[name] != second[name]

    asyncio.run(scenario())


def test_plots_of_a_preimported_matplotlib_are_inline(numeric_machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(numeric_machine) as (_, kernel, client):
            assert not kernel.cold, kernel.reason
            code = "import matplotlib.pyplot as plt; _ = plt.plot([1, 2])"
            (data,) = (await run_cell(client, code)).data
            assert "image/png" in data

    asyncio.run(scenario())


def test_a_backend_from_the_environment_wins(numeric_machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(numeric_machine, env={"MPLBACKEND": "agg"}) as (_, _, client):
            cell = await run_cell(client, "import matplotlib as m; print(m.get_backend())")
            assert cell.stdout == "agg\n"

    asyncio.run(scenario())


def test_a_start_imports_next_to_nothing(machine: Machine) -> None:
    """What a kernel loads until its first reply belongs into template.MODULES."""

    async def scenario() -> None:
        async with kernel_in(machine) as (_, _, client):
            await run_cell(client, "1 + 1")
            loaded = int((await run_cell(client, "import sys; print(len(sys.modules))")).stdout)
            before = machine.template.call({"op": "ping"})["modules"]
            assert loaded - before <= 2

    asyncio.run(scenario())


def test_the_connection_file_is_private(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine) as (_, _, client):
            code = "import ipykernel; print(ipykernel.get_connection_file())"
            path = (await run_cell(client, code)).stdout.strip()
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            assert stat.S_IMODE(os.stat(machine.folder / "run").st_mode) == 0o700

    asyncio.run(scenario())


def install(packages: Path, version: int) -> None:
    """What pip does for another version, as far as a running interpreter can see it."""
    for old in packages.glob("demo*"):
        shutil.rmtree(old)
    (packages / "demo").mkdir(parents=True)
    (packages / "demo" / "__init__.py").write_text(f"VERSION = {version}\n")
    (packages / f"demo-{version}.dist-info").mkdir()


def test_another_version_of_a_preimported_package_is_seen_after_a_restart(
    short_folder: Path, tmp_path: Path
) -> None:
    packages = tmp_path / "site-packages"
    install(packages, 1)
    env = {"PYTHONPATH": str(packages), "KERNEL_GUEST_PREIMPORT": "demo"}

    async def scenario(machine: Machine) -> None:
        async with machine.host() as host:
            for version in (1, 2):
                if version > 1:
                    install(packages, version)
                kernel = await host.spawn(SpawnRequest(key=KEY, cwd="/"))
                assert kernel.cold == (version > 1)
                async with client_of(kernel) as client:
                    cell = await run_cell(client, "import demo; print(demo.VERSION)")
                    assert cell.stdout == f"{version}\n"
            assert kernel.reason == "installed distributions changed"

    with running_template(**env) as template, template.machine(short_folder) as machine:
        assert template.call({"op": "ping"})["stale"] == ""
        asyncio.run(scenario(machine))
        assert template.call({"op": "ping"})["stale"] == "installed distributions changed"


def test_a_cold_kernel_is_the_same_kernel(machine: Machine) -> None:
    async def scenario() -> None:
        async with kernel_in(machine, env={"PYTHONHASHSEED": "0"}) as (host, kernel, client):
            assert kernel.cold
            assert "PYTHONHASHSEED" in kernel.reason
            code = (
                "import sys; print(type(sys.stdout).__module__, sys.flags.hash_randomization,"
                " sys.argv[0].rpartition('/')[2], __name__)"
            )
            expected = "kernel_guest.publisher 0 ipykernel_launcher.py __main__\n"
            assert (await run_cell(client, code)).stdout == expected
            client.execute("print('running', flush=True)\nwhile True: pass")
            await until(client, "stream")
            assert await host.signal(kernel.pid, signal.SIGINT)
            reply = await client.get_shell_msg(timeout=DEADLINE_S)
            assert reply["content"]["ename"] == "KeyboardInterrupt"

    asyncio.run(scenario())
