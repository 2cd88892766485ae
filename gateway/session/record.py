"""What the parts of one kernel session share: facts, the phase, and the way to report.

No part changes the phase but through ``move``, which takes a cause and asks the
table (``lifecycle.step``). Reads of ``phase``, ``reason`` and ``exit_status`` are
thread-safe: each is one attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.bridge import Bridge
from gateway.clock import Clock
from gateway.control import Control
from gateway.errors import WrongPhase
from gateway.events import EventSink
from gateway.lifecycle import Cause, Phase, step
from gateway.link_codec import LinkKey
from gateway.profiles import AGENT_PORT, Profile
from gateway.session.machine import Machine
from gateway.session.traffic import Gate, Sink

__all__ = ["ALIVE", "DOUBTFUL", "SLEEPING", "Record"]

# Sets of phases, as the parts of a session use them.
ALIVE = frozenset(
    {
        Phase.CONNECTING,
        Phase.READY,
        Phase.PARKED,
        Phase.SUSPENDING,
        Phase.ASLEEP,
        Phase.WAKING,
        Phase.SUSPECT,
        Phase.UNREACHABLE,
    }
)
SLEEPING = frozenset({Phase.PARKED, Phase.ASLEEP})
DOUBTFUL = frozenset({Phase.SUSPECT, Phase.UNREACHABLE})
STOPPED_OR_STOPPING = frozenset(
    {Phase.STOPPING, Phase.STOP_PENDING, Phase.STOPPED, Phase.STOP_FAILED}
)
_STOP_CAUSES = frozenset(
    {Cause.STOP, Cause.STOP_CONFIRMED, Cause.STOP_UNCONFIRMED, Cause.STOP_REFUSED}
)


class Record:
    """One session's facts. On the bridge's loop, but for reads as said above."""

    def __init__(
        self,
        kernel_id: str,
        profile: Profile,
        control: Control,
        clock: Clock,
        events: EventSink,
        owner: str,
        home: Bridge,
        workspace_folder: str | None,
    ) -> None:
        self.kernel_id = kernel_id
        self.profile = profile
        self.control = control
        self.clock = clock
        self.events = events
        self.owner = owner
        self.home = home
        self.workspace_folder = workspace_folder
        self.phase = Phase.NEW
        self.reason = ""
        self.generation = 0
        self.machine: Machine | None = None
        self.sink: Sink | None = None
        self.key: LinkKey | None = None
        self.exit_status: int | None = None
        self.client_session = ""
        self.on_move: Callable[[Phase, Phase], None] | None = None
        self._since_s = clock.monotonic_s()

    def adopt(self, machine: Machine) -> None:
        """This machine carries the session from now on."""
        self.machine = machine
        self.sink = Sink(machine.link.send, machine.link.consumed)

    def needs_machine(self) -> Machine:
        assert self.machine is not None, f"no machine in phase {self.phase}"
        return self.machine

    def gate(self) -> Gate:
        """Which way a client's message takes now."""
        if self.exit_status is not None:
            return Gate.WAIT
        if self.phase is Phase.READY:
            return Gate.OPEN
        return Gate.QUIET if self.phase in SLEEPING else Gate.WAIT

    def move(self, cause: Cause, reason: str = "") -> None:
        """Change the phase as the table says, and report it with the time spent before.

        Raises WrongPhase in whoever was at work when the session was released.
        """
        before = self.phase
        if before in STOPPED_OR_STOPPING and cause not in _STOP_CAUSES:
            raise WrongPhase("go on", before.value)
        self.phase = step(before, cause)
        self.reason = reason
        duration_ms = self.since_ms(self._since_s)
        self._since_s = self.clock.monotonic_s()
        self.emit(
            "phase",
            previous_phase=before.value,
            reason=reason or None,
            duration_ms=duration_ms,
        )
        if self.on_move is not None:
            self.on_move(before, self.phase)

    def since_ms(self, started_s: float) -> int:
        """Whole milliseconds since a reading of the monotonic clock."""
        return round((self.clock.monotonic_s() - started_s) * 1000)

    def emit(self, name: str, **facts: Any) -> None:
        """An event with everything that is known: correlation, machine, profile."""
        self.events.emit(name, self.clock.now_s(), **{**self._known(), **facts})

    def _known(self) -> dict[str, Any]:
        info = self.machine.info if self.machine else None
        profile = self.profile
        return {
            "microvm_id": info.microvm_id if info else None,
            "endpoint": info.url if info else None,
            "profile": profile.name,
            "image": info.image_arn if info else profile.image_arn,
            "image_version": info.image_version if info else profile.image_version,
            "status": self.phase.value,
            "aws_state": info.state if info else None,
            "region": self.control.region or profile.region,
            "port": AGENT_PORT,
            "maximum_duration_seconds": profile.maximum_duration_s,
            "kernel_id": self.kernel_id,
            "client_session": self.client_session,
            "generation": self.generation,
            "owner": self.owner,
            "scope_fingerprint": profile.fingerprint,
            "execution_role_fingerprint": profile.role_fingerprint,
            "phase": self.phase.value,
        }
