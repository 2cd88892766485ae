"""The life of one machine, as a table.

Theory of operation.  A machine is in exactly one `Phase`.  Something happens to
it: a `Stimulus`, which comes from an API call, from a timer, from the engine or
from the outcome of an activity that an earlier stimulus began.  The table says
what the phase becomes and which `Action` the shell (machines.py) must begin; a
pair that is not in the table is refused, and the API answers ConflictException.
The core does nothing itself and knows no clock: the shell hands it instants and
asks it for the next deadline.

```
LAUNCHING ──▶ RUNNING ──▶ SUSPENDING ──▶ SUSPENDED ◀──▶ RESUMING
    │            │  ▲          │             │             │ │
    │            │  └──────────┴─────────────┼─────────────┘ │
    ▼            ▼                           ▼               ▼
    └────────────┴──────▶ TERMINATING ◀──────┴───────────────┘ ──▶ TERMINATED
```

The API shows six states (LM 6): LAUNCHING is PENDING, and RESUMING is still
SUSPENDED, because the state changes only when the resume hook has answered
(LM 7.2).

Rules that the table does not show:

- Idle means no inbound bytes, only while RUNNING, only with an idle policy.  The
  clock of idleness starts anew whenever RUNNING is entered.  With a suspended
  window of 0 an idle machine is terminated instead of suspended (LM 6.1).
- The suspended window counts from the freeze, for idle suspends; whether it
  counts for explicit ones is a switch (LM 6.1).
- The maximum duration counts from the launch, sleep included (LM 6.2).
- The terminate hook is called only where the guest can run: not for a machine
  that is suspended, resuming or already ended by itself.
- The first reason to end wins; a second one changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.local.behaviours import implements


class Phase(enum.Enum):
    """Where a machine is; the value is the state that the API shows."""

    LAUNCHING = ("launching", "PENDING")
    RUNNING = ("running", "RUNNING")
    SUSPENDING = ("suspending", "SUSPENDING")
    SUSPENDED = ("suspended", "SUSPENDED")
    RESUMING = ("resuming", "SUSPENDED")
    TERMINATING = ("terminating", "TERMINATING")
    TERMINATED = ("terminated", "TERMINATED")

    @property
    def state(self) -> str:
        """The MicrovmState of the API."""
        return self.value[1]


class Stimulus(enum.Enum):
    """What can happen to a machine."""

    LAUNCHED = "launched"
    LAUNCH_FAILED = "launch failed"
    SUSPEND_ASKED = "suspend asked"
    IDLE_OVER = "idle limit reached"
    FROZEN = "frozen"
    SUSPEND_FAILED = "suspend failed"
    RESUME_ASKED = "resume asked"
    RESUMED = "resumed"
    RESUME_FAILED = "resume failed"
    WINDOW_OVER = "suspended window over"
    LIFETIME_OVER = "maximum duration over"
    TERMINATE_ASKED = "terminate asked"
    MAIN_EXITED = "main process exited"
    GONE = "nothing left"


class Action(enum.Enum):
    """What the shell must begin."""

    NOTHING = "nothing"
    SUSPEND = "suspend hook, then freeze"
    RESUME = "thaw, then resume hook"
    END = "terminate hook, then kill"
    KILL = "kill"


_P, _S, _A = Phase, Stimulus, Action

TRANSITIONS: Mapping[tuple[Phase, Stimulus], tuple[Phase, Action]] = {
    (_P.LAUNCHING, _S.LAUNCHED): (_P.RUNNING, _A.NOTHING),
    (_P.LAUNCHING, _S.LAUNCH_FAILED): (_P.TERMINATING, _A.KILL),
    (_P.LAUNCHING, _S.LIFETIME_OVER): (_P.TERMINATING, _A.END),
    (_P.LAUNCHING, _S.TERMINATE_ASKED): (_P.TERMINATING, _A.END),
    (_P.LAUNCHING, _S.MAIN_EXITED): (_P.TERMINATING, _A.KILL),
    (_P.RUNNING, _S.SUSPEND_ASKED): (_P.SUSPENDING, _A.SUSPEND),
    (_P.RUNNING, _S.IDLE_OVER): (_P.SUSPENDING, _A.SUSPEND),
    (_P.RUNNING, _S.WINDOW_OVER): (_P.TERMINATING, _A.END),
    (_P.RUNNING, _S.LIFETIME_OVER): (_P.TERMINATING, _A.END),
    (_P.RUNNING, _S.TERMINATE_ASKED): (_P.TERMINATING, _A.END),
    (_P.RUNNING, _S.MAIN_EXITED): (_P.TERMINATING, _A.KILL),
    (_P.SUSPENDING, _S.FROZEN): (_P.SUSPENDED, _A.NOTHING),
    (_P.SUSPENDING, _S.SUSPEND_FAILED): (_P.RUNNING, _A.NOTHING),
    (_P.SUSPENDING, _S.LIFETIME_OVER): (_P.TERMINATING, _A.END),
    (_P.SUSPENDING, _S.TERMINATE_ASKED): (_P.TERMINATING, _A.END),
    (_P.SUSPENDING, _S.MAIN_EXITED): (_P.TERMINATING, _A.KILL),
    (_P.SUSPENDED, _S.RESUME_ASKED): (_P.RESUMING, _A.RESUME),
    (_P.SUSPENDED, _S.WINDOW_OVER): (_P.TERMINATING, _A.KILL),
    (_P.SUSPENDED, _S.LIFETIME_OVER): (_P.TERMINATING, _A.KILL),
    (_P.SUSPENDED, _S.TERMINATE_ASKED): (_P.TERMINATING, _A.KILL),
    (_P.SUSPENDED, _S.MAIN_EXITED): (_P.TERMINATING, _A.KILL),
    (_P.RESUMING, _S.RESUMED): (_P.RUNNING, _A.NOTHING),
    (_P.RESUMING, _S.RESUME_FAILED): (_P.SUSPENDED, _A.NOTHING),
    (_P.RESUMING, _S.RESUME_ASKED): (_P.RESUMING, _A.NOTHING),
    (_P.RESUMING, _S.LIFETIME_OVER): (_P.TERMINATING, _A.KILL),
    (_P.RESUMING, _S.TERMINATE_ASKED): (_P.TERMINATING, _A.KILL),
    (_P.RESUMING, _S.MAIN_EXITED): (_P.TERMINATING, _A.KILL),
    (_P.TERMINATING, _S.TERMINATE_ASKED): (_P.TERMINATING, _A.NOTHING),
    (_P.TERMINATING, _S.LIFETIME_OVER): (_P.TERMINATING, _A.NOTHING),
    (_P.TERMINATING, _S.MAIN_EXITED): (_P.TERMINATING, _A.NOTHING),
    (_P.TERMINATING, _S.GONE): (_P.TERMINATED, _A.NOTHING),
    (_P.TERMINATED, _S.TERMINATE_ASKED): (_P.TERMINATED, _A.NOTHING),
    (_P.TERMINATED, _S.MAIN_EXITED): (_P.TERMINATED, _A.NOTHING),
}

#: The stateReason of a machine that ended; LAUNCH_FAILED and SERVICE_ENDED bring their own.
END_REASONS: Mapping[Stimulus, str] = {
    Stimulus.TERMINATE_ASKED: "Success.",  # LM 6, recorded
    Stimulus.LIFETIME_OVER: "MicroVM exceeded maximum lifetime.",  # LM 6, recorded
    Stimulus.WINDOW_OVER: "MicroVM exceeded maximum suspended duration.",  # LM 13.4, guessed
    Stimulus.MAIN_EXITED: "MicroVM main process exited.",  # LM 13.4, guessed
}


class RefusedError(Exception):
    """The stimulus is not possible in this phase; machine and API are unchanged."""

    def __init__(self, phase: Phase, stimulus: Stimulus) -> None:
        super().__init__(f"{stimulus.value} while {phase.state}")
        self.phase = phase
        self.stimulus = stimulus


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """LM 6.1; all three members or none of the block."""

    max_idle_s: int
    suspended_s: int
    auto_resume: bool


@dataclass(frozen=True, slots=True)
class Deadline:
    """The next instant at which time itself is a stimulus."""

    at_s: float
    stimulus: Stimulus


class MachineLifecycle:
    """The pure core: fed with stimuli and instants, answers with actions and deadlines."""

    def __init__(
        self,
        *,
        policy: IdlePolicy | None,
        maximum_duration_s: float,
        now_s: float,
        window_after_explicit: bool = False,
    ) -> None:
        self.phase = Phase.LAUNCHING
        self.reason: str | None = None
        self.policy = policy
        self._ends_s = now_s + maximum_duration_s
        self._inbound_s = now_s
        self._frozen_s: float | None = None
        self._window_applies = False
        self._window_after_explicit = window_after_explicit

    def __repr__(self) -> str:
        return f"<MachineLifecycle {self.phase.name} reason={self.reason!r}>"

    @property
    def auto_resume(self) -> bool:
        return self.policy is not None and self.policy.auto_resume

    def note_inbound(self, now_s: float) -> None:
        """Bytes came from outside: idleness starts anew."""
        self._inbound_s = now_s

    def handle(self, stimulus: Stimulus, now_s: float, reason: str | None = None) -> Action:
        """Move on; returns what to begin.  Raises RefusedError."""
        stimulus = self._translate(stimulus)
        try:
            phase, action = TRANSITIONS[self.phase, stimulus]
        except KeyError:
            raise RefusedError(self.phase, stimulus) from None
        if phase is not self.phase:
            self._enter(phase, stimulus, now_s, reason)
        return action

    @implements("maximum-duration-counts-sleep")
    def deadline(self) -> Deadline | None:
        """When the shell must call `handle` again if nothing else happens before."""
        if self.phase in (Phase.TERMINATING, Phase.TERMINATED):
            return None
        candidates = [Deadline(self._ends_s, Stimulus.LIFETIME_OVER)]
        if self.policy is not None and self.phase is Phase.RUNNING:
            idle_over_s = self._inbound_s + self.policy.max_idle_s
            candidates.append(Deadline(idle_over_s, Stimulus.IDLE_OVER))
        if (window_over_s := self._window_over_s()) is not None:
            candidates.append(Deadline(window_over_s, Stimulus.WINDOW_OVER))
        return min(candidates, key=lambda deadline: deadline.at_s)

    @implements("suspended-window-zero-terminates")
    def _translate(self, stimulus: Stimulus) -> Stimulus:
        zero_window = self.policy is not None and self.policy.suspended_s == 0
        if stimulus is Stimulus.IDLE_OVER and zero_window:
            return Stimulus.WINDOW_OVER
        return stimulus

    @implements("end-reasons", "end-reasons-unrecorded")
    def _enter(self, phase: Phase, stimulus: Stimulus, now_s: float, reason: str | None) -> None:
        if phase is Phase.RUNNING:
            self._inbound_s = now_s
        if phase is Phase.SUSPENDING:
            explicit = stimulus is Stimulus.SUSPEND_ASKED
            self._window_applies = not explicit or self._window_after_explicit
        if stimulus is Stimulus.FROZEN:
            self._frozen_s = now_s
        if phase is Phase.TERMINATING:
            self.reason = reason or END_REASONS[stimulus]
        self.phase = phase

    @implements("suspended-window-idle-only")
    def _window_over_s(self) -> float | None:
        if self.phase is not Phase.SUSPENDED or self.policy is None or not self._window_applies:
            return None
        assert self._frozen_s is not None
        return self._frozen_s + self.policy.suspended_s
