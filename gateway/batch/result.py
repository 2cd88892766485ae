"""What became of one notebook, and of the whole command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from gateway.batch.phases import PhaseTime


class Status(StrEnum):
    """How a run ended. Each has one exit code, which scripts branch on."""

    COMPLETED = "completed"
    NOTEBOOK_ERROR = "notebook_error"
    REFUSED = "refused"
    TROUBLE = "trouble"
    INTERRUPTED = "interrupted"


EXIT_CODES = {
    Status.COMPLETED: 0,
    Status.NOTEBOOK_ERROR: 1,
    Status.REFUSED: 2,
    Status.TROUBLE: 3,
    Status.INTERRUPTED: 130,  # 128 + SIGINT, what shells report for Ctrl-C
}

# When several notebooks end differently the command reports the first of these.
_SEVERITY = (Status.INTERRUPTED, Status.TROUBLE, Status.REFUSED, Status.NOTEBOOK_ERROR)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run did not complete: one sentence, and the cell it happened in, if any."""

    status: Status
    sentence: str
    cell: int | None = None
    error_name: str | None = None


@dataclass(slots=True)
class RunResult:
    """The record of one notebook's run; also the member of `--json`."""

    notebook: Path
    profile: str
    output: Path | None = None
    failure: Failure | None = None
    cells_total: int = 0
    cells_executed: int = 0
    cells_failed: int = 0
    phases: list[PhaseTime] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    collected: list[Path] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def status(self) -> Status:
        """COMPLETED unless something failed."""
        return self.failure.status if self.failure else Status.COMPLETED

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `--json`; the names are a promise."""
        return {
            "notebook": str(self.notebook),
            "status": self.status.value,
            "exit_code": EXIT_CODES[self.status],
            "output": str(self.output) if self.output else None,
            "profile": self.profile,
            "machine": self.machine,
            "cells": {
                "total": self.cells_total,
                "executed": self.cells_executed,
                "failed": self.cells_failed,
            },
            "error": _error_dict(self.failure),
            "phases": [asdict(phase) for phase in self.phases],
            "events": self.events,
            "collected": [str(path) for path in self.collected],
            "warnings": self.warnings,
        }


def _error_dict(failure: Failure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {"sentence": failure.sentence, "cell": failure.cell, "name": failure.error_name}


def overall_exit_code(results: Sequence[RunResult]) -> int:
    """The exit code of the command: the gravest of its notebooks."""
    found = {result.status for result in results}
    gravest = next((status for status in _SEVERITY if status in found), Status.COMPLETED)
    return EXIT_CODES[gravest]
