"""What a workspace or a checkpoint holds: a sorted list of files, each named by its content.

    {"version": 1, "files": [[path, size, mode, sha256, mtime_ns], ...]}

The encoding is canonical (sorted, compact, ASCII), so its own sha256 names it: equal trees have
equal names, and a checkpoint is a manifest plus blobs `blob_name(sha256)`, of which only those
that the store lacks need to move.  Times are part of it, because build tools compare them.

A manifest that comes from the other side is hostile: bounded in bytes and files before anything
is looked at, paths by the rules of `paths`, permission bits only, no file that is also a folder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kernel_guest.shared import strict
from kernel_guest.shared.errors import ManifestError, PathRefused
from kernel_guest.shared.paths import check_path

MANIFEST_VERSION = 1
MAX_FILES = 100_000
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
"""100 000 files with paths of about 500 bytes."""

MAX_FILE_BYTES = 2**40
PERMISSION_BITS = 0o777
"""No setuid, setgid or sticky bit is ever restored."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, order=True)
class FileEntry:
    """One regular file."""

    path: str
    size: int
    mode: int
    sha256: str
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Files in order of their paths, each path once.  Build it with `make_manifest`."""

    files: tuple[FileEntry, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)

    @property
    def blobs(self) -> dict[str, int]:
        """Distinct contents and their sizes."""
        return {entry.sha256: entry.size for entry in self.files}

    def by_path(self) -> dict[str, FileEntry]:
        """Files by their path."""
        return {entry.path: entry for entry in self.files}


@dataclass(frozen=True, slots=True)
class Difference:
    """What leads from one manifest to another."""

    written: tuple[FileEntry, ...]
    removed: tuple[str, ...]
    new_blobs: dict[str, int]


def make_manifest(files: Iterable[FileEntry]) -> Manifest:
    """Sort and validate; raises `ManifestError`."""
    manifest = Manifest(tuple(sorted(files)))
    if len(manifest.files) > MAX_FILES:
        raise ManifestError(f"more than {MAX_FILES} files")
    for entry in manifest.files:
        _check_entry(entry)
    _check_tree(manifest.files)
    return manifest


def encode_manifest(manifest: Manifest) -> bytes:
    """The canonical encoding; raises `ManifestError` if it is above the bound."""
    rows = [[e.path, e.size, e.mode, e.sha256, e.mtime_ns] for e in manifest.files]
    data = strict.dumps({"version": MANIFEST_VERSION, "files": rows})
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"manifest of {len(data)} bytes")
    return data


def decode_manifest(data: bytes) -> Manifest:
    """Read and validate; raises `ManifestError`, also for an encoding that is not canonical."""
    try:
        found = strict.Members(strict.loads_object(data, MAX_MANIFEST_BYTES), ManifestError)
    except strict.StrictJSONError as error:
        raise ManifestError(f"manifest: {error}") from error
    found.integer("version", MANIFEST_VERSION, MANIFEST_VERSION)
    rows = found.take("files", list)
    found.end()
    if len(rows) > MAX_FILES:
        raise ManifestError(f"more than {MAX_FILES} files")
    manifest = make_manifest(map(_entry, rows))
    if encode_manifest(manifest) != data:
        raise ManifestError("not in canonical form")
    return manifest


def manifest_name(data: bytes) -> str:
    """Name of an encoded manifest: its sha256."""
    return hashlib.sha256(data).hexdigest()


def blob_name(sha256: str) -> str:
    """Place of a content in a store, fanned out so that no folder holds millions."""
    if not _DIGEST.fullmatch(sha256):
        raise ManifestError("not a sha256")
    return f"blobs/{sha256[:2]}/{sha256[2:]}"


def hash_pieces(pieces: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """sha256 and size of a content that is read piece by piece."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
    return digest.hexdigest(), size


def compare(old: Manifest, new: Manifest) -> Difference:
    """Files to write and remove, and contents that `old` does not have, to get to `new`."""
    before, after, had = old.by_path(), new.by_path(), old.blobs
    return Difference(
        written=tuple(entry for entry in new.files if before.get(entry.path) != entry),
        removed=tuple(path for path in before if path not in after),
        new_blobs={sha: size for sha, size in new.blobs.items() if sha not in had},
    )


def _entry(row: Any) -> FileEntry:
    kinds = [str, int, int, str, int]
    if type(row) is not list or [type(item) for item in row] != kinds:
        raise ManifestError("a file is [path, size, mode, sha256, mtime_ns]")
    return FileEntry(*row)


def _check_entry(entry: FileEntry) -> None:
    try:
        check_path(entry.path)
    except PathRefused as error:
        raise ManifestError(str(error)) from error
    if not 0 <= entry.size <= MAX_FILE_BYTES:
        raise ManifestError(f"impossible size {entry.size}")
    if entry.mode & ~PERMISSION_BITS:
        raise ManifestError(f"mode {entry.mode:o} has more than permission bits")
    if not _DIGEST.fullmatch(entry.sha256):
        raise ManifestError("not a sha256")
    if not 0 <= entry.mtime_ns <= strict.MAX_INTEGER:
        raise ManifestError("impossible time")


def _check_tree(files: tuple[FileEntry, ...]) -> None:
    paths = {entry.path for entry in files}
    if len(paths) != len(files):
        raise ManifestError("a path twice")
    sizes: dict[str, int] = {}
    for entry in files:
        if sizes.setdefault(entry.sha256, entry.size) != entry.size:
            raise ManifestError("one content with two sizes")
    for path in paths:
        for folder in _folders(path):
            if folder in paths:
                raise ManifestError(f"{ascii(folder)[:80]} is a file and a folder")


def _folders(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path
