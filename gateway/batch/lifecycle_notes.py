"""The lifecycle events of a run's machine: which of them a person sees, and how."""

from __future__ import annotations

from typing import Any

from gateway.events import Event

# What is not in the ordinary course of a run. Launch and teardown are phases on their own.
_NOTEWORTHY = frozenset(
    {
        "launch_backoff",
        "suspend_complete",
        "resume_running",
        "sandbox_suspect",
        "sandbox_lost",
        "control_unreachable",
        "replacement_requested",
        "gap",
        "notice",
    }
)


def note_of(event: Event) -> str | None:
    """The line that tells a person about `event`; None for ordinary ones."""
    if event.name not in _NOTEWORTHY:
        return None
    words = event.name.replace("_", " ")
    reason = event.facts.get("reason")
    return f"{words}: {reason}" if reason else words


def compact(event: Event) -> dict[str, Any]:
    """The event for `--json`, without what is not known."""
    return {key: value for key, value in event.as_dict().items() if value is not None}
