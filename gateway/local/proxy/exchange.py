"""One admitted request, from its head to the end of its response or to its 101.

The client's side and the guest's side are each an h11 state machine over a
`Wire`.  Every exchange has its own connection to the guest: a pooled one could
have died in a freeze, and a unix connection costs less than finding out.  The
request's body and the response run at the same time, so `Expect: 100-continue`,
early answers and streams in both directions need no special case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import h11

from gateway.local.proxy import heads
from gateway.local.proxy.wire import Wire

#: Bound of a head, in either direction; a token is 8,000 bytes at most (LM 2.2).
MAX_HEAD_BYTES = 64 * 1024


class ClientGoneError(Exception):
    """The client ended or broke its connection; there is nobody to answer."""


class GuestGoneError(Exception):
    """The guest closed or broke HTTP before its response began: 502."""


class Side:
    """An h11 connection over a wire."""

    def __init__(self, wire: Wire, role: type[h11.CLIENT] | type[h11.SERVER]) -> None:
        self.wire = wire
        self.http = h11.Connection(role, max_incomplete_event_size=MAX_HEAD_BYTES)

    async def next_event(self, *, quiet_s: float | None = None) -> h11.Event | type[h11.PAUSED]:
        """The next event.  Raises h11.RemoteProtocolError, and TimeoutError when nothing
        comes for `quiet_s`."""
        while True:
            event = self.http.next_event()
            if event is not h11.NEED_DATA:
                assert event is h11.PAUSED or isinstance(event, h11.Event)
                return event
            async with asyncio.timeout(quiet_s):
                self.http.receive_data(await self.wire.read())

    def send(self, event: h11.Event) -> None:
        self.wire.write(self.http.send(event) or b"")


class Exchange:
    """Forwards one request.  `run` says how it ended."""

    def __init__(
        self,
        client: Side,
        guest: Wire,
        request: h11.Request,
        access: heads.Access,
        *,
        request_id: str,
        on_inbound: Callable[[int], None],
        pace: Callable[[int], Awaitable[None]],
        quiet_s: float | None,
    ) -> None:
        self._client = client
        self._guest = Side(guest, h11.CLIENT)
        self._request = request
        self._access = access
        self._request_id = request_id
        self._on_inbound = on_inbound
        self._pace = pace
        self._quiet_s = quiet_s

    async def run(self) -> bool:
        """True when the guest switched protocols: the caller splices (`switched_bytes`).

        False when the response is complete.  Raises GuestGoneError before anything of
        the response has been passed on, else ClientGoneError with the client aborted.
        """
        self._guest.send(heads.forwarded_request(self._request, self._access))
        self._client.wire.when_gone(self._guest.wire.abort)
        body = asyncio.create_task(self._forward_body())
        try:
            return await self._forward_response()
        finally:
            self._client.wire.when_gone(None)
            body.cancel()
            await asyncio.wait([body])

    @property
    def switched_bytes(self) -> tuple[bytes, bytes]:
        """What was read behind the two heads: (from the client, from the guest)."""
        return self._client.http.trailing_data[0], self._guest.http.trailing_data[0]

    async def _forward_body(self) -> None:
        """Client to guest; any trouble ends the guest's connection, which ends the exchange."""
        try:
            while True:
                event = await self._client.next_event(quiet_s=self._quiet_s)
                if not isinstance(event, h11.Data | h11.EndOfMessage):
                    return
                self._guest.send(event)
                if isinstance(event, h11.EndOfMessage):
                    return
                self._on_inbound(len(event.data))
                await self._pace(len(event.data))
                await self._guest.wire.drain()
        except (h11.ProtocolError, TimeoutError):
            self._guest.wire.abort()
        except ConnectionResetError:
            return  # the guest has gone or needs no more: its response, or the lack of it, decides

    async def _forward_response(self) -> bool:
        begun = False
        try:
            while True:
                event = await self._guest.next_event()
                if isinstance(event, h11.EndOfMessage):
                    self._client.send(event)
                    await self._client.wire.drain()
                    return False
                if isinstance(event, h11.InformationalResponse) and event.status_code == 101:
                    self._client.send(heads.forwarded_switch(event, self._access, self._request_id))
                    return True
                begun |= await self._forward_event(event)
        except h11.RemoteProtocolError as error:
            if not begun:
                raise GuestGoneError(str(error)) from error
            self._client.wire.abort()
            raise ClientGoneError("the guest broke off within its response") from error
        except ConnectionResetError as error:
            raise ClientGoneError("the client has gone") from error

    async def _forward_event(self, event: h11.Event | type[h11.PAUSED]) -> bool:
        """Pass on a head or a piece of body; whether the response has begun."""
        if isinstance(event, h11.Response):
            self._client.send(heads.forwarded_response(event, self._request_id))
            return True
        if isinstance(event, h11.InformationalResponse):
            self._client.send(event)
        elif isinstance(event, h11.Data):
            self._client.send(event)
            await self._pace(len(event.data))
            await self._client.wire.drain()
        else:
            raise h11.RemoteProtocolError("the guest closed without an answer")
        return False
