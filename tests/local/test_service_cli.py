"""`jupyter microvm local …` as a person calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.local.client import DIR_VARIABLE, read_info, stop

BIN = Path(sys.executable).parent


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "state"
    yield place
    stop(place)


def local(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(BIN), "HOME": str(folder.parent), DIR_VARIABLE: str(folder)}
    return subprocess.run(
        [BIN / "jupyter-microvm", "local", *arguments],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_start_status_env_stop(folder: Path) -> None:
    started = local(folder, "start")
    info = read_info(folder)
    assert info is not None
    assert (
        started.stdout == f"The local service runs at {info.endpoint_url} (process {info.pid}).\n"
    )
    assert "already runs" in local(folder, "start").stdout
    status = local(folder, "status")
    assert (status.returncode, status.stderr) == (0, "")
    assert info.endpoint_url in status.stdout
    assert "machines   none" in status.stdout
    facts = json.loads(local(folder, "status", "--json").stdout)
    assert (facts["pid"], facts["machines"]) == (info.pid, {})
    shell = subprocess.run(
        ["bash", "-c", f'{local(folder, "env").stdout}\nenv'],
        env={"AWS_PROFILE": "mine", "AWS_SESSION_TOKEN": "x"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    seen = dict(line.split("=", 1) for line in shell.stdout.splitlines() if "=" in line)
    assert info.environment().items() <= seen.items()
    assert seen.keys().isdisjoint({"AWS_PROFILE", "AWS_SESSION_TOKEN"})
    stopped = local(folder, "stop")
    assert (stopped.returncode, stopped.stdout) == (0, "The local service has ended.\n")
    assert local(folder, "stop").stdout == "No local service was running.\n"


def test_faults_are_ordered_listed_and_cleared(folder: Path) -> None:
    assert local(folder, "faults", "list").returncode == 3  # no service
    local(folder, "start")
    added = local(folder, "faults", "add", "cut", "after_bytes=100", "direction=to-guest")
    assert json.loads(added.stdout) == {"id": 1}, added.stderr
    (shown,) = json.loads(local(folder, "faults").stdout)["faults"]
    assert (shown["kind"], shown["after_bytes"], shown["direction"]) == ("cut", 100, "to-guest")
    assert json.loads(local(folder, "faults", "clear", "1").stdout) == {"cleared": 1}
    refused = local(folder, "faults", "add", "nonsense")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "There is no fault 'nonsense'" in refused.stderr
    assert local(folder, "faults", "add", "cut", "x").returncode == 2
    assert local(folder, "faults", "what").returncode == 2


def test_status_without_a_service_exits_3(folder: Path) -> None:
    status = local(folder, "status")
    assert (status.returncode, status.stdout) == (3, "")
    assert status.stderr.count("\n") == 1
    assert "`jupyter microvm local start` starts it" in status.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nonsense"], "There is no command 'nonsense'"),
        (["start", "extra"], "There is no argument 'extra'"),
        (["start", "--set", "x=1"], "is not a switch"),
        (["start", "--preset", "slow"], "preset"),
        (["start", "--port", "many"], "port"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exits_2(
    folder: Path, arguments: list[str], text: str
) -> None:
    result = local(folder, *arguments)
    assert result.returncode == 2
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert read_info(folder) is None


def test_a_command_is_needed(folder: Path) -> None:
    result = local(folder)
    assert result.returncode == 2
    assert "Subcommands" in result.stdout
