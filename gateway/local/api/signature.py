"""Signature Version 4, checked for real.

The canonical request is rebuilt by botocore's own signer from exactly the
headers that the client says it signed, and compared in constant time.  Who
cannot read `service.json` cannot call the service; loopback alone would let in
every local user and every web page (DNS rebinding).
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest, HTTPHeaders
from botocore.credentials import Credentials

from gateway.local.behaviours import implements

_ALGORITHM = "AWS4-HMAC-SHA256"
_WINDOW_S = 300.0  # documented by AWS: five minutes either way
_TIMESTAMP = "%Y%m%dT%H%M%SZ"
_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()

_MISMATCH = (
    "The request signature we calculated does not match the signature you provided. "
    "Check your AWS Secret Access Key and signing method. "
    "Consult the service documentation for details."
)


class SignatureRefusedError(Exception):
    """The request is not signed by this service's key; answered 403."""

    def __init__(self, code: str, message: str | None) -> None:
        super().__init__(code)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The only key pair that this service accepts."""

    access_key_id: str
    secret_access_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """The parts of a request that a signature covers; header names in lower case."""

    method: str
    target: str
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Claim:
    """A parsed Authorization header."""

    access_key_id: str
    date: str
    region: str
    service: str
    signed_headers: tuple[str, ...]
    signature: str


class _ExactSigner(SigV4Auth):  # type: ignore[misc]
    """botocore's signer, over exactly the given headers instead of its own selection."""

    def headers_to_sign(self, request: Any) -> Any:
        chosen = HTTPHeaders()
        for name, value in request.headers.items():
            chosen[name.lower()] = value
        return chosen


class SignatureChecker:
    """Checks the signatures of one service."""

    def __init__(self, keys: KeyPair, *, region: str, service: str) -> None:
        self._keys = keys
        self._region = region
        self._service = service

    @implements("signature-checked")
    def check(self, request: SignedRequest, now_s: float) -> None:
        """Return if the request is signed with our key, just now.

        Raises SignatureRefusedError.
        """
        claim = _parse_authorization(request.headers.get("authorization"))
        self._check_scope(claim, request.headers)
        timestamp = request.headers.get("x-amz-date", "")
        self._check_date(claim, timestamp, now_s)
        self._check_body(request)
        expected = self._signature(claim, request, timestamp)
        if not hmac.compare_digest(expected, claim.signature):
            raise SignatureRefusedError("InvalidSignatureException", _MISMATCH)

    @implements("region-without-service")
    def _check_scope(self, claim: _Claim, headers: Mapping[str, str]) -> None:
        known = hmac.compare_digest(claim.access_key_id, self._keys.access_key_id)
        if not known or "x-amz-security-token" in headers:
            raise SignatureRefusedError(
                "UnrecognizedClientException",
                "The security token included in the request is invalid.",
            )
        if claim.service != self._service:
            raise SignatureRefusedError(
                "InvalidSignatureException",
                f"Credential should be scoped to correct service: '{self._service}'.",
            )
        if claim.region != self._region:
            raise SignatureRefusedError("AccessDeniedException", None)

    @implements("signature-expired")
    def _check_date(self, claim: _Claim, timestamp: str, now_s: float) -> None:
        try:
            signed = datetime.datetime.strptime(timestamp, _TIMESTAMP).replace(tzinfo=datetime.UTC)
        except ValueError:
            raise _incomplete("existence of either a 'X-Amz-Date' or a 'Date' header") from None
        if claim.date != timestamp[:8]:
            raise SignatureRefusedError(
                "InvalidSignatureException",
                f"Date in Credential scope does not match YYYYMMDD from ISO-8601 version of "
                f"date from HTTP: '{claim.date}' != '{timestamp[:8]}', from '{timestamp}'.",
            )
        age_s = now_s - signed.timestamp()
        if abs(age_s) > _WINDOW_S:
            raise SignatureRefusedError(
                "InvalidSignatureException", _date_text(timestamp, now_s, expired=age_s > 0)
            )

    def _check_body(self, request: SignedRequest) -> None:
        """A client that declares its body's digest has that digest signed: it must be true."""
        declared = request.headers.get("x-amz-content-sha256")
        actual = hashlib.sha256(request.body).hexdigest() if request.body else _EMPTY_SHA256
        if declared is not None and not hmac.compare_digest(declared, actual):
            raise SignatureRefusedError("InvalidSignatureException", _MISMATCH)

    def _signature(self, claim: _Claim, request: SignedRequest, timestamp: str) -> str:
        chosen = {name: request.headers.get(name, "") for name in claim.signed_headers}
        signer = _ExactSigner(
            Credentials(self._keys.access_key_id, self._keys.secret_access_key),
            claim.service,
            claim.region,
        )
        rebuilt = AWSRequest(
            method=request.method,
            url=f"http://localhost{request.target}",
            headers=chosen,
            data=request.body,
        )
        rebuilt.context["timestamp"] = timestamp
        canonical = signer.canonical_request(rebuilt)
        signature: str = signer.signature(signer.string_to_sign(rebuilt, canonical), rebuilt)
        return signature


_CLAIM = re.compile(
    r"Credential=(?P<key>[^/,\s]+)/(?P<date>\d{8})/(?P<region>[a-z0-9-]+)/(?P<service>[a-z0-9-]+)"
    r"/aws4_request,\s*SignedHeaders=(?P<headers>[A-Za-z0-9;_-]+),\s*"
    r"Signature=(?P<signature>[0-9a-f]{64})"
)


def _parse_authorization(header: str | None) -> _Claim:
    if not header:
        raise SignatureRefusedError(
            "MissingAuthenticationTokenException", "Missing Authentication Token"
        )
    algorithm, _, rest = header.partition(" ")
    found = _CLAIM.fullmatch(rest.strip())
    if algorithm != _ALGORITHM or found is None:
        raise _incomplete("'Credential', 'SignedHeaders' and 'Signature' parameters")
    names = tuple(name.lower() for name in found["headers"].split(";"))
    if not {"host", "x-amz-date"} <= set(names):
        raise SignatureRefusedError(
            "InvalidSignatureException", "'Host' and 'X-Amz-Date' must be signed headers."
        )
    return _Claim(
        found["key"], found["date"], found["region"], found["service"], names, found["signature"]
    )


def _incomplete(what: str) -> SignatureRefusedError:
    return SignatureRefusedError(
        "IncompleteSignatureException", f"Authorization header requires {what}."
    )


def _date_text(timestamp: str, now_s: float, *, expired: bool) -> str:
    now = _stamp(now_s)
    if expired:
        return (
            f"Signature expired: {timestamp} is now earlier than "
            f"{_stamp(now_s - _WINDOW_S)} ({now} - 5 min.)"
        )
    return (
        f"Signature not yet current: {timestamp} is still later than "
        f"{_stamp(now_s + _WINDOW_S)} ({now} + 5 min.)"
    )


def _stamp(instant_s: float) -> str:
    return datetime.datetime.fromtimestamp(instant_s, datetime.UTC).strftime(_TIMESTAMP)
