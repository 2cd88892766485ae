"""Who this machine is.  Nothing here exists before the first `/run`.

A machine comes out of a snapshot that it shares with every other machine of its image
(LM 8), so whatever is made before `/run` is the same in all of them.  `Identity` is
therefore made *by* the run hook, once, from the platform's body and the gateway's
payload, plus a boot id from fresh entropy; until then there is no boot id, no session
and no key, and the link is refused.

The gateway proves itself by signing the link's challenge (Ed25519).  The private half
never comes near the machine: notebook code can reach the agent's port on loopback and
read everything the agent's user can read.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from kernel_guest.shared.payload import RunPayload, decode_payload

__all__ = ["AlreadyRunning", "Identity", "IdentityHolder"]


class AlreadyRunning(Exception):  # noqa: N818  # says what is the case
    """A second `/run`: the first one counts."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What `/run` made of this machine."""

    boot_id: str
    microvm_id: str
    payload: RunPayload
    _public_key: Ed25519PublicKey = field(repr=False)

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Whether the holder of the gateway's private key signed `message`."""
        try:
            self._public_key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


class IdentityHolder:
    """Empty until `/run`, then constant."""

    def __init__(self) -> None:
        self._identity: Identity | None = None

    def __repr__(self) -> str:
        return f"<IdentityHolder {self._identity}>"

    @property
    def current(self) -> Identity | None:
        """The identity, or None before `/run`."""
        return self._identity

    def prepare(self, microvm_id: str, payload_text: str) -> Identity:
        """Validate a `/run` without keeping it; raises PayloadError or AlreadyRunning."""
        if self._identity is not None:
            raise AlreadyRunning(f"machine runs as {self._identity.microvm_id}")
        payload = decode_payload(payload_text)
        key = Ed25519PublicKey.from_public_bytes(payload.public_key_bytes)
        return Identity(uuid.uuid4().hex, microvm_id, payload, key)

    def commit(self, identity: Identity) -> None:
        """Keep it: from here on the machine has this identity and no other."""
        if self._identity is not None:
            raise AlreadyRunning(f"machine runs as {self._identity.microvm_id}")
        refresh_entropy()
        self._identity = identity


def refresh_entropy() -> None:
    """New seeds for what was seeded before the snapshot.  Called by run and resume.

    The operating system's generator is reseeded by the platform on restore (LM 8), so
    `os.urandom`, `uuid4` and `secrets` are safe; the `random` module is not.  Kernels
    are forked after `/run` and seed themselves.
    """
    random.seed()
