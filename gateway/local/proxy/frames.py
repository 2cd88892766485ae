"""Where WebSocket frames end in a stream of bytes (RFC 6455, 5.2).  Pure.

The proxy splices raw bytes; this is used only while a fault asks for a cut that
sends a close frame, which must stand between two frames.
"""

from __future__ import annotations

import struct

#: 1011, internal error: what a proxy that fails says, if it says anything (RFC 6455, 7.4.1).
CLOSE_CODE = 1011
_PAYLOAD = struct.pack(">H", CLOSE_CODE)
CLOSE_TO_CLIENT = b"\x88\x02" + _PAYLOAD
#: Frames to a server are masked; a mask of zeros is a mask.
CLOSE_TO_GUEST = b"\x88\x82\0\0\0\0" + _PAYLOAD


class FrameTracker:
    """Follows frame boundaries; feed it every byte of one direction since the 101."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._body_left = 0

    @property
    def at_boundary(self) -> bool:
        return not self._head and self._body_left == 0

    def feed(self, data: bytes) -> None:
        """Follow all of `data`."""
        while data:
            data = data[self._step(data) :]

    def finish_frame(self, data: bytes) -> int:
        """Follow `data` up to the end of the frame that is open; returns how far that is."""
        done = 0
        while done < len(data) and not self.at_boundary:
            done += self._step(data[done:])
        return done

    def _step(self, data: bytes) -> int:
        """Follow some bytes of `data`, never past the end of the frame; returns how many."""
        if self._body_left:
            used = min(self._body_left, len(data))
            self._body_left -= used
            return used
        used = min(_head_bytes(self._head) - len(self._head), len(data))
        self._head += data[:used]
        if len(self._head) >= 2 and len(self._head) == _head_bytes(self._head):
            self._body_left = _body_bytes(self._head)
            self._head.clear()
        return used


def _head_bytes(head: bytes | bytearray) -> int:
    """Length of the frame head that begins with `head`; 2 until the second byte is known."""
    if len(head) < 2:
        return 2
    extended = {126: 2, 127: 8}.get(head[1] & 0x7F, 0)
    return 2 + extended + (4 if head[1] & 0x80 else 0)


def _body_bytes(head: bytes | bytearray) -> int:
    length = head[1] & 0x7F
    if length == 126:
        return int.from_bytes(head[2:4], "big")
    if length == 127:
        return int.from_bytes(head[2:10], "big")
    return length
