"""Messages between clients and kernel: what passes, what waits, what is answered here. Pure.

Towards the kernel a message takes one of three ways, by the *gate* that the
session's phase sets:

* OPEN   to the link at once;
* QUIET  small talk is answered here (``smalltalk.py``), anything else is held
         and wakes the machine;
* WAIT   held: a machine comes up, goes to sleep, or its kernel was restarted.

Held messages keep their order and go out before anything newer. Bound:
``HELD_BYTES``; above it LinkFull, which makes the door stop reading.

From the kernel every message goes to the client, once it has been looked at:
which request it finishes, what it teaches small talk. Replies to requests of our
own (kernel_info at a start) and the statuses around them are kept back.

*Draining.* The link's credit is given back when a client's door has really
passed a message on. The door reports sizes in the order of delivery; messages
made here never came over the link and give back nothing. ``_drains`` remembers
which is which.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from gateway.messages import Composer, MalformedMessage, content_of, header_of, parent_of, size_of
from gateway.session.requests import Outstanding, Requests, endings
from gateway.session.smalltalk import Answer, Effect, SmallTalk
from kernel_guest.shared.errors import LinkFull
from kernel_guest.shared.messages import Channel, Lane, LinkMessage, jupyter

__all__ = ["Gate", "Sink", "Traffic"]

HELD_BYTES = 64 * 1024 * 1024
# Own requests that wait for their idle: one per start, forgotten with the kernel.
MAX_OWN = 16

Deliver = Callable[[Channel, tuple[bytes, ...]], None]


class Gate(Enum):
    """Which way a client's message takes."""

    OPEN = auto()
    QUIET = auto()
    WAIT = auto()


class Sink(NamedTuple):
    """The link of one machine, as far as this module needs it."""

    send: Callable[[LinkMessage], None]
    consumed: Callable[[int, Lane], None]


class _Held(NamedTuple):
    message: LinkMessage
    entry: Outstanding | None


class _Own:
    """A request of ours; reply and idle come in either order."""

    __slots__ = ("idle", "on_reply", "replied")

    def __init__(self, on_reply: Callable[[tuple[bytes, ...]], None]) -> None:
        self.on_reply = on_reply
        self.replied = self.idle = False


class Traffic:
    """One kernel's messages. ``now_s`` is wall time, for the dates in composed messages."""

    def __init__(self, deliver: Deliver, now_s: Callable[[], float], small_talk: SmallTalk) -> None:
        self._deliver = deliver
        self._now_s = now_s
        self._composer: Composer | None = None
        self._held: deque[_Held] = deque()
        self._held_bytes = 0
        self._drains: deque[tuple[int, Lane | None, Sink | None]] = deque()
        self._own: dict[str, _Own] = {}
        self.requests = Requests()
        self.small_talk = small_talk
        self.dormant = False

    def __repr__(self) -> str:
        return f"<Traffic unfinished={len(self.requests)} held={len(self._held)}>"

    @property
    def held(self) -> int:
        """Messages that wait for a machine."""
        return len(self._held)

    @property
    def wants_machine(self) -> bool:
        """Something is held, or in flight and not waiting for a person.

        ``dormant`` (a stuck cell was put to sleep on purpose) counts what is held only.
        """
        if self._held:
            return True
        return len(self.requests) > 0 and not self.requests.waiting_input and not self.dormant

    def use_composer(self, composer: Composer) -> None:
        """Signs what is said in the kernel's name; from each start, with the key given there."""
        self._composer = composer

    # -- client → kernel ---------------------------------------------------------------

    def from_client(
        self, channel: Channel, parts: Sequence[bytes], gate: Gate, sink: Sink | None
    ) -> Effect | None:
        """One message of a client. Returns what a local answer means, None if there was none.

        Raises MalformedMessage, LinkFull, MessageRefused; then it was not taken.
        """
        if gate is Gate.QUIET:
            answer = self.small_talk.answer(channel, parts, in_flight=len(self.requests))
            if answer is not None:
                self._answer(channel, parts, answer)
                return answer.effect
        self.dormant = False
        message = jupyter(channel, parts)
        entry = self.requests.add(channel, parts)
        try:
            if gate is Gate.OPEN and not self._held and sink is not None:
                sink.send(message)
                _mark_sent(entry)
            else:
                self._hold(message, entry)
        except Exception:
            self._forget(entry)
            raise
        self.small_talk.observe(channel, parts)
        return None

    def _hold(self, message: LinkMessage, entry: Outstanding | None) -> None:
        if self._held and self._held_bytes + message.size_bytes > HELD_BYTES:
            raise LinkFull("held", self._held_bytes, HELD_BYTES)
        self._held.append(_Held(message, entry))
        self._held_bytes += message.size_bytes

    def _forget(self, entry: Outstanding | None) -> None:
        if entry is not None:
            self.requests.forget(entry.key)

    def flush(self, sink: Sink) -> bool:
        """Send what is held, in order; False when the link is full before all is sent."""
        while self._held:
            held = self._held[0]
            try:
                sink.send(held.message)
            except LinkFull:
                return False
            _mark_sent(held.entry)
            self._held.popleft()
            self._held_bytes -= held.message.size_bytes
        return True

    def own_request(
        self, msg_type: str, sink: Sink, on_reply: Callable[[tuple[bytes, ...]], None]
    ) -> None:
        """A request of the gateway's own on shell; its messages reach no client."""
        assert self._composer is not None, "set by use_composer"
        parts = self._composer.compose(msg_type, {}, now_s=self._now_s())
        if len(self._own) >= MAX_OWN:
            self._own.clear()
        self._own[header_of(parts).key] = _Own(on_reply)
        sink.send(jupyter(Channel.SHELL, parts))

    # -- kernel → client --------------------------------------------------------------------

    def from_kernel(self, message: LinkMessage, sink: Sink) -> bool:
        """One message of the kernel; True if it changed what is unfinished or waits for input."""
        channel, parts = message.channel, message.parts
        if self._own and self._is_own(channel, parts):
            sink.consumed(message.size_bytes, message.lane)
            return False
        changed = self.requests.observe(channel, parts)
        self.small_talk.observe(channel, parts)
        self._drains.append((message.size_bytes, message.lane, sink))
        self._deliver(channel, parts)
        return changed

    def _is_own(self, channel: Channel, parts: tuple[bytes, ...]) -> bool:
        try:
            key = parent_of(parts).key
            own = self._own.get(key)
            if own is None:
                return False
            if channel is Channel.SHELL:
                own.replied = True
                self._learn_session(parts)
                own.on_reply(parts)
            elif content_of(parts).get("execution_state") == "idle":
                own.idle = True
            if own.replied and own.idle:
                self._own.pop(key, None)
        except MalformedMessage:
            return False
        return True

    def _learn_session(self, parts: tuple[bytes, ...]) -> None:
        """Clients drop what comes from a session that is not the kernel's (JK trap 9)."""
        session = header_of(parts).session
        if session and self._composer is not None:
            self._composer.session = session[:128]

    def consumed(self, size_bytes: int) -> None:
        """The door has passed on so many bytes of what it was given, in order."""
        while size_bytes > 0 and self._drains:
            size, lane, sink = self._drains[0]
            part = min(size, size_bytes)
            size_bytes -= part
            if part == size:
                self._drains.popleft()
            else:
                self._drains[0] = (size - part, lane, sink)
            if sink is not None and lane is not None:
                sink.consumed(part, lane)

    # -- in the kernel's name -------------------------------------------------------------------

    def say(
        self,
        channel: Channel,
        msg_type: str,
        content: Mapping[str, Any],
        parent_header: bytes = b"{}",
    ) -> None:
        """Deliver a message of our own making; nothing before the first start gave a key."""
        if self._composer is None:
            return
        parts = self._composer.compose(
            msg_type, content, now_s=self._now_s(), parent_header=parent_header
        )
        self._drains.append((size_of(parts), None, None))
        self._deliver(channel, parts)

    def _answer(self, channel: Channel, parts: Sequence[bytes], answer: Answer) -> None:
        parent = bytes(parts[1])
        self.say(Channel.IOPUB, "status", {"execution_state": "busy"}, parent)
        self.say(channel, answer.reply_type, answer.content, parent)
        self.say(Channel.IOPUB, "status", {"execution_state": "idle"}, parent)

    def kernel_ended(self) -> None:
        """Its own requests will not be answered; what clients asked is ended by ``end``."""
        self._own.clear()
        self.small_talk.kernel_ended()

    def end(self, reason: str, *, held_too: bool, tell: bool = True) -> None:
        """End the requests that the kernel has or may have begun; with ``held_too`` the rest.

        What is held never left, so it may stay for the next kernel, as ZMQ would
        keep it. With ``tell`` each request gets its ending (``requests.endings``).
        """
        if held_too:
            self._held.clear()
            self._held_bytes = 0
        kept = {held.entry.key: held.entry for held in self._held if held.entry is not None}
        ended = [entry for entry in self.requests.end_all() if entry.key not in kept]
        self.requests.restore(kept.values())
        for entry in ended if tell else ():
            for ending in endings(entry, reason):
                self.say(ending.channel, ending.msg_type, ending.content, ending.parent_header)


def _mark_sent(entry: Outstanding | None) -> None:
    if entry is not None:
        entry.sent = True
