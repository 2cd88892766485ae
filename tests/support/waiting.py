"""Waiting for something that another process does, without a fixed sleep.

Who calls: end-to-end tests that watch a process, a port or a file from outside, where no event
can be had. Everything inside our own code waits on events instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: How often a condition of the outside world is looked at. Small beside any deadline in use.
POLL_INTERVAL_S = 0.01


def wait_until(condition: Callable[[], T], *, within_s: float, what: str = "the condition") -> T:
    """Return the first truthy value of ``condition()``.

    Raises ``AssertionError`` naming ``what`` when ``within_s`` seconds pass without one.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what} did not come true within {within_s} s (last: {value!r})")
        time.sleep(POLL_INTERVAL_S)
