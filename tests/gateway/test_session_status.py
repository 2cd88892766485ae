"""How phases look to clients."""

from __future__ import annotations

import pytest

from gateway.lifecycle import Phase
from gateway.session.status import injection, rest_state

WORDS = {"starting", "idle", "busy", "restarting", "dead"}


@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_has_a_word_that_clients_know(phase: Phase) -> None:
    assert rest_state(phase, "busy") in WORDS


def test_awake_and_doubtful_show_what_the_kernel_said_last() -> None:
    for phase in (Phase.READY, Phase.SUSPECT, Phase.UNREACHABLE):
        assert rest_state(phase, "busy") == "busy"
        assert rest_state(phase, "idle") == "idle"
    assert rest_state(Phase.ASLEEP, "busy") == "idle"


def test_only_a_wake_is_said_on_iopub() -> None:
    assert injection(Phase.ASLEEP, Phase.WAKING, 1) == "busy"
    assert injection(Phase.ASLEEP, Phase.WAKING, 0) is None
    assert injection(Phase.WAKING, Phase.READY, 0) == "idle"
    assert injection(Phase.WAKING, Phase.READY, 1) is None  # its own idle will follow
    for before in Phase:
        for after in set(Phase) - {Phase.WAKING, Phase.READY}:
            assert injection(before, after, 1) is None


def test_a_door_without_a_restarter_announces_loss() -> None:
    assert injection(Phase.LOST, Phase.REPLACING, 0, announce_loss=True) == "restarting"
    assert injection(Phase.REPLACING, Phase.FAILED, 0, announce_loss=True) == "dead"
