"""The kernel session against the real local service: real machines, guests and kernels."""

from __future__ import annotations

import asyncio
import signal

import pytest

from gateway.errors import GatewayError, ImageNotFound, MachineGone, WrongPhase
from gateway.lifecycle import Phase
from kernel_guest.shared.messages import Channel
from tests.gateway.session_kit import Kit


def test_a_kernel_starts_runs_and_leaves_nothing(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            assert kernel.session.phase is Phase.READY
            assert kernel.session.exit_status() is None
            assert kernel.session.kernel_info["implementation"] == "ipython"
            result = await kernel.execute("print('hello'); 6 * 7")
            assert result.text == "hello\n"
            assert result.value == "42"
            microvm_id = kernel.session.microvm_id
        assert kernel.session.phase is Phase.STOPPED
        assert kernel.session.exit_status() == 0
        assert (await kit.control.get(microvm_id)).state == "TERMINATED"
        names = [name for name in kernel.names() if name != "phase"]
        assert names == [
            "launch_started",
            "auth_token_created",
            "launch_running",
            "runtime_initialized",
            "runtime_healthcheck_started",
            "runtime_healthcheck_passed",
            "teardown_started",
            "teardown_complete",
        ]
        await kernel.session.release()  # idempotent

    local_service.run(steps)


def test_a_suspended_kernel_wakes_for_a_request_and_keeps_its_variables(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            await kernel.execute("x = 41")
            await kernel.session.suspend()
            assert kernel.session.phase is Phase.ASLEEP
            assert kernel.session.exit_status() is None
            assert (await kit.control.get(kernel.session.microvm_id)).state == "SUSPENDED"
            seen = len(kernel.messages)
            result = await kernel.execute("x + 1")
            assert result.value == "42"
            first = kernel.messages[seen]
            assert b'"busy"' in first[1][4]
            assert first[1][2] == b"{}"
            assert kernel.session.phase is Phase.READY
            assert "resume_running" in kernel.names()

    local_service.run(steps)


def test_small_talk_does_not_wake(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            await kernel.session.suspend()
            info = await kernel.result(kernel.send("kernel_info_request", {}))
            assert info.reply["implementation"] == "ipython"
            comms = await kernel.result(kernel.send("comm_info_request", {}))
            assert comms.reply["comms"] == {}
            assert kernel.session.phase is Phase.ASLEEP
            # a sleeping kernel is shut down without being woken
            kernel.send("shutdown_request", {"restart": False}, Channel.CONTROL)
            assert kernel.session.exit_status() == 0
            assert kernel.session.phase is Phase.ASLEEP
            assert kernel.deaths == []

    local_service.run(steps)


def test_a_cut_link_loses_nothing(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            running = kernel.send_code("for i in range(2000): print(i, flush=True)")
            for cut in range(3):
                await kernel.until(lambda done=200 * cut: len(kernel.answers(running)) > done)
                kernel.cut_link()
                await kernel.until(lambda n=cut: kernel.names().count("sandbox_suspect") > n)
                await kernel.until(lambda: kernel.session.phase is Phase.READY)
            result = await kernel.result(running)
            assert result.text == "".join(f"{i}\n" for i in range(2000))
            assert kernel.names().count("sandbox_suspect") == 3

    local_service.run(steps)


def test_a_killed_machine_ends_every_request_and_says_so_at_once(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            running = kernel.send_code("import time; time.sleep(100)")
            await kernel.until(lambda: kernel.answers(running))
            queued = kernel.send("complete_request", {"code": "pri", "cursor_pos": 3})
            await kit.control.terminate(kernel.session.microvm_id)
            await kernel.until(lambda: kernel.session.exit_status() is not None, within_s=5)
            assert kernel.session.phase is Phase.LOST
            assert not kernel.finished(running), "pollers must see the death first"
            result = await kernel.result(running, within_s=5)
            assert result.reply["ename"] == "OutcomeUnknown"
            assert result.outputs[-1][0] == "error"
            assert (await kernel.result(queued)).reply["status"] == "error"
            assert kernel.deaths == [1]

    local_service.run(steps)


def test_a_lost_machine_is_replaced_by_a_restart(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            first = kernel.session.microvm_id
            await kit.control.terminate(first)
            await kernel.until(lambda: kernel.session.phase is Phase.LOST)
            held = kernel.send_code("5 + 5")
            await kernel.session.restart_kernel(kernel.request)
            assert kernel.session.exit_status() is None
            assert kernel.session.microvm_id != first
            assert (await kernel.result(held)).value == "10"
            assert kernel.session.statistics()["generation"] == 2

    local_service.run(steps)


def test_a_machine_that_ended_in_its_sleep_is_found_lost_by_the_next_request(
    local_service: Kit,
) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            await kernel.session.suspend()
            await kit.control.terminate(kernel.session.microvm_id)
            request = kernel.send_code("1")
            await kernel.until(lambda: kernel.session.exit_status() is not None)
            assert (await kernel.result(request)).reply["ename"] == "NotExecuted"
            with pytest.raises(MachineGone):
                await kernel.session.list_files(["*"])

    local_service.run(steps)


def test_restart_in_place_keeps_the_machine_and_forgets_the_variables(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            await kernel.execute("x = 1")
            machine = kernel.session.microvm_id
            await kernel.session.restart_kernel(kernel.request)
            assert kernel.session.microvm_id == machine
            assert (await kernel.execute("'x' in globals()")).value == "False"

    local_service.run(steps)


def test_restart_wakes_a_sleeping_machine(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            await kernel.session.suspend()
            await kernel.session.shutdown_kernel(now=True)
            assert kernel.session.exit_status() == -9
            assert kernel.session.phase is Phase.ASLEEP
            await kernel.session.restart_kernel(kernel.request)
            assert (await kernel.execute("1 + 1")).value == "2"

    local_service.run(steps)


def test_a_kernel_that_dies_is_seen_and_can_be_started_again(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            request = kernel.send_code("import os; os._exit(7)")
            await kernel.until(lambda: kernel.session.exit_status() is not None)
            assert kernel.session.exit_status() == 7
            assert kernel.deaths == [7]
            assert kernel.session.phase is Phase.READY
            assert (await kernel.result(request)).reply["ename"] == "OutcomeUnknown"
            await kernel.session.restart_kernel(kernel.request)
            assert (await kernel.execute("1 + 1")).value == "2"

    local_service.run(steps)


def test_interrupt_signal_and_shutdown(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            running = kernel.send_code("print('on', flush=True)\nwhile True: pass")
            await kernel.until(lambda: any(k == "stream" for _, k, _ in kernel.answers(running)))
            await kernel.session.interrupt()
            assert (await kernel.result(running)).reply["ename"] == "KeyboardInterrupt"
            await kernel.session.signal(signal.SIGUSR2)
            await kernel.until(lambda: kernel.session.exit_status() is not None)
            assert kernel.session.exit_status() == -signal.SIGUSR2
            await kernel.session.restart_kernel(kernel.request)
            await kernel.session.shutdown_kernel(now=False)
            assert kernel.session.exit_status() is not None
            assert kernel.session.phase is Phase.READY

    local_service.run(steps)


def test_signals_to_what_is_gone_do_not_raise(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            await kernel.session.suspend()
            await kernel.session.interrupt()
            assert kernel.session.phase is Phase.ASLEEP
            await kernel.session.release()
            await kernel.session.interrupt()
            await kernel.session.signal(15)
            await kernel.session.shutdown_kernel(now=True)
            with pytest.raises(WrongPhase):
                await kernel.session.suspend()

    local_service.run(steps)


def test_files_go_both_ways(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel(profile=kit.changed(workspace_source="none")) as kernel:
            data = bytes(range(256)) * 6000
            await kernel.session.put_file("in/data.bin", data)
            await kernel.session.put_file("empty", b"", 0o600)
            listed = await kernel.session.list_files(["**/*"])
            assert {item["path"]: item["size"] for item in listed} == {
                "in/data.bin": len(data),
                "empty": 0,
            }
            assert (await kernel.execute("len(open('in/data.bin','rb').read())")).value == str(
                len(data)
            )
            assert await kernel.session.get_file("in/data.bin", len(data)) == data

    local_service.run(steps)


def test_two_suspends_in_the_middle_of_a_cell_are_invisible(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            running = kernel.send_code(
                "import time\nfor i in range(300):\n print(i, flush=True); time.sleep(0.005)"
            )
            for seen in (20, 150):
                await kernel.until(lambda n=seen: len(kernel.answers(running)) > n)
                await kernel.session.suspend()
            result = await kernel.result(running)
            assert result.text == "".join(f"{i}\n" for i in range(300))
            assert kernel.names().count("resume_running") == 2

    local_service.run(steps)


def test_input_reaches_a_cell_that_waited_in_its_sleep(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            running = kernel.send_code("input('name? ')", allow_stdin=True)
            await kernel.until(
                lambda: any(kind == "input_request" for _, kind, _ in kernel.answers(running))
            )
            await kernel.session.suspend()
            assert kernel.session.phase is Phase.ASLEEP  # waiting for a person is no work
            kernel.send("input_reply", {"value": "ada", "status": "ok"}, Channel.STDIN)
            assert (await kernel.result(running)).value == "'ada'"

    local_service.run(steps)


def test_a_start_that_fails_leaves_no_machine(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        before = {info.microvm_id for info in await kit.control.list()}
        async with kit.kernel(
            profile=kit.changed(kernel_name="no-such-language"), start=False
        ) as kernel:
            with pytest.raises(Exception, match="no-such-language"):
                await kernel.session.start(kernel.request)
            assert kernel.session.phase is Phase.STOPPED
            assert kernel.session.exit_status() is not None
        for info in await kit.control.list():
            assert info.microvm_id in before or info.state == "TERMINATED"

    local_service.run(steps)


def test_a_cancelled_start_leaves_no_machine(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        before = {info.microvm_id for info in await kit.control.list()}
        async with kit.kernel(start=False) as kernel:
            starting = asyncio.ensure_future(kernel.session.start(kernel.request))
            await kernel.until(lambda: "launch_started" in kernel.names())
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert kernel.session.phase is Phase.STOPPED
        for info in await kit.control.list():
            assert info.microvm_id in before or info.state == "TERMINATED"

    local_service.run(steps)


def test_a_kernel_that_dies_in_its_start_is_reported(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel(start=False) as kernel:
            request = kernel.request
            bad = type(request)(key=request.key, signature_scheme="hmac-nonsense")
            with pytest.raises(GatewayError):
                await kernel.session.start(bad)
            assert kernel.session.phase is Phase.STOPPED

    local_service.run(steps)


def test_an_unknown_image_is_said_in_one_sentence(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        arn = "arn:aws:lambda:us-east-1:000000000000:microvm-image:missing"
        profile = kit.changed(image_arn=arn, endpoint_url="set", region="us-east-1")
        async with kit.kernel(profile=profile, start=False) as kernel:
            with pytest.raises(ImageNotFound, match="missing"):
                await kernel.session.start(kernel.request)
            assert kernel.session.phase is Phase.STOPPED

    local_service.run(steps)
