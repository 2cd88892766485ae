"""Data-plane tokens: opaque to clients, encrypted, bound to machine, ports and expiry.

LM 4.5: a compact JWE with header `{"kid", "alg": "dir", "enc": "A256GCM"}` and an
empty second segment, 761 to 868 bytes.  Ours are real ones (RFC 7516) under a
random key that lives in this process only: a token cannot be forged, read, or
used after the service's end.  Many are valid at once; none can be revoked;
expiry is looked at when a request begins and never later.
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway.local.behaviours import implements
from gateway.local.interfaces import TokenRefusedError, TokenVerdict

HEADER_NAME = "X-aws-proxy-auth"
_NONCE_BYTES = 12
_TAG_BYTES = 16
_PLAINTEXT_BYTES = 496  # pads a token to about 800 bytes, inside the range seen live (LM 4.5)
_MAX_TOKEN_CHARS = 8000  # LM 2.2


class TokenKind(enum.Enum):
    """What a token is for: ordinary requests, or the shell socket only."""

    PORTS = "ports"
    SHELL = "shell"


@dataclass(frozen=True, slots=True)
class Grant:
    """What a verified token permits: inclusive port ranges."""

    port_ranges: tuple[tuple[int, int], ...]

    def allows(self, port: int) -> bool:
        return any(first <= port <= last for first, last in self.port_ranges)


class TokenSmith:
    """Makes and reads the tokens of one service process."""

    def __init__(self) -> None:
        self._cipher = AESGCM(os.urandom(32))
        self._minted = 0
        self._expired_at: dict[str | None, int] = {}
        header = {"kid": str(uuid.uuid4()), "alg": "dir", "enc": "A256GCM"}
        self._header = _encode(json.dumps(header, separators=(",", ":")).encode())

    def __repr__(self) -> str:
        return f"<TokenSmith minted={self._minted}>"

    def expire_all(self, microvm_id: str | None) -> None:
        """Let every token minted so far be expired, of one machine or of all (a fault)."""
        self._expired_at[microvm_id] = self._minted

    @implements("token-jwe-shape")
    def mint(
        self,
        microvm_id: str,
        ports: Sequence[tuple[int, int]],
        expires_s: float,
        kind: TokenKind,
    ) -> str:
        """A new token.  `expires_s` is an epoch instant of the service's clock."""
        self._minted += 1
        claims = {
            "n": self._minted,
            "vm": microvm_id,
            "ports": list(ports),
            "exp": expires_s,
            "kind": kind.value,
        }
        plaintext = json.dumps(claims, separators=(",", ":")).encode().ljust(_PLAINTEXT_BYTES)
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, plaintext, self._header.encode("ascii"))
        body, tag = sealed[:-_TAG_BYTES], sealed[-_TAG_BYTES:]
        return ".".join([self._header, "", _encode(nonce), _encode(body), _encode(tag)])

    @implements("token-refusals", "token-expiry-at-request-start")
    def read(self, token: str | None, microvm_id: str, now_s: float) -> Grant:
        """Verify a token for a machine at this instant.  Raises TokenRefusedError."""
        claims = self._open(token)
        if claims["vm"] != microvm_id or self._expired(claims, now_s):
            raise TokenRefusedError(TokenVerdict.FAILED)
        if claims["kind"] == TokenKind.SHELL.value:
            raise TokenRefusedError(TokenVerdict.SHELL_ONLY)
        return Grant(tuple((first, last) for first, last in claims["ports"]))

    def _expired(self, claims: Mapping[str, Any], now_s: float) -> bool:
        ordered = max(self._expired_at.get(name, 0) for name in (None, claims["vm"]))
        return bool(now_s >= claims["exp"] or claims["n"] <= ordered)

    def _open(self, token: str | None) -> Mapping[str, Any]:
        header, nonce, sealed = _parse(token)
        try:
            plaintext = self._cipher.decrypt(nonce, sealed, header)
        except (InvalidTag, ValueError):
            raise TokenRefusedError(TokenVerdict.FAILED) from None
        claims: Mapping[str, Any] = json.loads(plaintext)
        return claims


def _parse(token: str | None) -> tuple[bytes, bytes, bytes]:
    """Header, nonce and ciphertext with tag; what is not a JWE counts as missing (LM 4.3)."""
    missing = TokenRefusedError(TokenVerdict.MISSING)
    if not token or len(token) > _MAX_TOKEN_CHARS:
        raise missing
    parts = token.split(".")
    if len(parts) != 5:
        raise missing
    try:
        header = json.loads(_decode(parts[0]))
        nonce, body, tag = (_decode(part) for part in parts[2:])
        raw_header = parts[0].encode("ascii")
    except ValueError:
        raise missing from None
    if not isinstance(header, dict) or not {"alg", "enc"} <= header.keys():
        raise missing
    return raw_header, nonce, body + tag


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError("not base64url") from error
