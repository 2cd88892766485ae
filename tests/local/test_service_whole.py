"""The whole service as a process, with the real engine, AWS CLI and boto3 unmodified."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest

from gateway.local.client import ServiceInfo, ensure_running, stop
from kernel_guest.shared.payload import RunPayload, encode_key, encode_payload
from tests.local.in_process import ARN, BASE_IMAGE, ROLE
from tests.support.waiting import wait_until

BIN = Path(sys.executable).parent
HOOKS: dict[str, Any] = {
    "port": 9000,
    "microvmImageHooks": {
        "ready": "ENABLED", "readyTimeoutInSeconds": 60,
        "validate": "ENABLED", "validateTimeoutInSeconds": 60,
    },
    "microvmHooks": {
        "run": "ENABLED", "runTimeoutInSeconds": 20, "resume": "ENABLED",
        "resumeTimeoutInSeconds": 20, "suspend": "ENABLED", "suspendTimeoutInSeconds": 20,
        "terminate": "ENABLED", "terminateTimeoutInSeconds": 5,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("whole") / "state"
    yield place
    stop(place)


@pytest.fixture(scope="module")
def info(folder: Path) -> ServiceInfo:
    return ensure_running(folder)


@pytest.fixture(scope="module")
def client(info: ServiceInfo) -> Iterator[Any]:
    made = make_client(info)
    yield made
    made.close()


def make_client(info: ServiceInfo) -> Any:
    return boto3.client(
        "lambda-microvms", endpoint_url=info.endpoint_url, region_name=info.region,
        aws_access_key_id=info.access_key_id, aws_secret_access_key=info.secret_access_key,
    )  # fmt: skip


def make_image(client: Any, name: str) -> str:
    client.create_microvm_image(
        name=name, codeArtifact={"uri": Path(sys.prefix).as_uri()}, baseImageArn=BASE_IMAGE,
        buildRoleArn=ROLE, hooks=HOOKS, resources=[{"minimumMemoryInMiB": 512}],
    )  # fmt: skip
    arn = f"{ARN}{name}"
    wait_until(
        lambda: client.get_microvm_image(imageIdentifier=arn)["state"] != "CREATING", within_s=90
    )
    builds = client.list_microvm_image_builds(imageIdentifier=arn, imageVersion="1.0")["items"]
    assert {build["buildState"] for build in builds} == {"SUCCESSFUL"}, builds
    return arn


@pytest.fixture(scope="module")
def image(client: Any) -> str:
    return make_image(client, "whole")


def payload() -> str:
    return encode_payload(
        RunPayload("session", 1, 1, encode_key(os.urandom(32)), time_s=time.time())
    )


def launch(client: Any, arn: str, **members: Any) -> dict[str, Any]:
    answer = client.run_microvm(imageIdentifier=arn, runHookPayload=payload(), **members)
    assert answer["state"] == "PENDING"
    return dict(answer)


def state(client: Any, machine: dict[str, Any], *wanted: str) -> dict[str, Any]:
    """The machine's record once it is in one of these states."""

    def look() -> dict[str, Any] | None:
        shown = client.get_microvm(microvmIdentifier=machine["microvmId"])
        return dict(shown) if shown["state"] in wanted else None

    found = wait_until(look, within_s=40, what=f"{wanted}")
    assert found is not None
    return found


def token(client: Any, machine: dict[str, Any], port: int = 8080) -> dict[str, str]:
    answer = client.create_microvm_auth_token(
        microvmIdentifier=machine["microvmId"], expirationInMinutes=5, allowedPorts=[{"port": port}]
    )
    return dict(answer["authToken"])


def fetch(machine: dict[str, Any], path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    request = urllib.request.Request(machine["endpoint"] + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=40) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_a_machine_from_boto3_serves_sleeps_wakes_and_ends(
    client: Any, image: str, folder: Path
) -> None:
    idle = {
        "maxIdleDurationSeconds": 600, "suspendedDurationSeconds": 600, "autoResumeEnabled": True,
    }  # fmt: skip
    machine = launch(client, image, idlePolicy=idle)
    headers = token(client, machine)
    status, body = fetch(machine, "/health", headers)  # held until RUNNING
    assert status == 200
    assert json.loads(body)["microvm_id"] == machine["microvmId"]
    assert state(client, machine, "RUNNING")
    assert fetch(machine, "/health", {}) == (403, b"Request missing authentication")
    client.suspend_microvm(microvmIdentifier=machine["microvmId"])
    state(client, machine, "SUSPENDED")
    status, again = fetch(machine, "/health", headers)  # held until it is awake
    assert (status, json.loads(again)["boot_id"]) == (200, json.loads(body)["boot_id"])
    assert state(client, machine, "RUNNING")
    client.terminate_microvm(microvmIdentifier=machine["microvmId"])
    ended = state(client, machine, "TERMINATED")
    assert ended["stateReason"] == "Success."
    assert fetch(machine, "/health", headers) == (502, b"")
    assert not [p for p in psutil.process_iter(["environ"]) if of_machine(p, machine)]
    logs = folder / "logs"
    assert (logs / f"{machine['microvmId']}.log").stat().st_mode & 0o077 == 0


def of_machine(process: psutil.Process, machine: dict[str, Any]) -> bool:
    return machine["microvmId"] in str(process.info["environ"])


def test_a_run_costs_milliseconds(client: Any, image: str) -> None:
    """Not a benchmark: a guard against a call that waits for the machine."""
    spent_s = []
    for _ in range(5):
        begun_s = time.perf_counter()
        machine = launch(client, image)
        spent_s.append(time.perf_counter() - begun_s)
        client.terminate_microvm(microvmIdentifier=machine["microvmId"])
        state(client, machine, "TERMINATED")
    assert min(spent_s) < 0.1, spent_s


def test_the_aws_cli_works_unmodified(info: ServiceInfo, client: Any, image: str) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **info.environment()}

    def aws(*arguments: str) -> Any:
        result = subprocess.run(
            [BIN / "aws", "lambda-microvms", *arguments, "--output", "json"],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout) if result.stdout.strip() else None

    machine = aws("run-microvm", "--image-identifier", image, "--run-hook-payload", payload())
    identifier = ("--microvm-identifier", machine["microvmId"])
    state(client, machine, "RUNNING")
    assert aws("get-microvm", *identifier)["state"] == "RUNNING"
    ports = '[{"port":8080}]'
    minted = aws(
        "create-microvm-auth-token", *identifier, "--expiration-in-minutes", "5",
        "--allowed-ports", ports,
    )  # fmt: skip
    assert fetch(machine, "/health", minted["authToken"])[0] == 200
    aws("terminate-microvm", *identifier)
    state(client, machine, "TERMINATED")
    listed = aws("list-microvms", "--image-identifier", image)["items"]
    assert machine["microvmId"] in {item["microvmId"] for item in listed}
    assert aws("list-tags", "--resource", image)["Tags"] == {}


def test_another_user_can_read_nothing(info: ServiceInfo, folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    for name in ("service.json", "state.sqlite", "service.log"):
        result = subprocess.run(
            ["cat", folder / name], user=65534, group=65534, capture_output=True, check=False
        )
        assert result.returncode != 0
        assert result.stdout == b""


def test_a_service_that_is_killed_takes_its_machines_with_it(tmp_path: Path) -> None:
    place = tmp_path / "state"
    info = ensure_running(place)
    client = make_client(info)
    try:
        arn = make_image(client, "killed")
        awake, asleep = launch(client, arn), launch(client, arn)
        for machine in (awake, asleep):
            state(client, machine, "RUNNING")
        client.suspend_microvm(microvmIdentifier=asleep["microvmId"])
        state(client, asleep, "SUSPENDED")
        family = psutil.Process(info.pid).children(recursive=True)
        assert family
        os.kill(info.pid, signal.SIGKILL)
        wait_until(
            lambda: not [p for p in family if p.is_running() and p.status() != "zombie"],
            within_s=20,
            what="the end of the dead service's machines",
        )
        # The next service knows what became of them, and runs the image again at once.
        again = make_client(ensure_running(place))
        try:
            shown = again.get_microvm(microvmIdentifier=asleep["microvmId"])
            assert (shown["state"], shown["stateReason"]) == (
                "TERMINATED", "The local service ended.",
            )  # fmt: skip
            machine = launch(again, arn)
            state(again, machine, "RUNNING")
        finally:
            again.close()
    finally:
        client.close()
        stop(place)
    assert not list(place.glob("machines/*"))
