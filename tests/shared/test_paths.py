"""Path confinement."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_guest.shared.errors import PathRefused
from kernel_guest.shared.paths import Allowance, check_path, open_below, resolve_below


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    place = tmp_path / "root"
    (place / "folder").mkdir(parents=True)
    (place / "folder" / "file").write_text("inside")
    (place / "out").symlink_to(tmp_path / "outside")
    (place / "secret").symlink_to(tmp_path / "outside" / "secret")
    (place / "inward").symlink_to("folder")
    return place


@pytest.fixture
def root_fd(root: Path) -> Iterator[int]:
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize(
    "path", ["a", "a/b/c.txt", ".hidden", "..a", "a..", "Ünïcödé ファイル.ipynb", "a b", "x" * 255]
)
def test_normal_relative_paths_pass(path: str) -> None:
    assert check_path(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/etc/passwd",
        "..",
        "../x",
        "a/../b",
        "a/..",
        ".",
        "./a",
        "a/./b",
        "a//b",
        "a/",
        "a\0b",
        "a\nb",
        "\x1b[31m",
        "a\x7f",
        "a\u2028b",
        "\ud800",
        "a\\b",
        "C:/x",
        "C:x",
        "~/x",
        "~root",
        "x" * 256,
        "é" * 128,
        "/".join("a" * 65),
        "a/" * 600 + "a",
    ],
)
def test_hostile_paths_are_refused(path: str) -> None:
    with pytest.raises(PathRefused):
        check_path(path)


@given(path=st.text(max_size=40))
def test_whatever_passes_stays_below_its_root(path: str) -> None:
    try:
        check_path(path)
    except PathRefused:
        return
    joined = os.path.normpath(os.path.join("/top/of/it", path))
    assert joined == "/top/of/it/" + path


def test_symlinks_that_lead_outside_are_refused(root: Path) -> None:
    assert resolve_below(root, "folder/file") == (root / "folder" / "file").resolve()
    assert resolve_below(root, "inward/file") == (root / "folder" / "file").resolve()
    assert resolve_below(root, "new/file") == (root / "new" / "file").resolve()
    for path in ("out", "out/secret", "secret"):
        with pytest.raises(PathRefused, match="outside"):
            resolve_below(root, path)


def test_open_below_reads_and_writes_inside(root: Path, root_fd: int) -> None:
    with os.fdopen(open_below(root_fd, "folder/file", os.O_RDONLY)) as file:
        assert file.read() == "inside"
    flags = os.O_WRONLY | os.O_CREAT
    with os.fdopen(open_below(root_fd, "x/y/z", flags, 0o600, make_folders=True), "w") as file:
        file.write("new")
    assert (root / "x" / "y" / "z").read_text() == "new"
    assert (root / "x" / "y" / "z").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("path", ["secret", "out/secret", "inward/file", "folder/file/x", "../x"])
def test_open_below_follows_no_symlink(root_fd: int, path: str) -> None:
    with pytest.raises(PathRefused):
        open_below(root_fd, path, os.O_RDONLY)


def test_open_below_does_not_write_through_a_symlink(root: Path, root_fd: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for path in ("secret", "out/new"):
        with pytest.raises(PathRefused):
            open_below(root_fd, path, flags, make_folders=True)
    assert (root.parent / "outside" / "secret").read_text() == "secret"
    assert not (root.parent / "outside" / "new").exists()


def test_what_is_missing_is_an_ordinary_error(root_fd: int) -> None:
    for path in ("missing", "missing/file"):
        with pytest.raises(FileNotFoundError):
            open_below(root_fd, path, os.O_RDONLY)


def test_open_below_leaves_no_descriptor_open(root_fd: int) -> None:
    before = len(os.listdir("/dev/fd"))
    os.close(open_below(root_fd, "folder/file", os.O_RDONLY))
    for path in ("missing/file", "out/secret", "secret", "folder/missing"):
        with pytest.raises((OSError, PathRefused)):
            open_below(root_fd, path, os.O_RDONLY)
    assert len(os.listdir("/dev/fd")) == before


def test_an_allowance_bounds_files_and_bytes() -> None:
    allowance = Allowance(files=3, size_bytes=10)
    allowance.charge("a", 4)
    with pytest.raises(PathRefused, match="bytes"):
        allowance.charge("b", 7)
    allowance.charge("b", 6)
    allowance.charge("c", 0)
    with pytest.raises(PathRefused, match="files"):
        allowance.charge("d", 0)
    with pytest.raises(PathRefused, match="negative"):
        allowance.charge("e", -1)
