"""The table of phases, and the rules of its theory header."""

from __future__ import annotations

import pytest

from gateway.lifecycle import (
    AWAKE,
    FINAL,
    IN_TRANSIT,
    QUIET,
    TRANSITIONS,
    Cause,
    IllegalTransition,
    Phase,
    diagram,
    step,
)

C, P = Cause, Phase


def walk(*causes: Cause) -> Phase:
    phase = P.NEW
    for cause in causes:
        phase = step(phase, cause)
    return phase


@pytest.mark.parametrize(
    ("causes", "end"),
    [
        ([C.LAUNCH, C.LAUNCH_ACCEPTED, C.LINK_OPEN], P.READY),
        (
            [C.LAUNCH, C.RESTORE, C.LAUNCH_ACCEPTED, C.LINK_OPEN, C.PARK, C.WAKE, C.LINK_OPEN],
            P.READY,
        ),
        ([C.LAUNCH, C.LAUNCH_ACCEPTED, C.LINK_OPEN, C.SUSPEND, C.SERVICE_SUSPENDED], P.ASLEEP),
        ([C.LAUNCH, C.LAUNCH_ACCEPTED, C.LINK_OPEN, C.LINK_CUT, C.SERVICE_TERMINAL], P.LOST),
        ([C.LAUNCH, C.LAUNCH_ACCEPTED, C.LINK_OPEN, C.LINK_CUT, C.SERVICE_SILENT], P.UNREACHABLE),
        ([C.LAUNCH, C.STOP, C.STOP_CONFIRMED], P.STOPPED),
        ([C.LAUNCH, C.STOP, C.STOP_UNCONFIRMED, C.STOP, C.STOP_CONFIRMED], P.STOPPED),
    ],
)
def test_lives(causes: list[Cause], end: Phase) -> None:
    assert walk(*causes) is end


def test_a_second_machine_needs_proof_that_the_first_is_gone() -> None:
    into = {source for (source, _), target in TRANSITIONS.items() if target is P.REPLACING}
    assert into == {P.LOST}
    into_lost = {cause for (_, cause), target in TRANSITIONS.items() if target is P.LOST}
    assert into_lost == {C.SERVICE_TERMINAL}


def test_a_cut_alone_only_makes_suspect() -> None:
    ends = {target for (_, cause), target in TRANSITIONS.items() if cause is C.LINK_CUT}
    assert ends == {P.SUSPECT}


def test_stop_is_possible_everywhere_but_at_the_end_and_in_itself() -> None:
    for phase in Phase:
        if phase in FINAL or phase is P.STOPPING:
            with pytest.raises(IllegalTransition):
                step(phase, C.STOP)
        else:
            assert step(phase, C.STOP) is P.STOPPING


def test_stopped_has_no_way_out_and_only_confirmation_leads_there() -> None:
    assert not [source for source, _ in TRANSITIONS if source is P.STOPPED]
    causes = {cause for (_, cause), target in TRANSITIONS.items() if target is P.STOPPED}
    assert causes == {C.STOP_CONFIRMED}


def test_every_phase_can_be_reached_and_left() -> None:
    reached, todo = {P.NEW}, [P.NEW]
    while todo:
        phase = todo.pop()
        for (source, _), target in TRANSITIONS.items():
            if source is phase and target not in reached:
                reached.add(target)
                todo.append(target)
    assert reached == set(Phase)
    assert {source for source, _ in TRANSITIONS} == set(Phase) - FINAL


def test_named_sets_do_not_overlap() -> None:
    assert not AWAKE & QUIET
    assert not IN_TRANSIT & (AWAKE | QUIET | FINAL)


def test_what_is_not_in_the_table_is_a_bug_with_a_name() -> None:
    with pytest.raises(IllegalTransition, match="'new' by 'park'"):
        step(P.NEW, C.PARK)


def test_the_diagram_holds_every_row() -> None:
    text = diagram()
    assert text.startswith("stateDiagram-v2")
    assert text.count("-->") == len(TRANSITIONS) + 1 + len(FINAL)
