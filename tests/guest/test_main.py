"""The two command lines of the guest, with its real agent."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernel_guest import processes
from tests.guest.machines import DEADLINE_S, TemplateProcess
from tests.support.waiting import wait_until


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def guest(
    folder: Path, *arguments: str, fds: tuple[int, ...] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m kernel_guest …`, started without its interpreter option on purpose."""
    command = [sys.executable, "-m", "kernel_guest", *arguments]
    with open(folder / "guest.log", "ab") as log:
        process = subprocess.Popen(command, pass_fds=fds, cwd=folder, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def health_of(address: str) -> dict[str, object] | None:
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=5) as answer:
            health: dict[str, object] = json.load(answer)
            return health
    except urllib.error.URLError:
        return None


def option_set(pid: int) -> bool:
    return b"-Xfrozen_modules=off" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_the_image_is_one_machine(short_folder: Path) -> None:
    agent, hook = free_address(), free_address()
    folder = short_folder / "machine"
    addresses = ("--agent-address", agent, "--hook-address", hook)
    with guest(short_folder, "--folder", str(folder), *addresses) as process:
        health = wait_until(lambda: health_of(agent), within_s=DEADLINE_S, what="the agent")
        assert health["kernel"] == "none"
        below = processes.descendants(process.pid)
        assert len(below) == 1  # the agent; kernels come after /run
        assert option_set(process.pid)
        with socket.create_connection(hook.split(":"), timeout=5):
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        assert not any(os.path.exists(f"/proc/{pid}") for pid in below)


def test_the_image_ends_when_its_agent_does(short_folder: Path) -> None:
    agent, hook = free_address(), free_address()
    addresses = ("--agent-address", agent, "--hook-address", hook)
    with guest(short_folder, "--folder", str(short_folder / "m"), *addresses) as process:
        wait_until(lambda: health_of(agent), within_s=DEADLINE_S, what="the agent")
        (pid,) = processes.descendants(process.pid)
        os.kill(pid, signal.SIGKILL)
        assert process.wait(DEADLINE_S) == 1


def test_a_port_that_is_taken_is_one_clear_error(short_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with guest(short_folder, "--agent-address", address) as process:
            assert process.wait(DEADLINE_S) == 2
    log = (short_folder / "guest.log").read_text()
    assert address in log
    assert "Traceback" not in log


def test_the_template_forks_machines_with_the_real_agent(short_folder: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(DEADLINE_S)
        arguments = ("template", "--control-fd", str(theirs.fileno()))
        with guest(short_folder, *arguments, fds=(theirs.fileno(),)) as process:
            theirs.close()
            template = TemplateProcess(process, ours)
            assert template.call({"op": "ping"})["ok"]
            assert option_set(process.pid)
            folder = short_folder / "m"
            folder.mkdir()
            with template.machine(folder) as machine:
                with socket.socket(socket.AF_UNIX) as client:
                    client.settimeout(DEADLINE_S)
                    client.connect(str(folder / "agent.sock"))
                    client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                    assert client.recv(100).startswith(b"HTTP/1.1 200")
                assert machine.pid in processes.descendants(process.pid)
            ours.close()
            assert process.wait(DEADLINE_S) == 0


def test_a_library_that_is_missing_is_one_clear_sentence(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNEL_GUEST_PREIMPORT", "no_such_library")
    addresses = ("--agent-address", "127.0.0.1:0", "--hook-address", "127.0.0.1:0")
    with guest(short_folder, *addresses) as process:
        assert process.wait(DEADLINE_S) == 1
    (line,) = (short_folder / "guest.log").read_text().splitlines()
    assert line.startswith("kernel_guest: Cannot preimport 'no_such_library'")


@pytest.mark.parametrize("arguments", [("template",), ("dance",), ("--agent-address", "nonsense")])
def test_a_wrong_command_line_is_a_usage_error(
    short_folder: Path, arguments: tuple[str, ...]
) -> None:
    with guest(short_folder, *arguments) as process:
        assert process.wait(DEADLINE_S) == 2
    assert "Traceback" not in (short_folder / "guest.log").read_text()
