"""Messages between clients and kernel, without any socket."""

from __future__ import annotations

import pytest

from gateway.messages import Composer, Signer, content_of, header_of, parent_of
from gateway.session.smalltalk import Effect, SmallTalk
from gateway.session.traffic import HELD_BYTES, Gate, Sink, Traffic
from kernel_guest.shared.errors import LinkFull
from kernel_guest.shared.messages import Channel, Lane, LinkMessage, jupyter

Parts = tuple[bytes, ...]
CLIENT = Composer(Signer(b"key"), "client-session")
KERNEL = Composer(Signer(b"key"), "kernel-session")


class World:
    """A link and a client, both lists."""

    def __init__(self) -> None:
        self.sent: list[LinkMessage] = []
        self.drained: list[tuple[int, Lane]] = []
        self.client: list[tuple[Channel, Parts]] = []
        self.room = 10**9
        self.sink = Sink(self.take, lambda size, lane: self.drained.append((size, lane)))
        self.traffic = Traffic(self.deliver, lambda: 0.0, SmallTalk())
        self.traffic.use_composer(Composer(Signer(b"key")))

    def take(self, message: LinkMessage) -> None:
        if len(self.sent) >= self.room:
            raise LinkFull("ordered", 0, 0)
        self.sent.append(message)

    def deliver(self, channel: Channel, parts: Parts) -> None:
        self.client.append((channel, parts))

    def ask(self, msg_type: str, gate: Gate, **content: object) -> Parts:
        parts = CLIENT.compose(msg_type, content, now_s=0)
        self.effect = self.traffic.from_client(Channel.SHELL, parts, gate, self.sink)
        return parts

    def answer(self, msg_type: str, parent: Parts, channel: Channel, **content: object) -> None:
        parts = KERNEL.compose(msg_type, content, now_s=0, parent_header=parent[1])
        self.traffic.from_kernel(jupyter(channel, parts), self.sink)

    def kinds(self) -> list[str]:
        return [header_of(parts).msg_type for _, parts in self.client]


def test_open_passes_at_once_and_unchanged() -> None:
    world = World()
    parts = world.ask("execute_request", Gate.OPEN, code="1")
    assert [message.parts for message in world.sent] == [parts]
    assert world.effect is None
    assert len(world.traffic.requests) == 1


def test_what_is_held_goes_first_and_in_order() -> None:
    world = World()
    held = [world.ask("execute_request", Gate.WAIT) for _ in range(3)]
    late = world.ask("execute_request", Gate.OPEN)  # the gate opened, the flush comes
    assert world.sent == []
    assert world.traffic.flush(world.sink)
    assert [message.parts for message in world.sent] == [*held, late]
    assert world.traffic.held == 0


def test_a_full_link_leaves_the_rest_held() -> None:
    world = World()
    for _ in range(3):
        world.ask("execute_request", Gate.WAIT)
    world.room = 2
    assert not world.traffic.flush(world.sink)
    assert world.traffic.held == 1
    world.room = 3
    assert world.traffic.flush(world.sink)


def test_a_full_link_refuses_and_remembers_nothing() -> None:
    world = World()
    world.room = 0
    with pytest.raises(LinkFull):
        world.ask("execute_request", Gate.OPEN)
    assert len(world.traffic.requests) == 0


def test_held_bytes_are_bounded() -> None:
    world = World()
    world.ask("execute_request", Gate.WAIT, code="x" * (HELD_BYTES - 1000))
    with pytest.raises(LinkFull):
        world.ask("execute_request", Gate.WAIT, code="x" * 2000)
    assert world.traffic.held == 1


def test_small_talk_of_a_sleeper_is_answered_here() -> None:
    world = World()
    parts = world.ask("comm_info_request", Gate.QUIET)
    assert world.effect is Effect.NONE
    assert world.kinds() == ["status", "comm_info_reply", "status"]
    assert all(parent_of(said) == header_of(parts) for _, said in world.client)
    assert world.traffic.held == 0
    assert not world.traffic.wants_machine


def test_anything_else_waits_for_the_machine() -> None:
    world = World()
    world.ask("execute_request", Gate.QUIET)
    assert world.client == []
    assert world.traffic.wants_machine


def test_waiting_for_a_person_wants_no_machine() -> None:
    world = World()
    cell = world.ask("execute_request", Gate.OPEN)
    assert world.traffic.wants_machine
    world.answer("input_request", cell, Channel.STDIN)
    assert not world.traffic.wants_machine
    reply = CLIENT.compose("input_reply", {"value": "x"}, now_s=0)
    world.traffic.from_client(Channel.STDIN, reply, Gate.QUIET, world.sink)
    assert world.traffic.wants_machine


def test_a_dormant_cell_wants_no_machine_until_a_client_speaks() -> None:
    world = World()
    world.ask("execute_request", Gate.OPEN)
    world.traffic.dormant = True
    assert not world.traffic.wants_machine
    world.ask("complete_request", Gate.QUIET)
    assert world.traffic.wants_machine


def test_own_requests_reach_no_client_and_teach_the_kernels_session() -> None:
    world = World()
    replies: list[Parts] = []
    world.traffic.own_request("kernel_info_request", world.sink, replies.append)
    own = world.sent[0].parts
    world.answer("status", own, Channel.IOPUB, execution_state="busy")
    world.answer("status", own, Channel.IOPUB, execution_state="idle")
    world.answer("kernel_info_reply", own, Channel.SHELL, status="ok")
    assert world.client == []
    assert len(replies) == 1
    assert len(world.drained) == 3
    world.traffic.say(Channel.IOPUB, "status", {"execution_state": "busy"})
    assert header_of(world.client[0][1]).session == "kernel-session"
    world.answer("status", own, Channel.IOPUB, execution_state="idle")  # over: passes
    assert len(world.client) == 2


def test_credit_follows_what_the_door_has_passed_on() -> None:
    world = World()
    cell = world.ask("execute_request", Gate.OPEN)
    world.answer("stream", cell, Channel.IOPUB, text="abc")
    world.traffic.say(Channel.IOPUB, "status", {"execution_state": "busy"})
    world.answer("input_request", cell, Channel.STDIN)
    sizes = [sum(map(len, parts)) for _, parts in world.client]
    world.traffic.consumed(sizes[0] - 1)
    world.traffic.consumed(1 + sizes[1] + sizes[2])
    assert world.drained == [
        (sizes[0] - 1, Lane.ORDERED),
        (1, Lane.ORDERED),
        (sizes[2], Lane.URGENT),
    ]
    world.traffic.consumed(10**6)  # a door that counts wrongly gives no credit
    assert len(world.drained) == 3


def test_the_end_of_a_kernel_ends_what_it_had_and_keeps_what_never_left() -> None:
    world = World()
    begun = world.ask("execute_request", Gate.OPEN)
    waiting = world.ask("execute_request", Gate.WAIT)
    world.traffic.end("it died", held_too=False)
    assert world.kinds() == ["error", "execute_reply", "status"]
    assert parent_of(world.client[1][1]).msg_id == header_of(begun).msg_id
    assert content_of(world.client[1][1])["ename"] == "OutcomeUnknown"
    assert header_of(waiting).key in world.traffic.requests
    world.traffic.end("its machine is gone", held_too=True)
    assert content_of(world.client[4][1])["ename"] == "NotExecuted"
    assert world.traffic.held == 0
    assert len(world.traffic.requests) == 0


def test_endings_can_be_left_unsaid() -> None:
    world = World()
    world.ask("execute_request", Gate.OPEN)
    world.traffic.end("restart", held_too=True, tell=False)
    assert world.client == []
    world.traffic.kernel_ended()


def test_before_the_first_start_nothing_is_said() -> None:
    world = World()
    traffic = Traffic(world.deliver, lambda: 0.0, SmallTalk())
    traffic.say(Channel.IOPUB, "status", {})
    assert world.client == []
