"""What the commands among the faults do to the service (see `gateway.local.faults`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.local.api.context import Context
from gateway.local.api.errors import validation
from gateway.local.faults import FaultError, handle_faults
from gateway.local.lifecycle import Phase

#: How long an order to kill waits until the machine is TERMINATED.
KILL_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Effects:
    """Implements `FaultEffects`."""

    context: Context

    def expire_tokens(self, microvm_id: str | None) -> None:
        self.context.smith.expire_all(microvm_id)

    async def kill_machine(self, microvm_id: str) -> None:
        machine = self.context.fleet.get(microvm_id)
        if machine is None:
            raise FaultError(f"There is no machine {microvm_id}.")
        machine.crash()
        try:
            async with asyncio.timeout(KILL_LIMIT_S):
                await machine.reached(Phase.TERMINATED)
        except TimeoutError:
            raise FaultError(f"The machine {microvm_id} did not end.") from None

    def jump_clock(self, seconds: float) -> None:
        self.context.clock.jump_wall(seconds)


async def answer_faults(context: Context, request: Mapping[str, Any]) -> dict[str, Any]:
    """The internal endpoint `/_local/faults`.  Raises ApiError."""
    try:
        return await handle_faults(context.faults, Effects(context), request)
    except FaultError as error:
        raise validation(str(error)) from error
