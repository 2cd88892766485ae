"""What is shown while a run goes on, and what is reported after it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from pathlib import Path

import pytest
from nbclient.exceptions import CellExecutionError, DeadKernelError

from gateway.batch.failures import Where, describe_failure, interrupted
from gateway.batch.phases import PhaseTime, Stopwatch
from gateway.batch.progress import (
    LineProgress,
    Moment,
    SilentProgress,
    TerminalProgress,
    choose_progress,
    format_elapsed,
)
from gateway.batch.report import as_json, as_text
from gateway.batch.result import Failure, RunResult, Status, overall_exit_code
from gateway.clock import ManualClock
from gateway.errors import MachineGone, UsageError

MOMENT = Moment("report", "execute", 12.7, cell=3, cells=12, machine="microvm-1")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (751, "12:31"), (10929, "3:02:09")]
)
def test_elapsed_time(seconds: float, text: str) -> None:
    assert format_elapsed(seconds) == text


def test_a_pipe_gets_plain_lines() -> None:
    stream = io.StringIO()
    progress = choose_progress(stream, quiet=False, notebooks=1)
    progress.show(MOMENT)
    progress.tick(MOMENT)
    progress.note("a warning")
    progress.close()
    assert isinstance(progress, LineProgress)
    assert stream.getvalue() == ("report  execute  cell 3 of 12  0:12  microvm-1\na warning\n")


def test_a_terminal_gets_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stream = _Terminal()
    progress = choose_progress(stream, quiet=False, notebooks=1)
    progress.show(MOMENT)
    progress.tick(MOMENT)
    progress.note("a warning")
    progress.close()
    assert isinstance(progress, TerminalProgress)
    shown = stream.getvalue()
    assert shown.count("\n") == 1  # the note stays, the moments do not
    assert max(len(part) for part in shown.split("\r\x1b[2K")) <= 29


def test_several_notebooks_get_lines_and_quiet_gets_nothing() -> None:
    assert isinstance(choose_progress(_Terminal(), quiet=False, notebooks=2), LineProgress)
    assert isinstance(choose_progress(_Terminal(), quiet=True, notebooks=1), SilentProgress)


def test_a_terminal_that_went_away_stops_nothing() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream)
    stream.close()
    progress.show(MOMENT)
    progress.note("x")


def test_phases_are_timed_also_when_they_fail() -> None:
    async def script() -> None:
        clock = ManualClock()
        watch = Stopwatch(clock)
        with watch.phase("launch"):
            assert watch.current == "launch"
            await clock.advance(2)
        with contextlib.suppress(ValueError), watch.phase("execute"):
            await clock.advance(3)
            raise ValueError("x")
        assert watch.current is None
        assert watch.finished == [PhaseTime("launch", 2), PhaseTime("execute", 3)]
        assert watch.elapsed_s() == 5

    asyncio.run(script())


def _where(**changes: object) -> Where:
    facts: dict[str, object] = {
        "cell": 2, "cells": 5, "timeout_s": 10.0, "kernel_alive": True, "reason": "",
    }  # fmt: skip
    return Where(**{**facts, **changes})  # type: ignore[arg-type]


def _cell_error(name: str, value: str) -> CellExecutionError:
    return CellExecutionError("traceback", name, value)


@pytest.mark.parametrize(
    ("error", "where", "status", "sentence"),
    [
        (_cell_error("ValueError", "bad\nvalue"), _where(), Status.NOTEBOOK_ERROR,
         "Cell 2 of 5 raised ValueError: bad value"),
        (_cell_error("StdinNotImplementedError", "…"), _where(), Status.NOTEBOOK_ERROR,
         "Cell 2 of 5 asks for input, which nobody can type in a batch run; "
         "pass values with -p name=value."),
        (_cell_error("OutcomeUnknown", "…"), _where(kernel_alive=False, reason="machine m is gone"),
         Status.TROUBLE, "The kernel died in cell 2 of 5: machine m is gone."),
        (_cell_error("OutcomeUnknown", "my own"), _where(), Status.NOTEBOOK_ERROR,
         "Cell 2 of 5 raised OutcomeUnknown: my own"),
        (DeadKernelError("x"), _where(cell=None), Status.TROUBLE,
         "The kernel died before the first cell."),
        (TimeoutError(), _where(cell=None), Status.TROUBLE,
         "The kernel did not answer in time, before the first cell."),
        (MachineGone("microvm-1", "terminated"), _where(), Status.TROUBLE,
         "Machine microvm-1 is gone: terminated"),
        (UsageError("No."), _where(), Status.REFUSED, "No."),
        (KeyError("x"), _where(), Status.TROUBLE,
         "Unexpected trouble, in cell 2 of 5: KeyError: 'x'"),
    ],
)  # fmt: skip
def test_each_failure_is_one_sentence(
    error: Exception, where: Where, status: Status, sentence: str
) -> None:
    failure = describe_failure(error, where)
    assert (failure.status, failure.sentence) == (status, sentence)


def test_a_long_message_is_cut() -> None:
    failure = describe_failure(_cell_error("E", "x" * 10_000), _where())
    assert len(failure.sentence) < 400


def _result(status: Status | None, name: str = "a") -> RunResult:
    failure = Failure(status, "Why.", 2) if status else None
    return RunResult(Path(f"{name}.ipynb").absolute(), "default", failure=failure)


def test_the_gravest_notebook_decides_the_exit_code() -> None:
    kinds = [None, Status.NOTEBOOK_ERROR, Status.REFUSED, Status.TROUBLE, Status.INTERRUPTED]
    codes = [overall_exit_code([_result(kind) for kind in kinds[: n + 1]]) for n in range(5)]
    assert codes == [0, 1, 2, 3, 130]
    assert overall_exit_code([]) == 0


def test_the_text_names_phases_and_files() -> None:
    result = _result(None)
    result.cells_total = result.cells_executed = 3
    result.phases = [PhaseTime("launch", 0.0521), PhaseTime("teardown", 1)]
    result.output = Path("out/a.ipynb").absolute()
    result.collected = [Path("out/x.csv").absolute()]
    result.machine = {"microvm_id": "microvm-1"}
    assert as_text([result]).splitlines() == [
        "a.ipynb: completed, 3 of 3 cells executed",
        "  machine    microvm-1",
        "  launch       0.052 s",
        "  teardown     1.000 s",
        "  executed notebook: out/a.ipynb",
        "  collected: out/x.csv",
    ]


def test_the_json_is_one_document() -> None:
    document = json.loads(as_json([_result(None, "a"), _result(Status.TROUBLE, "b")]))
    assert document["exit_code"] == 3
    first, second = document["notebooks"]
    assert first["status"] == "completed"
    assert first["error"] is None
    assert second["error"] == {"sentence": "Why.", "cell": 2, "name": None}
    assert second["exit_code"] == 3


def test_an_interrupt_says_where() -> None:
    assert interrupted(_where()).sentence == "Interrupted in cell 2 of 5."
