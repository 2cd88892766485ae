"""Stopping and ending a family of processes without a cgroup.

A machine's init is a child subreaper, so whatever the machine starts stays
among its descendants, a double-forked `setsid` grandchild included: when its
parent ends it becomes a child of init instead of leaving.  One walk over the
process table still misses children, because the table is read while they are
made.  The rule here is therefore *until stable*:

1. read the table, signal SIGSTOP to every descendant that was not signalled;
2. repeat until two readings in a row show the same family, all of it stopped.

A process seen stopped in the first of these readings cannot have made a child
after it, and a child made before it is in the second reading.  A process in
uninterruptible sleep counts as stopped once its signal is pending: it cannot
return to its program, and `fork` refuses to begin with a signal pending.

What this cannot do: a process that another daemon started on the machine's
behalf (`systemd-run`, a container runtime) is nobody's descendant.  On systems
without `/proc` (macOS) there is no subreaper either: there the family is what
descends from init or shares a process group with it, and a double-forked child
in its own session escapes.  `confinement.py` reports which of these holds.

Standard library only and no event loop: the keeper uses this too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
HAS_PROC = (PROC / "self" / "stat").exists()

#: States in which a process does not run: stopped, traced, zombie, dead (proc(5)).
STOPPED_STATES = frozenset("TtZX")
#: Uninterruptible: stopped for our purpose once it has a signal pending (see above).
UNINTERRUPTIBLE = "D"
#: First and longest pause between two readings of the process table.
POLL_FIRST_S = 0.0005
POLL_MOST_S = 0.02

Key = tuple[int, str]


class SurvivorsError(Exception):
    """Some processes did not stop or end in time; `pids` says which."""

    def __init__(self, what: str, pids: Iterable[int]) -> None:
        self.pids = sorted(pids)
        super().__init__(f"processes {self.pids} did not {what} in time")


@dataclass(frozen=True, slots=True)
class Process:
    """One row of the process table.  `key` tells a reused pid from the old one."""

    pid: int
    ppid: int
    pgid: int
    state: str
    started: str

    @property
    def key(self) -> Key:
        return (self.pid, self.started)


Table = dict[int, Process]


def parse_stat(text: str) -> Process:
    """Parse `/proc/<pid>/stat`; the command name may hold blanks and brackets."""
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    pid = int(head.partition(" ")[0])
    return Process(pid, int(fields[1]), int(fields[2]), fields[0], fields[19])


def read_process(pid: int) -> Process | None:
    """The process now, or None when there is none (or it may not be seen)."""
    if not HAS_PROC:
        return read_table_from_ps().get(pid)
    try:
        return parse_stat((PROC / str(pid) / "stat").read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def read_processes(*, without: Container[int] = ()) -> Iterator[Process]:
    """Every process that can be seen, newest pids first, each read as it is asked for."""
    if not HAS_PROC:
        yield from (p for p in read_table_from_ps().values() if p.pid not in without)
        return
    pids = sorted((int(name) for name in os.listdir(PROC) if name.isdigit()), reverse=True)
    for pid in pids:
        if pid not in without and (process := read_process(pid)) is not None:
            yield process


def read_table() -> Table:
    """All of them by pid."""
    return {process.pid: process for process in read_processes()}


def read_table_from_ps() -> Table:
    """The same through `ps`, for systems without `/proc`."""
    command = ["ps", "-axo", "pid=,ppid=,pgid=,stat=,lstart="]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    return {process.pid: process for line in text.splitlines() if (process := _parse_ps(line))}


def _parse_ps(line: str) -> Process | None:
    fields = line.split(maxsplit=4)
    if len(fields) < 5:
        return None
    pid, ppid, pgid = (int(field) for field in fields[:3])
    return Process(pid, ppid, pgid, fields[3][0], fields[4])


def family_of(roots: Iterable[int], table: Table) -> list[Process]:
    """The roots and all their descendants, parents before children.

    Where there is no subreaper, members of the roots' process groups belong too.
    """
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.ppid, []).append(process.pid)
    pending = [pid for pid in roots if pid in table]
    if not HAS_PROC:
        groups = set(pending)
        pending += [p.pid for p in table.values() if p.pgid in groups and p.pid not in groups]
    family: dict[int, Process] = {}
    while pending:
        pid = pending.pop(0)
        if pid not in family:
            family[pid] = table[pid]
            pending += children.get(pid, [])
    return list(family.values())


def send_signal(process: Process, signum: int) -> None:
    """Signal a process unless its pid has gone or belongs to another one now."""
    now = read_process(process.pid)
    if now is None or now.key != process.key:
        return
    try:
        os.kill(process.pid, signum)
    except ProcessLookupError:
        return


class StopWalk:
    """The repeated walk as steps, so that a loop can wait between them in its own way.

    Call `step` until it returns True, pausing between calls.  `stopped` then holds the
    processes that this walk stopped; those which were stopped before are left out, so
    that a later thaw does not continue what a user had suspended with Ctrl-Z.

    A process that forks and ends all the time must be signalled within its short life.
    So steps after the first one are quick: they look only at the family and at pids that
    are new, newest first, and signal at the moment of discovery.  Processes once seen
    outside the family stay outside; a reading of everything now and then guards against
    a reused pid.
    """

    FULL_READING_EACH = 32

    def __init__(
        self, roots: Iterable[int], *, already: Iterable[Key] = (), spare: int | None = None
    ) -> None:
        self._roots = set(roots)
        self._spare = spare
        self._signalled: set[Key] = set(already)
        self._outsiders: set[int] = set()
        self._previous: set[Key] | None = None
        self._steps = 0
        self.family: list[Process] = []
        self.stopped: set[Key] = set(already)

    def step(self) -> bool:
        """One reading; True when the family is stable and stands still."""
        if self._steps % self.FULL_READING_EACH == 0:
            self._outsiders.clear()
        self._steps += 1
        known = {process.pid for process in self.family} | self._roots
        table: Table = {}
        for process in read_processes(without=self._outsiders):
            table[process.pid] = process
            if process.ppid in known and process.pid != self._spare:
                known.add(process.pid)
                self._visit(process)
        family = family_of(self._roots, table)
        self._outsiders |= _outsiders(table, {p.pid for p in family}, self._outsiders)
        self.family = [process for process in family if process.pid != self._spare]
        return self._is_stable()

    def _is_stable(self) -> bool:
        settled = True
        for process in self.family:
            settled &= self._visit(process)
        keys = {process.key for process in self.family}
        stable = settled and keys == self._previous
        self._previous = keys if settled else None
        return stable

    def _visit(self, process: Process) -> bool:
        """Signal the process if that has not been done; say whether it stands still."""
        if process.state in STOPPED_STATES:
            return True
        if process.key in self._signalled:
            return process.state == UNINTERRUPTIBLE
        self._signalled.add(process.key)
        self.stopped.add(process.key)
        send_signal(process, signal.SIGSTOP)
        return False

    def restless(self) -> list[int]:
        """Pids that did not stand still in the last reading, for an error's text."""
        return [p.pid for p in self.family if p.state not in STOPPED_STATES]


def _outsiders(table: Table, family: set[int], known: set[int]) -> set[int]:
    """Pids of `table` that certainly are no relatives: their ancestry ends elsewhere.

    One whose parent has vanished between two lines of the table may be an orphan of the
    family on its way to a new parent; it is looked at again.
    """
    verdicts: dict[int, bool] = {0: True, **dict.fromkeys(known, True)}
    verdicts.update(dict.fromkeys(family, False))
    for pid in table:
        line = [pid]
        while line[-1] not in verdicts and line[-1] in table:
            line.append(table[line[-1]].ppid)
        verdict = verdicts.get(line[-1], False)
        verdicts.update(dict.fromkeys(line, verdict))
    return {pid for pid in table if verdicts[pid]}


def pauses(within_s: float, *, most_s: float = POLL_MOST_S) -> Iterator[float]:
    """Growing pauses until the deadline; the caller decides what its passing means."""
    deadline_s = time.monotonic() + within_s
    pause_s = POLL_FIRST_S
    while time.monotonic() < deadline_s:
        yield pause_s
        pause_s = min(pause_s * 2, most_s)


def continue_all(keys: Iterable[Key]) -> None:
    """SIGCONT to the processes with these keys; those that have gone are skipped."""
    for pid, started in keys:
        process = read_process(pid)
        if process is not None and process.started == started:
            send_signal(process, signal.SIGCONT)


def still_there(keys: Iterable[Key]) -> list[int]:
    """Pids of the keys that exist, zombies included: nobody has reaped those yet."""
    found = ((key, read_process(key[0])) for key in keys)
    return [key[0] for key, process in found if process is not None and process.key == key]


def kill_family(
    roots: Iterable[int],
    *,
    within_s: float,
    spare: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Stop the family until stable, kill it, wait until it is gone.  Blocks.

    `spare` is left alone (a keeper that ends its own descendants).  `between` is called
    in each pause: the keeper reaps its children there.  Raises SurvivorsError.  The engine
    does the same steps without blocking its loop (`confinement.py`).
    """
    walk = StopWalk(roots, spare=spare)
    for pause_s in pauses(within_s, most_s=POLL_FIRST_S):
        between()
        if walk.step():
            break
        time.sleep(pause_s)
    for process in walk.family:
        send_signal(process, signal.SIGKILL)
    wait_gone([process.key for process in walk.family], within_s=within_s, between=between)


def wait_gone(
    keys: list[Key], *, within_s: float, between: Callable[[], None] = lambda: None
) -> None:
    """Block until none of the processes is left.  Raises SurvivorsError."""
    for pause_s in pauses(within_s):
        between()
        if not still_there(keys):
            return
        time.sleep(pause_s)
    if left := still_there(keys):
        raise SurvivorsError("end", left)
