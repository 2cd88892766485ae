"""`--collect`: bring files of the workspace back.

The list comes from the guest, so every name and size in it is hostile (design 6.7): names are
confined to the folder, links on the way are not followed, the executed notebook cannot be
overwritten, modes are ours, and count and bytes are bounded here whatever the guest claims.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.batch.workspace import Workspace
from gateway.errors import GuestFault, UsageError
from kernel_guest.shared.errors import PathRefused
from kernel_guest.shared.paths import check_path, open_below

MAX_COLLECTED_FILES = 1_000
MAX_COLLECTED_BYTES = 1024**3


async def collect_files(
    globs: Sequence[str], workspace: Workspace, folder: Path, forbidden: Path
) -> list[Path]:
    """Fetch what matches into `folder` and return the files written, in order of name.

    `forbidden` is the executed notebook. Raises GuestFault for a hostile answer and UsageError
    when more matches than the bounds allow or `folder` cannot be written; what was written
    before stays.
    """
    wanted = _check_listing(await workspace.list_files(globs), folder, forbidden)
    left_bytes = MAX_COLLECTED_BYTES
    for name in wanted:
        data = await workspace.get_file(name, left_bytes)
        left_bytes -= len(data)
        _write_below(folder, name, data)
    return [folder / name for name in wanted]


def _check_listing(listed: Sequence[dict[str, Any]], folder: Path, forbidden: Path) -> list[str]:
    sizes = dict(_entry(item) for item in listed)
    for name in sizes:
        # Without regard to case: on macOS REPORT.ipynb is report.ipynb.
        if str(folder / name).casefold() == str(forbidden).casefold():
            raise GuestFault(f"a file to collect has the executed notebook's name {name!r}")
    _check_bounds(len(sizes), sum(sizes.values()))
    return sorted(sizes)


def _entry(item: dict[str, Any]) -> tuple[str, int]:
    name, size = item.get("path"), item.get("size")
    if not isinstance(name, str) or not isinstance(size, int) or size < 0:
        raise GuestFault("a file to collect has no name or no size")
    try:
        return check_path(name), size
    except PathRefused as error:
        raise GuestFault(f"a file to collect has an unacceptable name: {error}") from error


def _check_bounds(count: int, size_bytes: int) -> None:
    if count > MAX_COLLECTED_FILES:
        raise UsageError(
            f"--collect matches {count} files, at most {MAX_COLLECTED_FILES} are brought back; "
            "pack them into one archive in the last cell."
        )
    if size_bytes > MAX_COLLECTED_BYTES:
        raise UsageError(
            f"--collect matches {size_bytes / 1e6:.0f} MB, at most "
            f"{MAX_COLLECTED_BYTES / 1e6:.0f} MB are brought back; "
            "write large results to S3 from the notebook."
        )


def _write_below(folder: Path, name: str, data: bytes) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        root_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            file_fd = open_below(root_fd, name, flags, make_folders=True)
        finally:
            os.close(root_fd)
        with open(file_fd, "wb") as stream:
            stream.write(data)
    except PathRefused as error:
        raise GuestFault(f"a file to collect has an unacceptable name: {error}") from error
    except OSError as error:
        raise UsageError(f"Cannot write {folder / name}: {error.strerror or error}.") from error
