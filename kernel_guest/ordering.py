"""The order in which a kernel's messages enter the ordered lane. Pure.

A kernel speaks on two sockets that know nothing of each other: replies leave on
shell, outputs and statuses on iopub.  ipykernel writes the reply from its main
thread and the outputs from a publisher thread, so that a reader often sees

    shell:                         execute_reply
    iopub:   busy  execute_input                  stream  stream … idle

The link has one ordered lane for both.  Whatever order we choose there is the order
every client sees, so it must be safe for all of them:

* nbclient collects outputs until `idle`, but at most 4 s after the *reply*: a reply
  that goes before its outputs loses whatever takes longer than that.
* JupyterLab ends a request when it has both reply and `idle`, in either order; an
  output that comes later still appears, but a saved notebook may miss it.
* jupyter_console and `execute_interactive` stop at `idle` and then wait for the reply.

Hence: outputs first, then the reply, then `idle`, which is the order in which the
kernel itself says them.  A publisher socket keeps its own order, so when `idle` of a
request has been read, every output the request published before has been read too.
The gate therefore holds a reply until that `idle`, and lets the reply go directly
before it.  The orders that can occur:

1. reply, …outputs…, idle    reply is held; on idle: reply, idle.
2. …outputs…, idle, reply    idle goes at once (nothing is left that it could
                             overtake), the reply when it comes.
3. reply, and idle never     a kernel that sends no status for a request (some
                             foreign ones).  The reply goes when iopub has been
                             silent for `QUIET_S` since the reply; while anything
                             still comes from iopub it waits, because a publisher
                             with a backlog is exactly the case the gate is for.
4. the kernel dies           everything held goes, then the exit event.

Control and stdin do not pass the gate; they overtake on purpose.
"""

from __future__ import annotations

from collections import OrderedDict

from kernel_guest.shared.messages import LinkMessage

__all__ = ["QUIET_S", "ReplyGate"]

# How long iopub must be silent before a reply goes without its idle.  Below nbclient's
# 4 s (JK 1.4 and nbclient 0.11 `iopub_timeout`), so that outputs which come later than
# this are the only ones that could be missed; far above any pause of a live publisher.
QUIET_S = 2.0

# Ids whose idle came first.  A reply follows its idle within a moment; comm messages
# never get one, so the memory must be bounded.
_REMEMBERED_IDLES = 1024


class ReplyGate:
    """Holds shell replies until their outputs have passed.

    Fed by the supervisor from the two sockets; each method returns what may go now.
    """

    __slots__ = ("_held", "_idle_first", "_last_iopub_s")

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[float, LinkMessage]] = OrderedDict()
        self._idle_first: OrderedDict[str, None] = OrderedDict()
        self._last_iopub_s = float("-inf")

    def __repr__(self) -> str:
        return f"<ReplyGate held={len(self._held)}>"

    @property
    def held(self) -> int:
        """Number of replies that wait for their idle."""
        return len(self._held)

    def on_reply(self, parent_id: str, reply: LinkMessage, now_s: float) -> list[LinkMessage]:
        """A reply was read from shell: goes at once if its idle is already through."""
        if parent_id in self._idle_first:
            del self._idle_first[parent_id]
            return [reply]
        earlier = self._held.pop(parent_id, None)
        self._held[parent_id] = (now_s, reply)
        # Two replies to one request is a broken kernel; neither is lost.
        return [] if earlier is None else [earlier[1]]

    def on_idle(self, parent_id: str, idle: LinkMessage) -> list[LinkMessage]:
        """`idle` of a request was read from iopub: its reply, if held, goes before it."""
        held = self._held.pop(parent_id, None)
        if held is not None:
            return [held[1], idle]
        self._idle_first[parent_id] = None
        if len(self._idle_first) > _REMEMBERED_IDLES:
            self._idle_first.popitem(last=False)
        return [idle]

    def on_iopub(self, now_s: float) -> None:
        """Anything was read from iopub: held replies wait on."""
        self._last_iopub_s = now_s

    def next_deadline_s(self) -> float | None:
        """When `expire` is worth calling next; None while nothing is held."""
        if not self._held:
            return None
        since_s, _ = next(iter(self._held.values()))
        return max(since_s, self._last_iopub_s) + QUIET_S

    def expire(self, now_s: float) -> list[LinkMessage]:
        """Replies whose publisher has been silent for `QUIET_S`."""
        if now_s < self._last_iopub_s + QUIET_S:
            return []
        due = [key for key, (since_s, _) in self._held.items() if now_s >= since_s + QUIET_S]
        return [self._held.pop(key)[1] for key in due]

    def release_all(self) -> list[LinkMessage]:
        """Everything held, in order of arrival: the kernel is gone or replaced."""
        replies = [reply for _, reply in self._held.values()]
        self._held.clear()
        self._idle_first.clear()
        return replies
