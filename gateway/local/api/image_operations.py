"""The operations on images, versions, builds, managed images and tags."""

from __future__ import annotations

import json
from typing import Any

from gateway.local.api import errors, idempotency
from gateway.local.api.context import Context
from gateway.local.api.parsing import Members
from gateway.local.behaviours import implements
from gateway.local.settings import MEMORY_SIZES_MIB
from gateway.local.state import BuildRecord, ImageRecord, VersionRecord

Answer = dict[str, Any]

#: LM 9.1: only one managed image exists; its list shows versions "1" and "0".
MANAGED_IMAGE = "arn:aws:lambda:{region}:aws:microvm-image:al2023-1"
MANAGED_VERSIONS = ("1", "0")
MANAGED_CREATED_AT = 1_782_086_400.0  # 2026-06-22, the day of the announcement

#: What a version keeps of the request that made it, and shows again.
_REQUEST_MEMBERS = (
    "baseImageArn", "baseImageVersion", "buildRoleArn", "description", "codeArtifact", "logging",
    "egressNetworkConnectors", "cpuConfigurations", "resources", "additionalOsCapabilities",
    "hooks", "environmentVariables", "kmsKeyIdentifier",
)  # fmt: skip


# -- images


@implements("image-create-201")
async def create_image(context: Context, members: Members) -> Answer:
    """CreateMicrovmImage: CREATING at once; the build goes on by itself."""
    earlier = idempotency.replayed(context.state, "CreateMicrovmImage", members)
    if earlier is not None:
        return _replay(earlier)
    request = _checked_request(context, members)
    record = context.catalog.create(members["name"], request, members.get("tags", {}))
    answer = _show_written(context, record)
    idempotency.remember(context.state, "CreateMicrovmImage", members, json.dumps(answer))
    return answer


@implements("image-update-replaces")
async def update_image(context: Context, members: Members) -> Answer:
    """UpdateMicrovmImage: a full replacement as the next version."""
    arn = members["imageIdentifier"]
    earlier = idempotency.replayed(context.state, f"UpdateMicrovmImage {arn}", members)
    if earlier is not None:
        return _replay(earlier)
    record = context.catalog.update(arn, _checked_request(context, members))
    answer = _show_written(context, record)
    idempotency.remember(context.state, f"UpdateMicrovmImage {arn}", members, json.dumps(answer))
    return answer


def _replay(answer: str) -> Answer:
    earlier: Answer = json.loads(answer)
    return earlier


def _show_written(context: Context, record: VersionRecord) -> Answer:
    """The answer of a create or update: the image, with the members of its new version."""
    image = context.catalog.image(record.arn)
    version = _show_request(record)
    return {**version, **show_image(image), "imageVersion": record.version}


def _checked_request(context: Context, members: Members) -> dict[str, Any]:
    _check_base(context, members)
    _check_resources(members)
    _check_hooks(members.get("hooks", {}))
    request = {name: members[name] for name in _REQUEST_MEMBERS if name in members}
    request["baseImageVersion"] = _MANAGED_SHOWN.get(
        members.get("baseImageVersion", MANAGED_VERSIONS[0]), MANAGED_VERSIONS[0]
    )
    return request


#: LM 9.1: the managed list shows "1", a read-back says "1.0".
_MANAGED_SHOWN = {"1": "1.0", "1.0": "1.0", "0": "0.0", "0.0": "0.0"}


@implements("base-image-checked")
def _check_base(context: Context, members: Members) -> None:
    arn = members["baseImageArn"]
    version = members.get("baseImageVersion", MANAGED_VERSIONS[0])
    if arn != MANAGED_IMAGE.format(region=context.region) or version not in _MANAGED_SHOWN:
        raise errors.validation(
            f"No managed MicroVM Image with arn {arn} and version {version} is available"
        )


@implements("memory-sizes")
def _check_resources(members: Members) -> None:
    for resource in members.get("resources", []):
        if resource["minimumMemoryInMiB"] not in MEMORY_SIZES_MIB:
            sizes = ", ".join(map(str, MEMORY_SIZES_MIB))
            raise errors.validation(f"minimumMemoryInMiB must be one of [{sizes}]")


@implements("hooks-need-ready-and-port")
def _check_hooks(hooks: dict[str, Any]) -> None:
    at_build, at_run = hooks.get("microvmImageHooks", {}), hooks.get("microvmHooks", {})
    enabled = [name for name, value in {**at_build, **at_run}.items() if value == "ENABLED"]
    if enabled and "port" not in hooks:
        raise errors.validation("hooks.port is required when a hook is enabled")
    if "ENABLED" in at_run.values() and at_build.get("ready") != "ENABLED":
        raise errors.validation("The ready hook must be enabled when a MicroVM hook is enabled")


async def get_image(context: Context, members: Members) -> Answer:
    return show_image(context.catalog.image(members["imageIdentifier"]))


@implements("image-name-filter-after-paging")
async def list_images(context: Context, members: Members) -> Answer:
    """ListMicrovmImages: the filter acts on a page, so pages may be empty (LM 3.4)."""
    page = context.pager.page(
        "ListMicrovmImages", members, context.state.images(), _show_image_item
    )
    wanted = members.get("nameFilter")
    if wanted is not None:
        page["items"] = [item for item in page["items"] if wanted in item["name"]]
    return page


async def delete_image(context: Context, members: Members) -> Answer:
    image = context.catalog.delete(members["imageIdentifier"])
    return {"imageIdentifier": image.arn, "state": image.state}


# -- versions


async def get_version(context: Context, members: Members) -> Answer:
    return _show_version(context, _version(context, members))


async def list_versions(context: Context, members: Members) -> Answer:
    image = context.catalog.image(members["imageIdentifier"])
    versions = context.state.versions(image.arn)
    return context.pager.page(
        "ListMicrovmImageVersions", members, versions, lambda v: _show_version(context, v)
    )


async def update_version(context: Context, members: Members) -> Answer:
    changed = context.catalog.set_status(
        members["imageIdentifier"], members["imageVersion"], members["status"]
    )
    return _show_version(context, changed)


async def delete_version(context: Context, members: Members) -> Answer:
    record = context.catalog.delete_version(members["imageIdentifier"], members["imageVersion"])
    return {"imageIdentifier": record.arn, "imageVersion": record.version, "state": record.state}


def _version(context: Context, members: Members) -> VersionRecord:
    return context.catalog.version(members["imageIdentifier"], members["imageVersion"])


# -- builds


@implements("build-filters")
async def list_builds(context: Context, members: Members) -> Answer:
    record = _version(context, members)
    builds = [
        build
        for build in context.state.builds(record.arn, record.version)
        if members.get("architecture") in (None, build.architecture)
        and members.get("chipset") in (None, build.chipset)
        and members.get("chipsetGeneration") in (None, build.chipset_generation)
    ]
    return context.pager.page("ListMicrovmImageBuilds", members, builds, _show_build_item)


async def get_build(context: Context, members: Members) -> Answer:
    record = _version(context, members)
    for build in context.state.builds(record.arn, record.version):
        if build.build_id == members["buildId"]:
            return {**_show_build_item(build), "snapshotBuild": build.snapshot}
    raise errors.ApiError(
        "ResourceNotFoundException", f"MicroVM image build not found: {members['buildId']}"
    )


# -- managed images


@implements("one-managed-image")
async def list_managed_images(context: Context, members: Members) -> Answer:
    items = [MANAGED_IMAGE.format(region=context.region)]
    return context.pager.page(
        "ListManagedMicrovmImages",
        members,
        items,
        lambda arn: {"imageArn": arn, "createdAt": MANAGED_CREATED_AT, "updatedAt": None},
    )


async def list_managed_versions(context: Context, members: Members) -> Answer:
    arn = members["imageIdentifier"]
    if arn != MANAGED_IMAGE.format(region=context.region):
        raise errors.image_not_found(arn)
    return context.pager.page(
        "ListManagedMicrovmImageVersions",
        members,
        MANAGED_VERSIONS,
        lambda v: _show_managed(arn, v),
    )


def _show_managed(arn: str, version: str) -> Answer:
    return {
        "imageArn": arn,
        "imageVersion": version,
        "status": "AVAILABLE",
        "supportedCpuConfigurations": [{"architecture": "ARM_64"}, {"architecture": "X86_64"}],
        "createdAt": MANAGED_CREATED_AT,
        "updatedAt": None,
    }


# -- tags


@implements("tags-on-images-only")
async def list_tags(context: Context, members: Members) -> Answer:
    return {"Tags": context.catalog.image(members["Resource"]).tags}


async def tag_resource(context: Context, members: Members) -> Answer:
    context.catalog.retag(members["Resource"], members["Tags"], ())
    return {}


async def untag_resource(context: Context, members: Members) -> Answer:
    context.catalog.retag(members["Resource"], {}, members["TagKeys"])
    return {}


# -- what is shown


@implements("extra-members")
def show_image(image: ImageRecord) -> Answer:
    return {
        **_show_image_item(image),
        "updatedAt": image.updated_at,
        "tags": image.tags or None,
        "id": None,
        "buildPhaseOverrides": None,
        "roleConfiguration": None,
    }


def _show_image_item(image: ImageRecord) -> Answer:
    return {
        "imageArn": image.arn,
        "name": image.name,
        "state": image.state,
        "latestActiveImageVersion": image.latest_active,
        "latestFailedImageVersion": image.latest_failed,
        "createdAt": image.created_at,
    }


def _show_request(record: VersionRecord) -> Answer:
    return {name: record.request.get(name) for name in _REQUEST_MEMBERS}


def _show_version(context: Context, record: VersionRecord) -> Answer:
    return {
        **_show_request(record),
        "imageArn": record.arn,
        "imageVersion": record.version,
        "state": record.state,
        "status": record.status,
        "createdAt": record.created_at,
        "updatedAt": record.updated_at,
        "stateReason": record.state_reason,
        "tags": context.catalog.image(record.arn).tags or None,
        "versionStateTimeBucket": None,
    }


def _show_build_item(build: BuildRecord) -> Answer:
    return {
        "imageArn": build.arn,
        "imageVersion": build.version,
        "buildId": build.build_id,
        "buildState": build.state,
        "architecture": build.architecture,
        "chipset": build.chipset,
        "chipsetGeneration": build.chipset_generation,
        "stateReason": build.state_reason,
        "createdAt": build.created_at,
        "terminationReasonCode": None,
    }
