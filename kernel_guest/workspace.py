"""The kernel's working folder, and the only files the link can reach.

One root per machine, chosen by the run payload:

* `empty`, `upload`   `<folder>/workspace`, made empty; with `upload` the gateway puts
                      the client's files there before the kernel starts.
* `folder`            a folder of this computer, used in place.  Only where the engine
                      set `KERNEL_GUEST_ALLOW_FOLDER=1`, which is the process engine on
                      the user's own computer; refused everywhere else.

Every name that comes over the link is confined (`kernel_guest.shared.paths`): relative,
no `..`, opened step by step without following symlinks, because notebook code may swap
a folder for a symlink at any moment.

An uploaded file appears under its name only when it is complete: pieces go to a
`….microvm-part` file next to it, which the last piece cuts to size and renames.  A
piece that comes twice is written twice to the same place, so repetition does no harm.

Installed packages.  With a workspace of its own, `pip install` in the kernel goes to
`.kernel-packages` below the root (`PIP_TARGET`), so that it survives a new generation
together with the files and never changes the environment the image (or the user) made.
Once something is installed there, `PYTHONPATH` names it too, which makes the next kernel a
cold one that sees the new version.  With `folder` the user's environment is used as
it is.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_guest.shared.errors import PathRefused, SharedError
from kernel_guest.shared.paths import check_path, open_below, resolve_below

__all__ = ["PACKAGES", "FileFacts", "Workspace", "WorkspaceRefused", "walk"]

PART_SUFFIX = ".microvm-part"
PACKAGES = ".kernel-packages"

ALLOW_FOLDER = "KERNEL_GUEST_ALLOW_FOLDER"

# Contract of the link: one piece of a file per call.
MAX_PIECE_BYTES = 1024 * 1024
# The disk of the smallest machine has 8 GB (LM 8).
MAX_FILE_BYTES = 8 * 1024**3
MAX_LISTED = 10_000
# A glob is matched against every file; a walk over a home folder must end.
MAX_VISITED = 200_000
_MAX_GLOBS = 100


class WorkspaceRefused(SharedError):  # noqa: N818 - named like its tree: what happened
    """A request on files that is not carried out; `code` says which rule it broke."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One regular file below the root."""

    path: str
    size_bytes: int
    mode: int
    mtime_ns: int


class Workspace:
    """The root of one machine.  Made by `/run`, used by calls and checkpoints."""

    def __init__(self, root: Path, *, own: bool) -> None:
        """`own` says whether the root belongs to the machine (and not to the user)."""
        self.root = root
        self.own = own

    def __repr__(self) -> str:
        return f"<Workspace {self.root} own={self.own}>"

    @classmethod
    def open(cls, source: str, path: str | None, folder: Path, env: Mapping[str, str]) -> Workspace:
        """Prepare the root; raises WorkspaceRefused when it may not or cannot be used."""
        if source != "folder":
            root = folder / "workspace"
            root.mkdir(parents=True, exist_ok=True)
            return cls(root, own=True)
        if env.get(ALLOW_FOLDER) != "1":
            raise WorkspaceRefused("folder_not_allowed", "This machine may not use a host folder.")
        root = Path(path or "")
        if not root.is_absolute() or not root.is_dir():
            raise WorkspaceRefused("no_such_folder", f"Not an existing absolute folder: {path!a}.")
        return cls(root, own=False)

    def working_folder(self, relative: str) -> str:
        """The absolute folder a kernel starts in; raises PathRefused or WorkspaceRefused."""
        if relative in ("", "."):
            return str(self.root)
        found = resolve_below(self.root, relative)
        if self.own:
            found.mkdir(parents=True, exist_ok=True)
        if not found.is_dir():
            raise WorkspaceRefused("no_such_folder", f"No folder {relative!a} in the workspace.")
        return str(found)

    def kernel_env(self, env: Mapping[str, str]) -> dict[str, str]:
        """What a kernel's environment `env` gets from the workspace on top."""
        if not self.own:
            return {}
        packages = self.root / PACKAGES
        # It exists before the first import looks for it: a finder that found no folder
        # would not look again.
        packages.mkdir(exist_ok=True)
        # With a target, pip leaves an older version in place unless told to upgrade.
        made = {"PIP_TARGET": str(packages), "PIP_UPGRADE": "1"}
        if any(packages.iterdir()):
            rest = env.get("PYTHONPATH")
            made["PYTHONPATH"] = os.pathsep.join([str(packages), *([rest] if rest else [])])
        return made

    def put(self, args: Mapping[str, Any], blob: bytes) -> dict[str, Any]:
        """One piece of a file: `path`, `offset`, `final`, and with it `size` and `mode`."""
        path = check_path(_text(args, "path"))
        offset = _number(args, "offset", 0, MAX_FILE_BYTES)
        if len(blob) > MAX_PIECE_BYTES or offset + len(blob) > MAX_FILE_BYTES:
            raise WorkspaceRefused("too_large", "A piece or the whole file is too large.")
        with _Descriptor(self._open_folder(path, make=True)) as folder:
            name = path.rpartition("/")[2]
            self._write_piece(folder, name, offset, blob)
            if args.get("final") is True:
                size_bytes = _number(args, "size", 0, MAX_FILE_BYTES)
                mode = _number(args, "mode", 0, 0o777, default=0o644)
                self._finish(folder, name, size_bytes, mode)
        return {}

    def get(self, args: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        """A piece of a file: `path`, `offset`, `length`; gives size, end of file, bytes."""
        path = _text(args, "path")
        offset = _number(args, "offset", 0, MAX_FILE_BYTES)
        length = _number(args, "length", 0, MAX_PIECE_BYTES)
        with _Descriptor(self._open_file(path)) as file:
            facts = os.fstat(file)
            blob = os.pread(file, length, offset)
        eof = offset + len(blob) >= facts.st_size
        return {"size": facts.st_size, "mode": stat.S_IMODE(facts.st_mode), "eof": eof}, blob

    def list(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Regular files that match one of `globs`; `complete` is false if a bound was hit."""
        globs = args.get("globs")
        if not isinstance(globs, list) or not 0 < len(globs) <= _MAX_GLOBS:
            raise WorkspaceRefused("bad_request", f"globs: a list of 1 to {_MAX_GLOBS} patterns.")
        patterns = [_glob_pattern(glob) for glob in globs]
        files: list[dict[str, Any]] = []
        for visited, facts in enumerate(walk(self.root)):
            if len(files) >= MAX_LISTED or visited >= MAX_VISITED:
                return {"files": files, "complete": False}
            if any(pattern.fullmatch(facts.path) for pattern in patterns):
                files.append({"path": facts.path, "size": facts.size_bytes, "mode": facts.mode})
        return {"files": files, "complete": True}

    def _open_folder(self, path: str, *, make: bool) -> int:
        """A descriptor of the folder that holds `path`."""
        with _Descriptor(os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
            parent = path.rpartition("/")[0]
            if not parent:
                return os.dup(root)
            if make:
                # Opening a name in it makes the folders on the way; the probe is not made.
                _probe(root, f"{parent}/{PART_SUFFIX}")
            return open_below(root, parent, os.O_RDONLY | os.O_DIRECTORY)

    def _open_file(self, path: str) -> int:
        with _Descriptor(os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
            # Non-blocking: opening a pipe for reading would wait for its writer.
            file = open_below(root, path, os.O_RDONLY | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise PathRefused(path, "not a regular file")
        return file

    def _write_piece(self, folder: int, name: str, offset: int, blob: bytes) -> None:
        with _Descriptor(
            open_below(folder, name + PART_SUFFIX, os.O_WRONLY | os.O_CREAT, 0o600)
        ) as part:
            written = 0
            while written < len(blob):
                written += os.pwrite(part, blob[written:], offset + written)

    def _finish(self, folder: int, name: str, size_bytes: int, mode: int) -> None:
        part = name + PART_SUFFIX
        with _Descriptor(open_below(folder, part, os.O_WRONLY)) as file:
            found = os.fstat(file).st_size
            if found < size_bytes:
                raise WorkspaceRefused(
                    "incomplete", f"{name[:80]!a} has {found} of {size_bytes} bytes."
                )
            os.ftruncate(file, size_bytes)
            os.fchmod(file, mode)
        self._refuse_special(folder, name)
        os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)

    def _refuse_special(self, folder: int, name: str) -> None:
        try:
            facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(facts.st_mode):
            raise PathRefused(name, "exists and is not a regular file")


def walk(root: Path) -> Iterator[FileFacts]:
    """Every regular file below `root` whose name may travel, folders in name order.

    Symlinks are not followed and not listed, unfinished uploads neither.
    """
    waiting = [""]
    while waiting:
        relative = waiting.pop()
        folders = []
        for entry in _entries(root / relative):
            path = f"{relative}/{entry.name}" if relative else entry.name
            if entry.is_dir(follow_symlinks=False):
                folders.append(path)
            elif (facts := _facts(entry, path)) is not None:
                yield facts
        waiting += reversed(folders)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []  # gone, swapped or closed since it was listed: nothing of ours


def _facts(entry: os.DirEntry[str], path: str) -> FileFacts | None:
    try:
        check_path(path)
        facts = entry.stat(follow_symlinks=False)
    except (PathRefused, OSError):
        return None
    if not stat.S_ISREG(facts.st_mode) or path.endswith(PART_SUFFIX):
        return None
    return FileFacts(path, facts.st_size, stat.S_IMODE(facts.st_mode), facts.st_mtime_ns)


class _Descriptor:
    """Closes a file descriptor at the end of a block."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _probe(root: int, path: str) -> None:
    try:
        os.close(open_below(root, path, os.O_RDONLY, make_folders=True))
    except FileNotFoundError:
        return


def _glob_pattern(glob: object) -> re.Pattern[str]:
    """`*` and `?` stay within a name, `**` crosses folders, `[...]` is a set."""
    if not isinstance(glob, str) or not 0 < len(glob) <= 1024:
        raise WorkspaceRefused("bad_request", "A glob is a text of 1 to 1024 characters.")
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]/]+\])", glob.removeprefix("./"))
    try:
        return re.compile("".join(map(_glob_piece, pieces)), re.DOTALL)
    except re.error as error:
        raise WorkspaceRefused("bad_request", f"Not a glob: {glob[:80]!a}.") from error


def _glob_piece(piece: str) -> str:
    known = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    if piece in known:
        return known[piece]
    if piece.startswith("[") and piece.endswith("]") and len(piece) > 2:
        inner = piece[1:-1].replace("\\", "\\\\").replace("[", "\\[")
        return f"[^{inner[1:]}]" if inner.startswith("!") else f"[{inner}]"
    return re.escape(piece)


def _text(args: Mapping[str, Any], name: str) -> str:
    value = args.get(name)
    if not isinstance(value, str):
        raise WorkspaceRefused("bad_request", f"{name} must be text.")
    return value


def _number(
    args: Mapping[str, Any], name: str, low: int, high: int, default: int | None = None
) -> int:
    value = args.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise WorkspaceRefused("bad_request", f"{name} must be {low} to {high}.")
    return value
