"""How a phase looks to clients: REST state, iopub status, and when to say it. Pure.

Follows JK 3.2 and 3.3. On iopub only five words exist, and three of them are
dangerous: ``restarting`` makes JupyterLab drop its comms, ``dead`` disposes of
the connection, ``idle`` with a request's parent ends that request. So the
gateway itself says only ``busy`` when a request waits for a machine to wake,
``idle`` when a wake ended and nothing is pending, and, where a front door asks
for it, ``restarting`` and ``dead`` on loss. Everything else is the kernel's own.
"""

from __future__ import annotations

from gateway.lifecycle import Phase

__all__ = ["INJECT_BUSY", "injection", "rest_state"]

INJECT_BUSY = "busy"

_REST: dict[Phase, str] = {
    Phase.NEW: "idle",  # truthful: the next request runs
    Phase.LAUNCHING: "starting",
    Phase.RESTORING: "starting",
    Phase.CONNECTING: "starting",
    Phase.PARKED: "idle",
    Phase.SUSPENDING: "idle",
    Phase.ASLEEP: "idle",
    Phase.WAKING: "busy",
    Phase.STORING: "idle",
    Phase.STORED: "idle",
    Phase.LOST: "starting",
    Phase.REPLACING: "starting",
    Phase.STOPPING: "dead",
    Phase.STOP_PENDING: "dead",
    Phase.STOPPED: "dead",
    Phase.STOP_FAILED: "dead",
    Phase.FAILED: "dead",
}


def rest_state(phase: Phase, kernel_state: str) -> str:
    """``execution_state`` of the REST model; ``kernel_state`` is the last the kernel said.

    READY shows the kernel's own state; so do SUSPECT and UNREACHABLE, in which
    the last known one is the best there is.
    """
    return _REST.get(phase, kernel_state)


def injection(
    before: Phase, after: Phase, pending: int, *, announce_loss: bool = False
) -> str | None:
    """The parentless iopub status that goes with a move of the phase, or None.

    ``pending`` counts unfinished requests. ``announce_loss`` is for front doors
    without a restarter of their own; jupyter_client's says these things itself.
    """
    if after is Phase.WAKING:
        return "busy" if pending else None
    if before is Phase.WAKING and after is Phase.READY:
        return None if pending else "idle"
    if announce_loss and after is Phase.REPLACING:
        return "restarting"
    if announce_loss and after is Phase.FAILED:
        return "dead"
    return None
