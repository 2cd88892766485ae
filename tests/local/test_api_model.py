"""Routing, parsing, constraints and answers, all driven by botocore's model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.local.api.errors import ApiError, UnreadableRequestError, memory_quota, throttled
from gateway.local.api.model import load_model
from gateway.local.api.operations import HANDLERS
from gateway.local.api.parsing import parse_input
from gateway.local.api.serialising import error_answer, output_body
from gateway.local.api.validation import validate

MODEL = load_model()
OPERATIONS = {operation.name: operation for operation in MODEL.operations}


def parsed(method: str, target: str, body: Any = None) -> tuple[str, dict[str, Any]]:
    path, _, query = target.partition("?")
    match = MODEL.match(method, path)
    assert match is not None
    raw = body if isinstance(body, bytes) else json.dumps(body).encode() if body else b""
    return match.operation.name, parse_input(match, query, raw)


def message(operation: str, members: dict[str, Any]) -> str | None:
    error = validate(OPERATIONS[operation].input_shape, members)
    return error.message if error else None


def test_every_operation_of_the_model_has_a_handler() -> None:
    assert HANDLERS.keys() == OPERATIONS.keys()


# -- routing and parsing


def test_labels_are_decoded_and_colons_may_be_raw() -> None:
    arn = "arn:aws:lambda:us-east-1:000000000000:microvm-image:a"
    for written in (arn, arn.replace(":", "%3A")):
        name, members = parsed("GET", f"/2025-09-09/microvm-images/{written}/versions/1.0")
        assert name == "GetMicrovmImageVersion"
        assert members == {"imageIdentifier": arn, "imageVersion": "1.0"}


@pytest.mark.parametrize(
    ("method", "path", "operation"),
    [
        ("POST", "/2025-09-09/microvms", "RunMicrovm"),
        ("GET", "/2025-09-09/microvms", "ListMicrovms"),
        ("DELETE", "/2025-09-09/microvms/microvm-1", "TerminateMicrovm"),
        ("POST", "/2025-09-09/microvms/microvm-1/auth-token", "CreateMicrovmAuthToken"),
        ("GET", "/2025-09-09/microvm-images/a/versions/1/builds/b", "GetMicrovmImageBuild"),
        ("DELETE", "/2017-03-31/tags/arn%3Aaws", "UntagResource"),
    ],
)
def test_routes(method: str, path: str, operation: str) -> None:
    match = MODEL.match(method, path)
    assert match is not None
    assert match.operation.name == operation


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/2025-09-09/microvms"),
        ("GET", "/"),
        ("GET", "/2025-09-09/microvms/"),
        ("GET", "/x"),
    ],
)
def test_what_is_no_route(method: str, path: str) -> None:
    assert MODEL.match(method, path) is None


def test_query_members_are_typed() -> None:
    _, members = parsed("GET", "/2025-09-09/microvms?maxResults=7&nextToken=a%3D%3D")
    assert members == {"maxResults": 7, "nextToken": "a=="}
    _, members = parsed("DELETE", "/2017-03-31/tags/x?tagKeys=a&tagKeys=b")
    assert members["TagKeys"] == ["a", "b"]


def test_null_and_unknown_members_are_left_out() -> None:
    body = {"imageIdentifier": "x", "idlePolicy": None, "unknown": 1, "logging": {"disabled": {}}}
    _, members = parsed("POST", "/2025-09-09/microvms", body)
    assert members == {"imageIdentifier": "x", "logging": {"disabled": {}}}


@pytest.mark.parametrize(
    "body",
    [
        b"{", b"[]", b"\xff", b"[" * 100_000, b'{"imageIdentifier": 1}',
        b'{"idlePolicy": []}', b'{"idlePolicy": {"autoResumeEnabled": "yes"}}',
        b'{"maximumDurationInSeconds": true}', b'{"maximumDurationInSeconds": 1.5}',
        b'{"egressNetworkConnectors": {}}',
    ],
)  # fmt: skip
def test_an_unreadable_body(body: bytes) -> None:
    with pytest.raises(UnreadableRequestError):
        parsed("POST", "/2025-09-09/microvms", body)


@pytest.mark.parametrize("query", ["maxResults=x", "maxResults=1e3", "&&", "maxResults"])
def test_an_unreadable_query(query: str) -> None:
    with pytest.raises(UnreadableRequestError):
        parsed("GET", f"/2025-09-09/microvms?{query}")


# -- constraints, in the service's words


def test_a_partial_idle_policy_as_recorded() -> None:
    members = {
        "imageIdentifier": "x",
        "idlePolicy": {"suspendedDurationSeconds": 1, "autoResumeEnabled": True},
    }
    assert message("RunMicrovm", members) == (
        "1 validation error detected: Value null at 'idlePolicy.maxIdleDurationSeconds' "
        "failed to satisfy constraint: Member must not be null"
    )


def test_a_long_payload_as_recorded() -> None:
    assert message("RunMicrovm", {"imageIdentifier": "x", "runHookPayload": "x" * 4096}) is None
    assert message("RunMicrovm", {"imageIdentifier": "x", "runHookPayload": "x" * 4097}) == (
        "1 validation error detected: Value at 'runHookPayload' failed to satisfy constraint: "
        "Member must have length less than or equal to 4096"
    )


def test_several_violations_are_counted_and_joined() -> None:
    text = message("RunMicrovm", {"maximumDurationInSeconds": 0, "clientToken": ""})
    assert text is not None
    first, *rest = text.removeprefix("3 validation errors detected: ").split("; ")
    assert first == (
        "Value null at 'imageIdentifier' failed to satisfy constraint: Member must not be null"
    )
    assert len(rest) == 2


@pytest.mark.parametrize(
    ("operation", "members", "violation"),
    [
        (
            "RunMicrovm",
            {"imageIdentifier": "x", "maximumDurationInSeconds": 28801},
            "Value '28801' at 'maximumDurationInSeconds' failed to satisfy constraint: "
            "Member must have value less than or equal to 28800",
        ),
        (
            "RunMicrovm",
            {"imageIdentifier": "x", "executionRoleArn": "arn:aws:iam::1:role/too-short"},
            "Member must satisfy regular expression pattern: arn:aws[a-z\\-]*:iam",
        ),
        (
            "CreateMicrovmAuthToken",
            {"microvmIdentifier": "m", "expirationInMinutes": 1, "allowedPorts": []},
            "Value '[]' at 'allowedPorts' failed to satisfy constraint: "
            "Member must have length greater than or equal to 1",
        ),
        (
            "CreateMicrovmAuthToken",
            {"microvmIdentifier": "m", "expirationInMinutes": 1, "allowedPorts": [{"port": 0}]},
            "Value '0' at 'allowedPorts.1.member.port' failed to satisfy constraint: "
            "Member must have value greater than or equal to 1",
        ),
        (
            "CreateMicrovmAuthToken",
            {
                "microvmIdentifier": "m",
                "expirationInMinutes": 1,
                "allowedPorts": [{"port": 1, "allPorts": {}}],
            },
            "at 'allowedPorts.1.member' failed to satisfy constraint: "
            "Member must have exactly one member set",
        ),
        (
            "UpdateMicrovmImageVersion",
            {"imageIdentifier": "x", "imageVersion": "1.0", "status": "OFF"},
            "Value 'OFF' at 'status' failed to satisfy constraint: "
            "Member must satisfy enum value set: [ACTIVE, INACTIVE]",
        ),
        (
            "TagResource",
            {
                "Resource": "arn:aws:lambda:us-east-1:000000000000:microvm-image:a",
                "Tags": {"a*": "b"},
            },
            "at 'Tags.a*.key' failed to satisfy constraint",
        ),
    ],
)
def test_each_constraint(operation: str, members: dict[str, Any], violation: str) -> None:
    text = message(operation, members)
    assert text is not None
    assert violation in text


def test_sensitive_values_are_never_shown() -> None:
    base = {
        "name": "a", "baseImageArn": "x", "buildRoleArn": "arn:aws:iam::000000000000:role/x",
        "codeArtifact": {"uri": "file:///x"},
    }  # fmt: skip
    text = message("CreateMicrovmImage", {**base, "environmentVariables": {"A": "secret" * 1000}})
    assert text is not None
    assert "secret" not in text
    assert "Value at 'environmentVariables.A.value'" in text


def test_tag_keys_may_have_letters_of_any_script() -> None:
    resource = "arn:aws:lambda:us-east-1:000000000000:microvm-image:a"
    assert message("TagResource", {"Resource": resource, "Tags": {"Größe 2": "ä@+"}}) is None


# -- answers


def test_unset_members_are_null_and_extra_ones_are_kept() -> None:
    shape = OPERATIONS["GetMicrovm"].output_shape
    body = json.loads(output_body(shape, {"microvmId": "m", "terminationReasonCode": None}))
    assert body["microvmId"] == "m"
    assert body["stateReason"] is None
    assert body["idlePolicy"] is None
    assert "terminationReasonCode" in body


def test_an_error_has_its_type_in_the_header_and_null_members() -> None:
    error = memory_quota()
    status, headers, body = error_answer(MODEL.error_shape(error.code), error.message, {})
    assert (status, headers) == (402, {"x-amzn-ErrorType": "ServiceQuotaExceededException"})
    assert json.loads(body) == {
        "message": "The base maximum allocated memory limit has been reached for this account.",
        "resourceId": None, "resourceType": None, "serviceCode": None, "quotaCode": None,
    }  # fmt: skip


def test_throttling_says_when_to_come_back_in_a_header() -> None:
    error = throttled(0.2)
    shape = MODEL.error_shape(error.code)
    status, headers, body = error_answer(shape, error.message, error.members)
    assert status == 429
    assert headers["Retry-After"] == "1"
    assert "retryAfterSeconds" not in json.loads(body)


def test_an_error_names_its_code() -> None:
    assert str(ApiError("ConflictException", "x")) == "ConflictException: x"
