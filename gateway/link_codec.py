"""Compression and proof for the link: the parts of its protocol that need other libraries.

zstd at level 1 is the fastest setting that shrinks notebook output at all
(techniques 14: 20 MB of text to 1 %, pictures hardly). Inflation is bounded by
what the sender declared and the link allows, and the decoder's window too: a
guest that lies about either gets an error, not our memory.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["LinkKey", "compress", "decompress"]

LEVEL = 1
# Level 1 uses windows of 512 KiB; eight times that is what we accept.
MAX_WINDOW_BYTES = 4 * 1024 * 1024


def compress(body: bytes) -> bytes:
    """One zstd frame."""
    import zstandard

    return zstandard.ZstdCompressor(level=LEVEL).compress(body)


def decompress(body: bytes, limit_bytes: int) -> bytes:
    """At most ``limit_bytes``; raises ValueError above, ZstdError for garbage."""
    import zstandard

    decoder = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    with decoder.stream_reader(body) as reader:
        inflated = reader.read(limit_bytes + 1)
    if len(inflated) > limit_bytes:
        raise ValueError(f"inflates to more than {limit_bytes} bytes")
    return bytes(inflated)


class LinkKey:
    """The gateway's Ed25519 key of one kernel session: made here, kept in memory only."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key: Ed25519PrivateKey = Ed25519PrivateKey.generate()

    def __repr__(self) -> str:
        return "<LinkKey>"

    def prove(self, message: bytes) -> bytes:
        """The signature over a handshake transcript."""
        return self._key.sign(message)

    @functools.cached_property
    def public_bytes(self) -> bytes:
        """Raw public key, 32 bytes: all that a machine learns of it."""
        return self._key.public_key().public_bytes_raw()
