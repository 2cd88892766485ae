"""The results of a command, for people and for scripts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from gateway.batch.result import RunResult, Status, overall_exit_code

_WORDS = {
    Status.COMPLETED: "completed",
    Status.NOTEBOOK_ERROR: "failed",
    Status.REFUSED: "not run",
    Status.TROUBLE: "failed",
    Status.INTERRUPTED: "interrupted",
}


def as_text(results: Sequence[RunResult]) -> str:
    """A short paragraph for each notebook."""
    return "\n".join(line for result in results for line in _lines(result))


def _lines(result: RunResult) -> Iterator[str]:
    cells = f"{result.cells_executed} of {result.cells_total} cells executed"
    failed = f", {result.cells_failed} with an error" if result.cells_failed else ""
    yield f"{_short(result.notebook)}: {_WORDS[result.status]}, {cells}{failed}"
    if machine := result.machine.get("microvm_id"):
        yield f"  machine    {machine}"
    for phase in result.phases:
        yield f"  {phase.name:<9}{phase.seconds:>9.3f} s"
    if result.output:
        yield f"  executed notebook: {_short(result.output)}"
    for path in result.collected:
        yield f"  collected: {_short(path)}"


def _short(path: Path) -> str:
    # Relative when that is shorter to read, as in "demo-output/quickstart.ipynb".
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def as_json(results: Sequence[RunResult]) -> str:
    """One JSON document for the whole command."""
    document = {
        "exit_code": overall_exit_code(results),
        "notebooks": [result.as_dict() for result in results],
    }
    return json.dumps(document, indent=2)
