"""When a machine is kept awake, parked, put to sleep, given notice."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gateway.activity import (
    CPU_SHARE,
    NOTICE_GRACE_S,
    Action,
    Activity,
    GuestReport,
    Rules,
)
from gateway.profiles import IdlePolicy, Profile

RULES = Rules("busy", 900.0, 30.0, None, 3600.0)


class Life:
    """Drives one Activity the way a session does, and logs what it is told to do."""

    def __init__(self, rules: Rules = RULES, cpu_share: float = 0.0) -> None:
        self.now_s = 0.0
        self.rules = rules
        self.activity = Activity(rules, 0.0)
        self.cpu_share = cpu_share
        self.executing = 0
        self.log: list[tuple[float, Action]] = []

    def run(self, seconds: float, until: Action | None = None) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            decision = self.activity.decide(self.now_s)
            if decision.action is not Action.NOTHING:
                self.log.append((round(self.now_s, 3), decision.action))
                self.act(decision.action)
            if decision.action is until:
                return
            pause_s = min(decision.again_in_s, self.rules.keep_awake_every_s)
            self.now_s = min(end_s, self.now_s + max(pause_s, 0.01))

    def act(self, action: Action) -> None:
        if action is Action.KEEP_AWAKE:
            self.activity.kept_awake(self.now_s)
        elif action is Action.ASK_GUEST:
            cpu_s = self.cpu_share * self.now_s
            self.activity.guest_says(GuestReport(self.executing, False, cpu_s), self.now_s)
        elif action is Action.NOTICE:
            self.activity.noticed(self.now_s)

    def actions(self) -> list[Action]:
        return [action for _, action in self.log]


def test_rules_come_from_the_profile() -> None:
    rules = Rules.of(Profile(idle=IdlePolicy(60), suspend_after_s=5.0))
    assert rules.idle_window_s == 60
    assert rules.suspend_after_s == 5
    assert rules.keep_awake_every_s == 20
    assert rules._replace(idle_window_s=30.0).keep_awake_every_s == 10


def test_an_idle_kernel_is_parked_after_its_time_and_asked_twice_before() -> None:
    life = Life()
    life.run(100, until=Action.PARK)
    parked_s, action = life.log[-1]
    assert action is Action.PARK
    assert 30.0 <= parked_s < 30.1
    assert life.actions().count(Action.ASK_GUEST) == 2


def test_a_busy_cell_is_kept_awake_well_inside_the_idle_window() -> None:
    rules = RULES._replace(idle_window_s=60.0)
    life = Life(rules)
    life.activity.client_sent(0.0)
    life.activity.in_flight(1, 0.0)
    life.run(1800)  # a silent cell of half an hour
    assert set(life.actions()) == {Action.KEEP_AWAKE}
    times = [0.0] + [at for at, _ in life.log]
    assert max(later - earlier for earlier, later in pairwise(times)) <= 40


def test_waiting_for_input_is_idle() -> None:
    life = Life()
    life.activity.in_flight(1, 0.0)
    life.activity.waiting_input(True, 0.0)
    life.run(100, until=Action.PARK)
    assert life.actions()[-1] is Action.PARK
    assert not life.activity.working


def test_output_after_the_end_of_a_cell_is_activity() -> None:
    life = Life()
    for second in range(0, 120, 10):
        life.activity.kernel_sent(float(second))
        life.run(10)
    assert Action.PARK not in life.actions()


@pytest.mark.parametrize(("share", "parked"), [(CPU_SHARE / 2, True), (CPU_SHARE * 2, False)])
def test_a_thread_that_uses_a_processor_is_activity(share: float, parked: bool) -> None:
    life = Life(cpu_share=share)
    life.run(300, until=Action.PARK)
    assert (Action.PARK in life.actions()) is parked


def test_a_cell_that_only_the_guest_knows_of_is_activity() -> None:
    life = Life()
    life.executing = 1
    life.run(300, until=Action.PARK)
    assert Action.PARK not in life.actions()


def test_a_silent_guest_is_parked() -> None:
    activity = Activity(RULES, 0.0)
    assert activity.decide(26.0).action is Action.ASK_GUEST
    activity.guest_silent(26.0)
    assert activity.decide(30.0).action is Action.PARK


def test_keep_awake_always_and_never() -> None:
    always = Life(RULES._replace(keep_awake="always"))
    always.run(7200)
    assert set(always.actions()) == {Action.KEEP_AWAKE}
    never = Life(RULES._replace(keep_awake="never"))
    never.activity.in_flight(1, 0.0)
    never.run(600)
    assert never.actions() == []


def test_an_explicit_suspend_after_its_time() -> None:
    life = Life(RULES._replace(suspend_after_s=30.0))
    life.run(100, until=Action.SUSPEND)
    assert life.actions()[-1] is Action.SUSPEND


def test_a_parked_machine_is_suspended_when_its_time_has_come() -> None:
    activity = Activity(RULES._replace(suspend_after_s=300.0), 0.0)
    decision = activity.decide_parked(100.0)
    assert decision.action is Action.NOTHING
    assert decision.again_in_s == 200
    assert activity.decide_parked(300.0).action is Action.SUSPEND
    assert Activity(RULES, 0.0).decide_parked(1e6).action is Action.NOTHING


def test_unattended_work_gets_a_notice_and_then_sleeps() -> None:
    life = Life()
    life.activity.client_sent(0.0)
    life.activity.in_flight(1, 0.0)
    life.run(5000, until=Action.SUSPEND)
    notice = next(at for at, action in life.log if action is Action.NOTICE)
    assert 3600 <= notice <= 3620
    assert NOTICE_GRACE_S <= life.log[-1][0] - notice <= NOTICE_GRACE_S + 20


def test_a_client_that_comes_back_cancels_the_notice() -> None:
    life = Life()
    life.activity.in_flight(1, 0.0)
    life.run(4000, until=Action.NOTICE)
    life.activity.client_sent(life.now_s)
    life.run(600)
    assert Action.SUSPEND not in life.actions()


@pytest.mark.parametrize("jump_s", [-36_000.0, 36_000.0])
def test_a_clock_jump_makes_a_decision_early_or_late_and_nothing_worse(jump_s: float) -> None:
    life = Life()
    life.activity.in_flight(1, 0.0)
    life.run(100)
    life.now_s += jump_s
    decision = life.activity.decide(life.now_s)
    assert decision.action in {Action.KEEP_AWAKE, Action.NOTHING, Action.NOTICE}


def test_after_a_wake_every_interval_begins_anew() -> None:
    life = Life()
    life.run(29)
    life.activity.woke(29.0)
    assert life.activity.decide(29.0).action is Action.NOTHING
    life.activity.in_flight(1, 29.0)
    life.activity.in_flight(0, 30.0)
    assert not life.activity.working
