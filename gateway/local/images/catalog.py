"""Images, their versions and builds: what exists, what may be done with it, what is built.

Reads and decisions are synchronous; building and draining go on as tasks that
write their progress to the state file.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.local.api import errors
from gateway.local.behaviours import implements
from gateway.local.clock import Clock
from gateway.local.images.builder import Builder
from gateway.local.interfaces import ImageBuildError, ImageSpec
from gateway.local.settings import ACCOUNT, REGION, ServiceSettings
from gateway.local.state import BuildRecord, ImageRecord, State, VersionRecord

log = logging.getLogger(__name__)

_ARN = re.compile(rf"arn:aws:lambda:{REGION}:{ACCOUNT}:microvm-image:([a-zA-Z0-9_-]{{1,64}})")
_BUSY_IMAGE = ("CREATING", "UPDATING", "DELETING")
_SERVICE_ENDED = "INTERNAL_PLATFORM_ERROR: the local service ended during the build."

UsesImage = Callable[[str, str | None], bool]


def image_arn(name: str) -> str:
    return f"arn:aws:lambda:{REGION}:{ACCOUNT}:microvm-image:{name}"


class Catalog:
    """The images of one service."""

    def __init__(
        self,
        state: State,
        clock: Clock,
        settings: ServiceSettings,
        builder: Builder,
        uses_image: UsesImage,
    ) -> None:
        self._state = state
        self._clock = clock
        self._settings = settings
        self._builder = builder
        self._uses_image = uses_image
        self._tasks: set[asyncio.Task[None]] = set()

    # -- reads

    @property
    def busy(self) -> bool:
        """Whether a build or a deletion goes on."""
        return bool(self._tasks)

    async def settled(self) -> None:
        """Return when no build and no deletion goes on; the caller brings the deadline."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    @implements("image-arn-forms")
    def image(self, identifier: str) -> ImageRecord:
        """The image of an image route.  Raises ApiError."""
        if not identifier.startswith("arn:"):
            raise errors.validation(f"Invalid ARN format: {identifier}")
        return self._existing(identifier)

    def version(self, identifier: str, version: str) -> VersionRecord:
        """A version of an image.  Raises ApiError."""
        record = self._state.version(self.image(identifier).arn, version)
        if record is None:
            raise errors.version_not_found(identifier, version)
        return record

    @implements("run-bare-name", "inactive-blocks-runs")
    def runnable(self, identifier: str, version: str | None) -> ImageSpec:
        """The version that RunMicrovm would start.  Raises ApiError."""
        if not identifier.startswith("arn:"):
            raise errors.validation("Malformed ARN - doesn't start with 'arn:'")
        _check_own(identifier)
        for record in self._state.versions(identifier):
            if record.prefix and is_active(record) and version in (None, record.version):
                return self._builder.spec(record, Path(record.prefix))
        raise errors.no_active_version(identifier, version)

    def _existing(self, arn: str) -> ImageRecord:
        _check_own(arn)
        record = self._state.image(arn)
        if record is None:
            raise errors.image_not_found(arn)
        return record

    # -- create and update

    @implements("image-name-taken", "image-quota")
    def create(self, name: str, request: dict[str, Any], tags: dict[str, str]) -> VersionRecord:
        """Begin version 1.0 of a new image.  Raises ApiError."""
        arn = image_arn(name)
        if not self._replaceable(arn):
            raise errors.validation(
                f"A MicroVM image with the name '{name}' already exists in this account"
            )
        if self._full():
            raise errors.ApiError(
                "ServiceQuotaExceededException",
                "The maximum number of MicroVM images has been reached for this account.",
            )
        image = ImageRecord(arn, name, "CREATING", self._clock.now_s(), tags=tags)
        return self._begin_version(image, request)

    @implements("failed-environment-image-replaced")
    def _replaceable(self, arn: str) -> bool:
        """Whether the name is free, or held by an environment that could not be used.

        A real image's name stays reserved after a failure (LM 13.3).  Images of an
        environment are ours alone, and their names follow from the environment: one
        that failed once (the disk was full) would otherwise fail for ever.
        """
        image = self._state.image(arn)
        if image is None:
            return True
        failed = image.state == "CREATE_FAILED" and self._is_environment(arn)
        if failed:
            self._state.delete_image(arn)
        return failed

    @implements("environment-images-evicted")
    def _full(self) -> bool:
        """Whether the quota forbids another image.

        Every `pip install` makes a new environment image, so the oldest unused one
        gives way before anybody is refused.
        """
        images = self._state.images()
        if len(images) < self._settings.image_quota:
            return False
        for image in images:
            idle = image.state not in _BUSY_IMAGE and not self._uses_image(image.arn, None)
            if idle and self._is_environment(image.arn):
                self.delete(image.arn)
                return False
        return True

    def _is_environment(self, arn: str) -> bool:
        uris = [record.request["codeArtifact"]["uri"] for record in self._state.versions(arn)]
        return all(uri.startswith("file:") and not uri.endswith(".zip") for uri in uris)

    @implements("image-update-new-version", "image-busy-409")
    def update(self, arn: str, request: dict[str, Any]) -> VersionRecord:
        """Begin the next version.  Raises ApiError."""
        image = self.image(arn)
        _check_idle(image)
        if len(self._state.versions(arn)) >= self._settings.version_quota:
            raise errors.ApiError(
                "ServiceQuotaExceededException",
                "The maximum number of versions has been reached for this MicroVM image.",
            )
        updating = replace(image, state="UPDATING", updated_at=self._clock.now_s())
        return self._begin_version(updating, request)

    def _begin_version(self, image: ImageRecord, request: dict[str, Any]) -> VersionRecord:
        now_s = self._clock.now_s()
        version = f"{image.next_version}.0"
        record = VersionRecord(image.arn, version, "PENDING", "INACTIVE", now_s, request)
        self._state.put_image(replace(image, next_version=image.next_version + 1))
        self._state.put_version(record)
        for build in _plan_builds(record):
            self._state.put_build(build)
        self._begin(self._build(record), f"build {image.name} {version}")
        return record

    @implements("build-progress-in-state-reason", "environment-active-when-template-ready")
    async def _build(self, record: VersionRecord) -> None:
        building = replace(record, state="IN_PROGRESS")
        self._state.put_version(building)

        def progress(text: str) -> None:
            log.info("image %s %s: %s", record.arn, record.version, text)
            self._put_builds(record, "IN_PROGRESS", text)

        progress("Starting.")
        try:
            prefix = await self._builder.build(building, progress, self._settings.build_delay_s)
        except ImageBuildError as error:
            self._finish(building, error.reason)
        except asyncio.CancelledError:
            self._finish(building, _SERVICE_ENDED)
            raise
        else:
            self._finish(replace(building, prefix=str(prefix)), None)

    @implements("build-failure-reason-in-builds")
    def _finish(self, record: VersionRecord, failure: str | None) -> None:
        """Write the outcome: version, builds and image."""
        now_s = self._clock.now_s()
        outcome = "FAILED" if failure else "SUCCESSFUL"
        log.info("image %s %s: %s %s", record.arn, record.version, outcome, failure or "")
        status = "INACTIVE" if failure else "ACTIVE"
        self._state.put_version(replace(record, state=outcome, status=status, updated_at=now_s))
        self._put_builds(record, outcome, failure)
        image = self._state.image(record.arn)
        assert image is not None
        verb = "CREATE" if image.state == "CREATING" else "UPDATE"
        image = replace(image, state=f"{verb}_FAILED" if failure else f"{verb}D", updated_at=now_s)
        if failure:
            image = replace(image, latest_failed=record.version)
        self._state.put_image(image)
        self._note_latest(record.arn)

    def _put_builds(self, record: VersionRecord, state: str, reason: str | None) -> None:
        for build in self._state.builds(record.arn, record.version):
            self._state.put_build(replace(build, state=state, state_reason=reason))

    def _note_latest(self, arn: str) -> None:
        """Which version an unpinned run starts."""
        image = self._state.image(arn)
        if image is not None:
            active = [r.version for r in self._state.versions(arn) if is_active(r)]
            self._state.put_image(replace(image, latest_active=active[0] if active else None))

    # -- status and deletion

    def set_status(self, arn: str, version: str, status: str) -> VersionRecord:
        """Make a version ACTIVE or INACTIVE.  Raises ApiError."""
        _check_idle(self.image(arn))
        record = self.version(arn, version)
        if status == "ACTIVE" and record.state != "SUCCESSFUL":
            raise errors.validation(f"Cannot activate a version in state {record.state}.")
        changed = replace(record, status=status, updated_at=self._clock.now_s())
        self._state.put_version(changed)
        self._note_latest(arn)
        return changed

    @implements("image-delete-drains", "image-delete-refusals")
    def delete(self, arn: str) -> ImageRecord:
        """Begin the deletion of an image.  Raises ApiError."""
        image = self.image(arn)
        versions = self._state.versions(arn)
        if image.state in _BUSY_IMAGE or any(v.state == "DELETING" for v in versions):
            raise errors.validation(
                f"Cannot delete MicroVM image in its current state: {image.state}"
            )
        self._check_unused(arn, None)
        deleting = replace(image, state="DELETING", updated_at=self._clock.now_s())
        self._state.put_image(deleting)
        for record in versions:
            self._state.put_version(replace(record, state="DELETING", status="INACTIVE"))
        self._begin(self._drain_image(arn, versions), f"delete {image.name}")
        return deleting

    @implements("version-delete-last", "version-delete-asynchronous")
    def delete_version(self, arn: str, version: str) -> VersionRecord:
        """Begin the deletion of a version.  Raises ApiError."""
        _check_idle(self.image(arn))
        record = self.version(arn, version)
        others = [v for v in self._state.versions(arn) if v.version != version]
        if not others:
            raise errors.validation(
                "Cannot delete the last version of a MicroVM image. Delete the image instead."
            )
        self._check_unused(arn, version)
        deleting = replace(record, state="DELETING", status="INACTIVE")
        self._state.put_version(deleting)
        self._note_latest(arn)
        self._begin(self._drain_version(deleting), f"delete {arn} {version}")
        return deleting

    def _check_unused(self, arn: str, version: str | None) -> None:
        if self._uses_image(arn, version):
            raise errors.validation("Cannot delete microvm image with running microvms.")

    async def _drain_image(self, arn: str, versions: list[VersionRecord]) -> None:
        await self._clock.sleep_s(self._settings.delete_delay_s)
        for record in versions:
            await self._builder.forget(record)
        self._state.delete_image(arn)

    async def _drain_version(self, record: VersionRecord) -> None:
        await self._clock.sleep_s(self._settings.delete_delay_s)
        await self._builder.forget(record)
        self._state.delete_version(record.arn, record.version)

    def retag(self, arn: str, put: dict[str, str], drop: Iterable[str]) -> None:
        """Set some tags of an image and remove others.  Raises ApiError."""
        image = self.image(arn)
        kept = {name: value for name, value in image.tags.items() if name not in set(drop)}
        self._state.put_image(replace(image, tags={**kept, **put}))

    # -- the service's start and end

    def recover(self) -> None:
        """After a restart: fail builds and finish deletions that the last service left."""
        for image in self._state.images():
            if image.state == "DELETING":
                versions = self._state.versions(image.arn)
                self._begin(self._drain_image(image.arn, versions), f"delete {image.name}")
                continue
            for record in self._state.versions(image.arn):
                if record.state in ("PENDING", "IN_PROGRESS"):
                    self._finish(record, _SERVICE_ENDED)
                elif record.state == "DELETING":
                    self._begin(self._drain_version(record), f"delete {image.name}")

    async def close(self) -> None:
        """Stop every build and deletion; `recover` takes up what is unfinished."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)


def is_active(record: VersionRecord) -> bool:
    return record.state == "SUCCESSFUL" and record.status == "ACTIVE"


@implements("foreign-arn-403")
def _check_own(arn: str) -> None:
    """An ARN of another form, region or account: a misleading 403 without a message (LM 2)."""
    if not _ARN.fullmatch(arn):
        raise errors.access_denied()


def _check_idle(image: ImageRecord) -> None:
    if image.state in _BUSY_IMAGE:
        raise errors.conflict(f"MicroVM Image is already in state: {image.state}")


#: LM 9.2: one build per chipset generation, Graviton 4 and 3. The one for Intel is guessed.
_CHIPSETS = {"ARM_64": (("GRAVITON", "4"), ("GRAVITON", "3")), "X86_64": (("INTEL", "6"),)}


@implements("two-builds-per-version")
def _plan_builds(record: VersionRecord) -> list[BuildRecord]:
    configurations = record.request.get("cpuConfigurations") or [{"architecture": "ARM_64"}]
    return [
        BuildRecord(
            record.arn, record.version, str(uuid.uuid4()), "PENDING", record.created_at,
            configuration["architecture"], chipset, generation,
        )
        for configuration in configurations
        for chipset, generation in _CHIPSETS[configuration["architecture"]]
    ]  # fmt: skip
