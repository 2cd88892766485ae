"""Events: a fixed schema, no secrets, and listeners that cannot do harm."""

from __future__ import annotations

import json

import pytest

from gateway.events import EVENT_FIELDS, EVENT_NAMES, RECENT_EVENTS, Event, EventSink, scrub

JWE = "eyJhbGciOiJkaXIiLCJlbmMiOiJBMjU2R0NNIn0..c2VjcmV0.Y2lwaGVydGV4dA.dGFn"


def test_every_event_has_every_field() -> None:
    event = EventSink().emit("launch_started", 1.5, microvm_id="microvm-1", generation=2)
    assert set(event.facts) == set(EVENT_FIELDS)
    flat = event.as_dict()
    assert flat["event"] == "launch_started"
    assert flat["microvm_id"] == "microvm-1"
    assert flat["endpoint"] is None
    json.dumps(flat)


def test_unknown_names_and_fields_are_bugs() -> None:
    with pytest.raises(ValueError, match="unknown event"):
        EventSink().emit("launched", 0.0)
    with pytest.raises(ValueError, match="colour"):
        EventSink().emit("launch_started", 0.0, colour="red")


def test_the_names_of_the_design_are_all_there() -> None:
    design = """launch_started launch_backoff launch_running auth_token_created
        runtime_initialized runtime_healthcheck_started runtime_healthcheck_passed
        runtime_snapshot reused suspend_started suspend_complete stored resume_started
        resume_running sandbox_suspect sandbox_lost control_unreachable replacement_requested
        adopted gap teardown_started teardown_complete teardown_pending teardown_failed"""
    assert set(design.split()) <= EVENT_NAMES


@pytest.mark.parametrize(
    "value",
    [
        f"refused {JWE} twice",
        {"X-aws-proxy-auth": "anything"},
        {"authToken": {"a": 1}},
        ["key AKIAIOSFODNN7EXAMPLE!"],
        "Authorization: Bearer abcdefghijklmnop1234",
        {"nested": [{"secret_access_key": "hunter22"}]},
    ],
)
def test_secrets_do_not_get_out(value: object) -> None:
    text = json.dumps(scrub(value))
    for secret in (JWE, "anything", '"a": 1', "AKIAIOSFODNN7EXAMPLE", "abcdefghij", "hunter22"):
        assert secret not in text


def test_what_is_no_secret_stays() -> None:
    value = {"reason": "MicroVM exceeded maximum lifetime.", "count": 3, "since": None}
    assert scrub(value) == value


def test_a_failing_listener_is_dropped_and_reported() -> None:
    seen: list[str] = []
    troubles: list[BaseException] = []
    sink = EventSink(troubles.append)

    def bad(event: Event) -> None:
        raise RuntimeError("display gone")

    sink.subscribe(bad)
    stop = sink.subscribe(lambda event: seen.append(event.name))
    sink.emit("reused", 0.0)
    sink.emit("stored", 0.0)
    stop()
    stop()
    sink.emit("gap", 0.0)
    assert seen == ["reused", "stored"]
    assert [str(error) for error in troubles] == ["display gone"]


def test_the_recent_past_is_bounded() -> None:
    sink = EventSink()
    for number in range(RECENT_EVENTS + 10):
        sink.emit("notice", float(number))
    assert len(sink.recent) == RECENT_EVENTS
    assert sink.recent[-1].time_s == RECENT_EVENTS + 9
