"""The data plane of one machine: a listener on 127.0.0.1 with the service's rules.

Everything that a client can be told is in `connection.py` and `heads.py`; here is
what the connections of one machine share: caps, faults, and the list of what
must be cut when the machine sleeps.
"""

from __future__ import annotations

import asyncio
import logging

import h11

from gateway.local.behaviours import implements
from gateway.local.clock import Clock
from gateway.local.faults.board import FaultBoard
from gateway.local.faults.plan import Fault
from gateway.local.interfaces import ProxiedMachine, ProxyLimits
from gateway.local.proxy import heads
from gateway.local.proxy.connection import ClientConnection
from gateway.local.proxy.cuts import Tap
from gateway.local.proxy.limits import Bandwidth, RequestRate
from gateway.local.proxy.splice import Splice
from gateway.local.proxy.wire import Wire

log = logging.getLogger(__name__)

BACKLOG = 1024
#: Sockets that may wait for their first request or their refusal; above, they are dropped.
#: Far beyond the largest cap of the service (128, LM 4.4): only a runaway client gets here.
MOST_SOCKETS = 1024
THROTTLED = (429, b"")


class MachineProxy:
    """See `Proxy`.  One per machine, on its loop."""

    def __init__(
        self, machine: ProxiedMachine, limits: ProxyLimits, clock: Clock, faults: FaultBoard
    ) -> None:
        self.machine = machine
        self.limits = limits
        self.cuts = 0
        self._clock = clock
        self._faults = faults
        self._port = 0
        self._server: asyncio.Server | None = None
        self._connections: dict[ClientConnection, asyncio.Task[None]] = {}
        self._splices: set[Splice] = set()
        self._all_spliced_ended = asyncio.Event()
        self._all_spliced_ended.set()
        self._rate: RequestRate | None = None
        self._bandwidth: Bandwidth | None = None
        self._bandwidth_per_s: float | None = None

    def __repr__(self) -> str:
        return (
            f"<MachineProxy {self.machine.microvm_id} port={self._port} "
            f"connections={len(self._connections)} splices={len(self._splices)}>"
        )

    # -- what machines.py calls

    async def start(self, port: int = 0) -> int:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _AcceptedWire(self), "127.0.0.1", port, backlog=BACKLOG
        )
        self._port = self._server.sockets[0].getsockname()[1]
        if self.limits.requests_per_s is not None:
            self._rate = RequestRate(self.limits.requests_per_s, self._clock.monotonic_s())
        self._faults.subscribe(self._faults_changed)
        self._faults_changed()
        return self._port

    def cut_connections(self) -> None:
        self.cuts += 1
        for splice in list(self._splices):
            splice.abort()
        for connection in list(self._connections):
            if connection.guest is not None:
                connection.abort()

    async def close(self) -> None:
        self._faults.unsubscribe(self._faults_changed)
        if self._server is not None:
            self._server.close()
        tasks = list(self._connections.values())
        for connection, task in list(self._connections.items()):
            connection.abort()
            task.cancel()
        for splice in list(self._splices):
            splice.abort()
        if tasks:
            await asyncio.wait(tasks)
        await self._all_spliced_ended.wait()
        if self._server is not None:
            await self._server.wait_closed()

    # -- what accepted connections do

    @implements("connection-cap-429")
    def accept(self, wire: Wire) -> None:
        """Serve a new connection, or mark it as one too many."""
        count = len(self._connections) + len(self._splices)
        if count >= MOST_SOCKETS:
            wire.abort()
            return
        most = self.limits.max_connections
        connection = ClientConnection(self, wire, over_cap=most is not None and count >= most)
        task = asyncio.get_running_loop().create_task(connection.run())
        self._connections[connection] = task
        task.add_done_callback(lambda done: self._connection_done(connection, done))

    def _connection_done(self, connection: ClientConnection, task: asyncio.Task[None]) -> None:
        del self._connections[connection]
        if not task.cancelled() and (error := task.exception()) is not None:
            connection.abort()
            log.error("%s: a connection failed", self.machine.microvm_id, exc_info=error)

    @implements("request-cap-429")
    def check_caps(self, *, over_cap: bool) -> None:
        """Raises RefusedError (429)."""
        if over_cap or (self._rate is not None and not self._rate.take(self._clock.monotonic_s())):
            raise heads.RefusedError(*THROTTLED)

    def check_faults(self, *, upgrade: bool) -> None:
        """Raises RefusedError with the status that somebody ordered."""
        status = self._faults.take_answer(self.machine.microvm_id, upgrade=upgrade)
        if status is not None:
            raise heads.RefusedError(status)

    def check_host(self, request: h11.Request) -> None:
        """Raises RefusedError (403)."""
        heads.check_host(request, self._port)

    def note_inbound(self, size_bytes: int) -> None:
        self.machine.note_inbound(size_bytes)

    def splice(self, client: Wire, guest: Wire, from_client: bytes, from_guest: bytes) -> None:
        """Join the two sides of a socket after its 101."""
        cut = self._faults.cut_for(self.machine.microvm_id)
        tracked = cut is not None and cut.close_frame
        splice = Splice(
            on_inbound=self.machine.note_inbound,
            charge=self._charge,
            on_struck=self._struck,
            on_closed=self._splice_closed,
            quiet_s=self.limits.quiet_socket_s,
            tap=Tap(tracked=True) if tracked else None,
        )
        self._splices.add(splice)
        self._all_spliced_ended.clear()
        splice.start(client, guest, from_client=from_client, from_guest=from_guest)
        if cut is not None:
            splice.arm(cut)

    def _splice_closed(self, splice: Splice) -> None:
        self._splices.discard(splice)
        if not self._splices:
            self._all_spliced_ended.set()

    # -- bandwidth

    @implements("bandwidth-as-latency")
    def _charge(self, size_bytes: int) -> float:
        if self._bandwidth is None:
            return 0.0
        return self._bandwidth.charge(size_bytes, asyncio.get_running_loop().time())

    async def pace(self, size_bytes: int) -> None:
        """Pause after bytes of a body, as long as the cap asks for."""
        pause_s = self._charge(size_bytes)
        if pause_s > 0:
            await asyncio.sleep(pause_s)

    # -- faults

    def _faults_changed(self) -> None:
        """Somebody ordered or cleared a fault, or one was used up."""
        ordered = self._faults.bandwidth(self.machine.microvm_id)
        self._set_bandwidth(ordered or self.limits.bandwidth_bytes_per_s)
        cut = self._faults.cut_for(self.machine.microvm_id)
        for splice in list(self._splices):
            splice.arm(cut)

    def _set_bandwidth(self, bytes_per_s: float | None) -> None:
        if bytes_per_s != self._bandwidth_per_s:
            now_s = asyncio.get_running_loop().time()
            self._bandwidth = Bandwidth(bytes_per_s, now_s) if bytes_per_s else None
            self._bandwidth_per_s = bytes_per_s

    def _struck(self, cut: Fault) -> None:
        self._faults.use(cut.fault_id)


class _AcceptedWire(Wire):
    """A wire that reports itself to its proxy as soon as it has a transport."""

    def __init__(self, proxy: MachineProxy) -> None:
        super().__init__()
        self._proxy = proxy

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._proxy.accept(self)
