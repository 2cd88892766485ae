"""The phases of one notebook run and how long each took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.clock import Clock

# In the order in which they happen; `inputs` and `collect` only when asked for.
PHASES = ("launch", "connect", "inputs", "execute", "collect", "teardown")


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """One finished phase."""

    name: str
    seconds: float


class Stopwatch:
    """Times the phases of one run; `current` is the phase going on, for progress lines."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self.current: str | None = None
        self.finished: list[PhaseTime] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body under `name`, also when it fails."""
        begun_s = self._clock.monotonic_s()
        self.current = name
        try:
            yield
        finally:
            self.current = None
            self.finished.append(PhaseTime(name, self._clock.monotonic_s() - begun_s))

    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self._clock.monotonic_s() - self._started_s
