"""Token buckets for the account's API rates (LM 11).  Pure: fed with instants."""

from __future__ import annotations

from collections.abc import Mapping


class TokenBucket:
    """`rate_per_s` calls per second, with a burst of the same number."""

    __slots__ = ("_at_s", "_capacity", "_level", "_rate_per_s")

    def __init__(self, rate_per_s: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._capacity = max(1.0, rate_per_s)
        self._level = self._capacity
        self._at_s = now_s

    def take(self, now_s: float) -> float:
        """Take one call: 0 if it may go ahead, else seconds until one might."""
        refill = (now_s - self._at_s) * self._rate_per_s
        self._level = min(self._capacity, self._level + refill)
        self._at_s = now_s
        if self._level >= 1.0:
            self._level -= 1.0
            return 0.0
        return (1.0 - self._level) / self._rate_per_s


class RateLimiter:
    """One bucket per operation, made when the operation is first called."""

    def __init__(self, rates_per_s: Mapping[str, float], other_per_s: float) -> None:
        self._rates_per_s = rates_per_s
        self._other_per_s = other_per_s
        self._buckets: dict[str, TokenBucket] = {}

    def take(self, operation: str, now_s: float) -> float:
        """As `TokenBucket.take`, for the operation's bucket."""
        bucket = self._buckets.get(operation)
        if bucket is None:
            rate = self._rates_per_s.get(operation, self._other_per_s)
            bucket = self._buckets[operation] = TokenBucket(rate, now_s)
        return bucket.take(now_s)
