"""The bounds of a link.  Each side declares its own in the handshake and enforces them itself."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB

MAX_CHUNK_BYTES = 256 * KIB
"""Payload of one DATA frame.  At 1 MB/s, the smallest machine (LM 4.4), it holds the line for
0.26 s, which is what an interrupt waits for at worst."""

MIN_CHUNK_BYTES = 64
"""Below this the unit prefix would not fit; only tests go so low."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds of one side.

    `*_window_bytes` is what it grants to the peer's sender, and also the most that its own sender
    keeps un-consumed, whatever the peer grants.  `queue_bytes` and `low_water_bytes` are per lane.
    """

    chunk_bytes: int = MAX_CHUNK_BYTES
    message_bytes: int = 512 * MIB
    parts: int = 16_384
    queue_bytes: int = 64 * MIB
    low_water_bytes: int = 512 * KIB
    urgent_window_bytes: int = 4 * MIB
    ordered_window_bytes: int = 16 * MIB
    batch_bytes: int = 64 * KIB
    compress_above_bytes: int = 2 * KIB

    def __post_init__(self) -> None:
        if not MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes must be {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}")
        if not 0 < self.parts <= 65_535 or not 0 < self.message_bytes < 2**31:
            raise ValueError("parts is at most 65535, message_bytes below 2 GiB")
        if min(self.windows) <= 0 or self.queue_bytes <= 0 or self.low_water_bytes < 0:
            raise ValueError("windows and queue must be positive")

    @property
    def windows(self) -> tuple[int, int]:
        """Granted windows, indexed by lane."""
        return (self.urgent_window_bytes, self.ordered_window_bytes)
