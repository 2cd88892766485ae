"""When a token is minted, kept, renewed and given up."""

from __future__ import annotations

from gateway.tokens import RENEW_AT, Advice, Token, TokenKeeper


def token(asked_s: float = 0.0, life_s: float = 1800.0) -> Token:
    return Token("microvm-1", 8080, asked_s, life_s, {"X-aws-proxy-auth": "very-secret"})


def test_one_mints_and_the_others_join() -> None:
    keeper = TokenKeeper()
    assert keeper.ask(0.0) is Advice.MINT
    assert keeper.ask(0.0) is Advice.JOIN
    keeper.minted(token())
    assert keeper.ask(1.0) is Advice.USE
    assert keeper.mints == 1


def test_after_a_failed_mint_the_next_one_mints() -> None:
    keeper = TokenKeeper()
    keeper.ask(0.0)
    keeper.mint_failed()
    assert keeper.ask(0.0) is Advice.MINT


def test_renewed_at_80_percent_and_only_when_asked() -> None:
    keeper = TokenKeeper()
    keeper.ask(0.0)
    keeper.minted(token())
    assert keeper.ask(RENEW_AT * 1800 - 1) is Advice.USE
    assert keeper.ask(RENEW_AT * 1800) is Advice.MINT


def test_a_clock_that_went_back_makes_a_token_stale() -> None:
    assert not token(asked_s=100.0).fresh(50.0)


def test_a_late_refusal_of_an_old_token_does_not_cost_its_successor() -> None:
    keeper = TokenKeeper()
    keeper.ask(0.0)
    old, new = token(), token(asked_s=5.0)
    keeper.minted(old)
    keeper.refused(old)
    assert keeper.token is None
    assert keeper.ask(5.0) is Advice.MINT
    keeper.minted(new)
    keeper.refused(old)
    assert keeper.token is new
    keeper.forget()
    assert keeper.token is None


def test_the_value_stays_out_of_repr() -> None:
    assert "very-secret" not in repr(token())
    assert "very-secret" not in str([token()])
