"""The service client: what it sends, and what each answer becomes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from gateway import service_client
from gateway.bridge import bridge
from gateway.clock import SystemClock
from gateway.control import (
    RATES,
    Control,
    LaunchRequest,
    Shaper,
    base_url,
    managed_connector,
    map_error,
)
from gateway.errors import (
    AccessDenied,
    CapacityShort,
    ConfigError,
    CredentialsTrouble,
    GatewayError,
    GuestFault,
    ImageNotFound,
    MachineGone,
    OutcomeUnknown,
    QuotaFull,
    RequestRefused,
    ServiceFault,
    Throttled,
    Unreachable,
    UsageError,
)
from gateway.profiles import ServiceAccess
from gateway.service_client import make_client
from tests.gateway.canned_service import Answer, CannedService, canned_service

ARN = "arn:aws:lambda:us-east-1:000000000000:microvm-image:a"
MACHINE = {"microvmId": "microvm-1", "state": "PENDING", "endpoint": "host.example"}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[CannedService]:
    monkeypatch.setattr(service_client, "TOTAL_ATTEMPTS", 1)  # retries are botocore's own
    with canned_service() as made:
        yield made


def run(service: CannedService, method: str, *args: Any, **kwargs: Any) -> Any:
    control = Control(lambda: service.access, SystemClock())

    async def steps() -> Any:
        return await getattr(control, method)(*args, **kwargs)

    return bridge().call(steps)


def launch(service: CannedService, **settings: Any) -> Any:
    return run(service, "run_microvm", LaunchRequest(ARN, "{}", **settings))


# -- what goes out and comes back ---------------------------------------------------


def test_run_says_everything_and_uses_a_fresh_token_each_time(service: CannedService) -> None:
    service.will(Answer(body=MACHINE), Answer(body=MACHINE | {"endpoint": "http://127.0.0.1:1"}))
    info = launch(service, execution_role_arn="arn:aws:iam::1:role/r", image_version="2.0")
    assert (info.microvm_id, info.url) == ("microvm-1", "https://host.example")
    assert launch(service).url == "http://127.0.0.1:1"
    (method, path, first), (_, _, second) = service.requests
    assert (method, path) == ("POST", "/2025-09-09/microvms")
    assert first["imageIdentifier"] == ARN
    assert first["idlePolicy"] == {
        "maxIdleDurationSeconds": 900,
        "suspendedDurationSeconds": 28800,
        "autoResumeEnabled": True,
    }
    assert first["ingressNetworkConnectors"] == [managed_connector("us-east-1", "HTTP_INGRESS")]
    assert first["egressNetworkConnectors"] == [managed_connector("us-east-1", "INTERNET_EGRESS")]
    assert first["executionRoleArn"] == "arn:aws:iam::1:role/r"
    assert first["imageVersion"] == "2.0"
    assert "executionRoleArn" not in second
    assert first["clientToken"] != second["clientToken"]


def test_unknown_and_null_members_are_tolerated(service: CannedService) -> None:
    service.will(
        Answer(
            body=MACHINE | {"terminationReasonCode": None, "stateReason": None, "idlePolicy": None}
        )
    )
    info = run(service, "get", "microvm-1")
    assert info.state_reason is None
    assert not info.terminal


def test_list_reads_all_pages(service: CannedService) -> None:
    page_1 = {"items": [{"microvmId": "a", "state": "RUNNING"}], "nextToken": "x=="}
    page_2 = {"items": [{"microvmId": "b", "state": "TERMINATED"}]}
    service.will(Answer(body=page_1), Answer(body=page_2))
    machines = run(service, "list", ARN)
    assert [machine.microvm_id for machine in machines] == ["a", "b"]
    assert machines[1].terminal
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(service.requests[1][1]).query)
    assert query["nextToken"] == ["x=="]
    assert query["imageIdentifier"] == [ARN]


def test_a_token_is_for_one_port(service: CannedService) -> None:
    service.will(Answer(body={"authToken": {"X-aws-proxy-auth": "a-jwe"}}))
    token = run(service, "auth_token", "microvm-1", 8080, 30)
    assert service.requests[0][2] == {"expirationInMinutes": 30, "allowedPorts": [{"port": 8080}]}
    assert token.headers == {"X-aws-proxy-auth": "a-jwe"}
    assert token.life_s == 1800


def test_state_changes_and_images(service: CannedService) -> None:
    service.will(Answer(), Answer(), Answer())
    for method in ("suspend", "resume", "terminate"):
        run(service, method, "microvm-1")
    image = {"imageArn": ARN, "state": "CREATED", "latestActiveImageVersion": "1.0"}
    service.will(Answer(201, body=image), Answer(body=image))
    parameters = {
        "name": "a",
        "codeArtifact": {"uri": "file:///x"},
        "baseImageArn": ARN,
        "buildRoleArn": "arn:aws:iam::1:role/r",
    }
    assert run(service, "create_image", **parameters).state == "CREATED"
    assert run(service, "get_image", ARN).latest_active_version == "1.0"
    service.will(
        Answer(body={"items": [{"imageVersion": "9.0"}, {"imageVersion": "10.0"}]}),
        Answer(body={"items": [{"stateReason": None}, {"stateReason": "pip failed"}]}),
        Answer(body={"items": []}),
    )
    assert run(service, "build_failure", ARN) == "pip failed"
    assert "/versions/10.0/" in service.requests[-1][1]
    assert run(service, "build_failure", ARN) == "no reason given"


# -- errors ---------------------------------------------------------------------------

CASES = [
    (Answer(403, "AccessDeniedException", {"message": None}), AccessDenied, "us-east-1"),
    (Answer(403, "AccessDeniedException", {"message": "not you"}), AccessDenied, "not you"),
    (Answer(403, "ExpiredTokenException", {"message": "old"}), CredentialsTrouble, "old"),
    (Answer(403, "InvalidSignatureException", {"message": "bad"}), CredentialsTrouble, "bad"),
    (Answer(403, "UnrecognizedClientException", {}), CredentialsTrouble, "Unrecognized"),
    (
        Answer(402, "ServiceQuotaExceededException", {"message": "The limit.", "quotaCode": None}),
        QuotaFull,
        "The limit.",
    ),
    (Answer(402, None, {"message": "used up."}), QuotaFull, "used up."),
    (Answer(500, "InsufficientCapacityException", {"message": "full."}), CapacityShort, "full."),
    (Answer(500, "InternalServerException", {"message": "oops"}), ServiceFault, "oops"),
    (
        Answer(429, "ThrottlingException", {"message": "slow"}, {"Retry-After": "7"}),
        Throttled,
        "in 7 s",
    ),
    (Answer(429, "ThrottlingException", {}), Throttled, "a moment"),
    (Answer(400, "ValidationException", {"message": "Malformed"}), RequestRefused, "Malformed"),
    (Answer(409, "ConflictException", {"message": "changing"}), RequestRefused, "changing"),
    (
        Answer(404, "ResourceNotFoundException", {"message": "No active version found"}),
        ImageNotFound,
        "No active version",
    ),
    (Answer(400, None, {"message": None}), RequestRefused, "no reason"),
    (
        Answer(502, None, "<html><h1>Bad Gateway</h1></html>", {"Content-Type": "text/html"}),
        ServiceFault,
        "",
    ),
    (Answer(200, None, "<html>not json</html>"), ServiceFault, ""),
]


@pytest.mark.parametrize(("answer", "kind", "words"), CASES)
def test_answers_become_errors_of_the_tree(
    service: CannedService, answer: Answer, kind: type[GatewayError], words: str
) -> None:
    service.will(answer)
    with pytest.raises(kind) as caught:
        launch(service)
    assert words in caught.value.sentence
    assert "test-secret" not in caught.value.sentence


@pytest.mark.parametrize(
    "answer",
    [
        Answer(404, "ResourceNotFoundException", {"message": "MicroVM not found: microvm-1"}),
        Answer(
            400,
            "ValidationException",
            {"message": "The MicroVM x has been terminated and its state cannot be changed."},
        ),
    ],
)
def test_an_ended_machine_is_gone(service: CannedService, answer: Answer) -> None:
    service.will(answer)
    with pytest.raises(MachineGone):
        run(service, "suspend", "microvm-1")


def test_a_launch_whose_answer_got_lost_may_have_happened() -> None:
    from botocore.exceptions import ConnectionClosedError, ReadTimeoutError

    for error in (ConnectionClosedError(endpoint_url="x"), ReadTimeoutError(endpoint_url="x")):
        assert isinstance(map_error("run_microvm", error, "r", ""), OutcomeUnknown)
        assert isinstance(map_error("get_microvm", error, "r", ""), Unreachable)


def test_nobody_listening_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_client, "TOTAL_ATTEMPTS", 1)
    with canned_service() as gone:
        pass
    with pytest.raises(Unreachable, match="us-east-1"):
        launch(gone)


def test_no_credentials_and_no_such_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with canned_service() as service:
        service.access = ServiceAccess("us-east-1", service.access.endpoint_url)
        with pytest.raises(CredentialsTrouble, match="Sign in again"):
            launch(service)
        service.access = ServiceAccess("us-east-1", aws_profile="nobody")
        with pytest.raises(ConfigError, match="nobody"):
            launch(service)


def test_wrong_parameters_are_ours(service: CannedService) -> None:
    with pytest.raises(UsageError, match="maxResults"):
        run(service, "call", "list_microvms", maxResults="many")


def test_an_error_of_the_tree_stays_what_it_is() -> None:
    error = MachineGone("m", "x")
    assert map_error("get_microvm", error, "r", "") is error


def test_retries_keep_the_client_token(
    service: CannedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_client, "TOTAL_ATTEMPTS", 2)
    service.will(Answer(429, "ThrottlingException", {}, {"Retry-After": "0"}), Answer(body=MACHINE))
    launch(service)
    tokens = {body["clientToken"] for _, _, body in service.requests}
    assert len(service.requests) == 2
    assert len(tokens) == 1


# -- pieces ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("a.lambda-microvm.us-east-1.on.aws", "https://a.lambda-microvm.us-east-1.on.aws"),
        ("https://a.example/", "https://a.example"),
        ("http://127.0.0.1:4711", "http://127.0.0.1:4711"),
    ],
)
def test_an_endpoint_is_a_bare_host_or_a_url(endpoint: str, url: str) -> None:
    assert base_url(endpoint) == url


def test_an_endpoint_that_is_none_is_refused() -> None:
    for endpoint in ("ftp://x", "https://", "//"):
        with pytest.raises(GuestFault):
            base_url(endpoint)


def test_calls_are_shaped_to_the_documented_rates() -> None:
    shaper = Shaper()
    waits = [shaper.reserve("run_microvm", 100.0) for _ in range(8)]
    assert waits == pytest.approx([0, 0, 0, 0, 0, 0.2, 0.4, 0.6])
    assert shaper.reserve("run_microvm", 200.0) == 0.0
    assert shaper.reserve("list_microvms", 0.0) == 0.0
    assert set(RATES) <= {name for name in dir(Control) if not name.startswith("_")} | {
        "run_microvm", "resume_microvm", "suspend_microvm", "terminate_microvm", "get_microvm",
        "create_microvm_auth_token",
    }  # fmt: skip


@pytest.mark.parametrize(
    "region", ["us-east-1", "eu-west-1", "ap-northeast-1", "us-gov-west-1", "cn-north-1"]
)
def test_the_slim_client_is_like_an_ordinary_one(region: str) -> None:
    ours = make_client(ServiceAccess(region, None, "a", "b"))
    stock = boto3.Session("a", "b", region_name=region).client("lambda-microvms")
    assert ours.meta.endpoint_url == stock.meta.endpoint_url
    assert ours.meta.region_name == stock.meta.region_name
    assert ours.meta.partition == stock.meta.partition
    for client in (ours, stock):
        request = client.meta.service_model
        assert request.signing_name == "lambda"
    assert _authorization(ours) == _authorization(stock)


def _authorization(client: Any) -> tuple[str, str]:
    """Host and credential scope of a signed request; nothing is sent."""
    seen: list[tuple[str, str]] = []

    def stop(request: Any, **_: Any) -> Any:
        scope = request.headers["Authorization"].decode().split("/", 1)[1].split(",")[0]
        seen.append((request.url, scope.split("/", 1)[1]))
        raise InterruptedError

    client.meta.events.register("before-send", stop)
    with pytest.raises(InterruptedError):
        client.get_microvm(microvmIdentifier="microvm-1")
    return seen[0]


def test_a_named_access_is_never_shown() -> None:
    control = Control(lambda: ServiceAccess("r", "http://x", "AKIA", "hush"), SystemClock())
    assert "hush" not in repr(control)


def test_prewarming_is_silent_and_needs_no_service() -> None:
    code = """
import sys
from gateway.control import prewarm
from gateway.profiles import ServiceAccess
for known in ServiceAccess("us-east-1", "http://127.0.0.1:1", "a", "b"), None:
    prewarm(lambda: known).result(60)
import gc
assert gc.isenabled()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=100, capture_output=True, text=True, check=True
    )
    assert done.stdout == done.stderr == ""


def test_many_callers_make_one_client() -> None:
    with canned_service() as service:
        service.will(*(Answer(body=MACHINE) for _ in range(5)))
        found: list[int] = []

        def access() -> ServiceAccess:
            found.append(1)
            return service.access

        control = Control(access, SystemClock())

        async def steps() -> None:
            await asyncio.gather(*(control.get("microvm-1") for _ in range(5)))
            await control.renew()

        bridge().call(steps)
        assert len(found) == 2
