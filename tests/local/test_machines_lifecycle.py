"""The pure lifecycle: the table, the deadlines, the reasons."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.local.lifecycle import (
    END_REASONS,
    TRANSITIONS,
    Action,
    Deadline,
    IdlePolicy,
    MachineLifecycle,
    Phase,
    RefusedError,
    Stimulus,
)

POLICY = IdlePolicy(max_idle_s=60, suspended_s=300, auto_resume=True)


def lifecycle(
    policy: IdlePolicy | None = POLICY, *, until: Phase = Phase.RUNNING, explicit: bool = False
) -> MachineLifecycle:
    """A machine launched at 0 for 1000 s, brought to a phase without time passing."""
    made = MachineLifecycle(
        policy=policy, maximum_duration_s=1000, now_s=0, window_after_explicit=explicit
    )
    steps = {
        Phase.LAUNCHING: [],
        Phase.RUNNING: [Stimulus.LAUNCHED],
        Phase.SUSPENDING: [Stimulus.LAUNCHED, Stimulus.SUSPEND_ASKED],
        Phase.SUSPENDED: [Stimulus.LAUNCHED, Stimulus.SUSPEND_ASKED, Stimulus.FROZEN],
        Phase.RESUMING: [
            Stimulus.LAUNCHED, Stimulus.SUSPEND_ASKED, Stimulus.FROZEN, Stimulus.RESUME_ASKED,
        ],
        Phase.TERMINATING: [Stimulus.TERMINATE_ASKED],
        Phase.TERMINATED: [Stimulus.TERMINATE_ASKED, Stimulus.GONE],
    }  # fmt: skip
    for stimulus in steps[until]:
        made.handle(stimulus, 0)
    return made


@pytest.mark.parametrize(("phase", "stimulus"), list(itertools.product(Phase, Stimulus)))
def test_each_pair_is_in_the_table_or_refused(phase: Phase, stimulus: Stimulus) -> None:
    machine = lifecycle(until=phase)
    expected = TRANSITIONS.get((phase, stimulus))
    if expected is None:
        with pytest.raises(RefusedError) as caught:
            machine.handle(stimulus, 1, "why")
        assert (caught.value.phase, caught.value.stimulus) == (phase, stimulus)
        assert machine.phase is phase
    else:
        assert machine.handle(stimulus, 1, "why") is expected[1]
        assert machine.phase is expected[0]


@given(st.lists(st.tuples(st.sampled_from(Stimulus), st.floats(0, 100)), max_size=40))
def test_whatever_happens_the_end_is_final_and_has_one_reason(
    events: list[tuple[Stimulus, float]],
) -> None:
    machine, now_s, reason = lifecycle(), 0.0, None
    for stimulus, pause_s in events:
        now_s += pause_s
        before = machine.phase
        try:
            machine.handle(stimulus, now_s, "given" if stimulus is Stimulus.LAUNCH_FAILED else None)
        except RefusedError:
            assert machine.phase is before
        if before is Phase.TERMINATED:
            assert machine.phase is Phase.TERMINATED
        if reason is not None:
            assert machine.reason == reason
        reason = machine.reason
        ended = machine.phase in (Phase.TERMINATING, Phase.TERMINATED)
        assert ended == (reason is not None)
        assert (machine.deadline() is None) == ended


def test_the_api_shows_six_states() -> None:
    assert [phase.state for phase in Phase] == [
        "PENDING", "RUNNING", "SUSPENDING", "SUSPENDED", "SUSPENDED", "TERMINATING", "TERMINATED",
    ]  # fmt: skip


def test_idleness_counts_from_the_last_byte() -> None:
    machine = lifecycle()
    assert machine.deadline() == Deadline(60, Stimulus.IDLE_OVER)
    machine.note_inbound(25)
    assert machine.deadline() == Deadline(85, Stimulus.IDLE_OVER)


def test_idleness_starts_anew_after_a_resume() -> None:
    machine = lifecycle(until=Phase.RESUMING)
    machine.handle(Stimulus.RESUMED, 500)
    assert machine.deadline() == Deadline(560, Stimulus.IDLE_OVER)


def test_without_a_policy_only_the_lifetime_ends_it() -> None:
    machine = lifecycle(None)
    assert machine.deadline() == Deadline(1000, Stimulus.LIFETIME_OVER)
    assert not machine.auto_resume
    machine.handle(Stimulus.SUSPEND_ASKED, 5)
    machine.handle(Stimulus.FROZEN, 6)
    assert machine.deadline() == Deadline(1000, Stimulus.LIFETIME_OVER)


def test_the_suspended_window_counts_from_the_freeze_after_an_idle_suspend() -> None:
    machine = lifecycle()
    assert machine.handle(Stimulus.IDLE_OVER, 60) is Action.SUSPEND
    machine.handle(Stimulus.FROZEN, 62)
    assert machine.deadline() == Deadline(362, Stimulus.WINDOW_OVER)
    assert machine.handle(Stimulus.WINDOW_OVER, 362) is Action.KILL
    assert machine.reason == END_REASONS[Stimulus.WINDOW_OVER]


@pytest.mark.parametrize(("explicit", "at_s"), [(False, 1000), (True, 300)])
def test_the_suspended_window_after_an_explicit_suspend_is_a_switch(
    explicit: bool, at_s: float
) -> None:
    deadline = lifecycle(until=Phase.SUSPENDED, explicit=explicit).deadline()
    assert deadline is not None
    assert deadline.at_s == at_s


def test_a_window_of_zero_terminates_an_idle_machine() -> None:
    machine = lifecycle(IdlePolicy(60, 0, auto_resume=False))
    assert machine.handle(Stimulus.IDLE_OVER, 60) is Action.END
    assert machine.phase is Phase.TERMINATING


def test_the_lifetime_counts_sleep() -> None:
    machine = lifecycle(until=Phase.SUSPENDED)
    assert machine.deadline() == Deadline(1000, Stimulus.LIFETIME_OVER)
    assert machine.handle(Stimulus.LIFETIME_OVER, 1000) is Action.KILL
    assert machine.reason == "MicroVM exceeded maximum lifetime."


def test_a_state_is_in_the_repr() -> None:
    assert repr(lifecycle()) == "<MachineLifecycle RUNNING reason=None>"
