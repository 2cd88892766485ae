"""`--input`: which local files go where in the workspace, before the first cell runs.

A relative path keeps its name (`--input data/sales.csv` is `data/sales.csv` there, a folder
brings everything below it). An absolute path, or one that leaves the current folder, comes
under its last name. Folders that are a tool's own (`.git`, `__pycache__`, …) stay behind, and
so do links that lead out of the folder given. The plan is made, and its bounds are checked,
before a machine is asked for.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gateway.batch.workspace import Workspace
from gateway.errors import UsageError
from kernel_guest.shared.errors import PathRefused
from kernel_guest.shared.paths import check_path

# The same bounds as an uploaded workspace has by default (gateway/profiles.py), doubled for
# files because these were named on purpose.
MAX_INPUT_FILES = 4_000
MAX_INPUT_BYTES = 1024**3

_SKIPPED_FOLDERS = frozenset(
    {".git", ".hg", ".venv", "node_modules", "__pycache__", ".ipynb_checkpoints"}
)


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file to send."""

    source: Path
    path: str
    size_bytes: int
    mode: int


def plan_inputs(arguments: Iterable[str]) -> list[InputFile]:
    """Every file that the arguments mean; raises UsageError when one cannot be sent."""
    files: dict[str, InputFile] = {}
    for argument in arguments:
        for file in _expand(argument):
            clash = files.setdefault(file.path, file)
            if clash.source != file.source:
                raise UsageError(
                    f"Both {clash.source} and {file.source} would be {file.path} in the workspace."
                )
    _check_bounds(files.values())
    return list(files.values())


def _check_bounds(files: Iterable[InputFile]) -> None:
    sizes = [file.size_bytes for file in files]
    if len(sizes) > MAX_INPUT_FILES:
        raise UsageError(
            f"--input means {len(sizes)} files; at most {MAX_INPUT_FILES} can be sent."
        )
    if sum(sizes) > MAX_INPUT_BYTES:
        raise UsageError(
            f"--input means {sum(sizes) / 1e6:.0f} MB; at most {MAX_INPUT_BYTES / 1e6:.0f} MB "
            "can be sent. Put large data into S3 and read it from the notebook."
        )


def _expand(argument: str) -> Iterator[InputFile]:
    source = Path(argument)
    root = workspace_name(source)
    try:
        if source.is_dir():
            yield from _walk(source, root)
        elif source.is_file():
            yield _describe(source, str(root))
        elif source.exists():
            raise UsageError(f"--input {argument}: neither a file nor a folder.")
        else:
            raise UsageError(f"--input {argument}: there is no such file or folder.")
    except OSError as error:
        raise UsageError(f"--input {argument}: {error.strerror or error}.") from error


def workspace_name(source: Path) -> PurePosixPath:
    """Where in the workspace a path of the command line goes."""
    normal = Path(os.path.normpath(source))
    if normal.is_absolute() or ".." in normal.parts:
        name = Path(os.path.abspath(source)).name
        return PurePosixPath(name) if name else PurePosixPath()
    return PurePosixPath(*normal.parts)


def _walk(folder: Path, root: PurePosixPath) -> Iterator[InputFile]:
    real_root = folder.resolve()
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        for name in sorted(names):
            file = Path(place, name)
            if file.is_file() and file.resolve().is_relative_to(real_root):
                yield _describe(file, str(root / PurePosixPath(*file.relative_to(folder).parts)))


def _describe(file: Path, path: str) -> InputFile:
    try:
        check_path(path)
    except PathRefused as error:
        raise UsageError(f"--input {file}: {error}") from error
    status = file.stat()
    executable = status.st_mode & stat.S_IXUSR
    return InputFile(file.resolve(), path, status.st_size, 0o755 if executable else 0o644)


async def send_inputs(files: Sequence[InputFile], workspace: Workspace) -> None:
    """Write the planned files; raises UsageError when one has become unreadable."""
    for file in files:
        await workspace.put_file(file.path, _read(file), file.mode)


def _read(file: InputFile) -> bytes:
    try:
        return file.source.read_bytes()
    except OSError as error:
        raise UsageError(f"--input {file.source}: {error.strerror or error}.") from error
