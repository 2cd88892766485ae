"""The agent as a process: what `run_agent` does besides serving."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.guest.machines import clean_environment
from tests.support.waiting import wait_until

CODE = """
import socket, sys
from pathlib import Path
from kernel_guest.agent import run_agent
agent, hook, host = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:4])
run_agent(agent, hook, host, Path(sys.argv[4]))
"""

IMPORTS = """
import asyncio, sys, threading
import kernel_guest.agent
import zmq
assert threading.active_count() == 1, threading.enumerate()
assert zmq.Context._instance is None
assert asyncio._get_running_loop() is None
assert "boto3" not in sys.modules
"""


@contextmanager
def agent_process(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    ours, theirs = socket.socketpair()
    sockets = [theirs]
    for name in ("a.sock", "h.sock"):
        made = socket.socket(socket.AF_UNIX)
        made.bind(str(folder / name))
        made.listen()
        sockets.insert(-1, made)
    fds = [made.fileno() for made in sockets]
    command = [sys.executable, "-c", CODE, *map(str, fds), str(folder)]
    process = subprocess.Popen(
        command, pass_fds=fds, env=clean_environment(), stderr=subprocess.DEVNULL
    )
    for made in sockets:
        made.close()
    try:
        wait_until(lambda: answers(folder), within_s=30, what="the agent")
        yield process, ours
    finally:
        ours.close()
        process.kill()
        process.wait()


def answers(folder: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(folder / "a.sock"))
        client.sendall(b"GET /keepawake HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n")
        return client.recv(100).startswith(b"HTTP/1.1 204")


def test_it_ends_on_sigterm(short_folder: Path) -> None:
    with agent_process(short_folder) as (process, _):
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0


def test_it_ends_when_the_machine_is_gone(short_folder: Path) -> None:
    with agent_process(short_folder) as (process, host):
        host.close()
        assert process.wait(20) == 0


def test_importing_it_makes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
