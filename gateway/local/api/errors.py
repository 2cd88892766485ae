"""Errors as the service words them: a code of its model, and recorded texts (LM 3.3)."""

from __future__ import annotations

import math
from typing import Any

from gateway.local.behaviours import implements


class ApiError(Exception):
    """Answered as the error shape `code`; members that are not given are null."""

    def __init__(self, code: str, message: str | None, **members: Any) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.members = members


class UnreadableRequestError(Exception):
    """The request cannot be parsed: 400 with `{"message": null}` (LM 2)."""


class HtmlGatewayError(Exception):
    """A fault in front of the service: an HTML 502 page (LM 2)."""


def validation(message: str) -> ApiError:
    return ApiError("ValidationException", message)


def conflict(message: str) -> ApiError:
    return ApiError("ConflictException", message)


def access_denied(message: str | None = None) -> ApiError:
    return ApiError("AccessDeniedException", message)


@implements("text-microvm-not-found")
def microvm_not_found(microvm_id: str) -> ApiError:
    return ApiError("ResourceNotFoundException", f"MicroVM not found: {microvm_id}")


@implements("text-image-not-found")
def image_not_found(identifier: str) -> ApiError:
    return ApiError("ResourceNotFoundException", f"MicroVM image not found: {identifier}")


@implements("text-version-not-found")
def version_not_found(arn: str, version: str) -> ApiError:
    return ApiError(
        "ResourceNotFoundException", f"MicroVM image version not found: {arn} version {version}"
    )


@implements("text-no-active-version")
def no_active_version(arn: str, version: str | None) -> ApiError:
    pinned = f" and version {version}" if version else ""
    return ApiError(
        "ResourceNotFoundException", f"No active version found for MicroVM image {arn}{pinned}"
    )


@implements("text-terminated-400")
def already_terminated(microvm_id: str) -> ApiError:
    return validation(
        f"The MicroVM {microvm_id} has been terminated and its state cannot be changed."
    )


@implements("text-quota-402")
def memory_quota() -> ApiError:
    return ApiError(
        "ServiceQuotaExceededException",
        "The base maximum allocated memory limit has been reached for this account.",
    )


@implements("text-client-token-clash")
def client_token_clash() -> ApiError:
    return validation("The provided clientToken was used with different request parameters")


@implements("throttling-429-retry-after")
def throttled(wait_s: float) -> ApiError:
    return ApiError(
        "ThrottlingException", "Rate exceeded", retryAfterSeconds=max(1, math.ceil(wait_s))
    )
