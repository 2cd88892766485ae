"""The agent as a gateway sees it: real sockets, a real machine, real forked kernels."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
from collections.abc import Callable
from contextlib import suppress

import pytest

from kernel_guest.shared.link import LinkLimits
from kernel_guest.shared.messages import Channel, Lane
from tests.guest.gateway_side import (
    KEY,
    CallFailedError,
    GatewaySide,
    JournalBounds,
    LinkRefusedError,
    Served,
    open_socket,
    serving,
)
from tests.guest.machines import Machine


async def passes_until(condition: Callable[[], bool]) -> None:
    """Loop passes, while the agent works in this very loop."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the loop's passes are what is waited for
            await asyncio.sleep(0)


NAMES = ("boot_id", "microvm_id", "generation", "kernel_session")


def test_health_tells_nothing_before_run_and_everything_after(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            before = (await served.get("/health")).json()
            assert [before[name] for name in NAMES] == [None] * 4
            assert before["kernel"] == "none"
            gateway = GatewaySide()
            ran = await gateway.run(served)
            async with gateway.link(served):
                await gateway.start()
                await gateway.execute("1")
                after = (await served.get("/health")).json()
            assert after["boot_id"] == ran["boot_id"]
            assert after["microvm_id"] == "microvm-1"
            assert after["kernel_session"] == "session-1"
            assert after["generation"] == 1
            assert after["kernel"] == "running"
            assert after["last_sequence"] == {"urgent": 1, "ordered": 1}
            assert after["protocol_versions"] == [1, 1]

    asyncio.run(scenario())


@pytest.mark.parametrize("tcp", [False, True])
def test_start_and_execute_over_both_kinds_of_listener(machine: Machine, tcp: bool) -> None:
    async def scenario() -> None:
        async with serving(machine, tcp=tcp) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                started = await gateway.start()
                assert started["cold"] is False
                assert started["language"] == "python"
                assert started["generation"] == 1
                cell = await gateway.execute("6 * 7")
                assert cell.value == "42"
                assert cell.kinds[:3] == ["status", "execute_input", "execute_result"]
                assert sorted(cell.kinds[3:]) == ["execute_reply", "status"]
                assert gateway.event("kernel_started") == {"pid": started["pid"], "cold": False}
                assert "iopub_welcome" not in [got.kind for got in gateway.got]

    asyncio.run(scenario())


def test_no_delay_is_set_on_the_link(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine, tcp=True) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                await gateway.call("activity")
                link = served.agent.link._socket
                assert link is not None
                assert link.ws_connection is not None
                tcp = link.ws_connection.stream.socket
                assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    asyncio.run(scenario())


def test_requests_sent_right_behind_the_start_reach_the_kernel(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                gateway.post_call("start", {"key": KEY, "kernel_name": None})
                first = gateway.post(Channel.SHELL, "kernel_info_request", {})
                control = gateway.post(Channel.CONTROL, "kernel_info_request", {})
                await gateway.flush()
                assert (await gateway.finish(first)).status == "ok"
                assert (await gateway.finish(control)).status == "ok"

    asyncio.run(scenario())


def test_reply_and_idle_come_after_all_outputs(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                await gateway.start()
                cell = await gateway.execute("for i in range(3000): print(i, flush=True)")
                assert cell.stdout.split() == [str(i) for i in range(3000)]
                assert sorted(cell.kinds[-2:]) == ["execute_reply", "status"]
                assert not gateway.gaps

    asyncio.run(scenario())


def test_input_interrupt_and_buffers(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                await gateway.start()
                asked = await gateway.begin("name = input('who? '); print(name)")
                await gateway.until(
                    lambda: "input_request" in gateway.cell(asked).kinds  # on stdin
                )
                report = await gateway.call("activity")
                assert report["waiting_input"] is True
                assert report["executing"] == 1
                await gateway.request("input_reply", {"value": "you"}, Channel.STDIN)
                assert (await gateway.finish(asked)).stdout == "you\n"

                busy = await gateway.begin("while True: pass")
                await gateway.until(lambda: "execute_input" in gateway.cell(busy).kinds)
                assert await gateway.call("interrupt") == {"delivered": True}
                assert (await gateway.finish(busy)).status == "error"

                code = (
                    "from comm import create_comm\n"
                    "c = create_comm('t'); c.send({}, buffers=[bytes(range(256))])"
                )
                cell = await gateway.execute(code)
                sent = next(got for got in cell.messages if got.kind == "comm_msg")
                assert sent.parts[5:] == (bytes(range(256)),)

    asyncio.run(scenario())


def test_messages_pass_unchanged_and_signed_by_the_kernel(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                await gateway.start()
                await gateway.execute("print('x')")
                for got in gateway.got:
                    assert gateway.session.sign(list(got.parts[1:5])) == got.parts[0]

    asyncio.run(scenario())


def test_kernel_exit_is_told_after_its_last_words(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                started = await gateway.start()
                code = "import os\nfor i in range(500): print(i, flush=True)\n"
                code += "import sys, time; sys.stdout.flush(); time.sleep(0.3); os._exit(7)"
                cell = await gateway.begin(code)
                exited = await gateway.until(lambda: gateway.event("kernel_exited"))
                assert exited == {
                    "exit_code": 7,
                    "signal": None,
                    "expected": False,
                    "pid": started["pid"],
                }
                numbers = gateway.cell(cell).stdout.split()
                assert numbers == [str(i) for i in range(500)]
                index = next(i for name, _, i in gateway.events if name == "kernel_exited")
                assert index > max(got.index for got in gateway.got)
                health = (await served.get("/health")).json()
                assert health["kernel"] == "exited"
                assert (await gateway.call("interrupt")) == {"delivered": False}
                assert (await gateway.start())["pid"] != started["pid"]

    asyncio.run(scenario())


def test_restart_gives_a_new_process_and_keeps_the_link(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                first = await gateway.start()
                await gateway.execute("x = 1")
                call_id = gateway.post_call(
                    "restart", {"key": KEY, "kernel_name": None, "grace_s": 0}
                )
                meant_for_the_new_one = gateway.post(
                    Channel.SHELL, "execute_request", {"code": "'x' in globals()"}
                )
                await gateway.flush()
                second, _ = await gateway.result(call_id)
                assert second["pid"] != first["pid"]
                assert (await gateway.finish(meant_for_the_new_one)).value == "False"
                exited = gateway.event("kernel_exited")
                assert exited is not None
                assert exited["expected"] is True
                with pytest.raises(CallFailedError) as failed:
                    await gateway.start()
                assert failed.value.code == "already_running"

    asyncio.run(scenario())


def test_shutdown_ends_the_kernel_gracefully_and_twice(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                await gateway.start()
                await gateway.request("shutdown_request", {"restart": False}, Channel.CONTROL)
                assert await gateway.call("shutdown", now=False) == {}
                exited = await gateway.until(lambda: gateway.event("kernel_exited"))
                assert exited["expected"] is True
                assert exited["signal"] is None
                assert "shutdown_reply" in [got.kind for got in gateway.got]
                assert await gateway.call("shutdown", now=True) == {}

    asyncio.run(scenario())


def test_a_killed_kernel_and_signals(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                started = await gateway.start()
                await gateway.execute("1")
                os.kill(started["pid"], signal.SIGKILL)
                exited = await gateway.until(lambda: gateway.event("kernel_exited"))
                assert exited["signal"] == signal.SIGKILL
                assert exited["expected"] is False
                assert (await gateway.call("signal", signum=9)) == {"delivered": False}

    asyncio.run(scenario())


def test_a_cut_link_resumes_without_loss(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            await gateway.connect(served)
            await gateway.start()
            cell = await gateway.begin("for i in range(2000): print(i, flush=True)")
            for count in (100, 400, 900):
                await gateway.until(lambda n=count: len(gateway.cell(cell).messages) > n)
                await gateway.drop()
                await gateway.connect(served)
            done = await gateway.finish(cell)
            assert done.stdout.split() == [str(i) for i in range(2000)]
            await gateway.drop()

    asyncio.run(scenario())


def test_the_newest_link_replaces_the_older(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            old = GatewaySide()
            await old.run(served)
            await old.connect(served)
            await old.start()
            new = GatewaySide(epoch=2)
            new.private = old.private
            new.core = new.fresh_core()
            async with new.link(served):
                await old.until(lambda: old.close_code is not None)
                assert old.close_code == 4001
                assert (await new.execute("1 + 1")).value == "2"
                with pytest.raises(LinkRefusedError, match="stale_epoch"):
                    await old.connect(served)
                assert (await new.execute("1 + 2")).value == "3"
            await old.drop()

    asyncio.run(scenario())


def test_strangers_are_refused_and_disturb_nobody(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            early = GatewaySide()
            with pytest.raises(LinkRefusedError, match="not_running"):
                await early.connect(served)
            await early.drop()
            await gateway.run(served)
            async with gateway.link(served):
                await gateway.start()
                stranger = GatewaySide()
                with pytest.raises(LinkRefusedError, match="bad_signature"):
                    await stranger.connect(served)
                await stranger.drop()
                for garbage in (b"", b"\xff" * 40, "text"):
                    raw = await open_socket(served)
                    await raw.recv()
                    await raw.send(garbage)
                    await raw.wait_closed()
                    assert raw.close_code == 1002
                assert (await gateway.execute("1")).value == "1"

    asyncio.run(scenario())


def test_sockets_in_the_handshake_are_bounded(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            silent = [await open_socket(served) for _ in range(4)]
            for one in silent:
                await one.recv()
            one_more = await open_socket(served)
            await one_more.wait_closed()
            assert one_more.close_code == 1008
            await silent.pop().close()
            async with gateway.link(served):
                assert (await gateway.call("activity"))["kernel_alive"] is False
            for one in silent:
                await one.close()

    asyncio.run(scenario())


def test_garbage_on_an_established_link_closes_it_and_it_can_resume(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            await gateway.connect(served)
            await gateway.start()
            assert gateway._socket is not None
            await gateway._socket.send(b"\x10" + b"\xff" * 60)
            await gateway.until(lambda: gateway.close_code is not None)
            assert gateway.close_code == 1002
            await gateway.drop()
            async with gateway.link(served):
                assert (await gateway.execute("1")).value == "1"

    asyncio.run(scenario())


def test_a_repeated_request_is_answered_and_not_run_again(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                await gateway.start()
                message = gateway.session.msg("execute_request", {"code": "n = 1 + n"})
                await gateway.execute("n = 0")
                parts = gateway.session.serialize(message)[1:]
                msg_id = message["header"]["msg_id"]
                from kernel_guest.shared.messages import jupyter

                gateway.core.send(jupyter(Channel.SHELL, parts))
                await gateway.flush()
                await gateway.finish(msg_id)
                gateway.core.send(jupyter(Channel.SHELL, parts))
                await gateway.flush()
                await gateway.until(lambda: gateway.cell(msg_id).kinds.count("status") == 3)
                assert gateway.cell(msg_id).kinds.count("execute_reply") == 2
                assert (await gateway.execute("n")).value == "1"

    asyncio.run(scenario())


def test_a_gateway_that_lost_its_memory_gets_what_it_had_not_taken(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            crashed = GatewaySide()
            await crashed.run(served)
            await crashed.connect(served)
            await crashed.start()
            await crashed.execute("n = 0")
            crashed.reading.clear()
            msg_id = await crashed.begin("n += 1\nfor i in range(300): print(i, flush=True)\nn")
            await passes_until(lambda: served.agent.traffic.requests.running == 1)
            await crashed.drop()
            await passes_until(lambda: served.agent.traffic.requests.running == 0)

            heir = GatewaySide(epoch=2)
            heir.private, heir.session = crashed.private, crashed.session
            heir.core = heir.fresh_core()
            async with heir.link(served):
                done = await heir.finish(msg_id)
                assert done.stdout.split() == [str(i) for i in range(300)]
                assert done.value == "1"
                assert (await heir.execute("n")).value == "1"

    asyncio.run(scenario())


def test_endless_output_nobody_reads_is_bounded_and_can_be_interrupted(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide(limits=LinkLimits(ordered_window_bytes=128 * 1024))
            await gateway.run(
                served, journal=JournalBounds(memory_bytes=800_000, disk_bytes=400_000)
            )
            await gateway.connect(served)
            await gateway.start()
            await gateway.execute("1")
            gateway.reading.clear()
            code = "i, x = 0, 'x' * 2000\nwhile True:\n    print(i, x, flush=True); i += 1"
            endless = await gateway.begin(code)
            journal = served.agent.link.journal
            assert journal is not None
            await passes_until(lambda: journal.statistics().dropped_messages > 100)
            call_id = gateway.post_call("interrupt", {})
            await gateway.flush()
            await passes_until(lambda: not served.agent.traffic.requests.executing)
            full = journal.statistics()
            assert full.merged > 0
            assert full.memory_bytes < 900_000
            assert full.disk_bytes <= 400_000
            gateway.reading.set()
            done = await gateway.finish(endless)
            assert (await gateway.result(call_id))[0] == {"delivered": True}
            assert done.status == "error"
            assert sum(gap["messages"] for gap in gateway.gaps) == full.dropped_messages
            numbers = [int(word) for word in done.stdout.split() if word.isdigit()]
            assert numbers[:300] == list(range(300))
            assert numbers == sorted(numbers)
            await gateway.drop()

    asyncio.run(scenario())


def test_nobody_reading_ends_in_the_journal_and_then_in_a_gap(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide(limits=LinkLimits(ordered_window_bytes=256 * 1024))
            bounds = JournalBounds(memory_bytes=400_000, disk_bytes=500_000)
            await gateway.run(served, journal=bounds)
            await gateway.connect(served)
            await gateway.start()
            await gateway.execute("1")
            gateway.reading.clear()
            cell = await gateway.begin(
                "from IPython.display import display\n"
                "for i in range(3000): display(str(i) + 'x' * 1000)"
            )
            journal = served.agent.link.journal
            assert journal is not None
            await passes_until(lambda: served.agent.traffic.requests.running == 1)
            await passes_until(lambda: served.agent.traffic.requests.running == 0)
            full = journal.statistics()
            assert full.disk_bytes <= 500_000
            assert full.memory_bytes <= 500_000
            files = list((machine.folder / "journal").iterdir())
            assert files
            assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
            gateway.reading.set()
            done = await gateway.finish(cell)
            shown = [got for got in done.messages if got.kind == "display_data"]
            assert done.status == "ok"
            assert len(gateway.gaps) >= 1
            assert len(shown) + sum(gap["messages"] for gap in gateway.gaps) == 3000
            assert not list((machine.folder / "journal").iterdir())
            await gateway.drop()

    asyncio.run(scenario())


def test_files_over_the_link(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                data = os.urandom(700_000)
                size = len(data)
                first = gateway.post_call(
                    "put_file", {"path": "d/a.bin", "offset": 0}, data[:400_000], Lane.ORDERED
                )
                last = gateway.post_call(
                    "put_file",
                    {"path": "d/a.bin", "offset": 400_000, "final": True, "size": size},
                    data[400_000:],
                    Lane.ORDERED,
                )
                await gateway.flush()
                await gateway.result(first)
                await gateway.result(last)
                await gateway.start()
                assert (await gateway.execute("len(open('d/a.bin','rb').read())")).value == "700000"
                await gateway.execute("open('out.csv','w').write('1,2')")
                found = await gateway.call("list_files", lane=Lane.ORDERED, globs=["*.csv"])
                assert [file["path"] for file in found["files"]] == ["out.csv"]
                read = gateway.post_call(
                    "get_file", {"path": "out.csv", "offset": 0, "length": 100}, lane=Lane.ORDERED
                )
                await gateway.flush()
                result, blob = await gateway.result(read)
                assert result["eof"] is True
                assert blob == b"1,2"
                with pytest.raises(CallFailedError) as failed:
                    await gateway.call("get_file", path="../x", offset=0, length=1)
                assert failed.value.code == "path_refused"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("op", "args", "code"),
    [
        ("nonsense", {}, "unknown_call"),
        ("start", {}, "bad_request"),
        ("start", {"key": KEY, "env": {"A": 1}}, "bad_request"),
        ("start", {"key": KEY, "signature_scheme": "rot13"}, "bad_request"),
        ("start", {"key": KEY, "kernel_name": "cobol"}, "unknown_kernel"),
        ("start", {"key": KEY, "cwd": "../.."}, "path_refused"),
        ("signal", {"signum": -1}, "bad_request"),
        ("restart", {"key": KEY, "grace_s": "long"}, "bad_request"),
        ("put_file", {"path": "a", "offset": -1}, "bad_request"),
        ("list_files", {"globs": []}, "bad_request"),
        ("checkpoint", {}, "no_store"),
    ],
)
def test_calls_that_make_no_sense_get_an_answer(
    machine: Machine, op: str, args: dict[str, object], code: str
) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                with pytest.raises(CallFailedError) as failed:
                    await gateway.call(op, **args)
                assert failed.value.code == code

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/health/../x", 404, "not_found"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("DELETE", "/keepawake", 405, "method_not_allowed"),
        ("GET", "/link", 400, "bad_request"),
    ],
)
def test_bad_requests_have_one_error_shape(
    machine: Machine, method: str, path: str, status: int, code: str
) -> None:
    async def scenario(served: Served) -> None:
        answer = await served.http(method, path)
        assert answer.status_code == status
        if path != "/link":  # tornado itself answers a plain request there
            assert answer.json()["error"]["code"] == code
            assert answer.headers["content-type"].startswith("application/json")
        assert (await served.get("/keepawake")).status_code == 204

    async def main() -> None:
        async with serving(machine) as served:
            await scenario(served)

    asyncio.run(main())


def test_raw_garbage_and_large_bodies_do_not_end_the_agent(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            for garbage in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET /\r\n\r\n", b"\0" * 70_000):
                reader, writer = await asyncio.open_unix_connection(str(served.address))
                writer.write(garbage + b"\r\n\r\n")
                with suppress(ConnectionResetError):
                    await asyncio.wait_for(reader.read(), 10)
                writer.close()
            large = json.dumps({"microvmId": "m", "runHookPayload": "x" * 200_000})
            answer = await served.hook("run", content=large.encode())
            assert answer.status_code in (400, 413)
            assert (await served.get("/health")).status_code == 200

    asyncio.run(scenario())
