"""The template: what it refuses to be, and what it says over its control socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_guest import processes
from kernel_guest.template import MODULES, wanted_libraries
from tests.guest.machines import (
    STAND_IN,
    TemplateProcess,
    kernel_in,
    listener,
    run_cell,
    running_template,
)
from tests.support.waiting import wait_until


def machine_request(folder: Path) -> dict[str, object]:
    fds = {"agent_fd": 0, "hook_fd": 1, "log_fd": 2}
    return {"op": "machine", "microvm_id": "m", "folder": str(folder), "env": {}, **fds}


def run_template(**env: str) -> subprocess.CompletedProcess[str]:
    """A template that is expected to end by itself."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        return subprocess.run(
            [sys.executable, "-Xfrozen_modules=off", str(STAND_IN), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=60,
        )


def test_ping_tells_that_everything_is_imported(template: TemplateProcess) -> None:
    answer = template.call({"op": "ping"})
    assert answer["ok"] is True
    assert answer["modules"] > len(MODULES)


@pytest.mark.parametrize(
    "message",
    [
        {"op": "dance"},
        {"op": "machine", "microvm_id": "m"},
        {"op": "machine", "microvm_id": "m", "folder": "/x", "agent_fd": 9},
        {"no": "op"},
    ],
)
def test_a_bad_request_is_refused_and_the_template_goes_on(
    template: TemplateProcess, message: dict[str, object]
) -> None:
    answer = template.call(message)
    assert answer["error"]["code"] == "bad_request"
    assert answer["microvm_id"] == message.get("microvm_id")
    assert template.call({"op": "ping"})["ok"]


def test_refused_descriptors_are_closed(template: TemplateProcess) -> None:
    before = len(os.listdir(f"/proc/{template.process.pid}/fd"))
    with open(os.devnull) as null:
        for _ in range(5):
            assert "error" in template.call({"op": "dance"}, [null.fileno()])
    assert template.call({"op": "ping"})["ok"]  # it has gone on since
    assert len(os.listdir(f"/proc/{template.process.pid}/fd")) == before


def test_a_machine_that_cannot_begin_is_reported(
    template: TemplateProcess, short_folder: Path
) -> None:
    blocked = short_folder / "file"
    blocked.touch()
    with (
        listener(short_folder / "a") as agent,
        listener(short_folder / "h") as hook,
        open(short_folder / "log", "ab") as log,
    ):
        fds = [agent.fileno(), hook.fileno(), log.fileno()]
        for request in (
            machine_request(blocked),
            {**machine_request(short_folder), "cgroup": "/sys/fs/cgroup/no/such/group"},
        ):
            answer = template.call(request, fds)
            assert os.waitstatus_to_exitcode(template.wait_ended(answer["pid"])) == 1
    text = (short_folder / "log").read_text()
    assert "NotADirectoryError" in text or "FileExistsError" in text


def test_a_machine_has_its_own_session_environment_and_group(
    template: TemplateProcess, short_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "cgroup.procs").touch()  # the engine makes the real one
    options = {"cgroup": str(tmp_path), "env": {"FROM_ENGINE": "1", "KERNEL_GUEST_X": "2"}}
    with template.machine(short_folder, **options) as machine:

        async def scenario() -> None:
            async with kernel_in(machine) as (_, _, client):
                code = "import os; print(os.environ['FROM_ENGINE'], 'KERNEL_GUEST_X' in os.environ)"
                assert (await run_cell(client, code)).stdout == "1 False\n"
                assert os.getsid(machine.pid) == machine.pid

        asyncio.run(scenario())
    assert (tmp_path / "cgroup.procs").read_text() == "0"


def test_machines_of_one_template_are_independent(
    template: TemplateProcess, short_folder: Path
) -> None:
    folders = [short_folder / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    with template.machine(folders[0]) as first, template.machine(folders[1]) as second:
        os.kill(first.pid, signal.SIGKILL)
        assert template.wait_ended(first.pid) == signal.SIGKILL

        async def scenario() -> None:
            async with kernel_in(second) as (_, _, client):
                assert (await run_cell(client, "1")).status == "ok"

        asyncio.run(scenario())


@pytest.mark.skipif(not processes.LINUX, reason="needs parent death signals")
@pytest.mark.parametrize("how", ["socket closed", "terminated", "killed"])
def test_no_machine_outlives_its_template(short_folder: Path, how: str) -> None:
    with running_template() as template, template.machine(short_folder) as machine:

        async def scenario() -> set[int]:
            async with kernel_in(machine) as (_, _, client):
                await run_cell(client, "1")
                below = processes.descendants(template.process.pid)
                assert len(below) == 3
                if how == "socket closed":
                    template.control.close()
                else:
                    number = signal.SIGTERM if how == "terminated" else signal.SIGKILL
                    template.process.send_signal(number)
                await asyncio.to_thread(template.process.wait, 20)
                return below

        below = asyncio.run(scenario())
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in below), within_s=20)
        template.lost = True
        machine.lost = True


def test_the_libraries_of_a_profile_are_named_in_the_environment() -> None:
    assert wanted_libraries({}) == ()
    assert wanted_libraries({"KERNEL_GUEST_PREIMPORT": ""}) == ()
    names = {"KERNEL_GUEST_PREIMPORT": "numpy, pandas  matplotlib,"}
    assert wanted_libraries(names) == ("numpy", "pandas", "matplotlib")


def test_a_library_that_is_not_there_ends_the_template_with_its_name() -> None:
    done = run_template(KERNEL_GUEST_PREIMPORT="no_such_library")
    assert done.returncode == 1
    assert "Cannot preimport 'no_such_library'" in done.stderr


def test_a_library_that_leaves_threads_ends_the_template(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, name='its-thread', daemon=True).start()\n"
    )
    done = run_template(KERNEL_GUEST_PREIMPORT="threaded", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "its-thread" in done.stderr


def test_a_kernel_does_not_wait_for_the_templates_parent(short_folder: Path) -> None:
    """JPY_PARENT_PID of whoever started the service would end every kernel with it."""
    with (
        running_template(JPY_PARENT_PID="999999") as template,
        template.machine(short_folder) as machine,
    ):

        async def scenario() -> None:
            async with kernel_in(machine) as (_, _, client):
                code = "from ipykernel.kernelapp import IPKernelApp as a; print(a().parent_handle)"
                assert (await run_cell(client, code)).stdout == "0\n"

        asyncio.run(scenario())
