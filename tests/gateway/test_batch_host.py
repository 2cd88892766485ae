"""Where a run's kernel lives: its kernelspec, its workspace, what its end is called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from traitlets.config import Config

from gateway.batch.host import (
    MicroVMHost,
    choose_workspace,
    describe_exit,
    with_workspace,
)
from gateway.config import MicroVMGateway
from gateway.lifecycle import Phase
from gateway.profiles import Profile, UploadLimits


def test_the_profile_is_all_that_the_kernelspec_says() -> None:
    manager = MicroVMHost(Profile("large")).make_manager()
    assert manager.kernel_spec is not None
    assert manager.kernel_spec.metadata == {
        "kernel_provisioner": {
            "provisioner_name": "microvm-provisioner", "config": {"profile": "large"},
        }
    }  # fmt: skip


def test_only_ipython_gets_an_option_of_ipython() -> None:
    assert MicroVMHost(Profile()).extra_arguments
    assert not MicroVMHost(Profile(kernel_name="ir")).extra_arguments


@pytest.mark.parametrize(
    ("source", "inputs", "collect", "max_files", "chosen"),
    [
        ("folder", False, False, 9, "folder"),
        ("folder", True, False, 9, "upload"),
        ("folder", False, True, 9, "upload"),
        ("folder", True, True, 1, "none"),
        ("folder", False, True, 1, "folder"),
        ("upload", True, True, 9, "upload"),
        ("none", True, True, 9, "none"),
    ],
)
def test_a_run_with_files_gets_a_workspace_of_its_own(
    tmp_path: Path, source: str, inputs: bool, collect: bool, max_files: int, chosen: str
) -> None:
    for name in "ab":
        (tmp_path / name).touch()
    profile = Profile(workspace_source=source, upload=UploadLimits(max_files=max_files))
    assert choose_workspace(profile, [tmp_path], inputs=inputs, collect=collect) == chosen


def test_a_machine_that_sees_no_folder_of_ours_keeps_its_way() -> None:
    aws = replace(Profile(), image_arn="arn:aws:lambda:us-east-1:1:microvm-image:x")
    assert choose_workspace(aws, [], inputs=True, collect=True) == "folder"
    assert aws.workspace == "upload"


def test_only_the_one_setting_of_the_one_profile_changes() -> None:
    config = Config({"MicroVMGateway": {"profiles": {"a": {"park_after_s": 5.0}, "b": {}}}})
    settings = MicroVMGateway(config=config)
    changed = MicroVMGateway(config=with_workspace(config, settings, "a", "upload"))
    assert changed.profile("a") == replace(settings.profile("a"), workspace_source="upload")
    assert changed.profile("b") == settings.profile("b")
    assert config.MicroVMGateway.profiles["a"] == {"park_after_s": 5.0}


def test_the_default_profile_too() -> None:
    settings = MicroVMGateway()
    changed = MicroVMGateway(config=with_workspace(Config(), settings, "default", "none"))
    assert changed.profile().workspace_source == "none"


@pytest.mark.parametrize(
    ("status", "words"),
    [(None, ""), (7, "with status 7"), (-9, "memory ran out"), (-11, "by signal 11")],
)
def test_what_an_exit_status_says(status: int | None, words: str) -> None:
    assert words in describe_exit(status)
    assert (status is None) == (describe_exit(status) == "")


def _manager(**facts: Any) -> Any:
    return SimpleNamespace(provisioner=SimpleNamespace(session=SimpleNamespace(**facts)))


def test_why_a_kernel_is_gone() -> None:
    host = MicroVMHost(Profile())
    lost = _manager(phase=Phase.LOST, microvm_id="microvm-1", reason="ended", exit_status=None)
    dead = _manager(phase=Phase.READY, exit_status=lambda: -9)
    assert host.reason(lost) == "machine microvm-1 is gone (ended)"
    assert "SIGKILL" in host.reason(dead)
    nobody: Any = SimpleNamespace(provisioner=None)
    assert host.reason(nobody) == ""
    assert host.machine(nobody) == {}
    assert host.machine(lost) == {"microvm_id": "microvm-1"}
