"""Messages between the link and the kernel's channels: who passes, in which order.

Towards the kernel every message is looked up by its id (requests.py) and passed at most
once.  From the kernel everything passes, shell replies through the gate (ordering.py).
From the moment a start or restart is asked for, messages wait here for the new kernel's
channels: what the client sent after it asked is meant for the new one.  The link's
credit bounds them, because nothing is reported as consumed before a channel took it.
With no kernel at all a message is dropped: its sender learns of it by the
`kernel_exited` event that is already under way, or never had a kernel.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from kernel_guest.activity_report import ActivityReport
from kernel_guest.channels import KernelChannels
from kernel_guest.jupyter_parts import (
    CONTENT,
    HEADER,
    PARENT,
    Signer,
    compose,
    is_type,
    request_key,
    text,
)
from kernel_guest.jupyter_parts import unknown_outcome as compose_unknown_outcome
from kernel_guest.ordering import ReplyGate
from kernel_guest.requests import RequestMemory, Verdict
from kernel_guest.shared.messages import Channel, LinkMessage, jupyter

__all__ = ["KernelTraffic"]

log = logging.getLogger(__name__)

# A timer that is this late tells of a machine that slept (LM 8: the monotonic clock may
# jump by the whole time) or of a loop that was blocked; in both nobody was reading.
_SLEPT_S = 0.5

Emit = Callable[[LinkMessage], None]
Consumed = Callable[[LinkMessage], None]


class KernelTraffic:
    """Joins request memory, reply gate and activity with one kernel's channels at a time.

    Made on the running loop.

    `emit` takes what goes to the gateway; `consumed` is told each message from the
    gateway that no longer takes memory here.
    """

    def __init__(self, emit: Emit, consumed: Consumed) -> None:
        self._emit = emit
        self._consumed = consumed
        self._loop = asyncio.get_running_loop()
        self.requests = RequestMemory()
        self.activity = ActivityReport()
        self._gate = ReplyGate()
        self._gate_timer: asyncio.TimerHandle | None = None
        self._channels: KernelChannels | None = None
        self._holds = 0
        self._waiting: list[LinkMessage] = []
        self._own_ids: set[str] = set()
        self._sign: Signer | None = None
        self.dropped = 0

    def __repr__(self) -> str:
        return f"<KernelTraffic {self._channels} {self.requests} {self._gate}>"

    def hold(self) -> None:
        """A start or restart is asked for: keep what comes until `release`."""
        self._holds += 1

    def release(self) -> None:
        """It is done or has failed: what waited goes to the kernel there is now."""
        self._holds -= 1
        if self._holds:
            return
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self.to_kernel(message)

    def attach(self, channels: KernelChannels, sign: Signer) -> None:
        """A kernel exists."""
        self._channels, self._sign = channels, sign

    def detach(self) -> None:
        """The kernel is gone, and all it said has been read."""
        self._channels = None
        for message in self._gate.release_all():
            self._emit(message)
        self.requests.on_kernel_exit()
        self.activity.on_kernel_exit()
        self._own_ids.clear()

    def close(self) -> None:
        """Stop the timer.  Idempotent."""
        if self._gate_timer is not None:
            self._gate_timer.cancel()
            self._gate_timer = None

    def to_kernel(self, message: LinkMessage) -> None:
        """A Jupyter message came over the link."""
        if self._holds:
            self._waiting.append(message)
        elif self._channels is not None:
            self._pass(self._channels, message)
        else:
            self._drop(message)

    def interrupt_by_message(self) -> bool:
        """Ask the kernel itself to interrupt (kernelspecs with interrupt_mode message)."""
        if self._channels is None or self._sign is None:
            return False
        parts = compose(self._sign, "interrupt_request", b"{}", {})
        self._own_ids.add(request_key(parts[HEADER]))
        self._channels.send(Channel.CONTROL, parts)
        return True

    def from_kernel(self, channel: Channel, parts: Sequence[bytes]) -> None:
        """A message was read from the kernel; the frames after the delimiter."""
        message = jupyter(channel, parts)
        if channel is Channel.IOPUB:
            self._from_iopub(message)
        elif channel is Channel.SHELL:
            self._from_shell(message)
        elif channel is Channel.CONTROL:
            self._from_control(message)
        else:
            self.activity.on_input_request(request_key(parts[PARENT]))
            self._emit(message)

    def _pass(self, channels: KernelChannels, message: LinkMessage) -> None:
        header = message.parts[HEADER]
        key = request_key(header)
        msg_type = key.partition(":")[0]
        fingerprint = message.parts[0] or header
        verdict = self.requests.admit(key, msg_type, fingerprint)
        if verdict is not Verdict.NEW:
            log.info("request %s repeated, it is %s", msg_type[:40], verdict.value)
            self._consumed(message)
            self._answer_again(verdict, key, message)
            return
        if message.channel is Channel.STDIN:
            self.requests.settle(key)
            self.activity.on_input_reply()
        channels.send(message.channel, message.parts, message)

    def _answer_again(self, verdict: Verdict, key: str, message: LinkMessage) -> None:
        if verdict is Verdict.ANSWERED:
            for again in self.requests.ending(key):
                self._emit(again)
        elif verdict is Verdict.UNKNOWN and self._sign is not None:
            if message.channel is Channel.STDIN:
                return  # an answer to a question that is past
            reply, idle = compose_unknown_outcome(self._sign, message.parts[HEADER])
            self._emit(replace(message, parts=tuple(reply)))
            self._emit(jupyter(Channel.IOPUB, idle))

    def _drop(self, message: LinkMessage) -> None:
        self.dropped += 1
        self._consumed(message)

    def _from_iopub(self, message: LinkMessage) -> None:
        self._gate.on_iopub(self._loop.time())
        parts = message.parts
        if b"status" not in parts[HEADER] or not is_type(parts[HEADER], "status"):
            self.activity.on_output(late=not self.requests.executing)
            self._emit(message)
            return
        is_idle = b"idle" in parts[CONTENT] and text(parts[CONTENT], "execution_state") == "idle"
        parent_id = request_key(parts[PARENT]) if is_idle else ""
        if not parent_id:
            self._emit(message)
            return
        self.requests.on_idle(parent_id, message)
        self.activity.on_idle(parent_id)
        for ready in self._gate.on_idle(parent_id, message):
            self._emit(ready)

    def _from_shell(self, message: LinkMessage) -> None:
        parent_id = request_key(message.parts[PARENT])
        self.requests.on_reply(parent_id, message)
        for ready in self._gate.on_reply(parent_id, message, self._loop.time()):
            self._emit(ready)
        self._watch_gate()

    def _from_control(self, message: LinkMessage) -> None:
        parent_id = request_key(message.parts[PARENT])
        if parent_id in self._own_ids:
            self._own_ids.discard(parent_id)
            return
        self.requests.on_reply(parent_id, message)
        self._emit(message)

    def _watch_gate(self) -> None:
        """One timer for all held replies; on a busy link it fires once in two seconds."""
        deadline_s = self._gate.next_deadline_s()
        if deadline_s is None or self._gate_timer is not None:
            return
        self._gate_timer = self._loop.call_at(deadline_s, self._expire, deadline_s)

    def _expire(self, deadline_s: float) -> None:
        self._gate_timer = None
        now_s = self._loop.time()
        if now_s > deadline_s + _SLEPT_S:
            # The silence was ours: the machine slept, and the kernel with it.
            self._gate.on_iopub(now_s)
        for message in self._gate.expire(now_s):
            self.requests.settle(request_key(message.parts[PARENT]))
            self._emit(message)
        self._watch_gate()
