"""When to keep a machine awake, park its link, put it to sleep, and when to say stop. Pure.

THEORY

The service counts inbound traffic, not work (LM 6.1): a kernel that computes
for an hour in silence is frozen at the idle limit, and an idle one with a
chatty connection burns money until its cap. So the gateway decides, from what
it knows:

*In flight*: a request that the kernel has not finished. A cell that waits in
``input()`` is not work, however long it is in flight: a person may have gone home.

*After the end*: output that comes when nothing is in flight (a thread, a task)
is work too, and so is CPU that the kernel or its children use. The first is
noticed here. For the second the guest is asked twice before parking, at the
begin and the end of the last ``sample_s`` of quiet: a share of a processor
above ``CPU_SHARE`` between the two answers is work.

Work keeps the machine awake: one cheap HTTP request per interval, because that
is the only traffic that certainly counts (LM 5.2). No work for ``park_after_s``
closes the link: then no byte moves, the service's own idle policy does the
rest, and with ``suspend_after_s`` we put the machine to sleep ourselves.

*Unattended*: work goes on and no client has sent anything for
``max_unattended_awake_s``. Then a notice, and after ``NOTICE_GRACE_S`` a
suspend. Nothing is lost by that, the machine sleeps and the next request wakes it.

Orders that can occur: output that arrives between the two questions makes the
first one stale, so both count only if nothing came since. A clock that jumps
makes a decision early or late by the jump; each is harmless at any time.

``decide`` never acts. It is called after each event and when ``again_in_s`` is
over, and gives one action at a time.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from gateway.profiles import Profile

__all__ = ["Action", "Activity", "Decision", "GuestReport", "Rules"]

# HTTP polls every 20 s kept a machine awake under a 60 s idle limit (LM 5.2);
# a third of the limit leaves two misses.
KEEP_AWAKE_EVERY_S = 20.0
KEEP_AWAKE_FRACTION = 1 / 3
NOTICE_GRACE_S = 60.0
SAMPLE_S = 5.0
# An idle ipykernel uses about 0.3 % of a processor (2026-11-30); a thread that
# does something once a second, or a child that waits for data, is above this.
CPU_SHARE = 0.02


class Action(Enum):
    """What the session does now."""

    NOTHING = auto()
    KEEP_AWAKE = auto()  # one HTTP request, then kept_awake()
    ASK_GUEST = auto()  # the activity call, then guest_says() or guest_silent()
    PARK = auto()  # close the link
    SUSPEND = auto()  # SuspendMicrovm
    NOTICE = auto()  # say that unattended time is nearly over, then noticed()


class Rules(NamedTuple):
    """The part of a profile that this module needs."""

    keep_awake: str
    idle_window_s: float
    park_after_s: float
    suspend_after_s: float | None
    max_unattended_awake_s: float

    @classmethod
    def of(cls, profile: Profile) -> Rules:
        return cls(
            profile.keep_awake,
            profile.idle.max_idle_s,
            profile.park_after_s,
            profile.suspend_after_s,
            profile.max_unattended_awake_s,
        )

    @property
    def keep_awake_every_s(self) -> float:
        return min(KEEP_AWAKE_EVERY_S, self.idle_window_s * KEEP_AWAKE_FRACTION)

    @property
    def sample_s(self) -> float:
        return min(SAMPLE_S, self.park_after_s / 2)


class GuestReport(NamedTuple):
    """What the guest says: unfinished cells it knows of, processor seconds used so far."""

    executing: int
    waiting_input: bool
    cpu_s: float


class Decision(NamedTuple):
    """One action, and when to ask again if nothing happens meanwhile."""

    action: Action
    again_in_s: float


class Activity:
    """Facts about one awake machine, and the decision that follows from them."""

    def __init__(self, rules: Rules, now_s: float) -> None:
        self._rules = rules
        self._in_flight = 0
        self._waiting_input = False
        self._last_client_s = now_s
        self._last_work_s = now_s
        self._last_kept_s = now_s
        self._sample: tuple[float, GuestReport] | None = None
        self._quiet_said_s: float | None = None
        self._noticed_s: float | None = None

    # -- facts -----------------------------------------------------------------

    def client_sent(self, now_s: float) -> None:
        """A client asked for something that reached, or will reach, the kernel."""
        self._last_client_s = now_s
        self._last_work_s = now_s
        self._noticed_s = None

    def in_flight(self, count: int, now_s: float) -> None:
        """So many requests are unfinished now."""
        if count != self._in_flight:
            self._last_work_s = now_s
        self._in_flight = count
        if count == 0:
            self._waiting_input = False

    def waiting_input(self, waiting: bool, now_s: float) -> None:
        """The kernel asked for input, or got it."""
        self._waiting_input = waiting
        self._last_work_s = now_s

    def kernel_sent(self, now_s: float) -> None:
        """Any message of the kernel."""
        self._last_work_s = now_s

    def kept_awake(self, now_s: float) -> None:
        self._last_kept_s = now_s

    def guest_says(self, report: GuestReport, now_s: float) -> None:
        """Answer to ASK_GUEST. The first of a quiet time is the base of the second."""
        base, self._sample = self._sample, (now_s, report)
        if report.executing and not report.waiting_input:
            self._last_work_s = now_s
        elif base is not None and base[0] >= self._last_work_s:
            share = (report.cpu_s - base[1].cpu_s) / max(now_s - base[0], 0.1)
            if share >= CPU_SHARE:
                self._last_work_s = now_s
            else:
                self._quiet_said_s = now_s

    def guest_silent(self, now_s: float) -> None:
        """It did not answer: nothing is known against parking."""
        self._sample = (now_s, GuestReport(0, False, 0.0))
        self._quiet_said_s = now_s

    def noticed(self, now_s: float) -> None:
        self._noticed_s = now_s

    def woke(self, now_s: float) -> None:
        """The machine has just come up or back: every interval begins anew."""
        self._last_client_s = self._last_work_s = self._last_kept_s = now_s
        self._sample = None
        self._quiet_said_s = self._noticed_s = None

    # -- decision --------------------------------------------------------------

    @property
    def working(self) -> bool:
        """Something is in flight that is not a wait for a person."""
        return self._in_flight > 0 and not self._waiting_input

    def decide(self, now_s: float) -> Decision:
        """For an open link."""
        if (overdue := self._unattended(now_s)) is not None:
            return overdue
        if self.working or self._rules.keep_awake == "always":
            decision = self._keep_awake(now_s)
        else:
            decision = self._decide_quiet(now_s)
        return Decision(decision.action, min(decision.again_in_s, self._attended_for(now_s)))

    def _decide_quiet(self, now_s: float) -> Decision:
        rules = self._rules
        idle_s = now_s - self._last_work_s
        first_s = rules.park_after_s - rules.sample_s
        if idle_s < first_s:
            return Decision(Action.NOTHING, first_s - idle_s)
        if self._sample is None or self._sample[0] < self._last_work_s:
            return Decision(Action.ASK_GUEST, rules.sample_s)
        if idle_s < rules.park_after_s:
            return Decision(Action.NOTHING, rules.park_after_s - idle_s)
        if self._quiet_said_s is not None and self._quiet_said_s >= self._last_work_s:
            return Decision(self._sleep_action(idle_s), rules.park_after_s)
        return Decision(Action.ASK_GUEST, 0.0)  # the answer decides at once

    def decide_parked(self, now_s: float) -> Decision:
        """For a closed link over a machine that may still run."""
        suspend_after_s = self._rules.suspend_after_s
        if suspend_after_s is None:
            return Decision(Action.NOTHING, self._rules.idle_window_s)
        left_s = suspend_after_s - (now_s - self._last_work_s)
        if left_s <= 0:
            return Decision(Action.SUSPEND, suspend_after_s)
        return Decision(Action.NOTHING, left_s)

    def _sleep_action(self, idle_s: float) -> Action:
        suspend_after_s = self._rules.suspend_after_s
        if suspend_after_s is not None and idle_s >= suspend_after_s:
            return Action.SUSPEND
        return Action.PARK

    def _attended_for(self, now_s: float) -> float:
        """How long until the bound on unattended time is reached, or its grace is over."""
        if self._rules.keep_awake == "always":
            return self._rules.keep_awake_every_s
        if self._noticed_s is not None:
            return max(0.0, NOTICE_GRACE_S - (now_s - self._noticed_s))
        return max(0.0, self._rules.max_unattended_awake_s - (now_s - self._last_client_s))

    def _unattended(self, now_s: float) -> Decision | None:
        bound_s = self._rules.max_unattended_awake_s
        alone_s = now_s - self._last_client_s
        if self._noticed_s is not None:
            left_s = NOTICE_GRACE_S - (now_s - self._noticed_s)
            return Decision(Action.SUSPEND, NOTICE_GRACE_S) if left_s <= 0 else None
        if alone_s >= bound_s and self._rules.keep_awake != "always":
            return Decision(Action.NOTICE, NOTICE_GRACE_S)
        return None

    def _keep_awake(self, now_s: float) -> Decision:
        every_s = self._rules.keep_awake_every_s
        due_in_s = every_s - (now_s - self._last_kept_s)
        if self._rules.keep_awake == "never":
            return Decision(Action.NOTHING, every_s)
        if due_in_s <= 0:
            return Decision(Action.KEEP_AWAKE, every_s)
        return Decision(Action.NOTHING, due_in_s)
