"""Phases of a kernel session's machine (under construction: table follows)."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Where the session's machine is now (design 4)."""

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
