"""The provisioner's contract with jupyter_client, against sessions that are told what to do.

Real managers, real sockets, the real bridge; only the kernel session is scripted, because these
tests are about what the provisioner does when a machine misbehaves. Whole ways with real machines
are in `tests/e2e`.
"""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import zmq
import zmq.asyncio
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager, KernelManager
from traitlets.config import Config

from gateway import provisioner as module
from gateway.bridge import bridge
from gateway.errors import (
    GatewayError,
    LaunchFailed,
    ProfileError,
    TeardownPending,
    Unreachable,
    UsageError,
)
from gateway.lifecycle import Phase
from gateway.provisioner import MicroVMProvisioner


class ScriptedSession:
    """A kernel session that keeps count, and fails where a test says so."""

    made: ClassVar[list[ScriptedSession]] = []
    fail: ClassVar[dict[str, BaseException]] = {}

    def __init__(self, kernel_id: str, profile: Any, *args: Any, **options: Any) -> None:
        self.kernel_id, self.profile, self.options = kernel_id, profile, options
        self.calls: list[str] = []
        self.requests: list[Any] = []
        self.phase = Phase.NEW
        self.microvm_id = "microvm-1"
        self.machines = 0
        self._exit: int | None = None
        ScriptedSession.made.append(self)

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fail:
            raise self.fail[call]

    async def start(self, request: Any) -> dict[str, Any]:
        self.requests.append(request)
        self._note("start")
        self.machines, self.phase, self._exit = 1, Phase.READY, None
        return {}

    async def restart_kernel(self, request: Any) -> dict[str, Any]:
        self.requests.append(request)
        self._note("restart")
        self._exit = None
        return {}

    async def shutdown_kernel(self, now: bool) -> None:
        self._note(f"shutdown {now}")
        self._exit = -9 if now else 0

    async def interrupt(self) -> None:
        self._note("interrupt")

    async def signal(self, signum: int) -> None:
        self._note(f"signal {signum}")

    async def release(self) -> None:
        self._note("release")
        self.machines = 0

    def exit_status(self) -> int | None:
        return self._exit

    def send(self, channel: Any, parts: Any) -> None:
        from gateway.messages import header_of

        if header_of(parts).msg_type == "shutdown_request":
            self._exit = 0

    def consumed(self, size_bytes: int) -> None:
        pass


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    ScriptedSession.made, ScriptedSession.fail = [], {}
    monkeypatch.setattr(module, "KernelSession", ScriptedSession)
    monkeypatch.setattr(module, "control_for", lambda profile: None)
    monkeypatch.setattr(module, "prewarm_default", lambda profile: None)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("JUPYTER_NO_CONFIG", "1")
    yield
    assert sum(session.machines for session in ScriptedSession.made) == 0
    assert not list(module._holders)


def spec(config: dict[str, Any] | None = None, **members: Any) -> KernelSpec:
    stanza = {"provisioner_name": "microvm-provisioner", "config": config or {}}
    values = {"argv": [], "language": "python", "metadata": {"kernel_provisioner": stanza}}
    return KernelSpec(**(values | members))


def manager_of(
    kind: Any = KernelManager, kernel_spec: KernelSpec | None = None, **options: Any
) -> Any:
    context_class = zmq.asyncio.Context if kind is AsyncKernelManager else zmq.Context
    manager = kind(context=context_class.instance(), **options)
    manager._kernel_spec = kernel_spec or spec()
    return manager


@pytest.fixture
def manager() -> Iterator[KernelManager]:
    made = manager_of()
    yield made
    made.shutdown_kernel(now=True)


def session() -> ScriptedSession:
    return ScriptedSession.made[-1]


def test_start_gives_a_complete_connection(manager: KernelManager) -> None:
    manager.start_kernel()
    info = manager.get_connection_info()
    ports = {info[name] for name in info if name.endswith("_port")}
    assert len(ports) == 5
    assert 0 not in ports
    assert isinstance(info["key"], bytes)
    assert Path(manager.connection_file).stat().st_mode & 0o077 == 0
    assert manager.is_alive()


@pytest.mark.parametrize("now", [True, False])
def test_a_restart_keeps_ports_and_machine_and_a_shutdown_releases_it(now: bool) -> None:
    manager = manager_of()
    manager.start_kernel()
    before = manager.get_connection_info()
    manager.restart_kernel(now=now)
    assert manager.get_connection_info() == before
    assert "release" not in session().calls
    assert "restart" in session().calls
    manager.shutdown_kernel(now=now)
    assert session().calls.count("release") == 1
    assert len(ScriptedSession.made) == 1
    manager.cleanup_resources()
    assert session().calls.count("release") == 1


def test_new_ports_are_not_given_because_clients_would_be_lost(manager: KernelManager) -> None:
    manager.start_kernel()
    before = manager.get_connection_info()
    manager.restart_kernel(now=True, newports=True)
    assert manager.get_connection_info() == before


@pytest.mark.parametrize("call", ["interrupt", "signal 15", "shutdown True"])
@pytest.mark.parametrize("error", [Unreachable("the machine", "cut"), OSError("gone"), KeyError()])
def test_signals_and_kill_never_raise(
    manager: KernelManager, call: str, error: BaseException
) -> None:
    manager.start_kernel()
    provisioner: Any = manager.provisioner
    ScriptedSession.fail = {call: error}

    async def signals() -> None:
        await provisioner.send_signal(signal.SIGINT)
        await provisioner.send_signal(signal.SIGTERM)
        await provisioner.send_signal(0)
        await provisioner.terminate()
        await provisioner.kill()

    asyncio.run(signals())
    assert call in session().calls
    ScriptedSession.fail = {}


def test_signals_before_a_start_and_after_an_end_are_harmless() -> None:
    provisioner = MicroVMProvisioner(kernel_id="k", kernel_spec=spec())

    async def everything() -> list[Any]:
        await provisioner.send_signal(signal.SIGINT)
        await provisioner.kill()
        await provisioner.cleanup()
        return [await provisioner.poll(), await provisioner.wait(), provisioner.has_process]

    assert asyncio.run(everything()) == [0, 0, False]


def test_a_failed_launch_is_one_sentence_and_leaves_nothing() -> None:
    ScriptedSession.fail = {"start": LaunchFailed("microvm-1", "no capacity")}
    manager = manager_of()
    with pytest.raises(LaunchFailed, match="no capacity"):
        manager.start_kernel()
    assert not manager.has_kernel
    bridge().call(asyncio.sleep, 0)
    assert manager.provisioner._door is None
    assert session().calls.count("release") == 1


def test_a_start_that_is_cancelled_releases_its_machine() -> None:
    async def main() -> None:
        begun, never = threading.Event(), asyncio.Event()

        async def start(self: ScriptedSession, request: Any) -> dict[str, Any]:
            begun.set()
            await never.wait()
            return {}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ScriptedSession, "start", start)
            manager = manager_of(AsyncKernelManager)
            task = asyncio.ensure_future(manager.start_kernel())
            await asyncio.get_running_loop().run_in_executor(None, begun.wait, 5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    bridge().call(asyncio.sleep, 0)
    assert session().calls == ["release"]


def test_a_failed_restart_keeps_the_ports_for_the_next_try(manager: KernelManager) -> None:
    manager.start_kernel()
    before = manager.get_connection_info()
    ScriptedSession.fail = {"restart": Unreachable("the machine", "cut")}
    with pytest.raises(Unreachable):
        manager.restart_kernel(now=True)
    assert not manager.is_alive()
    ScriptedSession.fail = {}
    manager.restart_kernel(now=True)
    assert manager.get_connection_info() == before
    assert manager.is_alive()


def test_a_release_that_is_not_confirmed_is_said_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = manager_of()
    manager.start_kernel()
    ScriptedSession.fail = {"release": TeardownPending("microvm-1", "no answer")}
    manager.shutdown_kernel(now=True)
    assert "it may still cost money" in caplog.text
    ScriptedSession.fail = {}
    manager.cleanup_resources()
    assert session().calls.count("release") == 2


def test_poll_says_alive_while_a_launch_runs() -> None:
    """Otherwise a restarter resurrects a kernel, or gives up on one, in the middle of a start."""
    polled: list[int | None] = []

    async def main() -> None:
        manager = manager_of(AsyncKernelManager)

        async def start(self: ScriptedSession, request: Any) -> dict[str, Any]:
            polled.append(await manager.provisioner.poll())
            return {}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ScriptedSession, "start", start)
            await manager.start_kernel()
        await manager.shutdown_kernel(now=True)

    asyncio.run(main())
    assert polled == [None]


def test_fifty_random_ends_and_restarts_leave_no_machine() -> None:
    choice = random.Random(1061)

    async def main() -> None:
        for _ in range(50):
            manager = manager_of(AsyncKernelManager)
            await manager.start_kernel()
            steps = [
                choice.choice((manager.restart_kernel, manager.shutdown_kernel))(now=True)
                for _ in range(choice.randint(1, 3))
            ]
            await asyncio.gather(*steps, return_exceptions=True)
            await manager.shutdown_kernel(now=choice.random() < 0.5)

    asyncio.run(main())
    assert sum(session.machines for session in ScriptedSession.made) == 0


def test_start_on_one_loop_and_shutdown_on_another() -> None:
    manager = manager_of(AsyncKernelManager)
    asyncio.run(manager.start_kernel())
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(manager.is_alive())))
    thread.start()
    thread.join()
    assert found == [True]
    asyncio.run(manager.shutdown_kernel(now=True))


# -- trust ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"execution_role_arn": "arn:aws:iam::1:role/admin"},
        {"config": {"MicroVMGateway": {"image_arn": "x"}}},
        {"log": None},
        {"image_arn": "x", "profile": "default"},
    ],
)
def test_a_kernelspec_may_name_a_profile_and_nothing_else(config: dict[str, Any]) -> None:
    manager = manager_of(kernel_spec=spec(config, display_name="Greedy"))
    with pytest.raises(UsageError, match=r"'Greedy' sets .* only 'profile' may be set there"):
        manager.start_kernel()


def test_the_profile_comes_from_the_kernelspec_and_its_meaning_from_the_configuration() -> None:
    config = Config()
    config.MicroVMGateway.profiles = {"big": {"launch_timeout_s": 33.0, "environment": ["X_*"]}}
    manager = manager_of(kernel_spec=spec({"profile": "big"}), config=config)
    manager.start_kernel(env={"X_ONE": "1", "Y_ONE": "1"})
    assert session().profile.launch_timeout_s == 33.0
    assert session().requests[0].env == {"X_ONE": "1"}
    manager.shutdown_kernel(now=True)


def test_an_unknown_profile_is_named_with_those_that_exist() -> None:
    manager = manager_of(kernel_spec=spec({"profile": "nosuch"}))
    with pytest.raises(ProfileError, match="no profile named 'nosuch'; available: default"):
        manager.start_kernel()


def test_the_environment_is_an_allow_list_with_the_kernelspecs_own(manager: KernelManager) -> None:
    manager._kernel_spec = spec(env={"OWN": "${BASE}/own", "AWS_PROFILE": "x"})
    client = {
        "BASE": "/b", "PATH": "/bin", "HOME": "/h", "AWS_SECRET_ACCESS_KEY": "s", "TZ": "UTC",
        "KERNEL_USERNAME": "ada", "KERNEL_TOKEN": "s", "LC_ALL": "C", "JPY_PARENT_PID": "1",
        "JPY_SESSION_NAME": "/a.ipynb",
    }  # fmt: skip
    manager.start_kernel(env=client)
    assert session().requests[0].env == {
        "OWN": "/b/own", "TZ": "UTC", "KERNEL_USERNAME": "ada", "LC_ALL": "C",
        "JPY_SESSION_NAME": "/a.ipynb",
    }  # fmt: skip


# -- folders, arguments, kernelspecs ------------------------------------------------


def test_the_clients_folder_is_the_workspace(manager: KernelManager, tmp_path: Path) -> None:
    (tmp_path / "code.py").touch()
    manager.start_kernel(cwd=str(tmp_path), extra_arguments=["--a=1"])
    assert session().options["workspace_folder"] == str(tmp_path)
    assert session().requests[0].extra_arguments == ("--a=1",)
    assert manager.resolve_path("code.py") == str(tmp_path / "code.py")
    assert manager.resolve_path("nothing.py") is None


def test_without_a_shared_folder_no_path_is_resolved(tmp_path: Path) -> None:
    (tmp_path / "code.py").touch()
    config = Config()
    config.MicroVMGateway.workspace_source = "none"
    manager = manager_of(config=config)
    manager.start_kernel(cwd=str(tmp_path))
    assert session().options["workspace_folder"] is None
    assert manager.resolve_path("code.py") is None
    manager.shutdown_kernel(now=True)


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    manager = manager_of()
    with pytest.raises(UsageError, match="for the kernel to work in does not exist"):
        manager.start_kernel(cwd=str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"], None),
        (["python3", "-m", "ipykernel_launcher", "-f", "{connection_file}"], None),
        (["/other/bin/python", "-m", "ipykernel_launcher"], "folder"),
        (["R", "--slave"], "folder"),
    ],
)
def test_a_plain_kernelspec_runs_as_itself(
    manager: KernelManager, tmp_path: Path, argv: list[str], expected: str | None
) -> None:
    manager._kernel_spec = spec(
        argv=argv,
        metadata={},
        resource_dir=str(tmp_path),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "microvm-provisioner")
        from jupyter_client.provisioning.factory import KernelProvisionerFactory

        KernelProvisionerFactory.clear_instance()
        manager.start_kernel()
    KernelProvisionerFactory.clear_instance()
    wanted = str(tmp_path) if expected else None
    assert session().requests[0].kernel_name == wanted


# -- sockets ------------------------------------------------------------------------


def test_configured_ports_are_used_and_a_taken_one_is_one_sentence(tmp_path: Path) -> None:
    first = manager_of()
    first.start_kernel()
    taken = first.shell_port
    second = manager_of(shell_port=taken)
    with pytest.raises(UsageError, match=f"Cannot listen .*{taken}.*Address already in use"):
        second.start_kernel()
    first.shutdown_kernel(now=True)
    third = manager_of(shell_port=taken)
    third.start_kernel()
    assert third.get_connection_info()["shell_port"] == taken
    third.shutdown_kernel(now=True)


def test_only_local_interfaces_are_bound() -> None:
    with pytest.raises(RuntimeError, match="Can only launch a kernel on a local interface"):
        manager_of(ip="203.0.113.7").start_kernel()


def test_ipc_sockets_survive_a_restart_which_deletes_their_files(tmp_path: Path) -> None:
    manager = manager_of(transport="ipc", ip=str(tmp_path / "k"))
    manager.start_kernel()
    files = sorted(tmp_path.glob("k-*"))
    assert len(files) == 5
    manager.restart_kernel(now=True)
    assert sorted(tmp_path.glob("k-*")) == files
    manager.shutdown_kernel(now=True)
    assert not list(tmp_path.glob("k-*"))


def test_encryption_is_refused_where_it_is_not_declared_and_used_where_it_is() -> None:
    with pytest.raises(RuntimeError, match="does not declare"):
        manager_of().start_kernel(transport_encryption="required")
    metadata = {"supported_encryption": ["curve"], **spec().metadata}
    manager = manager_of(kernel_spec=spec(metadata=metadata))
    manager.start_kernel(transport_encryption="required")
    info = manager.get_connection_info()
    assert len(info["curve_publickey"]) == 40
    manager.restart_kernel(now=True)
    assert manager.get_connection_info() == info
    manager.shutdown_kernel(now=True)


def test_the_record_of_a_kernel_is_json_and_comes_back(manager: KernelManager) -> None:
    import json

    manager.start_kernel()
    provisioner: Any = manager.provisioner
    info = json.loads(json.dumps(asyncio.run(provisioner.get_provisioner_info())))
    assert info["microvm_id"] == "microvm-1"
    other = MicroVMProvisioner(kernel_id="x", kernel_spec=spec())
    asyncio.run(other.load_provisioner_info(info))
    assert other.connection_info["key"] == manager.session.key


def test_waiting_for_an_end_allows_for_a_wake(manager: KernelManager) -> None:
    manager.start_kernel()
    provisioner: Any = manager.provisioner
    assert provisioner.get_shutdown_wait_time(5.0) == 5.0
    session().phase = Phase.PARKED
    assert provisioner.get_shutdown_wait_time(5.0) > 10.0


def test_a_fork_acts_on_nothing(manager: KernelManager, monkeypatch: pytest.MonkeyPatch) -> None:
    manager.start_kernel()
    provisioner: Any = manager.provisioner
    before = list(session().calls)
    monkeypatch.setattr(provisioner, "_pid", -1)
    asyncio.run(provisioner.kill())
    asyncio.run(provisioner.cleanup())
    module._release_all()
    assert session().calls == before
    monkeypatch.undo()


def test_at_interpreter_exit_what_is_left_is_released() -> None:
    manager = manager_of()
    manager.start_kernel()
    module._release_all()
    assert session().calls[-2:] == ["shutdown False", "release"]
    ScriptedSession.fail = {"release": GatewayError("no")}
    module._release_all()
    ScriptedSession.fail = {}
    manager.shutdown_kernel(now=True)
