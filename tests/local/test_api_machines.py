"""Operations on machines, called by boto3 over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gateway.local.faults.plan import parse_fault
from gateway.local.lifecycle import Phase
from gateway.local.settings import ServiceSettings
from tests.local.in_process import ARN, LIMIT_S, House, house, run

CONNECTOR = "arn:aws:lambda:us-east-1:aws:network-connector:aws-network-connector:"
IDLE = {"maxIdleDurationSeconds": 60, "suspendedDurationSeconds": 60, "autoResumeEnabled": True}


async def refused(home: House, operation: str, **members: Any) -> tuple[int, str, str]:
    """Status, code and message of an error."""
    with pytest.raises(ClientError) as caught:
        await home.call(operation, **members)
    answer = caught.value.response
    status = answer["ResponseMetadata"]["HTTPStatusCode"]
    return status, answer["Error"]["Code"], answer["Error"]["Message"]


async def reach(home: House, microvm_id: str, phase: Phase) -> None:
    machine = home.fleet.get(microvm_id)
    assert machine is not None
    async with asyncio.timeout(LIMIT_S):
        await machine.reached(phase)


async def launched(home: House, **members: Any) -> str:
    arn = (
        await home.active_image() if home.context.state.image(f"{ARN}env") is None else f"{ARN}env"
    )
    answer = await home.call("run_microvm", imageIdentifier=arn, **members)
    await reach(home, answer["microvmId"], Phase.RUNNING)
    return str(answer["microvmId"])


def test_run_answers_as_recorded() -> None:
    async def scenario() -> None:
        async with house() as home:
            arn = await home.active_image()
            answer = await home.call("run_microvm", imageIdentifier=arn, runHookPayload="{}")
            assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200
            del answer["ResponseMetadata"]
            assert answer.pop("microvmId").startswith("microvm-")
            assert answer.pop("endpoint").startswith("http://127.0.0.1:")
            assert answer.pop("startedAt").timestamp() == pytest.approx(home.clock.now_s())
            assert answer == {
                "state": "PENDING", "imageArn": arn, "imageVersion": "1.0",
                "maximumDurationInSeconds": 28800,
                "ingressNetworkConnectors": [f"{CONNECTOR}HTTP_INGRESS"],
                "egressNetworkConnectors": [f"{CONNECTOR}INTERNET_EGRESS"],
            }  # fmt: skip

    run(scenario())


def test_run_keeps_what_it_was_given_and_get_shows_it() -> None:
    async def scenario() -> None:
        async with house() as home:
            given = {
                "idlePolicy": IDLE, "maximumDurationInSeconds": 60,
                "executionRoleArn": "arn:aws:iam::000000000000:role/guest",
                "ingressNetworkConnectors": [f"{CONNECTOR}ALL_INGRESS"],
                "egressNetworkConnectors": ["arn:aws:lambda:us-east-1:1:network-connector:mine"],
                "kmsKeyIdentifier": "alias/mine",
            }  # fmt: skip
            microvm_id = await launched(home, **given, logging={"disabled": {}})
            shown = await home.call("get_microvm", microvmIdentifier=microvm_id)
            assert {name: shown[name] for name in given} == given
            assert shown["state"] == "RUNNING"
            assert "runHookPayload" not in shown

    run(scenario())


def test_the_life_of_a_machine_through_the_api() -> None:
    async def scenario() -> None:
        async with house() as home:
            microvm_id = await launched(home)
            answer = await home.call("suspend_microvm", microvmIdentifier=microvm_id)
            assert answer.keys() == {"ResponseMetadata"}
            await reach(home, microvm_id, Phase.SUSPENDED)
            await home.call("resume_microvm", microvmIdentifier=microvm_id)
            await reach(home, microvm_id, Phase.RUNNING)
            await home.call("terminate_microvm", microvmIdentifier=microvm_id)
            await reach(home, microvm_id, Phase.TERMINATED)
            await home.call("terminate_microvm", microvmIdentifier=microvm_id)
            shown = await home.call("get_microvm", microvmIdentifier=microvm_id)
            assert (shown["state"], shown["stateReason"]) == ("TERMINATED", "Success.")
            assert shown["terminatedAt"].timestamp() == pytest.approx(home.clock.now_s())
            for operation in ("suspend_microvm", "resume_microvm"):
                assert await refused(home, operation, microvmIdentifier=microvm_id) == (
                    400,
                    "ValidationException",
                    f"The MicroVM {microvm_id} has been terminated "
                    "and its state cannot be changed.",
                )

    run(scenario())


def test_state_changes_in_the_wrong_state_conflict() -> None:
    async def scenario() -> None:
        async with house() as home:
            microvm_id = await launched(home)
            status, code, _ = await refused(home, "resume_microvm", microvmIdentifier=microvm_id)
            assert (status, code) == (409, "ConflictException")

    run(scenario())


@pytest.mark.parametrize(
    "operation",
    ["get_microvm", "suspend_microvm", "resume_microvm", "terminate_microvm"],
)
def test_an_unknown_machine(operation: str) -> None:
    async def scenario() -> None:
        async with house() as home:
            assert await refused(home, operation, microvmIdentifier="microvm-no") == (
                404, "ResourceNotFoundException", "MicroVM not found: microvm-no",
            )  # fmt: skip

    run(scenario())


def test_images_that_cannot_be_run() -> None:
    async def scenario() -> None:
        async with house() as home:
            arn = await home.active_image()
            text = f"No active version found for MicroVM image {ARN}no"
            assert (await refused(home, "run_microvm", imageIdentifier=f"{ARN}no"))[2] == text
            pinned = await refused(home, "run_microvm", imageIdentifier=arn, imageVersion="9.0")
            assert pinned[2] == f"No active version found for MicroVM image {arn} and version 9.0"
            bare = await refused(home, "run_microvm", imageIdentifier="env")
            assert bare == (400, "ValidationException", "Malformed ARN - doesn't start with 'arn:'")
            for foreign in (arn.replace("image:env", "image/env"), arn.replace("0000", "1234")):
                status, code, _ = await refused(home, "run_microvm", imageIdentifier=foreign)
                assert (status, code) == (403, "AccessDeniedException")

    run(scenario())


def test_the_idle_policys_documented_maximum() -> None:
    async def scenario() -> None:
        async with house() as home:
            arn = await home.active_image()
            policy = {**IDLE, "maxIdleDurationSeconds": 28801}
            status, code, text = await refused(
                home, "run_microvm", imageIdentifier=arn, idlePolicy=policy
            )
            assert (status, code) == (400, "ValidationException")
            assert "'idlePolicy.maxIdleDurationSeconds'" in text

    run(scenario())


# -- clientToken


def test_a_client_token_gives_the_same_machine_for_ever() -> None:
    async def scenario() -> None:
        async with house() as home:
            microvm_id = await launched(home, clientToken="t", maximumDurationInSeconds=60)
            again = {"imageIdentifier": f"{ARN}env", "clientToken": "t"}
            replay = await home.call("run_microvm", **again, maximumDurationInSeconds=60)
            assert replay["microvmId"] == microvm_id
            assert await refused(home, "run_microvm", **again) == (
                400,
                "ValidationException",
                "The provided clientToken was used with different request parameters",
            )
            await home.call("terminate_microvm", microvmIdentifier=microvm_id)
            await reach(home, microvm_id, Phase.TERMINATED)
            replay = await home.call("run_microvm", **again, maximumDurationInSeconds=60)
            assert (replay["microvmId"], replay["state"]) == (microvm_id, "TERMINATED")
            assert home.script.hooks().count("run") == 1

    run(scenario())


def test_parallel_calls_with_one_token_make_one_machine() -> None:
    async def scenario() -> None:
        async with house() as home:
            arn = await home.active_image()
            call = {"imageIdentifier": arn, "clientToken": "t"}
            answers = await asyncio.gather(*(home.call("run_microvm", **call) for _ in range(4)))
            assert len({answer["microvmId"] for answer in answers}) == 1
            assert len({answer["endpoint"] for answer in answers}) == 1

    run(scenario())


# -- limits


def test_a_full_quota_is_a_402_that_names_nothing() -> None:
    async def scenario() -> None:
        async with house(ServiceSettings(memory_quota_mib=8192)) as home:
            await launched(home)
            await launched(home)
            assert await refused(home, "run_microvm", imageIdentifier=f"{ARN}env") == (
                402,
                "ServiceQuotaExceededException",
                "The base maximum allocated memory limit has been reached for this account.",
            )

    run(scenario())


def test_rates_of_the_realistic_preset() -> None:
    async def scenario() -> None:
        async with house(ServiceSettings(throttle=True)) as home:
            microvm_id = await launched(home)
            for _ in range(10):
                await home.call("terminate_microvm", microvmIdentifier=microvm_id)
            with pytest.raises(ClientError) as caught:
                await home.call("terminate_microvm", microvmIdentifier=microvm_id)
            answer = caught.value.response
            assert answer["Error"]["Code"] == "ThrottlingException"
            assert answer["ResponseMetadata"]["HTTPStatusCode"] == 429
            assert answer["retryAfterSeconds"] == 1
            await home.call("get_microvm", microvmIdentifier=microvm_id)  # another bucket

    run(scenario())


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("api-429", 429, "ThrottlingException"),
        ("api-402", 402, "ServiceQuotaExceededException"),
        ("api-capacity", 500, "InsufficientCapacityException"),
        ("api-html-502", 502, "502"),
        ("credentials-expired", 403, "ExpiredTokenException"),
    ],
)
def test_ordered_faults(kind: str, status: int, code: str) -> None:
    async def scenario() -> None:
        async with house() as home:
            arn = await home.active_image()
            home.faults.add(parse_fault({"kind": kind}))
            answer = await refused(home, "run_microvm", imageIdentifier=arn)
            assert answer[:2] == (status, code)
            await home.call("run_microvm", imageIdentifier=arn)

    run(scenario())


# -- listing


def test_the_listing_pages_filters_and_keeps_ended_machines() -> None:
    async def scenario() -> None:
        async with house() as home:
            made = [await launched(home) for _ in range(5)]
            await home.call("terminate_microvm", microvmIdentifier=made[0])
            await reach(home, made[0], Phase.TERMINATED)
            first = await home.call("list_microvms", maxResults=3)
            rest = await home.call("list_microvms", maxResults=3, nextToken=first["nextToken"])
            items = first["items"] + rest["items"]
            assert [item["microvmId"] for item in items] == made[::-1]
            assert [item["state"] for item in items] == ["RUNNING"] * 4 + ["TERMINATED"]
            assert items[0].keys() == {
                "microvmId", "state", "imageArn", "imageVersion", "startedAt",
            }  # fmt: skip
            assert "nextToken" not in rest
            one = await home.call("list_microvms", imageIdentifier=f"{ARN}env", imageVersion="2.0")
            assert one["items"] == []
            await home.active_image("other")
            other = await home.call("list_microvms", imageIdentifier=f"{ARN}other")
            assert other["items"] == []
            unknown = await refused(home, "list_microvms", imageIdentifier=f"{ARN}no")
            assert unknown[:2] == (404, "ResourceNotFoundException")

    run(scenario())


def test_a_foreign_page_token_is_refused() -> None:
    async def scenario() -> None:
        async with house() as home:
            assert (await refused(home, "list_microvms", nextToken="x"))[0] == 400

    run(scenario())


# -- tokens


def test_tokens_are_minted_in_any_state_but_the_last() -> None:
    async def scenario() -> None:
        async with house() as home:
            microvm_id = await launched(home)
            request = {
                "microvmIdentifier": microvm_id, "expirationInMinutes": 60,
                "allowedPorts": [
                    {"port": 8080}, {"range": {"startPort": 1, "endPort": 2}}, {"allPorts": {}},
                ],
            }  # fmt: skip
            await home.call("suspend_microvm", microvmIdentifier=microvm_id)
            await reach(home, microvm_id, Phase.SUSPENDED)
            answer = await home.call("create_microvm_auth_token", **request)
            assert answer["authToken"].keys() == {"X-aws-proxy-auth"}
            machine = home.fleet.get(microvm_id)
            assert machine is not None
            assert machine.read_token(answer["authToken"]["X-aws-proxy-auth"]).allows(65535)
            await home.call("terminate_microvm", microvmIdentifier=microvm_id)
            await reach(home, microvm_id, Phase.TERMINATED)
            assert (await refused(home, "create_microvm_auth_token", **request))[0] == 400

    run(scenario())


def test_token_requests_that_are_refused() -> None:
    async def scenario() -> None:
        async with house() as home:
            microvm_id = await launched(home)
            base = {"microvmIdentifier": microvm_id, "expirationInMinutes": 5}
            bad = [
                {"expirationInMinutes": 61, "allowedPorts": [{"port": 1}]},
                {"allowedPorts": [{"range": {"startPort": 9, "endPort": 8}}]},
            ]
            for members in bad:
                answer = await refused(home, "create_microvm_auth_token", **{**base, **members})
                assert answer[:2] == (400, "ValidationException")

    run(scenario())


def test_shell_tokens_are_refused_as_recorded() -> None:
    async def scenario() -> None:
        async with house() as home:
            request = {"expirationInMinutes": 5}
            plain = await launched(home)
            text = (await refused(
                home, "create_microvm_shell_auth_token", microvmIdentifier=plain, **request
            ))[2]  # fmt: skip
            assert text == (
                "Shell access requires SHELL_INGRESS network connector "
                "to be configured on the MicroVM."
            )
            both = await launched(
                home,
                ingressNetworkConnectors=[f"{CONNECTOR}SHELL_INGRESS", f"{CONNECTOR}ALL_INGRESS"],
            )
            text = (await refused(
                home, "create_microvm_shell_auth_token", microvmIdentifier=both, **request
            ))[2]  # fmt: skip
            assert text.startswith("ALL_INGRESS cannot be combined")
            shell = await launched(home, ingressNetworkConnectors=[f"{CONNECTOR}SHELL_INGRESS"])
            answer = await home.call(
                "create_microvm_shell_auth_token", microvmIdentifier=shell, **request
            )
            assert answer["authToken"].keys() == {"X-aws-proxy-auth"}

    run(scenario())
