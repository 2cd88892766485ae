"""Lifecycle events: what happened to a kernel's machine, for logs, pages and metrics.

Pure: a record, its names, a filter for secrets, and a sink that fans out to
listeners. Who listens (the progress line of a batch run, jupyter_events, the
status page) is other rooms' business.

Every event carries the correlation (kernel id, client session, generation,
owner, scope fingerprint) and what is known of the machine; fields that are not
known are None, never absent, so a consumer needs no special cases. Durations
are whole milliseconds and belong to the event that ends something.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = [
    "EVENT_FIELDS",
    "EVENT_NAMES",
    "SCHEMA_ID",
    "Event",
    "EventSink",
    "scrub",
]

SCHEMA_ID = "microvm-kernel-gateway/kernel_lifecycle/v1"

EVENT_NAMES = frozenset(
    {
        "launch_started",
        "launch_backoff",
        "launch_running",
        "auth_token_created",
        "runtime_initialized",
        "runtime_healthcheck_started",
        "runtime_healthcheck_passed",
        "runtime_snapshot",
        "reused",
        "suspend_started",
        "suspend_complete",
        "stored",
        "resume_started",
        "resume_running",
        "sandbox_suspect",
        "sandbox_lost",
        "control_unreachable",
        "replacement_requested",
        "adopted",
        "gap",
        "teardown_started",
        "teardown_complete",
        "teardown_pending",
        "teardown_failed",
        # Moves of the phase that none of the above names: parking and its end, the
        # kernel process ending, a problem that a person should see.
        "phase",
        "kernel_exited",
        "notice",
    }
)

EVENT_FIELDS = (
    "microvm_id",
    "endpoint",
    "profile",
    "image",
    "image_version",
    "status",
    "aws_state",
    "region",
    "port",
    "maximum_duration_seconds",
    "logging_mode",
    "quota",
    "execution_role_fingerprint",
    "launch_duration_ms",
    "healthcheck_duration_ms",
    "teardown_duration_ms",
    "duration_ms",
    "teardown_status",
    "kernel_id",
    "client_session",
    "generation",
    "owner",
    "scope_fingerprint",
    "phase",
    "previous_phase",
    "reason",
)

# Names that may not carry a value, and values that look like what must not be shown:
# a compact JWE (LM 4.5: five base64url parts), AWS access keys, Authorization values.
_SECRET_NAME = re.compile(
    r"token|secret|password|credential|authori[sz]ation|proxy-auth|api_?key", re.I
)
_SECRET_VALUE = re.compile(
    r"eyJ[\w-]{8,}(?:\.[\w-]*){2,4}|\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b|(?i:bearer|token)\s+[\w.~+/=-]{16,}"
)
REMOVED = "[removed]"


def scrub(value: Any) -> Any:
    """The value without anything that looks secret; containers are copied."""
    if isinstance(value, str):
        return _SECRET_VALUE.sub(REMOVED, value)
    if isinstance(value, Mapping):
        return {
            key: REMOVED if _SECRET_NAME.search(str(key)) else scrub(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [scrub(item) for item in value]
    return value


class Event(NamedTuple):
    """One thing that happened. ``facts`` holds every name of EVENT_FIELDS."""

    name: str
    time_s: float
    facts: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Flat and JSON-ready."""
        return {"event": self.name, "time": self.time_s, **self.facts}


Listener = Callable[[Event], None]

# A status page shows the recent past; older events are in whatever log a listener keeps.
RECENT_EVENTS = 256


class EventSink:
    """Takes events and tells listeners. Used on the bridge's loop only.

    A listener that raises is a bug in that listener: it is unsubscribed and
    its error re-raised to nobody but ``on_listener_error``, because a broken
    progress display must not stop a kernel from starting.
    """

    def __init__(self, on_listener_error: Callable[[BaseException], None] | None = None) -> None:
        self._listeners: list[Listener] = []
        self._on_listener_error = on_listener_error
        self.recent: deque[Event] = deque(maxlen=RECENT_EVENTS)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` for every event from now on; returns the way to stop it."""
        self._listeners.append(listener)

        def stop() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return stop

    def emit(self, name: str, time_s: float, **facts: Any) -> Event:
        """Record and tell. Raises ValueError for a name or field not in the schema."""
        event = _make_event(name, time_s, facts)
        self.recent.append(event)
        for listener in tuple(self._listeners):
            self._tell(listener, event)
        return event

    def _tell(self, listener: Listener, event: Event) -> None:
        try:
            listener(event)
        except Exception as error:  # the boundary to foreign code
            self._listeners.remove(listener)
            if self._on_listener_error is not None:
                self._on_listener_error(error)


def _make_event(name: str, time_s: float, facts: Mapping[str, Any]) -> Event:
    if name not in EVENT_NAMES:
        raise ValueError(f"unknown event {name!r}")
    if unknown := set(facts) - set(EVENT_FIELDS):
        raise ValueError(f"event {name!r} has unknown fields {sorted(unknown)}")
    return Event(name, time_s, {key: scrub(facts.get(key)) for key in EVENT_FIELDS})
