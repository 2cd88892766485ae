"""The workspace: chosen by rule, confined, whole files only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kernel_guest.shared.errors import PathRefused, SharedError
from kernel_guest.workspace import PACKAGES, Workspace, WorkspaceRefused, walk

ALLOWED = {"KERNEL_GUEST_ALLOW_FOLDER": "1"}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.open("empty", None, tmp_path, {})


def put(workspace: Workspace, path: str, data: bytes, piece: int = 1000, **last: Any) -> None:
    pieces = [data[i : i + piece] for i in range(0, len(data), piece)] or [b""]
    for index, blob in enumerate(pieces):
        args: dict[str, Any] = {"path": path, "offset": index * piece}
        if index == len(pieces) - 1:
            args |= {"final": True, "size": len(data), **last}
        workspace.put(args, blob)


def test_own_roots_are_made_and_host_folders_need_permission(tmp_path: Path) -> None:
    assert Workspace.open("upload", None, tmp_path, {}).root == tmp_path / "workspace"
    with pytest.raises(WorkspaceRefused) as refused:
        Workspace.open("folder", str(tmp_path), tmp_path, {})
    assert refused.value.code == "folder_not_allowed"
    used = Workspace.open("folder", str(tmp_path), tmp_path, ALLOWED)
    assert (used.root, used.own) == (tmp_path, False)
    for path in (None, "relative", str(tmp_path / "none")):
        with pytest.raises(WorkspaceRefused) as refused:
            Workspace.open("folder", path, tmp_path, ALLOWED)
        assert refused.value.code == "no_such_folder"


def test_working_folders(workspace: Workspace, tmp_path: Path) -> None:
    assert workspace.working_folder("") == str(workspace.root)
    assert workspace.working_folder("a/b") == str(workspace.root / "a/b")
    assert (workspace.root / "a/b").is_dir()
    with pytest.raises(PathRefused):
        workspace.working_folder("../x")
    (workspace.root / "out").symlink_to(tmp_path)
    with pytest.raises(PathRefused):
        workspace.working_folder("out")
    host = Workspace(workspace.root, own=False)
    with pytest.raises(WorkspaceRefused):
        host.working_folder("missing")
    assert not (workspace.root / "missing").exists()


def test_files_go_in_and_come_out_in_pieces(workspace: Workspace) -> None:
    data = os.urandom(3500)
    put(workspace, "a/b/c.bin", data, mode=0o755)
    target = workspace.root / "a/b/c.bin"
    assert target.read_bytes() == data
    assert target.stat().st_mode & 0o777 == 0o755
    got, offset = b"", 0
    while True:
        result, blob = workspace.get({"path": "a/b/c.bin", "offset": offset, "length": 1000})
        got += blob
        offset += len(blob)
        if result["eof"]:
            break
    assert got == data
    assert result["size"] == 3500
    put(workspace, "empty", b"")
    assert workspace.get({"path": "empty", "offset": 0, "length": 10}) == (
        {"size": 0, "mode": 0o644, "eof": True},
        b"",
    )


def test_a_file_appears_only_when_it_is_whole(workspace: Workspace) -> None:
    put(workspace, "a.txt", b"old")
    workspace.put({"path": "a.txt", "offset": 0}, b"new te")
    assert (workspace.root / "a.txt").read_bytes() == b"old"
    assert [facts.path for facts in walk(workspace.root)] == ["a.txt"]
    with pytest.raises(WorkspaceRefused) as refused:
        workspace.put({"path": "a.txt", "offset": 6, "final": True, "size": 9}, b"xt")
    assert refused.value.code == "incomplete"
    workspace.put({"path": "a.txt", "offset": 6, "final": True, "size": 8}, b"xt")
    assert (workspace.root / "a.txt").read_bytes() == b"new text"


def test_repeated_pieces_and_leftovers_do_no_harm(workspace: Workspace) -> None:
    workspace.put({"path": "a", "offset": 0}, b"left over from an upload that broke off")
    workspace.put({"path": "a", "offset": 0}, b"abc")
    workspace.put({"path": "a", "offset": 3}, b"def")
    workspace.put({"path": "a", "offset": 0}, b"abc")
    workspace.put({"path": "a", "offset": 6, "final": True, "size": 6}, b"")
    assert (workspace.root / "a").read_bytes() == b"abcdef"


@pytest.mark.parametrize("path", ["", "/etc/x", "../x", "a/../../x", "a\0b", "~/x", "a\nb", 7])
def test_names_that_may_not_be_used(workspace: Workspace, path: object) -> None:
    with pytest.raises(SharedError):
        workspace.put({"path": path, "offset": 0}, b"")
    with pytest.raises(SharedError):
        workspace.get({"path": path, "offset": 0, "length": 1})


def test_symlinks_lead_nowhere(workspace: Workspace, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("s")
    (workspace.root / "folder").symlink_to(outside)
    (workspace.root / "file").symlink_to(outside / "secret")
    for path in ("folder/secret", "file"):
        with pytest.raises(PathRefused):
            workspace.get({"path": path, "offset": 0, "length": 1})
        with pytest.raises(PathRefused):
            put(workspace, path, b"x")
    assert (outside / "secret").read_text() == "s"
    assert sorted(os.listdir(outside)) == ["secret"]
    assert list(walk(workspace.root)) == []


def test_only_regular_files_are_read(workspace: Workspace) -> None:
    os.mkfifo(workspace.root / "pipe")
    (workspace.root / "folder").mkdir()
    for path in ("pipe", "folder"):
        with pytest.raises(PathRefused):
            workspace.get({"path": path, "offset": 0, "length": 1})
        with pytest.raises(PathRefused):
            put(workspace, path, b"x")
    with pytest.raises(FileNotFoundError):
        workspace.get({"path": "none", "offset": 0, "length": 1})


@pytest.mark.parametrize(
    ("changes", "blob"),
    [
        ({"offset": -1}, b""),
        ({"offset": True}, b""),
        ({"offset": 8 * 1024**3}, b"x"),
        ({"offset": 0}, b"x" * (1024 * 1024 + 1)),
        ({"offset": 0, "final": True}, b""),
        ({"offset": 0, "final": True, "size": 0, "mode": 0o4755}, b""),
    ],
)
def test_sizes_and_modes_are_bounded(
    workspace: Workspace, changes: dict[str, Any], blob: bytes
) -> None:
    with pytest.raises(WorkspaceRefused):
        workspace.put({"path": "a", **changes}, blob)


def test_globs(workspace: Workspace) -> None:
    for path in ("a.csv", "b.txt", "d/c.csv", "d/e/f.csv", "d/[x].csv", ".hidden"):
        put(workspace, path, b"1")

    def found(*globs: str) -> list[str]:
        result = workspace.list({"globs": list(globs)})
        assert result["complete"]
        return sorted(file["path"] for file in result["files"])

    assert found("*.csv") == ["a.csv"]
    assert found("**/*.csv") == ["a.csv", "d/[x].csv", "d/c.csv", "d/e/f.csv"]
    assert found("d/*") == ["d/[x].csv", "d/c.csv"]
    assert found("d/**") == ["d/[x].csv", "d/c.csv", "d/e/f.csv"]
    assert found("[ab].*") == ["a.csv", "b.txt"]
    assert found("[!a].*", "./a.csv") == ["a.csv", "b.txt"]
    assert found("?.txt", "*.csv") == ["a.csv", "b.txt"]
    assert found("**") == sorted(["a.csv", "b.txt", "d/c.csv", "d/e/f.csv", "d/[x].csv", ".hidden"])
    assert found("nothing") == []


@pytest.mark.parametrize("globs", [None, [], "x", [1], [""], ["[z-a]"], ["x"] * 101])
def test_globs_that_are_none(workspace: Workspace, globs: object) -> None:
    with pytest.raises(WorkspaceRefused):
        workspace.list({"globs": globs})


def test_a_listing_is_bounded_and_says_so(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernel_guest.workspace.MAX_LISTED", 3)
    for number in range(5):
        put(workspace, str(number), b"")
    result = workspace.list({"globs": ["*"]})
    assert len(result["files"]) == 3
    assert result["complete"] is False


def test_packages_go_below_the_root_and_make_the_next_kernel_see_them(
    workspace: Workspace,
) -> None:
    packages = workspace.root / PACKAGES
    assert workspace.kernel_env({}) == {"PIP_TARGET": str(packages), "PIP_UPGRADE": "1"}
    put(workspace, f"{PACKAGES}/thing/__init__.py", b"")
    assert workspace.kernel_env({})["PYTHONPATH"] == str(packages)
    assert workspace.kernel_env({"PYTHONPATH": "/x"})["PYTHONPATH"] == f"{packages}:/x"
    assert Workspace(workspace.root, own=False).kernel_env({}) == {}
