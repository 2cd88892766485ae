"""The arithmetic of the data plane's caps.  Pure: every method is told the time."""

from __future__ import annotations


class RequestRate:
    """At most `per_s` requests a second, with a burst of one second's worth (LM 11)."""

    def __init__(self, per_s: float, now_s: float) -> None:
        self._per_s = per_s
        self._burst = max(1.0, per_s)
        self._left = self._burst
        self._then_s = now_s

    def take(self, now_s: float) -> bool:
        """Whether a request may pass now; a refused one costs nothing."""
        gained = max(0.0, now_s - self._then_s) * self._per_s
        self._left = min(self._burst, self._left + gained)
        self._then_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Bandwidth:
    """Bytes a second, shared by all connections of a machine, both directions together.

    Saturation shows as latency and not as errors (LM 4.4).  Bytes that have arrived pass
    at once and are charged; the debt is the time for which their reader must pause, so
    that nothing is buffered for this and a short message on an idle line is not delayed.
    """

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = now_s

    def charge(self, size_bytes: int, now_s: float) -> float:
        """Seconds to pause after passing these bytes."""
        self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self._bytes_per_s
        return self._free_at_s - now_s
