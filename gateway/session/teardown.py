"""The end of a machine: asked for, and confirmed or not.

``teardown_complete`` is said only when the service confirmed the end; until
then the machine may cost money and counts against the quota (design 4).
"""

from __future__ import annotations

from gateway.errors import GatewayError
from gateway.lifecycle import Cause
from gateway.session.machine import Machine
from gateway.session.record import Record

__all__ = ["tear_down"]


async def tear_down(record: Record, machine: Machine, started_s: float) -> None:
    """From STOPPING to STOPPED, or to STOP_PENDING with the error raised: try again later."""
    record.emit("teardown_started")
    machine.link.abandon("the kernel was released")
    try:
        await machine.terminate()
    except GatewayError as error:
        record.move(Cause.STOP_UNCONFIRMED, error.sentence)
        _report(record, "teardown_pending", "unconfirmed", started_s, error.sentence)
        raise
    record.move(Cause.STOP_CONFIRMED)
    _report(record, "teardown_complete", "confirmed", started_s, None)


def _report(record: Record, name: str, status: str, started_s: float, reason: str | None) -> None:
    duration_ms = record.since_ms(started_s)
    record.emit(name, teardown_duration_ms=duration_ms, teardown_status=status, reason=reason)
