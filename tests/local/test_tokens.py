"""Data-plane tokens."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.local.interfaces import TokenRefusedError, TokenVerdict
from gateway.local.tokens import TokenKind, TokenSmith

SMITH = TokenSmith()


def refused(
    smith: TokenSmith, token: str | None, machine: str = "m", now_s: float = 0
) -> TokenVerdict:
    with pytest.raises(TokenRefusedError) as caught:
        smith.read(token, machine, now_s)
    return caught.value.verdict


def test_a_token_is_a_compact_jwe_of_the_recorded_size() -> None:
    token = SMITH.mint("microvm-" + "0" * 36, [(8080, 8080)], 1e9, TokenKind.PORTS)
    header, key, *rest = token.split(".")
    assert key == ""
    assert len(rest) == 3
    assert 761 <= len(token) <= 868
    decoded = json.loads(base64.urlsafe_b64decode(header + "=="))
    assert decoded.keys() == {"kid", "alg", "enc"}
    assert (decoded["alg"], decoded["enc"]) == ("dir", "A256GCM")


def test_a_grant_holds_the_ports() -> None:
    token = SMITH.mint("m", [(80, 80), (8000, 9000)], 10, TokenKind.PORTS)
    grant = SMITH.read(token, "m", 9.9)
    allowed = [port for port in (79, 80, 81, 7999, 8000, 9000, 9001) if grant.allows(port)]
    assert allowed == [80, 8000, 9000]


def test_nothing_of_the_content_is_readable() -> None:
    token = SMITH.mint("microvm-secretname", [(80, 80)], 10, TokenKind.PORTS)
    for part in token.split("."):
        assert b"secretname" not in base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def test_refusals() -> None:
    token = SMITH.mint("m", [(80, 80)], 10, TokenKind.PORTS)
    assert refused(SMITH, token, "other") is TokenVerdict.FAILED
    assert refused(SMITH, token, now_s=10) is TokenVerdict.FAILED
    assert refused(TokenSmith(), token) is TokenVerdict.FAILED
    shell = SMITH.mint("m", [(1, 65535)], 10, TokenKind.SHELL)
    assert refused(SMITH, shell) is TokenVerdict.SHELL_ONLY


@pytest.mark.parametrize("token", [None, "", "x", "a.b.c.d.e", "....", "é.é.é.é.é", "x" * 9000])
def test_what_is_not_a_jwe_counts_as_missing(token: str | None) -> None:
    assert refused(SMITH, token) is TokenVerdict.MISSING


@given(st.text(max_size=200))
def test_garbage_is_refused_whatever_it_is(token: str) -> None:
    assert refused(SMITH, token) in (TokenVerdict.MISSING, TokenVerdict.FAILED)


@given(st.integers(0, 2000), st.sampled_from("Ab3_"))
def test_a_changed_token_is_refused(place: int, letter: str) -> None:
    token = SMITH.mint("m", [(80, 80)], 10, TokenKind.PORTS)
    place %= len(token)
    changed = token[:place] + letter + token[place + 1 :]
    if base64_equal(changed, token):
        return
    assert refused(SMITH, changed) in (TokenVerdict.MISSING, TokenVerdict.FAILED)


def base64_equal(left: str, right: str) -> bool:
    """Base64 without padding has unused bits at the end of a part."""

    def decoded(token: str) -> list[bytes]:
        return [base64.urlsafe_b64decode(p + "=" * (-len(p) % 4)) for p in token.split(".")]

    try:
        return decoded(left)[1:] == decoded(right)[1:] and left.split(".")[0] == right.split(".")[0]
    except ValueError:
        return False


def test_tokens_can_be_expired_by_order() -> None:
    smith = TokenSmith()
    mine = smith.mint("m", [(80, 80)], 10, TokenKind.PORTS)
    other = smith.mint("n", [(80, 80)], 10, TokenKind.PORTS)
    smith.expire_all("m")
    assert refused(smith, mine) is TokenVerdict.FAILED
    smith.read(other, "n", 0)
    smith.read(smith.mint("m", [(80, 80)], 10, TokenKind.PORTS), "m", 0)
    smith.expire_all(None)
    assert refused(smith, other, "n") is TokenVerdict.FAILED
    smith.read(smith.mint("n", [(80, 80)], 10, TokenKind.PORTS), "n", 0)


def test_no_secret_is_in_the_repr() -> None:
    assert repr(TokenSmith()) == "<TokenSmith minted=0>"
