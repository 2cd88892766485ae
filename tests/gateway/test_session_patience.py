"""How long to try again, and at what pace."""

from __future__ import annotations

from gateway.session.patience import Patience, Step, Trouble


def test_a_bad_gateway_is_asked_about_and_tried_again_for_a_minute() -> None:
    patience = Patience(100.0)
    for trouble in (Trouble(502), Trouble(500), Trouble(None)):
        verdict = patience.judge(trouble, 159.9)
        assert verdict.step is Step.ASK
        assert verdict.wait_s == 0.4
    assert patience.judge(Trouble(502), 160.0).step is Step.GIVE_UP


def test_a_refused_token_is_replaced_once() -> None:
    patience = Patience(0.0)
    assert patience.judge(Trouble(403), 1.0).step is Step.REMINT
    assert patience.judge(Trouble(401), 1.0).step is Step.GIVE_UP


def test_throttling_backs_off_from_150_ms_to_2_s() -> None:
    patience = Patience(0.0)
    waits = [patience.judge(Trouble(429), 1.0).wait_s for _ in range(6)]
    assert waits == [0.15, 0.3, 0.6, 1.2, 2.0, 2.0]
    assert Patience(0.0).judge(Trouble(429, retry_after_s=1.0), 0.0).wait_s == 1.0
    assert Patience(0.0).judge(Trouble(429, retry_after_s=99.0), 0.0).wait_s == 2.0


def test_the_guests_own_answers_are_not_argued_with() -> None:
    assert Patience(0.0).judge(Trouble(404), 0.0).step is Step.GIVE_UP
    assert Patience(0.0).judge(Trouble(200), 0.0).step is Step.GIVE_UP
