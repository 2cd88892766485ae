"""One end of a link in its own process, made from whatever release PYTHONPATH names.

Commands come on stdin, each with a length of four bytes before it: ``connect``, ``take`` (answer:
frames, then an empty one), ``>frame`` (a frame that arrived), ``report`` (answer: the received
messages as JSON).  Uses only what the shared room promises, so that a wheel of any release can be
driven by the present tests.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import BinaryIO


def read_frame(stream: BinaryIO) -> bytes:
    """The next frame; b"" for an empty one and at the end."""
    head = stream.read(4)
    return stream.read(struct.unpack("!I", head)[0]) if len(head) == 4 else b""


def write_frame(stream: BinaryIO, data: bytes) -> None:
    stream.write(struct.pack("!I", len(data)) + data)
    stream.flush()


def main(role_name: str) -> None:
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # for the tests' own helpers only
    from kernel_guest.shared import link
    from tests.shared import wire

    role = link.Role(role_name)
    core = wire.make_core(role)
    received = []
    for message in wire.spoken(role):
        core.send(message)
    while command := read_frame(sys.stdin.buffer):
        if command == b"connect":
            core.connected()
        elif command == b"take":
            for frame in core.take_frames(1_500):
                write_frame(sys.stdout.buffer, frame)
            write_frame(sys.stdout.buffer, b"")
        elif command == b"report":
            messages = [wire.as_json(message) for message in received]
            report = {"origin": link.__file__, "messages": messages}
            write_frame(sys.stdout.buffer, json.dumps(report).encode())
        else:
            for event in core.receive_frame(command[1:]):
                if isinstance(event, link.Received):
                    received.append(event.message)
                    core.consumed(event.message.size_bytes, event.message.lane)


if __name__ == "__main__":
    main(sys.argv[1])
