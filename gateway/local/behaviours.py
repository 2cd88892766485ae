"""Every behaviour of the local service, and how well it is known.

`recorded`: somebody ran it against the real service and the answer is written
down.  `documented`: AWS says so (docs or the service model).  `guessed`: nobody
knows; we chose, and where it matters there is a switch in settings.py.

The code that makes a behaviour true bears `@implements("its-id")` (or calls
`implements` on a constant's owner); a test keeps this list and the code equal.
Sections are those of the Lambda MicroVMs fact sheet (see the docs' facts page).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


class Evidence(enum.Enum):
    RECORDED = "recorded"
    DOCUMENTED = "documented"
    GUESSED = "guessed"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One thing that the local service does as the real one does, or might."""

    id: str
    evidence: Evidence
    section: str
    text: str


def implements(*behaviour_ids: str) -> Callable[[_T], _T]:
    """Mark a function or class as the place where these behaviours are made true.

    Costs nothing at run time; the test reads the marks from the source.
    """
    del behaviour_ids
    return lambda target: target


def _recorded(id: str, section: str, text: str) -> Behaviour:
    return Behaviour(id, Evidence.RECORDED, section, text)


def _documented(id: str, section: str, text: str) -> Behaviour:
    return Behaviour(id, Evidence.DOCUMENTED, section, text)


def _guessed(id: str, section: str, text: str) -> Behaviour:
    return Behaviour(id, Evidence.GUESSED, section, text)


# fmt: off
BEHAVIOURS: tuple[Behaviour, ...] = (
    # -- requests, answers, errors
    _recorded("unparsable-400-null-message", "2",
        "What cannot be parsed or routed is answered 400 with a null message."),
    _recorded("validation-first", "3.3", "Constraints of the model are checked before all else."),
    _recorded("validation-texts", "3.3", "The wording of constraint violations, one or several."),
    _recorded("body-null-members", "2", "Unset members are spelled out as null."),
    _documented("body-epoch-numbers", "2", "Timestamps are epoch seconds as JSON numbers."),
    _recorded("extra-members", "2",
        "Answers carry members that the model does not have (their values here are null)."),
    _recorded("error-type-header", "2", "The error's type is in the header x-amzn-ErrorType."),
    _guessed("throttling-429-retry-after", "11",
        "Above a rate: 429 with Retry-After in whole seconds and the text 'Rate exceeded'."),
    _documented("rates", "11",
        "Rate equals burst, per operation; unlisted operations share a guessed rate "
        "(switch throttle)."),
    _recorded("page-tokens-opaque", "2", "Page tokens: about 700 characters of base64 with '='."),
    _documented("signature-checked", "2",
        "Signature Version 4 with the common error types of AWS services."),
    _documented("signature-expired", "2", "A signature is good for five minutes either way."),
    _recorded("region-without-service", "2",
        "A region without the service: AccessDeniedException with a null message."),
    _guessed("host-checked", "2",
        "A Host that is not the listener's is refused with 403 (against DNS rebinding)."),
    _recorded("fault-html-502", "2", "A gateway in front may answer an HTML 502 page."),
    _guessed("fault-throttled", "11", "A throttled call, on demand."),
    _documented("fault-credentials-expired", "2", "Expired credentials: ExpiredTokenException."),
    # -- running and reading machines
    _recorded("run-answers-pending", "3.1", "RunMicrovm answers PENDING at once."),
    _recorded("run-defaults", "3.1", "28800 s, HTTP_INGRESS, INTERNET_EGRESS, no idle policy."),
    _recorded("run-bare-name", "2",
        "A bare image name: Malformed ARN - doesn't start with 'arn:'."),
    _recorded("text-no-active-version", "3.3", "The 404 for an image that cannot be run."),
    _recorded("text-microvm-not-found", "3.3", "The 404 for an unknown machine."),
    _recorded("text-terminated-400", "3.3", "State changes of a TERMINATED machine are 400."),
    _recorded("text-quota-402", "3.3", "The 402 names no quota; every other member is null."),
    _recorded("quota-402", "11", "Used-up memory refuses the launch with 402."),
    _recorded("quota-peak-strict-exceed", "11",
        "A machine counts as four times its baseline, suspended too; only a total above the "
        "quota refuses the next launch (sources disagree)."),
    _documented("capacity-500", "2.1", "InsufficientCapacityException is a 500."),
    _recorded("client-token-permanent", "3.5", "A replayed clientToken gives the first answer."),
    _recorded("text-client-token-clash", "3.3",
        "A clientToken with other parameters: ValidationException (sources disagree)."),
    _documented("idle-limits-documented-maximum", "2.2",
        "maxIdleDurationSeconds is at most 28800."),
    _recorded("microvm-id-opaque", "3.2",
        "microvm- and a UUID; the endpoint does not follow from it."),
    _recorded("get-shape-as-run", "3.1", "GetMicrovm has RunMicrovm's shape, without the payload."),
    _documented("list-item-members", "3.2", "A listing has no endpoint."),
    _guessed("list-newest-first", "3.4", "The order of the listing."),
    _recorded("terminated-listed-a-day", "3.4", "Ended machines stay listed (switch)."),
    _documented("state-eventually-consistent", "3.4",
        "States may be read late (switch state_lag_s)."),
    _recorded("suspend-answers-empty", "13.1", "Suspend, resume and terminate answer {}."),
    _recorded("terminate-idempotent-200", "3.3", "Terminating a TERMINATED machine is 200."),
    _guessed("conflict-409-wrong-state", "6",
        "Suspend unless RUNNING, resume unless SUSPENDED: ConflictException."),
    # -- the life of a machine
    _recorded("pending-until-run-hook-200", "6", "RUNNING only after /run has answered 200."),
    _recorded("run-hook-failure-terminates", "7.2", "A failing /run ends the machine."),
    _recorded("run-hook-failure-text", "6",
        "stateReason after a failing /run (time-out: guessed)."),
    _guessed("launch-failure-reason", "6", "stateReason when the engine cannot start a machine."),
    _recorded("end-reasons", "6", "stateReason 'Success.' and that of the maximum lifetime."),
    _guessed("end-reasons-unrecorded", "13.4",
        "stateReason for the suspended window and for the end of the main process."),
    _recorded("idle-by-inbound", "6.1", "Only inbound traffic counts against the idle limit."),
    _documented("maximum-duration-counts-sleep", "6.2", "8 h at most, sleep included."),
    _documented("suspended-window-zero-terminates", "6.1",
        "An idle machine with suspendedDurationSeconds 0 is terminated, not suspended."),
    _recorded("suspended-window-idle-only", "6.1",
        "The suspended window ends machines that the idle policy suspended, not explicitly "
        "suspended ones (docs differ; switch window_after_explicit_suspend)."),
    _guessed("suspend-cuts-connections", "5.2", "Open sockets are cut at the freeze (switch)."),
    _documented("suspend-hook-failure-keeps-running", "7.2",
        "A machine whose /suspend fails is not suspended."),
    _documented("resume-hook-before-traffic", "7.2",
        "SUSPENDED is shown until /resume answers 200."),
    _guessed("resume-failure-stays-suspended", "7.2",
        "A failing /resume leaves the machine SUSPENDED, frozen again."),
    _documented("terminate-hook-best-effort", "7.2",
        "/terminate is called where the guest can run; its answer does not matter."),
    # -- hooks
    _documented("hook-post-path", "7.2", "POST on localhost below the runtime's fixed path."),
    _documented("hook-body-run-only", "7.2", "Only /run has a body."),
    _documented("hook-503-retried", "7.2", "503 of ready and validate means: ask again."),
    _recorded("run-hook-body", "7.2", "microvmId and runHookPayload, which is a string."),
    _guessed("run-hook-payload-null", "7.2", "Without a payload, runHookPayload is null."),
    _documented("hooks-only-if-enabled", "7.1", "A hook that is not ENABLED is not called."),
    _recorded("hook-default-limits", "7.1", "1 s for runtime hooks and validate, 60 s for ready."),
    _documented("ready-and-validate-at-build", "7.2",
        "ready and validate are called by the build."),
    _recorded("build-hook-failure-text", "9.2", "The build's stateReason after a hook's time-out."),
    # -- tokens
    _recorded("token-answer-map", "4.5", "The answer maps the header's name to the token."),
    _recorded("token-jwe-shape", "4.5", "A compact JWE of about 800 characters, dir and A256GCM."),
    _recorded("token-while-suspended", "3.3", "Tokens are minted while SUSPENDED."),
    _documented("token-minutes-maximum", "2.2", "expirationInMinutes is at most 60."),
    _recorded("token-refusals", "4.3",
        "403 with two texts: not a JWE at all, or not for this machine."),
    _recorded("token-expiry-at-request-start", "4.4", "Expiry is checked when a request begins."),
    _recorded("shell-token-needs-connector", "3.3", "The 400 without SHELL_INGRESS."),
    _recorded("shell-token-all-ingress", "3.3", "The 400 for SHELL_INGRESS with ALL_INGRESS."),
    # -- the data plane
    _guessed("check-order", "4.3", "Host, token, port, caps, machine: in this order."),
    _recorded("foreign-host-403", "4.1", "A foreign Host: Token authentication failed."),
    _documented("token-from-header-or-subprotocol", "5.1", "Both ways to authenticate."),
    _documented("port-header-subprotocol-8080", "4.2", "Where the port comes from."),
    _documented("malformed-port-400", "4.3", "A malformed port is a 400."),
    _recorded("platform-headers-stripped", "4.2", "The guest never sees x-aws-proxy-*."),
    _recorded("subprotocols-stripped", "5.1", "The guest never sees the platform's subprotocols."),
    _recorded("marker-answered-for-guest", "5.1",
        "lambda-microvms is selected for a silent guest."),
    _recorded("requestid-header", "4.2", "x-amzn-requestid is in every answer (weakly recorded)."),
    _recorded("refusal-headers", "4.2", "Refusals are private, no-store, in plain text."),
    _guessed("smuggling-refused", "4.3", "Ambiguous message lengths are refused with 400."),
    _documented("connection-cap-429", "4.4", "Connections above the size's cap (switch)."),
    _documented("request-cap-429", "4.4", "Requests a second above the size's cap (switch)."),
    _documented("bandwidth-as-latency", "4.4", "Bandwidth caps show as latency (switch)."),
    _recorded("quiet-socket-cut-60s", "5.2",
        "A WebSocket quiet for 60 s is cut without a close frame."),
    _recorded("nothing-listening-502", "4.3", "Nothing listens on the port: 502."),
    _documented("pending-request-held-or-502", "4.3",
        "Before RUNNING: 502, or held until RUNNING (switch pending)."),
    _recorded("held-while-resuming", "4.3",
        "A request to a SUSPENDED machine is held and wakes it."),
    _recorded("suspended-without-autoresume-502", "4.3",
        "SUSPENDED without auto-resume: empty 502."),
    _recorded("terminated-502", "4.3", "TERMINATED: empty 502."),
    _guessed("terminated-endpoint-lingers", "4.3",
        "The endpoint of an ended machine answers for half a minute, then its port is closed."),
    _guessed("request-while-suspending-waits", "4.3",
        "A request during SUSPENDING waits for the freeze, then wakes the machine."),
    _guessed("client-gone-abandons-held-request", "4.3", "A held request ends with its client."),
    _guessed("no-ingress-502", "10.2", "A machine with NO_INGRESS only answers 502."),
    # -- images
    _recorded("image-arn-forms", "2", "Image routes want ARNs: Invalid ARN format."),
    _recorded("foreign-arn-403", "2", "An ARN of another form or account: 403, null message."),
    _guessed("text-image-not-found", "3.3", "The text of the 404 for an unknown image."),
    _guessed("text-version-not-found", "3.3", "The text of the 404 for an unknown version."),
    _recorded("image-create-201", "9.2", "CREATING at once, version 1.0."),
    _recorded("image-name-taken", "9.2", "The 400 for a name that exists."),
    _documented("image-quota", "11", "100 images, 50 versions each; the texts are guessed."),
    _documented("image-update-replaces", "9.2", "An update replaces the whole definition."),
    _recorded("image-update-new-version", "9.2", "An update mints the next version."),
    _recorded("image-busy-409", "9.2", "MicroVM Image is already in state: UPDATING."),
    _recorded("inactive-blocks-runs", "9.2", "INACTIVE blocks new runs only."),
    _recorded("image-delete-drains", "9.2", "DELETING; the name is reserved until drained."),
    _recorded("image-delete-refusals", "9.2", "The 400s during builds and with running machines."),
    _documented("version-delete-asynchronous", "9.2", "A version's deletion takes its time."),
    _recorded("version-delete-last", "9.2", "The last version cannot be deleted (text guessed)."),
    _recorded("image-name-filter-after-paging", "3.4", "nameFilter acts on a page."),
    _recorded("two-builds-per-version", "9.2", "One build per chipset generation."),
    _documented("build-filters", "2.1", "Builds are filtered by architecture and chipset."),
    _recorded("build-failure-reason-in-builds", "9.2",
        "Why a version failed is in its builds only."),
    _recorded("build-failed-text", "9.2",
        "The container image build failed; what follows is ours."),
    _guessed("build-progress-in-state-reason", "9.2",
        "A running build's stateReason says what it does."),
    _recorded("base-image-checked", "9.1", "The 400 for a base image that does not exist."),
    _recorded("one-managed-image", "9.1", "al2023-1, versions 1 and 0."),
    _recorded("memory-sizes", "9.1", "512 to 8192 MiB in five steps (text guessed)."),
    _recorded("hooks-need-ready-and-port", "7.1",
        "A runtime hook needs ready, any hook needs a port (texts guessed)."),
    _documented("zip-needs-dockerfile", "9.1", "The zip has a Dockerfile at its root."),
    _documented("artifact-s3-codes", "9.2", "S3_* codes for an artifact that cannot be read."),
    _guessed("artifact-environment-prefix", "9.1",
        "Ours alone: file:///prefix is a Python environment of this computer."),
    _guessed("artifact-zip-environment", "9.1",
        "Ours alone: a zip becomes a virtual environment, its Dockerfile is not run."),
    _guessed("environment-active-when-template-ready", "9.2",
        "Ours alone: an image is ACTIVE as soon as its template runs."),
    _guessed("failed-environment-image-replaced", "13.3",
        "Ours alone: the image of an environment that failed can be created again."),
    _guessed("environment-images-evicted", "11",
        "Ours alone: the oldest unused environment image gives way to a new one."),
    _guessed("tags-on-images-only", "3.2", "Only images can be tagged; the 404 text is guessed."),
)
