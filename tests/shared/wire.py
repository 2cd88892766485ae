"""What protocol version 1 looks like on the wire, recorded once and decoded for ever.

`wire_v1.json` was written by `python -m tests.shared.wire` from the first release of version 1.
It is never written again: guests live in snapshots for weeks while the gateway is upgraded, so
whatever a gateway or guest of version 1 has ever sent must be understood by every later one that
still claims version 1.  A change that needs other bytes needs another version, and another file.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from kernel_guest.shared import hello, manifest, payload
from kernel_guest.shared.limits import LinkLimits
from kernel_guest.shared.link import LinkCore, Role
from kernel_guest.shared.messages import (
    Channel,
    Kind,
    Lane,
    LinkMessage,
    call,
    event,
    gap,
    jupyter,
    reply,
)
from tests.shared.pair import ZLIB, Pair, make_gateway, make_guest

PLACE = Path(__file__).with_name("wire_v1.json")

LIMITS = LinkLimits(chunk_bytes=512, batch_bytes=256, compress_above_bytes=200)

PARTS = [b"signature", b'{"msg_id": "1"}', b"{}", b"{}", b'{"text": "\xc3\xbc"}']


def spoken(role: Role) -> list[LinkMessage]:
    """Every kind, channel and lane; with buffers, without, empty parts, long and compressible."""
    if role is Role.GATEWAY:
        return [
            call(1, "start", {"kernel_name": None}),
            jupyter(Channel.SHELL, PARTS),
            jupyter(Channel.CONTROL, PARTS),
            jupyter(Channel.STDIN, PARTS),
            call(2, "put_file", {"path": "a"}, hard(1_500), Lane.ORDERED),
        ]
    return [
        reply(1, {"pid": 7}),
        event("kernel_started", {"pid": 7, "cold": False}),
        jupyter(Channel.IOPUB, PARTS),
        jupyter(Channel.IOPUB, [*PARTS, b"", b"\0\xff"]),
        jupyter(Channel.IOPUB, [*PARTS, hard(1_500)]),
        jupyter(Channel.IOPUB, [*PARTS, b"line\n" * 1_000]),
        gap(3, 900),
        jupyter(Channel.STDIN, PARTS),
        reply(2, None, {"code": "no_space", "message": "disk is full"}, lane=Lane.ORDERED),
        jupyter(Channel.SHELL, PARTS),
    ]


def hard(size: int) -> bytes:
    """Bytes that do not compress, always the same."""
    return b"".join(hashlib.sha256(b"%d" % n).digest() for n in range(size // 32 + 1))[:size]


def as_json(message: LinkMessage) -> dict[str, Any]:
    return {
        "kind": message.kind.name,
        "channel": message.channel.name,
        "lane": message.lane.name,
        "parts": [part.hex() for part in message.parts],
    }


def from_json(record: dict[str, Any]) -> LinkMessage:
    return LinkMessage(
        Kind[record["kind"]],
        Channel[record["channel"]],
        tuple(bytes.fromhex(part) for part in record["parts"]),
        Lane[record["lane"]],
    )


def make_core(role: Role) -> LinkCore:
    return (make_guest if role is Role.GUEST else make_gateway)(LIMITS, **ZLIB)


def record_conversation(role: Role) -> dict[str, Any]:
    """All frames that `role` sends: handshake, some messages, a cut, the resume, the rest."""
    pair = Pair(make_core(Role.GUEST), make_core(Role.GATEWAY))
    connections: list[list[str]] = []
    for message in spoken(role):
        pair.core(role).send(message)
    for budget in (2_000, 10**6):
        pair.cut()
        pair.shake_hands()
        pair.take(role, budget)
        pair.deliver(role, 10**6)
        connections.append([frame.hex() for frame in pair.wires[role].arrived])
    received = pair.messages(Role.GATEWAY if role is Role.GUEST else Role.GUEST)
    return {"connections": connections, "messages": [as_json(message) for message in received]}


def record_signature() -> dict[str, Any]:
    challenge = hello.encode_challenge(
        hello.Challenge((1, 1), ("compress:zstd",), "ab" * 32, "boot")
    )
    limits = hello.declared(LinkLimits())
    body = hello.encode_hello_body(hello.Hello(1, (), "kernel-1", 2, 3, None, (0, 0), limits))
    signed = hello.transcript(challenge, body)
    return {"challenge": challenge.hex(), "hello_body": body.hex(), "signed": signed.hex()}


def record_everything() -> dict[str, Any]:
    run = payload.RunPayload("kernel-1", 1, 2, payload.encode_key(bytes(32)), 1_800_000_000.0)
    digest, size = manifest.hash_pieces([b"one"])
    files = manifest.make_manifest([manifest.FileEntry("a/b", size, 0o644, digest, 5)])
    return {
        "protocol": 1,
        "from_guest": record_conversation(Role.GUEST),
        "from_gateway": record_conversation(Role.GATEWAY),
        "signature": record_signature(),
        "refusals": {code.value: hello.encode_refuse(code).hex() for code in hello.RefusalCode},
        "payload": payload.encode_payload(run),
        "manifest": manifest.encode_manifest(files).decode(),
    }


def replay(role: Role, connections: list[list[str]]) -> list[LinkMessage]:
    """Feed recorded frames to a core of the present release; the messages that come out.

    Signatures are accepted unseen: they cover a nonce of the past, and are checked by themselves.
    """
    core = make_core(role)
    core._verify = lambda message, signature: True
    pair = Pair(core, core)
    if role is Role.GATEWAY:
        pair.guest = make_core(Role.GUEST)
    else:
        pair.gateway = make_core(Role.GATEWAY)
    for frames in connections:
        core.connected()
        core.take_frames(0)
        for frame in frames:
            pair.feed(role, bytes.fromhex(frame))
            core.take_frames(10**6)
        core.disconnected()
    return pair.messages(role)


if __name__ == "__main__":
    if PLACE.exists():
        sys.exit(f"{PLACE.name} is frozen; a change of the wire is a new version and a new file")
    PLACE.write_text(json.dumps(record_everything(), indent=1) + "\n")
