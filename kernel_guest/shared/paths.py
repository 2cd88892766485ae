"""Which names from the other side may be used, and how to open them without leaving the root.

Three lines of defence:

1. `check_path` looks at the text alone: relative, no ``..``, bounded, printable.
2. `resolve_below` answers whether an existing path stays inside the root after symlinks.  It is
   good for a message to the user; the answer can be out of date when it is used.
3. `open_below` walks from a descriptor of the root with O_NOFOLLOW for every step, so that
   notebook code which swaps a folder for a symlink in the meantime gains nothing.

`Allowance` bounds count and size of a whole transfer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from kernel_guest.shared.errors import PathRefused

MAX_NAME_BYTES = 255
"""NAME_MAX of every common file system on Linux and macOS."""

MAX_PATH_BYTES = 1024
"""PATH_MAX of macOS, the smaller of the two; Linux takes 4096."""

MAX_DEPTH = 64

_FORBIDDEN_CATEGORIES = frozenset(("Cc", "Cs", "Zl", "Zp"))
"""Control characters, lone surrogates, line and paragraph separators: they break logs, terminals
and line-based tools, and no notebook needs them."""


def check_path(path: str) -> str:
    """Return `path` if it is a normal relative POSIX path; raise `PathRefused` otherwise.

    Normal means: what it says is what it does.  No empty, ``.`` or ``..`` step, no backslash
    (a separator on Windows clients), no leading ``~``, no drive letter.
    """
    if not path or len(path) > MAX_PATH_BYTES:
        raise PathRefused(path, "empty or too long")
    if any(unicodedata.category(character) in _FORBIDDEN_CATEGORIES for character in path):
        raise PathRefused(path, "control character")
    if "\\" in path or path[0] in "/~" or path[1:2] == ":":
        raise PathRefused(path, "not a relative POSIX path")
    if len(path.encode()) > MAX_PATH_BYTES:
        raise PathRefused(path, "too long")
    _check_steps(path, path.split("/"))
    return path


def _check_steps(path: str, steps: list[str]) -> None:
    if len(steps) > MAX_DEPTH:
        raise PathRefused(path, "too deep")
    for step in steps:
        if step in ("", ".", ".."):
            raise PathRefused(path, "empty, '.' or '..' step")
        if len(step.encode()) > MAX_NAME_BYTES:
            raise PathRefused(path, "name too long")


def resolve_below(root: Path, path: str) -> Path:
    """The real place of `path` below `root`; raises `PathRefused` if symlinks lead outside."""
    real_root = root.resolve()
    found = (real_root / check_path(path)).resolve()
    if found != real_root and real_root not in found.parents:
        raise PathRefused(path, "leads outside its root")
    return found


def open_below(
    root_fd: int, path: str, flags: int, mode: int = 0o644, *, make_folders: bool = False
) -> int:
    """Open `path` below the folder `root_fd` without following any symlink; returns a descriptor.

    `flags` are those of `os.open`; O_NOFOLLOW and O_CLOEXEC are added.  With `make_folders` the
    missing folders on the way are created (0755).  Raises `PathRefused` for a bad name or a
    symlink on the way, `OSError` for everything else (missing, full, no permission).
    """
    *folders, name = check_path(path).split("/")
    here = os.dup(root_fd)
    try:
        for folder in folders:
            here = _step_into(here, folder, path, make_folders)
        return _open_final(here, name, path, flags, mode)
    finally:
        os.close(here)


def _step_into(parent: int, name: str, path: str, make: bool) -> int:
    """Exchange the descriptor `parent` for the folder `name` in it.  Closes it on success only."""
    if make:
        with contextlib.suppress(FileExistsError):  # there already is what we want
            os.mkdir(name, 0o755, dir_fd=parent)
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        child = os.open(name, flags, dir_fd=parent)
    except NotADirectoryError as error:  # also what a symlink gives, with O_DIRECTORY
        raise PathRefused(path, "a step is no folder, or a symlink") from error
    except OSError as error:
        raise _symlink_or(error, path) from error
    os.close(parent)
    return child


def _open_final(parent: int, name: str, path: str, flags: int, mode: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=parent)
    except OSError as error:
        raise _symlink_or(error, path) from error


def _symlink_or(error: OSError, path: str) -> Exception:
    if error.errno in (errno.ELOOP, errno.EMLINK):
        return PathRefused(path, "a symlink")
    return error


@dataclass(slots=True)
class Allowance:
    """How many files and bytes a transfer may still bring; each file is charged before it."""

    files: int
    size_bytes: int

    def charge(self, path: str, size_bytes: int) -> None:
        """Take one file of `size_bytes`; raises `PathRefused` when the bound is passed."""
        if size_bytes < 0:
            raise PathRefused(path, "negative size")
        if self.files < 1:
            raise PathRefused(path, "too many files")
        if size_bytes > self.size_bytes:
            raise PathRefused(path, "too many bytes in total")
        self.files -= 1
        self.size_bytes -= size_bytes
