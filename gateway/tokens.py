"""When to mint a proxy token, when to keep one, when to give one up. Pure.

THEORY

A token opens connections to one machine on one port; it is checked when a
connection or request begins and never again (LM 4.4). So a token is only
needed at the moment something is about to be opened, and an open link needs
none: a session that holds its link for hours mints nothing in those hours.

* *Minted when it will be used*, never on a timer. ``ask`` is called when a
  connection is about to be opened.
* *Single flight.* While one mint is under way every other asker joins it: the
  account has 50 mints a second for all its machines (LM 4.5).
* *Renewed at 80 %* of its life: a token that is about to expire could be
  refused between our check and the proxy's.
* *Refused once, minted once.* The proxy answers 403 for an expired token, a
  wrong port and a wrong machine alike (LM 4.3), so one fresh token tells
  expiry from the other two. A refusal only counts against the token that was
  refused: a late refusal of an old one does not throw away its successor.

Life is counted in monotonic time from the moment *before* the mint was asked
for; the service does not return an expiry (LM 4.5). If the computer slept, the
monotonic clock may have stood still and the token is older than it looks; the
refusal rule covers that.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

__all__ = ["RENEW_AT", "Advice", "Token", "TokenKeeper"]

# Practice of several projects against the live service (LM 4.5), October 2026.
RENEW_AT = 0.8


class Token(NamedTuple):
    """Headers that open a connection to ``port`` of ``microvm_id``. The value stays out of repr."""

    microvm_id: str
    port: int
    asked_s: float  # monotonic, just before the mint
    life_s: float
    headers: Mapping[str, str]

    def __repr__(self) -> str:
        return f"<Token {self.microvm_id}:{self.port}>"

    def fresh(self, now_s: float) -> bool:
        """False from 80 % of its life on; a clock that went backwards makes it stale too."""
        return 0 <= now_s - self.asked_s < RENEW_AT * self.life_s


class Advice(Enum):
    """What an asker does next."""

    USE = auto()  # keeper.token is good
    MINT = auto()  # you mint; then call minted() or mint_failed()
    JOIN = auto()  # somebody mints already; wait for them and ask again


class TokenKeeper:
    """Keeps at most one token for one machine and port."""

    def __init__(self) -> None:
        self._token: Token | None = None
        self._minting = False
        self.mints = 0

    @property
    def token(self) -> Token | None:
        return self._token

    def ask(self, now_s: float) -> Advice:
        """A connection is about to be opened. MINT makes the caller the one who mints."""
        if self._minting:
            return Advice.JOIN
        if self._token is not None and self._token.fresh(now_s):
            return Advice.USE
        self._minting = True
        return Advice.MINT

    def minted(self, token: Token) -> None:
        self._minting = False
        self._token = token
        self.mints += 1

    def mint_failed(self) -> None:
        self._minting = False

    def refused(self, token: Token) -> None:
        """The proxy answered 401 or 403 to this token."""
        if self._token is token:
            self._token = None

    def forget(self) -> None:
        """The machine changed or is gone."""
        self._token = None
