"""The journal's second tier: messages in segment files, first in, first out.  Pure.

Records are appended to the newest segment and read from the oldest; a segment that has
been read is deleted.  The files are private (folder 0700, files 0600) and live only as
long as the agent: what an earlier agent left is removed when the spill is opened,
because a journal without the process that numbered it is worthless.  Nothing is
fsynced: the machine's sleep keeps the page cache, and a machine that is gone takes the
kernel with it.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from pathlib import Path
from typing import BinaryIO

from kernel_guest.shared.messages import Channel, Kind, Lane, LinkMessage

__all__ = ["Spill"]

_SEGMENT_BYTES = 8 * 1024 * 1024
_HEAD = struct.Struct("<BBBI")  # kind, channel, lane, number of parts
_LENGTH = struct.Struct("<Q")
_SUFFIX = ".segment"


class Spill:
    """A bounded FIFO of messages on disk.

    `append` says False when the bound is reached or the disk refuses; the caller keeps
    the message.  `read` gives the oldest messages back and forgets them.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._segments: deque[Path] = deque()
        self._made = 0
        self._writer: BinaryIO | None = None
        self._writer_bytes = 0
        self._reader: BinaryIO | None = None
        self._disk_bytes = 0
        self._messages = 0
        self.last_error: OSError | None = None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_segments(folder)

    def __repr__(self) -> str:
        return f"<Spill messages={self._messages} disk_bytes={self._disk_bytes}>"

    def __len__(self) -> int:
        return self._messages

    @property
    def disk_bytes(self) -> int:
        """Bytes of the segment files that still exist."""
        return self._disk_bytes

    def append(self, message: LinkMessage) -> bool:
        """Write one message; False if there is no room for it."""
        record = _encode(message)
        size_bytes = sum(map(len, record))
        if self._disk_bytes + size_bytes > self._max_bytes:
            return False
        try:
            writer = self._segment_for(size_bytes)
            # One writev-like call through the buffer; a short write raises.
            writer.writelines(record)
        except OSError as error:
            self.last_error = error
            self._seal()
            return False
        self._writer_bytes += size_bytes
        self._disk_bytes += size_bytes
        self._messages += 1
        return True

    def read(self, max_bytes: int) -> list[LinkMessage]:
        """The oldest messages, at least one if there is any, about `max_bytes` of them."""
        messages: list[LinkMessage] = []
        taken_bytes = 0
        while self._messages and taken_bytes < max_bytes:
            message = self._read_one()
            messages.append(message)
            taken_bytes += message.size_bytes
        if not self._messages:
            self._drop_all()
        return messages

    def close(self) -> None:
        """Delete all segments.  Idempotent."""
        self._drop_all()

    def _segment_for(self, size_bytes: int) -> BinaryIO:
        if self._writer is not None and self._writer_bytes + size_bytes <= _SEGMENT_BYTES:
            return self._writer
        self._seal()
        path = self._folder / f"{self._made:08d}{_SUFFIX}"
        self._made += 1
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._writer = os.fdopen(descriptor, "wb", buffering=256 * 1024)
        self._writer_bytes = 0
        self._segments.append(path)
        return self._writer

    def _seal(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _read_one(self) -> LinkMessage:
        reader = self._reader
        if reader is None:
            reader = self._open_oldest()
        head = reader.read(_HEAD.size)
        if len(head) < _HEAD.size:
            self._finish_oldest()
            return self._read_one()
        self._messages -= 1
        return _decode(head, reader)

    def _open_oldest(self) -> BinaryIO:
        if len(self._segments) == 1:
            # Reader and writer never share a segment: what is appended from here on
            # goes to a new one.
            self._seal()
        self._reader = reader = self._segments[0].open("rb")
        return reader

    def _finish_oldest(self) -> None:
        assert self._reader is not None
        self._reader.close()
        self._reader = None
        path = self._segments.popleft()
        self._disk_bytes -= path.stat().st_size
        path.unlink()

    def _drop_all(self) -> None:
        self._seal()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        for path in self._segments:
            path.unlink(missing_ok=True)
        self._segments.clear()
        self._disk_bytes = 0
        self._messages = 0


def _remove_segments(folder: Path) -> None:
    for path in folder.glob(f"*{_SUFFIX}"):
        path.unlink(missing_ok=True)


def _encode(message: LinkMessage) -> list[bytes]:
    head = _HEAD.pack(message.kind, message.channel, message.lane, len(message.parts))
    lengths = b"".join(_LENGTH.pack(len(part)) for part in message.parts)
    return [head, lengths, *message.parts]


def _decode(head: bytes, reader: BinaryIO) -> LinkMessage:
    kind, channel, lane, count = _HEAD.unpack(head)
    raw = reader.read(_LENGTH.size * count)
    lengths = [value for (value,) in _LENGTH.iter_unpack(raw)]
    parts = tuple(reader.read(length) for length in lengths)
    return LinkMessage(Kind(kind), Channel(channel), parts, Lane(lane))
