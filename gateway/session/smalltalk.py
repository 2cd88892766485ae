"""What can be answered without waking a machine. Pure.

Opening a tab makes the usual software send half a dozen requests that nobody
would pay a wake for (JK 3.4): kernel_info, comm_info, debugInfo, usage, history.
While no machine is awake they are answered from what the link has seen.
Everything else wakes.

What is remembered comes from a guest, so it is bounded: one kernel_info, one
debugInfo and one usage reply up to ``MAX_REMEMBERED_BYTES`` each, and
``MAX_COMMS`` open comms. Beyond a bound nothing new is remembered and the
answer is the honest empty one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, TypeGuard

from gateway.messages import MalformedMessage, content_of, header_of
from kernel_guest.shared.messages import Channel

__all__ = ["Answer", "Effect", "SmallTalk"]

MAX_REMEMBERED_BYTES = 256 * 1024
MAX_COMMS = 10_000
MAX_NAME_CHARS = 512


class Effect(Enum):
    """What an answer means for the session."""

    NONE = auto()
    KERNEL_ENDS = auto()  # a shutdown_request was answered for a sleeping kernel


class Answer(NamedTuple):
    """Content of the reply; the session wraps it in busy and idle."""

    reply_type: str
    content: Mapping[str, Any]
    effect: Effect = Effect.NONE


class SmallTalk:
    """Remembers what the kernel last said, and answers in its place."""

    def __init__(self, *, wake_for_completion: bool = True) -> None:
        self._wake_for_completion = wake_for_completion
        self.kernel_info: Mapping[str, Any] | None = None
        self._debug_info: Mapping[str, Any] | None = None
        self._usage: Mapping[str, Any] | None = None
        self._comms: dict[str, str] = {}

    # -- remembering -------------------------------------------------------------

    def observe(self, channel: Channel, parts: Sequence[bytes]) -> None:
        """A message in either direction, kernel's or client's. Malformed ones teach nothing."""
        try:
            if channel is Channel.IOPUB or channel is Channel.SHELL:
                self._observe_comm(parts)
            if channel is Channel.SHELL or channel is Channel.CONTROL:
                self._observe_reply(parts)
        except MalformedMessage:
            return

    def _observe_comm(self, parts: Sequence[bytes]) -> None:
        if b'"comm_' not in parts[1]:
            return
        kind = header_of(parts).msg_type
        if kind not in ("comm_open", "comm_close"):
            return
        content = content_of(parts)
        comm_id, target = content.get("comm_id"), content.get("target_name", "")
        if not _short(comm_id) or not _short(target):
            return
        if kind == "comm_close":
            self._comms.pop(comm_id, None)
        elif len(self._comms) < MAX_COMMS:
            self._comms[comm_id] = target

    def _observe_reply(self, parts: Sequence[bytes]) -> None:
        if b"_reply" not in parts[1] or len(parts[4]) > MAX_REMEMBERED_BYTES:
            return
        kind = header_of(parts).msg_type
        if kind == "kernel_info_reply":
            content = content_of(parts)
            if content.get("status") == "ok":
                self.kernel_info = content
        elif kind == "usage_reply":
            self._usage = content_of(parts)
        elif kind == "debug_reply":
            content = content_of(parts)
            if content.get("command") == "debugInfo":
                self._debug_info = content

    def kernel_ended(self) -> None:
        """Its comms and its debugger are gone with it; its kernel_info is still true."""
        self._comms.clear()
        self._debug_info = None
        self._usage = None

    # -- answering ---------------------------------------------------------------

    def answer(self, channel: Channel, parts: Sequence[bytes], *, in_flight: int) -> Answer | None:
        """The answer for a kernel that is not awake, or None: then wake it.

        ``in_flight`` counts requests the kernel has begun; an interrupt matters
        only to them. Raises MalformedMessage.
        """
        kind = header_of(parts).msg_type
        if channel is Channel.CONTROL:
            control = self._answer_control(kind, parts, in_flight)
            if control is not None:
                return control
        return self._answer_shell(kind, parts)

    def _answer_shell(self, kind: str, parts: Sequence[bytes]) -> Answer | None:
        if kind == "kernel_info_request" and self.kernel_info is not None:
            return Answer("kernel_info_reply", self.kernel_info)
        if kind == "comm_info_request":
            return Answer("comm_info_reply", {"status": "ok", "comms": self._comm_info(parts)})
        if kind == "history_request":
            # The past is in the machine. An empty list costs the arrow-up key until
            # the first cell; a wake for every opened console costs money.
            return Answer("history_reply", {"status": "ok", "history": []})
        if kind in ("complete_request", "inspect_request") and not self._wake_for_completion:
            return _no_completion(kind, content_of(parts))
        return None

    def _answer_control(self, kind: str, parts: Sequence[bytes], in_flight: int) -> Answer | None:
        if kind == "usage_request":
            return Answer("usage_reply", self._usage or _asleep("usage is not known"))
        if kind == "debug_request" and content_of(parts).get("command") == "debugInfo":
            seq = content_of(parts).get("seq", 0)
            return Answer("debug_reply", _debug_reply(self._debug_info, seq))
        if kind == "interrupt_request" and in_flight == 0:
            return Answer("interrupt_reply", {"status": "ok"})
        if kind == "shutdown_request" and in_flight == 0:
            restart = bool(content_of(parts).get("restart", False))
            content = {"status": "ok", "restart": restart}
            return Answer("shutdown_reply", content, Effect.KERNEL_ENDS)
        return None

    def _comm_info(self, parts: Sequence[bytes]) -> dict[str, dict[str, str]]:
        wanted = content_of(parts).get("target_name")
        return {
            comm_id: {"target_name": target}
            for comm_id, target in self._comms.items()
            if not wanted or target == wanted
        }


def _short(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= MAX_NAME_CHARS


def _asleep(what: str) -> dict[str, Any]:
    return {"status": "error", "ename": "KernelAsleep", "evalue": what, "traceback": []}


def _debug_reply(known: Mapping[str, Any] | None, request_seq: object) -> dict[str, Any]:
    """DAP's debugInfo response; a kernel that was never debugged says it is not started."""
    if known is not None:
        return {**known, "request_seq": request_seq}
    return {
        "type": "response",
        "request_seq": request_seq,
        "success": True,
        "command": "debugInfo",
        "body": {
            "isStarted": False,
            "hashMethod": "Murmur2",
            "hashSeed": 0,
            "tmpFilePrefix": "",
            "tmpFileSuffix": ".py",
            "breakpoints": [],
            "stoppedThreads": [],
            "richRendering": True,
            "exceptionPaths": [],
            "copyToGlobals": True,
        },
    }


def _no_completion(kind: str, content: Mapping[str, Any]) -> Answer:
    if kind == "inspect_request":
        return Answer("inspect_reply", {"status": "ok", "found": False, "data": {}, "metadata": {}})
    position = content.get("cursor_pos", 0)
    return Answer(
        "complete_reply",
        {
            "status": "ok",
            "matches": [],
            "cursor_start": position,
            "cursor_end": position,
            "metadata": {},
        },
    )
