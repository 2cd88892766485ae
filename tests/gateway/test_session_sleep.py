"""Sleep, doubt and recovery of real kernels: parking, tokens, an unreachable service."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.clock import SystemClock
from gateway.control import Control
from gateway.embedded import access_of
from gateway.errors import GatewayError, TeardownPending, Throttled, Unreachable
from gateway.lifecycle import Phase
from gateway.session import machine as machine_module
from gateway.tokens import Token
from tests.gateway.session_kit import Kit


class TroubledControl(Control):
    """The real client, with the network to the service in the test's hands."""

    def __init__(self, kit: Kit) -> None:
        super().__init__(lambda: access_of(kit.profile), SystemClock())
        self.broken: set[str] = set()
        self.calls: list[str] = []
        self.throttled = 0

    async def call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        self.calls.append(operation)
        if self.throttled and operation == "run_microvm":
            self.throttled -= 1
            raise Throttled(operation, 0.01)
        if operation in self.broken or "*" in self.broken:
            raise Unreachable("the service", "the test has cut the cable")
        return await super().call(operation, **parameters)


def test_an_idle_kernel_is_parked_and_the_next_cell_finds_it_as_it_was(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        profile = kit.changed(park_after_s=0.2)
        async with kit.kernel(profile=profile) as kernel:
            await kernel.execute("x = 7")
            await kernel.until(lambda: kernel.session.phase is Phase.PARKED)
            assert not kernel.session._record.needs_machine().link.is_open
            assert (await kit.control.get(kernel.session.microvm_id)).state == "RUNNING"
            assert (await kernel.execute("x")).value == "7"

    local_service.run(steps)


def test_a_busy_kernel_is_not_parked(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        profile = kit.changed(park_after_s=0.2)
        async with kit.kernel(profile=profile) as kernel:
            await kernel.execute("import time; time.sleep(1.5)")
            parked = [
                event
                for event in kernel.events
                if event.name == "phase" and event.facts["phase"] == "parked"
            ]
            assert parked == []

    local_service.run(steps)


def test_output_of_a_thread_while_parked_arrives_with_the_next_wake(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel(profile=kit.changed(park_after_s=0.2)) as kernel:
            cell = kernel.send_code(
                "import threading, time\n"
                "def late():\n time.sleep(1.5); print('late', flush=True)\n"
                "threading.Thread(target=late).start()"
            )
            await kernel.until(lambda: kernel.session.phase is Phase.PARKED)
            await kernel.execute("time.sleep(2)")
            result = await kernel.result(cell)
            assert result.text == "late\n"

    local_service.run(steps)


def test_an_expired_token_is_replaced_once(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            machine = kernel.session._record.needs_machine()
            stale = Token(machine.microvm_id, 8080, 1e12, 60.0, {"X-aws-proxy-auth": "not-a-jwe"})
            machine._keeper._token = Token(stale.microvm_id, 8080, now(), 60.0, stale.headers)
            kernel.cut_link()
            await kernel.until(lambda: "sandbox_suspect" in kernel.names())
            await kernel.until(lambda: kernel.session.phase is Phase.READY)
            assert machine.mints == 2
            assert (await kernel.execute("1")).value == "1"

    local_service.run(steps)


def now() -> float:
    return SystemClock().monotonic_s()


def test_an_unreachable_service_costs_nothing_but_time(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        control = TroubledControl(kit)
        async with kit.kernel(control=control) as kernel:
            await kernel.execute("x = 1")
            control.broken.add("*")
            kernel.cut_link()
            await kernel.until(lambda: kernel.session.phase is Phase.UNREACHABLE)
            assert kernel.session.exit_status() is None
            request = kernel.send_code("x + 1")
            control.broken.clear()
            assert (await kernel.result(request)).value == "2"
            assert kernel.deaths == []
            assert "control_unreachable" in kernel.names()
            assert control.calls.count("run_microvm") == 1

    local_service.run(steps)


def test_a_wake_that_fails_is_tried_again(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        control = TroubledControl(kit)
        async with kit.kernel(control=control) as kernel:
            await kernel.session.suspend()
            kernel.session._record.needs_machine()._keeper.forget()
            control.broken.add("create_microvm_auth_token")
            request = kernel.send_code("40 + 2")
            await kernel.until(lambda: kernel.session.phase is Phase.UNREACHABLE)
            control.broken.clear()
            assert (await kernel.result(request)).value == "42"

    local_service.run(steps)


def test_a_release_does_not_wait_behind_an_outage_and_can_be_repeated(
    local_service: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "TEARDOWN_TIMEOUT_S", 0.2)

    async def steps(kit: Kit) -> None:
        control = TroubledControl(kit)
        async with kit.kernel(control=control) as kernel:
            control.broken.add("*")
            kernel.cut_link()
            await kernel.until(lambda: kernel.session.phase is Phase.UNREACHABLE)
            with pytest.raises(Unreachable):
                await kernel.session.release()
            assert kernel.session.phase is Phase.STOP_PENDING
            control.broken = {"terminate_microvm"}
            with pytest.raises((Unreachable, TeardownPending)):
                await kernel.session.release()
            control.broken.clear()
            await kernel.session.release()
            assert kernel.session.phase is Phase.STOPPED
            names = kernel.names()
            assert names.count("teardown_pending") == 2
            assert names.count("teardown_complete") == 1

    local_service.run(steps)


def test_many_releases_are_one(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        control = TroubledControl(kit)
        async with kit.kernel(control=control) as kernel:
            await asyncio.gather(*(kernel.session.release() for _ in range(5)))
            assert control.calls.count("terminate_microvm") == 1

    local_service.run(steps)


def test_an_explicit_suspend_by_the_profile(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        profile = kit.changed(park_after_s=0.2, suspend_after_s=0.2)
        async with kit.kernel(profile=profile) as kernel:
            await kernel.until(lambda: kernel.session.phase is Phase.ASLEEP)
            assert (await kernel.execute("1")).value == "1"

    local_service.run(steps)


def test_unattended_work_sleeps_after_a_notice_and_stays_so(
    local_service: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.activity.NOTICE_GRACE_S", 0.1)

    async def steps(kit: Kit) -> None:
        async with kit.kernel(profile=kit.changed(max_unattended_awake_s=0.3)) as kernel:
            cell = kernel.send_code("import time\nfor i in range(200): time.sleep(0.02)\n'done'")
            await kernel.until(lambda: kernel.session.phase is Phase.ASLEEP)
            assert not kernel.finished(cell)
            assert any("unattended" in str(event.facts["reason"]) for event in kernel.events)
            assert kernel.session.phase is Phase.ASLEEP
            for _ in range(100):  # somebody who looks in again, until it is done
                kernel.send("complete_request", {"code": "pri", "cursor_pos": 3})
                await kernel.until(lambda: kernel.session.phase is Phase.READY)
                await kernel.until(
                    lambda: kernel.finished(cell) or kernel.session.phase is Phase.ASLEEP
                )
                if kernel.finished(cell):
                    break
            assert (await kernel.result(cell)).value == "'done'"

    local_service.run(steps)


def test_a_machine_that_the_service_put_to_sleep_under_a_cell_is_woken(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            cell = kernel.send_code("import time\nfor i in range(50): time.sleep(0.02)\n'done'")
            await kernel.until(lambda: kernel.answers(cell))
            await kit.control.suspend(kernel.session.microvm_id)
            assert (await kernel.result(cell)).value == "'done'"
            assert "resume_running" in kernel.names()

    local_service.run(steps)


def test_nothing_secret_is_in_what_a_session_says(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            await kernel.session.suspend()
            await kernel.execute("1")
            machine = kernel.session._record.needs_machine()
            token = machine._keeper.token
            assert token
            secrets = [*token.headers.values(), kernel.key.decode()]
            access = kit.control._access
            assert access
            secrets.append(str(access.secret_access_key))
        said = [repr(event.as_dict()) for event in kernel.events]
        said += [repr(kernel.session), repr(machine), repr(machine.link), repr(kernel.request)]
        said += [repr(kernel.session.statistics()), repr(kit.control), repr(access)]
        for secret in secrets:
            assert all(secret not in text for text in said)

    local_service.run(steps)


def test_a_request_during_the_suspend_is_served(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            suspending = asyncio.ensure_future(kernel.session.suspend())
            await kernel.until(lambda: kernel.session.phase is Phase.SUSPENDING)
            request = kernel.send_code("6 * 7")
            assert (await kernel.result(request)).value == "42"
            await suspending
            phases = [e.facts["phase"] for e in kernel.events if e.name == "phase"]
            assert phases[-4:] == ["suspending", "asleep", "waking", "ready"]

    local_service.run(steps)


def test_a_throttled_launch_waits_and_says_so(
    local_service: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.session.booting.BACKOFF_FIRST_S", 0.01)

    async def steps(kit: Kit) -> None:
        control = TroubledControl(kit)
        control.throttled = 2
        async with kit.kernel(control=control) as kernel:
            assert kernel.names().count("launch_backoff") == 2
        control.throttled = 1000
        profile = kit.changed(launch_timeout_s=0.1)
        async with kit.kernel(control=control, profile=profile, start=False) as kernel:
            with pytest.raises(Throttled):
                await kernel.session.start(kernel.request)

    local_service.run(steps)


@pytest.mark.parametrize("moment", ["launch_started", "auth_token_created", "runtime_initialized"])
def test_a_release_in_the_middle_of_a_start_leaves_nothing(local_service: Kit, moment: str) -> None:
    async def steps(kit: Kit) -> None:
        before = {info.microvm_id for info in await kit.control.list()}
        async with kit.kernel(start=False) as kernel:
            starting = asyncio.ensure_future(kernel.session.start(kernel.request))
            await kernel.until(lambda: moment in kernel.names())
            await kernel.session.release()
            with pytest.raises(GatewayError):
                await starting
            assert kernel.session.phase is Phase.STOPPED
        states = [i.state for i in await kit.control.list() if i.microvm_id not in before]
        assert set(states) <= {"TERMINATED"}

    local_service.run(steps)


def test_a_release_in_the_middle_of_a_restart_leaves_nothing(local_service: Kit) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel() as kernel:
            restarting = asyncio.ensure_future(kernel.session.restart_kernel(kernel.request))
            await kernel.until(lambda: kernel.names().count("runtime_initialized") == 2)
            await kernel.session.release()
            with pytest.raises(GatewayError):
                await restarting
            assert kernel.session.phase is Phase.STOPPED

    local_service.run(steps)
