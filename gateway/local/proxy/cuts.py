"""Cutting a spliced socket at a byte, as a fault asks for.  Pure.

Without a close frame: the receiver of the counted direction gets exactly the
ordered number of bytes, then end-of-file; the other side loses its connection.

With one: at the ordered byte each direction first finishes the frame that is
open in it, gets a close frame, and carries nothing more.  Frame boundaries must
have been followed since the 101, so this works on sockets that were opened after
the fault was ordered.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from gateway.local.faults.plan import Direction, Fault
from gateway.local.proxy.frames import CLOSE_TO_CLIENT, CLOSE_TO_GUEST, FrameTracker

CLOSE_FRAMES = {Direction.TO_CLIENT: CLOSE_TO_CLIENT, Direction.TO_GUEST: CLOSE_TO_GUEST}


class Ending(enum.Enum):
    NOT_YET = "not yet"
    CUT = "cut"
    CLOSED = "closed"


@dataclass(slots=True)
class Passed:
    """What to write in each direction for a chunk, and whether the socket ends after it."""

    pieces: list[tuple[Direction, bytes]] = field(default_factory=list)
    ending: Ending = Ending.NOT_YET
    struck: bool = False


class Tap:
    """Stands in the way of a splice's bytes while a fault may want them."""

    def __init__(self, *, tracked: bool) -> None:
        self.tracked = tracked
        self._trackers = {direction: FrameTracker() for direction in Direction}
        self._cut: Fault | None = None
        self._left = 0
        #: Directions in which a frame is still open after the strike; None before it.
        self._closing: set[Direction] | None = None

    @property
    def cut(self) -> Fault | None:
        return self._cut

    def arm(self, cut: Fault | None) -> None:
        """Count from now; None disarms.  The same order goes on counting, whatever is left
        of it; a socket that was struck is left alone."""
        if self._closing is not None:
            return
        if cut is None or cut.fault_id != (self._cut.fault_id if self._cut else None):
            self._cut = cut
            self._left = cut.after_bytes if cut else 0

    def strike_if_due(self) -> Passed:
        """For a cut after 0 bytes: it strikes before anything is carried."""
        if self._cut is not None and self._left == 0 and self._closing is None:
            return self._strike(self._cut, b"")
        return Passed()

    def feed(self, direction: Direction, data: bytes) -> Passed:
        """Pass a chunk."""
        if self._closing is not None:
            passed = Passed()
            self._finish(direction, data, passed)
            return self._settle(passed)
        if self._cut is None or direction is not self._cut.direction or len(data) < self._left:
            return self._pass(direction, data)
        return self._strike(self._cut, data)

    def _pass(self, direction: Direction, data: bytes) -> Passed:
        if self.tracked:
            self._trackers[direction].feed(data)
        if self._cut is not None and direction is self._cut.direction:
            self._left -= len(data)
        return Passed([(direction, data)])

    def _strike(self, cut: Fault, data: bytes) -> Passed:
        head, rest = data[: self._left], data[self._left :]
        passed = self._pass(cut.direction, head)
        passed.struck = True
        if not (cut.close_frame and self.tracked):
            self._closing = set()
            passed.ending = Ending.CUT
            return passed
        self._closing = set(Direction)
        self._finish(cut.direction, rest, passed)
        self._finish(cut.direction.opposite, b"", passed)
        return self._settle(passed)

    def _finish(self, direction: Direction, data: bytes, passed: Passed) -> None:
        """Pass `data` up to the end of the open frame, then the close frame, once."""
        assert self._closing is not None
        if direction not in self._closing:
            return
        tracker = self._trackers[direction]
        end = tracker.finish_frame(data)
        passed.pieces.append((direction, data[:end]))
        if tracker.at_boundary:
            passed.pieces.append((direction, CLOSE_FRAMES[direction]))
            self._closing.discard(direction)

    def _settle(self, passed: Passed) -> Passed:
        if not self._closing:
            passed.ending = Ending.CLOSED
        return passed
