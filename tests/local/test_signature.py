"""Signatures: what is accepted, and each way to be refused."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from gateway.local.api.signature import (
    KeyPair,
    SignatureChecker,
    SignatureRefusedError,
    SignedRequest,
)

KEYS = KeyPair("AKIALOCALTEST", "the secret")
CHECKER = SignatureChecker(KEYS, region="us-east-1", service="lambda")
HOST = "127.0.0.1:4290"


def signed(
    target: str = "/2025-09-09/microvms",
    *,
    method: str = "POST",
    body: bytes = b'{"a": 1}',
    keys: KeyPair = KEYS,
    service: str = "lambda",
    region: str = "us-east-1",
    token: str | None = None,
    extra: dict[str, str] | None = None,
) -> SignedRequest:
    """A request as botocore signs it now."""
    request = AWSRequest(
        method=method,
        url=f"http://{HOST}{target}",
        data=body,
        headers={"Host": HOST, **(extra or {})},
    )
    credentials = Credentials(keys.access_key_id, keys.secret_access_key, token)
    SigV4Auth(credentials, service, region).add_auth(request)
    headers = {name.lower(): value for name, value in request.headers.items()}
    return SignedRequest(method, target, headers, body)


def now_s() -> float:
    return datetime.datetime.now(datetime.UTC).timestamp()


def refusal(request: SignedRequest, at_s: float | None = None) -> SignatureRefusedError:
    with pytest.raises(SignatureRefusedError) as caught:
        CHECKER.check(request, now_s() if at_s is None else at_s)
    return caught.value


def changed(request: SignedRequest, **values: Any) -> SignedRequest:
    members = {
        "method": request.method, "target": request.target,
        "headers": request.headers, "body": request.body,
    }  # fmt: skip
    return SignedRequest(**{**members, **values})


@pytest.mark.parametrize(
    "target",
    [
        "/2025-09-09/microvms",
        "/2025-09-09/microvms?maxResults=5&nextToken=a%3D%3D",
        "/2025-09-09/microvm-images/arn%3Aaws%3Alambda/versions/1.0",
        "/2025-09-09/microvm-images/arn:aws:lambda:us-east-1:000000000000:microvm-image:a",
        "/2017-03-31/tags/x?tagKeys=b&tagKeys=a",
    ],
)
@pytest.mark.parametrize("body", [b"", b"{}"])
def test_what_botocore_signs_is_accepted(target: str, body: bytes) -> None:
    CHECKER.check(signed(target, body=body), now_s())


def test_headers_that_botocore_would_not_sign_may_be_signed() -> None:
    CHECKER.check(
        signed(extra={"X-Custom": "  a   b ", "Content-Type": "application/json"}), now_s()
    )


@pytest.mark.parametrize(
    "change",
    [
        {"method": "PUT"},
        {"target": "/2025-09-09/microvms?x=1"},
        {"body": b'{"a": 2}'},
        {"body": b""},
    ],
)
def test_a_changed_request_does_not_match(change: dict[str, Any]) -> None:
    refused = refusal(changed(signed(), **change))
    assert refused.code == "InvalidSignatureException"
    assert "does not match the signature you provided" in str(refused.message)


def test_a_changed_signed_header_does_not_match() -> None:
    request = signed(extra={"X-Custom": "a"})
    refused = refusal(changed(request, headers={**request.headers, "x-custom": "b"}))
    assert refused.code == "InvalidSignatureException"


def test_a_wrong_secret_does_not_match() -> None:
    refused = refusal(signed(keys=KeyPair(KEYS.access_key_id, "guessed")))
    assert refused.code == "InvalidSignatureException"


@pytest.mark.parametrize("token", [None, "session token of other credentials"])
def test_other_credentials_are_not_known(token: str | None) -> None:
    keys = KEYS if token else KeyPair("AKIAOTHER", KEYS.secret_access_key)
    refused = refusal(signed(keys=keys, token=token))
    assert refused.code == "UnrecognizedClientException"
    assert refused.message == "The security token included in the request is invalid."


def test_the_scope_must_be_ours() -> None:
    refused = refusal(signed(service="s3"))
    assert refused.message == "Credential should be scoped to correct service: 'lambda'."
    refused = refusal(signed(region="eu-west-1"))
    assert (refused.code, refused.message) == ("AccessDeniedException", None)


@pytest.mark.parametrize(
    ("skew_s", "text"), [(301, "Signature expired: "), (-301, "Signature not yet current: ")]
)
def test_a_date_outside_five_minutes(skew_s: float, text: str) -> None:
    refused = refusal(signed(), now_s() + skew_s)
    assert refused.code == "InvalidSignatureException"
    assert str(refused.message).startswith(text)
    CHECKER.check(signed(), now_s() + 290)


def test_the_date_must_be_that_of_the_scope() -> None:
    request = signed()
    stale = "20200101T000000Z"
    refused = refusal(changed(request, headers={**request.headers, "x-amz-date": stale}))
    assert "Date in Credential scope does not match" in str(refused.message)
    refused = refusal(changed(request, headers={**request.headers, "x-amz-date": "yesterday"}))
    assert refused.code == "IncompleteSignatureException"


def test_a_declared_digest_must_be_that_of_the_body() -> None:
    import hashlib

    body = b'{"a": 1}'
    digest = hashlib.sha256(body).hexdigest()
    CHECKER.check(signed(body=body, extra={"X-Amz-Content-SHA256": digest}), now_s())
    other = hashlib.sha256(b"x").hexdigest()
    for declared in (other, "UNSIGNED-PAYLOAD"):
        refused = refusal(signed(body=body, extra={"X-Amz-Content-SHA256": declared}))
        assert refused.code == "InvalidSignatureException"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "MissingAuthenticationTokenException"),
        ("", "MissingAuthenticationTokenException"),
        ("Bearer x", "IncompleteSignatureException"),
        ("AWS4-HMAC-SHA256 Credential=a", "IncompleteSignatureException"),
        ("AWS4-HMAC-SHA256 " + "x" * 10_000, "IncompleteSignatureException"),
    ],
)
def test_an_authorization_header_that_is_none(header: str | None, code: str) -> None:
    headers = {"host": HOST} if header is None else {"host": HOST, "authorization": header}
    assert refusal(changed(signed(), headers=headers)).code == code


def test_host_and_date_must_be_signed() -> None:
    request = signed()
    weaker = request.headers["authorization"].replace("host;", "")
    refused = refusal(changed(request, headers={**request.headers, "authorization": weaker}))
    assert "must be signed headers" in str(refused.message)


def test_the_secret_is_in_no_repr() -> None:
    assert "the secret" not in repr(KEYS)
    assert "Signature=" not in repr(signed())
