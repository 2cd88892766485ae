"""Saves the workspace to the checkpoint store: blobs named by content, and a manifest.

Layout below `<store uri>/<prefix>/` (`kernel_guest.shared.manifest`):

    blobs/<aa>/<rest of sha256>     one file's bytes, shared by all manifests
    manifests/<sha256>              a whole workspace at one moment; equal trees, equal name
    generations/<number>.json       which manifest is the last of this generation

Blobs first, then the manifest that needs them, then the word that it is the last:
whoever finds one finds what it needs.  Blobs and manifests are never overwritten.  The
last word is per generation, and a generation is one machine, so no two write it; which
generation counts is the gateway's record (design 6.4).

Only changed files move.  A file whose size, modification time and mode are as they were
is not read again, unless it was modified within `_RACY_NS` of being read: a second
write in the same tick of the clock would be missed (git's "racy" rule).

A file that changes while it is read goes in as it was read, and the next save reads it
again.  Symlinks, sockets and the like are not kept; what a bound leaves out is counted
as skipped.

Saving runs on a thread, one at a time.  Who asks while a save runs gets the next one,
which begins after the question: a file written before the question is in it.  Each save
has a deadline; blobs that were written stay, so the next one goes on from there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from kernel_guest.shared.errors import PathRefused, SharedError
from kernel_guest.shared.manifest import (
    MAX_FILES,
    PERMISSION_BITS,
    FileEntry,
    Manifest,
    blob_name,
    encode_manifest,
    make_manifest,
    manifest_name,
)
from kernel_guest.shared.paths import check_path, open_below
from kernel_guest.workspace import FileFacts, Workspace, walk

__all__ = ["CheckpointRefused", "Checkpointer", "FolderStore", "Saved", "Store", "open_store"]

_PIECE_BYTES = 1024 * 1024
# Coarsest modification times in use: 2 s on FAT, 10 ms and less elsewhere.
_RACY_NS = 2_000_000_000


class CheckpointRefused(SharedError):  # noqa: N818 - named like its tree: what happened
    """No checkpoint was made; `code` is one of store_unsupported, bad_store, out_of_time,
    no_store."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Store(Protocol):
    """Where blobs and manifests lie.  Called on the checkpoint's thread."""

    def add_blob(self, pieces: Callable[[], bytes]) -> tuple[str, int]:
        """Take the pieces until an empty one; gives digest and size."""

    def add_manifest(self, name: str, manifest: bytes) -> None:
        """Write a manifest; one of that name may be there, and is the same."""

    def set_last(self, generation: int, record: bytes) -> None:
        """Replace the word which manifest is the last of a generation."""


class FolderStore:
    """A store in a folder of this computer (`file://`)."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._number = 0

    def __repr__(self) -> str:
        return f"<FolderStore {self._root}>"

    def add_blob(self, pieces: Callable[[], bytes]) -> tuple[str, int]:
        """Written under a temporary name while it is hashed, then renamed."""
        temporary = self._temporary()
        digest, size_bytes = hashlib.sha256(), 0
        try:
            with _private(temporary) as file:
                while piece := pieces():
                    digest.update(piece)
                    size_bytes += file.write(piece)
            self._place(temporary, self._root / blob_name(digest.hexdigest()))
        finally:
            temporary.unlink(missing_ok=True)
        return digest.hexdigest(), size_bytes

    def add_manifest(self, name: str, manifest: bytes) -> None:
        """Flushed to the disk before it counts."""
        self._write(self._root / "manifests" / name, manifest)

    def set_last(self, generation: int, record: bytes) -> None:
        """One rename, so a reader sees the old word or the new one."""
        self._write(self._root / "generations" / f"{generation}.json", record)

    def _write(self, final: Path, data: bytes) -> None:
        temporary = self._temporary()
        with _private(temporary) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._place(temporary, final)

    def _temporary(self) -> Path:
        self._number += 1
        folder = self._root / "incoming"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / f"{os.getpid()}-{self._number}"

    def _place(self, temporary: Path, final: Path) -> None:
        final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.replace(final)


def open_store(uri: str, prefix: str) -> Store:
    """The store of a run payload; raises CheckpointRefused for one that cannot be used."""
    parts = urlsplit(uri)
    if parts.scheme == "s3":
        raise CheckpointRefused(
            "store_unsupported", "This guest writes checkpoints to file:// stores only, not s3://."
        )
    path = unquote(parts.path)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or path[:1] != "/":
        raise CheckpointRefused("bad_store", f"Not a file:// address: {uri[:80]!a}.")
    try:
        root = Path(path) / check_path(prefix) if prefix else Path(path)
    except PathRefused as error:
        raise CheckpointRefused("bad_store", str(error)) from error
    return FolderStore(root)


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save did.  `files` and `bytes` are the whole workspace, `moved_*` what was new."""

    manifest: str
    files: int
    bytes: int
    moved_files: int
    moved_bytes: int
    skipped: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """For the reply of the `checkpoint` call and the hook's answer."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Known:
    """A file as it went into the store."""

    facts: FileFacts
    entry: FileEntry
    read_at_ns: int

    def still(self, facts: FileFacts) -> bool:
        """Whether the file need not be read again."""
        racy = self.facts.mtime_ns + _RACY_NS > self.read_at_ns
        return facts == self.facts and facts.size_bytes == self.entry.size and not racy


class Checkpointer:
    """Saves one workspace to one store, one save at a time."""

    def __init__(self, workspace: Workspace, store: Store | None, generation: int) -> None:
        """`store` None, or a workspace that is the client's own folder: nothing is saved."""
        self._workspace = workspace
        self._store = store
        self._generation = generation
        self._known: dict[str, _Known] = {}
        self._running: asyncio.Task[Saved] | None = None
        self._next: asyncio.Task[Saved] | None = None
        self.last: Saved | None = None

    def __repr__(self) -> str:
        return f"<Checkpointer {self._store} last={self.last}>"

    @property
    def enabled(self) -> bool:
        """Whether `save` would save anything."""
        return self._store is not None and self._workspace.own

    async def save(self, timeout_s: float = 3600.0) -> Saved:
        """Everything written before this call is in the store when it returns.

        Raises CheckpointRefused (`no_store`, `out_of_time`) or OSError of the store.
        """
        if not self.enabled:
            raise CheckpointRefused("no_store", "This machine has no checkpoint store.")
        ends_at_s = time.monotonic() + timeout_s
        if self._next is None:
            self._next = asyncio.create_task(self._save_after(self._running, ends_at_s))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._next)
        except TimeoutError as error:
            raise _out_of_time() from error

    async def close(self) -> None:
        """Wait for the thread of a running save; it stops at its deadline at the latest."""
        for task in (self._running, self._next):
            if task is not None:
                await asyncio.wait([task])

    async def _save_after(self, before: asyncio.Task[Saved] | None, ends_at_s: float) -> Saved:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = asyncio.current_task(), None
        try:
            self.last = await asyncio.to_thread(self._save, ends_at_s)
        finally:
            self._running = None
        return self.last

    # --- on the thread

    def _save(self, ends_at_s: float) -> Saved:
        started_s = time.monotonic()
        moved: list[FileEntry] = []
        skipped = 0
        seen: dict[str, _Known] = {}
        for facts in walk(self._workspace.root):
            if time.monotonic() > ends_at_s:
                raise _out_of_time()
            known = self._known.get(facts.path)
            if len(seen) >= MAX_FILES:
                known = None
            elif known is None or not known.still(facts):
                known = self._move(facts, ends_at_s)
                moved += [known.entry] if known else []
            if known is None:
                skipped += 1
            else:
                seen[facts.path] = known
        self._known = seen
        manifest = make_manifest(known.entry for known in seen.values())
        return Saved(
            manifest=self._write(manifest),
            files=len(manifest.files),
            bytes=manifest.size_bytes,
            moved_files=len(moved),
            moved_bytes=sum(entry.size for entry in moved),
            skipped=skipped,
            seconds=round(time.monotonic() - started_s, 3),
        )

    def _move(self, facts: FileFacts, ends_at_s: float) -> _Known | None:
        """Copy one file into the store; None if it is gone or cannot be read."""
        assert self._store is not None, "checked by save"
        read_at_ns = time.time_ns()
        try:
            file = _open(self._workspace.root, facts.path)
        except (OSError, PathRefused):
            return None
        try:
            digest, size_bytes = self._store.add_blob(lambda: _piece(file, ends_at_s))
        finally:
            os.close(file)
        mode, mtime_ns = facts.mode & PERMISSION_BITS, max(0, facts.mtime_ns)
        entry = FileEntry(facts.path, size_bytes, mode, digest, mtime_ns)
        known = _Known(facts, entry, read_at_ns)
        self._known[facts.path] = known
        return known

    def _write(self, manifest: Manifest) -> str:
        """Manifest and last word; nothing if they are as before."""
        assert self._store is not None, "checked by save"
        data = encode_manifest(manifest)
        name = manifest_name(data)
        if self.last is None or self.last.manifest != name:
            self._store.add_manifest(name, data)
            record = {"manifest": name, "time_s": time.time()}
            self._store.set_last(self._generation, json.dumps(record).encode())
        return name


def _open(root: Path, path: str) -> int:
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return open_below(folder, path, os.O_RDONLY | os.O_NONBLOCK)
    finally:
        os.close(folder)


def _piece(file: int, ends_at_s: float) -> bytes:
    if time.monotonic() > ends_at_s:
        raise _out_of_time()
    return os.read(file, _PIECE_BYTES)


def _out_of_time() -> CheckpointRefused:
    return CheckpointRefused("out_of_time", "The checkpoint did not finish within its time.")


def _private(path: Path) -> Any:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "wb")
