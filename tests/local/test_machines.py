"""Machines over a scripted engine: hooks, policies, held requests, ends."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from gateway.local.clock import ManualClock, SystemClock
from gateway.local.faults.plan import parse_fault
from gateway.local.interfaces import NotAdmittedError
from gateway.local.lifecycle import Phase, RefusedError
from gateway.local.machines import INTERNAL_ERROR, Machine
from gateway.local.settings import ServiceSettings
from tests.local.in_process import ALL_HOOKS, LIMIT_S, House, house, run, spin_until

IDLE = (60, 300, True)


async def reach(machine: Machine, *phases: Phase) -> Phase:
    async with asyncio.timeout(LIMIT_S):
        return await machine.reached(*phases)


async def running(home: House, **options: Any) -> Machine:
    machine = await home.launch(**options)
    await reach(machine, Phase.RUNNING)
    return machine


async def suspended(home: House, **options: Any) -> Machine:
    machine = await running(home, **options)
    machine.suspend()
    await reach(machine, Phase.SUSPENDED)
    return machine


def manual(home: House) -> ManualClock:
    assert isinstance(home.clock, ManualClock)
    return home.clock


# -- launch


def test_a_launch_is_pending_until_the_run_hook_has_answered() -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await home.launch(payload="p")
            assert machine.record.state == "PENDING"
            assert machine.record.endpoint.startswith("http://127.0.0.1:")
            await reach(machine, Phase.RUNNING)
            body = {"microvmId": machine.microvm_id, "runHookPayload": "p"}
            assert home.script.calls == [("run", body)]

    run(scenario())


def test_without_a_payload_the_run_hook_gets_null() -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await running(home, payload=None)
            body = {"microvmId": machine.microvm_id, "runHookPayload": None}
            assert home.script.calls == [("run", body)]

    run(scenario())


def test_a_failing_run_hook_ends_the_machine_with_the_recorded_reason() -> None:
    async def scenario() -> None:
        async with house() as home:
            home.script.statuses["run"] = 400
            machine = await home.launch()
            await reach(machine, Phase.TERMINATED)
            assert machine.record.state_reason == (
                "Run lifecycle hook returned HTTP status 400. "
                "Please check your hook endpoint and application logs for more details."
            )
            assert machine.record.terminated_at == home.clock.now_s()
            assert home.script.hooks() == ["run"]  # no terminate hook
            assert "kill" in home.script.engine_calls

    run(scenario())


def test_a_hanging_run_hook_ends_the_machine_at_its_time_limit() -> None:
    async def scenario() -> None:
        async with house() as home:
            home.script.hanging.add("run")
            from dataclasses import replace

            machine = await home.launch(image=home.spec(replace(ALL_HOOKS, run_s=0.05)))
            await reach(machine, Phase.TERMINATED)
            assert "Run lifecycle hook timed out after PT0.05S" in str(machine.record.state_reason)

    run(scenario())


def test_an_image_without_hooks_is_running_at_once() -> None:
    async def scenario() -> None:
        async with house() as home:
            from gateway.local.interfaces import HookSettings

            machine = await running(home, image=home.spec(HookSettings()))
            machine.suspend()
            await reach(machine, Phase.SUSPENDED)
            machine.resume()
            await reach(machine, Phase.RUNNING)
            machine.terminate()
            await reach(machine, Phase.TERMINATED)
            assert home.script.calls == []

    run(scenario())


def test_a_missing_template_is_prepared_on_demand_without_build_hooks() -> None:
    async def scenario() -> None:
        async with house() as home:
            image = home.spec()
            home.engine.templates.clear()
            await running(home, image=image)
            assert home.script.engine_calls[:2] == ["prepare hooks=False", "start"]

    run(scenario())


@pytest.mark.parametrize("what", ["start", "template"])
def test_an_engine_that_cannot_start_it_says_why(what: str) -> None:
    async def scenario() -> None:
        async with house() as home:
            image = home.spec()
            if what == "start":
                home.script.failing.add("start")
            else:
                home.engine.templates.clear()
                home.script.build_failure = "template failed"
            machine = await home.launch(image=image)
            await reach(machine, Phase.TERMINATED)
            assert machine.record.state_reason == f"{what} failed"

    run(scenario())


def test_terminate_during_the_start_waits_for_it_and_leaves_nothing() -> None:
    async def scenario() -> None:
        async with house() as home:
            home.script.start_gate = asyncio.Event()
            machine = await home.launch()
            machine.terminate()
            assert machine.phase is Phase.TERMINATING
            home.script.start_gate.set()
            await reach(machine, Phase.TERMINATED)
            assert home.engine.machines == {}
            assert machine.record.state_reason == "Success."

    run(scenario())


def test_a_launch_delay_is_the_services_time() -> None:
    async def scenario() -> None:
        async with house(ServiceSettings(launch_delay_s=2.5)) as home:
            machine = await home.launch()
            clock = manual(home)
            await spin_until(lambda: clock.next_deadline_s() == 2.5)  # it has come to its delay
            assert machine.phase is Phase.LAUNCHING
            clock.advance(2.5)
            await reach(machine, Phase.RUNNING)

    run(scenario())


# -- suspend and resume


def test_suspend_calls_the_hook_then_freezes_and_resume_goes_the_other_way() -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await running(home)
            machine.suspend()
            assert machine.record.state == "SUSPENDING"
            await reach(machine, Phase.SUSPENDED)
            machine.resume()
            assert machine.record.state == "SUSPENDED"  # until the hook has answered
            machine.resume()  # joins
            await reach(machine, Phase.RUNNING)
            assert home.script.hooks() == ["run", "suspend", "resume"]
            assert home.script.engine_calls == ["start", "start", "freeze", "thaw"]

    run(scenario())


def test_a_failing_suspend_hook_keeps_the_machine_running() -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await running(home)
            home.script.statuses["suspend"] = 500
            machine.suspend()
            await reach(machine, Phase.RUNNING)
            assert "freeze" not in home.script.engine_calls

    run(scenario())


def test_a_failing_freeze_keeps_the_machine_running() -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await running(home)
            home.script.failing.add("freeze")
            machine.suspend()
            assert await reach(machine, Phase.RUNNING, Phase.SUSPENDED) is Phase.RUNNING

    run(scenario())


@pytest.mark.parametrize("failure", ["hook", "thaw", "fault"])
def test_a_failing_resume_leaves_it_suspended(failure: str) -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await suspended(home, idle=IDLE)
            if failure == "hook":
                home.script.statuses["resume"] = 500
            elif failure == "thaw":
                home.script.failing.add("thaw")
            else:
                home.faults.add(parse_fault({"kind": "resume-hook"}))
            with pytest.raises(NotAdmittedError):
                await machine.admit()
            assert machine.phase is Phase.SUSPENDED
            home.script.statuses.clear()
            home.script.failing.clear()
            await machine.admit()
            assert machine.phase is Phase.RUNNING

    run(scenario())


def test_faults_make_hooks_fail_without_calling_them() -> None:
    async def scenario() -> None:
        async with house() as home:
            home.faults.add(parse_fault({"kind": "run-hook"}))
            machine = await home.launch()
            await reach(machine, Phase.TERMINATED)
            assert "returned HTTP status 500" in str(machine.record.state_reason)
            machine = await running(home)
            home.faults.add(parse_fault({"kind": "suspend-hook"}))
            machine.suspend()
            assert await reach(machine, Phase.RUNNING, Phase.SUSPENDED) is Phase.RUNNING

    run(scenario())


def test_state_changes_in_the_wrong_state_are_refused() -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await running(home)
            with pytest.raises(RefusedError):
                machine.resume()
            machine.suspend()
            with pytest.raises(RefusedError):
                machine.suspend()
            await reach(machine, Phase.SUSPENDED)
            with pytest.raises(RefusedError):
                machine.suspend()

    run(scenario())


# -- policies


def test_an_idle_machine_is_suspended_and_ends_with_its_window() -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await running(home, idle=IDLE)
            manual(home).advance(40)
            machine.note_inbound(1)
            manual(home).advance(59)
            assert machine.phase is Phase.RUNNING
            manual(home).advance(1)
            await reach(machine, Phase.SUSPENDED)
            manual(home).advance(300)
            await reach(machine, Phase.TERMINATED)
            assert machine.record.state_reason == "MicroVM exceeded maximum suspended duration."
            assert home.script.hooks() == ["run", "suspend"]

    run(scenario())


def test_the_maximum_duration_ends_a_machine_that_serves() -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await running(home, idle=IDLE, maximum_s=100)
            for _ in range(10):
                machine.note_inbound(1)
                manual(home).advance(10)
            await reach(machine, Phase.TERMINATED)
            assert machine.record.state_reason == "MicroVM exceeded maximum lifetime."
            assert home.script.hooks() == ["run", "terminate"]

    run(scenario())


# -- held requests


def test_a_request_is_held_while_pending() -> None:
    async def scenario() -> None:
        async with house() as home:
            home.script.start_gate = asyncio.Event()
            machine = await home.launch()
            held = asyncio.create_task(machine.admit())
            home.script.start_gate.set()
            assert (await held).microvm_id == machine.microvm_id
            assert machine.phase is Phase.RUNNING

    run(scenario())


def test_a_held_request_ends_when_the_launch_fails() -> None:
    async def scenario() -> None:
        async with house() as home:
            home.script.statuses["run"] = 500
            machine = await home.launch()
            with pytest.raises(NotAdmittedError):
                await machine.admit()

    run(scenario())


def test_a_request_is_refused_while_pending_by_the_other_switch() -> None:
    async def scenario() -> None:
        async with house(ServiceSettings(pending="502")) as home:
            home.script.start_gate = asyncio.Event()
            machine = await home.launch()
            with pytest.raises(NotAdmittedError):
                await machine.admit()
            home.script.start_gate.set()

    run(scenario())


def test_a_request_wakes_a_suspended_machine_after_its_resume_hook() -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await suspended(home, idle=IDLE)
            await asyncio.gather(*(machine.admit() for _ in range(5)))
            assert home.script.hooks() == ["run", "suspend", "resume"]

    run(scenario())


def test_a_request_during_suspending_is_served() -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await running(home, idle=IDLE)
            machine.suspend()
            await machine.admit()
            assert machine.phase is Phase.RUNNING
            assert home.script.hooks() == ["run", "suspend", "resume"]

    run(scenario())


@pytest.mark.parametrize("idle", [None, (60, 300, False)])
def test_without_auto_resume_a_suspended_machine_stays_so(
    idle: tuple[int, int, bool] | None,
) -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await suspended(home, idle=idle)
            with pytest.raises(NotAdmittedError):
                await machine.admit()
            assert machine.phase is Phase.SUSPENDED

    run(scenario())


def test_an_ended_machine_and_one_without_ingress_admit_nothing() -> None:
    async def scenario() -> None:
        async with house() as home:
            closed = await running(home, ingress=("x:NO_INGRESS",))
            with pytest.raises(NotAdmittedError):
                await closed.admit()
            closed.terminate()
            await reach(closed, Phase.TERMINATED)
            machine = await running(home)
            machine.terminate()
            with pytest.raises(NotAdmittedError):
                await machine.admit()

    run(scenario())


def test_a_request_is_not_held_for_ever() -> None:
    async def scenario() -> None:
        async with house(ServiceSettings(held_request_s=0.01)) as home:
            home.script.start_gate = asyncio.Event()
            machine = await home.launch()
            with pytest.raises(NotAdmittedError, match="too long"):
                await machine.admit()
            home.script.start_gate.set()

    run(scenario())


# -- the end


def test_terminate_calls_the_hook_and_is_idempotent() -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await running(home)
            home.script.statuses["terminate"] = 500  # best effort
            machine.terminate()
            machine.terminate()
            await reach(machine, Phase.TERMINATED)
            machine.terminate()
            assert home.script.hooks() == ["run", "terminate"]
            assert machine.record.state_reason == "Success."
            assert not list(home.folder.glob("machines/*"))

    run(scenario())


@pytest.mark.parametrize("phase", [Phase.SUSPENDING, Phase.RESUMING, Phase.SUSPENDED])
def test_terminate_interrupts_whatever_goes_on(phase: Phase) -> None:
    async def scenario() -> None:
        async with house() as home:
            if phase is Phase.SUSPENDING:
                machine = await running(home)
                home.script.hanging.add("suspend")
                machine.suspend()
                await home.script.until_called("suspend")
            else:
                machine = await suspended(home)
                if phase is Phase.RESUMING:
                    home.script.hanging.add("resume")
                    machine.resume()
                    await home.script.until_called("resume")
            assert machine.phase is phase
            machine.terminate()
            await reach(machine, Phase.TERMINATED)
            assert ("terminate" in home.script.hooks()) == (phase is Phase.SUSPENDING)
            assert home.engine.machines == {}

    run(scenario())


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.SUSPENDED])
def test_the_end_of_its_main_process_ends_the_machine(phase: Phase) -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await (running(home) if phase is Phase.RUNNING else suspended(home))
            home.engine.on_exit(machine.microvm_id, signal.SIGKILL)
            await reach(machine, Phase.TERMINATED)
            assert machine.record.state_reason == "MicroVM main process exited."
            assert home.engine.machines == {}
            home.engine.on_exit(machine.microvm_id, 0)  # late notice: nothing happens

    run(scenario())


def test_states_may_be_read_late() -> None:
    async def scenario() -> None:
        async with house(ServiceSettings(state_lag_s=5)) as home:
            machine = await running(home)
            assert machine.shown().state == "PENDING"
            manual(home).advance(5)
            assert machine.shown().state == "RUNNING"
            machine.terminate()
            await reach(machine, Phase.TERMINATED)
            assert machine.shown().state == "RUNNING"
            manual(home).advance(5)
            assert machine.shown().state == "TERMINATED"

    run(scenario())


def test_an_ended_machine_answers_for_a_while_and_then_its_port_is_closed() -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await running(home)
            port = int(machine.record.endpoint.rpartition(":")[2])
            machine.terminate()
            await reach(machine, Phase.TERMINATED)
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            manual(home).advance(31)
            await spin_until(lambda: not home.fleet.closing)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            assert home.fleet.record(machine.microvm_id) == machine.record  # still known

    run(scenario())


def test_the_end_of_the_service_ends_every_machine() -> None:
    async def scenario() -> None:
        async with house() as home:
            machines = [await running(home), await suspended(home), await home.launch()]
        assert [m.record.state for m in machines] == ["TERMINATED"] * 3
        assert {m.record.state_reason for m in machines} == {"The local service ended."}
        assert home.engine.machines == {}

    run(scenario())


def test_the_quota_counts_peaks_and_refuses_only_above() -> None:
    async def scenario() -> None:
        async with house(ServiceSettings(memory_quota_mib=8192)) as home:
            assert not home.fleet.over_quota()
            first = await running(home)
            assert not home.fleet.over_quota()  # 8192 is not above 8192
            await suspended(home)
            assert home.fleet.over_quota()
            first.terminate()
            await reach(first, Phase.TERMINATED)
            assert not home.fleet.over_quota()

    run(scenario())


def test_machines_work_in_real_time_too() -> None:
    async def scenario() -> None:
        async with house(clock=SystemClock()) as home:
            machine = await running(home, idle=IDLE)
            assert "RUNNING" in repr(machine)
            assert repr(home.fleet) == "<Fleet live=1 lingering=0>"

    run(scenario())


def test_a_kill_that_fails_is_tried_again_and_never_hangs_the_end() -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await running(home)
            home.script.failing.add("kill")
            machine.terminate()
            await reach(machine, Phase.TERMINATED)
            assert home.script.engine_calls.count("kill") == 3

    run(scenario())


def test_an_unforeseen_failure_ends_the_machine(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with house() as home:
            machine = await running(home)
            home.script.broken.add("freeze")
            machine.suspend()
            await reach(machine, Phase.TERMINATED)
            assert machine.record.state_reason == INTERNAL_ERROR
            assert home.engine.machines == {}

    run(scenario())
    assert "an activity failed" in caplog.text
