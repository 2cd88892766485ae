"""Saves the workspace to the checkpoint store: blobs named by content, and a manifest.

Layout below `<store uri>/<prefix>/`:

    blobs/<first two hex digits>/<sha256>      one file's bytes, shared by all manifests
    manifests/<generation>-<number>.json       a whole workspace at one moment

Blobs first, then the manifest that needs them: whoever finds a manifest finds all of
its blobs.  Nothing is ever overwritten.  Which manifest counts is the gateway's record
(only the newest generation may write, design 6.4); the guest says which one it wrote,
and within one generation the highest number is the newest.

Only changed files move.  A file whose size, modification time and inode are as they
were is not read again, unless it was modified within `_RACY_NS` of being read: a second
write in the same tick of the clock would be missed (git's "racy" rule).

A file that changes while it is read goes in as it was read; the next save takes it
again, because its time differs.  Symlinks, sockets and the like are counted as skipped.

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
from kernel_guest.shared.paths import check_path, open_below
from kernel_guest.workspace import FileFacts, Workspace, walk

__all__ = ["CheckpointRefused", "Checkpointer", "FolderStore", "Saved", "Store", "open_store"]

# Bounds of one workspace; what is beyond is counted as skipped.
MAX_FILES = 100_000
MAX_FILE_BYTES = 8 * 1024**3

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

    def has_blob(self, digest: str) -> bool:
        """Whether the blob is complete in the store."""

    def add_blob(self, pieces: Callable[[], bytes]) -> tuple[str, int]:
        """Take the pieces until an empty one; gives digest and size."""

    def add_manifest(self, name: str, manifest: bytes) -> None:
        """Write a manifest under a name that is new."""


class FolderStore:
    """A store in a folder of this computer (`file://`)."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._number = 0

    def __repr__(self) -> str:
        return f"<FolderStore {self._root}>"

    def has_blob(self, digest: str) -> bool:
        """Blobs appear by rename, so one that exists is complete."""
        return self._blob(digest).exists()

    def add_blob(self, pieces: Callable[[], bytes]) -> tuple[str, int]:
        """Written under a temporary name while it is hashed, then renamed."""
        temporary = self._temporary()
        digest, size_bytes = hashlib.sha256(), 0
        try:
            with _private(temporary) as file:
                while piece := pieces():
                    digest.update(piece)
                    size_bytes += file.write(piece)
            self._place(temporary, self._blob(digest.hexdigest()))
        finally:
            temporary.unlink(missing_ok=True)
        return digest.hexdigest(), size_bytes

    def add_manifest(self, name: str, manifest: bytes) -> None:
        """Flushed to the disk before it counts."""
        temporary = self._temporary()
        with _private(temporary) as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        self._place(temporary, self._root / "manifests" / name)

    def _blob(self, digest: str) -> Path:
        return self._root / "blobs" / digest[:2] / digest

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
    facts: FileFacts
    digest: str
    read_at_ns: int

    def still(self, facts: FileFacts) -> bool:
        racy = self.facts.mtime_ns + _RACY_NS > self.read_at_ns
        return facts == self.facts and not racy


class Checkpointer:
    """Saves one workspace to one store, one save at a time."""

    def __init__(self, workspace: Workspace, store: Store | None, generation: int) -> None:
        """`store` None, or a workspace that is the client's own folder: nothing is saved."""
        self._workspace = workspace
        self._store = store
        self._generation = generation
        self._number = 0
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
        entries: list[dict[str, Any]] = []
        moved_files = moved_bytes = skipped = total_bytes = 0
        seen: dict[str, _Known] = {}
        for facts in walk(self._workspace.root):
            if time.monotonic() > ends_at_s:
                raise _out_of_time()
            if len(entries) >= MAX_FILES or facts.size_bytes > MAX_FILE_BYTES:
                skipped += 1
                continue
            known = self._known.get(facts.path)
            if known is None or not known.still(facts):
                known = self._move(facts, ends_at_s)
                if known is None:
                    skipped += 1
                    continue
                moved_files += 1
                moved_bytes += known.facts.size_bytes
            seen[facts.path] = known
            total_bytes += known.facts.size_bytes
            entries.append(_entry(known))
        self._known = seen
        name = self._write_manifest(entries)
        return Saved(
            name,
            len(entries),
            total_bytes,
            moved_files,
            moved_bytes,
            skipped,
            round(time.monotonic() - started_s, 3),
        )

    def _move(self, facts: FileFacts, ends_at_s: float) -> _Known | None:
        """Copy one file into the store; None if it is gone or cannot be read."""
        assert self._store is not None, "checked by save"
        read_at_ns = time.time_ns()
        try:
            root = os.open(self._workspace.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                file = open_below(root, facts.path, os.O_RDONLY | os.O_NONBLOCK)
            finally:
                os.close(root)
        except (OSError, PathRefused):
            return None
        try:
            digest, size_bytes = self._store.add_blob(lambda: _piece(file, ends_at_s))
        finally:
            os.close(file)
        if size_bytes != facts.size_bytes:
            facts = FileFacts(facts.path, size_bytes, facts.mode, -1)
        known = _Known(facts, digest, read_at_ns)
        self._known[facts.path] = known
        return known

    def _write_manifest(self, entries: list[dict[str, Any]]) -> str:
        assert self._store is not None, "checked by save"
        self._number += 1
        name = f"{self._generation:08d}-{self._number:08d}.json"
        manifest = {
            "version": 1,
            "generation": self._generation,
            "number": self._number,
            "time_s": time.time(),
            "files": entries,
        }
        self._store.add_manifest(name, json.dumps(manifest, separators=(",", ":")).encode())
        return name


def _entry(known: _Known) -> dict[str, Any]:
    facts = known.facts
    return {
        "path": facts.path,
        "size": facts.size_bytes,
        "mode": facts.mode,
        "sha256": known.digest,
    }


def _piece(file: int, ends_at_s: float) -> bytes:
    if time.monotonic() > ends_at_s:
        raise _out_of_time()
    return os.read(file, _PIECE_BYTES)


def _out_of_time() -> CheckpointRefused:
    return CheckpointRefused("out_of_time", "The checkpoint did not finish within its time.")


def _private(path: Path) -> Any:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "wb")
