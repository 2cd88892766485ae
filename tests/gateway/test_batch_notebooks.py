"""Notebook files: what is refused, what is repaired, how outputs are named and written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest

from gateway.batch.notebooks import (
    check_writable,
    plan_runs,
    read_notebook,
    write_atomically,
    write_notebook,
)
from gateway.errors import UsageError


def test_with_an_output_folder_the_name_stays(tmp_path: Path) -> None:
    (run,) = plan_runs(["notes/report.ipynb"], str(tmp_path))
    assert run.output == tmp_path / "report.ipynb"
    assert run.collect_dir == tmp_path
    assert run.folder == Path("notes").absolute()


def test_several_notebooks_collect_apart(tmp_path: Path) -> None:
    runs = plan_runs(["a.ipynb", "b.ipynb"], str(tmp_path))
    assert [run.collect_dir for run in runs] == [tmp_path / "a", tmp_path / "b"]


def test_without_an_output_folder_the_source_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (run,) = plan_runs(["report.ipynb"], None)
    assert run.output == tmp_path / "report.executed.ipynb"
    assert run.collect_dir == tmp_path / "report.files"


def test_an_output_that_is_the_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is the notebook itself"):
        plan_runs([str(tmp_path / "a.ipynb")], str(tmp_path))


def test_two_notebooks_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="would both be written"):
        plan_runs(["x/a.ipynb", "y/a.ipynb"], str(tmp_path))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("not json", "is not valid JSON"),
        ("", "is not valid JSON"),
        ('{"cells": [', "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "is JSON but not a notebook"),
        ('{"a": 1}', "is JSON but not a notebook"),
        ('{"nbformat": "4"}', "is JSON but not a notebook"),
        ('{"nbformat": 99, "nbformat_minor": 0}', "cannot be read as a notebook"),
        ('{"nbformat": 4, "nbformat_minor": 5}', "is not a valid notebook"),
        ('{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [7]}', "notebook"),
        ('{"nbformat": 3, "nbformat_minor": 0, "worksheets": 7}', "notebook"),
    ],
)
def test_what_is_no_notebook_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_notebook(path)
    assert sentence in caught.value.sentence
    assert str(path) in caught.value.sentence
    assert "\n" not in caught.value.sentence


def test_other_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no notebook"):
        read_notebook(tmp_path / "absent.ipynb")
    with pytest.raises(UsageError, match="is a folder"):
        read_notebook(tmp_path)
    binary = tmp_path / "b.ipynb"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_notebook(binary)


def test_format_3_is_upgraded(tmp_path: Path) -> None:
    old = {
        "nbformat": 3,
        "nbformat_minor": 0,
        "metadata": {"name": "old"},
        "worksheets": [
            {"cells": [{"cell_type": "code", "input": ["1 + 1"], "language": "python",
                        "outputs": [], "metadata": {}, "collapsed": False}]}
        ],
    }  # fmt: skip
    path = tmp_path / "old.ipynb"
    path.write_text(json.dumps(old))
    notebook = read_notebook(path)
    assert notebook.nbformat == 4
    assert notebook.cells[0].source == "1 + 1"


def test_missing_and_double_cell_ids_are_repaired(tmp_path: Path) -> None:
    notebook: Any = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(str(number)) for number in range(3)]
    notebook.cells[1]["id"] = notebook.cells[0]["id"]
    del notebook.cells[2]["id"]
    path = tmp_path / "n.ipynb"
    path.write_text(json.dumps(notebook))
    ids = [cell["id"] for cell in read_notebook(path).cells]
    assert len(set(ids)) == 3


def _notebook_with(text: str) -> Any:
    cell = nbformat.v4.new_code_cell("x")
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
    return nbformat.v4.new_notebook(cells=[cell])


@pytest.mark.parametrize("text", ["plain\n", "ünïcode ⚡", "half a pair \ud800"])
def test_what_is_written_is_read_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "deep" / "n.ipynb"
    write_notebook(_notebook_with(text), path)
    assert read_notebook(path).cells[0].outputs[0].text == text
    assert [entry.name for entry in path.parent.iterdir()] == ["n.ipynb"]


def test_a_failed_write_leaves_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text("before")

    def fail(stream: Any) -> None:
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UsageError, match="No space left"):
        write_atomically(path, fail)
    assert path.read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_place_that_cannot_be_written_is_noticed_before_a_run(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Cannot write into"):
        check_writable(tmp_path / "file" / "below")


@contextmanager
def not_as_root() -> Iterator[None]:
    """Root may write everywhere; for the time being another user asks."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(was)


def test_a_read_only_folder_is_noticed(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with not_as_root(), pytest.raises(UsageError, match="Permission denied"):
        check_writable(tmp_path)
