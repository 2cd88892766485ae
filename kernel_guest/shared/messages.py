"""What the link carries: typed messages made of byte parts.

A JUPYTER message is ``(signature, header, parent_header, metadata, content, *buffers)``:
exactly what follows ``<IDS|MSG>`` on a ZMQ socket.  Signing is end to end, between the
client's Session and the kernel: the key travels in the `start` call, and neither gateway nor
guest signs again.  That saves two HMACs per message and keeps bytes identical, which is what
"nothing doubled, nothing changed" is tested against.

The other kinds carry one JSON object in part 0 and at most one blob in part 1.

Lanes: URGENT overtakes (control, stdin, calls and their replies).  ORDERED is one order for
shell, iopub and events, because a reply that overtakes its outputs loses them in nbclient.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from kernel_guest.shared import strict
from kernel_guest.shared.errors import Fault, LinkProtocolError

MAX_JSON_BYTES = 16 * 1024 * 1024
"""Bound of part 0 of a call, reply, event or gap.  10 000 listed files need about 3 MB."""

MIN_JUPYTER_PARTS = 5


class Kind(IntEnum):
    """What a message is."""

    JUPYTER = 1
    CALL = 2
    REPLY = 3
    EVENT = 4
    GAP = 5


class Channel(IntEnum):
    """The Jupyter channel of a message; NONE for all but JUPYTER."""

    NONE = 0
    SHELL = 1
    IOPUB = 2
    STDIN = 3
    CONTROL = 4


class Lane(IntEnum):
    """The order a message belongs to."""

    URGENT = 0
    ORDERED = 1


_URGENT_CHANNELS = frozenset((Channel.CONTROL, Channel.STDIN))


@dataclass(frozen=True, slots=True)
class LinkMessage:
    """One message.  Parts are bytes, or anything with a one-byte-item buffer when sending."""

    kind: Kind
    channel: Channel
    parts: tuple[bytes, ...]
    lane: Lane

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts: the number to give to `LinkCore.consumed`."""
        return sum(map(len, self.parts))

    @property
    def blob(self) -> bytes:
        """Part 1 of a call or reply; empty if there is none."""
        return self.parts[1] if len(self.parts) > 1 else b""

    def json(self) -> dict[str, Any]:
        """The object in part 0 of anything but JUPYTER; `LinkProtocolError` if it is not one."""
        if self.kind is Kind.JUPYTER or not self.parts:
            raise LinkProtocolError(Fault.BAD_MESSAGE, f"{self.kind.name} has no JSON part")
        try:
            return strict.loads_object(self.parts[0], MAX_JSON_BYTES)
        except strict.StrictJSONError as error:
            raise LinkProtocolError(Fault.BAD_MESSAGE, str(error)) from error


def jupyter(channel: Channel, parts: Iterable[bytes]) -> LinkMessage:
    """A Jupyter message; control and stdin are urgent, shell and iopub share the order."""
    frames = tuple(parts)
    if channel is Channel.NONE or len(frames) < MIN_JUPYTER_PARTS:
        raise ValueError(f"not a Jupyter message: channel {channel.name}, {len(frames)} parts")
    lane = Lane.URGENT if channel in _URGENT_CHANNELS else Lane.ORDERED
    return LinkMessage(Kind.JUPYTER, channel, frames, lane)


def call_ids() -> Iterator[int]:
    """Ids for calls.  They begin at random: a gateway that attaches afresh may be handed replies
    to calls of the one before it, and must not take them for its own."""
    return itertools.count(secrets.randbits(48))


def call(
    call_id: int, op: str, args: dict[str, Any], blob: bytes = b"", lane: Lane = Lane.URGENT
) -> LinkMessage:
    """A call from gateway to guest, answered by `reply` with the same id."""
    return _record(Kind.CALL, {"id": call_id, "op": op, "args": args}, blob, lane)


def reply(
    call_id: int,
    result: dict[str, Any] | None,
    error: dict[str, Any] | None = None,
    blob: bytes = b"",
    lane: Lane = Lane.URGENT,
) -> LinkMessage:
    """The answer to a call: a result, or an error with members `code` and `message`."""
    if (result is None) == (error is None):
        raise ValueError("a reply has either a result or an error")
    outcome = {"ok": True, "result": result} if error is None else {"ok": False, "error": error}
    return _record(Kind.REPLY, {"id": call_id, **outcome}, blob, lane)


def event(name: str, data: dict[str, Any]) -> LinkMessage:
    """Something that happened in the guest, in order with the kernel's output."""
    return _record(Kind.EVENT, {"name": name, "data": data}, b"", Lane.ORDERED)


def gap(messages: int, size_bytes: int, lane: Lane = Lane.ORDERED) -> LinkMessage:
    """Stands for messages that were dropped, with true counts."""
    return _record(Kind.GAP, {"messages": messages, "bytes": size_bytes}, b"", lane)


def _record(kind: Kind, value: dict[str, Any], blob: bytes, lane: Lane) -> LinkMessage:
    head = strict.dumps(value)
    return LinkMessage(kind, Channel.NONE, (head, blob) if blob else (head,), lane)
