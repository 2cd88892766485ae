"""The run payload."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_guest.shared.errors import PayloadError
from kernel_guest.shared.payload import (
    MAX_PAYLOAD_BYTES,
    JournalBounds,
    RunPayload,
    Store,
    Workspace,
    decode_key,
    decode_payload,
    encode_key,
    encode_payload,
)

PLAIN = RunPayload("kernel-1", 1, 0, encode_key(bytes(range(32))), 1_800_000_000.5)


def changed(*path: str, value: Any) -> str:
    """The encoding of PLAIN with one member replaced, added or (None) removed."""
    tree = json.loads(encode_payload(PLAIN))
    inner = tree
    for name in path[:-1]:
        inner = inner[name]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(tree)


@given(
    payload=st.builds(
        RunPayload,
        kernel_session=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,100}", fullmatch=True),
        generation=st.integers(1, 2**63 - 1),
        epoch=st.integers(0, 2**63 - 1),
        public_key=st.binary(min_size=32, max_size=32).map(encode_key),
        time_s=st.floats(0, 1e11),
        workspace=st.sampled_from([Workspace(), Workspace("upload"), Workspace("folder", "/a b")]),
        journal=st.builds(JournalBounds, st.integers(0, 2**50), st.integers(0, 2**50)),
        store=st.sampled_from([Store(), Store("s3://bucket", "a/b/"), Store("file:///x")]),
    )
)
def test_round_trip(payload: RunPayload) -> None:
    text = encode_payload(payload)
    assert text.isascii()
    assert decode_payload(text) == payload
    assert decode_payload(text.encode()) == payload


def test_the_key_is_available_raw() -> None:
    assert PLAIN.public_key_bytes == bytes(range(32))


@pytest.mark.parametrize("key", ["", "AAAA", "!" * 43, "A" * 43 + "=", "A" * 42 + "B", "A" * 44])
def test_keys_that_are_none_are_refused(key: str) -> None:
    with pytest.raises(PayloadError):
        decode_key(key)


@pytest.mark.parametrize(
    "payload",
    [
        dataclasses.replace(PLAIN, kernel_session=""),
        dataclasses.replace(PLAIN, kernel_session="../x"),
        dataclasses.replace(PLAIN, kernel_session="a\nb"),
        dataclasses.replace(PLAIN, generation=0),
        dataclasses.replace(PLAIN, epoch=-1),
        dataclasses.replace(PLAIN, public_key="short"),
        dataclasses.replace(PLAIN, time_s=-1.0),
        dataclasses.replace(PLAIN, version=2),
        dataclasses.replace(PLAIN, workspace=Workspace("disk")),
        dataclasses.replace(PLAIN, workspace=Workspace("folder")),
        dataclasses.replace(PLAIN, workspace=Workspace("empty", "/x")),
        dataclasses.replace(PLAIN, workspace=Workspace("folder", "/\0")),
        dataclasses.replace(PLAIN, store=Store("http://x")),
        dataclasses.replace(PLAIN, store=Store("s3://x", "p" * 2_000)),
        dataclasses.replace(PLAIN, journal=JournalBounds(-1, 0)),
        dataclasses.replace(PLAIN, workspace=Workspace("folder", "é" * 1_000)),  # above 4096
    ],
)
def test_what_does_not_validate_is_not_encoded(payload: RunPayload) -> None:
    with pytest.raises(PayloadError):
        encode_payload(payload)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "x" * (MAX_PAYLOAD_BYTES + 1),
        changed("version", value=2),
        changed("version", value=True),
        changed("isolation", value="strict"),  # unknown: refused, not ignored
        changed("kernel_session", value=None),
        changed("kernel_session", value=7),
        changed("generation", value=1.0),
        changed("time_s", value="now"),
        changed("workspace", value=[]),
        changed("workspace", "extra", value=1),
        changed("workspace", "source", value=None),
        changed("journal", "memory_bytes", value=None),
        changed("journal", "disk_bytes", value=2**51),
        changed("store", "uri", value=7),
        changed("public_key", value="A" * 44),
    ],
)
def test_what_does_not_validate_is_not_decoded(text: str) -> None:
    with pytest.raises(PayloadError):
        decode_payload(text)


@given(text=st.binary(max_size=300))
def test_garbage_gives_the_one_error(text: bytes) -> None:
    with pytest.raises(PayloadError):
        decode_payload(text)
