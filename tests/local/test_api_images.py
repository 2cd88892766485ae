"""Operations on images, versions, builds, managed images and tags, called by boto3."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gateway.local.settings import ServiceSettings
from tests.local.in_process import (
    ARN,
    BASE_IMAGE,
    ROLE,
    House,
    house,
    image_request,
    run,
    settled,
)


async def refused(home: House, operation: str, **members: Any) -> tuple[int, str, str]:
    with pytest.raises(ClientError) as caught:
        await home.call(operation, **members)
    answer = caught.value.response
    status = answer["ResponseMetadata"]["HTTPStatusCode"]
    return status, answer["Error"]["Code"], answer["Error"]["Message"]


def update_request(home: House, **members: Any) -> dict[str, Any]:
    request = image_request(home.folder, "env", **members)
    del request["name"]
    return {"imageIdentifier": f"{ARN}env", **request}


# -- create


def test_create_answers_201_creating_and_ends_created_and_active() -> None:
    async def scenario() -> None:
        async with house() as home:
            home.script.build_gate = asyncio.Event()
            request = image_request(home.folder, "env", tags={"a": "b"}, description="d")
            answer = await home.call("create_microvm_image", **request)
            assert answer["ResponseMetadata"]["HTTPStatusCode"] == 201
            assert answer["state"] == "CREATING"
            assert answer["imageVersion"] == "1.0"
            assert answer["imageArn"] == f"{ARN}env"
            assert answer["baseImageVersion"] == "1.0"
            assert answer["hooks"] == request["hooks"]
            assert "latestActiveImageVersion" not in answer
            version = {"imageIdentifier": f"{ARN}env", "imageVersion": "1.0"}
            shown = await home.call("get_microvm_image_version", **version)
            assert (shown["state"], shown["status"]) == ("IN_PROGRESS", "INACTIVE")
            builds = (await home.call("list_microvm_image_builds", **version))["items"]
            assert {b["buildState"] for b in builds} == {"IN_PROGRESS"}
            assert {b["stateReason"] for b in builds} == {"Starting the template."}
            home.script.build_gate.set()
            await settled(home.catalog)
            image = await home.call("get_microvm_image", imageIdentifier=f"{ARN}env")
            assert image["state"] == "CREATED"
            assert image["latestActiveImageVersion"] == "1.0"
            assert image["tags"] == {"a": "b"}
            shown = await home.call("get_microvm_image_version", **version)
            assert (shown["state"], shown["status"]) == ("SUCCESSFUL", "ACTIVE")
            assert home.script.engine_calls == ["prepare hooks=True"]

    run(scenario())


def test_a_failed_build_says_why_in_its_builds_only() -> None:
    async def scenario() -> None:
        async with house() as home:
            home.script.build_failure = "Ready hook invocation timed out after PT5M"
            await home.call("create_microvm_image", **image_request(home.folder, "env"))
            await settled(home.catalog)
            image = await home.call("get_microvm_image", imageIdentifier=f"{ARN}env")
            assert image["state"] == "CREATE_FAILED"
            assert image["latestFailedImageVersion"] == "1.0"
            version = {"imageIdentifier": f"{ARN}env", "imageVersion": "1.0"}
            shown = await home.call("get_microvm_image_version", **version)
            assert shown["state"] == "FAILED"
            assert "stateReason" not in shown
            builds = (await home.call("list_microvm_image_builds", **version))["items"]
            assert [(b["chipset"], b["chipsetGeneration"]) for b in builds] == [
                ("GRAVITON", "4"),
                ("GRAVITON", "3"),
            ]
            one = await home.call(
                "get_microvm_image_build", **version, buildId=builds[0]["buildId"]
            )
            assert one["stateReason"] == "Ready hook invocation timed out after PT5M"
            some = await home.call("list_microvm_image_builds", **version, chipsetGeneration="3")
            assert len(some["items"]) == 1
            none = await home.call("list_microvm_image_builds", **version, architecture="X86_64")
            assert none["items"] == []
            missing = await refused(home, "get_microvm_image_build", **version, buildId="x")
            assert missing[:2] == (404, "ResourceNotFoundException")

    run(scenario())


def test_a_name_can_be_taken_once() -> None:
    async def scenario() -> None:
        async with house() as home:
            await home.active_image()
            assert await refused(
                home, "create_microvm_image", **image_request(home.folder, "env")
            ) == (
                400,
                "ValidationException",
                "A MicroVM image with the name 'env' already exists in this account",
            )

    run(scenario())


def test_the_image_of_an_environment_that_failed_can_be_created_again() -> None:
    async def scenario() -> None:
        async with house() as home:
            home.script.build_failure = "the disk was full"
            await home.call("create_microvm_image", **image_request(home.folder, "env"))
            await settled(home.catalog)
            home.script.build_failure = None
            await home.active_image()
            await home.call("run_microvm", imageIdentifier=f"{ARN}env")

    run(scenario())


def test_a_client_token_replays_the_first_create() -> None:
    async def scenario() -> None:
        async with house() as home:
            request = image_request(home.folder, "env", clientToken="t")
            first = await home.call("create_microvm_image", **request)
            await settled(home.catalog)
            again = await home.call("create_microvm_image", **request)
            assert again["state"] == "CREATING"
            assert again["createdAt"] == first["createdAt"]

    run(scenario())


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"baseImageArn": "arn:x"}, "No managed MicroVM Image with arn arn:x and version 1 is"),
        (
            {"baseImageVersion": "999"},
            f"No managed MicroVM Image with arn {BASE_IMAGE} and version 999 is available",
        ),
        ({"resources": [{"minimumMemoryInMiB": 3000}]}, "minimumMemoryInMiB must be one of [512"),
        ({"hooks": {"microvmImageHooks": {"ready": "ENABLED"}}}, "hooks.port is required"),
        ({"hooks": {"port": 9, "microvmHooks": {"run": "ENABLED"}}}, "The ready hook must be"),
        ({"name": "a b"}, "Member must satisfy regular expression pattern: [a-zA-Z0-9-_]+"),
        ({"codeArtifact": {"uri": "file:///a b"}}, "at 'codeArtifact.uri' failed to satisfy"),
    ],
)
def test_requests_that_are_refused(members: dict[str, Any], text: str) -> None:
    async def scenario() -> None:
        async with house() as home:
            request = image_request(home.folder, **{"name": "env", **members})
            status, code, message = await refused(home, "create_microvm_image", **request)
            assert (status, code) == (400, "ValidationException")
            assert text in message
            assert home.context.state.images() == []

    run(scenario())


def test_the_memory_and_the_environment_reach_the_engine() -> None:
    async def scenario() -> None:
        async with house() as home:
            arn = await home.active_image(
                resources=[{"minimumMemoryInMiB": 512}], environmentVariables={"A": "hidden value"}
            )
            spec = home.catalog.runnable(arn, None)
            assert spec.memory_mib == 512
            assert spec.environment == {"A": "hidden value"}
            assert "hidden value" not in repr(spec)
            assert spec.hooks.run_s == 1
            assert spec.hooks.ready_s == 60

    run(scenario())


# -- update, status


def test_an_update_mints_the_next_version_and_both_can_be_run() -> None:
    async def scenario() -> None:
        async with house() as home:
            arn = await home.active_image()
            home.script.build_gate = asyncio.Event()
            answer = await home.call("update_microvm_image", **update_request(home))
            assert (answer["state"], answer["imageVersion"]) == ("UPDATING", "2.0")
            busy = await refused(
                home, "update_microvm_image_version",
                imageIdentifier=arn, imageVersion="1.0", status="INACTIVE",
            )  # fmt: skip
            assert busy == (
                409, "ConflictException", "MicroVM Image is already in state: UPDATING",
            )  # fmt: skip
            run_now = await home.call("run_microvm", imageIdentifier=arn)
            assert run_now["imageVersion"] == "1.0"
            home.script.build_gate.set()
            await settled(home.catalog)
            image = await home.call("get_microvm_image", imageIdentifier=arn)
            assert (image["state"], image["latestActiveImageVersion"]) == ("UPDATED", "2.0")
            run_now = await home.call("run_microvm", imageIdentifier=arn)
            assert run_now["imageVersion"] == "2.0"
            pinned = await home.call("run_microvm", imageIdentifier=arn, imageVersion="1.0")
            assert pinned["imageVersion"] == "1.0"
            versions = await home.call("list_microvm_image_versions", imageIdentifier=arn)
            assert [v["imageVersion"] for v in versions["items"]] == ["2.0", "1.0"]

    run(scenario())


def test_a_failed_update_keeps_the_old_version() -> None:
    async def scenario() -> None:
        async with house() as home:
            arn = await home.active_image()
            home.script.build_failure = "no"
            await home.call("update_microvm_image", **update_request(home))
            await settled(home.catalog)
            image = await home.call("get_microvm_image", imageIdentifier=arn)
            assert image["state"] == "UPDATE_FAILED"
            assert image["latestActiveImageVersion"] == "1.0"
            assert image["latestFailedImageVersion"] == "2.0"
            failed = {"imageIdentifier": arn, "imageVersion": "2.0", "status": "ACTIVE"}
            assert (await refused(home, "update_microvm_image_version", **failed))[0] == 400

    run(scenario())


def test_inactive_blocks_new_runs_until_it_is_active_again() -> None:
    async def scenario() -> None:
        async with house() as home:
            arn = await home.active_image()
            version = {"imageIdentifier": arn, "imageVersion": "1.0"}
            await home.call("update_microvm_image_version", **version, status="INACTIVE")
            text = (await refused(home, "run_microvm", imageIdentifier=arn))[2]
            assert text == f"No active version found for MicroVM image {arn}"
            image = await home.call("get_microvm_image", imageIdentifier=arn)
            assert "latestActiveImageVersion" not in image
            await home.call("update_microvm_image_version", **version, status="ACTIVE")
            await home.call("run_microvm", imageIdentifier=arn)

    run(scenario())


# -- delete


def test_delete_drains_and_frees_the_name() -> None:
    async def scenario() -> None:
        async with house() as home:
            arn = await home.active_image()
            answer = await home.call("delete_microvm_image", imageIdentifier=arn)
            assert (answer["imageIdentifier"], answer["state"]) == (arn, "DELETING")
            await settled(home.catalog)
            assert (await refused(home, "get_microvm_image", imageIdentifier=arn))[0] == 404
            assert home.engine.templates == set()
            assert list((home.folder / "images").iterdir()) == []
            await home.active_image()

    run(scenario())


def test_delete_is_refused_while_building_or_in_use() -> None:
    async def scenario() -> None:
        async with house() as home:
            arn = await home.active_image()
            microvm = await home.call("run_microvm", imageIdentifier=arn)
            used = await refused(home, "delete_microvm_image", imageIdentifier=arn)
            assert used == (
                400, "ValidationException", "Cannot delete microvm image with running microvms.",
            )  # fmt: skip
            machine = home.fleet.get(microvm["microvmId"])
            assert machine is not None
            home.script.build_gate = asyncio.Event()
            await home.call("update_microvm_image", **update_request(home))
            busy = await refused(home, "delete_microvm_image", imageIdentifier=arn)
            assert busy[2] == "Cannot delete MicroVM image in its current state: UPDATING"
            home.script.build_gate.set()

    run(scenario())


def test_a_version_can_be_deleted_but_not_the_last() -> None:
    async def scenario() -> None:
        async with house() as home:
            arn = await home.active_image()
            first = {"imageIdentifier": arn, "imageVersion": "1.0"}
            last = await refused(home, "delete_microvm_image_version", **first)
            assert last[:2] == (400, "ValidationException")
            await home.call("update_microvm_image", **update_request(home))
            await settled(home.catalog)
            answer = await home.call("delete_microvm_image_version", **first)
            assert (answer["imageVersion"], answer["state"]) == ("1.0", "DELETING")
            await settled(home.catalog)
            assert (await refused(home, "get_microvm_image_version", **first))[0] == 404

    run(scenario())


def test_the_quota_lets_unused_environments_go_first() -> None:
    async def scenario() -> None:
        async with house(ServiceSettings(image_quota=2)) as home:
            await home.active_image("one")
            await home.call("run_microvm", imageIdentifier=f"{ARN}one")
            await home.active_image("two")
            await home.active_image("three")  # "one" is in use: "two" goes
            await settled(home.catalog)
            names = [image.name for image in home.context.state.images()]
            assert names == ["one", "three"]
            await home.call("run_microvm", imageIdentifier=f"{ARN}three")
            request = image_request(home.folder, "four")
            status, code, _ = await refused(home, "create_microvm_image", **request)
            assert (status, code) == (402, "ServiceQuotaExceededException")

    run(scenario())


# -- reads


def test_image_routes_want_arns_of_ours() -> None:
    async def scenario() -> None:
        async with house() as home:
            bare = await refused(home, "get_microvm_image", imageIdentifier="env")
            assert bare == (400, "ValidationException", "Invalid ARN format: env")
            assert (await refused(home, "get_microvm_image", imageIdentifier=f"{ARN}no"))[0] == 404
            foreign = await refused(home, "get_microvm_image", imageIdentifier="arn:aws:s3:::x")
            assert foreign[:2] == (403, "AccessDeniedException")

    run(scenario())


def test_the_name_filter_acts_on_pages() -> None:
    async def scenario() -> None:
        async with house() as home:
            for name in ("a1", "b1", "a2"):
                await home.active_image(name)
            page = await home.call("list_microvm_images", maxResults=1, nameFilter="b")
            assert page["items"] == []
            assert "nextToken" in page
            found = await home.call("list_microvm_images", nameFilter="a")
            assert [item["name"] for item in found["items"]] == ["a1", "a2"]

    run(scenario())


def test_the_managed_image() -> None:
    async def scenario() -> None:
        async with house() as home:
            images = (await home.call("list_managed_microvm_images"))["items"]
            assert [image["imageArn"] for image in images] == [BASE_IMAGE]
            versions = await home.call(
                "list_managed_microvm_image_versions", imageIdentifier=BASE_IMAGE
            )
            shown = [(v["imageVersion"], v["status"]) for v in versions["items"]]
            assert shown == [("1", "AVAILABLE"), ("0", "AVAILABLE")]
            other = {"imageIdentifier": f"{BASE_IMAGE}x"}
            assert (await refused(home, "list_managed_microvm_image_versions", **other))[0] == 404

    run(scenario())


def test_tags() -> None:
    async def scenario() -> None:
        async with house() as home:
            arn = await home.active_image()
            answer = await home.call("tag_resource", Resource=arn, Tags={"a": "1", "b": "2"})
            assert answer["ResponseMetadata"]["HTTPStatusCode"] == 204
            await home.call("untag_resource", Resource=arn, TagKeys=["a", "c"])
            assert (await home.call("list_tags", Resource=arn))["Tags"] == {"b": "2"}
            assert (await refused(home, "list_tags", Resource=f"{ARN}no"))[0] == 404

    run(scenario())


# -- restarts


def test_a_restart_finishes_deletions_and_fails_builds() -> None:
    async def scenario() -> None:
        settings = ServiceSettings(delete_delay_s=30)
        async with house(settings) as first:
            folder = first.folder / "kept"
            folder.mkdir()
            async with house(settings, folder=folder) as home:
                arn = await home.active_image()
                await home.call("delete_microvm_image", imageIdentifier=arn)
                home.script.build_gate = asyncio.Event()
                request = image_request(home.folder, "late", buildRoleArn=ROLE)
                await home.call("create_microvm_image", **request)
            async with house(folder=folder) as home:
                await settled(home.catalog)
                assert [image.name for image in home.context.state.images()] == ["late"]
                builds = home.context.state.builds(f"{ARN}late", "1.0")
                assert {b.state for b in builds} == {"FAILED"}
                assert "service ended during the build" in str(builds[0].state_reason)

    run(scenario())
