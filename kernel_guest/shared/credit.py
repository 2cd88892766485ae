"""Credit: how much a sender may have under way that the other application has not consumed.

The receiver grants a window in bytes per lane.  A message costs its bytes plus an allowance for
the objects that it becomes in memory, so that a million tiny messages are not free.

Rule: a message may be started when it fits into what is left of the window, or when nothing at
all is outstanding in its lane.  Without the second half a message above the window could never
travel; with it, un-consumed cost never exceeds max(window, one message), and the size of one
message is capped.  Several messages in one frame must always fit.

Both sides compute the same cost from the same record.  The receiver enforces the rule as well:
its own count is never above the sender's, because a consumption is counted there first.
"""

from __future__ import annotations

from collections import deque

from kernel_guest.shared.errors import Fault, LinkProtocolError

MESSAGE_COST_BYTES = 256
PART_COST_BYTES = 64
"""Measured on CPython 3.11, 64 bit: an empty LinkMessage with its tuple, record and queue entry
takes about 250 bytes, a bytes object 33 and its slot 8."""


def message_cost(size_bytes: int, messages: int, parts: int) -> int:
    """Cost of `messages` messages with `parts` parts of `size_bytes` bytes in all."""
    return size_bytes + MESSAGE_COST_BYTES * messages + PART_COST_BYTES * parts


def _admits(outstanding: int, cost: int, window: int, messages: int) -> bool:
    return outstanding + cost <= window or (outstanding == 0 and messages == 1)


class SendCredit:
    """The sender's view of one lane."""

    __slots__ = ("outstanding", "window")

    def __init__(self) -> None:
        self.window = 0
        self.outstanding = 0

    def admits(self, cost: int, messages: int = 1) -> bool:
        """Whether `messages` messages of `cost` in all may be started now."""
        return self.window > 0 and _admits(self.outstanding, cost, self.window, messages)

    def spend(self, cost: int) -> None:
        """A message was started."""
        self.outstanding += cost

    def release(self, cost: int) -> None:
        """The peer's application has consumed a message."""
        self.outstanding -= cost


class ReceiveCredit:
    """The receiver's view of one lane: what was delivered to the application, in order."""

    __slots__ = (
        "_before_reset",
        "_partial",
        "_waiting",
        "_waiting_bytes",
        "consumed_messages",
        "outstanding",
    )

    def __init__(self) -> None:
        self.outstanding = 0
        self.consumed_messages = 0
        self._waiting: deque[tuple[int, int]] = deque()
        self._waiting_bytes = 0
        self._partial = 0
        self._before_reset = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes delivered to the application and not yet reported as consumed."""
        return self._waiting_bytes - self._partial + self._before_reset

    def check(self, cost: int, window: int, messages: int) -> None:
        """Raise `LinkProtocolError` if a peer starts more than it was granted."""
        if not _admits(self.outstanding, cost, window, messages):
            raise LinkProtocolError(
                Fault.CREDIT_EXCEEDED, f"{self.outstanding} + {cost} of {window} bytes"
            )

    def deliver(self, size_bytes: int, cost: int) -> None:
        """A message goes to the application."""
        self._waiting.append((size_bytes, cost))
        self._waiting_bytes += size_bytes
        self.outstanding += cost

    def consume(self, size_bytes: int) -> bool:
        """The application has drained `size_bytes`; True if that completed a message.

        Raises `ValueError` if more is reported than was delivered: the caller counts wrongly.
        """
        if not 0 <= size_bytes <= self.waiting_bytes:
            raise ValueError(f"consumed {size_bytes} of {self.waiting_bytes} delivered bytes")
        late = min(size_bytes, self._before_reset)
        self._before_reset -= late
        self._partial += size_bytes - late
        before = self.consumed_messages
        while self._waiting and self._waiting[0][0] <= self._partial:
            self._complete(*self._waiting.popleft())
        return self.consumed_messages != before

    def _complete(self, size_bytes: int, cost: int) -> None:
        self._waiting_bytes -= size_bytes
        self._partial -= size_bytes
        self.outstanding -= cost
        self.consumed_messages += 1

    def reset(self) -> None:
        """Begin a new stream.  Consumption of what was delivered before is still accepted."""
        self._before_reset = self.waiting_bytes
        self._waiting.clear()
        self._waiting_bytes = self._partial = 0
        self.outstanding = self.consumed_messages = 0
