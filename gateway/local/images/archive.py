"""Unpacking a code artifact, which is hostile input until proven otherwise.

A zip may name files outside the target, hold links, or expand without end.  All
of it is refused before the first byte is written, and sizes are counted again
while writing, because a zip's own directory may lie.
"""

from __future__ import annotations

import errno
import lzma
import shutil
import stat
import struct
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO

MAX_ENTRIES = 10_000
MAX_ARCHIVE_BYTES = 1 << 30
MAX_UNPACKED_BYTES = 2 << 30
_COPY_BYTES = 1 << 20
_SYSTEM_UNIX = 3

#: What the zipfile module lets out when an archive is damaged, encrypted or strange.
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    NotImplementedError,
    RuntimeError,
    ValueError,
    EOFError,
)
#: Names that the file system refuses: too long, or a file where a folder must be.
_BAD_NAMES = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL)


class ArchiveError(Exception):
    """The archive cannot be used; `reason` begins with a code of the ARCHIVE_ family (LM 9.2)."""

    def __init__(self, code: str, problem: str) -> None:
        super().__init__(f"{code}: {problem}")
        self.reason = f"{code}: {problem}"


def unpack(archive: Path, target: Path) -> None:
    """Unpack into the existing empty folder `target`.  Raises ArchiveError, OSError."""
    if archive.stat().st_size > MAX_ARCHIVE_BYTES:
        raise ArchiveError("ARCHIVE_TOO_LARGE", f"it has more than {MAX_ARCHIVE_BYTES} bytes")
    try:
        with zipfile.ZipFile(archive) as opened:
            entries = opened.infolist()
            _check(entries)
            budget_bytes = MAX_UNPACKED_BYTES
            for entry in entries:
                budget_bytes -= _write(opened, entry, target, budget_bytes)
    except _UNREADABLE as error:
        raise ArchiveError("ARCHIVE_INVALID", f"it is not a readable zip file ({error})") from error
    except OSError as error:
        if error.errno not in _BAD_NAMES:
            raise
        raise ArchiveError("ARCHIVE_INVALID", f"a name in it cannot be used ({error})") from error


def _check(entries: list[zipfile.ZipInfo]) -> None:
    if len(entries) > MAX_ENTRIES:
        raise ArchiveError("ARCHIVE_TOO_LARGE", f"it has more than {MAX_ENTRIES} entries")
    if sum(entry.file_size for entry in entries) > MAX_UNPACKED_BYTES:
        raise ArchiveError(
            "ARCHIVE_TOO_LARGE", f"it unpacks to more than {MAX_UNPACKED_BYTES} bytes"
        )
    seen: set[str] = set()
    for entry in entries:
        _check_entry(entry)
        key = str(PurePosixPath(entry.filename))
        if key in seen and not entry.is_dir():
            raise ArchiveError("ARCHIVE_INVALID", f"{entry.filename!r} occurs twice")
        seen.add(key)


def _check_entry(entry: zipfile.ZipInfo) -> None:
    path = PurePosixPath(entry.filename)
    outside = path.is_absolute() or ".." in path.parts or not path.parts
    if outside or "\\" in entry.filename or "\0" in entry.orig_filename:
        raise ArchiveError("ARCHIVE_INVALID", f"the name {entry.filename!r} leaves the archive")
    mode = entry.external_attr >> 16
    special = stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR)
    if entry.create_system == _SYSTEM_UNIX and special:
        raise ArchiveError("ARCHIVE_INVALID", f"{entry.filename!r} is a link or a special file")


def _write(opened: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path, budget_bytes: int) -> int:
    path = target / entry.filename
    if entry.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with opened.open(entry) as source, path.open("xb") as sink:
        return _copy(source, sink, budget_bytes)


def _copy(source: IO[bytes], sink: IO[bytes], budget_bytes: int) -> int:
    written = 0
    while chunk := source.read(_COPY_BYTES):
        written += len(chunk)
        if written > budget_bytes:
            raise ArchiveError("ARCHIVE_TOO_LARGE", "it unpacks to more than it declares")
        sink.write(chunk)
    return written


def remove(folder: Path) -> None:
    """Remove what was unpacked or built; no folder is fine."""
    if folder.exists():
        shutil.rmtree(folder)
