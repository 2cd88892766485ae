"""From a version's request to a template that machines can be forked from."""

from __future__ import annotations

import asyncio
import errno
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.local.behaviours import implements
from gateway.local.clock import Clock
from gateway.local.images import archive
from gateway.local.images.artifact import (
    Environment,
    LocalZip,
    S3Access,
    S3Zip,
    check_environment,
    fetch,
    parse_artifact,
)
from gateway.local.images.environments import Progress, make_environment
from gateway.local.interfaces import Engine, HookSettings, ImageBuildError, ImageSpec
from gateway.local.settings import DEFAULT_MEMORY_MIB
from gateway.local.state import VersionRecord

log = logging.getLogger(__name__)

#: LM 7.1: one second for every runtime hook and for validate; ready: 60 s in one
#: source ("live-verified"), 30 s in another.
RUNTIME_HOOK_DEFAULT_S = 1
VALIDATE_DEFAULT_S = 1
READY_DEFAULT_S = 60


@dataclass(frozen=True, slots=True)
class Builder:
    """Makes the environments and templates of one service."""

    engine: Engine
    clock: Clock
    folder: Path
    s3: S3Access

    def version_folder(self, arn: str, version: str) -> Path:
        """This version's own folder; the name is safe, the model's pattern says so."""
        return self.folder / f"{arn.rpartition(':')[2]}-{version}"

    async def build(self, record: VersionRecord, progress: Progress, delay_s: float) -> Path:
        """Make the version runnable; returns the environment's prefix.

        Raises ImageBuildError.  What a failed build left is removed with the version.
        """
        folder = self.version_folder(record.arn, record.version)
        try:
            archive.remove(folder)
            folder.mkdir(mode=0o700, parents=True)
            prefix = await self._environment(record, folder, progress, delay_s)
        except archive.ArchiveError as error:
            raise ImageBuildError(error.reason) from error
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            code = "DISK_STORAGE_FULL" if full else "INTERNAL_PLATFORM_ERROR"
            raise ImageBuildError(f"{code}: {error}") from error
        progress("Starting the template.")
        await self.engine.prepare_image(self.spec(record, prefix), call_hooks=True)
        return prefix

    def spec(self, record: VersionRecord, prefix: Path) -> ImageSpec:
        """What the engine needs to know of a version."""
        resources = record.request.get("resources") or [{"minimumMemoryInMiB": DEFAULT_MEMORY_MIB}]
        return ImageSpec(
            image_arn=record.arn,
            version=record.version,
            prefix=prefix,
            folder=self.version_folder(record.arn, record.version),
            memory_mib=resources[0]["minimumMemoryInMiB"],
            hooks=hook_settings(record.request.get("hooks") or {}),
            environment=record.request.get("environmentVariables") or {},
        )

    async def forget(self, record: VersionRecord) -> None:
        """End a version's template and remove its folder."""
        if record.prefix is not None:
            await self.engine.release_image(self.spec(record, Path(record.prefix)))
        folder = self.version_folder(record.arn, record.version)
        await asyncio.to_thread(archive.remove, folder)

    @implements("artifact-environment-prefix", "artifact-zip-environment")
    async def _environment(
        self, record: VersionRecord, folder: Path, progress: Progress, delay_s: float
    ) -> Path:
        """The prefix: the environment named, or one made from the zip, late by `delay_s`."""
        source = parse_artifact(record.request["codeArtifact"]["uri"])
        if isinstance(source, Environment):
            check_environment(source)
            return source.prefix
        unpacked = folder / "code"
        unpacked.mkdir()
        await self._unpack(source, folder, unpacked, progress)
        prefix = folder / "environment"
        await make_environment(unpacked, prefix, folder / "build.log", progress)
        await self.clock.sleep_s(delay_s)
        return prefix

    async def _unpack(
        self, source: LocalZip | S3Zip, folder: Path, unpacked: Path, progress: Progress
    ) -> None:
        progress("Fetching the code artifact.")
        if isinstance(source, S3Zip):
            local = folder / "code.zip"
            await asyncio.to_thread(fetch, source, local, self.s3)
        else:
            local = source.path
        progress("Unpacking the code artifact.")
        await asyncio.to_thread(archive.unpack, local, unpacked)


@implements("hook-default-limits")
def hook_settings(hooks: dict[str, Any]) -> HookSettings:
    """The model's hooks member as time limits; a hook that is not ENABLED has none."""
    at_build, at_run = hooks.get("microvmImageHooks") or {}, hooks.get("microvmHooks") or {}
    return HookSettings(
        port=hooks.get("port", 9000),
        ready_s=_limit(at_build, "ready", READY_DEFAULT_S),
        validate_s=_limit(at_build, "validate", VALIDATE_DEFAULT_S),
        run_s=_limit(at_run, "run", RUNTIME_HOOK_DEFAULT_S),
        resume_s=_limit(at_run, "resume", RUNTIME_HOOK_DEFAULT_S),
        suspend_s=_limit(at_run, "suspend", RUNTIME_HOOK_DEFAULT_S),
        terminate_s=_limit(at_run, "terminate", RUNTIME_HOOK_DEFAULT_S),
    )


def _limit(hooks: dict[str, Any], name: str, default_s: int) -> float | None:
    if hooks.get(name) != "ENABLED":
        return None
    return float(hooks.get(f"{name}TimeoutInSeconds", default_s))
