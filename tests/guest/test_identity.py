"""Identity: made once, by the first run, and only by it."""

from __future__ import annotations

import random
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kernel_guest.identity import AlreadyRunning, IdentityHolder
from kernel_guest.shared.errors import PayloadError
from kernel_guest.shared.payload import RunPayload, encode_key, encode_payload

PRIVATE = Ed25519PrivateKey.generate()
PUBLIC = encode_key(PRIVATE.public_key().public_bytes_raw())
PAYLOAD = encode_payload(RunPayload("session", 2, 5, PUBLIC, time.time()))


def test_there_is_nothing_before_run() -> None:
    assert IdentityHolder().current is None


def test_the_first_run_counts() -> None:
    holder = IdentityHolder()
    identity = holder.prepare("microvm-1", PAYLOAD)
    assert holder.current is None
    holder.commit(identity)
    assert holder.current is identity
    assert identity.microvm_id == "microvm-1"
    assert identity.payload.generation == 2
    with pytest.raises(AlreadyRunning, match="microvm-1"):
        holder.prepare("microvm-2", PAYLOAD)
    with pytest.raises(AlreadyRunning):
        holder.commit(identity)


def test_each_boot_is_another() -> None:
    boots = {IdentityHolder().prepare("m", PAYLOAD).boot_id for _ in range(10)}
    assert len(boots) == 10


def test_a_run_refreshes_seeds_that_the_snapshot_shares() -> None:
    drawn = set()
    for _ in range(3):
        random.seed(1)
        holder = IdentityHolder()
        holder.commit(holder.prepare("m", PAYLOAD))
        drawn.add(random.random())
    assert len(drawn) == 3


@pytest.mark.parametrize("payload", ["", "{}", "[]", "{" * 3000, PAYLOAD + "x" * 5000])
def test_bad_payloads_leave_it_empty(payload: str) -> None:
    holder = IdentityHolder()
    with pytest.raises(PayloadError):
        holder.prepare("m", payload)
    assert holder.current is None


def test_signatures() -> None:
    identity = IdentityHolder().prepare("m", PAYLOAD)
    signature = PRIVATE.sign(b"challenge")
    assert identity.verify(b"challenge", signature)
    assert not identity.verify(b"another", signature)
    assert not identity.verify(b"challenge", b"")
    assert not identity.verify(b"challenge", Ed25519PrivateKey.generate().sign(b"challenge"))


def test_the_key_is_not_in_the_representation() -> None:
    assert "_public_key" not in repr(IdentityHolder().prepare("m", PAYLOAD))
