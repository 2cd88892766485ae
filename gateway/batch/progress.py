"""What a person watching a run sees: one line that changes on a terminal, plain lines elsewhere.

Everything goes to standard error; standard output is for results. A terminal that went away
must not stop a run that still has a machine to terminate, so writing never raises.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Protocol, TextIO


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a run is now."""

    notebook: str
    phase: str
    elapsed_s: float
    cell: int | None = None
    cells: int = 0
    machine: str | None = None

    def __str__(self) -> str:
        parts = [self.notebook, self.phase]
        if self.cell is not None:
            parts.append(f"cell {self.cell} of {self.cells}")
        parts.append(format_elapsed(self.elapsed_s))
        if self.machine:
            parts.append(self.machine)
        return "  ".join(parts)


def format_elapsed(seconds: float) -> str:
    """`0:07`, `12:31` or `3:02:09`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class Progress(Protocol):
    """Receives moments and notes; who implements it decides what is shown."""

    def show(self, moment: Moment) -> None:
        """Something changed: a phase or a cell began."""

    def tick(self, moment: Moment) -> None:
        """Nothing changed but time; called about twice a second."""

    def note(self, text: str) -> None:
        """A sentence that stays visible."""

    def close(self) -> None:
        """Leave the terminal on a fresh line."""


class SilentProgress:
    """Shows nothing."""

    def show(self, moment: Moment) -> None:
        return

    def tick(self, moment: Moment) -> None:
        return

    def note(self, text: str) -> None:
        return

    def close(self) -> None:
        return


class _Writer:
    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream

    def write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The reader is gone (closed terminal, broken pipe). The run goes on unseen.
            self._stream = None


class LineProgress(_Writer):
    """One line for each phase and each cell; for logs, pipes and several notebooks at once."""

    def show(self, moment: Moment) -> None:
        self.write(f"{moment}\n")

    def tick(self, moment: Moment) -> None:
        return

    def note(self, text: str) -> None:
        self.write(f"{text}\n")

    def close(self) -> None:
        return


class TerminalProgress(_Writer):
    """One line, redrawn in place."""

    def show(self, moment: Moment) -> None:
        width = shutil.get_terminal_size().columns - 1
        self.write(f"\r\x1b[2K{str(moment)[:width]}")

    def tick(self, moment: Moment) -> None:
        self.show(moment)

    def note(self, text: str) -> None:
        self.write(f"\r\x1b[2K{text}\n")

    def close(self) -> None:
        self.write("\r\x1b[2K")


def choose_progress(stream: TextIO, *, quiet: bool, notebooks: int) -> Progress:
    """The display that fits the stream and the number of notebooks."""
    if quiet:
        return SilentProgress()
    if stream.isatty() and notebooks == 1:
        return TerminalProgress(stream)
    return LineProgress(stream)
