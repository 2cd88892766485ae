"""At most once: what the guest remembers of the requests it was given.  Pure.

The link already drops a frame it has seen.  That covers a cut line.  It does not cover
a gateway that was restarted and asks again for what it does not know the end of: it
opens a fresh link, and the repeated request comes as a new frame with an old message
id.  Therefore every message for the kernel (shell, control, stdin; comm messages and
input replies too, which would do harm twice as well) is looked up here by its key
(`jupyter_parts.request_key`) before it goes to the kernel:

    NEW        never seen: goes to the kernel.
    RUNNING    seen, the kernel has it: nothing is sent; outputs, reply and idle will
               come, or the kernel's exit.
    ANSWERED   seen, ended, and the ending is remembered: sent again from here.
    UNKNOWN    seen, ended, but the ending is no longer kept (or the kernel died):
               the caller answers with an `OutcomeUnknown` error.

Bounds: `max_ids` ids, oldest forgotten first (a request older than that which is
repeated would run again; the gateway's own memory is shorter), and `max_kept_bytes` of
endings, oldest dropped first.  Ids survive a restart of the kernel.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kernel_guest.shared.messages import LinkMessage

__all__ = ["RequestMemory", "Verdict"]

# One id costs about 250 bytes: 10 000 are 2.5 MB, and hours of the fastest notebooks.
MAX_IDS = 10_000
# Endings are a reply and an idle, 1-2 kB each: room for thousands of them.
MAX_KEPT_BYTES = 4 * 1024 * 1024
# One huge reply (inspection, history) must not push all the others out.
MAX_ENDING_BYTES = 512 * 1024


class Verdict(Enum):
    """What to do with a message that arrives for the kernel."""

    NEW = "new"
    RUNNING = "running"
    ANSWERED = "answered"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class _Request:
    msg_type: str
    fingerprint: bytes = b""
    running: bool = True
    ending: list[LinkMessage] = field(default_factory=list)
    kept_bytes: int = 0


class RequestMemory:
    """Remembers every message id given to the kernel, and how recent ones ended."""

    def __init__(self, max_ids: int = MAX_IDS, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_ids = max_ids
        self._max_kept_bytes = max_kept_bytes
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._kept: OrderedDict[str, None] = OrderedDict()
        self._kept_bytes = 0
        self._executing: dict[str, None] = {}
        self._running = 0

    def __repr__(self) -> str:
        return (
            f"<RequestMemory ids={len(self._requests)} running={self._running} "
            f"kept_bytes={self._kept_bytes}>"
        )

    @property
    def kept_bytes(self) -> int:
        """Bytes of remembered endings."""
        return self._kept_bytes

    @property
    def running(self) -> int:
        """Requests the kernel has and has not ended with an idle."""
        return self._running

    @property
    def executing(self) -> Sequence[str]:
        """Ids of cells that are running or queued in the kernel, oldest first."""
        return tuple(self._executing) if self._executing else ()

    def admit(self, key: str, msg_type: str, fingerprint: bytes = b"") -> Verdict:
        """Look a message up before it goes to the kernel; remembers it if it is new.

        ``fingerprint`` is its signature (the raw header where nothing is signed): two clients made
        from one manager count message ids alike, so another message may bear a known key.
        """
        known = self._requests.get(key)
        if known is not None and known.fingerprint != fingerprint:
            self._forget(key, self._requests.pop(key))
            known = None
        if known is None:
            self._remember(key, msg_type, fingerprint)
            return Verdict.NEW
        if known.running:
            return Verdict.RUNNING
        return Verdict.ANSWERED if known.ending else Verdict.UNKNOWN

    def ending(self, key: str) -> list[LinkMessage]:
        """The remembered reply and idle of a request, in the order they were sent."""
        known = self._requests.get(key)
        return [] if known is None else list(known.ending)

    def on_reply(self, parent_id: str, reply: LinkMessage) -> None:
        """The kernel replied; kept for a repetition of the request."""
        self._keep(parent_id, reply)

    def on_idle(self, parent_id: str, idle: LinkMessage) -> None:
        """The kernel has ended a request."""
        known = self._requests.get(parent_id)
        if known is None:
            return
        if known.running:
            self._end(parent_id, known)
        self._keep(parent_id, idle)

    def on_kernel_exit(self) -> list[str]:
        """The kernel is gone: running requests end without an answer.  Their ids."""
        ended = [key for key, request in self._requests.items() if request.running]
        for key in ended:
            self._end(key, self._requests[key])
        return ended

    def settle(self, key: str) -> None:
        """A message that gets neither reply nor idle (input_reply) is done when sent."""
        known = self._requests.get(key)
        if known is not None and known.running:
            self._end(key, known)

    def _remember(self, key: str, msg_type: str, fingerprint: bytes) -> None:
        self._requests[key] = _Request(msg_type, fingerprint)
        self._running += 1
        if msg_type == "execute_request":
            self._executing[key] = None
        if len(self._requests) > self._max_ids:
            self._forget(*self._requests.popitem(last=False))

    def _forget(self, key: str, request: _Request) -> None:
        if request.running:
            self._end(key, request)
        self._drop_ending(key, request)

    def _end(self, key: str, request: _Request) -> None:
        request.running = False
        self._running -= 1
        self._executing.pop(key, None)

    def _keep(self, parent_id: str, message: LinkMessage) -> None:
        request = self._requests.get(parent_id)
        if request is None or message.size_bytes > MAX_ENDING_BYTES:
            return
        request.ending.append(message)
        request.kept_bytes += message.size_bytes
        self._kept_bytes += message.size_bytes
        self._kept[parent_id] = None
        while self._kept_bytes > self._max_kept_bytes:
            oldest, _ = self._kept.popitem(last=False)
            self._drop_ending(oldest, self._requests[oldest])

    def _drop_ending(self, key: str, request: _Request) -> None:
        self._kept.pop(key, None)
        self._kept_bytes -= request.kept_bytes
        request.kept_bytes = 0
        request.ending = []
