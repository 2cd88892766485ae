"""How a kernel is to be started: decided without starting one."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kernel_guest import kernels
from kernel_guest.kernels import (
    CHANNELS,
    Connection,
    Kind,
    SpawnFailed,
    SpawnRequest,
    TemplateFacts,
    UnknownKernel,
    plan,
    spawn_failure,
)

SECRET = "a-secret-key"


def request_in(folder: Path, **options: Any) -> SpawnRequest:
    return SpawnRequest(**{"key": SECRET, "cwd": str(folder), **options})


@pytest.fixture
def facts() -> TemplateFacts:
    return TemplateFacts.take(forks=True)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site-packages"
    (folder / "demo-1.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(folder)])
    return folder


def write_spec(root: Path, name: str, **spec: Any) -> Path:
    folder = root / "kernels" / name
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps({"display_name": name, **spec}))
    return folder


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    return tmp_path


def test_the_own_kernel_is_a_fork(tmp_path: Path, facts: TemplateFacts) -> None:
    launch = plan(7, request_in(tmp_path), tmp_path, facts)
    assert launch.kind is Kind.FORK
    assert launch.reason == ""
    assert launch.connection.ip == str(tmp_path / "run" / "k7")
    assert launch.argv[-2:] == ("-f", launch.connection_file)


def test_each_channel_has_a_socket_of_its_own() -> None:
    connection = Connection("/run/k1")
    assert len({connection.url(channel) for channel in CHANNELS}) == 5
    assert connection.url("shell") == "ipc:///run/k1-1"
    assert connection.ports()["shell_port"] == 1


@pytest.mark.parametrize(
    ("name", "cold"),
    [
        ("PYTHONPATH", True),
        ("PYTHONHASHSEED", True),
        ("PYTHONWARNINGS", True),
        ("LD_PRELOAD", True),
        ("MALLOC_ARENA_MAX", True),
        ("OPENBLAS_NUM_THREADS", "numpy" in sys.modules),
        ("PYTHONUNBUFFERED", False),
        ("PYTHONSTARTUP", False),
        ("TZ", False),
        ("HOME", False),
        ("MY_PYTHONPATH", False),
    ],
)
def test_variables_that_an_interpreter_reads_once_make_it_cold(
    tmp_path: Path, facts: TemplateFacts, name: str, cold: bool
) -> None:
    launch = plan(1, request_in(tmp_path, env={name: "/elsewhere"}), tmp_path, facts)
    assert (launch.kind is Kind.COLD) == cold
    assert (name in launch.reason) == cold


def test_the_templates_own_value_is_no_change(tmp_path: Path, facts: TemplateFacts) -> None:
    environ: Mapping[str, str] = {**facts.environ, "PYTHONPATH": "/same"}
    same = TemplateFacts(facts.folder_ages, facts.installed, environ)
    assert same.reason_for_cold(environ) == ""
    assert "PYTHONPATH" in same.reason_for_cold(facts.environ)


def test_another_version_of_a_distribution_makes_it_cold(packages: Path) -> None:
    facts = TemplateFacts.take(forks=True)
    assert facts.reason_for_cold(facts.environ) == ""
    (packages / "demo-1.0.dist-info").rename(packages / "demo-2.0.dist-info")
    assert facts.reason_for_cold(facts.environ) == "installed distributions changed"


def test_the_same_version_installed_again_makes_it_cold(packages: Path) -> None:
    facts = TemplateFacts.take(forks=True)
    (packages / "demo-1.0.dist-info").rmdir()
    (packages / "demo-1.0.dist-info").mkdir()
    os.utime(packages / "demo-1.0.dist-info", ns=(0, 0))
    assert facts.reason_for_cold(facts.environ) == "installed distributions changed"


def test_other_files_beside_distributions_do_not(packages: Path) -> None:
    facts = TemplateFacts.take(forks=True)
    (packages / "__pycache__").mkdir()
    (packages / "note.txt").touch()
    assert facts.reason_for_cold(facts.environ) == ""


def test_a_path_file_makes_it_cold(packages: Path) -> None:
    facts = TemplateFacts.take(forks=True)
    (packages / "extra.pth").touch()
    assert facts.reason_for_cold(facts.environ) == "installed distributions changed"


def test_no_forks_where_the_platform_has_none(tmp_path: Path) -> None:
    launch = plan(1, request_in(tmp_path), tmp_path, TemplateFacts.take(forks=False))
    assert launch.kind is Kind.COLD
    assert launch.argv[:4] == (
        sys.executable,
        "-Xfrozen_modules=off",
        "-m",
        "kernel_guest.launcher",
    )


def test_the_environment_is_the_machines_changed_by_the_request() -> None:
    base = {"A": "1", "B": "1", "KERNEL_GUEST_FOLDER": "/x", "JPY_PARENT_PID": "1"}
    changes = {"B": "2", "C": "2"}
    assert kernels.kernel_environment(base, changes) == {"A": "1", "B": "2", "C": "2"}


def test_another_kernelspec_is_a_command(
    tmp_path: Path, specs: Path, facts: TemplateFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHO", "world")
    folder = write_spec(
        specs,
        "other",
        argv=["python", "{resource_dir}/run", "--file={connection_file}", "{unknown}"],
        language="lisp",
        interrupt_mode="message",
        env={"GREETING": "hello ${WHO}"},
    )
    request = request_in(tmp_path, kernel_name="Other", extra_arguments=("-x",))
    launch = plan(3, request, tmp_path, facts)
    file = str(tmp_path / "run" / "kernel-3.json")
    assert launch.kind is Kind.COMMAND
    assert launch.argv == (sys.executable, f"{folder}/run", f"--file={file}", "{unknown}", "-x")
    assert launch.env["GREETING"] == "hello world"
    assert (launch.language, launch.interrupt_mode) == ("lisp", "message")
    spawned = launch.spawned(99)
    assert spawned["cold"] is True
    assert spawned["interrupt_mode"] == "message"


def test_a_kernelspec_may_be_named_by_its_folder(tmp_path: Path, facts: TemplateFacts) -> None:
    folder = write_spec(tmp_path, "far", argv=["run"], language="lisp")
    launch = plan(1, request_in(tmp_path, kernel_name=str(folder)), tmp_path, facts)
    assert (launch.kind, launch.language) == (Kind.COMMAND, "lisp")
    with pytest.raises(UnknownKernel):
        plan(1, request_in(tmp_path, kernel_name=str(tmp_path / "none")), tmp_path, facts)


def test_an_unknown_kernel_is_refused_with_the_names_that_exist(
    tmp_path: Path, specs: Path, facts: TemplateFacts
) -> None:
    write_spec(specs, "other", argv=["other"], language="lisp")
    remote = {"kernel_provisioner": {"provisioner_name": "microvm-provisioner"}}
    write_spec(specs, "elsewhere", argv=["x"], language="python", metadata=remote)
    write_spec(specs, "mistyped", argv="x", language=5, metadata=[])
    (specs / "kernels" / "broken").mkdir()
    (specs / "kernels" / "broken" / "kernel.json").write_text("{")
    with pytest.raises(UnknownKernel) as caught:
        plan(1, request_in(tmp_path, kernel_name="elsewhere"), tmp_path, facts)
    assert "other" in caught.value.available
    assert not {"elsewhere", "broken", "mistyped"} & set(caught.value.available)
    copy = spawn_failure(json.loads(json.dumps(caught.value.to_json())))
    assert isinstance(copy, UnknownKernel)
    assert str(copy) == str(caught.value)


@pytest.mark.parametrize("spec", [{"argv": ["x", 5]}, {"argv": ["x"], "env": {"A": 5}}])
def test_a_kernelspec_that_is_not_text_is_refused(
    tmp_path: Path, specs: Path, facts: TemplateFacts, spec: dict[str, Any]
) -> None:
    write_spec(specs, "odd", language="lisp", **spec)
    with pytest.raises(SpawnFailed) as caught:
        plan(1, request_in(tmp_path, kernel_name="odd"), tmp_path, facts)
    assert caught.value.code == "bad_kernelspec"


def test_a_connection_file_that_cannot_be_written_is_said(
    tmp_path: Path, facts: TemplateFacts
) -> None:
    launch = plan(1, request_in(tmp_path), tmp_path, facts)
    with pytest.raises(SpawnFailed, match="No such file"):
        launch.write_connection_file()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"cwd": "/nowhere/at/all"}, "no_such_folder"),
        ({"cwd": "a\0b"}, "bad_request"),
        ({"env": {"A=B": "1"}}, "bad_request"),
        ({"env": {"": "1"}}, "bad_request"),
        ({"env": {"A": 1}}, "bad_request"),
        ({"extra_arguments": ("a\0b",)}, "bad_request"),
        ({"key": None}, "bad_request"),
    ],
)
def test_what_no_process_can_be_started_with_is_refused(
    tmp_path: Path, options: dict[str, Any], code: str
) -> None:
    request = request_in(tmp_path, **options)
    with pytest.raises(SpawnFailed) as caught:
        SpawnRequest.from_json(request.to_json())
    assert caught.value.code == code
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("member", ["key", "cwd", "env", "extra_arguments"])
def test_a_request_without_a_member_is_refused(tmp_path: Path, member: str) -> None:
    data = request_in(tmp_path).to_json()
    del data[member]
    with pytest.raises(SpawnFailed, match=member):
        SpawnRequest.from_json(data)


def test_a_folder_too_long_for_sockets_is_refused(tmp_path: Path, facts: TemplateFacts) -> None:
    with pytest.raises(SpawnFailed) as caught:
        plan(1, request_in(tmp_path), tmp_path / ("x" * 100), facts)
    assert caught.value.code == "path_too_long"


def test_the_connection_file_is_private_and_complete(tmp_path: Path, facts: TemplateFacts) -> None:
    launch = plan(1, request_in(tmp_path), tmp_path, facts)
    (tmp_path / "run").mkdir()
    launch.write_connection_file()
    path = Path(launch.connection_file)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    info = json.loads(path.read_text())
    assert (info["key"], info["transport"], info["shell_port"]) == (SECRET, "ipc", 1)
    launch.remove_files()
    launch.remove_files()
    assert os.listdir(tmp_path / "run") == []


def test_no_secret_in_a_repr(tmp_path: Path, facts: TemplateFacts) -> None:
    launch = plan(1, request_in(tmp_path, env={"TOKEN": "tok-tok"}), tmp_path, facts)
    assert SECRET not in repr(launch)
    assert "tok-tok" not in repr(launch)
    assert "tok-tok" not in repr(facts)
