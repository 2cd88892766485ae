"""Segments on disk: a private, bounded first-in first-out."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kernel_guest.shared.messages import Channel, LinkMessage, event, jupyter
from kernel_guest.spill import Spill


def made(number: int, size: int = 100) -> LinkMessage:
    return jupyter(Channel.IOPUB, [b"", b"%d" % number, b"", b"", b"x" * size, b"", b"buffer"])


def test_messages_come_back_whole_and_in_order(tmp_path: Path) -> None:
    spill = Spill(tmp_path / "s", 10**6)
    sent = [made(i, i) for i in range(200)] + [event("kernel_exited", {"pid": 1})]
    assert all(spill.append(one) for one in sent)
    assert len(spill) == 201
    got: list[LinkMessage] = []
    while len(spill):
        got += spill.read(1_000)
    assert got == sent
    assert spill.disk_bytes == 0
    assert spill.read(1_000) == []


def test_reading_and_writing_take_turns(tmp_path: Path) -> None:
    spill = Spill(tmp_path / "s", 10**6)
    got: list[LinkMessage] = []
    sent = [made(i) for i in range(300)]
    for index, one in enumerate(sent):
        assert spill.append(one)
        if index % 7 == 0:
            got += spill.read(1)
    while len(spill):
        got += spill.read(10_000)
    assert got == sent


def test_the_bound_is_the_files_that_exist(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    spill = Spill(folder, 5_000)
    count = 0
    while spill.append(made(count)):
        count += 1
    assert count > 10
    assert spill.disk_bytes <= 5_000
    spill.read(10**6)
    assert list(folder.iterdir()) == []
    assert spill.append(made(0))
    spill.close()


def test_many_segments(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    spill = Spill(folder, 10**8)
    sent = [made(i, 3_000_000) for i in range(7)]
    for one in sent:
        assert spill.append(one)
    assert len(list(folder.iterdir())) == 4
    assert spill.read(10**9) == sent
    assert list(folder.iterdir()) == []


def test_files_are_private_and_what_lay_there_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "00000007.segment").write_bytes(b"of an earlier agent")
    spill = Spill(folder, 10**6)
    assert list(folder.iterdir()) == []
    before = os.umask(0)
    try:
        spill.append(made(1))
    finally:
        os.umask(before)
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    spill.close()
    spill.close()
    assert list(folder.iterdir()) == []


def test_a_disk_that_refuses_is_remembered(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    spill = Spill(folder, 10**6)
    folder.rmdir()
    assert not spill.append(made(1))
    assert isinstance(spill.last_error, FileNotFoundError)
    assert len(spill) == 0
