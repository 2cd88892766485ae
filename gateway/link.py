"""One link to one machine: a protocol core over successive WebSockets.

The core (``kernel_guest.shared.link``) knows the rules and does no I/O; this
shell moves its frames. Two pumps while a socket is open: the reader feeds the
core and tells the owner, the writer sends what the core has. Both give the loop
back after ``TURN_BYTES``, so that one busy kernel does not starve the others.

A cut is not an end: the core keeps what was not acknowledged, ``open`` on a new
socket resumes, and calls that were under way are answered then. Only
``abandon`` ends them.

Who drains decides who may send more: ``consumed`` is the owner's word that a
message has left for its client. Calls' replies are drained here at once.

Acknowledgements and credit ride on what is sent anyway. When nothing is, one
frame goes out ``ACK_AFTER_S`` later: one for each message would double the
frames of a chatty cell. The window is far larger than what arrives meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gateway.bridge import Bridge
from gateway.clock import Clock
from gateway.errors import (
    CallFailed,
    GatewayError,
    GuestFault,
    LinkRefused,
    OutcomeUnknown,
    TimedOut,
    Unreachable,
)
from gateway.link_codec import LinkKey, compress, decompress
from gateway.link_socket import is_loopback, open_socket
from kernel_guest.shared.errors import Fault, LinkProtocolError
from kernel_guest.shared.link import (
    Established,
    LinkCore,
    LinkEvent,
    LinkIdentity,
    LinkLimits,
    Received,
    Refused,
    Role,
)
from kernel_guest.shared.messages import Kind, Lane, LinkMessage, call

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

__all__ = ["CallResult", "Link", "LinkOwner"]

# What a pump moves before the loop gets a turn for somebody else (design 2): a
# chunk of the link. At 1 GB/s of loopback it is a quarter of a millisecond.
TURN_BYTES = 256 * 1024
# As the guest's side does it: well below the time after which a link is parked,
# far above a pass of the loop.
ACK_AFTER_S = 0.02
# Calls without an answer. The session makes a few; a file transfer some tens.
MAX_CALLS = 1_000


class LinkOwner(Protocol):
    """Who is told. Called on the loop, in the order of the link."""

    def on_link_message(self, message: LinkMessage) -> None:
        """A JUPYTER, EVENT or GAP message. Call ``consumed`` when it is drained."""

    def on_link_cut(self, reason: str) -> None:
        """The socket is gone and nobody asked for that."""


class CallResult(NamedTuple):
    """The answer to a call."""

    result: dict[str, Any]
    blob: bytes = b""


class Link:
    """Use on the bridge's loop only."""

    def __init__(
        self,
        home: Bridge,
        clock: Clock,
        key: LinkKey,
        identity: LinkIdentity,
        owner: LinkOwner,
        *,
        url: str,
        limits: LinkLimits | None = None,
    ) -> None:
        squeeze = not is_loopback(url)
        self._home = home
        self._clock = clock
        self._owner = owner
        self.url = url
        self.core = LinkCore(
            role=Role.GATEWAY,
            identity=identity,
            limits=limits,
            prove=key.prove,
            compress=compress if squeeze else None,
            decompress=decompress if squeeze else None,
        )
        self._socket: ClientConnection | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._output = asyncio.Event()
        self._ack_timer: asyncio.TimerHandle | None = None
        self._calls: dict[int, asyncio.Future[CallResult]] = {}
        self._call_ids = itertools.count(1)

    def __repr__(self) -> str:
        return f"<Link {self.url} {'open' if self.is_open else 'closed'} {self.core!r}>"

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    # -- opening and closing -----------------------------------------------------

    async def open(self, headers: Mapping[str, str], timeout_s: float) -> Established:
        """Connect, upgrade, prove who we are.

        Raises ProxyAnswer, Unreachable, LinkRefused or GuestFault; the link is closed then.
        """
        await self.close()
        socket = await open_socket(self._home, self.url, headers, timeout_s)
        try:
            return await asyncio.wait_for(self._shake_hands(socket), timeout_s)
        except BaseException as error:
            self.core.disconnected()
            await socket.close()
            if isinstance(error, TimeoutError):
                raise Unreachable(f"the machine at {self.url}", "no handshake") from error
            raise

    async def _shake_hands(self, socket: ClientConnection) -> Established:
        from websockets.exceptions import ConnectionClosed

        self.core.connected()
        try:
            while True:
                data = await _receive(socket)
                events = self.core.receive_frame(data)
                for frame in self.core.take_frames(TURN_BYTES):
                    await socket.send(frame)
                if events:
                    return self._adopt(socket, events)
        except ConnectionClosed as error:
            raise Unreachable(f"the machine at {self.url}", "cut in the handshake") from error
        except LinkProtocolError as error:
            raise GuestFault(str(error)) from error

    def _adopt(self, socket: ClientConnection, events: list[LinkEvent]) -> Established:
        """The first event of a handshake is its outcome; start the pumps on a good one."""
        outcome = events[0]
        if isinstance(outcome, Refused):
            raise LinkRefused(outcome.code, outcome.text)
        assert isinstance(outcome, Established)
        self._socket = socket
        self._output.set()
        self._pumps = [
            self._home.spawn(self._pump(socket, self._read), f"link-read {self.url}"),
            self._home.spawn(self._pump(socket, self._write), f"link-write {self.url}"),
        ]
        return outcome

    async def close(self) -> None:
        """Close on purpose: park, stop. Queued messages are kept for the next ``open``."""
        socket = self._detach()
        if socket is not None:
            await socket.close()

    def drop(self) -> None:
        """Cut without a close handshake and tell the owner, as if the network had done it."""
        socket = self._socket
        if socket is not None:
            socket.transport.abort()

    def abandon(self, reason: str) -> None:
        """The machine is gone for good: no call will be answered any more."""
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(OutcomeUnknown("The call", reason))
                future.exception()  # its caller may be gone: not a warning at collection

    def _detach(self) -> ClientConnection | None:
        socket, self._socket = self._socket, None
        self._cancel_ack_timer()
        if socket is not None:
            self.core.disconnected()
            for pump in self._pumps:
                if pump is not asyncio.current_task():
                    pump.cancel()
        return socket

    # -- the pumps ----------------------------------------------------------------

    async def _pump(
        self,
        socket: ClientConnection,
        body: Callable[[ClientConnection], Coroutine[Any, Any, None]],
    ) -> None:
        """Run one pump until its socket ends, then tell the owner once, whoever is first."""
        from websockets.exceptions import ConnectionClosed

        try:
            await body(socket)
        except ConnectionClosed as error:
            reason = str(error)
        except LinkProtocolError as error:
            reason = f"the machine broke the protocol: {error}"
        except Exception as error:  # a bug of ours: say it, and let the session recover
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"{self!r} failed", "exception": error}
            )
            reason = f"internal error: {type(error).__name__}"
        if socket is self._socket:
            self._detach()
            self._owner.on_link_cut(reason)
        socket.transport.abort()

    async def _read(self, socket: ClientConnection) -> None:
        turn_bytes = 0
        while True:
            data = await _receive(socket)
            for event in self.core.receive_frame(data):
                assert isinstance(event, Received), "the handshake is over"
                self._take(event.message)
            self._note_received()
            turn_bytes += len(data)
            if turn_bytes >= TURN_BYTES:
                turn_bytes = 0
                await asyncio.sleep(0)

    def _cancel_ack_timer(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None

    async def _write(self, socket: ClientConnection) -> None:
        while True:
            await self._output.wait()
            self._output.clear()
            self._cancel_ack_timer()
            while frames := self.core.take_frames(TURN_BYTES):
                for frame in frames:
                    await socket.send(frame)
                await asyncio.sleep(0)

    def _note_received(self) -> None:
        """Something came or was drained: queued messages may go now, an acknowledgement soon."""
        if not self.core.wants_output:
            return
        if self.core.queued_bytes:
            self._output.set()
        elif self._ack_timer is None:
            loop = asyncio.get_running_loop()
            self._ack_timer = loop.call_later(ACK_AFTER_S, self._output.set)

    def _take(self, message: LinkMessage) -> None:
        if message.kind is Kind.REPLY:
            self.core.consumed(message.size_bytes, message.lane)
            self._answer(message)
        elif message.kind is Kind.CALL:
            raise LinkProtocolError(Fault.UNEXPECTED, "a call from the guest")
        else:
            self._owner.on_link_message(message)

    # -- messages and calls ----------------------------------------------------------

    def send(self, message: LinkMessage) -> None:
        """Queue; also while closed. Raises LinkFull or MessageRefused (of the shared tree)."""
        self.core.send(message)
        self._output.set()

    def consumed(self, size_bytes: int, lane: Lane) -> None:
        """A message given to the owner has been drained."""
        self.core.consumed(size_bytes, lane)
        self._note_received()

    async def call(
        self,
        op: str,
        args: Mapping[str, Any] | None = None,
        *,
        blob: bytes = b"",
        lane: Lane = Lane.URGENT,
        timeout_s: float,
    ) -> CallResult:
        """Ask the guest and wait for its answer, across cuts.

        Raises CallFailed for its refusal, TimedOut, OutcomeUnknown when the machine is lost.
        """
        if len(self._calls) >= MAX_CALLS:
            raise CallFailed(op, "too_many_calls", f"{MAX_CALLS} are unanswered")
        call_id = next(self._call_ids)
        future: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self.send(call(call_id, op, dict(args or {}), blob, lane))
            return await self._clock.wait_for(future, timeout_s)
        except TimeoutError as error:
            raise TimedOut(f"the machine's answer to {op}", timeout_s) from error
        except _CallError as error:
            raise CallFailed(op, error.code, error.message) from None
        finally:
            self._calls.pop(call_id, None)

    def _answer(self, message: LinkMessage) -> None:
        """Match a reply to its call; a reply to nothing is late or invented, and dropped."""
        answer = message.json()
        call_id = answer.get("id")
        future = self._calls.get(call_id) if isinstance(call_id, int) else None
        if future is None or future.done():
            return
        result = answer.get("result")
        if answer.get("ok") is True and isinstance(result, dict):
            future.set_result(CallResult(result, message.blob))
        else:
            future.set_exception(_CallError(answer.get("error")))


MAX_ERROR_CHARS = 500


class _CallError(GatewayError):
    """An error reply before the operation's name is known; texts come from the guest: cut."""

    def __init__(self, error: object) -> None:
        facts = error if isinstance(error, dict) else {}
        self.code = str(facts.get("code", "unknown"))[:MAX_ERROR_CHARS]
        self.message = str(facts.get("message", "no reason given"))[:MAX_ERROR_CHARS]
        super().__init__(self.message)


async def _receive(socket: ClientConnection) -> bytes:
    """The next binary message. Text is not of this protocol."""
    data = await socket.recv()
    if isinstance(data, str):
        raise LinkProtocolError(Fault.BAD_FRAME, "a text frame")
    return data
