"""What the kernel said and the link has not yet taken.  Pure.

The link core numbers what it is given, keeps it until the gateway has acknowledged it,
and takes only a bounded amount.  Everything beyond that waits here, first in, first
out, in tiers that are filled in this order:

1. **head**, in memory.  The normal case: the message stays for microseconds.
2. **spill**, on disk, once the head is full (spill.py).
3. **tail**, in memory again, once the disk is full.  Here consecutive text of one
   stream (same parent, same name) is merged into one message, which shrinks a
   printing loop by the size of the envelopes, 20 times and more.
4. **gap**, once the tail is full: what arrives now is dropped, and a gap message at
   exactly this place says how many messages and bytes are missing.

A merged message keeps the first one's header, parent and metadata and is signed anew;
without a signing key nothing is merged.  Never dropped are statuses, replies, input
requests, events and answers to calls: a client that misses one of them hangs.  Their
number is bounded by what the gateway has asked for, not by this journal.

While a tier further back holds something, nothing new may go to a tier in front of it;
that alone keeps the order.  Room that comes free moves messages forwards in `pop`.

The disk tier blocks the loop for the time of a buffered write.  That is accepted: it
happens only while nobody reads, and the alternative is a thread per journal.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_guest.jupyter_parts import CONTENT, HEADER, PARENT, Signer, is_type, member
from kernel_guest.shared.messages import Channel, Kind, Lane, LinkMessage, gap
from kernel_guest.spill import Spill

__all__ = ["Journal", "JournalLimits", "JournalStatistics"]

# What one waiting message costs besides its bytes: the object, its tuple and five
# `bytes` headers (CPython 3.11, sys.getsizeof, 2026-11-30).
_OVERHEAD_BYTES = 400
# Share of the memory bound that is reserved for the merging tail.
_TAIL_SHARE = 4
# Merged text is cut into messages of at most this size: front ends render a megabyte
# at once, but not a hundred.
_MERGE_BYTES = 1024 * 1024
# Read back from disk in pieces of this size.
_REFILL_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """Bounds from the run payload."""

    memory_bytes: int = 16 * 1024 * 1024
    disk_bytes: int = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class JournalStatistics:
    """Counters for the activity report and tests."""

    appended: int
    handed: int
    merged: int
    dropped_messages: int
    dropped_bytes: int
    memory_bytes: int
    disk_bytes: int
    waiting: int


@dataclass(slots=True)
class _Run:
    """Consecutive texts of one stream, not yet encoded again."""

    first: LinkMessage
    parent: bytes
    name: str
    texts: list[str]
    size_bytes: int


@dataclass(slots=True)
class _Gap:
    messages: int = 0
    size_bytes: int = 0


_Entry = LinkMessage | _Run | _Gap


class Journal:
    """A bounded FIFO with a stated way to give way.

    `append` never fails and never blocks on a reader; `pop` gives the oldest message or
    None; `empty` says whether there is one.  `set_signer` is called when the kernel's key is
    known and again on restart: what waits in the tail is sealed with the old key first.
    """

    def __init__(self, limits: JournalLimits, folder: Path | None = None) -> None:
        self._tail_limit = limits.memory_bytes // _TAIL_SHARE
        self._head_limit = limits.memory_bytes - self._tail_limit
        self._spill: Spill | None = None
        if folder is not None and limits.disk_bytes > 0:
            self._spill = Spill(folder, limits.disk_bytes)
        self._sign: Signer | None = None
        self._head: deque[LinkMessage] = deque()
        self._head_bytes = 0
        self._tail: deque[_Entry] = deque()
        self._tail_bytes = 0
        self.empty = True
        self._appended = self._handed = self._merged = 0
        self._dropped_messages = self._dropped_bytes = 0

    def __repr__(self) -> str:
        return f"<Journal {self.statistics()}>"

    @property
    def disk_error(self) -> OSError | None:
        """Why the disk tier last refused, if it did for another reason than its bound."""
        return None if self._spill is None else self._spill.last_error

    def statistics(self) -> JournalStatistics:
        """Counters and sizes now."""
        return JournalStatistics(
            appended=self._appended,
            handed=self._handed,
            merged=self._merged,
            dropped_messages=self._dropped_messages,
            dropped_bytes=self._dropped_bytes,
            memory_bytes=self._head_bytes + self._tail_bytes,
            disk_bytes=0 if self._spill is None else self._spill.disk_bytes,
            waiting=len(self._head) + len(self._tail) + len(self._spill or ()),
        )

    def set_signer(self, sign: Signer | None) -> None:
        """The key of the kernel that speaks from now on."""
        self._tail = deque(self._materialise(entry) for entry in self._tail)
        self._tail_bytes = sum(map(_cost, self._tail))
        self._sign = sign

    def append(self, message: LinkMessage) -> None:
        """Take one message of the ordered lane."""
        self._appended += 1
        self.empty = False
        if self._tail or not (self._to_head(message) or self._to_spill(message)):
            self._to_tail(message)

    def pop(self) -> LinkMessage | None:
        """The oldest message, or None."""
        if not self._head:
            self._refill()
            if not self._head:
                return None
        message = self._head.popleft()
        self._head_bytes -= _cost(message)
        self._handed += 1
        self.empty = not (self._head or self._tail or self._spill)
        return message

    def close(self) -> None:
        """Remove what is on disk.  Idempotent."""
        if self._spill is not None:
            self._spill.close()

    def _to_head(self, message: LinkMessage) -> bool:
        if self._spill:
            return False
        cost_bytes = _cost(message)
        # An empty head takes one message of any size: it has to go somewhere, and the
        # link's own cap bounds it.
        if self._head and self._head_bytes + cost_bytes > self._head_limit:
            return False
        self._head.append(message)
        self._head_bytes += cost_bytes
        return True

    def _to_spill(self, message: LinkMessage) -> bool:
        return self._spill is not None and self._spill.append(message)

    def _to_tail(self, message: LinkMessage) -> None:
        if self._merge(message):
            return
        entry: _Entry = self._run_of(message) or message
        if _droppable(message) and self._tail_bytes + _cost(entry) > self._tail_limit:
            self._drop(message)
            return
        self._tail.append(entry)
        self._tail_bytes += _cost(entry)

    def _merge(self, message: LinkMessage) -> bool:
        last = self._tail[-1] if self._tail else None
        if not isinstance(last, _Run):
            return False
        run = self._run_of(message)
        if run is None or (run.parent, run.name) != (last.parent, last.name):
            return False
        size_bytes = len(run.texts[0])
        too_long = last.size_bytes + size_bytes > _MERGE_BYTES
        if too_long or self._tail_bytes + size_bytes > self._tail_limit:
            return False
        last.texts += run.texts
        last.size_bytes += size_bytes
        self._tail_bytes += size_bytes
        self._merged += 1
        return True

    def _run_of(self, message: LinkMessage) -> _Run | None:
        if self._sign is None or not _is_iopub(message):
            return None
        header = message.parts[HEADER]
        if b"stream" not in header or not is_type(header, "stream"):
            return None
        content = message.parts[CONTENT]
        name, text = member(content, "name"), member(content, "text")
        if not isinstance(name, str) or not isinstance(text, str):
            return None
        return _Run(message, message.parts[PARENT], name, [text], message.size_bytes)

    def _drop(self, message: LinkMessage) -> None:
        self._dropped_messages += 1
        self._dropped_bytes += message.size_bytes
        last = self._tail[-1] if self._tail else None
        if not isinstance(last, _Gap):
            last = _Gap()
            self._tail.append(last)
            self._tail_bytes += _cost(last)
        last.messages += 1
        last.size_bytes += message.size_bytes

    def _refill(self) -> None:
        if self._spill:
            self._push_head(self._spill.read(_REFILL_BYTES))
        elif self._tail:
            self._push_head([self._take_tail()])
        while self._tail and self._spill is not None and self._tail_fits_spill():
            self._tail_bytes -= _cost(self._tail.popleft())

    def _push_head(self, messages: Sequence[LinkMessage]) -> None:
        self._head.extend(messages)
        self._head_bytes += sum(map(_cost, messages))

    def _take_tail(self) -> LinkMessage:
        entry = self._tail.popleft()
        self._tail_bytes -= _cost(entry)
        return self._materialise(entry)

    def _tail_fits_spill(self) -> bool:
        return self._spill is not None and self._spill.append(self._materialise(self._tail[0]))

    def _materialise(self, entry: _Entry) -> LinkMessage:
        if isinstance(entry, _Gap):
            return gap(entry.messages, entry.size_bytes)
        if isinstance(entry, _Run):
            return self._seal(entry)
        return entry

    def _seal(self, run: _Run) -> LinkMessage:
        if len(run.texts) == 1 or self._sign is None:
            return run.first
        _, header, parent, metadata = run.first.parts[:4]
        content = json.dumps({"name": run.name, "text": "".join(run.texts)}).encode()
        signed = (header, parent, metadata, content)
        parts = (self._sign(signed), *signed)
        return LinkMessage(Kind.JUPYTER, Channel.IOPUB, parts, Lane.ORDERED)


def _cost(entry: _Entry) -> int:
    return _OVERHEAD_BYTES if isinstance(entry, _Gap) else entry.size_bytes + _OVERHEAD_BYTES


def _is_iopub(message: LinkMessage) -> bool:
    return message.kind is Kind.JUPYTER and message.channel is Channel.IOPUB


def _droppable(message: LinkMessage) -> bool:
    if not _is_iopub(message):
        return False
    header = message.parts[HEADER]
    return b"status" not in header or not is_type(header, "status")
