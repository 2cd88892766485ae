"""The process engine over a stand-in guest: images, machines, exits, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from gateway.local.engines.environment import scrubbed, template_environment
from gateway.local.engines.process import ProcessEngine
from gateway.local.interfaces import Engine, EngineError, ImageBuildError, MachineSpec
from tests.local.engine_bench import WAYS, ask, engine_bench, facts, has_cgroups, until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux processes")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "cgroup" and not has_cgroups():
        pytest.skip("no writable cgroup v2 here")
    return str(request.param)


def test_the_engine_is_an_engine(tmp_path: Path) -> None:
    engine: Engine = ProcessEngine(tmp_path)
    assert "keeper=None" in repr(engine)


def test_a_started_machine_answers_on_its_private_sockets(way: str) -> None:
    async def scenario() -> None:
        async with engine_bench(way) as bench:
            machine = await bench.start()
            seen = await facts(machine)
            assert seen["pid"] == machine.pid
            assert seen["environ"]["KERNEL_GUEST_FOLDER"] == str(machine.folder)
            assert seen["environ"]["KERNEL_GUEST_ALLOW_FOLDER"] == "1"
            assert machine.folder.stat().st_mode & 0o777 == 0o700
            modes = {p.name: p.stat().st_mode & 0o777 for p in machine.folder.glob("*.sock")}
            assert modes == {"agent.sock": 0o600, "hook.sock": 0o600}
            assert (way == "cgroup") == (machine.folder.name in seen["cgroup"])
            await bench.engine.kill(machine)
            assert not machine.folder.exists()
            assert not psutil.pid_exists(machine.pid)
            await bench.engine.kill(machine)  # idempotent

    asyncio.run(scenario())


def test_other_ports_are_ports_of_the_loopback() -> None:
    async def scenario() -> None:
        async with engine_bench() as bench:
            machine = await bench.start()
            server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            reader, writer = await machine.open_port(port)
            assert await reader.read() == b""
            writer.close()
            server.close()
            with pytest.raises(OSError):
                await machine.open_port(port)

    asyncio.run(scenario())


def test_nothing_secret_of_our_environment_reaches_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "MY_TOKEN", "PYTHONPATH", "ODD"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("LC_TIME", "C")

    async def scenario() -> None:
        async with engine_bench() as bench:
            seen = await facts(await bench.start(bench.image(environment={"CHOSEN": "yes"})))
            environ = seen["environ"]
            assert "hidden" not in environ.values()
            assert environ["LC_TIME"] == "C"
            assert environ["CHOSEN"] == "yes"
            assert environ["PATH"].startswith(f"{sys.prefix}/bin:")

    asyncio.run(scenario())


def test_the_allow_list_is_short() -> None:
    given = {
        "HOME": "/h",
        "AWS_PROFILE": "p",
        "LC_ALL": "C",
        "https_proxy": "http://proxy:3128",
        "HTTP_PROXY": "http://me:secret@proxy:3128",
    }
    assert scrubbed(given) == {
        "HOME": "/h",
        "LC_ALL": "C",
        "https_proxy": "http://proxy:3128",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
    }
    made = template_environment({"PATH": "/bin"}, Path("/env"), {"PATH": "/own"})
    assert made == {"PATH": "/own"}


def test_an_init_that_ends_by_itself_is_reported_and_cleaned(way: str) -> None:
    async def scenario() -> None:
        async with engine_bench(way) as bench:
            machine = await bench.start()
            beating = await bench.start_beating(machine)
            await ask(machine, "/exit?7")
            await asyncio.wait_for(bench.exited.wait(), 10)
            assert bench.exits == [(machine.microvm_id, 7 << 8)]
            assert psutil.pid_exists(beating.pid)
            await bench.engine.kill(machine)
            assert not psutil.pid_exists(beating.pid)
            assert not machine.folder.exists()

    asyncio.run(scenario())


def test_an_init_that_ends_at_once_is_an_error_and_leaves_nothing() -> None:
    async def scenario() -> None:
        async with engine_bench() as bench:
            image = bench.image(environment={"INIT_ENDS": "1"})
            spec = bench.spec(image)
            try:
                machine = await bench.engine.start(spec)
            except EngineError as error:
                assert "wait status 768" in str(error)  # noqa: PT017 - one of two good ends
            else:  # its end came after `start`: then it is reported like any other
                await asyncio.wait_for(bench.exited.wait(), 10)
                assert bench.exits == [(spec.microvm_id, 3 << 8)]
                await bench.engine.kill(machine)
            assert not spec.folder.exists()

    asyncio.run(scenario())


def test_a_kill_is_not_reported_as_an_exit(way: str) -> None:
    async def scenario() -> None:
        async with engine_bench(way) as bench:
            await bench.engine.kill(await bench.start())
            other = await bench.start()
            await facts(other)
            assert bench.exits == []

    asyncio.run(scenario())


def test_concurrent_starts_share_one_template(way: str) -> None:
    async def scenario() -> None:
        async with engine_bench(way) as bench:
            image = bench.image()
            machines = await asyncio.gather(*(bench.start(image) for _ in range(10)))
            parents = {psutil.Process(machine.pid).ppid() for machine in machines}
            assert len(parents) == 1
            answers = await asyncio.gather(*(facts(machine) for machine in machines))
            assert [answer["pid"] for answer in answers] == [m.pid for m in machines]
            await asyncio.gather(*(bench.engine.kill(machine) for machine in machines))
            assert not any(psutil.pid_exists(machine.pid) for machine in machines)

    asyncio.run(scenario())


def test_a_dead_template_is_started_again_at_its_next_use(way: str) -> None:
    async def scenario() -> None:
        async with engine_bench(way) as bench:
            image = bench.image()
            machine = await bench.start(image)
            template = psutil.Process(psutil.Process(machine.pid).ppid())
            template.kill()
            await until(lambda: not bench.engine.has_template(image))
            assert (await facts(machine))["pid"] == machine.pid  # the stand-in does not die with it
            again = await bench.start(image)
            assert psutil.Process(again.pid).ppid() != template.pid
            os.kill(machine.pid, signal.SIGKILL)  # now a child of the keeper
            await asyncio.wait_for(bench.exited.wait(), 10)
            assert bench.exits == [(machine.microvm_id, signal.SIGKILL)]
            await bench.engine.kill(machine)
            assert psutil.pid_exists(again.pid)

    asyncio.run(scenario())


def test_the_number_of_idle_templates_is_bounded() -> None:
    async def scenario() -> None:
        async with engine_bench(max_templates=2) as bench:
            images = [bench.image(f"image{number}") for number in range(3)]
            used = await bench.start(images[0])
            await bench.engine.prepare_image(images[1])
            await bench.engine.prepare_image(images[2])
            # The oldest is in use, so the second oldest had to go.
            assert [bench.engine.has_template(image) for image in images] == [True, False, True]
            await bench.engine.prepare_image(images[1])
            await bench.engine.kill(used)
            assert sum(bench.engine.has_template(image) for image in images) == 2

    asyncio.run(scenario())


def test_a_released_image_keeps_its_machines() -> None:
    async def scenario() -> None:
        async with engine_bench() as bench:
            image = bench.image()
            machine = await bench.start(image)
            template = psutil.Process(psutil.Process(machine.pid).ppid())
            await bench.engine.release_image(image)
            assert not bench.engine.has_template(image)
            assert (await facts(machine))["pid"] == machine.pid
            await bench.engine.kill(machine)
            await until(lambda: not template.is_running())
            await bench.engine.release_image(image)  # nothing to release is fine

    asyncio.run(scenario())


def test_build_hooks_are_called_on_a_throwaway_machine() -> None:
    async def scenario() -> None:
        async with engine_bench() as bench:
            image = bench.image(ready_s=5.0, validate_s=5.0)
            await bench.engine.prepare_image(image)
            called = (image.folder / "trial.log").read_text().split()
            assert [path.rpartition("/")[2] for path in called[1::2]] == ["ready", "validate"]
            await bench.engine.prepare_image(bench.image("plain"), call_hooks=False)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("status", "limit_s", "reason"),
    [
        ("500", 5.0, "Ready hook invocation returned HTTP status 500"),
        ("503", 0.3, "Ready hook invocation timed out after PT0.3S"),
    ],
)
def test_a_failing_build_hook_fails_the_build(status: str, limit_s: float, reason: str) -> None:
    async def scenario() -> None:
        async with engine_bench() as bench:
            image = bench.image(ready_s=limit_s, environment={"HOOK_STATUS": status})
            with pytest.raises(ImageBuildError) as failure:
                await bench.engine.prepare_image(image)
            assert failure.value.reason == reason

    asyncio.run(scenario())


def test_an_environment_that_cannot_carry_a_kernel_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine_bench(template_module="no_such_guest") as bench:
            with pytest.raises(ImageBuildError, match="no_such_guest is not installed there; run"):
                await bench.engine.prepare_image(bench.image())
            with pytest.raises(ImageBuildError, match="no bin/python there"):
                await bench.engine.prepare_image(bench.image("other", prefix=tmp_path))
        async with engine_bench() as bench:
            image = bench.image(environment={"TEMPLATE_FAILS": "disk on fire"})
            with pytest.raises(ImageBuildError, match="did not start: RuntimeError: disk on fire"):
                await bench.engine.prepare_image(image)
            with pytest.raises(EngineError, match="disk on fire"):
                await bench.start(image)

    asyncio.run(scenario())


def test_a_folder_that_exists_or_is_too_long_is_refused() -> None:
    async def scenario() -> None:
        async with engine_bench() as bench:
            spec = bench.spec()
            long = MachineSpec("m", spec.image, bench.folder / ("m" * 90), spec.log_path)
            with pytest.raises(EngineError, match="too long"):
                await bench.engine.start(long)
            spec.folder.mkdir()
            (spec.folder / "precious").touch()
            with pytest.raises(EngineError, match="exists already"):
                await bench.engine.start(spec)
            (spec.folder / "precious").unlink()
            spec.folder.rmdir()

    asyncio.run(scenario())


def test_a_hostile_workspace_is_removed_too() -> None:
    async def scenario() -> None:
        async with engine_bench() as bench:
            machine = await bench.start()
            kept = bench.folder / "kept"
            kept.write_text("still here")
            locked = machine.folder / "workspace" / "locked"
            (locked / "inner").mkdir(parents=True)
            (locked / "link").symlink_to(kept)
            (locked / "inner").chmod(0)
            locked.chmod(0)
            await bench.engine.kill(machine)
            assert not machine.folder.exists()
            assert kept.read_text() == "still here"

    asyncio.run(scenario())
