"""Notebook files of a batch run: read strictly, write atomically, name the outputs.

A notebook comes from anywhere; whatever is wrong with it must be one sentence before a
machine is launched. The executed notebook is written beside its final name and renamed, so
that a reader never sees half of it and an interrupted run leaves the previous one.
"""

from __future__ import annotations

import json
import os
import secrets
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import nbformat
from nbformat.validator import normalize
from nbformat.warnings import DuplicateCellId, MissingIDFieldWarning

from gateway.errors import UsageError

# A notebook is JSON text: 1 GiB of it does not fit a laptop's memory when parsed.
MAX_NOTEBOOK_BYTES = 1024**3


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One notebook of a command line: where it comes from and where its results go."""

    name: str
    source: Path
    output: Path
    collect_dir: Path

    @property
    def folder(self) -> Path:
        """The notebook's own folder, in which its relative paths are meant."""
        return self.source.parent


def plan_runs(sources: Sequence[str], output_dir: str | None) -> list[PlannedRun]:
    """Where each notebook's results will lie.

    With an output folder: `<folder>/<name>.ipynb`, and collected files beside it (below
    `<folder>/<name>/` when several notebooks run). Without: `./<name>.executed.ipynb` and
    `./<name>.files/`. That is the current folder because a notebook's own may be read-only
    or under version control, and another name because a run must never replace its source.
    Raises UsageError when two outputs, or an output and a source, would be the same file.
    """
    runs = [_plan_one(Path(source), output_dir, len(sources) > 1) for source in sources]
    _refuse_clashes(runs)
    return runs


def _plan_one(source: Path, output_dir: str | None, several: bool) -> PlannedRun:
    source = source.absolute()
    name = source.stem
    if output_dir is None:
        here = Path.cwd()
        return PlannedRun(name, source, here / f"{name}.executed.ipynb", here / f"{name}.files")
    folder = Path(output_dir).absolute()
    collect_dir = folder / name if several else folder
    return PlannedRun(name, source, folder / f"{name}.ipynb", collect_dir)


def _refuse_clashes(runs: Sequence[PlannedRun]) -> None:
    sources = {os.path.realpath(run.source) for run in runs}
    outputs: dict[str, Path] = {}
    for run in runs:
        output = os.path.realpath(run.output)
        if output in sources:
            raise UsageError(
                f"{run.output} is the notebook itself; choose another folder with --output-dir."
            )
        if output in outputs:
            raise UsageError(
                f"{outputs[output]} and {run.source} would both be written to {run.output}; "
                "run them one by one, each with its own --output-dir."
            )
        outputs[output] = run.source


def read_notebook(path: Path) -> nbformat.NotebookNode:
    """The notebook in format 4, valid; raises UsageError with one sentence otherwise."""
    text = _read_text(path)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(document, dict) or not isinstance(document.get("nbformat"), int):
        raise UsageError(f"{path} is JSON but not a notebook: it has no nbformat number.")
    return _upgrade(path, text)


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder, not a notebook.")
        if path.stat().st_size > MAX_NOTEBOOK_BYTES:
            raise UsageError(f"{path} is larger than 1 GiB, which no kernel client can load.")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(f"There is no notebook {path}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a notebook: it is not UTF-8 text.") from error
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror or error}.") from error


def _upgrade(path: Path, text: str) -> nbformat.NotebookNode:
    try:
        # The steps of nbformat.reads, without its log line for a notebook that needs repair.
        found = nbformat.reader.reads(text)  # type: ignore[no-untyped-call]
        converted = nbformat.convert(found, 4)  # type: ignore[no-untyped-call]
        notebook = _with_cell_ids(converted)
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        raise UsageError(f"{path} is not a valid notebook: {_first_line(error)}.") from error
    except Exception as error:
        # nbformat's converters index into what they expect: any garbage inside an old format
        # ends in KeyError, AttributeError or TypeError. All of them mean the same to the user.
        raise UsageError(f"{path} cannot be read as a notebook: {_first_line(error)}.") from error
    return notebook


def _with_cell_ids(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    with warnings.catch_warnings():
        # It warns that it does what it is called for.
        warnings.simplefilter("ignore", MissingIDFieldWarning)
        warnings.simplefilter("ignore", DuplicateCellId)
        repaired: nbformat.NotebookNode = normalize(notebook)[1]
        return repaired


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")[:300]


def write_notebook(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Write atomically; raises UsageError when the place cannot be written."""
    write_atomically(path, lambda stream: _dump(notebook, stream))


def _dump(notebook: nbformat.NotebookNode, stream: IO[bytes]) -> None:
    # Not nbformat.write: it validates 200 MB of output a second time and logs an error for a
    # notebook that is cut in the middle of a cell, which is exactly what a partial save is.
    stream.write(_encode(notebook))
    stream.write(b"\n")


def _encode(notebook: nbformat.NotebookNode) -> bytes:
    try:
        return _dumps(notebook, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # A cell printed half a surrogate pair: legal in JSON as an escape, not in UTF-8.
        return _dumps(notebook, ensure_ascii=True).encode()


def _dumps(notebook: nbformat.NotebookNode, *, ensure_ascii: bool) -> str:
    return str(nbformat.v4.writes(notebook, ensure_ascii=ensure_ascii))  # type: ignore[no-untyped-call]


def write_atomically(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Create the folders, let `fill` write a private sibling, rename it to `path`."""
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as stream:
                fill(stream)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror or error}.") from error


def check_writable(folder: Path) -> None:
    """Raise UsageError now rather than after an hour of cells. Makes nothing, not even `folder`."""
    try:
        # ``exists`` raises too, below a folder that may not be searched.
        place = next(place for place in (folder, *folder.parents) if place.exists())
        probe = place / f".{secrets.token_hex(4)}.tmp"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise UsageError(f"Cannot write into {folder}: {error.strerror or error}.") from error
