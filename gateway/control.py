"""The service client: Lambda MicroVMs through botocore, as the gateway needs it.

Every method is a coroutine for the bridge's loop; the blocking call runs on
one of the bridge's workers. Errors leave as the tree of ``errors.py``. The
same code talks to AWS and to the local service: only the endpoint differs.

Which client. ``boto3.client`` is one call of ``botocore``'s ``create_client``
behind an import that also loads boto3's resources and s3transfer. We make that
call ourselves, because a kernel's first start waits for it: in a fresh process
273 ms become about 130 (2026-11-30, Python 3.11). See ``_SlimLoader`` for the
other half of the saving.

Retries. botocore's ``standard`` mode does them, with jitter and ``Retry-After``,
for 409, 429, 500 and 503 (LM 2). A launch keeps its ``clientToken`` through
those retries and gets a fresh one in every call of :meth:`Control.run_microvm`:
tokens are remembered by the service for ever and a stale one returns a stale
machine (LM 3.5).

Rates. ``Shaper`` keeps our own calls below the account's documented rates
(LM 11), so that a burst of starts waits here in order rather than in random
back-off there.
"""

from __future__ import annotations

import gc
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from gateway import first_calls
from gateway.bridge import Bridge, bridge
from gateway.clock import Clock
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
from gateway.events import scrub
from gateway.profiles import IdlePolicy, ServiceAccess
from gateway.service_client import client_for
from gateway.tokens import Token

if TYPE_CHECKING:
    from botocore.client import BaseClient

__all__ = [
    "TERMINAL_STATES",
    "Control",
    "ImageInfo",
    "LaunchRequest",
    "MachineInfo",
    "Shaper",
    "base_url",
    "managed_base_image",
    "managed_connector",
    "map_error",
    "prewarm",
    "settle",
]

TERMINAL_STATES = frozenset({"TERMINATING", "TERMINATED"})

# Calls per second and burst, per account (LM 11). What is not listed is not shaped.
RATES: Mapping[str, float] = {
    "run_microvm": 5,
    "resume_microvm": 5,
    "suspend_microvm": 2,
    "terminate_microvm": 10,
    "get_microvm": 100,
    "create_microvm_auth_token": 50,
}


class LaunchRequest(NamedTuple):
    """Parameters of one RunMicrovm."""

    image_arn: str
    payload: str
    idle: IdlePolicy = IdlePolicy()
    maximum_duration_s: int = 28_800
    image_version: str | None = None
    execution_role_arn: str | None = None
    ingress_connectors: tuple[str, ...] = ()  # empty: the managed HTTP_INGRESS
    egress_connectors: tuple[str, ...] = ()  # empty: the managed INTERNET_EGRESS


class MachineInfo(NamedTuple):
    """What the service says of a machine. ``url`` is the endpoint as a base URL."""

    microvm_id: str
    state: str
    url: str | None = None
    image_arn: str | None = None
    image_version: str | None = None
    state_reason: str | None = None
    maximum_duration_s: int | None = None
    started_at_s: float | None = None

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL_STATES


class ImageInfo(NamedTuple):
    """What the service says of an image."""

    image_arn: str
    state: str
    latest_active_version: str | None = None


def base_url(endpoint: str) -> str:
    """``https://host`` from a bare host or a URL: sources disagree which it is (LM 3.2)."""
    parts = urlsplit(endpoint if "//" in endpoint else f"https://{endpoint}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise GuestFault(f"unusable endpoint {endpoint!r}")
    return f"{parts.scheme}://{parts.netloc}"


def managed_connector(region: str, name: str) -> str:
    """ARN of one of the service's own network connectors (LM 10.2)."""
    return f"arn:aws:lambda:{region}:aws:network-connector:aws-network-connector:{name}"


def managed_base_image(region: str) -> str:
    """ARN of the one managed image (LM 9.1)."""
    return f"arn:aws:lambda:{region}:aws:microvm-image:al2023-1"


class Shaper:
    """Token buckets, one per operation. Pure: tells how long to wait, waits itself never."""

    def __init__(self, rates: Mapping[str, float] = RATES) -> None:
        self._rates = rates
        self._ready_s: dict[str, float] = {}

    def reserve(self, operation: str, now_s: float) -> float:
        """Take the next slot; returns seconds until it. A full second of slots may burst."""
        rate = self._rates.get(operation)
        if rate is None:
            return 0.0
        slot_s = 1 / rate
        earliest_s = max(self._ready_s.get(operation, 0.0), now_s - 1.0 + slot_s)
        self._ready_s[operation] = earliest_s + slot_s
        return max(0.0, earliest_s - now_s)


class Control:
    """Calls of one account and region.

    ``access`` is called on a worker at the first use: finding the local
    service may start it.
    """

    def __init__(
        self,
        access: Callable[[], ServiceAccess],
        clock: Clock,
        *,
        home: Bridge | None = None,
        shaper: Shaper | None = None,
    ) -> None:
        self._find_access = access
        self._clock = clock
        self._home = home
        self._shaper = shaper or Shaper()
        self._access: ServiceAccess | None = None
        self._client: BaseClient | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Control {self._access}>"

    @property
    def region(self) -> str:
        return self._access.region if self._access else ""

    # -- machines --------------------------------------------------------------

    async def run_microvm(self, request: LaunchRequest) -> MachineInfo:
        """Launch. Raises ImageNotFound, QuotaFull, CapacityShort, OutcomeUnknown, …"""
        await self.prepare()
        answer = await self.call("run_microvm", **self._run_parameters(request))
        return _machine(answer)

    def _run_parameters(self, request: LaunchRequest) -> dict[str, Any]:
        idle = request.idle
        parameters: dict[str, Any] = {
            "imageIdentifier": request.image_arn,
            "runHookPayload": request.payload,
            "maximumDurationInSeconds": request.maximum_duration_s,
            "idlePolicy": {
                "maxIdleDurationSeconds": idle.max_idle_s,
                "suspendedDurationSeconds": idle.suspended_s,
                "autoResumeEnabled": idle.auto_resume,
            },
            # Said, never left to defaults: the default of both is the public internet.
            "ingressNetworkConnectors": list(request.ingress_connectors)
            or [managed_connector(self.region, "HTTP_INGRESS")],
            "egressNetworkConnectors": list(request.egress_connectors)
            or [managed_connector(self.region, "INTERNET_EGRESS")],
            "clientToken": str(uuid.uuid4()),
        }
        if request.image_version is not None:
            parameters["imageVersion"] = request.image_version
        if request.execution_role_arn is not None:
            parameters["executionRoleArn"] = request.execution_role_arn
        return parameters

    async def get(self, microvm_id: str) -> MachineInfo:
        """Raises MachineGone when the service does not know it."""
        return _machine(await self.call("get_microvm", microvmIdentifier=microvm_id))

    async def list(self, image_arn: str | None = None) -> list[MachineInfo]:
        """Every machine, ended ones too (LM 3.4): all pages."""
        parameters: dict[str, Any] = {"maxResults": 50}
        if image_arn is not None:
            parameters["imageIdentifier"] = image_arn
        machines: list[MachineInfo] = []
        while True:
            page = await self.call("list_microvms", **parameters)
            machines += [_machine(item) for item in page.get("items", [])]
            if not page.get("nextToken"):
                return machines
            parameters["nextToken"] = page["nextToken"]

    async def suspend(self, microvm_id: str) -> None:
        await self.call("suspend_microvm", microvmIdentifier=microvm_id)

    async def resume(self, microvm_id: str) -> None:
        await self.call("resume_microvm", microvmIdentifier=microvm_id)

    async def terminate(self, microvm_id: str) -> None:
        """Ask for the end; a machine that has ended already is no error (LM 3.3)."""
        await self.call("terminate_microvm", microvmIdentifier=microvm_id)

    async def auth_token(self, microvm_id: str, port: int, minutes: int) -> Token:
        """A token for one port only."""
        asked_s = self._clock.monotonic_s()
        answer = await self.call(
            "create_microvm_auth_token",
            microvmIdentifier=microvm_id,
            expirationInMinutes=minutes,
            allowedPorts=[{"port": port}],
        )
        return Token(microvm_id, port, asked_s, minutes * 60.0, answer["authToken"])

    # -- images (what the embedded default and the commands need) ---------------

    async def create_image(self, **parameters: Any) -> ImageInfo:
        return _image(await self.call("create_microvm_image", **parameters))

    async def get_image(self, image_arn: str) -> ImageInfo:
        return _image(await self.call("get_microvm_image", imageIdentifier=image_arn))

    async def build_failure(self, image_arn: str) -> str:
        """Why the newest version did not build; the reason is only with its builds (LM 9.2)."""
        versions = await self.call("list_microvm_image_versions", imageIdentifier=image_arn)
        newest = max(
            (item.get("imageVersion", "") for item in versions.get("items", [])),
            key=_version_number,
            default="",
        )
        if not newest:
            return "no reason given"
        builds = await self.call(
            "list_microvm_image_builds", imageIdentifier=image_arn, imageVersion=newest
        )
        reasons = [item.get("stateReason") for item in builds.get("items", [])]
        return next((reason for reason in reasons if reason), "no reason given")

    # -- plumbing ----------------------------------------------------------------

    async def call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """Any operation of the service by its boto3 name; errors mapped."""
        if self._client is None and first_calls.pending():
            early = await self._work(partial(self._call_of_the_child, operation, parameters))
            if early is not None:
                return dict(early)
        client = await self.connect()
        wait_s = self._shaper.reserve(operation, self._clock.monotonic_s())
        if wait_s:
            await self._clock.sleep_s(wait_s)
        answer: dict[str, Any] = await self._work(
            partial(self._blocking_call, client, operation, parameters)
        )
        return answer

    def _blocking_call(
        self, client: BaseClient, operation: str, parameters: dict[str, Any]
    ) -> dict[str, Any]:
        subject = parameters.get("microvmIdentifier") or parameters.get("imageIdentifier") or ""
        try:
            answer: dict[str, Any] = getattr(client, operation)(**parameters)
        except Exception as error:
            raise map_error(operation, error, self.region, str(subject)) from error
        return answer

    def _call_of_the_child(self, operation: str, parameters: dict[str, Any]) -> Any:
        return first_calls.ask(self._known_access()._asdict(), operation, parameters)

    def _known_access(self) -> ServiceAccess:
        with self._lock:
            if self._access is None:
                self._access = self._find_access()
            return self._access

    async def prepare(self) -> None:
        """Return when the next call can leave at once. Raises what ``connect`` raises."""
        if self._client is None and first_calls.pending():
            await self._work(self._known_access)
        else:
            await self.connect()

    async def connect(self) -> BaseClient:
        """The client, made on a worker at the first use."""
        if self._client is None:
            return await self._work(self._connect)
        return self._client

    async def renew(self) -> None:
        """Look again where the service is: the local one ends when idle, and moves."""
        await self._work(self._renew)

    def _renew(self) -> None:
        access = self._find_access()
        if access != self._access:
            self._client, self._access = None, access
        if self._client is None and first_calls.pending():
            return
        self._connect(access)

    def _connect(self, known: ServiceAccess | None = None) -> BaseClient:
        with self._lock:
            if self._client is None:
                self._access = known or self._find_access()
                try:
                    self._client = client_for(self._access)
                except Exception as error:
                    raise map_error("client", error, self._access.region, "") from error
            return self._client

    def _work(self, call: Callable[[], Any]) -> Awaitable[Any]:
        return (self._home or bridge()).work(call)


# -- answers -------------------------------------------------------------------


def _machine(answer: Mapping[str, Any]) -> MachineInfo:
    """Tolerant: members may be absent, and a listing has fewer of them (LM 2, 3.2)."""
    endpoint = answer.get("endpoint")
    started = answer.get("startedAt")
    if "microvmId" not in answer:  # an HTML page under status 200 parses to nothing at all
        raise ServiceFault("the service", None, "its answer names no machine")
    return MachineInfo(
        microvm_id=answer["microvmId"],
        state=answer.get("state", ""),
        url=base_url(endpoint) if endpoint else None,
        image_arn=answer.get("imageArn"),
        image_version=answer.get("imageVersion"),
        state_reason=answer.get("stateReason"),
        maximum_duration_s=answer.get("maximumDurationInSeconds"),
        started_at_s=started.timestamp() if started is not None else None,
    )


def _image(answer: Mapping[str, Any]) -> ImageInfo:
    return ImageInfo(
        image_arn=answer.get("imageArn", ""),
        state=answer.get("state", ""),
        latest_active_version=answer.get("latestActiveImageVersion"),
    )


def _version_number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


# -- before the first call -----------------------------------------------------------


def prewarm(access: Callable[[], ServiceAccess | None]) -> Future[None]:
    """Make the client in the background.

    ``access`` is called on a worker and says without side effects what is known
    already, or None; then only the imports are done. A failure here is not
    reported: the first real call meets it again and reports it. The future is for tests.
    """
    return bridge().submit(partial(_prewarm, access))


def _prewarm(access: Callable[[], ServiceAccess | None]) -> None:
    if first_calls.pending() and (known := access()) is not None:
        first_calls.warm(known._asdict())
        return
    with _collector_at_rest():
        import botocore.session  # noqa: F401 -- the import is the point

        known = access()
        if known is not None:
            client_for(known)


def settle(access: Callable[[], ServiceAccess | None]) -> None:
    """The first start is over: from now on this process has a client of its own. Blocking."""
    first_calls.end()
    _prewarm(access)


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """No cycle collection during a burst of imports.

    Imports only add to the heap, and each time it has grown by a quarter the
    collector walks all of it: 30 of 150 ms here (2026-11-30, Python 3.11).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# -- errors ----------------------------------------------------------------------

_CREDENTIAL_CODES = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignature",
        "IncompleteSignatureException",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)
_CREDENTIAL_ERRORS = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "InvalidConfigError",
        "LoginRefreshRequired",
        "SSOError",
        "SSOTokenLoadError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
        "PendingAuthorizationExpiredError",
    }
)
_CONFIG_ERRORS = frozenset({"NoRegionError", "InvalidRegionError", "ProfileNotFound"})
# The request may have arrived although no answer did.
_MAYBE_SENT_ERRORS = frozenset({"ReadTimeoutError", "ConnectionClosedError"})
_UNREACHABLE_ERRORS = frozenset(
    {
        "ConnectTimeoutError",
        "EndpointConnectionError",
        "HTTPClientError",
        "ProxyConnectionError",
        "SSLError",
    }
)
_IMAGE_GONE_OPERATIONS = frozenset({"run_microvm"})


def map_error(operation: str, error: Exception, region: str, subject: str) -> GatewayError:
    """A botocore error as one of ours. ``subject`` is the machine or image it was about.

    Decided by class name: importing botocore's classes here would put the
    whole import on whoever imports this module.
    """
    if isinstance(error, GatewayError):
        return error
    names = {kind.__name__ for kind in type(error).__mro__}
    text = scrub(str(error))
    if "ClientError" in names:
        return _map_answer(operation, getattr(error, "response", {}), region, subject)
    if names & _CREDENTIAL_ERRORS:
        return CredentialsTrouble(text)
    if names & _CONFIG_ERRORS:
        return ConfigError("region or aws_profile", text)
    if names & _MAYBE_SENT_ERRORS and operation == "run_microvm":
        return OutcomeUnknown("RunMicrovm", text)
    if names & (_MAYBE_SENT_ERRORS | _UNREACHABLE_ERRORS):
        return Unreachable(f"the service in {region!r}", text)
    if "ParamValidationError" in names:
        return UsageError(f"{operation}: {text}")
    return ServiceFault(operation, None, text)


def _map_answer(
    operation: str, response: Mapping[str, Any], region: str, subject: str
) -> GatewayError:
    """By code first, then by status: codes are precise, statuses always there (LM 11)."""
    details = response.get("Error", {})
    metadata = response.get("ResponseMetadata", {})
    code, status = str(details.get("Code", "")), metadata.get("HTTPStatusCode")
    message = scrub(details.get("Message") or "")
    if code in _CREDENTIAL_CODES:
        return CredentialsTrouble(message or code)
    if code == "InsufficientCapacityException":
        return CapacityShort(operation, message)
    if status == 402 or code == "ServiceQuotaExceededException":
        return QuotaFull(operation, message, response.get("quotaCode"))
    if status == 403:
        return AccessDenied(operation, message or None, region)
    if status == 404 or _says_terminated(code, message):
        return _not_found(operation, subject, message)
    if status == 429:
        return Throttled(operation, _retry_after_s(metadata.get("HTTPHeaders", {})))
    if status in (400, 409):
        return RequestRefused(operation, code, message)
    return ServiceFault(operation, status, message)


def _says_terminated(code: str, message: str) -> bool:
    """A state change on an ended machine is answered as a 400 with this text (LM 3.3)."""
    return code == "ValidationException" and "has been terminated" in message


def _not_found(operation: str, subject: str, message: str) -> GatewayError:
    if operation in _IMAGE_GONE_OPERATIONS or "image" in operation:
        return ImageNotFound(subject, message)
    return MachineGone(subject, message)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """``Retry-After`` in seconds; a date, which HTTP also allows, is not used by the service."""
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return None
