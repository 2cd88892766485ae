"""Finding, starting and stopping the service: real processes, nothing scripted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from gateway.errors import LocalServiceTrouble
from gateway.local import client
from gateway.local.client import (
    ServiceInfo,
    StateFolder,
    ensure_running,
    is_held,
    read_info,
    scrubbed,
    state_folder,
    stop,
    write_info,
)
from tests.support.waiting import wait_until

SERVICE = [sys.executable, "-P", "-m", "gateway.local.service"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "state"
    yield place
    stop(place)
    wait_until(
        lambda: not [p for p in psutil.process_iter(["cmdline"]) if mentions(p, place)],
        within_s=10,
        what=f"the end of every process of {place}",
    )


def mentions(process: psutil.Process, place: Path) -> bool:
    return any(str(place) in part for part in process.info["cmdline"] or ())


def run_service(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SERVICE, *arguments], capture_output=True, text=True, timeout=30, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_start_find_and_stop(folder: Path) -> None:
    assert read_info(folder) is None
    assert stop(folder) is False
    info = ensure_running(folder)
    assert read_info(folder) == info
    assert ensure_running(folder) == info
    assert info.preset == "fast"
    assert folder.stat().st_mode & 0o777 == 0o700
    for name in ("service.json", "service.lock", "service.log", "state.sqlite"):
        assert (folder / name).stat().st_mode & 0o077 == 0, name
    assert json.loads((folder / "service.json").read_text()).keys() == {
        "endpoint_url", "region", "access_key_id", "secret_access_key", "pid", "started_at",
        "preset",
    }  # fmt: skip
    assert info.secret_access_key not in repr(info)
    assert stop(folder) is True
    assert read_info(folder) is None
    assert not (folder / "service.json").exists()
    assert info.secret_access_key not in (folder / "service.log").read_text()


def test_keys_and_port_survive_a_restart(folder: Path) -> None:
    first = ensure_running(folder)
    stop(folder)
    second = ensure_running(folder)
    assert second.environment() == first.environment()
    assert second.pid != first.pid


def test_parallel_callers_start_one_service(folder: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: ensure_running(folder), range(6)))
    assert len({info.pid for info in found}) == 1


def test_the_service_belongs_to_nobody(folder: Path) -> None:
    info = ensure_running(folder)
    process = psutil.Process(info.pid)
    assert process.ppid() != os.getpid()
    assert os.getsid(info.pid) != os.getsid(0)


def test_a_killed_service_is_not_taken_for_a_live_one(folder: Path) -> None:
    first = ensure_running(folder)
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: not is_held(folder / "service.lock"), within_s=5)
    assert read_info(folder) is None  # although service.json is still there
    assert (folder / "service.json").exists()
    second = ensure_running(folder)
    assert second.pid != first.pid


def test_a_second_service_says_one_sentence_and_exits_3(folder: Path) -> None:
    ensure_running(folder)
    second = run_service("--state-dir", str(folder))
    assert second.returncode == 3
    assert second.stderr.splitlines() == [
        f"Local service: another one is already running with the state folder {folder}; "
        "`jupyter microvm local status` shows it."
    ]


def test_a_port_that_is_taken(folder: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LocalServiceTrouble, match=f"port {port} cannot be used"):
            ensure_running(folder, port=port)
        direct = run_service("--state-dir", str(folder), "--port", str(port))
        assert (direct.returncode, direct.stderr.count("\n")) == (3, 1)
        # The port of last time is only a wish.
        info = ensure_running(folder)
        assert info.endpoint_url != f"http://127.0.0.1:{port}"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(LocalServiceTrouble, match="cannot be written"):
        ensure_running(blocked / "state")
    direct = run_service("--state-dir", str(blocked / "state"))
    assert (direct.returncode, direct.stderr.count("\n")) == (3, 1)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    place = Path("/proc/self/state")
    with pytest.raises(LocalServiceTrouble, match="choose another one with JUPYTER_MICROVM_LOCAL"):
        ensure_running(place)


def test_wrong_arguments_exit_2(tmp_path: Path) -> None:
    result = run_service("--state-dir", str(tmp_path), "--set", "nonsense=1")
    assert result.returncode == 2
    assert "is not a switch" in result.stderr
    result = run_service("--state-dir", str(tmp_path), "--set", "memory_quota_mib=many")
    assert result.returncode == 2


def test_a_start_that_fails_shows_the_logs_last_line(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "state.sqlite").write_bytes(b"garbage" * 1000)
    with pytest.raises(LocalServiceTrouble) as caught:
        ensure_running(folder)
    assert "Cannot use the state file" in caught.value.sentence
    assert caught.value.sentence.count("Local service:") == 1


def test_a_start_that_takes_too_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is held, but nobody becomes ready."""
    StateFolder(folder).make()
    import fcntl

    with open(folder / "service.lock", "r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LocalServiceTrouble, match="gave up waiting"):
            ensure_running(folder, wait_s=0.1)
    with open(folder / "start.lock", "r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LocalServiceTrouble, match="another process was still starting it"):
            ensure_running(folder, wait_s=0.1)


def test_an_idle_service_ends_by_itself(folder: Path) -> None:
    info = ensure_running(folder, idle_exit_s=0.2)
    wait_until(lambda: not psutil.pid_exists(info.pid), within_s=10, what="the idle exit")
    assert "nothing to do for 0.2 s: ending" in (folder / "service.log").read_text()


def test_switches_reach_the_service(folder: Path) -> None:
    info = ensure_running(folder, preset="realistic", switches=["memory_quota_mib=8192"])
    assert info.preset == "realistic"


# -- smaller parts


def test_the_environment_of_the_service_is_an_allow_list() -> None:
    given = {
        "HOME": "/h", "LC_ALL": "C", "PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x",
        "PYTHONPATH": "/x", "GITHUB_TOKEN": "x", "AWS_ENDPOINT_URL_S3": "http://s3",
    }  # fmt: skip
    assert scrubbed(given).keys() == {"HOME", "LC_ALL", "PATH", "AWS_ENDPOINT_URL_S3"}


def test_the_folder_is_chosen_by_argument_then_variable_then_jupyter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(client.DIR_VARIABLE, str(tmp_path / "a"))
    assert state_folder(tmp_path / "b").path == tmp_path / "b"
    assert state_folder().path == tmp_path / "a"
    monkeypatch.delenv(client.DIR_VARIABLE)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "c"))
    assert state_folder().path == tmp_path / "c" / "microvm-local"


def test_a_service_file_of_another_release_is_ignored(tmp_path: Path) -> None:
    import fcntl

    place = StateFolder(tmp_path)
    place.make()
    info = ServiceInfo("http://x", "r", "a", "s", 1)
    with open(place.lock, "r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write_info(place, info)
        assert place.info.stat().st_mode & 0o777 == 0o600
        assert read_info(tmp_path) == info
        for content in ("", "[]", '{"other": 1}'):
            place.info.write_text(content)
            assert read_info(tmp_path) is None


def test_a_log_tail_is_the_last_line_that_says_something(tmp_path: Path) -> None:
    place = StateFolder(tmp_path)
    assert client.log_tail(place) == "it left no log."
    place.log.write_text("\n \n")
    assert client.log_tail(place) == "its log is empty."
    place.log.write_text("first\nlast words\n\n")
    assert client.log_tail(place) == "last words"
