"""Two ways to hold all the processes of a machine, and the words for what each can do.

| Way | Where | Freeze | Catches a double-forked `setsid` grandchild |
|---|---|---|---|
| cgroup | Linux with a writable cgroup v2 | `cgroup.freeze`, about 0.3 ms | yes |
| tree | Linux | SIGSTOP, walk until stable, some ms | yes: init and keeper are subreapers |
| groups | macOS | the same walk by `ps` and process group | no |

None of them isolates anything: a machine of the process engine runs as the
user, with the user's files and network.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gateway.local.engines import cgroups, process_tree
from gateway.local.engines.process_tree import Key, SurvivorsError, pauses

#: A machine with some hundred processes freezes in a few ms; a starved computer needs more.
FREEZE_WITHIN_S = 10.0
KILL_WITHIN_S = 10.0
EAGER_LOOKS = 8


@dataclass(frozen=True, slots=True)
class Capabilities:
    """How this engine holds machines here; `jupyter microvm local status` shows `sentence`."""

    way: str
    catches_daemons: bool
    isolates: bool
    sentence: str


@dataclass(slots=True)
class Captive:
    """The processes of one machine: its init, and its cgroup where there is one.

    Without `key` there is no init (not yet, or it ended before it could be looked at).
    """

    pid: int = 0
    key: Key | None = None
    group: Path | None = None
    stopped: set[Key] = field(default_factory=set, repr=False)


class Confinement(Protocol):
    """One way to hold machines; every method belongs to the engine's loop."""

    capabilities: Capabilities

    def group_for(self, name: str) -> Path | None:
        """Make the cgroup that a machine's init joins first, if this way has groups."""
        ...

    async def freeze(self, captive: Captive) -> None:
        """Raises SurvivorsError when something still runs after the deadline."""
        ...

    async def thaw(self, captive: Captive) -> None: ...

    async def kill(self, captive: Captive) -> None:
        """Nothing is left when this returns.  Raises SurvivorsError."""
        ...


CGROUP = Capabilities(
    way="cgroup",
    catches_daemons=True,
    isolates=False,
    sentence="Machines are held by cgroup v2: suspend and terminate reach every process "
    "that a machine started. The process engine does not isolate.",
)
TREE = Capabilities(
    way="tree",
    catches_daemons=True,
    isolates=False,
    sentence="Machines are held by walking the process tree until it is stable: suspend and "
    "terminate reach every descendant of a machine, some milliseconds slower than with "
    "cgroup v2. The process engine does not isolate.",
)
GROUPS = Capabilities(
    way="groups",
    catches_daemons=False,
    isolates=False,
    sentence="Machines are held by parentage and process groups: a program that daemonises "
    "itself into a session of its own is neither frozen nor ended with its machine. The "
    "process engine does not isolate.",
)


class CgroupConfinement:
    """By cgroup v2."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.capabilities = CGROUP

    def group_for(self, name: str) -> Path:
        group = self._root / name
        group.mkdir(mode=0o700)
        return group

    async def freeze(self, captive: Captive) -> None:
        group = _group_of(captive)
        cgroups.set_frozen(group, frozen=True)
        try:
            await _until(lambda: cgroups.is_frozen(group), FREEZE_WITHIN_S, "stop", captive)
        except BaseException:  # given up or cancelled: half a freeze would be a hung machine
            cgroups.set_frozen(group, frozen=False)
            raise

    async def thaw(self, captive: Captive) -> None:
        group = _group_of(captive)
        cgroups.set_frozen(group, frozen=False)
        await _until(lambda: not cgroups.is_frozen(group), FREEZE_WITHIN_S, "go on", captive)

    async def kill(self, captive: Captive) -> None:
        if captive.group is None:
            return  # it never got as far as a group
        group = captive.group
        keys = [captive.key] if captive.key else []
        for pid in cgroups.members(group):
            process = process_tree.read_process(pid)
            keys += [process.key] if process else []
        cgroups.kill(group)
        await _until(
            lambda: not cgroups.is_populated(group) and cgroups.remove(group),
            KILL_WITHIN_S, "end", captive,
        )  # fmt: skip
        await _all_gone(keys)


@dataclass(frozen=True, slots=True)
class Household:
    """What the tree way must know of the engine to tell an orphan from everybody else.

    `parents` are the keeper and the templates: orphans come to one of them.  `inits` are
    the machines' inits.  `turn` is held while an init is forked and entered.
    """

    keeper_pid: int
    parents: Callable[[], set[int]]
    inits: Callable[[], Container[int]]
    turn: asyncio.Lock


class TreeConfinement:
    """By walking the process table until stable.

    When a machine's init has ended, what it leaves behind is somebody else's child: of
    its template or of the keeper, which are subreapers.  It cannot be in the keeper's
    process group, because init made a session of its own; templates are.
    """

    def __init__(self, household: Household) -> None:
        self._household = household
        self.capabilities = TREE if process_tree.HAS_PROC else GROUPS

    def group_for(self, name: str) -> None:
        return None

    async def freeze(self, captive: Captive) -> None:
        walk = process_tree.StopWalk([captive.pid], already=captive.stopped)
        try:
            await _walk(walk, FREEZE_WITHIN_S)
        except BaseException:  # given up or cancelled: half a freeze would be a hung machine
            process_tree.continue_all(walk.stopped)
            raise
        captive.stopped = walk.stopped

    async def thaw(self, captive: Captive) -> None:
        stopped, captive.stopped = captive.stopped, set()
        process_tree.continue_all(stopped)

    async def kill(self, captive: Captive) -> None:
        alive = captive.key is not None and process_tree.still_there([captive.key])
        roots = ({captive.pid} if alive else set()) | await self._orphans()
        while roots:
            walk = process_tree.StopWalk(roots)
            await _walk(walk, KILL_WITHIN_S)
            for process in walk.family:
                process_tree.send_signal(process, signal.SIGKILL)
            await _all_gone([process.key for process in walk.family])
            roots = await self._orphans()

    async def _orphans(self) -> set[int]:
        async with self._household.turn:
            inits, parents = self._household.inits(), self._household.parents()
            return {
                process.pid
                for process in process_tree.read_table().values()
                if process.ppid in parents
                and process.pgid != self._household.keeper_pid
                and process.state != "Z"
                and process.pid not in inits
            }


def _group_of(captive: Captive) -> Path:
    assert captive.group is not None
    return captive.group


async def _until(done: Callable[[], bool], within_s: float, what: str, captive: Captive) -> None:
    """Look again and again; at first without a pause, because freezing takes some 0.3 ms."""
    for look, pause_s in enumerate(pauses(within_s)):
        if _holds(done):
            return
        await asyncio.sleep(pause_s if look > EAGER_LOOKS else 0)
    raise SurvivorsError(what, cgroups.members(_group_of(captive)))


def _holds(done: Callable[[], bool]) -> bool:
    """A group that vanishes between two looks (ENODEV) is looked at once more."""
    with contextlib.suppress(OSError):
        return done()
    return False


async def _walk(walk: process_tree.StopWalk, within_s: float) -> None:
    for pause_s in pauses(within_s, most_s=process_tree.POLL_FIRST_S):
        if walk.step():
            return
        await asyncio.sleep(pause_s)
    raise SurvivorsError("stop", walk.restless())


async def _all_gone(keys: list[Key]) -> None:
    for pause_s in pauses(KILL_WITHIN_S):
        if not process_tree.still_there(keys):
            return
        await asyncio.sleep(pause_s)
    raise SurvivorsError("end", process_tree.still_there(keys))
