"""One client connection of a proxy: requests one after the other, perhaps a splice at the end."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

import h11

from gateway.local.behaviours import implements
from gateway.local.interfaces import NotAdmittedError, RunningMachine, TokenRefusedError
from gateway.local.proxy import heads
from gateway.local.proxy.exchange import ClientGoneError, Exchange, GuestGoneError, Side
from gateway.local.proxy.heads import Access, RefusedError
from gateway.local.proxy.wire import Wire

if TYPE_CHECKING:
    from gateway.local.proxy.server import MachineProxy

#: A connection that is kept alive without a request is closed after this long (guessed:
#: the same minute as for sockets, LM 5.2).
IDLE_S = 60.0
#: From the first byte of a head to its last: honest clients send it in one packet.
HEAD_WITHIN_S = 20.0
#: The body of a refused request is read and thrown away up to these bounds, because closing
#: a socket with unread bytes resets it, and a reset can overtake the answer.
LINGER_BYTES = 1024 * 1024
LINGER_S = 2.0
#: Connecting to a listener in the machine: local, so slow only if the computer starves.
CONNECT_WITHIN_S = 10.0


class ClientConnection:
    """Serves one accepted connection; `run` ends with it, or when it was spliced.

    `over_cap` is decided when the connection is accepted: each request on it gets 429.
    """

    def __init__(self, proxy: MachineProxy, wire: Wire, *, over_cap: bool) -> None:
        self.side = Side(wire, h11.SERVER)
        self.guest: Wire | None = None
        self._proxy = proxy
        self._wire = wire
        self._over_cap = over_cap
        self._method = b""
        self._spliced = False

    async def run(self) -> None:
        try:
            while await self._serve_one():
                self.side.http.start_next_cycle()
        except ClientGoneError:
            self._wire.abort()
            return
        finally:
            self._drop_guest()
        if not self._spliced:
            self._wire.close()

    async def _serve_one(self) -> bool:
        """Serve a request; whether the connection can carry another one."""
        request_id = str(uuid.uuid4())
        try:
            request = await self._next_request()
            if request is None:
                return False
            switched = await self._forward(request, request_id)
        except RefusedError as error:
            return await self._refuse(error, request_id)
        return not switched and self._is_reusable()

    async def _next_request(self) -> h11.Request | None:
        """The next request; None when the client ends or has nothing to ask.

        Raises RefusedError for what cannot be read as one.
        """
        self._method = b""
        try:
            async with asyncio.timeout(IDLE_S):
                if not self.side.http.trailing_data[0] and not await self._wire.readable():
                    return None
            async with asyncio.timeout(HEAD_WITHIN_S):
                event = await self.side.next_event()
        except TimeoutError:
            return None
        except h11.RemoteProtocolError as error:
            raise RefusedError(error.error_status_hint, b"Malformed request") from error
        if not isinstance(event, h11.Request):
            return None
        self._method = event.method
        heads.check_framing(event)
        return event

    # -- the checks, in the order of `ProxiedMachine`

    @implements("check-order")
    async def _forward(self, request: h11.Request, request_id: str) -> bool:
        """Forward to the guest; True when the connection was spliced.

        Raises RefusedError as long as nothing of a response has been sent.
        """
        access = heads.read_access(request)
        port = self._authorise(request, access)
        self._proxy.check_caps(over_cap=self._over_cap)
        upgrade = heads.is_upgrade(request)
        self._proxy.check_faults(upgrade=upgrade)
        self._proxy.note_inbound(len(request.target))
        guest = await self._reach(port)
        exchange = Exchange(
            self.side,
            guest,
            request,
            access,
            request_id=request_id,
            on_inbound=self._proxy.note_inbound,
            pace=self._proxy.pace,
            quiet_s=self._proxy.limits.quiet_socket_s,
        )
        try:
            switched = await exchange.run()
        except GuestGoneError as error:
            raise RefusedError(502) from error
        if switched:
            self.guest = None
            self._proxy.splice(self._wire, guest, *exchange.switched_bytes)
            self._spliced = True
        else:
            self._drop_guest()
        return switched

    def _authorise(self, request: h11.Request, access: Access) -> int:
        """The port that the token opens.  Raises RefusedError."""
        try:
            grant = self._proxy.machine.read_token(access.token)
        except TokenRefusedError as error:
            raise RefusedError(error.verdict.status, error.verdict.body) from error
        self._proxy.check_host(request)
        port = access.port()
        if not grant.allows(port):
            raise RefusedError(*heads.PORT_DENIED)
        return port

    @implements("nothing-listening-502", "client-gone-abandons-held-request")
    async def _reach(self, port: int) -> Wire:
        """Wait for the machine and connect to the port.  Raises RefusedError (502)."""
        while True:
            machine = await self._admitted()
            cuts = self._proxy.cuts
            try:
                async with asyncio.timeout(CONNECT_WITHIN_S):
                    guest = await Wire.adopt(*await machine.open_port(port))
            except (OSError, TimeoutError) as error:
                raise RefusedError(502) from error
            if cuts == self._proxy.cuts:
                self.guest = guest
                return guest
            guest.abort()  # suspended while we connected: be admitted again

    async def _admitted(self) -> RunningMachine:
        """`admit`, given up when the client goes away meanwhile."""
        gone = asyncio.Event()
        leaving = asyncio.ensure_future(gone.wait())
        admission = asyncio.ensure_future(self._proxy.machine.admit())
        self._wire.when_gone(gone.set)
        try:
            await asyncio.wait({admission, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not admission.done():
                raise ClientGoneError("the client left while its request was held")
            return admission.result()
        except NotAdmittedError as error:
            raise RefusedError(502) from error
        finally:
            self._wire.when_gone(None)
            admission.cancel()
            leaving.cancel()

    # -- the end of a request

    async def _refuse(self, error: RefusedError, request_id: str) -> bool:
        """Answer; whether the connection can carry another request."""
        self._drop_guest()
        http = self.side.http
        if http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return False
        waiting = http.they_are_waiting_for_100_continue  # then no body will follow
        reusable = not (waiting or error.close or self._over_cap or http.their_state is h11.ERROR)
        self.side.send(heads.refusal(error, request_id, close=not reusable))
        if error.body and self._method != b"HEAD":
            self.side.send(h11.Data(data=error.body))
        self.side.send(h11.EndOfMessage())
        if not waiting:
            await self._throw_body_away()
        return reusable and self._is_reusable()

    async def _throw_body_away(self) -> None:
        """Read the rest of the request, within bounds; what is longer ends the connection."""
        left = LINGER_BYTES
        try:
            async with asyncio.timeout(LINGER_S):
                while left > 0 and self.side.http.their_state is h11.SEND_BODY:
                    event = await self.side.next_event()
                    left -= len(event.data) if isinstance(event, h11.Data) else 0
                await self._wire.drain()
        except (TimeoutError, h11.RemoteProtocolError, ConnectionResetError):
            return

    def _is_reusable(self) -> bool:
        http = self.side.http
        return http.our_state is h11.DONE and http.their_state is h11.DONE

    def _drop_guest(self) -> None:
        if self.guest is not None:
            self.guest.abort()
            self.guest = None

    def abort(self) -> None:
        """End both sides now."""
        self._wire.abort()
        self._drop_guest()
