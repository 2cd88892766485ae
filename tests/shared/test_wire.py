"""Frozen bytes of protocol version 1, and peers of released versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernel_guest.shared import hello, manifest, payload
from kernel_guest.shared.link import Role
from tests.shared import wire
from tests.shared.peer_process import read_frame, write_frame

ROOT = Path(__file__).resolve().parents[2]
RELEASED = Path(__file__).with_name("released")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(wire.PLACE.read_text())
    return found


def sorted_by_lane(messages: list[Any]) -> list[Any]:
    """Order within each lane is promised; between lanes it is not."""
    return sorted(messages, key=lambda message: message.lane)


@pytest.mark.parametrize(
    ("name", "reader", "speaker"),
    [("from_guest", Role.GATEWAY, Role.GUEST), ("from_gateway", Role.GUEST, Role.GATEWAY)],
)
def test_recorded_conversations_are_understood(
    recorded: dict[str, Any], name: str, reader: Role, speaker: Role
) -> None:
    conversation = recorded[name]
    expected = [wire.from_json(record) for record in conversation["messages"]]
    assert wire.replay(reader, conversation["connections"]) == expected
    assert sorted_by_lane(expected) == sorted_by_lane(wire.spoken(speaker))


def test_recordings_hold_what_they_are_meant_to_hold(recorded: dict[str, Any]) -> None:
    frames = [
        bytes.fromhex(frame)
        for name in ("from_guest", "from_gateway")
        for connection in recorded[name]["connections"]
        for frame in connection
    ]
    assert {frame[0] for frame in frames} >= {1, 2, 3, 5}
    assert {frame[1] for frame in frames if frame[0] == 5} >= {
        0,
        1,
        2,
        3,
        7,
    }  # chunks, whole, compressed


def test_the_signed_bytes_are_the_same_for_ever(recorded: dict[str, Any]) -> None:
    found = {key: bytes.fromhex(value) for key, value in recorded["signature"].items()}
    assert hello.transcript(found["challenge"], found["hello_body"]) == found["signed"]
    assert hello.decode_hello(found["hello_body"]).kernel_session == "kernel-1"
    assert hello.decode_challenge(found["challenge"]).boot_id == "boot"


def test_refusals_are_understood(recorded: dict[str, Any]) -> None:
    for code, frame in recorded["refusals"].items():
        assert hello.decode_refuse(bytes.fromhex(frame))[0] == code
        assert hello.RefusalCode(code)


def test_payload_and_manifest_are_understood(recorded: dict[str, Any]) -> None:
    run = payload.decode_payload(recorded["payload"])
    assert (run.kernel_session, run.generation, run.epoch) == ("kernel-1", 1, 2)
    assert payload.encode_payload(run) == recorded["payload"]
    files = manifest.decode_manifest(recorded["manifest"].encode())
    assert [entry.path for entry in files.files] == ["a/b"]


def test_the_recording_is_not_overwritten() -> None:
    before = wire.PLACE.read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "tests.shared.wire"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "frozen" in done.stderr
    assert wire.PLACE.read_bytes() == before


# --- a peer of another release, in its own process


def peers() -> list[Any]:
    """This tree, and every released wheel that lies in `released/` (kept from 0.1 on)."""
    wheels = sorted(RELEASED.glob("*.whl"))
    return [
        pytest.param(str(ROOT), id="this-tree"),
        *(pytest.param(str(wheel), id=wheel.stem) for wheel in wheels),
    ]


@pytest.mark.parametrize("release", peers())
@pytest.mark.parametrize("role", list(Role))
def test_a_peer_of_another_release_understands_us_and_we_it(release: str, role: Role) -> None:
    """`role` is played by the other release; each side sends all it knows, with a cut amid it."""
    mine = Role.GATEWAY if role is Role.GUEST else Role.GUEST
    core = wire.make_core(mine)
    pair = wire.Pair(core, core)
    for message in wire.spoken(mine):
        core.send(message)
    script = Path(__file__).with_name("peer_process.py")
    environment = {**os.environ, "PYTHONPATH": release}
    with subprocess.Popen(
        [sys.executable, str(script), role.value],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=RELEASED.parent,
        env=environment,
    ) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        for budget in (1_500, 10**6):
            write_frame(peer.stdin, b"connect")
            core.connected()
            for _ in range(60):
                for frame in core.take_frames(budget if core.established else 0):
                    write_frame(peer.stdin, b">" + frame)
                write_frame(peer.stdin, b"take")
                while frame := read_frame(peer.stdout):
                    pair.feed(mine, frame)
                if budget < 10**6 and core.established and pair.messages(mine):
                    break
            core.disconnected()
        write_frame(peer.stdin, b"report")
        report = json.loads(read_frame(peer.stdout))
        peer.stdin.close()
        assert peer.wait(20) == 0
    assert report["origin"].startswith(release), "the peer is not of that release"
    theirs = [wire.from_json(record) for record in report["messages"]]
    assert sorted_by_lane(theirs) == sorted_by_lane(wire.spoken(mine))
    assert sorted_by_lane(pair.messages(mine)) == sorted_by_lane(wire.spoken(role))
