"""Two cores through a channel that cuts, duplicates, delays and reorders, against a model.

The model knows nothing of frames.  It keeps, per direction and lane, what the sending application
gave to its core, and demands of the other application: this list, in this order, each once.
The exceptions are the ones that `link` states, and they are exact as well: a gateway that lost
its state gets the first message that the guest does not know to be consumed and all after it; a
guest that was replaced loses its own, and the gateway gets its own back in two lists.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kernel_guest.shared.errors import LinkFull, LinkProtocolError
from kernel_guest.shared.link import (
    Established,
    LinkCore,
    LinkEvent,
    Phase,
    Received,
    Refused,
    Role,
)
from kernel_guest.shared.messages import Channel, Lane
from tests.shared.pair import (
    SMALL,
    ZLIB,
    Wire,
    make_gateway,
    make_guest,
    number_of,
    numbered,
    other,
)

ROLES = st.sampled_from(list(Role))
LANES = st.sampled_from(list(Lane))
SIZES = st.one_of(st.integers(0, 60), st.integers(0, 1_000), st.integers(0, 15_000))
CHANNELS = {Lane.URGENT: Channel.CONTROL, Lane.ORDERED: Channel.IOPUB}


class Ledger:
    """What one side's application sent and what the other's has of it, per lane."""

    def __init__(self) -> None:
        self.sent: tuple[list[int], list[int]] = ([], [])
        self.next_index = [0, 0]
        self.unconsumed: tuple[list[int], list[int]] = ([], [])
        self.kept: tuple[list[int], list[int]] = ([], [])

    def receive(self, lane: int, number: int) -> None:
        index = self.next_index[lane]
        assert index < len(self.sent[lane]), f"{number} was never sent"
        assert self.sent[lane][index] == number
        self.next_index[lane] += 1
        if index >= len(self.kept[lane]):
            self.kept[lane].append(number)


class LinkMachine(RuleBasedStateMachine):
    def __init__(self, **codec: Any) -> None:
        super().__init__()
        self.codec = codec
        self.boots = 1
        self.guest = make_guest(SMALL, "boot-1", **codec)
        self.gateway = make_gateway(SMALL, **codec)
        self.ledgers = {role: Ledger() for role in Role}
        self.bytes_waiting: dict[tuple[Role, int], list[int]] = {
            (role, lane): [] for role in Role for lane in Lane
        }
        self.wires = {role: Wire() for role in Role}
        self.late: list[tuple[Role, bytes]] = []
        self.number = 0
        self.meddled = False

    def core(self, role: Role) -> LinkCore:
        return self.guest if role is Role.GUEST else self.gateway

    # --- what the applications do

    @rule(role=ROLES, lane=LANES, size=SIZES, count=st.sampled_from([1, 1, 1, 5, 20]))
    def send(self, role: Role, lane: Lane, size: int, count: int) -> None:
        for _ in range(count):
            self.number += 1
            try:
                self.core(role).send(numbered(self.number, size, CHANNELS[lane]))
            except LinkFull:
                assert self.core(role).queued_bytes > SMALL.queue_bytes - size - 1_000
                return
            self.ledgers[role].sent[lane].append(self.number)

    @rule(role=ROLES, lane=LANES, share=st.integers(1, 3))
    def consume(self, role: Role, lane: Lane, share: int) -> None:
        """Drain all, a half or a third of what waits, not on message borders."""
        waiting = self.bytes_waiting[role, lane]
        amount = sum(waiting) // share
        self.core(role).consumed(amount, lane)
        while amount:
            taken = min(amount, waiting[0])
            amount -= taken
            waiting[0] -= taken
            if not waiting[0]:
                waiting.pop(0)

    # --- what the network does

    @initialize()
    def begin(self) -> None:
        self.reconnect()

    @rule()
    def reconnect(self) -> None:
        """A fresh transport and a whole handshake; nothing else has moved yet."""
        self.begin_connection()
        for role in (Role.GUEST, Role.GATEWAY, Role.GUEST):
            self.take(role, 0)
            self.deliver(role, 1)

    @rule()
    def begin_connection(self) -> None:
        self.drop_transport()
        self.meddled = False
        self.guest.connected()
        self.gateway.connected()

    @rule(role=ROLES, budget=st.sampled_from([0, 1, 300, 2_000, 10**6]))
    def take(self, role: Role, budget: int) -> None:
        wanted = self.core(role).wants_output
        frames = self.core(role).take_frames(budget)
        assert wanted or not frames
        assert frames or not wanted or not budget
        self.wires[role].frames.extend(frames)

    @rule(role=ROLES, count=st.sampled_from([1, 2, 10, 100]))
    def deliver(self, role: Role, count: int) -> None:
        for _ in range(count):
            wire = self.wires[role]
            if not wire.frames:
                return
            frame = wire.frames.popleft()
            wire.arrived.append(frame)
            self.feed(other(role), frame)

    @rule(budget=st.sampled_from([300, 2_000]), rounds=st.sampled_from([1, 3, 10]))
    def run_smoothly(self, budget: int, rounds: int) -> None:
        for _ in range(rounds):
            for role in Role:
                self.take(role, budget)
                self.deliver(role, 100)

    @rule(role=ROLES, size=SIZES, count=st.integers(1, 12), arrive=st.integers(0, 40))
    def cut_amid_a_burst(self, role: Role, size: int, count: int, arrive: int) -> None:
        """The usual accident: frames under way, some arrive, then a new connection."""
        for lane in Lane:
            self.send(role, lane, size, count)
        self.take(role, 10**6)
        self.deliver(role, arrive)
        self.reconnect()

    @rule(role=ROLES, back=st.sampled_from([1, 1, 2, 3, 10]))
    def duplicate(self, role: Role, back: int) -> None:
        for frame in self.wires[role].arrived[-back:][:1]:
            self.feed(other(role), frame)

    @rule(index=st.integers(0, 10**6))
    @precondition(lambda self: self.late)
    def deliver_late(self, index: int) -> None:
        """A frame of an earlier transport, which no WebSocket would bring, does no harm."""
        self.meddled = True
        role, frame = self.late.pop(index % len(self.late))
        self.feed(other(role), frame)

    @rule(role=ROLES, index=st.integers(0, 10**6))
    def reorder(self, role: Role, index: int) -> None:
        frames = self.wires[role].frames
        if len(frames) > 1:
            self.meddled = True
            at = index % (len(frames) - 1)
            frames[at], frames[at + 1] = frames[at + 1], frames[at]

    @rule(role=st.sampled_from([None, *Role]))
    def cut(self, role: Role | None) -> None:
        """The link is gone; perhaps only one side has noticed yet."""
        if role is None:
            self.drop_transport()
        else:
            self.core(role).disconnected()

    # --- what crashes do

    @rule(attach=st.booleans())
    def gateway_loses_its_state(self, attach: bool) -> None:
        self.drop_transport()
        self.gateway = make_gateway(SMALL, **self.codec)
        self.ledgers[Role.GATEWAY] = Ledger()
        for lane in Lane:
            self.bytes_waiting[Role.GATEWAY, lane] = []
        if attach:
            self.reconnect()

    @rule(attach=st.booleans())
    @precondition(lambda self: self.number > 30)
    def guest_is_replaced(self, attach: bool) -> None:
        self.drop_transport()
        self.late.clear()
        self.boots += 1
        self.guest = make_guest(SMALL, f"boot-{self.boots}", **self.codec)
        self.ledgers[Role.GUEST] = Ledger()
        for lane in Lane:
            self.bytes_waiting[Role.GUEST, lane] = []
        if attach:
            self.reconnect()

    # --- the machinery

    def drop_transport(self) -> None:
        for role in Role:
            self.core(role).disconnected()
            self.late += [(role, frame) for frame in self.wires[role].frames]
            self.late += [(role, frame) for frame in self.wires[role].arrived[-3:]]
            self.wires[role] = Wire()
        del self.late[:-50]

    def feed(self, role: Role, frame: bytes) -> None:
        try:
            events = self.core(role).receive_frame(frame)
        except LinkProtocolError:
            assert self.meddled
            assert self.core(role).phase is Phase.DOWN
            self.drop_transport()
            return
        for event in events:
            self.on_event(role, event)

    def on_event(self, role: Role, event: LinkEvent) -> None:
        if isinstance(event, Received):
            message = event.message
            self.ledgers[other(role)].receive(message.lane, number_of(message))
            self.bytes_waiting[role, message.lane].append(message.size_bytes)
        elif isinstance(event, Established):
            self.on_established(role, event)
        else:
            assert isinstance(event, Refused)
            assert self.meddled, event

    def on_established(self, role: Role, event: Established) -> None:
        if event.resumed:
            return
        ledger = self.ledgers[other(role)]
        if role is Role.GUEST:
            ledger.next_index = [0, 0]
            return
        known = self.guest.delivered
        assert all(known[lane] <= len(ledger.kept[lane]) for lane in Lane)
        ledger.next_index = list(known)
        if event.restarted:
            self.check_lost(event)

    def check_lost(self, event: Established) -> None:
        """The two lists are exactly what the older guest is not known to have consumed."""
        ledger = self.ledgers[Role.GATEWAY]
        for lane in Lane:
            lost = [number_of(m) for m in event.in_flight + event.unsent if m.lane is lane]
            assert lost == ledger.sent[lane][len(ledger.sent[lane]) - len(lost) :]
            unsent = [number_of(m) for m in event.unsent if m.lane is lane]
            assert not set(unsent) & set(ledger.kept[lane])
            assert set(ledger.kept[lane]) <= set(ledger.sent[lane]) - set(unsent)
        self.ledgers[Role.GATEWAY] = Ledger()

    @invariant()
    def bounds_hold(self) -> None:
        for role in Role:
            core = self.core(role)
            for lane in Lane:
                out, into = core._stream.out[lane], core._stream.into[lane]
                kept = sum(len(u.messages) for u in (*out._waiting, *out._sent, *out._held))
                assert out.credit.outstanding <= SMALL.windows[lane] or kept == 1
                assert (
                    into.credit.outstanding <= SMALL.windows[lane] or len(into.credit._waiting) == 1
                )
                assert into.held_bytes <= SMALL.message_bytes + 1_000
                assert out.queued_bytes <= SMALL.queue_bytes + 20_000 + SMALL.windows[lane]
            repr(core), core.statistics()

    def teardown(self) -> None:
        """Let it heal: after one undisturbed connection everything has arrived."""
        self.begin_connection()
        while any(self.core(role).wants_output or self.wires[role].frames for role in Role):
            for role in Role:
                self.take(role, 10**6)
                self.deliver(role, 10**6)
                for lane in Lane:
                    self.consume(role, lane, 1)
        for role in Role:
            assert self.core(role).idle, self.core(role).statistics()
            for lane in Lane:
                assert self.ledgers[role].kept[lane] == self.ledgers[role].sent[lane]


class CompressingMachine(LinkMachine):
    def __init__(self) -> None:
        super().__init__(**ZLIB)


COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": True,
}
SHORT = settings(max_examples=100, stateful_step_count=40, derandomize=True, **COMMON)
LONG = settings(max_examples=2_000, stateful_step_count=100, derandomize=False, **COMMON)


def run(machine: type[RuleBasedStateMachine], how: settings) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=how)


@pytest.mark.parametrize("machine", [LinkMachine, CompressingMachine])
def test_everything_arrives_once_and_in_order(machine: type[RuleBasedStateMachine]) -> None:
    run(machine, SHORT)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", [LinkMachine, CompressingMachine])
def test_everything_arrives_once_and_in_order_for_long(
    machine: type[RuleBasedStateMachine],
) -> None:
    run(machine, LONG)
