"""Every behaviour of the local service, and how well it is known.

`recorded`: somebody ran it against the real service and the answer is written
down.  `documented`: AWS says so (docs or the service model).  `guessed`: nobody
knows; we chose, and where it matters there is a switch in settings.py.

The code that makes a behaviour true bears `@implements("its-id")` (or calls
`implements` on a constant's owner); a test keeps this list and the code equal.
Sections are those of the Lambda MicroVMs fact sheet (see the docs' facts page).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


class Evidence(enum.Enum):
    RECORDED = "recorded"
    DOCUMENTED = "documented"
    GUESSED = "guessed"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One thing that the local service does as the real one does, or might."""

    id: str
    evidence: Evidence
    section: str
    text: str


def implements(*behaviour_ids: str) -> Callable[[_T], _T]:
    """Mark a function or class as the place where these behaviours are made true.

    Costs nothing at run time; the test reads the marks from the source.
    """
    del behaviour_ids
    return lambda target: target


def _recorded(id: str, section: str, text: str) -> Behaviour:
    return Behaviour(id, Evidence.RECORDED, section, text)


def _documented(id: str, section: str, text: str) -> Behaviour:
    return Behaviour(id, Evidence.DOCUMENTED, section, text)


def _guessed(id: str, section: str, text: str) -> Behaviour:
    return Behaviour(id, Evidence.GUESSED, section, text)


BEHAVIOURS: tuple[Behaviour, ...] = (
    # -- machines
    _documented(
        "suspended-window-zero-terminates",
        "6.1",
        "An idle machine with suspendedDurationSeconds 0 is terminated, not suspended.",
    ),
    _recorded(
        "suspended-window-idle-only",
        "6.1",
        "The suspended window ends machines that the idle policy suspended, not explicitly "
        "suspended ones (docs differ; switch window_after_explicit_suspend).",
    ),
)
