"""The first service calls of a fresh process: by a child, and without it when there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime

import pytest

from gateway import first_calls
from tests.gateway.canned_service import Answer, CannedService, canned_service

MACHINE = {"microvmId": "microvm-1", "state": "RUNNING", "startedAt": 1_800_000_000.5}


@pytest.fixture
def service() -> Iterator[CannedService]:
    with canned_service() as made:
        yield made


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A child of this process, whatever this process has imported."""
    monkeypatch.delenv(first_calls.SWITCH, raising=False)
    monkeypatch.delitem(sys.modules, "botocore.session", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    first_calls.begin()
    assert first_calls.pending()
    yield
    first_calls.end()


def ask(service: CannedService) -> object:
    parameters = {"microvmIdentifier": "microvm-1"}
    return first_calls.ask(service.access._asdict(), "get_microvm", parameters)


@pytest.mark.usefixtures("child")
def test_the_childs_answer_is_that_of_a_client_here(service: CannedService) -> None:
    service.will(Answer(body=MACHINE), Answer(body=MACHINE))
    first_calls.warm(service.access._asdict())
    answer = ask(service)
    assert isinstance(answer, dict)
    assert answer["microvmId"] == "microvm-1"
    assert isinstance(answer["startedAt"], datetime)
    assert answer["startedAt"].timestamp() == MACHINE["startedAt"]
    assert ask(service) == answer


@pytest.mark.usefixtures("child")
def test_an_error_is_left_to_the_caller(service: CannedService) -> None:
    service.will(Answer(404, "ResourceNotFoundException", {"message": "gone"}))
    assert ask(service) is None
    assert not first_calls.pending()


@pytest.mark.usefixtures("child")
def test_a_killed_child_is_no_answer(service: CannedService) -> None:
    assert first_calls._child is not None
    os.kill(first_calls._child.pid, signal.SIGKILL)
    assert ask(service) is None
    assert not first_calls.pending()
    assert ask(service) is None


@pytest.mark.usefixtures("child")
def test_the_end_leaves_no_process() -> None:
    assert first_calls._child is not None
    pid = first_calls._child.pid
    first_calls.end()
    first_calls.end()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(("cores", "switch"), [(1, ""), (2, "0")])
def test_no_child_where_it_would_not_help(
    monkeypatch: pytest.MonkeyPatch, cores: int, switch: str
) -> None:
    monkeypatch.setenv(first_calls.SWITCH, switch)
    monkeypatch.delitem(sys.modules, "botocore.session", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    first_calls.begin()
    assert not first_calls.pending()


def test_the_secret_is_not_on_the_childs_command_line() -> None:
    assert "secret" not in first_calls.CHILD_CODE


def test_a_child_whose_parent_is_gone_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", first_calls.CHILD_CODE],
        input="", capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
