"""After the 101: bytes from one transport to the other, as they come.

```
client transport ──▶ Leg ──▶ guest transport        counted as inbound
client transport ◀── Leg ◀── guest transport
```

A chunk is written to the other side in the same callback that received it: no
task, no queue, no parsing.  Bounds: when a transport holds more than its high
mark (`wire.WRITE_HIGH_BYTES`) the other one stops reading, so a direction holds at
most that plus one read.  A side that ends its stream has that passed on; a side
that is lost ends the other.  A socket without a byte in either direction for
`quiet_s` is cut without a close frame (LM 5.2); a ping is bytes like any other.

A `Tap` stands in the way only while a fault asks for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.local.behaviours import implements
from gateway.local.faults.plan import Direction, Fault
from gateway.local.proxy.cuts import Ending, Passed, Tap
from gateway.local.proxy.wire import Wire

#: How long a peer may take to read what is left for it once the socket has to end.
FLUSH_WITHIN_S = 5.0


class Leg(asyncio.Protocol):
    """One transport of a splice; what it receives goes to the other leg's transport.

    It comes paused and reads while no reason holds it.
    """

    def __init__(self, splice: Splice, transport: asyncio.Transport, direction: Direction) -> None:
        self.transport = transport
        self.direction = direction
        self.ended = False
        self.lost = False
        self._splice = splice
        self._reasons = {"start"}

    def data_received(self, data: bytes) -> None:
        self._splice.pass_on(self, data)

    def eof_received(self) -> bool:
        self._splice.ended(self)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._splice.lost(self)

    def pause_writing(self) -> None:
        self._splice.other(self).hold("full")

    def resume_writing(self) -> None:
        self._splice.other(self).release("full")

    def hold(self, reason: str) -> None:
        """Stop reading until every reason is released."""
        if not self._reasons:
            self.transport.pause_reading()
        self._reasons.add(reason)

    def release(self, reason: str) -> None:
        if reason in self._reasons:
            self._reasons.remove(reason)
            if not self._reasons and not self.lost:
                self.transport.resume_reading()


class Splice:
    """Two joined transports, from the 101 to the end.

    `on_inbound(size_bytes)` hears of each chunk from the client.  `charge(size_bytes)`
    says for how long the reader must pause because of a bandwidth cap, 0 if it need not.
    `on_struck(cut)` is called when an armed cut strikes, `on_closed(self)` once when both
    transports have gone.
    """

    def __init__(
        self,
        *,
        on_inbound: Callable[[int], None],
        charge: Callable[[int], float],
        on_struck: Callable[[Fault], None],
        on_closed: Callable[[Splice], None],
        quiet_s: float | None,
        tap: Tap | None,
    ) -> None:
        self._on_inbound = on_inbound
        self._charge = charge
        self._on_struck = on_struck
        self._on_closed = on_closed
        self._quiet_s = quiet_s
        self._tap = tap
        self._loop = asyncio.get_running_loop()
        self._active_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._legs: dict[Direction, Leg] = {}
        self._keep: tuple[Wire, ...] = ()

    def start(self, client: Wire, guest: Wire, *, from_client: bytes, from_guest: bytes) -> None:
        """Join them.  The bytes were read behind the request's and the 101's heads."""
        self._keep = (client, guest)
        wires = {
            Direction.TO_GUEST: (client, from_client),
            Direction.TO_CLIENT: (guest, from_guest),
        }
        late: dict[Direction, bytes] = {}
        for direction, (wire, early) in wires.items():
            transport, unread = wire.hand_over()
            late[direction] = early + unread
            self._legs[direction] = Leg(self, transport, direction)
        for direction, leg in self._legs.items():
            leg.transport.set_protocol(leg)
            if late[direction]:
                self.pass_on(leg, late[direction])
        for direction, leg in self._legs.items():
            if wires[direction][0].ended:
                self.ended(leg)
            leg.release("start")
        self._watch()

    def other(self, leg: Leg) -> Leg:
        return self._legs[leg.direction.opposite]

    # -- bytes

    def pass_on(self, leg: Leg, data: bytes) -> None:
        self._active_s = self._loop.time()
        if leg.direction is Direction.TO_GUEST:
            self._on_inbound(len(data))
        if self._tap is None:
            self._legs[leg.direction.opposite].transport.write(data)
        else:
            self._obey(self._tap, self._tap.feed(leg.direction, data))
        pause_s = self._charge(len(data))
        if pause_s > 0:
            leg.hold("bandwidth")
            self._loop.call_later(pause_s, leg.release, "bandwidth")

    # -- the end

    def ended(self, leg: Leg) -> None:
        """A side has ended its stream: pass that on, keep the other direction."""
        leg.ended = True
        other = self.other(leg)
        if other.ended:
            self._close_soon(leg)
            self._close_soon(other)
        elif not other.transport.is_closing():
            other.transport.write_eof()

    def lost(self, leg: Leg) -> None:
        """A side has gone: let the other one have what is left, then close it."""
        other = self.other(leg)
        if other.lost:
            self._stop_watching()
            self._on_closed(self)
        else:
            self._close_soon(other)

    def _close_soon(self, leg: Leg) -> None:
        leg.transport.close()
        self._loop.call_later(FLUSH_WITHIN_S, leg.transport.abort)

    def abort(self) -> None:
        """End both sides now, without a close frame."""
        for leg in self._legs.values():
            leg.transport.abort()

    # -- quiet sockets

    @implements("quiet-socket-cut-60s")
    def _watch(self) -> None:
        if self._quiet_s is None:
            return
        quiet_until_s = self._active_s + self._quiet_s
        if self._loop.time() >= quiet_until_s:
            self.abort()
        else:
            self._timer = self._loop.call_at(quiet_until_s, self._watch)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # -- faults

    def arm(self, cut: Fault | None) -> None:
        """Let a cut strike this socket, or none.  One with a close frame needs a tap from
        the start on; without it the socket is left alone."""
        if self._tap is None:
            if cut is None or cut.close_frame:
                return
            self._tap = Tap(tracked=False)
        elif cut is not None and cut.close_frame and not self._tap.tracked:
            return
        self._tap.arm(cut)
        self._obey(self._tap, self._tap.strike_if_due())

    def _obey(self, tap: Tap, passed: Passed) -> None:
        for direction, data in passed.pieces:
            self._legs[direction.opposite].transport.write(data)
        cut = tap.cut
        if passed.struck and cut is not None:
            self._on_struck(cut)
            self._loop.call_later(FLUSH_WITHIN_S, self.abort)
            if passed.ending is Ending.CUT:
                self._legs[cut.direction.opposite].transport.close()
                self._legs[cut.direction].transport.abort()
        if passed.ending is Ending.CLOSED:
            for leg in self._legs.values():
                leg.transport.close()
