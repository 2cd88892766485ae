"""Confinement by cgroup v2: one small group per machine, below one of our own.

```
<where this process is>/microvm-<uid>-<random>/      root: owned by one keeper
    templates/                                       the templates
    m-1a2b3c4d/                                      one machine, everything it started
```

A process is in the group of the process that made it, whatever session or
parent it gives itself later, so `cgroup.freeze` and `cgroup.kill` catch all of
a machine.  Writing to either acts on the whole subtree; killing works on frozen
groups too (kernel documentation, cgroup-v2.rst, "Core Interface Files").
`cgroup.kill` is there since Linux 5.14.

No controller is switched on, therefore groups with processes may have children
and no resource is accounted differently.  A hybrid system mounts the hierarchy
beside the old ones (`/sys/fs/cgroup/unified`); any cgroup2 mount will do.

Standard library only and no event loop: the keeper uses this too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gateway.local.engines.process_tree import SurvivorsError, pauses

TEMPLATES = "templates"
#: The probe's child lives this long if nobody kills it.
PROBE_LIFE_S = 30
PROBE_WITHIN_S = 2.0


class NoCgroupError(Exception):
    """Confinement by cgroup is not possible here; the text says why."""


def mounted_hierarchies(mountinfo: str) -> Iterator[tuple[Path, str]]:
    """(mount point, root of the mount) of each cgroup2 mount in `/proc/self/mountinfo`."""
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        if rest.startswith("cgroup2 "):
            parts = fields.split()
            yield Path(parts[4]), parts[3]


def own_path(proc_cgroup: str) -> str | None:
    """The path of this process in the v2 hierarchy, from `/proc/self/cgroup`."""
    for line in proc_cgroup.splitlines():
        if line.startswith("0::"):
            return line[3:]
    return None


def own_group() -> Path:
    """The folder of this process's own v2 group.  Raises NoCgroupError."""
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text()
        path = own_path(Path("/proc/self/cgroup").read_text())
    except OSError as error:
        raise NoCgroupError(f"no /proc to look in ({error.strerror})") from error
    if path is None:
        raise NoCgroupError("the kernel has no cgroup v2")
    for mount, root in mounted_hierarchies(mountinfo):
        inside = path.removeprefix(root.rstrip("/")) if root != "/" else path
        group = mount / inside.lstrip("/")
        if group.is_dir():
            return group
    raise NoCgroupError("no cgroup v2 hierarchy is mounted")


def make_root(name: str) -> Path:
    """Make a root for one keeper and prove that it works.  Raises NoCgroupError.

    A permission bit is no proof (delegation has its own containment rules), so a
    child is really moved in and killed.
    """
    root = own_group() / name
    try:
        root.mkdir(mode=0o700)
        (root / TEMPLATES).mkdir(mode=0o700)
        _probe(root / TEMPLATES)
    except OSError as error:
        remove(root)
        raise NoCgroupError(f"cannot use {root.parent}: {error.strerror}") from error
    except SurvivorsError as error:
        remove(root)
        raise NoCgroupError(f"cgroup.kill does not work in {root.parent}") from error
    return root


def _probe(group: Path) -> None:
    child = subprocess.Popen(["sleep", str(PROBE_LIFE_S)], stdin=subprocess.DEVNULL)
    try:
        (group / "cgroup.procs").write_text(str(child.pid))
        set_frozen(group, frozen=True)
        (group / "cgroup.kill").write_text("1")
        child.wait(timeout=PROBE_WITHIN_S)
    except subprocess.TimeoutExpired as error:
        raise SurvivorsError("end", [child.pid]) from error
    finally:
        child.kill()
        child.wait()
    set_frozen(group, frozen=False)


def join(group: Path) -> None:
    """Move the calling process into the group: first thing that a new process does."""
    (group / "cgroup.procs").write_text("0")


def set_frozen(group: Path, *, frozen: bool) -> None:
    """Order it; `is_frozen` says when it has come true."""
    (group / "cgroup.freeze").write_text("1" if frozen else "0")


def is_frozen(group: Path) -> bool:
    return events(group).get("frozen") == "1"


def is_populated(group: Path) -> bool:
    return events(group).get("populated") == "1"


def events(group: Path) -> dict[str, str]:
    """`cgroup.events` of the group; empty when the group has gone."""
    try:
        text = (group / "cgroup.events").read_text()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return {}
        raise
    return dict(line.split() for line in text.splitlines())


def members(group: Path) -> list[int]:
    """Pids in the group and below it; zombies are not listed by the kernel."""
    pids: list[int] = []
    for folder in [group, *group.rglob("*/")]:
        with contextlib.suppress(OSError):
            pids += [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    return pids


def kill(group: Path) -> None:
    """Order the end of every process in the subtree; `is_populated` says when it is true."""
    with contextlib.suppress(FileNotFoundError):
        (group / "cgroup.kill").write_text("1")


def remove(group: Path) -> bool:
    """Remove the group and those below it; False while something is still inside."""
    if not group.is_dir():
        return True
    below = sorted(group.rglob("*/"), key=lambda folder: len(folder.parts), reverse=True)
    for folder in [*below, group]:
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
                return False
            raise
    return True


def kill_and_remove(
    group: Path, *, within_s: float, between: Callable[[], None] = lambda: None
) -> None:
    """Kill the subtree, wait until it is empty, remove it.  Blocks.  Raises SurvivorsError."""
    kill(group)
    for pause_s in pauses(within_s):
        between()
        if not is_populated(group) and remove(group):
            return
        time.sleep(pause_s)
    raise SurvivorsError("end", members(group))
