"""Small Unix facts that the template, the machine and its kernels share.

Everything here works on one process at a time and keeps no state: signals as readable bytes,
parentage, descriptors, and the end of a whole tree of processes.

How a tree ends. A descendant may have left its session and its parent (`setsid`, double fork), so
neither process groups nor parent links alone find it. The process that owns the tree is a child
subreaper (Linux): whatever loses its parent becomes its direct child and stays below it. Killing
everything below, again and again until nothing is left, therefore ends, because a killed process
cannot fork and every pass kills all that the previous pass missed. SIGKILL also ends processes
that are stopped or frozen. Where there is no /proc (macOS) only the known process groups are
killed; the documentation says so.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from kernel_guest.shared.errors import SharedError

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

LINUX = sys.platform == "linux"

# Exit status of a fork that did not become what it was made for (EX_SOFTWARE of sysexits.h).
EX_CHILD = 70

# Loaded once in the template: dlopen in every fork would cost more than the call itself.
_libc = ctypes.CDLL(None, use_errno=True) if LINUX else None

# Signals whose handlers a Python parent may have replaced and a fresh interpreter would not have.
_RESET_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class NotForkable(SharedError):  # noqa: N818 - named like its tree: what happened
    """This process has something that a fork cannot copy."""

    code = "not_forkable"


def _prctl(option: int, argument: int) -> None:
    if _libc is None:
        return
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def become_subreaper() -> None:
    """Make orphaned descendants children of this process. Nothing happens outside Linux."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; leave at once if it already has.

    Nothing happens outside Linux.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if LINUX and os.getppid() != parent_pid:
        os._exit(EX_CHILD)


def fork(detach: Callable[[], object]) -> int:
    """Fork a child that dies with this process. Out: its pid, or 0 in the child.

    `detach` runs in the child and lets go of what is the parent's; it sees the child's own pid and
    nothing else of its future. A child that does not get through this ends at once: it must never
    go on as a second parent. Raises NotForkable if this process cannot be copied, OSError if the
    system refuses.
    """
    trouble = why_not_forkable()
    if trouble:
        raise NotForkable(trouble)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _die_with_parent(parent)
            detach()
        except BaseException:
            traceback.print_exc()
            os._exit(EX_CHILD)
    return pid


def why_not_forkable() -> str:
    """What a fork of this process would be without; empty if it would be whole."""
    names = [thread.name for thread in threading.enumerate()]
    if len(names) > 1:
        return f"threads are running: {', '.join(names)}"
    if LINUX and len(os.listdir("/proc/self/task")) > 1:
        return "a library runs threads of its own"
    if asyncio._get_running_loop() is not None:
        return "an event loop is running"
    return ""


def reset_signals() -> None:
    """Give a forked child the signal state of a freshly started interpreter."""
    signal.set_wakeup_fd(-1)
    for number in _RESET_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def open_fds() -> list[int]:
    """The open descriptors of this process; the one used for listing may be among them."""
    return [int(name) for name in os.listdir("/dev/fd")]


def close_inherited_fds(keep: Iterable[int] = ()) -> None:
    """Close every descriptor above 2 that is not in `keep`.

    Called by a forked child after Python objects that own such descriptors were detached:
    a later finalizer would otherwise close a number that means something else by then.
    """
    kept = {0, 1, 2, *keep}
    for fd in open_fds():
        if fd not in kept:
            with suppress(OSError):
                os.close(fd)


def redirect_standard_fds(log_fd: int) -> None:
    """Point stdin to nothing and stdout and stderr to `log_fd`."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(null)


class ChildWatch:
    """SIGCHLD and SIGTERM as something `select` can wait for, in a single-threaded process."""

    def __init__(self) -> None:
        """Install the handlers; only the main thread may do so."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.terminated = False
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_terminate)

    def _on_terminate(self, *_: object) -> None:
        self.terminated = True

    def fileno(self) -> int:
        """Readable after a signal."""
        return self._reader.fileno()

    def drain(self) -> None:
        """Forget the wake-ups so far; the caller then looks at children and at `terminated`."""
        with suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def detach(self) -> None:
        """Close in a forked child, without touching the parent's handlers."""
        self._reader.close()
        self._writer.close()


def reap() -> list[tuple[int, int]]:
    """(pid, wait status) of every child that has ended, orphans included. Never blocks."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))


def exit_code_and_signal(status: int) -> tuple[int | None, int | None]:
    """Split a wait status: (exit code, None) or (None, signal number)."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def _parents() -> dict[int, int]:
    """pid -> parent pid of every process that /proc shows; empty without /proc."""
    found: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with suppress(OSError):  # it ended while we looked
            stat = Path("/proc", entry, "stat").read_bytes()
            # The command in parentheses may itself contain spaces and parentheses.
            found[int(entry)] = int(stat[stat.rindex(b")") + 1 :].split()[1])
    return found


def descendants(root: int) -> set[int]:
    """Every process below `root`, zombies included. Empty without /proc."""
    if not LINUX:
        return set()
    below = {root}
    parents = _parents()
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        below |= more
        grown = bool(more)
    return below - {root}


def kill_quietly(pid: int, number: int) -> bool:
    """Signal one process; False if it no longer exists."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def kill_group(group: int, number: int) -> bool:
    """Signal a process group; False if nothing in it can be signalled any more."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        # macOS answers EPERM for a group that holds only zombies.
        return False
    return True


def end_all_children(groups: Iterable[int], deadline_s: float) -> bool:
    """Kill and reap everything below this process, which is a subreaper.

    In: process groups to kill first (all there is outside Linux), seconds to keep trying.
    Out: whether nothing is left. Called when the machine or the template ends.
    """
    me = os.getpid()
    ends_at = time.monotonic() + deadline_s
    for group in groups:
        kill_group(group, signal.SIGKILL)
    while True:
        for pid in descendants(me):
            kill_quietly(pid, signal.SIGKILL)
        reap()
        if not _has_children():
            return True
        if time.monotonic() > ends_at:
            return False
        _wait_for_child(0.005)


def _has_children() -> bool:
    try:
        return bool(os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) or True
    except ChildProcessError:
        return False


def _wait_for_child(seconds: float) -> None:
    """Give killed children a moment to become reapable."""
    with suppress(InterruptedError):
        select.select([], [], [], seconds)


def try_again(error: OSError) -> bool:
    """Whether a non-blocking call only has to be repeated later."""
    return error.errno in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR)
