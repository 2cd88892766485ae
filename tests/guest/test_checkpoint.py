"""Checkpoints: what is written before is in the store after."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import stat
from pathlib import Path

import pytest

from kernel_guest.checkpoint import (
    Checkpointer,
    CheckpointRefused,
    FolderStore,
    Saved,
    open_store,
)
from kernel_guest.shared.manifest import Manifest, blob_name, decode_manifest
from kernel_guest.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.open("empty", None, tmp_path, {})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def checkpointer(workspace: Workspace, store: Path) -> Checkpointer:
    return Checkpointer(workspace, open_store(f"file://{store}", "a/b"), generation=3)


def manifest(store: Path, saved: Saved) -> Manifest:
    return decode_manifest((store / "a/b/manifests" / saved.manifest).read_bytes())


def restored(store: Path, saved: Saved) -> dict[str, bytes]:
    files = {}
    for entry in manifest(store, saved).files:
        data = (store / "a/b" / blob_name(entry.sha256)).read_bytes()
        assert len(data) == entry.size
        assert hashlib.sha256(data).hexdigest() == entry.sha256
        files[entry.path] = data
    return files


def age(path: Path, seconds: float = 100) -> None:
    """As if it had been written a while ago, so that it is not racy."""
    facts = path.stat()
    os.utime(path, (facts.st_atime - seconds, facts.st_mtime - seconds))


def test_a_save_holds_the_whole_workspace(workspace: Workspace, store: Path) -> None:
    files = {"a.txt": b"one", "d/b.bin": os.urandom(3_000_000), "d/e/empty": b"", "same": b"one"}
    for path, data in files.items():
        (workspace.root / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace.root / path).write_bytes(data)
    (workspace.root / "a.txt").chmod(0o750)
    (workspace.root / "link").symlink_to("a.txt")

    saved = asyncio.run(checkpointer(workspace, store).save())
    assert restored(store, saved) == files
    last = json.loads((store / "a/b/generations/3.json").read_text())
    assert last["manifest"] == saved.manifest
    assert saved.files == 4
    assert saved.moved_files == 4
    assert saved.bytes == sum(map(len, files.values()))
    entry = manifest(store, saved).by_path()["a.txt"]
    assert entry.mode == 0o750
    assert entry.mtime_ns == (workspace.root / "a.txt").stat().st_mtime_ns
    assert len(list((store / "a/b/blobs").rglob("*/*"))) == 3
    assert list((store / "a/b/incoming").iterdir()) == []


def test_files_of_the_store_are_private(workspace: Workspace, store: Path) -> None:
    (workspace.root / "a").write_bytes(b"secret")
    asyncio.run(checkpointer(workspace, store).save())
    files = [path for path in store.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_only_changed_files_move(workspace: Workspace, store: Path) -> None:
    async def scenario() -> None:
        saver = checkpointer(workspace, store)
        for name in ("a", "b", "c"):
            (workspace.root / name).write_bytes(name.encode())
            age(workspace.root / name)
        await saver.save()
        (workspace.root / "b").write_bytes(b"B")
        (workspace.root / "c").unlink()
        second = await saver.save()
        assert second.moved_files == 1
        assert restored(store, second) == {"a": b"a", "b": b"B"}

    asyncio.run(scenario())


def test_an_unchanged_workspace_writes_nothing_new(workspace: Workspace, store: Path) -> None:
    async def scenario() -> None:
        saver = checkpointer(workspace, store)
        (workspace.root / "a").write_bytes(b"1")
        age(workspace.root / "a")
        first = await saver.save()
        last = store / "a/b/generations/3.json"
        before = last.read_bytes()
        second = await saver.save()
        assert (second.manifest, second.moved_files) == (first.manifest, 0)
        assert last.read_bytes() == before
        assert len(list((store / "a/b/manifests").iterdir())) == 1

    asyncio.run(scenario())


def test_a_second_write_within_a_tick_of_the_clock_is_not_missed(
    workspace: Workspace, store: Path
) -> None:
    async def scenario() -> None:
        saver = checkpointer(workspace, store)
        path = workspace.root / "a"
        path.write_bytes(b"1")
        facts = path.stat()
        await saver.save()
        path.write_bytes(b"2")
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        assert restored(store, await saver.save()) == {"a": b"2"}

    asyncio.run(scenario())


class SlowStore(FolderStore):
    """The store on this disk, which waits where a slow one would."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.loop = asyncio.get_running_loop()
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()

    def add_manifest(self, name: str, manifest: bytes) -> None:
        self.loop.call_soon_threadsafe(self.entered.set)
        asyncio.run_coroutine_threadsafe(self.go_on.wait(), self.loop).result(20)
        super().add_manifest(name, manifest)


def test_who_asks_during_a_save_gets_one_that_begins_later(
    workspace: Workspace, store: Path
) -> None:
    async def scenario() -> None:
        slow = SlowStore(store / "a/b")
        saver = Checkpointer(workspace, slow, 3)
        (workspace.root / "before").write_bytes(b"1")
        first = asyncio.create_task(saver.save())
        await slow.entered.wait()
        (workspace.root / "during").write_bytes(b"2")
        second = asyncio.create_task(saver.save())
        third = asyncio.create_task(saver.save())
        await asyncio.sleep(0)
        slow.go_on.set()
        saved = [await first, await second, await third]
        assert set(restored(store, saved[0])) == {"before"}
        assert set(restored(store, saved[1])) == {"before", "during"}
        assert saved[1] is saved[2]
        await saver.close()

    asyncio.run(scenario())


def test_out_of_time_is_said_and_the_next_attempt_goes_on(
    workspace: Workspace, store: Path
) -> None:
    async def scenario() -> None:
        slow = SlowStore(store / "a/b")
        saver = Checkpointer(workspace, slow, 3)
        (workspace.root / "a").write_bytes(b"1")
        age(workspace.root / "a")
        with pytest.raises(CheckpointRefused) as refused:
            await saver.save(timeout_s=0.05)
        assert refused.value.code == "out_of_time"
        slow.go_on.set()
        assert (await saver.save()).moved_files == 0
        await saver.close()

    asyncio.run(scenario())


def test_time_that_is_over_before_the_first_file_stops_the_thread(
    workspace: Workspace, store: Path
) -> None:
    (workspace.root / "a").write_bytes(b"1")

    async def scenario() -> None:
        saver = checkpointer(workspace, store)
        with pytest.raises(CheckpointRefused, match="within its time"):
            await saver.save(timeout_s=-1)
        await saver.close()

    asyncio.run(scenario())


def test_without_a_store_or_in_a_host_folder_nothing_is_saved(
    workspace: Workspace, store: Path
) -> None:
    host = Workspace(workspace.root, own=False)
    for saver in (Checkpointer(workspace, None, 1), checkpointer(host, store)):
        assert not saver.enabled
        with pytest.raises(CheckpointRefused) as refused:
            asyncio.run(saver.save())
        assert refused.value.code == "no_store"
    assert not store.exists()


def test_a_store_that_refuses_is_the_callers_to_hear(workspace: Workspace, store: Path) -> None:
    (workspace.root / "a").write_bytes(b"1")
    store.write_bytes(b"not a folder")
    with pytest.raises(OSError):
        asyncio.run(checkpointer(workspace, store).save())


@pytest.mark.parametrize(
    ("uri", "prefix", "code"),
    [
        ("s3://bucket/x", "", "store_unsupported"),
        ("file://other-host/x", "", "bad_store"),
        ("file:relative", "", "bad_store"),
        ("https://x/y", "", "bad_store"),
        ("file:///x", "../y", "bad_store"),
        ("file:///x", "/y", "bad_store"),
    ],
)
def test_stores_that_cannot_be_used(uri: str, prefix: str, code: str) -> None:
    with pytest.raises(CheckpointRefused) as refused:
        open_store(uri, prefix)
    assert refused.value.code == code


def test_addresses_may_be_escaped(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/with%20space", "")
    store.add_manifest("m", b"{}")
    assert (tmp_path / "with space/manifests/m").read_bytes() == b"{}"
