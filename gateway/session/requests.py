"""Which requests of clients are unfinished, and how they end when the kernel cannot end them. Pure.

A request is *held* until the link has taken it, *sent* from then on, and
finished when its reply and its ``idle`` were seen (JK 2.4: a client waits for
both). What has no reply (comm messages) is finished by its ``idle``; what is on
the control channel by its reply, because not every kernel says busy and idle there.

When the kernel or its machine is gone for good, every unfinished request ends
here: a held one certainly did not run (``NotExecuted``), a sent one may have
(``OutcomeUnknown``). Nothing is ever run again by us.

Bound: ``limit`` unfinished requests; ``add`` refuses more with LinkFull, which
makes the door stop reading its client. What a guest sends can only remove
entries, never add any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gateway.messages import MalformedMessage, content_of, header_of, parent_of
from kernel_guest.shared.errors import LinkFull
from kernel_guest.shared.messages import Channel

__all__ = ["Ending", "Outstanding", "Requests", "endings"]

# A front end sends a cell at a time and an eager batch a few thousand; beyond
# this a client is broken or hostile.
DEFAULT_LIMIT = 10_000

IDLE, BUSY = "idle", "busy"


class Outstanding:
    """One unfinished request: ``key`` as in messages.Header, ``header`` its own, raw (the parent
    of what answers it).
    """

    __slots__ = ("channel", "header", "idle", "key", "msg_type", "replied", "sent")

    def __init__(self, key: str, msg_type: str, channel: Channel, header: bytes) -> None:
        self.key = key
        self.msg_type = msg_type
        self.channel = channel
        self.header = header
        self.sent = self.replied = self.idle = False

    @property
    def expects_reply(self) -> bool:
        return self.msg_type.endswith("_request")

    @property
    def finished(self) -> bool:
        if self.channel is Channel.CONTROL:
            return self.replied
        return self.idle and (self.replied or not self.expects_reply)


class Ending(NamedTuple):
    """One message that ends a request in the kernel's place."""

    channel: Channel
    msg_type: str
    content: dict[str, object]
    parent_header: bytes


class Requests:
    """The unfinished requests of all clients of one kernel, oldest first."""

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self._limit = limit
        self._open: dict[str, Outstanding] = {}
        self._input_asked: set[str] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, key: str) -> bool:
        return key in self._open

    @property
    def waiting_input(self) -> bool:
        """Some unfinished request waits for a person."""
        return bool(self._input_asked)

    def add(self, channel: Channel, parts: Sequence[bytes]) -> Outstanding | None:
        """A client's message is on its way. None for what nobody waits for (``input_reply``).

        Raises MalformedMessage or LinkFull.
        """
        header = header_of(parts)
        if channel is Channel.STDIN:
            self._input_asked.clear()
            return None
        if len(self._open) >= self._limit:
            raise LinkFull("requests", len(self._open), self._limit)
        entry = Outstanding(header.key, header.msg_type, channel, bytes(parts[1]))
        self._open[entry.key] = entry
        return entry

    def forget(self, key: str) -> None:
        """It was answered without the kernel, or could not be queued."""
        self._open.pop(key, None)

    def observe(self, channel: Channel, parts: Sequence[bytes]) -> bool:
        """A message of the kernel; True when it changed what is unfinished or who waits.

        A message that breaks the layout changes nothing: the caller delivers or
        drops it by rules of its own.
        """
        try:
            return self._observe(channel, parts)
        except MalformedMessage:
            return False

    def _observe(self, channel: Channel, parts: Sequence[bytes]) -> bool:
        if channel is Channel.STDIN:
            return self._asks_input(parts)
        if channel is Channel.IOPUB:
            return b'"status"' in parts[1] and self._status(parts)
        entry = self._open.get(parent_of(parts).key)
        if entry is None or entry.channel is not channel:
            return False
        entry.replied = True
        return self._settle(entry)

    def _asks_input(self, parts: Sequence[bytes]) -> bool:
        key = parent_of(parts).key
        if key not in self._open or header_of(parts).msg_type != "input_request":
            return False
        self._input_asked.add(key)
        return True

    def _status(self, parts: Sequence[bytes]) -> bool:
        if header_of(parts).msg_type != "status":
            return False
        entry = self._open.get(parent_of(parts).key)
        if entry is None or content_of(parts).get("execution_state") != IDLE:
            return False
        entry.idle = True
        return self._settle(entry)

    def _settle(self, entry: Outstanding) -> bool:
        if entry.finished:
            del self._open[entry.key]
            self._input_asked.discard(entry.key)
            return True
        return False

    def restore(self, entries: Iterable[Outstanding]) -> None:
        """Entries that ``end_all`` gave and that are not to end after all."""
        self._open.update((entry.key, entry) for entry in entries)

    def end_all(self) -> list[Outstanding]:
        """The kernel is gone: all of them, oldest first; afterwards none is open."""
        ended = list(self._open.values())
        self._open.clear()
        self._input_asked.clear()
        return ended


def endings(entry: Outstanding, reason: str) -> list[Ending]:
    """What a client gets for a request that the kernel will not finish, in order.

    Outputs before the reply, ``idle`` last; what the client has seen already is not repeated.
    """
    ename = "OutcomeUnknown" if entry.sent else "NotExecuted"
    evalue = f"the cell may have run: {reason}" if entry.sent else f"it did not run: {reason}"
    trouble: dict[str, object] = {
        "ename": ename,
        "evalue": evalue,
        "traceback": [f"{ename}: {evalue}"],
    }
    messages: list[Ending] = []
    if entry.msg_type == "execute_request" and not entry.replied:
        messages.append(Ending(Channel.IOPUB, "error", trouble, entry.header))
    if entry.expects_reply and not entry.replied:
        reply_type = entry.msg_type.removesuffix("request") + "reply"
        reply = {"status": "error", **trouble}
        if entry.msg_type == "execute_request":
            reply |= {"execution_count": None, "user_expressions": {}, "payload": []}
        messages.append(Ending(entry.channel, reply_type, reply, entry.header))
    if not entry.idle:
        messages.append(Ending(Channel.IOPUB, "status", {"execution_state": IDLE}, entry.header))
    return messages
