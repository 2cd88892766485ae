"""The plan of faults with a clock and with listeners: what the rooms of the service consult."""

from __future__ import annotations

from collections.abc import Callable

from gateway.local.clock import Clock, SystemClock, Timer
from gateway.local.faults.plan import ANSWERS, Fault, FaultPlan
from gateway.local.interfaces import FaultPoint


class FaultBoard:
    """`take` is for machines.py and api/; the rest is for the proxies.

    One per service.  Listeners are called after every change, a strike and a passed
    deadline included, so that a proxy can follow without looking each time.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._plan = FaultPlan()
        self._listeners: list[Callable[[], None]] = []
        self._timers: dict[int, Timer] = {}

    # -- ordering

    def add(self, fault: Fault) -> int:
        """Order a fault; returns its number."""
        number = self._plan.add(fault, self._clock.monotonic_s())
        if fault.seconds is not None:
            self._timers[number] = self._clock.call_later(fault.seconds, self._changed)
        self._changed()
        return number

    def clear(self, fault_id: int | None = None) -> int:
        """Forget one order, or all; returns how many."""
        cleared = self._plan.clear(fault_id)
        self._changed()
        return cleared

    def listed(self) -> list[Fault]:
        return self._plan.live(self._clock.monotonic_s())

    def subscribe(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[], None]) -> None:
        """Idempotent."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    # -- striking

    def take(self, point: FaultPoint, microvm_id: str | None = None) -> bool:
        """Whether a fault strikes here; a counted one is used up by this call."""
        return self._take(point.value, microvm_id) is not None

    def take_answer(self, microvm_id: str, *, upgrade: bool) -> int | None:
        """The status that a data-plane request gets instead of the guest's answer."""
        for kind, status in ANSWERS.items():
            if self._take(kind, microvm_id) is not None:
                return status
        refused = self._take("refuse-upgrade", microvm_id) if upgrade else None
        return refused.status if refused is not None else None

    def bandwidth(self, microvm_id: str) -> float | None:
        """Bytes a second that were ordered for the machine's data plane."""
        fault = self._find("bandwidth", microvm_id)
        return fault.bytes_per_s if fault is not None else None

    def cut_for(self, microvm_id: str) -> Fault | None:
        """The cut that waits for a socket of this machine; `use` it when it strikes."""
        return self._find("cut", microvm_id)

    def use(self, fault_id: int) -> None:
        self._plan.use(fault_id)
        self._changed()

    def _find(self, kind: str, microvm_id: str) -> Fault | None:
        return self._plan.find(kind, microvm_id, self._clock.monotonic_s())

    def _take(self, kind: str, microvm_id: str | None) -> Fault | None:
        fault = self._plan.take(kind, microvm_id, self._clock.monotonic_s())
        if fault is not None:
            self._changed()
        return fault

    def _changed(self) -> None:
        live = {fault.fault_id for fault in self.listed()}
        for number in self._timers.keys() - live:
            self._timers.pop(number).cancel()
        for listener in list(self._listeners):
            listener()
