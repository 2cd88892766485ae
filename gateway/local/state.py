"""What the local service remembers in its state folder: `state.sqlite`, 0600.

Images, versions, builds, machine records, client tokens and a few facts about
the service itself (its key pair, its last port).  Records outlive the service;
machines do not.  One process and one thread use the file: the service holds
`service.lock` for as long as it lives.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE images (arn TEXT PRIMARY KEY, doc TEXT NOT NULL);
CREATE TABLE versions (
    arn TEXT NOT NULL, version TEXT NOT NULL, doc TEXT NOT NULL, PRIMARY KEY (arn, version));
CREATE TABLE builds (
    arn TEXT NOT NULL, version TEXT NOT NULL, id TEXT NOT NULL, doc TEXT NOT NULL,
    PRIMARY KEY (arn, version, id));
CREATE TABLE machines (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, arn TEXT NOT NULL,
    version TEXT NOT NULL, ended_at REAL, doc TEXT NOT NULL);
CREATE INDEX machines_by_image ON machines (arn, number);
CREATE TABLE client_tokens (
    operation TEXT NOT NULL, token TEXT NOT NULL, fingerprint TEXT NOT NULL,
    answer TEXT NOT NULL, PRIMARY KEY (operation, token));
"""


class StateError(Exception):
    """The state folder cannot be used; the text is a sentence for people."""


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """What the API shows of a machine, plus the size that the quota counts."""

    microvm_id: str
    image_arn: str
    image_version: str
    endpoint: str
    started_at: float
    maximum_duration_s: int
    memory_mib: int
    ingress: tuple[str, ...]
    egress: tuple[str, ...]
    state: str = "PENDING"
    state_reason: str | None = None
    terminated_at: float | None = None
    execution_role_arn: str | None = None
    kms_key_identifier: str | None = None
    idle_policy: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """An image: a name, and what its newest versions are."""

    arn: str
    name: str
    state: str
    created_at: float
    updated_at: float | None = None
    next_version: int = 1
    latest_active: str | None = None
    latest_failed: str | None = None
    tags: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<ImageRecord {self.name} {self.state}>"


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One version of an image, with the request that made it.

    `request` holds the model's members as they came in; `prefix` is the Python
    environment that was made or named, once there is one.  Environment variables
    are in `request` and therefore never in a repr.
    """

    arn: str
    version: str
    state: str
    status: str
    created_at: float
    request: dict[str, Any] = field(repr=False)
    updated_at: float | None = None
    state_reason: str | None = None
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class BuildRecord:
    """One build of a version: there is one for each chipset generation."""

    arn: str
    version: str
    build_id: str
    state: str
    created_at: float
    architecture: str
    chipset: str
    chipset_generation: str
    state_reason: str | None = None
    snapshot: dict[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """What an earlier call with the same client token was given."""

    fingerprint: str
    answer: str


class State:
    """The file, opened.  Every method is one short transaction."""

    def __init__(self, path: Path) -> None:
        """Open or make the file.  Raises StateError."""
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            raise StateError(f"Cannot use the state file {path}: {error}.") from error

    def _prepare(self) -> None:
        # WAL without a sync per commit: a power cut may lose the last records of
        # machines, which it has ended anyway; it cannot corrupt the file.
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._db.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;"
            )
        elif version != SCHEMA_VERSION:
            raise StateError(
                f"The state file was written by another release (layout {version}, this one "
                f"knows {SCHEMA_VERSION}); stop that release's service and remove the folder."
            )

    def close(self) -> None:
        self._db.close()

    # -- facts about the service

    def meta(self, name: str) -> str | None:
        row = self._one("SELECT value FROM meta WHERE name = ?", name)
        return row[0] if row else None

    def set_meta(self, name: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    # -- machines

    def put_machine(self, record: MachineRecord) -> None:
        """Insert or replace a machine's record; its place in the listing stays."""
        self._db.execute(
            "INSERT INTO machines (id, arn, version, ended_at, doc) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET ended_at = excluded.ended_at, doc = excluded.doc",
            (
                record.microvm_id,
                record.image_arn,
                record.image_version,
                record.terminated_at,
                _dump(record),
            ),
        )

    def machine(self, microvm_id: str) -> MachineRecord | None:
        row = self._one("SELECT doc FROM machines WHERE id = ?", microvm_id)
        return _load(MachineRecord, row[0]) if row else None

    def machines(
        self, *, before: int | None, limit: int, arn: str | None, version: str | None
    ) -> list[tuple[int, MachineRecord]]:
        """A page of records with their numbers, newest first."""
        rows = self._db.execute(
            "SELECT number, doc FROM machines WHERE (?1 IS NULL OR number < ?1) "
            "AND (?2 IS NULL OR arn = ?2) AND (?3 IS NULL OR version = ?3) "
            "ORDER BY number DESC LIMIT ?4",
            (before, arn, version, limit),
        )
        return [(number, _load(MachineRecord, doc)) for number, doc in rows]

    def unfinished_machines(self) -> list[MachineRecord]:
        rows = self._db.execute("SELECT doc FROM machines WHERE ended_at IS NULL")
        return [_load(MachineRecord, doc) for (doc,) in rows]

    def forget_machines(self, ended_before: float) -> None:
        self._db.execute("DELETE FROM machines WHERE ended_at < ?", (ended_before,))

    # -- images

    def put_image(self, record: ImageRecord) -> None:
        self._db.execute(
            "INSERT INTO images VALUES (?, ?) ON CONFLICT (arn) DO UPDATE SET doc = excluded.doc",
            (record.arn, _dump(record)),
        )

    def image(self, arn: str) -> ImageRecord | None:
        row = self._one("SELECT doc FROM images WHERE arn = ?", arn)
        return _load(ImageRecord, row[0]) if row else None

    def images(self) -> list[ImageRecord]:
        rows = self._db.execute("SELECT doc FROM images ORDER BY rowid")
        return [_load(ImageRecord, doc) for (doc,) in rows]

    def delete_image(self, arn: str) -> None:
        """Remove an image with its versions and builds."""
        with self._db:
            self._db.execute("BEGIN")
            for table in ("images", "versions", "builds"):
                self._db.execute(f"DELETE FROM {table} WHERE arn = ?", (arn,))  # noqa: S608

    # -- versions and builds

    def put_version(self, record: VersionRecord) -> None:
        self._db.execute(
            "INSERT INTO versions VALUES (?, ?, ?) "
            "ON CONFLICT (arn, version) DO UPDATE SET doc = excluded.doc",
            (record.arn, record.version, _dump(record)),
        )

    def version(self, arn: str, version: str) -> VersionRecord | None:
        row = self._one("SELECT doc FROM versions WHERE arn = ? AND version = ?", arn, version)
        return _load(VersionRecord, row[0]) if row else None

    def versions(self, arn: str) -> list[VersionRecord]:
        """Newest first."""
        rows = self._db.execute(
            "SELECT doc FROM versions WHERE arn = ? ORDER BY rowid DESC", (arn,)
        )
        return [_load(VersionRecord, doc) for (doc,) in rows]

    def delete_version(self, arn: str, version: str) -> None:
        with self._db:
            self._db.execute("BEGIN")
            for table in ("versions", "builds"):
                self._db.execute(
                    f"DELETE FROM {table} WHERE arn = ? AND version = ?",  # noqa: S608
                    (arn, version),
                )

    def put_build(self, record: BuildRecord) -> None:
        self._db.execute(
            "INSERT INTO builds VALUES (?, ?, ?, ?) "
            "ON CONFLICT (arn, version, id) DO UPDATE SET doc = excluded.doc",
            (record.arn, record.version, record.build_id, _dump(record)),
        )

    def builds(self, arn: str, version: str) -> list[BuildRecord]:
        rows = self._db.execute(
            "SELECT doc FROM builds WHERE arn = ? AND version = ? ORDER BY rowid", (arn, version)
        )
        return [_load(BuildRecord, doc) for (doc,) in rows]

    # -- client tokens

    def replay(self, operation: str, token: str) -> Replay | None:
        row = self._one(
            "SELECT fingerprint, answer FROM client_tokens WHERE operation = ? AND token = ?",
            operation,
            token,
        )
        return Replay(*row) if row else None

    def remember(self, operation: str, token: str, replay: Replay) -> None:
        self._db.execute(
            "INSERT INTO client_tokens VALUES (?, ?, ?, ?)",
            (operation, token, replay.fingerprint, replay.answer),
        )

    def _one(self, query: str, *values: object) -> Any:
        with closing(self._db.execute(query, values)) as cursor:
            return cursor.fetchone()


def _dump(record: Any) -> str:
    return json.dumps({f.name: getattr(record, f.name) for f in dataclasses.fields(record)})


def _load(kind: type[Any], doc: str) -> Any:
    return kind(**dict(_members(kind, json.loads(doc))))


def _members(kind: type[Any], values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The members that this release knows; lists become the tuples they were."""
    for member in dataclasses.fields(kind):
        if member.name in values:
            value = values[member.name]
            yield member.name, tuple(value) if isinstance(value, list) else value
