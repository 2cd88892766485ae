"""What keeps this machine busy, as far as the guest can see it.

The gateway decides about sleep; the guest only reports.  A report is asked for by the
`activity` call.  It holds:

* `executing`        cells the kernel has and has not ended;
* `waiting_input`    the kernel waits in `input()`: counts as idle (design 6.3);
* `children_cpu_s`   CPU seconds of the kernel's child processes since its start,
                     `kernel_cpu_s` of the kernel itself: the gateway compares two
                     reports, so a background thread or a training child is seen;
* `late_outputs`     outputs that came while no request was running, and how long ago
                     the last one came (`late_output_age_s`, None if never).

Ages are taken from the monotonic clock and may jump with the machine's sleep (LM 8);
they are ages, not deadlines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kernel_guest.processes import LINUX, descendants

__all__ = ["ActivityReport", "cpu_seconds"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ActivityReport:
    """Collects what the supervisor sees; `report` adds what /proc says now."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._late_outputs = 0
        self._late_output_s: float | None = None
        self._input_requests: set[str] = set()
        self._last_message_s: float | None = None

    def on_output(self, *, late: bool) -> None:
        """Something came from iopub; `late` if no request was running."""
        self._last_message_s = self._now_s()
        if late:
            self._late_outputs += 1
            self._late_output_s = self._last_message_s

    def on_input_request(self, parent_id: str) -> None:
        """The kernel asks the user and waits."""
        self._input_requests.add(parent_id)

    def on_input_reply(self) -> None:
        """The user answered.  The kernel waits for one answer at a time."""
        self._input_requests.clear()

    def on_idle(self, parent_id: str) -> None:
        """A request ended; an interrupted `input()` ends without an answer."""
        self._input_requests.discard(parent_id)

    def on_kernel_exit(self) -> None:
        """Nothing waits any more."""
        self._input_requests.clear()

    def report(self, pid: int | None, executing: list[str]) -> dict[str, Any]:
        """The result of the `activity` call."""
        kernel_cpu_s, children_cpu_s, children = cpu_seconds(pid)
        return {
            "kernel_alive": pid is not None,
            "executing": len(executing),
            "executing_ids": executing[:20],
            "waiting_input": bool(self._input_requests),
            "kernel_cpu_s": kernel_cpu_s,
            "children_cpu_s": children_cpu_s,
            "children": children,
            "late_outputs": self._late_outputs,
            "late_output_age_s": self._age_s(self._late_output_s),
            "last_output_age_s": self._age_s(self._last_message_s),
        }

    def _age_s(self, then_s: float | None) -> float | None:
        return None if then_s is None else max(0.0, self._now_s() - then_s)


def cpu_seconds(pid: int | None) -> tuple[float, float, int]:
    """CPU of a process, CPU of everything below it (ended children included), and their number.

    Zeros where there is no /proc.
    """
    if pid is None or not LINUX:
        return 0.0, 0.0, 0
    own_s, reaped_s = _times(pid)
    below = descendants(pid)
    return own_s, reaped_s + sum(sum(_times(child)) for child in below), len(below)


def _times(pid: int) -> tuple[float, float]:
    """CPU seconds of a process itself and of its children that ended and were waited for."""
    with suppress(OSError, ValueError, IndexError):  # it ended while we looked
        stat = Path("/proc", str(pid), "stat").read_bytes()
        fields = stat[stat.rindex(b")") + 1 :].split()
        # proc(5): utime is field 14, counted from 1; the split begins at field 3.
        user, system, children_user, children_system = (int(value) for value in fields[11:15])
        return (user + system) / _TICKS_PER_S, (children_user + children_system) / _TICKS_PER_S
    return 0.0, 0.0
