"""Who passes between link and kernel, and in which order."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, cast

from kernel_guest.channels import KernelChannels
from kernel_guest.jupyter_parts import make_signer
from kernel_guest.ordering import QUIET_S
from kernel_guest.shared.messages import Channel, LinkMessage, jupyter
from kernel_guest.traffic import KernelTraffic


def on_loop(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test that waits for nothing while a loop runs."""

    @functools.wraps(test)
    def run() -> None:
        async def main() -> None:
            test()

        asyncio.run(main())

    return run


SIGN = make_signer(b"k", "hmac-sha256")


def parts(msg_type: str, msg_id: str = "", parent: str = "", **content: Any) -> list[bytes]:
    header = {"msg_type": msg_type, "msg_id": msg_id}
    kind = msg_type.replace("_reply", "_request") if "_reply" in msg_type else "execute_request"
    parent_header = {"msg_id": parent, "msg_type": kind} if parent else {}
    values = (header, parent_header, {}, content)
    return [b"", *(json.dumps(value).encode() for value in values)]


def request(
    msg_id: str, msg_type: str = "execute_request", channel: Channel = Channel.SHELL
) -> LinkMessage:
    return jupyter(channel, parts(msg_type, msg_id))


class Sockets:
    """Stands where KernelChannels would: remembers what it was given."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, channel: Channel, frames: Sequence[bytes], token: object = None) -> None:
        header = json.loads(frames[1])
        self.sent.append(header["msg_id"] or header["msg_type"])


class Bench:
    """A traffic with both of its ends in view."""

    def __init__(self) -> None:
        self.emitted: list[LinkMessage] = []
        self.consumed: list[LinkMessage] = []
        self.traffic = KernelTraffic(self.emitted.append, self.consumed.append)

    def attach(self) -> Sockets:
        sockets = Sockets()
        self.traffic.attach(cast(KernelChannels, sockets), SIGN)
        return sockets

    def kinds(self) -> list[str]:
        return [json.loads(message.parts[1])["msg_type"] for message in self.emitted]

    def idle(self, parent: str) -> None:
        frames = parts("status", parent=parent, execution_state="idle")
        self.traffic.from_kernel(Channel.IOPUB, frames)


@on_loop
def test_messages_wait_from_the_moment_a_start_is_asked_for() -> None:
    bench = Bench()
    bench.traffic.hold()
    bench.traffic.to_kernel(request("a"))
    assert bench.consumed == []
    sockets = bench.attach()
    assert sockets.sent == []
    bench.traffic.release()
    assert sockets.sent == ["a"]


@on_loop
def test_during_a_restart_messages_wait_for_the_new_kernel() -> None:
    bench = Bench()
    old = bench.attach()
    bench.traffic.to_kernel(request("a"))
    bench.traffic.hold()
    bench.traffic.to_kernel(request("b"))
    bench.traffic.detach()
    new = bench.attach()
    bench.traffic.release()
    assert (old.sent, new.sent) == (["a"], ["b"])


@on_loop
def test_a_start_that_fails_lets_go_of_what_waited() -> None:
    bench = Bench()
    bench.traffic.hold()
    bench.traffic.to_kernel(request("a"))
    bench.traffic.release()
    assert bench.traffic.dropped == 1
    assert len(bench.consumed) == 1


@on_loop
def test_without_a_kernel_messages_are_dropped_and_credited() -> None:
    bench = Bench()
    bench.traffic.to_kernel(request("a"))
    assert (bench.traffic.dropped, len(bench.consumed)) == (1, 1)
    bench.attach()
    bench.traffic.detach()
    bench.traffic.to_kernel(request("b"))
    assert bench.traffic.dropped == 2


def test_a_repetition_of_what_died_with_the_kernel_is_answered_as_unknown() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.attach()
        bench.traffic.to_kernel(request("a"))
        bench.traffic.detach()
        sockets = bench.attach()
        bench.traffic.to_kernel(request("a"))
        assert sockets.sent == []
        assert bench.kinds() == ["execute_reply", "status"]
        assert json.loads(bench.emitted[0].parts[4])["ename"] == "OutcomeUnknown"
        assert bench.emitted[0].channel is Channel.SHELL
        assert json.loads(bench.emitted[1].parts[2])["msg_id"] == "a"

    asyncio.run(scenario())


@on_loop
def test_a_repetition_while_it_runs_is_swallowed() -> None:
    bench = Bench()
    sockets = bench.attach()
    bench.traffic.to_kernel(request("a"))
    bench.traffic.to_kernel(request("a"))
    assert sockets.sent == ["a"]
    assert bench.emitted == []
    assert len(bench.consumed) == 1


@on_loop
def test_a_repeated_input_reply_is_swallowed() -> None:
    bench = Bench()
    sockets = bench.attach()
    for _ in range(2):
        bench.traffic.to_kernel(request("i", "input_reply", Channel.STDIN))
    assert sockets.sent == ["i"]
    assert bench.emitted == []


def test_what_the_dead_kernel_held_back_goes_before_its_end_is_told() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.attach()
        bench.traffic.to_kernel(request("a"))
        bench.traffic.from_kernel(Channel.SHELL, parts("execute_reply", parent="a"))
        assert bench.emitted == []
        bench.traffic.detach()
        assert bench.kinds() == ["execute_reply"]
        bench.traffic.close()

    asyncio.run(scenario())


def test_interrupt_by_message_is_ours_alone() -> None:
    async def scenario() -> None:
        bench = Bench()
        assert bench.traffic.interrupt_by_message() is False
        sent: list[list[bytes]] = []

        class Recorder(Sockets):
            def send(self, channel: Channel, frames: Sequence[bytes], token: object = None) -> None:
                assert channel is Channel.CONTROL
                sent.append(list(frames))

        bench.traffic.attach(cast(KernelChannels, Recorder()), SIGN)
        assert bench.traffic.interrupt_by_message() is True
        assert sent[0][0] == SIGN(sent[0][1:5])
        own_id = json.loads(sent[0][1])["msg_id"]
        bench.traffic.from_kernel(Channel.CONTROL, parts("interrupt_reply", parent=own_id))
        assert bench.emitted == []
        bench.traffic.from_kernel(Channel.CONTROL, parts("interrupt_reply", parent="client's"))
        assert bench.kinds() == ["interrupt_reply"]

    asyncio.run(scenario())


def test_output_without_a_running_cell_is_late_output() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.attach()
        bench.traffic.to_kernel(request("a"))
        bench.traffic.from_kernel(Channel.IOPUB, parts("stream", parent="a"))
        bench.idle("a")
        assert bench.traffic.activity.report(None, [])["late_outputs"] == 0
        bench.traffic.from_kernel(Channel.IOPUB, parts("stream", parent="a"))
        assert bench.traffic.activity.report(None, [])["late_outputs"] == 1

    asyncio.run(scenario())


def test_a_reply_without_idle_goes_when_the_kernel_is_silent() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.attach()
        bench.traffic.to_kernel(request("a"))
        bench.traffic.from_kernel(Channel.SHELL, parts("execute_reply", parent="a"))
        async with asyncio.timeout(QUIET_S * 3):
            while not bench.emitted:
                timer = bench.traffic._gate_timer
                assert timer is not None
                await asyncio.sleep(max(0.0, timer.when() - asyncio.get_running_loop().time()))
        assert bench.kinds() == ["execute_reply"]
        assert bench.traffic.requests.running == 0

    asyncio.run(scenario())


def test_silence_while_the_machine_slept_does_not_count() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.attach()
        bench.traffic.to_kernel(request("a"))
        bench.traffic.from_kernel(Channel.SHELL, parts("execute_reply", parent="a"))
        now_s = asyncio.get_running_loop().time()
        timer = bench.traffic._gate_timer
        assert timer is not None
        timer.cancel()
        bench.traffic._expire(now_s - 3600.0)  # it should have fired an hour ago
        assert bench.emitted == []
        bench.traffic.from_kernel(Channel.IOPUB, parts("stream", parent="a"))
        bench.idle("a")
        assert bench.kinds() == ["stream", "execute_reply", "status"]
        bench.traffic.close()

    asyncio.run(scenario())
