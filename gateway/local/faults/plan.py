"""Which faults are ordered, for whom, and how often they still strike.  Pure.

A fault is ordered by a person or a test and waits until somebody reaches the
place where it strikes.  It lasts for a number of strikes (`times`), a number of
seconds, or until it is cleared.  Orders that have no place to wait at (`COMMANDS`:
expire tokens now, kill a machine, jump the clock) are carried out at once and
never enter the plan.

| kind | strikes | parameters |
|---|---|---|
| `run-hook`, `resume-hook`, `suspend-hook` | that hook of a machine fails | |
| `api-429`, `api-402`, `api-capacity`, `api-html-502`, `credentials-expired` | a control call | |
| `bad-gateway`, `throttle` | a data-plane request is answered 502 or 429 | |
| `refuse-upgrade` | a WebSocket handshake is refused | `status` (502) |
| `cut` | a spliced socket ends at a byte | `direction`, `after_bytes`, `close_frame` |
| `bandwidth` | the machine's data plane is this slow | `bytes_per_s` |
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


class FaultError(ValueError):
    """An order that cannot be understood; the text is one sentence for the person."""


class Direction(enum.Enum):
    """Of bytes in a spliced socket."""

    TO_GUEST = "to-guest"
    TO_CLIENT = "to-client"

    @property
    def opposite(self) -> Direction:
        return Direction.TO_CLIENT if self is Direction.TO_GUEST else Direction.TO_GUEST


HOOK_KINDS = frozenset({"run-hook", "resume-hook", "suspend-hook"})
API_KINDS = frozenset({"api-429", "api-402", "api-capacity", "api-html-502", "credentials-expired"})
COMMANDS = frozenset({"expire-tokens", "kill-machine", "clock-jump"})
#: Statuses of the kinds that answer in the guest's place.
ANSWERS: Mapping[str, int] = {"bad-gateway": 502, "throttle": 429}
#: Parameters that only these kinds have.
PARAMETERS: Mapping[str, frozenset[str]] = {
    "cut": frozenset({"direction", "after_bytes", "close_frame"}),
    "bandwidth": frozenset({"bytes_per_s"}),
    "refuse-upgrade": frozenset({"status"}),
}
KINDS = HOOK_KINDS | API_KINDS | ANSWERS.keys() | PARAMETERS.keys()
COMMON = frozenset({"kind", "microvm_id", "times", "seconds"})


@dataclass(frozen=True, slots=True)
class Fault:
    """One order.  `microvm_id` None means any machine, `times` None no bound on strikes."""

    kind: str
    microvm_id: str | None = None
    times: int | None = 1
    seconds: float | None = None
    direction: Direction = Direction.TO_CLIENT
    after_bytes: int = 0
    close_frame: bool = False
    bytes_per_s: float = 0.0
    status: int = 502
    fault_id: int = 0
    until_s: float | None = None

    def strikes(self, kind: str, microvm_id: str | None, now_s: float) -> bool:
        """Whether this order is meant for this place, machine and time."""
        return (
            self.kind == kind
            and (self.microvm_id is None or self.microvm_id == microvm_id)
            and (self.until_s is None or now_s < self.until_s)
        )

    def to_json(self) -> dict[str, Any]:
        """The order with its number, as `list` shows it; absent means default."""
        shown = {"id": self.fault_id, "kind": self.kind, "times": self.times}
        for name in sorted(PARAMETERS.get(self.kind, frozenset())):
            value = getattr(self, name)
            shown[name] = value.value if isinstance(value, Direction) else value
        if self.microvm_id is not None:
            shown["microvm_id"] = self.microvm_id
        if self.seconds is not None:
            shown["seconds"] = self.seconds
        return shown


def parse_fault(order: Mapping[str, Any]) -> Fault:
    """An order from JSON.  Raises FaultError with one sentence.

    Without `times`, an order lasts for its `seconds` if it has some, a bandwidth until it
    is cleared, anything else for one strike.
    """
    kind = order.get("kind")
    if kind not in KINDS:
        known = ", ".join(sorted(KINDS | COMMANDS))
        raise FaultError(f"There is no fault {kind!r}; there are: {known}.")
    allowed = COMMON | PARAMETERS.get(kind, frozenset())
    if unknown := sorted(order.keys() - allowed):
        raise FaultError(f"The fault {kind!r} has no parameter {', '.join(unknown)}.")
    values = {name: _checked(name, value) for name, value in order.items() if value is not None}
    if "times" not in order:
        endless = "seconds" in values or kind == "bandwidth"
        values["times"] = None if endless else 1
    elif order["times"] is None:
        values["times"] = None
    if kind == "bandwidth" and "bytes_per_s" not in values:
        raise FaultError("The fault 'bandwidth' needs bytes_per_s.")
    return Fault(**values)


#: Least value of each numeric parameter, and whether it may have a fraction.
_NUMBERS: Mapping[str, tuple[float, bool]] = {
    "times": (1, False),
    "seconds": (0, True),
    "after_bytes": (0, False),
    "bytes_per_s": (1, True),
    "status": (400, False),
}


def _checked(name: str, value: Any) -> Any:
    if name == "direction":
        if value not in [direction.value for direction in Direction]:
            words = " or ".join(direction.value for direction in Direction)
            raise FaultError(f"direction is {words}, not {value!r}.")
        return Direction(value)
    if name in _NUMBERS:
        fits = _is_number(value, *_NUMBERS[name])
    else:
        fits = isinstance(value, bool if name == "close_frame" else str)
    if not fits:
        raise FaultError(f"The value {value!r} is not possible for {name}.")
    return value


def _is_number(value: Any, least: float, fraction: bool) -> bool:
    kinds = (int, float) if fraction else int
    return isinstance(value, kinds) and not isinstance(value, bool) and value >= least


@dataclass(slots=True)
class FaultPlan:
    """The orders, oldest first: the oldest that fits strikes."""

    _faults: dict[int, Fault] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def add(self, fault: Fault, now_s: float) -> int:
        """Enter an order; returns its number."""
        number = next(self._numbers)
        until_s = None if fault.seconds is None else now_s + fault.seconds
        self._faults[number] = replace(fault, fault_id=number, until_s=until_s)
        return number

    def clear(self, fault_id: int | None = None) -> int:
        """Forget one order, or all; returns how many there were."""
        numbers = [n for n in self._faults if fault_id in (None, n)]
        for number in numbers:
            del self._faults[number]
        return len(numbers)

    def live(self, now_s: float) -> list[Fault]:
        """The orders that can still strike; those whose time is over are forgotten."""
        for number, fault in list(self._faults.items()):
            if fault.until_s is not None and now_s >= fault.until_s:
                del self._faults[number]
        return list(self._faults.values())

    def find(self, kind: str, microvm_id: str | None, now_s: float) -> Fault | None:
        """The order that would strike here, without using it."""
        for fault in self._faults.values():
            if fault.strikes(kind, microvm_id, now_s):
                return fault
        return None

    def take(self, kind: str, microvm_id: str | None, now_s: float) -> Fault | None:
        """The order that strikes here, used once."""
        fault = self.find(kind, microvm_id, now_s)
        if fault is not None:
            self.use(fault.fault_id)
        return fault

    def use(self, fault_id: int) -> None:
        """Count one strike; the last one removes the order.  An order that is gone is fine."""
        fault = self._faults.get(fault_id)
        if fault is None or fault.times is None:
            return
        if fault.times == 1:
            del self._faults[fault_id]
        else:
            self._faults[fault_id] = replace(fault, times=fault.times - 1)
