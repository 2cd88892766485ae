"""What the operations may reach."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.local.api.paging import Pager
from gateway.local.clock import Clock
from gateway.local.faults import FaultBoard
from gateway.local.fleet import Fleet
from gateway.local.images.catalog import Catalog
from gateway.local.state import State
from gateway.local.tokens import TokenSmith


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of one service, handed to every operation."""

    state: State
    clock: Clock
    fleet: Fleet
    catalog: Catalog
    smith: TokenSmith
    faults: FaultBoard
    pager: Pager
    region: str
    account: str
