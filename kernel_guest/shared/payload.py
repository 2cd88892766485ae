"""The run payload: what a new machine is told, once, by its first `/run` hook.

At most 4096 bytes of JSON (LM 2.2: runHookPayload), no secret in it: the gateway proves itself
later by signing a challenge, and only its *public* key travels here.  Both sides validate the
same way.  A member that is not known is refused, not ignored: a guest that skipped, say, an
isolation setting it does not understand would run with less than was asked for.  Therefore a
member added later has a default and is left out of the JSON while it has it.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field
from typing import Any

from kernel_guest.shared import strict
from kernel_guest.shared.errors import PayloadError

MAX_PAYLOAD_BYTES = 4096
PAYLOAD_VERSION = 1
PUBLIC_KEY_BYTES = 32
MAX_SESSION_CHARS = 128
MAX_PATH_CHARS = 1024
MAX_URI_CHARS = 1024
MAX_BOUND_BYTES = 2**50
WORKSPACE_SOURCES = ("empty", "folder", "upload")
STORE_SCHEMES = ("file://", "s3://")

_SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where the kernel's files come from; `path` only with source `folder`."""

    source: str = "empty"
    path: str | None = None


@dataclass(frozen=True, slots=True)
class JournalBounds:
    """How much the guest may hold for a gateway that does not take it."""

    memory_bytes: int = 32 * 1024 * 1024
    disk_bytes: int = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Store:
    """Checkpoint store: a ``file://`` or ``s3://`` address and the prefix of this session."""

    uri: str | None = None
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class RunPayload:
    """Identity of a machine.  Made by the gateway for RunMicrovm, read by the guest's `/run`."""

    kernel_session: str
    generation: int
    epoch: int
    public_key: str
    time_s: float
    workspace: Workspace = field(default_factory=Workspace)
    journal: JournalBounds = field(default_factory=JournalBounds)
    store: Store = field(default_factory=Store)
    version: int = PAYLOAD_VERSION

    @property
    def public_key_bytes(self) -> bytes:
        """The raw Ed25519 key."""
        return decode_key(self.public_key)


def encode_key(raw: bytes) -> str:
    """Raw Ed25519 public key to base64url without padding."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def decode_key(text: str) -> bytes:
    """The reverse of `encode_key`; raises `PayloadError` unless it is one canonical key."""
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise PayloadError("public_key is not base64url") from error
    if len(raw) != PUBLIC_KEY_BYTES or encode_key(raw) != text:
        raise PayloadError(f"public_key must be {PUBLIC_KEY_BYTES} bytes in base64url")
    return raw


def encode_payload(payload: RunPayload) -> str:
    """The JSON for runHookPayload; raises `PayloadError` if it is invalid or above 4096 bytes."""
    text = strict.dumps(_as_json(payload)).decode("ascii")
    if decode_payload(text) != payload:
        raise PayloadError("payload does not survive its own encoding")
    return text


def decode_payload(text: str | bytes) -> RunPayload:
    """Read and validate; raises `PayloadError`."""
    try:
        found = strict.Members(strict.loads_object(text, MAX_PAYLOAD_BYTES), PayloadError)
    except strict.StrictJSONError as error:
        raise PayloadError(f"run payload: {error}") from error
    found.integer("version", PAYLOAD_VERSION, PAYLOAD_VERSION)
    payload = RunPayload(
        kernel_session=_session(found),
        generation=found.integer("generation", 1),
        epoch=found.integer("epoch"),
        public_key=found.text("public_key", 64),
        time_s=_time(found),
        workspace=_workspace(found),
        journal=_journal(found),
        store=_store(found),
    )
    found.end()
    decode_key(payload.public_key)
    return payload


def _as_json(payload: RunPayload) -> dict[str, Any]:
    return {
        "version": payload.version,
        "kernel_session": payload.kernel_session,
        "generation": payload.generation,
        "epoch": payload.epoch,
        "public_key": payload.public_key,
        "time_s": float(payload.time_s),
        "workspace": {"source": payload.workspace.source, "path": payload.workspace.path},
        "journal": {
            "memory_bytes": payload.journal.memory_bytes,
            "disk_bytes": payload.journal.disk_bytes,
        },
        "store": {"uri": payload.store.uri, "prefix": payload.store.prefix},
    }


def _session(found: strict.Members) -> str:
    session = found.text("kernel_session", MAX_SESSION_CHARS)
    if not _SESSION.fullmatch(session):
        raise PayloadError("kernel_session must be letters, digits and . _ : -")
    return session


def _time(found: strict.Members) -> float:
    time_s = found.take("time_s", float)
    if not 0 <= time_s < 1e12:
        raise PayloadError("time_s must be seconds since 1970")
    return time_s


def _workspace(found: strict.Members) -> Workspace:
    inner = strict.Members(found.take("workspace", dict), PayloadError)
    made = Workspace(inner.text("source", 16), inner.optional_text("path", MAX_PATH_CHARS))
    inner.end()
    if made.source not in WORKSPACE_SOURCES:
        raise PayloadError(f"workspace source must be one of {', '.join(WORKSPACE_SOURCES)}")
    if (made.source == "folder") != (made.path is not None):
        raise PayloadError("workspace path goes with source folder, and only with it")
    return made


def _journal(found: strict.Members) -> JournalBounds:
    inner = strict.Members(found.take("journal", dict), PayloadError)
    made = JournalBounds(
        inner.integer("memory_bytes", 0, MAX_BOUND_BYTES),
        inner.integer("disk_bytes", 0, MAX_BOUND_BYTES),
    )
    inner.end()
    return made


def _store(found: strict.Members) -> Store:
    inner = strict.Members(found.take("store", dict), PayloadError)
    made = Store(
        inner.optional_text("uri", MAX_URI_CHARS), inner.text("prefix", MAX_PATH_CHARS, "")
    )
    inner.end()
    if made.uri is not None and not made.uri.startswith(STORE_SCHEMES):
        raise PayloadError("store uri must begin with file:// or s3://")
    return made
