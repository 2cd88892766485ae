"""The five sockets, in front of a stock ipykernel without a machine between."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from jupyter_client.blocking.client import BlockingKernelClient

from gateway.bridge import bridge
from gateway.clock import ManualClock, SystemClock
from gateway.door_sockets import HIDDEN_LIMIT_S, STALL_S, CurveKeys
from gateway.messages import Composer, Signer, frames_of, split_frames
from gateway.zmq_door import DoorSettings, ZmqDoor
from kernel_guest.shared.messages import Channel
from tests.gateway.stand_in import StandInSession
from tests.support.waiting import wait_until

KEY = b"0f4b2a"
LOG = logging.getLogger("door")


class Pair:
    """A door and its stand-in session on the bridge; clients are made here."""

    def __init__(self, **settings: Any) -> None:
        self.curve: CurveKeys | None = settings.get("curve")
        self.alive = True
        self.door = ZmqDoor(
            DoorSettings(Signer(KEY), **settings),
            SystemClock(),
            LOG,
            alive=lambda: self.alive,
        )
        self.session = StandInSession(KEY)
        self._clients: list[BlockingKernelClient] = []

    def connection(self) -> dict[str, Any]:
        settings = self.door._settings
        info = {
            "transport": settings.transport, "ip": settings.place, "key": KEY,
            "signature_scheme": "hmac-sha256", **self.door.ports,
        }  # fmt: skip
        if self.curve:
            info |= {"curve_publickey": self.curve.public, "curve_secretkey": self.curve.secret}
        return info

    def client(self) -> BlockingKernelClient:
        made = BlockingKernelClient()
        made.load_connection_info(self.connection())
        made.start_channels()
        made.wait_for_ready(timeout=30)
        self._clients.append(made)
        return made

    async def open(self) -> None:
        await self.door.open()
        await self.session.start()
        self.session.on_message = self.door.deliver
        self.door.attach(self.session)

    async def close(self) -> None:
        await self.door.close()
        await self.session.close()

    def stop(self) -> None:
        for client in self._clients:
            client.stop_channels()
            client.context.destroy(linger=0)
        bridge().call(self.close)


@contextmanager
def opened(**settings: Any) -> Iterator[Pair]:
    pair = Pair(**settings)
    bridge().call(pair.open)
    try:
        yield pair
    finally:
        pair.stop()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with opened() as made:
        yield made


def statistics(door: ZmqDoor) -> dict[str, Any]:
    """Read where they are written: on the bridge's loop."""

    async def read() -> dict[str, Any]:
        return door.statistics()

    return bridge().call(read)


def run(client: BlockingKernelClient, code: str, **options: Any) -> str:
    """Execute and return all text on stdout and stderr."""
    texts: list[str] = []

    def hook(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            texts.append(message["content"]["text"])

    reply = client.execute_interactive(code, output_hook=hook, timeout=60, **options)
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(texts)


def test_executes_and_returns_results(pair: Pair) -> None:
    assert run(pair.client(), "print(6 * 7)") == "42\n"


def test_two_clients_get_their_own_replies_and_all_outputs(pair: Pair) -> None:
    one, two = pair.client(), pair.client()
    asked = {one: one.execute("x = 1"), two: two.execute("x = 2")}
    for client, msg_id in asked.items():
        assert client.get_shell_msg(timeout=10)["parent_header"]["msg_id"] == msg_id
    seen: set[str] = set()
    while not set(asked.values()) <= seen:
        seen.add(one.get_iopub_msg(timeout=10)["parent_header"].get("msg_id"))


def test_input_is_asked_of_the_client_that_runs_the_cell(pair: Pair) -> None:
    asker, other = pair.client(), pair.client()
    asker.execute("name = input('who? ')", allow_stdin=True)
    request = asker.get_stdin_msg(timeout=10)
    assert request["content"]["prompt"] == "who? "
    asker.input("Ada")
    asker.get_shell_msg(timeout=10)
    assert not other.stdin_channel.msg_ready()
    assert run(other, "print(name)") == "Ada\n"


def test_buffers_of_a_comm_arrive_unchanged(pair: Pair) -> None:
    client = pair.client()
    run(
        client,
        "from comm import create_comm\nc = create_comm('t', data={}, buffers=[bytes(range(256))])",
    )
    buffers = []
    client.execute("c.send({'n': 1}, buffers=[b'\\x00\\xff' * 200_000])")
    while not buffers:
        buffers = client.get_iopub_msg(timeout=10)["buffers"]
    assert bytes(buffers[0]) == b"\x00\xff" * 200_000


def test_all_flushed_lines_arrive_in_order(pair: Pair) -> None:
    text = run(pair.client(), "for i in range(5_000): print(i, flush=True)")
    assert text.split() == [str(i) for i in range(5_000)]


def test_each_subscriber_is_welcomed_with_a_valid_signature(pair: Pair) -> None:
    for topic in (b"", b"kernel.status"):
        socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.SUB)
        socket.connect(f"tcp://127.0.0.1:{pair.door.ports['iopub_port']}")
        socket.setsockopt(zmq.SUBSCRIBE, topic)
        assert socket.poll(5_000)
        identities, parts = split_frames(socket.recv_multipart())
        assert identities == ((topic,) if topic else ())
        assert Signer(KEY).accepts(parts)
        assert b'"iopub_welcome"' in parts[1]
        socket.close(linger=0)


def test_the_welcome_bears_the_kernels_session(pair: Pair) -> None:
    client = pair.client()
    assert (
        pair.door._composer.session
        == client.get_shell_msg(client.kernel_info() and 10)["header"]["session"]
    )


def test_heartbeat_is_echoed_while_the_kernel_is_alive(pair: Pair) -> None:
    def beat() -> int:
        socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.REQ)
        socket.connect(f"tcp://127.0.0.1:{pair.door.ports['hb_port']}")
        socket.send(b"ping")
        answered = socket.poll(500)
        socket.close(linger=0)
        return answered

    assert beat()
    pair.alive = False
    try:
        assert not beat()
    finally:
        pair.alive = True


def test_a_request_without_the_key_is_dropped(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    before = statistics(pair.door)
    socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{pair.door.ports['shell_port']}")
    forged = Composer(Signer(b"other")).compose("execute_request", {"code": "1"}, now_s=0)
    socket.send_multipart(frames_of([], forged))
    socket.send_multipart([b"not", b"a", b"message"])
    wait_until(lambda: statistics(pair.door)["dropped"] > before["dropped"], within_s=5)
    after = statistics(pair.door)
    socket.close(linger=0)
    assert after["unsigned"] == before["unsigned"] + 1
    assert after["requests"] == before["requests"]


def test_a_full_link_makes_the_client_wait_and_loses_nothing(pair: Pair) -> None:
    client = pair.client()
    pair.session.refuse = 3
    ids = [client.execute(f"n = {n}") for n in range(20)]
    replies = [client.get_shell_msg(timeout=20)["parent_header"]["msg_id"] for _ in ids]
    assert replies == ids


def test_a_slow_client_bounds_what_zmq_holds() -> None:
    with opened(limit_bytes=4 * 1024 * 1024) as pair:
        client = pair.client()
        slow: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.SUB)
        slow.rcvhwm = 1
        slow.setsockopt(zmq.RCVBUF, 65_536)
        slow.connect(f"tcp://127.0.0.1:{pair.door.ports['iopub_port']}")
        slow.setsockopt(zmq.SUBSCRIBE, b"")
        wait_until(lambda: slow.poll(10), within_s=5)
        client.execute("for i in range(300): print(f'{i:06}' + 'x' * 99_993, flush=True)")
        wait_until(lambda: statistics(pair.door)["waiting_bytes"] > 10_000_000, within_s=20)
        assert statistics(pair.door)["unread_bytes"] < 12 * 1024 * 1024
        held = pair.session.consumed_bytes
        assert held < 20_000_000
        lines = read_lines(slow, 300)
        slow.close(linger=0)
        assert lines == [f"{i:06}" for i in range(300)]
        wait_until(lambda: statistics(pair.door)["waiting_bytes"] == 0, within_s=10)


def test_a_reply_waits_for_its_outputs_but_not_for_a_stopped_client() -> None:
    clock = ManualClock()
    door = ZmqDoor(DoorSettings(Signer(KEY)), clock, LOG)
    composer = Composer(Signer(KEY))
    line = composer.compose("stream", {"name": "stdout", "text": "x" * 50_000}, now_s=0)
    bridge().call(door.open)
    context: zmq.Context[Any] = zmq.Context()
    asker, reader = context.socket(zmq.DEALER), context.socket(zmq.SUB)
    try:
        asker.connect(f"tcp://127.0.0.1:{door.ports['shell_port']}")
        request = composer.compose("execute_request", {"code": ""}, now_s=0)
        asker.send_multipart(frames_of([], request))
        wait_until(lambda: statistics(door)["routes"] == 1, within_s=5)
        reader.rcvhwm = 1
        reader.setsockopt(zmq.RCVBUF, 65_536)
        reader.connect(f"tcp://127.0.0.1:{door.ports['iopub_port']}")
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        assert reader.poll(5_000), "no welcome"

        async def finish_a_cell(lines: int) -> None:
            for _ in range(lines):
                door.deliver(Channel.IOPUB, line)
            reply = composer.compose("execute_reply", {}, now_s=0, parent_header=request[1])
            door.deliver(Channel.SHELL, reply)

        bridge().call(finish_a_cell, 100)
        assert not asker.poll(200), "the reply overtook its outputs"
        for _ in range(1 + 100):  # the welcome, and the lines
            reader.recv_multipart()
        wait_until(lambda: statistics(door)["unread_bytes"] == 0, within_s=5)

        def time_passes() -> int:
            bridge().call(clock.advance, HIDDEN_LIMIT_S)
            return asker.poll(100)

        wait_until(time_passes, within_s=5, what="the reply after its outputs")
        asker.recv_multipart()
        bridge().call(finish_a_cell, 100)
        assert not asker.poll(200)
        bridge().call(clock.advance, STALL_S + 1)
        assert asker.poll(5_000), "a stopped reader held up somebody else's reply"
    finally:
        context.destroy(linger=0)
        bridge().call(door.close)


def read_lines(socket: zmq.Socket[Any], count: int) -> list[str]:
    """The first six characters of each line, however the lines were packed into messages."""
    import json

    text = ""
    while text.count("\n") < count:
        assert socket.poll(10_000)
        parts = split_frames(socket.recv_multipart())[1]
        if b'"stream"' in parts[1]:
            text += json.loads(parts[4])["text"]
    return [line[:6] for line in text.splitlines()]


def test_ipc_transport_and_its_lost_paths(tmp_path: Path) -> None:
    with opened(transport="ipc", place=str(tmp_path / "door")) as pair:
        client = pair.client()
        (tmp_path / f"door-{pair.door.ports['shell_port']}").unlink()
        bridge().post(pair.door.rebind)
        assert run(pair.client(), "print('again')") == "again\n"
        assert run(client, "print('same')") == "same\n"
    assert not list(tmp_path.iterdir())


def test_curve_clients_are_served_and_others_are_not() -> None:
    keys = CurveKeys(*zmq.curve_keypair())
    with opened(curve=keys) as pair:
        assert run(pair.client(), "print(1)") == "1\n"
        plain: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.REQ)
        plain.connect(f"tcp://127.0.0.1:{pair.door.ports['hb_port']}")
        plain.send(b"ping")
        assert not plain.poll(300)
        plain.close(linger=0)
    assert "secret" not in repr(keys)


def test_a_taken_port_leaves_nothing_open() -> None:
    with opened() as pair:
        taken = pair.door.ports["control_port"]
        other = ZmqDoor(
            DoorSettings(Signer(KEY), ports={"control_port": taken}), SystemClock(), LOG
        )
        with pytest.raises(zmq.ZMQError):
            bridge().call(other.open)
        assert not other._sockets


def test_a_reply_to_nobody_is_dropped_and_counted(pair: Pair) -> None:
    before = statistics(pair.door)["dropped"]
    orphan = Composer(Signer(KEY)).compose("execute_reply", {}, now_s=0)

    async def deliver() -> None:
        pair.door.deliver(Channel.SHELL, orphan)
        pair.door.deliver(Channel.IOPUB, (b"", b"[]", b"{}", b"{}", b"{}"))

    bridge().call(deliver)
    assert statistics(pair.door)["dropped"] == before + 2
