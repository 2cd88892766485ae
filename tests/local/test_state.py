"""The state file."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from gateway.local.state import (
    BuildRecord,
    ImageRecord,
    MachineRecord,
    Replay,
    State,
    StateError,
    VersionRecord,
)


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(tmp_path / "state.sqlite")


def machine(number: int, arn: str = "a", version: str = "1.0") -> MachineRecord:
    return MachineRecord(
        f"microvm-{number}", arn, version, "http://x", 100.0 + number, 60, 2048, ("in",), ("out",)
    )


def test_the_file_is_private_and_survives(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    first = State(path)
    first.set_meta("port", "1")
    first.set_meta("port", "2")
    first.put_machine(machine(1))
    first.close()
    assert path.stat().st_mode & 0o777 == 0o600
    second = State(path)
    assert second.meta("port") == "2"
    assert second.meta("none") is None
    assert second.machine("microvm-1") == machine(1)
    second.close()


def test_machines_are_listed_newest_first_by_page_and_filter(state: State) -> None:
    for number in range(5):
        state.put_machine(machine(number, arn="a" if number % 2 else "b"))
    from dataclasses import replace

    state.put_machine(replace(machine(0, "b"), state="TERMINATED", terminated_at=5.0))
    page = state.machines(before=None, limit=3, arn=None, version=None)
    assert [record.microvm_id[-1] for _, record in page] == ["4", "3", "2"]
    page = state.machines(before=page[-1][0], limit=3, arn=None, version=None)
    assert [record.microvm_id[-1] for _, record in page] == ["1", "0"]
    assert len(state.machines(before=None, limit=9, arn="a", version="1.0")) == 2
    assert state.machines(before=None, limit=9, arn="a", version="2.0") == []
    assert [r.microvm_id[-1] for r in state.unfinished_machines()] == ["1", "2", "3", "4"]
    state.forget_machines(ended_before=6.0)
    assert state.machine("microvm-0") is None
    state.close()


def test_images_versions_and_builds(state: State) -> None:
    image = ImageRecord("arn", "name", "CREATING", 1.0, tags={"a": "b"})
    state.put_image(image)
    assert state.image("arn") == image
    for number in ("1.0", "2.0"):
        state.put_version(VersionRecord("arn", number, "PENDING", "INACTIVE", 1.0, {"x": [1]}))
        state.put_build(BuildRecord("arn", number, "id", "PENDING", 1.0, "ARM_64", "G", "4"))
    assert [record.version for record in state.versions("arn")] == ["2.0", "1.0"]
    state.delete_version("arn", "1.0")
    assert state.version("arn", "1.0") is None
    assert state.builds("arn", "1.0") == []
    state.delete_image("arn")
    assert state.images() == []
    assert state.versions("arn") == []
    state.close()


def test_client_tokens_are_kept_per_operation(state: State) -> None:
    state.remember("Run", "t", Replay("f", "answer"))
    assert state.replay("Run", "t") == Replay("f", "answer")
    assert state.replay("Create", "t") is None
    state.close()


def test_environment_variables_are_in_no_repr() -> None:
    record = VersionRecord("a", "1.0", "s", "s", 1.0, {"environmentVariables": {"A": "hidden"}})
    assert "hidden" not in repr(record)


def test_members_of_another_release_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    state = State(path)
    state.put_image(ImageRecord("arn", "name", "CREATED", 1.0))
    state.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE images SET doc = json_set(doc, '$.future', 1)")
    db.close()
    state = State(path)
    assert state.image("arn") == ImageRecord("arn", "name", "CREATED", 1.0)
    state.close()


def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="Cannot use the state file"):
        State(tmp_path / "none" / "state.sqlite")
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"not a database" * 1000)
    with pytest.raises(StateError, match="Cannot use the state file"):
        State(garbage)
    later = tmp_path / "later"
    State(later).close()
    with sqlite3.connect(later) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(StateError, match="another release"):
        State(later)
