"""One machine of a kernel session: launch it, reach it, ask about it, end it.

A session has one Machine per generation. It knows tokens, the link and plain
requests, and how patient to be with each; it knows no phases and decides
nothing about the kernel. Who calls: ``runner.py``, on the bridge's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gateway.agent_http import AgentHttp, Health
from gateway.bridge import Bridge
from gateway.clock import Clock
from gateway.control import Control, MachineInfo
from gateway.errors import GatewayError, MachineGone, TeardownPending, Unreachable
from gateway.link_socket import ProxyAnswer
from gateway.profiles import AGENT_PORT
from gateway.session.patience import Patience, Step, Trouble
from gateway.tokens import Advice, Token, TokenKeeper

if TYPE_CHECKING:  # not needed before the service has accepted a launch: see booting
    from gateway.link import Link
    from kernel_guest.shared.link import Established

__all__ = ["Emit", "Machine"]

T = TypeVar("T")

PORT_HEADER = "X-aws-proxy-port"
# A held upgrade answers when the machine runs: 3 to 5 s on AWS (LM 12).
UPGRADE_TIMEOUT_S = 30.0
# TERMINATED was seen 3 s after the call (LM 3.4).
TEARDOWN_TIMEOUT_S = 15.0
# First looks come quickly, because the local service is done in milliseconds.
FIRST_LOOK_S = 0.02
MOST_LOOK_S = 1.0


class Emit(Protocol):
    """How a machine reports lifecycle events; the session adds what it knows."""

    def __call__(self, name: str, **facts: Any) -> None: ...


class Machine:
    """A MicroVM that the service has accepted."""

    def __init__(
        self,
        home: Bridge,
        control: Control,
        clock: Clock,
        info: MachineInfo,
        link: Link,
        emit: Emit,
        token_minutes: int,
    ) -> None:
        self._control = control
        self._clock = clock
        self._emit = emit
        self._token_minutes = token_minutes
        self._keeper = TokenKeeper()
        self._minted = asyncio.Event()
        self._http = AgentHttp(home, link.url)
        self.info = info
        self.link = link

    def __repr__(self) -> str:
        return f"<Machine {self.microvm_id} {self.info.state}>"

    @property
    def microvm_id(self) -> str:
        return self.info.microvm_id

    @property
    def mints(self) -> int:
        """Tokens minted so far."""
        return self._keeper.mints

    # -- tokens ----------------------------------------------------------------------

    async def _token(self) -> Token:
        """A token that will open a connection now; minted by one of all who ask."""
        while True:
            advice = self._keeper.ask(self._clock.monotonic_s())
            if advice is Advice.USE:
                assert self._keeper.token is not None
                return self._keeper.token
            if advice is Advice.MINT:
                return await self._mint()
            await self._minted.wait()

    async def _mint(self) -> Token:
        self._minted.clear()
        started_s = self._clock.monotonic_s()
        try:
            token = await self._control.auth_token(self.microvm_id, AGENT_PORT, self._token_minutes)
        except MachineGone:
            self._keeper.mint_failed()
            await self.look()  # raises it with the service's reason, which this call never has
            raise
        except BaseException:
            self._keeper.mint_failed()
            raise
        else:
            self._keeper.minted(token)
        finally:
            self._minted.set()
        self._emit("auth_token_created", port=AGENT_PORT, duration_ms=self._since_ms(started_s))
        return token

    def _since_ms(self, started_s: float) -> int:
        return round((self._clock.monotonic_s() - started_s) * 1000)

    # -- reaching it --------------------------------------------------------------------

    async def open_link(self, patience: Patience) -> Established:
        """Open the link, as long as it takes. Raises MachineGone, LinkRefused, GuestFault, …"""
        return await self._try(patience, self._open_once)

    async def _open_once(self, headers: dict[str, str]) -> Established:
        return await self.link.open(headers, UPGRADE_TIMEOUT_S)

    async def wake(self, patience: Patience) -> Health:
        """A plain request until the machine answers; the proxy resumes it (LM 4.3, 5.1)."""
        return await self._try(patience, self._http.health)

    async def rest(self) -> None:
        """Close the link on purpose: the machine is about to sleep, or may."""
        self._http.prepare()
        await self.link.close()

    async def keep_awake(self) -> None:
        """One cheap request; a failure says nothing, the link will."""
        try:
            await self._try(Patience(self._clock.monotonic_s(), 0.0), self._http.keep_awake)
        except GatewayError as error:
            self._emit("notice", reason=f"keep-awake request: {error.sentence}")

    async def _try(
        self, patience: Patience, attempt: Callable[[dict[str, str]], Awaitable[T]]
    ) -> T:
        while True:
            token = await self._token()
            headers = {**token.headers, PORT_HEADER: str(token.port)}
            try:
                return await attempt(headers)
            except (ProxyAnswer, Unreachable) as error:
                await self._after(patience, error, token)

    async def _after(
        self, patience: Patience, error: ProxyAnswer | Unreachable, token: Token
    ) -> None:
        """Prepare the next attempt, or raise: the machine's end if it has ended, else ``error``."""
        verdict = patience.judge(_trouble(error), self._clock.monotonic_s())
        if verdict.step is Step.REMINT:
            self._keeper.refused(token)
            return
        if verdict.step is Step.ASK or (verdict.step is Step.GIVE_UP and _is_silence(error)):
            await self.look()
        if verdict.step is Step.GIVE_UP:
            raise error
        await self._clock.sleep_s(verdict.wait_s)

    # -- asking and ending ------------------------------------------------------------------

    async def look(self) -> MachineInfo:
        """GetMicrovm. Raises MachineGone for a terminal state or an unknown machine."""
        self.info = await self._control.get(self.microvm_id)
        if self.info.terminal:
            raise MachineGone(self.microvm_id, self.info.state_reason or self.info.state.lower())
        return self.info

    async def suspend(self, timeout_s: float) -> MachineInfo:
        """SuspendMicrovm, then look until it is suspended or the time is over."""
        await self._control.suspend(self.microvm_id)
        return await self._look_until(lambda info: info.state == "SUSPENDED", timeout_s)

    async def _look_until(
        self, wanted: Callable[[MachineInfo], bool], timeout_s: float
    ) -> MachineInfo:
        deadline_s = self._clock.monotonic_s() + timeout_s
        pause_s = FIRST_LOOK_S
        while True:
            info = await self.look()
            if wanted(info) or self._clock.monotonic_s() >= deadline_s:
                return info
            await self._clock.sleep_s(pause_s)
            pause_s = min(MOST_LOOK_S, 1.5 * pause_s)

    async def terminate(self) -> None:
        """TerminateMicrovm, then GetMicrovm until the service says so, bounded.

        Raises TeardownPending when it does not, and what the call itself raises.
        """
        self.link.drop()
        self._keeper.forget()
        try:
            await self._control.terminate(self.microvm_id)
            await self._until_ended()
        except MachineGone:
            pass
        finally:
            await self._http.close()

    async def _until_ended(self) -> None:
        deadline_s = self._clock.monotonic_s() + TEARDOWN_TIMEOUT_S
        pause_s = FIRST_LOOK_S
        while True:
            self.info = await self._control.get(self.microvm_id)
            if self.info.state == "TERMINATED":
                return
            if self._clock.monotonic_s() >= deadline_s:
                raise TeardownPending(self.microvm_id, f"it is {self.info.state}")
            await self._clock.sleep_s(pause_s)
            pause_s = min(MOST_LOOK_S, 1.5 * pause_s)


def _trouble(error: ProxyAnswer | Unreachable) -> Trouble:
    if isinstance(error, ProxyAnswer):
        return Trouble(error.status, error.retry_after_s)
    return Trouble(None)


def _is_silence(error: ProxyAnswer | Unreachable) -> bool:
    """An answer behind which the machine may have ended."""
    return isinstance(error, Unreachable) or error.status >= 500
