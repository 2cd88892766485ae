"""Which lifecycle events a person sees during a run, and what `--json` keeps of them."""

from __future__ import annotations

import pytest

from gateway.batch.lifecycle_notes import compact, note_of
from gateway.events import Event, EventSink


def _event(name: str, reason: str | None = None) -> Event:
    return EventSink().emit(name, 7.0, reason=reason, microvm_id="microvm-1")


@pytest.mark.parametrize(
    ("name", "reason", "note"),
    [
        ("launch_started", None, None),
        ("teardown_complete", None, None),
        ("phase", "idle", None),
        ("resume_running", None, "resume running"),
        ("launch_backoff", "throttled", "launch backoff: throttled"),
        ("gap", "3 messages", "gap: 3 messages"),
    ],
)
def test_what_a_person_sees(name: str, reason: str | None, note: str | None) -> None:
    assert note_of(_event(name, reason)) == note


def test_json_leaves_out_what_is_not_known() -> None:
    assert compact(_event("launch_running")) == {
        "event": "launch_running",
        "time": 7.0,
        "microvm_id": "microvm-1",
    }
