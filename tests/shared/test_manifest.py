"""Manifests."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_guest.shared import manifest as module
from kernel_guest.shared import strict
from kernel_guest.shared.errors import ManifestError
from kernel_guest.shared.manifest import (
    FileEntry,
    Manifest,
    blob_name,
    compare,
    decode_manifest,
    encode_manifest,
    hash_pieces,
    make_manifest,
    manifest_name,
)


def entry(path: str, content: bytes = b"", mode: int = 0o644, mtime_ns: int = 0) -> FileEntry:
    return FileEntry(path, len(content), mode, hashlib.sha256(content).hexdigest(), mtime_ns)


A = entry("a", b"one")
B = entry("folder/b", b"two")


def encoded(rows: list[Any], version: int = 1) -> bytes:
    return strict.dumps({"version": version, "files": rows})


def row(**changes: Any) -> list[Any]:
    return list({**{f.name: getattr(A, f.name) for f in dataclasses.fields(A)}, **changes}.values())


@settings(max_examples=40)
@given(
    contents=st.dictionaries(
        st.from_regex(r"([a-z]{1,2}/){0,2}[0-9]{1,3}", fullmatch=True), st.binary(max_size=5)
    )
)
def test_round_trip_and_one_name_for_equal_trees(contents: dict[str, bytes]) -> None:
    files = [entry(path, content) for path, content in contents.items()]
    made = make_manifest(files)
    data = encode_manifest(made)
    assert decode_manifest(data) == made
    again = encode_manifest(make_manifest(reversed(files)))
    assert manifest_name(again) == manifest_name(data)
    assert made.size_bytes == sum(map(len, contents.values()))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        encoded([], version=2),
        encoded([[]]),
        encoded([7]),
        encoded([row(path="../x")]),
        encoded([row(path="/x")]),
        encoded([row(path=7)]),
        encoded([row(size=-1)]),
        encoded([row(size=True)]),
        encoded([row(mode=0o4755)]),
        encoded([row(sha256="x" * 64)]),
        encoded([row(sha256="A" * 64)]),
        encoded([row(mtime_ns=-1)]),
        encoded([row(), row()]),
        encoded([row(path="a"), row(path="a/b")]),
        encoded([row(path="b"), row(path="a")]),  # not sorted
        encoded([row(path="a"), row(path="b", size=9)]),  # one content, two sizes
        b" " + encoded([row()]),
        strict.dumps({"version": 1, "files": [], "more": 1}),
    ],
)
def test_hostile_manifests_are_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_manifest(data)


def test_count_and_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    two = encode_manifest(make_manifest([A, B]))
    monkeypatch.setattr(module, "MAX_FILES", 1)
    with pytest.raises(ManifestError, match="more than 1 files"):
        decode_manifest(two)
    with pytest.raises(ManifestError, match="more than 1 files"):
        make_manifest([A, B])
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 10)
    with pytest.raises(ManifestError, match="bytes"):
        decode_manifest(two)
    with pytest.raises(ManifestError, match="bytes"):
        encode_manifest(Manifest((A,)))


def test_compare_tells_what_has_to_move() -> None:
    old = make_manifest([A, B, entry("gone", b"x")])
    new = make_manifest(
        [A, dataclasses.replace(B, mtime_ns=5), entry("copy", b"one"), entry("n", b"new")]
    )
    found = compare(old, new)
    assert [file.path for file in found.written] == ["copy", "folder/b", "n"]
    assert found.removed == ("gone",)
    assert found.new_blobs == {hashlib.sha256(b"new").hexdigest(): 3}
    assert compare(old, old) == module.Difference((), (), {})


def test_names_of_contents() -> None:
    digest, size = hash_pieces([b"on", memoryview(b"e")])
    assert (digest, size) == (A.sha256, 3)
    assert blob_name(digest) == f"blobs/{digest[:2]}/{digest[2:]}"
    with pytest.raises(ManifestError):
        blob_name("../../etc/passwd")


@given(data=st.binary(max_size=200))
def test_garbage_gives_the_one_error(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_manifest(data)
