"""How long to try again, and at what pace, when a machine's endpoint does not serve. Pure.

Rows of LM 11 and 4.3, budgets from practice against the live service:

    answer                      meaning                       what we do
    502, 500, nobody listens    booting, resuming, frozen     ask GetMicrovm; again every
                                or gone                       0.4 s for 60 s
    401, 403                    token expired, or wrong       a fresh token, once
    429                         connections or rate           150 ms, doubling to 2 s, or
                                                              as the answer says
    other                       the guest's own answer        no use to try again

A 502 is never evidence that a machine is gone (LM 4.3): it only says ASK.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

__all__ = ["Patience", "Step", "Trouble", "Verdict"]

BUDGET_S = 60.0
BAD_GATEWAY_EVERY_S = 0.4
THROTTLED_FIRST_S = 0.15
THROTTLED_MOST_S = 2.0
NO_ANSWER = None


class Step(Enum):
    """What to do next."""

    ASK = auto()  # GetMicrovm; if it lives, wait ``wait_s`` and try again
    WAIT = auto()  # wait ``wait_s`` and try again
    REMINT = auto()  # try again at once with a fresh token
    GIVE_UP = auto()


class Verdict(NamedTuple):
    """One step, and the pause that goes with it."""

    step: Step
    wait_s: float = 0.0


class Trouble(NamedTuple):
    """What came back: an HTTP status, or None when nobody answered."""

    status: int | None
    retry_after_s: float | None = None


class Patience:
    """For one series of attempts. ``started_s`` and ``now_s`` are of the same monotonic clock."""

    def __init__(self, started_s: float, budget_s: float = BUDGET_S) -> None:
        self._deadline_s = started_s + budget_s
        self._reminted = False
        self._throttle_s = THROTTLED_FIRST_S

    def judge(self, trouble: Trouble, now_s: float) -> Verdict:
        """The next step after ``trouble``."""
        status = trouble.status
        if status in (401, 403):
            if self._reminted:
                return Verdict(Step.GIVE_UP)
            self._reminted = True
            return Verdict(Step.REMINT)
        if now_s >= self._deadline_s:
            return Verdict(Step.GIVE_UP)
        if status == 429:
            return Verdict(Step.WAIT, self._throttled(trouble.retry_after_s))
        if status is NO_ANSWER or status >= 500:
            return Verdict(Step.ASK, BAD_GATEWAY_EVERY_S)
        return Verdict(Step.GIVE_UP)

    def _throttled(self, retry_after_s: float | None) -> float:
        wait_s = self._throttle_s
        self._throttle_s = min(THROTTLED_MOST_S, 2 * wait_s)
        return min(max(wait_s, retry_after_s or 0.0), THROTTLED_MOST_S)
