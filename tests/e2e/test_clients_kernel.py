"""What a jupyter_client user sees of one kernel: restart, input, interrupt, death, output."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import boto3
import nbformat
import psutil
import pytest
import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from gateway.local import client as local
from tests.e2e.sandbox import Sandbox, entered, sandbox
from tests.support.waiting import wait_until

Message = dict[str, Any]


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with sandbox() as made, entered(made):
        yield made


@contextmanager
def kernel(**options: Any) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager, client = start_new_kernel(kernel_name="microvm", **options)
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run(client: BlockingKernelClient, code: str, **options: Any) -> str:
    """Execute; returns text of stdout; the reply must be ok."""
    texts: list[str] = []

    def hook(message: Message) -> None:
        if message["msg_type"] == "stream":
            texts.append(message["content"]["text"])

    reply = client.execute_interactive(code, output_hook=hook, timeout=60, **options)
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(texts)


def service_client(box: Sandbox) -> Any:
    info = local.read_info(box.state_dir)
    assert info is not None
    return boto3.client(
        "lambda-microvms", endpoint_url=info.endpoint_url, region_name=info.region,
        aws_access_key_id=info.access_key_id, aws_secret_access_key=info.secret_access_key,
    )  # fmt: skip


def running_machines(box: Sandbox) -> list[str]:
    listed = service_client(box).list_microvms()
    (items,) = [value for value in listed.values() if isinstance(value, list)]
    return [item["microvmId"] for item in items if item["state"] != "TERMINATED"]


@pytest.fixture(autouse=True)
def no_machine_left(box: Sandbox) -> Iterator[None]:
    yield
    assert running_machines(box) == []


@pytest.mark.parametrize("now", [True, False])
def test_restart_keeps_ports_machine_and_client(box: Sandbox, now: bool) -> None:
    with kernel() as (manager, client):
        before, machines = manager.get_connection_info(), running_machines(box)
        run(client, "x = 1")
        manager.restart_kernel(now=now)
        assert manager.get_connection_info() == before
        assert running_machines(box) == machines
        client.wait_for_ready(timeout=30)
        assert run(client, "print('x' in globals())") == "False\n"
        client.execute("name = input('again? ')", allow_stdin=True)
        assert client.get_stdin_msg(timeout=20)["content"]["prompt"] == "again? "
        client.input("yes")
        assert run(client, "print(name)") == "yes\n"


def test_comm_buffers_come_and_go_unchanged(box: Sandbox) -> None:
    buffers = [bytes(range(256)) * 400, b"", b"\x00" * 70_000]
    setup = """if True:
        from comm import create_comm
        c = create_comm("door", data={})
        @c.on_msg
        def echo(message):
            c.send({"n": len(message["buffers"])}, buffers=message["buffers"])
    """
    with kernel() as (_, client):
        client.execute(setup)
        opened = next_of(client, "comm_open")
        content = {"comm_id": opened["content"]["comm_id"], "data": {"say": 1}}
        message = client.session.msg("comm_msg", content)
        client.session.send(client.shell_channel.socket, message, buffers=buffers)
        answer = next_of(client, "comm_msg")
        assert [bytes(buffer) for buffer in answer["buffers"]] == buffers
        assert answer["content"]["data"] == {"n": 3}


def next_of(client: BlockingKernelClient, kind: str, parent: str = "") -> Message:
    """The next iopub message of a kind; with ``parent`` only those of that request."""
    while True:
        message: Message = client.get_iopub_msg(timeout=30)
        if message["msg_type"] == kind and message["parent_header"].get("msg_id", "").endswith(
            parent
        ):
            return message


def test_the_debugger_attaches_over_control(box: Sandbox) -> None:
    with kernel() as (_, client):
        arguments = {"clientID": "t", "adapterID": "", "linesStartAt1": True, "pathFormat": "path"}
        content = {"type": "request", "command": "initialize", "seq": 1, "arguments": arguments}
        message = client.session.msg("debug_request", content)
        client.session.send(client.control_channel.socket, message)
        reply = client.get_control_msg(timeout=30)
        assert reply["msg_type"] == "debug_reply"
        assert reply["content"]["success"] is True


LOOPS = {
    "python": "while True: pass",
    "sleep": "import time; time.sleep(60)",
    "numpy": "import numpy\nwhile True: numpy.linalg.inv(numpy.eye(100))",
}


@pytest.mark.serial
@pytest.mark.parametrize("code", LOOPS.values(), ids=LOOPS)
def test_an_interrupt_stops_within_a_second(box: Sandbox, code: str) -> None:
    with kernel() as (manager, client):
        run(client, "import numpy")
        msg_id = client.execute(f"print('begun', flush=True)\n{code}")
        next_of(client, "stream", msg_id)
        begun_s = time.monotonic()
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=20)
        taken_s = time.monotonic() - begun_s
        assert reply["parent_header"]["msg_id"] == msg_id
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert taken_s < 1.0
        assert run(client, "print('goes on')") == "goes on\n"


def test_an_interrupt_message_works_too(box: Sandbox) -> None:
    with kernel() as (_, client):
        client.execute("print('begun', flush=True)\nwhile True: pass")
        next_of(client, "stream")
        message = client.session.msg("interrupt_request", {})
        client.session.send(client.control_channel.socket, message)
        assert client.get_shell_msg(timeout=20)["content"]["ename"] == "KeyboardInterrupt"


def test_what_no_signal_can_stop_a_restart_can(box: Sandbox) -> None:
    with kernel() as (manager, client):
        # One call that never looks at signals: a regular expression that backtracks for hours.
        setup = "print('begun', flush=True)\nimport re, time; time.sleep(0.5)\n"
        client.execute(setup + "re.match('(a+)+b', 'a' * 60)")
        next_of(client, "stream")
        manager.interrupt_kernel()
        manager.restart_kernel(now=True)
        client.wait_for_ready(timeout=30)
        assert run(client, "print('fresh')") == "fresh\n"


def notebook_client(*cells: str, **options: Any) -> NotebookClient:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    return NotebookClient(notebook, kernel_name="microvm", timeout=300, **options)


def text_of(client: NotebookClient, cell: int = 0) -> str:
    return "".join(output.get("text", "") for output in client.nb.cells[cell].outputs)


def test_every_flushed_line_arrives_once_and_in_order(box: Sandbox) -> None:
    client = notebook_client("for i in range(20_000): print(i, flush=True)")
    client.execute()
    assert text_of(client).split() == [str(i) for i in range(20_000)]


@pytest.mark.long
@pytest.mark.parametrize("turn", range(10))
def test_every_flushed_line_arrives_ten_times(box: Sandbox, turn: int) -> None:
    test_every_flushed_line_arrives_once_and_in_order(box)


@pytest.mark.serial
def test_a_killed_machine_is_a_dead_kernel_within_five_seconds(box: Sandbox) -> None:
    from threading import Timer

    killed_s: list[float] = []

    def kill() -> None:
        (machine,) = running_machines(box)
        killed_s.append(time.monotonic())
        service_client(box).terminate_microvm(microvmIdentifier=machine)

    client = notebook_client("print('begun', flush=True)\nimport time; time.sleep(120)")
    timer = Timer(3.0, kill)
    timer.start()
    with pytest.raises(DeadKernelError):
        client.execute()
    assert time.monotonic() - killed_s[0] < 5.0
    timer.join()


def test_a_kernel_that_kills_itself_is_a_dead_kernel(box: Sandbox) -> None:
    with pytest.raises(DeadKernelError):
        notebook_client("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").execute()


def test_the_environment_is_an_allow_list(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = {"AWS_SESSION_TOKEN": "s", "MY_TOKEN": "s", "KERNEL_TOKEN": "s", "RANDOM_NAME": "s"}
    allowed = {"TZ": "Asia/Tokyo", "LC_TIME": "C", "KERNEL_USERNAME": "ada", "LANG": "C.UTF-8"}
    for name, value in (secret | allowed).items():
        monkeypatch.setenv(name, value)
    with kernel() as (_, client):
        seen = run(client, "import os, json; print(json.dumps(dict(os.environ)))")
    import json

    environment = json.loads(seen)
    assert {name: environment.get(name) for name in allowed} == allowed
    assert not set(secret) & set(environment)
    assert environment.get("JPY_PARENT_PID") is None


def test_extra_arguments_reach_the_kernel(box: Sandbox) -> None:
    with kernel(extra_arguments=["--HistoryManager.hist_file=:memory:"]) as (_, client):
        code = "print(get_ipython().history_manager.hist_file)"
        assert run(client, code) == ":memory:\n"


def test_a_waiting_client_uses_little_processor_time(box: Sandbox) -> None:
    client = notebook_client("import time; time.sleep(4)")
    process = psutil.Process()
    with client.setup_kernel():
        before = process.cpu_times()
        client.execute_cell(client.nb.cells[0], 0)
        after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.4


def test_a_kernel_starts_again_after_a_shutdown(box: Sandbox) -> None:
    context: zmq.Context[Any] = zmq.Context()
    # A context of its own, because a manager destroys the one that it made at its shutdown.
    manager = KernelManager(kernel_name="microvm", context=context)
    for turn in range(2):
        manager.start_kernel()
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=30)
        assert run(client, f"print({turn})") == f"{turn}\n"
        client.stop_channels()
        manager.shutdown_kernel(now=bool(turn))
    context.term()


def test_shutdown_twice_and_signals_after_it_are_harmless(box: Sandbox) -> None:
    with kernel() as (manager, _):
        manager.shutdown_kernel(now=True)
        provisioner = manager.provisioner
        assert provisioner is not None
        assert manager.is_alive() is False
        for _ in range(2):
            from jupyter_core.utils import run_sync

            run_sync(provisioner.send_signal)(2)
            run_sync(provisioner.kill)()
            run_sync(provisioner.cleanup)()


def test_an_external_client_beats_and_executes(box: Sandbox) -> None:
    with kernel() as (manager, _):
        other = BlockingKernelClient()
        other.load_connection_file(manager.connection_file)
        other.start_channels()
        try:
            other.wait_for_ready(timeout=30)
            assert run(other, "print('attached')") == "attached\n"
            wait_until(other.hb_channel.is_beating, within_s=10, what="a heartbeat")
        finally:
            with suppress(RuntimeError):
                other.stop_channels()
