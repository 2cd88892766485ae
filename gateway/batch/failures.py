"""From what went wrong in a run to one sentence and a status."""

from __future__ import annotations

from dataclasses import dataclass

from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from gateway.batch.result import Failure, Status
from gateway.errors import GatewayError

# Error names with which the kernel session ends requests whose machine is gone.
_OUTCOME_NAMES = frozenset({"OutcomeUnknown", "NotExecuted"})
_MAX_TEXT = 300


@dataclass(frozen=True, slots=True)
class Where:
    """How far the run had come, and what the kernel's host says about its end."""

    cell: int | None
    cells: int
    timeout_s: float | None
    kernel_alive: bool
    reason: str

    def __str__(self) -> str:
        return f"in {self.label}" if self.cell else "before the first cell"

    @property
    def label(self) -> str:
        """For the beginning of a sentence."""
        return f"cell {self.cell} of {self.cells}"


def describe_failure(error: BaseException, where: Where) -> Failure:
    """The failure that `error` means; unknown errors are trouble, and say so."""
    match error:
        case GatewayError():
            status = Status.REFUSED if error.exit_code == 2 else Status.TROUBLE
            return Failure(status, error.sentence, where.cell, type(error).__name__)
        case CellExecutionError():
            return _cell_error(error, where)
        case CellTimeoutError():
            sentence = f"{_subject(where)} did not finish within {where.timeout_s:g} s (--timeout)."
            return Failure(Status.NOTEBOOK_ERROR, sentence, where.cell, "CellTimeoutError")
        case DeadKernelError():
            return _dead_kernel(where)
        case TimeoutError():
            sentence = f"The kernel did not answer in time, {where}."
            return Failure(Status.TROUBLE, sentence, where.cell, "TimeoutError")
    name = type(error).__name__
    sentence = f"Unexpected trouble, {where}: {name}: {_one_line(str(error))}"
    return Failure(Status.TROUBLE, sentence, where.cell, name)


def interrupted(where: Where) -> Failure:
    """The failure of a run that Ctrl-C or SIGTERM stopped."""
    return Failure(Status.INTERRUPTED, f"Interrupted {where}.", where.cell)


def _cell_error(error: CellExecutionError, where: Where) -> Failure:
    name = error.ename
    if name in _OUTCOME_NAMES and not where.kernel_alive:
        return _dead_kernel(where)
    if name == "StdinNotImplementedError":
        sentence = (
            f"{_subject(where)} asks for input, which nobody can type in a batch run; "
            "pass values with -p name=value."
        )
    else:
        sentence = f"{_subject(where)} raised {name}: {_one_line(error.evalue)}"
    return Failure(Status.NOTEBOOK_ERROR, sentence, where.cell, name)


def _dead_kernel(where: Where) -> Failure:
    reason = f": {_one_line(where.reason)}" if where.reason else ""
    return Failure(Status.TROUBLE, f"The kernel died {where}{reason}.", where.cell, "DeadKernel")


def _subject(where: Where) -> str:
    return where.label.capitalize()


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"
