"""Workspace files over the link: put, get, list, and the upload of a client's folder.

Pieces of 1 MiB on the ordered lane, each answered before the next is sent: the
link's credit bounds the guest, and this bounds us. Names and sizes that come
from the guest are checked before they are used (``list_files``), a file read
is cut off at the caller's bound.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.bridge import Bridge
from gateway.errors import GuestFault, UsageError
from gateway.profiles import UploadLimits
from kernel_guest.shared.messages import Lane

if TYPE_CHECKING:
    from gateway.link import Link

__all__ = ["PIECE_BYTES", "get", "listing", "plan_upload", "put", "upload"]

PIECE_BYTES = 1024 * 1024
PIECE_TIMEOUT_S = 60.0
MAX_LISTED = 10_000
MAX_PATH_CHARS = 4096


async def put(link: Link, path: str, data: bytes, mode: int) -> None:
    """Write one file; the last piece makes it appear."""
    offset = 0
    while True:
        piece = data[offset : offset + PIECE_BYTES]
        final = offset + len(piece) >= len(data)
        args = {"path": path, "offset": offset, "mode": mode, "final": final, "size": len(data)}
        await link.call("put_file", args, blob=piece, lane=Lane.ORDERED, timeout_s=PIECE_TIMEOUT_S)
        offset += len(piece)
        if final:
            return


async def get(link: Link, path: str, max_bytes: int) -> bytes:
    """Read one file; GuestFault if it has more than ``max_bytes``."""
    data = bytearray()
    while True:
        args = {"path": path, "offset": len(data), "length": PIECE_BYTES}
        answer = await link.call("get_file", args, lane=Lane.ORDERED, timeout_s=PIECE_TIMEOUT_S)
        data += answer.blob
        if len(data) > max_bytes:
            raise GuestFault(f"{path!r} has more than {max_bytes} bytes")
        if answer.result.get("eof") is not False or not answer.blob:
            return bytes(data)


async def listing(link: Link, globs: Sequence[str]) -> list[dict[str, Any]]:
    """Files that match, as the guest says; entries that are not what they should be are refused."""
    answer = await link.call(
        "list_files", {"globs": list(globs)}, lane=Lane.ORDERED, timeout_s=PIECE_TIMEOUT_S
    )
    files = answer.result.get("files")
    if not isinstance(files, list) or len(files) > MAX_LISTED:
        raise GuestFault("its list of files is not one")
    return [_entry(item) for item in files]


def _entry(item: object) -> dict[str, Any]:
    if isinstance(item, dict):
        path, size, mode = item.get("path"), item.get("size"), item.get("mode")
        if (
            isinstance(path, str)
            and len(path) <= MAX_PATH_CHARS
            and isinstance(size, int)
            and size >= 0
            and isinstance(mode, int)
        ):
            return {"path": path, "size": size, "mode": mode}
    raise GuestFault("its list of files has an entry that is none")


# -- the client's folder --------------------------------------------------------------


class Upload(NamedTuple):
    """One file to send."""

    source: Path
    path: str
    mode: int


def plan_upload(folder: str, limits: UploadLimits) -> list[Upload]:
    """What of a folder goes up. Blocking.

    Ordinary files only; links are not followed, so nothing outside the folder
    can come along. Raises UsageError above the limits: a partial copy would be worse.
    """
    found: list[Upload] = []
    total_bytes = 0
    for path in _walk(Path(folder), limits.excludes):
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode):
            continue
        total_bytes += facts.st_size
        found.append(Upload(path, path.relative_to(folder).as_posix(), facts.st_mode & 0o777))
        if len(found) > limits.max_files or total_bytes > limits.max_bytes:
            raise UsageError(
                f"The folder {folder} holds more than {limits.max_files} files or "
                f"{limits.max_bytes} bytes to upload; exclude some (upload.excludes), raise the "
                "limits, or set workspace_source to 'none'."
            )
    return found


def _walk(folder: Path, excludes: Sequence[str]) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _excluded(name, excludes))
        for name in sorted(names):
            if not _excluded(name, excludes):
                yield Path(root, name)


def _excluded(name: str, excludes: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in excludes)


async def upload(link: Link, home: Bridge, folder: str, limits: UploadLimits) -> int:
    """Copy a folder into the workspace; returns the number of files."""
    plan = await home.work(lambda: plan_upload(folder, limits))
    for item in plan:
        data = await home.work(item.source.read_bytes)
        await put(link, item.path, data, item.mode)
    return len(plan)
