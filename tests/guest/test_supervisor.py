"""The kernel process as the agent runs it: kernels that are not our own, ends of every kind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_guest.shared.messages import Channel
from tests.guest.gateway_side import KEY, CallFailedError, GatewaySide, serving
from tests.guest.machines import Machine, TemplateProcess


def write_spec(folder: Path, name: str, argv: list[str], **more: object) -> None:
    spec = folder / "kernels" / name
    spec.mkdir(parents=True)
    content = {"argv": argv, "display_name": name, "language": "other", **more}
    (spec / "kernel.json").write_text(json.dumps(content))


@pytest.fixture
def foreign(template: TemplateProcess, short_folder: Path, tmp_path: Path) -> Iterator[Machine]:
    """A machine that has kernelspecs of its own."""
    stock = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    write_spec(tmp_path, "by-message", stock, interrupt_mode="message")
    write_spec(tmp_path, "dies", [sys.executable, "-c", "raise SystemExit(3)"])
    write_spec(tmp_path, "missing", ["/nonexistent/program"])
    with template.machine(short_folder, env={"JUPYTER_PATH": str(tmp_path)}) as made:
        yield made


def test_a_kernel_that_is_interrupted_by_message(foreign: Machine) -> None:
    async def scenario() -> None:
        async with serving(foreign) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                started = await gateway.start(kernel_name="by-message")
                assert started["interrupt_mode"] == "message"
                assert started["language"] == "other"
                assert started["cold"] is True
                await gateway.execute("1")
                busy = await gateway.begin("import time\nwhile True: time.sleep(0.01)")
                await gateway.until(lambda: "execute_input" in gateway.cell(busy).kinds)
                assert await gateway.call("interrupt") == {"delivered": True}
                assert (await gateway.finish(busy)).status == "error"
                assert "interrupt_reply" not in [got.kind for got in gateway.got]

    asyncio.run(scenario())


def test_a_kernel_that_dies_at_once_is_told(foreign: Machine) -> None:
    async def scenario() -> None:
        async with serving(foreign) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                for _ in range(3):
                    gateway.events.clear()
                    started = await gateway.start(kernel_name="dies")
                    exited = await gateway.until(lambda: gateway.event("kernel_exited"))
                    assert (exited["exit_code"], exited["pid"]) == (3, started["pid"])
                    assert exited["expected"] is False
                    names = [name for name, _, _ in gateway.events]
                    assert names == ["kernel_started", "kernel_exited"]
                with pytest.raises(CallFailedError):
                    await gateway.start(kernel_name="missing")
                assert (await served.get("/health")).json()["kernel"] == "exited"
                await gateway.start()
                assert (await gateway.execute("1")).value == "1"

    asyncio.run(scenario())


def test_restart_waits_for_a_kernel_that_leaves_by_itself(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                await gateway.start()
                await gateway.execute("1")
                await gateway.request("shutdown_request", {"restart": True}, Channel.CONTROL)
                await gateway.call("restart", key=KEY, kernel_name=None, grace_s=20)
                exited = gateway.event("kernel_exited")
                assert exited is not None
                assert (exited["exit_code"], exited["signal"]) == (0, None)
                assert (await gateway.execute("1")).value == "1"

    asyncio.run(scenario())


def test_restart_without_a_kernel_starts_one(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                await gateway.call("restart", key=KEY, kernel_name=None)
                assert (await gateway.execute("1")).value == "1"

    asyncio.run(scenario())


def test_a_restart_with_another_key_speaks_with_it(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                await gateway.start()
                await gateway.execute("1")
                await gateway.call("restart", key="another key", kernel_name=None, grace_s=0)
                gateway.session.key = b"another key"
                cell = await gateway.execute("2")
                assert cell.value == "2"
                assert all(
                    gateway.session.sign(list(got.parts[1:5])) == got.parts[0]
                    for got in cell.messages
                )

    asyncio.run(scenario())


def test_shutdown_ends_a_kernel_that_ignores_everything_but_kill(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                started = await gateway.start()
                await gateway.execute(
                    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
                )
                await gateway.call("shutdown", now=False)
                exited = await gateway.until(lambda: gateway.event("kernel_exited"))
                assert exited["signal"] == signal.SIGKILL
                assert exited["expected"] is True
                with pytest.raises(ProcessLookupError):
                    os.kill(started["pid"], 0)

    asyncio.run(scenario())


def test_a_child_that_keeps_the_sockets_delays_the_news_for_a_moment_only(
    machine: Machine,
) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                await gateway.start()
                code = "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(60)"
                await gateway.execute(code)
                await gateway.call("shutdown", now=True)
                assert await gateway.until(lambda: gateway.event("kernel_exited"), 10)

    asyncio.run(scenario())


def test_environment_arguments_and_folder_reach_the_kernel(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                await gateway.start(
                    env={"KERNEL_USERNAME": "someone", "TZ": "Asia/Tokyo"},
                    extra_arguments=["--Session.username=u"],
                    cwd="projects/one",
                )
                code = "import os, time; [os.environ['KERNEL_USERNAME'], os.getcwd(), time.tzname]"
                cell = await gateway.execute(code)
                assert "someone" in cell.value
                assert "workspace/projects/one" in cell.value
                assert "JST" in cell.value
                assert cell.reply is not None
                assert cell.reply.header["username"] == "u"

    asyncio.run(scenario())
