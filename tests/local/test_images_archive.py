"""Unpacking hostile archives."""

from __future__ import annotations

import contextlib
import stat
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.local.images import archive
from gateway.local.images.archive import ArchiveError, unpack


def make_zip(path: Path, entries: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name, content in entries.items():
            made.writestr(name, content)
    return path


def reason(path: Path, target: Path) -> str:
    target.mkdir(exist_ok=True)
    with pytest.raises(ArchiveError) as caught:
        unpack(path, target)
    return caught.value.reason


def test_an_ordinary_archive(tmp_path: Path) -> None:
    made = make_zip(tmp_path / "a.zip", {"Dockerfile": b"FROM x", "d/": b"", "d/e/f.txt": b"1"})
    target = tmp_path / "out"
    target.mkdir()
    unpack(made, target)
    found = sorted(p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file())
    assert found == ["Dockerfile", "d/e/f.txt"]


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a\\..\\x", "..", "C:\\x"])
def test_names_that_leave_the_archive(tmp_path: Path, name: str) -> None:
    made = make_zip(tmp_path / "a.zip", {"Dockerfile": b"", name: b"x"})
    target = tmp_path / "out"
    assert reason(made, target).startswith("ARCHIVE_INVALID")
    assert list(target.iterdir()) == []  # refused before the first byte


def test_links_and_special_files(tmp_path: Path) -> None:
    for kind in (stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR):
        entry = zipfile.ZipInfo("link")
        entry.create_system = 3
        entry.external_attr = (kind | 0o777) << 16
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as made:
            made.writestr(entry, "/etc/passwd")
        assert "link or a special file" in reason(tmp_path / "a.zip", tmp_path / "out")


def test_a_name_that_occurs_twice(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as made:
        made.writestr("a", b"1")
        with pytest.warns(UserWarning, match="Duplicate name"):
            made.writestr("a", b"2")
    assert "occurs twice" in reason(tmp_path / "a.zip", tmp_path / "out")


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_zip(tmp_path / "a.zip", {"a": b"x" * 1000, "b": b"", "c": b""})
    for name, value in (("MAX_ENTRIES", 2), ("MAX_UNPACKED_BYTES", 999), ("MAX_ARCHIVE_BYTES", 9)):
        with monkeypatch.context() as patch:
            patch.setattr(archive, name, value)
            assert reason(made, tmp_path / "out").startswith("ARCHIVE_TOO_LARGE")


def test_a_directory_that_lies_about_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "a.zip"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("bomb", b"\0" * 1_000_000)
    raw = bytearray(made.read_bytes())
    at = raw.index(b"PK\x01\x02") + 24
    raw[at : at + 4] = struct.pack("<I", 10)  # the central directory says 10 bytes
    made.write_bytes(raw)
    target = tmp_path / "out"
    assert reason(made, target).startswith("ARCHIVE_")
    assert sum(p.stat().st_size for p in target.iterdir()) <= 1_000


@pytest.mark.parametrize("names", [("a", "a/b"), ("x" * 300,)])
def test_names_that_the_file_system_refuses(tmp_path: Path, names: tuple[str, ...]) -> None:
    made = make_zip(tmp_path / "a.zip", dict.fromkeys(names, b""))
    assert reason(made, tmp_path / "out").startswith("ARCHIVE_INVALID")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a zip at all"])
def test_what_is_no_zip(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.zip").write_bytes(content)
    assert reason(tmp_path / "a.zip", tmp_path / "out").startswith("ARCHIVE_INVALID")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_damaged_archive_ends_in_one_error(tmp_path: Path, data: st.DataObject) -> None:
    made = tmp_path / "a.zip"
    made.unlink(missing_ok=True)
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("Dockerfile", b"FROM x" * 50)
        opened.writestr("a/b", bytes(range(256)))
    raw = bytearray(made.read_bytes())
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), max_size=8)
    ):
        raw[place] = value
    made.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    target = tmp_path / "out"
    archive.remove(target)
    target.mkdir()
    with contextlib.suppress(ArchiveError):
        unpack(made, target)
    inside = {p.resolve() for p in target.rglob("*")}
    assert all(p.is_relative_to(target.resolve()) for p in inside)
