"""Hooks: idempotent, harmless when forged, honest about the checkpoint."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kernel_guest.checkpoint import CheckpointRefused, Saved
from kernel_guest.hooks import ClockWatch
from kernel_guest.shared.manifest import blob_name, decode_manifest
from tests.guest.gateway_side import GatewaySide, Served, Store, Workspace, serving
from tests.guest.machines import Machine

NAMES = ("ready", "validate", "run", "resume", "suspend", "terminate")


def with_store(folder: Path) -> dict[str, Any]:
    return {"store": Store(f"file://{folder}/store", "sessions/one")}


def stored(folder: Path) -> dict[str, bytes]:
    root = folder / "store/sessions/one"
    name = json.loads((root / "generations/1.json").read_text())["manifest"]
    manifest = decode_manifest((root / "manifests" / name).read_bytes())
    return {e.path: (root / blob_name(e.sha256)).read_bytes() for e in manifest.files}


def test_the_life_of_a_machine(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            assert (await served.hook("ready")).json() == {"ready": True}
            validated = (await served.hook("validate")).json()
            assert validated["cold"] is False
            await gateway.run(served, **with_store(machine.folder))
            async with gateway.link(served):
                await gateway.start()
                await gateway.execute("open('kept.txt', 'w').write('before suspend')")
                answer = await served.hook("suspend")
                assert answer.status_code == 200
                assert answer.json()["checkpoint"]["files"] == 1
                assert stored(machine.folder) == {"kept.txt": b"before suspend"}
                assert (await served.hook("resume")).status_code == 200
                assert (await gateway.execute("open('kept.txt').read()")).status == "ok"

    asyncio.run(scenario())


def test_validate_leaves_no_process_and_no_file(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            ended = asyncio.Event()
            served.agent.host.on_exit(lambda *_: ended.set())
            for _ in range(2):
                ended.clear()
                assert (await served.hook("validate")).status_code == 200
                await asyncio.wait_for(ended.wait(), 10)
            assert not list(machine.folder.glob("validate-*"))
            assert not list((machine.folder / "run").iterdir())

    asyncio.run(scenario())


def test_the_first_run_counts_and_later_ones_are_409(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            first = await gateway.run(served)
            body = {"microvmId": "microvm-2", "runHookPayload": gateway.payload(generation=9)}
            for again in (body, {"microvmId": "microvm-1", "runHookPayload": gateway.payload()}):
                answer = await served.hook("run", again)
                assert answer.status_code == 409
                assert answer.json()["error"]["code"] == "already_running"
            health = (await served.get("/health")).json()
            assert health["boot_id"] == first["boot_id"]
            assert (health["microvm_id"], health["generation"]) == ("microvm-1", 1)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "bad_request"),
        (b"[]", "bad_request"),
        (b"{}", "bad_request"),
        (b"[" * 40_000, "bad_request"),
        (b'{"microvmId": 1, "runHookPayload": "{}"}', "bad_request"),
        (b'{"microvmId": "m", "runHookPayload": {}}', "bad_request"),
        (b'{"microvmId": "m", "runHookPayload": "{}"}', "bad_payload"),
        (b'{"microvmId": "m", "runHookPayload": "null"}', "bad_payload"),
    ],
)
def test_a_bad_run_is_400_and_a_good_one_still_works(
    machine: Machine, body: bytes, code: str
) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            answer = await served.hook("run", content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == code
            await GatewaySide().run(served)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"store": Store("s3://bucket", "p")}, "store_unsupported"),
        ({"store": Store("file://elsewhere/x", "")}, "bad_store"),
        ({"workspace": Workspace("folder", "/")}, "folder_not_allowed"),
    ],
)
def test_what_this_guest_cannot_do_is_refused_with_a_reason(
    machine: Machine, changes: dict[str, Any], code: str
) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            body = {"microvmId": "m", "runHookPayload": gateway.payload(**changes)}
            answer = await served.hook("run", body)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == code
            assert (await served.get("/health")).json()["boot_id"] is None
            await gateway.run(served)

    asyncio.run(scenario())


def test_a_host_folder_is_used_in_place_where_it_is_allowed(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNEL_GUEST_ALLOW_FOLDER", "1")
    (tmp_path / "data.csv").write_text("1,2")

    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(
                served, workspace=Workspace("folder", str(tmp_path)), **with_store(machine.folder)
            )
            async with gateway.link(served):
                await gateway.start()
                assert (await gateway.execute("open('data.csv').read()")).value == "'1,2'"
                cell = await gateway.execute("import os; 'PIP_TARGET' in os.environ")
                assert cell.value == "False"
            assert (await served.hook("suspend")).json() == {"checkpoint": None}

    asyncio.run(scenario())


def test_forged_hooks_do_no_lasting_harm(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served, **with_store(machine.folder))
            async with gateway.link(served):
                await gateway.start()
                busy = await gateway.begin("import time\nfor i in range(50): print(i, flush=True)")
                forged = [name for name in NAMES if name != "validate"] * 5
                answers = await asyncio.gather(
                    *(served.hook(name, {"microvmId": "x"}) for name in forged)
                )
                codes = {name: a.status_code for name, a in zip(forged, answers, strict=True)}
                assert codes == {
                    "ready": 200,
                    "run": 400,
                    "resume": 200,
                    "suspend": 200,
                    "terminate": 200,
                }
                assert len((await gateway.finish(busy)).stdout.split()) == 50
                assert (await gateway.execute("1")).value == "1"

    asyncio.run(scenario())


def test_hooks_before_run_are_harmless(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            for name in ("suspend", "resume", "terminate", "suspend"):
                assert (await served.hook(name)).status_code == 200
            await GatewaySide().run(served)

    asyncio.run(scenario())


def test_hooks_answer_while_the_kernel_is_stopped_in_a_loop(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served, **with_store(machine.folder))
            async with gateway.link(served):
                await gateway.start()
                await gateway.call("signal", signum=19)
                assert (await served.hook("suspend")).status_code == 200
                assert (await served.hook("resume")).status_code == 200
                await gateway.call("signal", signum=18)
                assert (await gateway.execute("1")).value == "1"

    asyncio.run(scenario())


def test_a_store_that_fails_does_not_keep_the_machine_awake(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            await GatewaySide().run(served, **with_store(machine.folder))
            (machine.folder / "store").write_text("not a folder")
            (machine.folder / "workspace/a").write_text("x")
            answer = await served.hook("suspend")
            assert answer.status_code == 200
            assert answer.json()["error"]["code"] == "store_failed"
            assert (await served.hook("terminate")).status_code == 200

    asyncio.run(scenario())


def test_a_checkpoint_out_of_time_keeps_the_machine_awake(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            await GatewaySide().run(served, **with_store(machine.folder))

            async def late(timeout_s: float) -> Saved:
                raise CheckpointRefused("out_of_time", "The checkpoint did not finish.")

            monkeypatch.setattr(served.agent, "checkpoint", late)
            answer = await served.hook("suspend")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "out_of_time"
            assert (await served.hook("terminate")).status_code == 200

    asyncio.run(scenario())


def test_not_ready_is_503(machine: Machine) -> None:
    async def scenario() -> None:
        async with serving(machine) as served:
            served.agent._open = False
            answer = await served.hook("ready")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "not_ready"

    asyncio.run(scenario())


def test_other_methods_and_names(machine: Machine) -> None:
    async def scenario(served: Served) -> None:
        answer = await served.hook("explode")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"

    async def main() -> None:
        async with serving(machine) as served:
            await scenario(served)

    asyncio.run(main())


def test_the_clock_watch_sees_a_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = 1000.0
    monkeypatch.setattr("kernel_guest.hooks.time.time", lambda: wall)
    monkeypatch.setattr("kernel_guest.hooks.time.monotonic", lambda: 5.0)
    watch = ClockWatch()
    assert watch.jump_s() == 0.0
    wall += 3600.0
    assert watch.jump_s() == 3600.0
    assert watch.jump_s() == 0.0
