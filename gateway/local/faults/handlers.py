"""Faults over HTTP: what `POST /_local/faults` does with its JSON.

The endpoint is internal, authenticated like every other and mounted by `api/`.

- `{"op": "add", "fault": {"kind": "cut", "after_bytes": 100}}` → `{"id": 1}`; a command
  (`expire-tokens`, `kill-machine`, `clock-jump`) is carried out → `{"done": true}`
- `{"op": "list"}` → `{"faults": [...], "kinds": [...]}`
- `{"op": "clear"}`, `{"op": "clear", "id": 1}` → `{"cleared": n}`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gateway.local.faults.board import FaultBoard
from gateway.local.faults.plan import COMMANDS, KINDS, FaultError, parse_fault


class FaultEffects(Protocol):
    """What the commands need the service to do.  Each may raise FaultError."""

    def expire_tokens(self, microvm_id: str | None) -> None:
        """From now on every data-plane token minted so far is expired."""
        ...

    async def kill_machine(self, microvm_id: str) -> None:
        """Kill the machine's processes as if its init had crashed; returns when it is done."""
        ...

    def jump_clock(self, seconds: float) -> None:
        """Set the service's wall clock on (or back) without time passing."""
        ...


async def handle_faults(
    board: FaultBoard, effects: FaultEffects, request: Mapping[str, Any]
) -> dict[str, Any]:
    """Answer one request.  Raises FaultError: the endpoint answers 400 with its text."""
    match request.get("op"):
        case "add":
            order = request.get("fault")
            if not isinstance(order, Mapping):
                raise FaultError("An order needs a member 'fault' with at least a 'kind'.")
            return await _add(board, effects, order)
        case "list":
            shown = [fault.to_json() for fault in board.listed()]
            return {"faults": shown, "kinds": sorted(KINDS | COMMANDS)}
        case "clear":
            return {"cleared": board.clear(_number(request.get("id")))}
        case other:
            raise FaultError(f"There is no op {other!r}; there are: add, list, clear.")


async def _add(
    board: FaultBoard, effects: FaultEffects, order: Mapping[str, Any]
) -> dict[str, Any]:
    match order.get("kind"):
        case "expire-tokens":
            effects.expire_tokens(_text(order, "microvm_id"))
        case "kill-machine":
            microvm_id = _text(order, "microvm_id")
            if microvm_id is None:
                raise FaultError("The command 'kill-machine' needs microvm_id.")
            await effects.kill_machine(microvm_id)
        case "clock-jump":
            seconds = order.get("seconds")
            if isinstance(seconds, bool) or not isinstance(seconds, int | float):
                raise FaultError("The command 'clock-jump' needs seconds, a number.")
            effects.jump_clock(float(seconds))
        case _:
            return {"id": board.add(parse_fault(order))}
    return {"done": True}


def _text(order: Mapping[str, Any], name: str) -> str | None:
    value = order.get(name)
    if value is not None and not isinstance(value, str):
        raise FaultError(f"The value {value!r} is not possible for {name}.")
    return value


def _number(value: object) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise FaultError(f"The value {value!r} is not possible for id.")
    return value
