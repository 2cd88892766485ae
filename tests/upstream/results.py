"""What two runs of a suite say when they are compared. Pure.

The rule (JK 6): no test that passes with the local provisioner fails with ours, except a written
list of at most ``MAX_EXCEPTIONS`` entries. A list that excuses a test which passes, or which does
not exist any more, is wrong too.
"""

from __future__ import annotations

import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

MAX_EXCEPTIONS = 10


class Outcome(StrEnum):
    """Of one test."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Verdict:
    """The comparison of one suite. Names are test ids, values are reasons or outcomes."""

    regressions: tuple[str, ...] = ()
    excused: Mapping[str, str] = field(default_factory=dict)
    not_needed: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        return not self.regressions and not self.not_needed


def read_junit(path: Path) -> dict[str, Outcome]:
    """Test id → outcome, from pytest's ``--junitxml``."""
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        # A test that passes and whose teardown fails appears twice: the worse one counts.
        worse = _outcome(case)
        if found.get(name) is not Outcome.FAILED:
            found[name] = worse
    return found


def _outcome(case: ElementTree.Element) -> Outcome:
    if case.find("failure") is not None or case.find("error") is not None:
        return Outcome.FAILED
    return Outcome.SKIPPED if case.find("skipped") is not None else Outcome.PASSED


def read_exceptions(path: Path) -> tuple[dict[str, dict[str, str]], set[str]]:
    """(project → test id → reason, tests that depend on the machine's speed: ``may_pass = true``).

    Raises ``ValueError`` for a list that breaks its own rules.
    """
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("exception", [])
    if len(entries) > MAX_EXCEPTIONS:
        raise ValueError(f"{len(entries)} exceptions; at most {MAX_EXCEPTIONS} are allowed")
    table: dict[str, dict[str, str]] = {}
    for entry in entries:
        if not entry["reason"].strip():
            raise ValueError(f"{entry['test']} has no reason")
        table.setdefault(entry["project"], {})[entry["test"]] = entry["reason"]
    return table, {entry["test"] for entry in entries if entry.get("may_pass")}


def compare(
    local: Mapping[str, Outcome],
    ours: Mapping[str, Outcome],
    exceptions: Mapping[str, str],
    may_pass: Collection[str] = (),
) -> Verdict:
    """What ours breaks that local does not, beside the list."""
    broken = regressed(local, ours)
    return Verdict(
        regressions=tuple(name for name in broken if name not in exceptions),
        excused={name: exceptions[name] for name in broken if name in exceptions},
        not_needed=tuple(
            name for name in exceptions if name not in broken and name not in may_pass
        ),
    )


def regressed(local: Mapping[str, Outcome], ours: Mapping[str, Outcome]) -> list[str]:
    """Tests that pass with the local provisioner and do not with ours (absent counts too)."""
    return [
        name
        for name, outcome in local.items()
        if outcome is Outcome.PASSED and ours.get(name) is not Outcome.PASSED
    ]


def count(results: Mapping[str, Outcome]) -> str:
    """``"95 passed, 2 failed"``."""
    numbers = {outcome: list(results.values()).count(outcome) for outcome in Outcome}
    return ", ".join(f"{number} {outcome.value}" for outcome, number in numbers.items() if number)
