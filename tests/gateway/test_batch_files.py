"""`--input` and `--collect`: what goes where, and what a hostile guest cannot do."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.batch import collect, inputs
from gateway.batch.collect import collect_files
from gateway.batch.inputs import plan_inputs, send_inputs
from gateway.errors import GatewayError, GuestFault, UsageError

from .local_host import FolderWorkspace


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def _write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _names(*arguments: str) -> list[str]:
    return [file.path for file in plan_inputs(arguments)]


def test_a_relative_path_keeps_its_name(here: Path) -> None:
    _write(here / "data" / "sales.csv")
    assert _names("data/sales.csv") == ["data/sales.csv"]
    assert _names("./data/../data/sales.csv") == ["data/sales.csv"]


def test_a_folder_brings_everything_below_it_but_tools_leftovers(here: Path) -> None:
    for name in ("a.csv", "deep/b.csv", ".git/config", "deep/__pycache__/x.pyc", ".hidden"):
        _write(here / "data" / name)
    assert _names("data") == ["data/.hidden", "data/a.csv", "data/deep/b.csv"]


def test_the_current_folder_itself_has_no_prefix(here: Path) -> None:
    _write(here / "a.csv")
    assert _names(".") == ["a.csv"]


def test_outside_the_current_folder_the_last_name_counts(here: Path) -> None:
    outside = _write(here.parent / "shared" / "deep" / "a.csv")
    assert _names(str(outside)) == ["a.csv"]
    assert _names("../shared") == ["shared/deep/a.csv"]
    assert _names("..")[0].startswith(here.parent.name + "/")


def test_a_link_that_leads_out_of_the_folder_stays_behind(here: Path) -> None:
    _write(here.parent / "secret")
    _write(here / "data" / "a")
    (here / "data" / "out").symlink_to(here.parent / "secret")
    (here / "data" / "in").symlink_to("a")
    (here / "data" / "loop").symlink_to("loop")
    assert _names("data") == ["data/a", "data/in"]


def test_the_executable_bit_is_all_that_is_kept_of_a_mode(here: Path) -> None:
    _write(here / "run.sh").chmod(0o4755)
    _write(here / "a").chmod(0o600)
    assert [oct(file.mode) for file in plan_inputs(["run.sh", "a"])] == ["0o755", "0o644"]


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [("absent", "no such file"), ("pipe", "neither a file nor a folder"), ("a\nb", "no such")],
)
def test_what_cannot_be_sent_is_one_sentence(here: Path, argument: str, sentence: str) -> None:
    os.mkfifo(here / "pipe")
    with pytest.raises(UsageError, match=sentence):
        plan_inputs([argument])


def test_a_name_that_no_workspace_takes_is_refused(here: Path) -> None:
    _write(here / "back\\slash")
    with pytest.raises(UsageError, match="--input"):
        plan_inputs(["back\\slash"])


def test_two_files_of_one_name_are_refused(here: Path) -> None:
    _write(here / "a.csv")
    other = _write(here.parent / "other" / "a.csv")
    with pytest.raises(UsageError, match=r"would be a\.csv"):
        plan_inputs(["a.csv", str(other)])
    assert _names("a.csv", "a.csv") == ["a.csv"]


def test_inputs_are_bounded(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(here / "a", "12345")
    _write(here / "b", "12345")
    monkeypatch.setattr(inputs, "MAX_INPUT_BYTES", 9)
    with pytest.raises(UsageError, match="at most"):
        plan_inputs(["a", "b"])
    monkeypatch.setattr(inputs, "MAX_INPUT_BYTES", 10)
    monkeypatch.setattr(inputs, "MAX_INPUT_FILES", 1)
    with pytest.raises(UsageError, match="2 files"):
        plan_inputs(["a", "b"])


def test_inputs_arrive(here: Path, tmp_path: Path) -> None:
    _write(here / "data" / "a.csv", "1,2\n")
    workspace = FolderWorkspace(tmp_path / "workspace")
    asyncio.run(send_inputs(plan_inputs(["data"]), workspace))
    assert (workspace.folder / "data" / "a.csv").read_text() == "1,2\n"


def test_an_input_that_vanished_is_one_sentence(here: Path, tmp_path: Path) -> None:
    path = _write(here / "a")
    planned = plan_inputs(["a"])
    path.unlink()
    with pytest.raises(UsageError, match="No such file"):
        asyncio.run(send_inputs(planned, FolderWorkspace(tmp_path)))


@pytest.fixture
def workspace(tmp_path: Path) -> FolderWorkspace:
    folder = tmp_path / "workspace"
    _write(folder / "result.csv", "1\n")
    _write(folder / "plots" / "a.png", "png")
    return FolderWorkspace(folder)


def _collect(workspace: FolderWorkspace, folder: Path, *globs: str) -> list[str]:
    written = asyncio.run(collect_files(globs, workspace, folder, folder / "report.ipynb"))
    return [path.relative_to(folder).as_posix() for path in written]


def test_matching_files_come_back(workspace: FolderWorkspace, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _collect(workspace, out, "*.csv", "plots/*", "result.*") == ["plots/a.png", "result.csv"]
    assert (out / "result.csv").read_text() == "1\n"
    assert _collect(workspace, out, "nothing*") == []


@pytest.mark.parametrize(
    "name",
    [
        "../escape",
        "/etc/cron.d/x",
        "a/../../escape",
        "~/.bashrc",
        "C:/x",
        "a\\..\\x",
        "a\x00b",
        "line\nbreak",
        "",
        ".",
        "x/./y",
        "n" * 300,
        "/".join("d" * 100),
        "REPORT.ipynb",
        7,
        None,
    ],
)
def test_a_hostile_name_is_refused_before_anything_is_written(
    workspace: FolderWorkspace, tmp_path: Path, name: Any
) -> None:
    workspace.extra_listing = [{"path": name, "size": 1, "mode": 0o644}]
    out = tmp_path / "out"
    with pytest.raises(GuestFault) as caught:
        _collect(workspace, out, "*")
    assert "\n" not in caught.value.sentence
    assert not out.exists()


@pytest.mark.parametrize("size", [-1, "1", None, 1.5])
def test_a_hostile_size_is_refused(workspace: FolderWorkspace, tmp_path: Path, size: Any) -> None:
    workspace.extra_listing = [{"path": "x", "size": size}]
    with pytest.raises(GuestFault):
        _collect(workspace, tmp_path / "out", "*")


def test_no_link_in_the_output_folder_is_followed(
    workspace: FolderWorkspace, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    precious = _write(tmp_path / "precious", "mine")
    (out / "result.csv").symlink_to(precious)
    (out / "plots").symlink_to(tmp_path)
    for glob in ("*.csv", "plots/*"):
        with pytest.raises(GuestFault):
            _collect(workspace, out, glob)
    assert precious.read_text() == "mine"
    assert not (tmp_path / "a.png").exists()


def test_collected_files_are_not_executable(workspace: FolderWorkspace, tmp_path: Path) -> None:
    (workspace.folder / "result.csv").chmod(0o4777)
    _collect(workspace, tmp_path / "out", "*.csv")
    assert (tmp_path / "out" / "result.csv").stat().st_mode & 0o7111 == 0


def test_collecting_is_bounded(
    workspace: FolderWorkspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.extra_listing = [{"path": f"f{n}", "size": 1} for n in range(2000)]
    with pytest.raises(UsageError, match="2001 files"):
        _collect(workspace, tmp_path / "out", "*")
    workspace.extra_listing = [{"path": "big", "size": 10**12}]
    with pytest.raises(UsageError, match="1000000 MB"):
        _collect(workspace, tmp_path / "out", "*")
    workspace.extra_listing = []
    # A guest that says one size and sends another is stopped by what is left.
    monkeypatch.setattr(collect, "MAX_COLLECTED_BYTES", 4)
    (workspace.folder / "result.csv").write_text("123456")

    async def lie(globs: Any) -> list[dict[str, Any]]:
        return [{"path": "result.csv", "size": 1}]

    monkeypatch.setattr(workspace, "list_files", lie)
    with pytest.raises(GatewayError):
        _collect(workspace, tmp_path / "out", "*")


def test_an_output_folder_that_cannot_be_written_is_one_sentence(
    workspace: FolderWorkspace, tmp_path: Path
) -> None:
    out = _write(tmp_path / "file")
    with pytest.raises(UsageError, match="Cannot write"):
        _collect(workspace, out, "*.csv")
