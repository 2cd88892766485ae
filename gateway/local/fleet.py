"""All machines of a service: launches, look-ups, the memory quota, the end of the service.

Live machines are objects here; ended ones are records in the state file only,
after their endpoint has answered 502 for a moment longer (LM 4.3).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from gateway.local.behaviours import implements
from gateway.local.interfaces import ImageSpec, MachineSpec
from gateway.local.lifecycle import Phase
from gateway.local.machines import Machine, Surroundings
from gateway.local.settings import PEAK_FACTOR
from gateway.local.state import MachineRecord

log = logging.getLogger(__name__)

#: How long an ended machine's endpoint goes on answering 502, and how many do so at most.
LINGER_S = 30.0
MAX_LINGERING = 64
#: How long the end of the service waits for terminate hooks and kills.
CLOSE_LIMIT_S = 8.0

SERVICE_ENDED = "The local service ended."


@dataclass(frozen=True, slots=True)
class Launch:
    """A checked RunMicrovm request."""

    image: ImageSpec
    maximum_duration_s: int
    ingress: tuple[str, ...]
    egress: tuple[str, ...]
    payload: str | None = field(repr=False)
    execution_role_arn: str | None = None
    kms_key_identifier: str | None = None
    idle_policy: dict[str, int | bool] | None = None


class Fleet:
    """The machines of one service.  One loop; not thread-safe."""

    def __init__(self, around: Surroundings, *, machines_dir: Path, logs_dir: Path) -> None:
        self._around = around
        self._machines_dir = machines_dir
        self._logs_dir = logs_dir
        self._live: dict[str, Machine] = {}
        self._lingering: dict[str, Machine] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        around.engine.on_exit = self._on_exit

    def __repr__(self) -> str:
        return f"<Fleet live={len(self._live)} lingering={len(self._lingering)}>"

    @property
    def live(self) -> int:
        """Machines that are not TERMINATED."""
        return len(self._live)

    @property
    def closing(self) -> int:
        """Endpoints of ended machines that are being closed at this moment."""
        return len(self._tasks)

    @implements("quota-peak-strict-exceed")
    def over_quota(self) -> bool:
        """Whether the next launch is refused: only once the total already exceeds (LM 11)."""
        used_mib = sum(m.record.memory_mib for m in self._live.values()) * PEAK_FACTOR
        return used_mib > self._around.settings.memory_quota_mib

    def uses_image(self, arn: str, version: str | None = None) -> bool:
        """Whether a machine of this image (and version) is not TERMINATED."""
        return any(
            m.record.image_arn == arn and version in (None, m.record.image_version)
            for m in self._live.values()
        )

    @implements("microvm-id-opaque")
    def make(self, launch: Launch) -> Machine:
        """A machine that waits for `begin`; it counts against the quota from now on."""
        unique = uuid.uuid4()
        record = MachineRecord(
            microvm_id=f"microvm-{unique}",
            image_arn=launch.image.image_arn,
            image_version=launch.image.version,
            endpoint="",
            started_at=self._around.clock.now_s(),
            maximum_duration_s=launch.maximum_duration_s,
            memory_mib=launch.image.memory_mib,
            ingress=launch.ingress,
            egress=launch.egress,
            execution_role_arn=launch.execution_role_arn,
            kms_key_identifier=launch.kms_key_identifier,
            idle_policy=launch.idle_policy,
        )
        spec = MachineSpec(
            record.microvm_id,
            launch.image,
            self._machines_dir / unique.hex[:12],
            self._logs_dir / f"{record.microvm_id}.log",
        )
        machine = Machine(
            self._around, record, spec, payload=launch.payload, on_ended=self._on_ended
        )
        self._live[record.microvm_id] = machine
        return machine

    async def begin(self, machine: Machine) -> None:
        """Open the endpoint and begin the launch.  Raises OSError without a port."""
        try:
            await machine.begin()
        except OSError:
            del self._live[machine.microvm_id]
            raise

    def get(self, microvm_id: str) -> Machine | None:
        """A live machine, or one that ended a moment ago."""
        return self._live.get(microvm_id) or self._lingering.get(microvm_id)

    def record(self, microvm_id: str) -> MachineRecord | None:
        """What the API shows of a machine, live or ended."""
        machine = self.get(microvm_id)
        return machine.shown() if machine else self._around.state.machine(microvm_id)

    def page(
        self, *, before: int | None, limit: int, arn: str | None, version: str | None
    ) -> list[tuple[int, MachineRecord]]:
        """A page of the listing, newest first, ended machines included (LM 3.4)."""
        rows = self._around.state.machines(before=before, limit=limit, arn=arn, version=version)
        return [(number, self.record(row.microvm_id) or row) for number, row in rows]

    @implements("terminated-listed-a-day")
    def sweep_records(self) -> None:
        """Close what an earlier service left open, forget what ended long ago."""
        now_s = self._around.clock.now_s()
        for record in self._around.state.unfinished_machines():
            ended = replace(
                record, state="TERMINATED", state_reason=SERVICE_ENDED, terminated_at=now_s
            )
            self._around.state.put_machine(ended)
        self._prune()

    def _prune(self) -> None:
        """Forget what ended long ago, and the oldest logs."""
        state, settings = self._around.state, self._around.settings
        state.forget_machines(self._around.clock.now_s() - settings.ended_retention_s)
        logs = sorted(self._logs_dir.glob("*.log"), key=lambda path: path.stat().st_mtime)
        for path in logs[: -self._around.settings.kept_logs]:
            path.unlink(missing_ok=True)

    async def close(self) -> None:
        """End every machine and close every endpoint."""
        machines = list(self._live.values())
        for machine in machines:
            machine.terminate(SERVICE_ENDED)
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await asyncio.gather(*(machine.reached(Phase.TERMINATED) for machine in machines))
        except TimeoutError:
            log.warning("%d machines did not end in time; they are killed", len(self._live))
        for machine in [*self._live.values(), *self._lingering.values()]:
            await machine.close()
        for task in list(self._tasks):
            await task

    def _on_exit(self, microvm_id: str, status: int) -> None:
        log.info("%s: its init ended with wait status %d", microvm_id, status)
        if (machine := self._live.get(microvm_id)) is not None:
            machine.main_exited()

    @implements("terminated-endpoint-lingers")
    def _on_ended(self, machine: Machine) -> None:
        del self._live[machine.microvm_id]
        self._prune()
        self._lingering[machine.microvm_id] = machine
        self._around.clock.call_later(LINGER_S, lambda: self._forget([machine]))
        self._forget(list(self._lingering.values())[:-MAX_LINGERING])

    def _forget(self, machines: Iterable[Machine]) -> None:
        for machine in machines:
            if self._lingering.pop(machine.microvm_id, None) is not None:
                task = asyncio.get_running_loop().create_task(machine.close())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
