"""Faults on demand: ordered over an internal endpoint, consulted by API, engine and proxy."""

from gateway.local.faults.board import FaultBoard
from gateway.local.faults.handlers import FaultEffects, handle_faults
from gateway.local.faults.plan import Fault, FaultError

__all__ = ["Fault", "FaultBoard", "FaultEffects", "FaultError", "handle_faults"]
