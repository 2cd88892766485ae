"""Unix facts, on real processes of this test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from kernel_guest import processes
from tests.support.waiting import wait_until

# Runs in an interpreter of its own: these functions change the process that calls them.
TREE = """
import os, signal, subprocess, sys, time
from kernel_guest import processes
processes.become_subreaper()
# A grandchild in a session of its own whose parent is gone, one that is stopped, a plain child.
subprocess.run(["sh", "-c", "setsid sleep 1000 & setsid sleep 1000 & exit"])
subprocess.Popen(["sleep", "1000"], start_new_session=True)
below = processes.descendants(os.getpid())
os.kill(max(below), signal.SIGSTOP)
print(len(below), processes.end_all_children((), 10.0), len(processes.descendants(os.getpid())))
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@pytest.mark.skipif(not processes.LINUX, reason="needs a child subreaper and /proc")
def test_everything_below_is_ended_whatever_it_did_to_hide() -> None:
    assert run(TREE).split() == ["3", "True", "0"]


@pytest.mark.skipif(not processes.LINUX, reason="parent death signals are Linux")
def test_a_fork_dies_with_its_parent() -> None:
    code = """
import os, signal
from kernel_guest import processes
if processes.fork(lambda: None) == 0:
    os.close(1)
    signal.pause()
"""
    fork_only = subprocess.Popen([sys.executable, "-c", code + "\nelse: input()"], stdin=-1)
    try:
        (child,) = wait_until(lambda: processes.descendants(fork_only.pid), within_s=20)
        fork_only.kill()
        fork_only.wait(20)
        wait_until(lambda: not os.path.exists(f"/proc/{child}"), within_s=20)
    finally:
        fork_only.communicate()


def test_a_child_that_cannot_detach_ends_at_once() -> None:
    code = """
import os
from kernel_guest import processes
pid = processes.fork(lambda: 1 / 0)
assert pid, "the child went on"
print(processes.exit_code_and_signal(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "(70, None)\n"
    assert "ZeroDivisionError" in done.stderr


def test_a_process_with_threads_is_not_forked() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="the-thread")
    thread.start()
    try:
        with pytest.raises(processes.NotForkable, match="the-thread"):
            processes.fork(lambda: None)
    finally:
        gate.set()
        thread.join()


def test_a_process_with_a_zmq_context_is_not_forked() -> None:
    code = """
import zmq
from kernel_guest import processes
assert processes.why_not_forkable() == ""
context = zmq.Context(); context.socket(zmq.PUB)
print(processes.why_not_forkable())
"""
    assert run(code) == "a library runs threads of its own\n"


def test_a_process_with_a_running_loop_is_not_forked() -> None:
    code = """
import asyncio
from kernel_guest import processes
async def main(): print(processes.why_not_forkable())
asyncio.run(main())
"""
    assert run(code) == "an event loop is running\n"


def test_signals_and_children_wake_a_select() -> None:
    code = """
import os, select, signal
from kernel_guest import processes
watch = processes.ChildWatch()
if os.fork() == 0: os._exit(5)
select.select([watch], [], [], 20); watch.drain()
(pid, status), = processes.reap()
print(processes.exit_code_and_signal(status), watch.terminated)
os.kill(os.getpid(), signal.SIGTERM)
select.select([watch], [], [], 20); watch.drain()
print(processes.reap(), watch.terminated)
"""
    assert run(code) == "(5, None) False\n[] True\n"


def test_reset_signals_is_what_a_fresh_interpreter_has() -> None:
    code = """
import signal
from kernel_guest import processes
def state(): return [signal.getsignal(n) for n in signal.valid_signals() - {9, 19}]
fresh = state()
processes.ChildWatch()
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
processes.reset_signals()
print(state() == fresh, signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
    assert run(code) == "True set()\n"


def test_only_the_kept_descriptors_stay_open() -> None:
    code = """
import os
from kernel_guest import processes
a, b = os.pipe()
processes.close_inherited_fds([b])
left = {fd for fd in processes.open_fds() if os.path.exists(f"/dev/fd/{fd}")}
print(a in left, {0, 1, 2, b} <= left, len(left))
"""
    assert run(code) == "False True 4\n"


def test_wait_statuses_are_told_apart() -> None:
    assert processes.exit_code_and_signal(3 << 8) == (3, None)
    assert processes.exit_code_and_signal(int(signal.SIGKILL)) == (None, signal.SIGKILL)
