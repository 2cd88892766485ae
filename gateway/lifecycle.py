"""Phases of a kernel session's machine: one enum, one table.

THEORY OF OPERATION

A kernel session outlives any one machine. Its phase says where the present
machine is, and nothing else: whether the kernel is busy, who is connected and
what is outstanding are other people's facts. Booleans for phase are forbidden
in the whole gateway; ask ``phase in AWAKE`` and the like.

Three kinds of things move a phase, and each cause is a row of the table:

1. *We act.* A request of ours begins (launch, park, suspend, wake, stop) and
   later ends well or badly. Beginnings and endings are separate events,
   because a crash or a cut can fall between any two of them.
2. *The link speaks.* It opens, or it is cut. A cut proves nothing about the
   machine: the service may have frozen it, the network may be bad, the machine
   may be gone. So a cut leads to SUSPECT, and SUSPECT has one exit per answer
   of GetMicrovm.
3. *The service speaks.* Only its word moves a session to LOST: a terminal
   state, or a confirmed not-found. A 502, a timeout or an unreachable endpoint
   never do, because each of them also describes a healthy machine (LM 4.3).
   That is also why REPLACING can only be reached from LOST: no second machine
   without positive evidence that the first is gone.

Orders that can occur and look odd:

* SUSPENDING and a request: the request waits, SUSPENDING ends in ASLEEP, and
  the wait then wakes. Suspending is never cancelled, the service has no such
  call.
* ASLEEP without our asking: the service's idle policy froze the machine while
  the session was PARKED or SUSPECT. It is found out by asking, never pushed.
* PARKED may be stale in the same way: the machine may already sleep. Waking
  covers both, so PARKED leaves through WAKING only.
* UNREACHABLE keeps what the session had and comes back through SUSPECT: after
  an outage we know nothing until GetMicrovm has answered.
* STOP_PENDING is not STOPPED. The machine may still cost money and still
  counts against the quota; only the service's confirmation ends it. Stopping
  again from there is allowed and is how a retry looks.
* Stop may be asked in any phase that is not final, also during LAUNCHING: the
  launch is then awaited and what it made is terminated.

What the table cannot see: that only one coroutine drives the phase at a time
(the session's own lock does that), and how long a phase may last (the session
bounds each wait).

``step`` is total over the enum and raises KeyError-free: a pair that is not in
the table raises ``IllegalTransition``, which is a bug in the caller.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "AWAKE",
    "FINAL",
    "IN_TRANSIT",
    "QUIET",
    "TRANSITIONS",
    "Cause",
    "IllegalTransition",
    "Phase",
    "diagram",
    "step",
]


class Phase(StrEnum):
    """Where the session's machine is now."""

    NEW = "new"
    LAUNCHING = "launching"
    RESTORING = "restoring"
    CONNECTING = "connecting"
    READY = "ready"
    PARKED = "parked"
    SUSPENDING = "suspending"
    ASLEEP = "asleep"
    WAKING = "waking"
    STORING = "storing"
    STORED = "stored"
    SUSPECT = "suspect"
    UNREACHABLE = "unreachable"
    LOST = "lost"
    REPLACING = "replacing"
    STOPPING = "stopping"
    STOP_PENDING = "stop_pending"
    STOPPED = "stopped"
    STOP_FAILED = "stop_failed"
    FAILED = "failed"


class Cause(StrEnum):
    """What moves a phase."""

    LAUNCH = "launch"  # RunMicrovm is about to be called
    LAUNCH_ACCEPTED = "launch accepted"  # the service gave a machine
    RESTORE = "restore"  # the machine must first get a checkpoint
    LINK_OPEN = "link open"  # handshake passed, kernel answers
    LINK_CUT = "link cut"
    PARK = "park"
    SUSPEND = "suspend"
    SERVICE_SUSPENDED = "service says suspended"
    SERVICE_RUNNING = "service says running"
    SERVICE_TERMINAL = "service says terminated or not found"
    SERVICE_SILENT = "service does not answer"
    WAKE = "wake"
    STORE = "store"
    STORE_DONE = "store done"
    REPLACE = "replace"
    STOP = "stop"
    STOP_CONFIRMED = "stop confirmed"
    STOP_UNCONFIRMED = "stop unconfirmed"
    STOP_REFUSED = "stop refused"
    GIVE_UP = "give up"  # a launch or wake failed for good


class IllegalTransition(Exception):  # noqa: N818 -- a bug, not an error of the tree
    """The caller asked for a move that the table does not hold."""

    def __init__(self, phase: Phase, cause: Cause) -> None:
        super().__init__(f"no transition from {phase.value!r} by {cause.value!r}")
        self.phase = phase
        self.cause = cause


# Named sets, for readers and for the status tables.
FINAL = frozenset({Phase.STOPPED})
AWAKE = frozenset({Phase.READY})
# No byte is exchanged with the machine, and none is wanted.
QUIET = frozenset({Phase.NEW, Phase.PARKED, Phase.ASLEEP, Phase.STORED})
# Somebody is at work; wait for the end rather than act.
IN_TRANSIT = frozenset(
    {
        Phase.LAUNCHING,
        Phase.RESTORING,
        Phase.CONNECTING,
        Phase.SUSPENDING,
        Phase.WAKING,
        Phase.STORING,
        Phase.SUSPECT,
        Phase.REPLACING,
        Phase.STOPPING,
    }
)

_P, _C = Phase, Cause

_LIVES: dict[tuple[Phase, Cause], Phase] = {
    # beginning
    (_P.NEW, _C.LAUNCH): _P.LAUNCHING,
    (_P.STORED, _C.LAUNCH): _P.LAUNCHING,
    (_P.FAILED, _C.LAUNCH): _P.LAUNCHING,
    (_P.LAUNCHING, _C.LAUNCH_ACCEPTED): _P.CONNECTING,
    (_P.LAUNCHING, _C.RESTORE): _P.RESTORING,
    (_P.RESTORING, _C.LAUNCH_ACCEPTED): _P.CONNECTING,
    (_P.CONNECTING, _C.LINK_OPEN): _P.READY,
    # sleep
    (_P.READY, _C.PARK): _P.PARKED,
    (_P.READY, _C.SUSPEND): _P.SUSPENDING,
    (_P.PARKED, _C.SUSPEND): _P.SUSPENDING,
    (_P.PARKED, _C.SERVICE_SUSPENDED): _P.ASLEEP,
    (_P.SUSPENDING, _C.SERVICE_SUSPENDED): _P.ASLEEP,
    (_P.SUSPENDING, _C.SERVICE_RUNNING): _P.SUSPECT,
    (_P.PARKED, _C.WAKE): _P.WAKING,
    (_P.ASLEEP, _C.WAKE): _P.WAKING,
    (_P.WAKING, _C.LINK_OPEN): _P.READY,
    (_P.WAKING, _C.LINK_CUT): _P.SUSPECT,
    # storing
    (_P.READY, _C.STORE): _P.STORING,
    (_P.PARKED, _C.STORE): _P.STORING,
    (_P.ASLEEP, _C.STORE): _P.STORING,
    (_P.STORING, _C.STORE_DONE): _P.STORED,
    (_P.STORING, _C.LINK_CUT): _P.SUSPECT,
    # doubt
    (_P.READY, _C.LINK_CUT): _P.SUSPECT,
    (_P.SUSPECT, _C.LINK_OPEN): _P.READY,
    (_P.SUSPECT, _C.SERVICE_SUSPENDED): _P.ASLEEP,
    (_P.SUSPECT, _C.SERVICE_RUNNING): _P.SUSPECT,
    (_P.SUSPECT, _C.PARK): _P.PARKED,
    (_P.UNREACHABLE, _C.SERVICE_RUNNING): _P.SUSPECT,
    (_P.UNREACHABLE, _C.SERVICE_SUSPENDED): _P.ASLEEP,
    (_P.UNREACHABLE, _C.LINK_OPEN): _P.READY,
    (_P.UNREACHABLE, _C.WAKE): _P.WAKING,
    # loss and replacement
    (_P.LOST, _C.REPLACE): _P.REPLACING,
    (_P.REPLACING, _C.LAUNCH_ACCEPTED): _P.CONNECTING,
    (_P.REPLACING, _C.RESTORE): _P.RESTORING,
    # ending
    (_P.STOPPING, _C.STOP_CONFIRMED): _P.STOPPED,
    (_P.STOPPING, _C.STOP_UNCONFIRMED): _P.STOP_PENDING,
    (_P.STOPPING, _C.STOP_REFUSED): _P.STOP_FAILED,
    (_P.STOP_PENDING, _C.STOP_CONFIRMED): _P.STOPPED,
}

# Phases in which a machine exists or may exist, so the service can speak of it.
_WITH_MACHINE = (
    _P.CONNECTING,
    _P.RESTORING,
    _P.READY,
    _P.PARKED,
    _P.SUSPENDING,
    _P.ASLEEP,
    _P.WAKING,
    _P.STORING,
    _P.SUSPECT,
    _P.UNREACHABLE,
)


def _rows() -> dict[tuple[Phase, Cause], Phase]:
    """The whole table: the rows above and the three rules that hold in many phases."""
    rows = dict(_LIVES)
    for phase in _WITH_MACHINE:
        rows.setdefault((phase, _C.SERVICE_TERMINAL), _P.LOST)
        rows.setdefault((phase, _C.SERVICE_SILENT), _P.UNREACHABLE)
    for phase in (_P.LAUNCHING, _P.RESTORING, _P.CONNECTING, _P.WAKING, _P.REPLACING):
        rows[(phase, _C.GIVE_UP)] = _P.FAILED
    for phase in Phase:
        if phase not in FINAL and phase is not _P.STOPPING:
            rows[(phase, _C.STOP)] = _P.STOPPING
    return rows


TRANSITIONS: dict[tuple[Phase, Cause], Phase] = _rows()


def step(phase: Phase, cause: Cause) -> Phase:
    """The phase after ``cause``; raises IllegalTransition for a pair not in the table."""
    try:
        return TRANSITIONS[(phase, cause)]
    except KeyError:
        raise IllegalTransition(phase, cause) from None


def diagram() -> str:
    """The table as a Mermaid state diagram, for the docs."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.NEW.value}"]
    lines += [
        f"    {source.value} --> {target.value}: {cause.value}"
        for (source, cause), target in TRANSITIONS.items()
    ]
    lines += [f"    {phase.value} --> [*]" for phase in sorted(FINAL)]
    return "\n".join(lines) + "\n"
