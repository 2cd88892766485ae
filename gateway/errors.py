"""Everything that can go wrong on the gateway's side, as one tree.

    GatewayError                     3   never raised itself
    ├── Misuse                       2   the request cannot be served as asked
    │   ├── UsageError               2   an argument or a file is wrong
    │   ├── ConfigError              2   a configuration value is wrong
    │   ├── ProfileError             2   no profile of that name
    │   ├── ForbiddenError           2   the profile is not for this user
    │   └── WrongPhase               2   not possible in the session's present phase
    ├── RemoteFault                  3   the other end answered, and badly
    │   ├── ServiceFault             3   5xx or an answer that is not the service's
    │   ├── RequestRefused           3   ValidationException and its kin
    │   ├── LinkRefused              3   the guest refused the handshake
    │   ├── GuestFault               3   the guest broke the protocol
    │   └── CallFailed               3   the guest answered a call with an error
    ├── Throttled                    3   429; ``retry_after_s`` says when to come back
    ├── QuotaFull                    3   402; an account limit, not ours
    ├── CapacityShort                3   the service has no room now
    ├── AccessDenied                 3   403 from the control plane
    ├── CredentialsTrouble           3   none, expired or not accepted
    ├── Unreachable                  3   nobody answered at all
    ├── LaunchFailed                 3   a machine was asked for and did not come up
    ├── Gone                         3   it existed and is no more
    │   ├── MachineGone              3
    │   ├── KernelGone               3
    │   └── ImageNotFound            3
    ├── TimedOut                     3   a bounded wait of ours ended
    ├── TeardownPending              3   termination asked for, not confirmed
    ├── OutcomeUnknown               3   it may have happened
    ├── NotExecuted                  3   it certainly did not happen
    └── LocalServiceTrouble          3   the local service cannot be started or used

The number is ``exit_code``: 2 for misuse, 3 for trouble with a machine or a
service. Errors hold facts as attributes; ``sentence`` is composed from them:
one clear sentence, with what to do. Nothing secret may be stored in a fact.

Boundaries (botocore, websockets, httpx, the link protocol) convert once, with
``raise … from …``; the layers above see only this tree.
"""

# ruff: noqa: N818 -- names say what happened; an "Error" suffix on each would say nothing more

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AccessDenied",
    "CallFailed",
    "CapacityShort",
    "ConfigError",
    "CredentialsTrouble",
    "ForbiddenError",
    "GatewayError",
    "Gone",
    "GuestFault",
    "ImageNotFound",
    "KernelGone",
    "LaunchFailed",
    "LinkRefused",
    "LocalServiceTrouble",
    "MachineGone",
    "Misuse",
    "NotExecuted",
    "OutcomeUnknown",
    "ProfileError",
    "QuotaFull",
    "RemoteFault",
    "RequestRefused",
    "ServiceFault",
    "TeardownPending",
    "Throttled",
    "TimedOut",
    "Unreachable",
    "UsageError",
    "WrongPhase",
]


class GatewayError(Exception):
    """Base of the tree. ``sentence`` is for people, the attributes are for code."""

    exit_code: ClassVar[int] = 3

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence

    def __str__(self) -> str:
        return self.sentence


# -- misuse -------------------------------------------------------------------


class Misuse(GatewayError):
    """The caller asked for something that cannot be done as asked."""

    exit_code: ClassVar[int] = 2


class UsageError(Misuse):
    """A wrong argument, or a file that is missing or malformed."""


class ConfigError(Misuse):
    """A configuration value is wrong. ``where`` names the trait, file or variable."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"Configuration {where}: {problem}")
        self.where = where
        self.problem = problem


class ProfileError(Misuse):
    """No profile has that name. ``known`` lists those that exist."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        names = ", ".join(sorted(known)) or "none"
        super().__init__(f"There is no profile named {name!r}; available: {names}.")
        self.name = name
        self.known = known


class ForbiddenError(Misuse):
    """The profile exists, but not for this user."""

    def __init__(self, user: str, profile: str) -> None:
        super().__init__(
            f"User {user!r} may not use profile {profile!r}; "
            "ask whoever maintains jupyter_microvm_config.py."
        )
        self.user = user
        self.profile = profile


class WrongPhase(Misuse):
    """The session's phase does not allow this, for example suspending a stopped kernel."""

    def __init__(self, what: str, phase: str) -> None:
        super().__init__(f"Cannot {what} while the kernel is {phase}.")
        self.what = what
        self.phase = phase


# -- the other end answered, and badly ----------------------------------------


class RemoteFault(GatewayError):
    """The service or the guest answered with something that is its fault."""


class ServiceFault(RemoteFault):
    """A 5xx, or an answer that the service's model does not know (an HTML page, say)."""

    def __init__(self, operation: str, status: int | None, message: str) -> None:
        shown = f"HTTP {status}" if status else "an unreadable answer"
        super().__init__(
            f"{operation} failed on the service's side ({shown}: {message or 'no text'}); "
            "try again in a moment."
        )
        self.operation = operation
        self.status = status
        self.message = message


class RequestRefused(RemoteFault):
    """The service refused the parameters (400), or the present state forbids it (409)."""

    def __init__(self, operation: str, code: str, message: str) -> None:
        super().__init__(f"{operation} was refused ({code}): {message or 'no reason given'}")
        self.operation = operation
        self.code = code
        self.message = message


class LinkRefused(RemoteFault):
    """The guest refused the handshake. ``code`` is one of the link's refusal codes."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"The machine refused the connection ({code}): {text}")
        self.code = code
        self.text = text


class GuestFault(RemoteFault):
    """The guest sent something that its protocol does not allow."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"The machine broke the link's protocol: {problem}")
        self.problem = problem


class CallFailed(RemoteFault):
    """A call over the link was answered with an error."""

    def __init__(self, op: str, code: str, message: str) -> None:
        super().__init__(f"The machine could not do {op} ({code}): {message}")
        self.op = op
        self.code = code
        self.message = message


# -- limits, rights, reachability ---------------------------------------------


class Throttled(GatewayError):
    """Too many calls for the account's rates, after our own retries."""

    def __init__(self, operation: str, retry_after_s: float | None = None) -> None:
        when = f"in {retry_after_s:g} s" if retry_after_s else "in a moment"
        super().__init__(f"{operation} is throttled by the service; try again {when}.")
        self.operation = operation
        self.retry_after_s = retry_after_s


class QuotaFull(GatewayError):
    """An account quota is used up. The service often does not say which (LM 3.3)."""

    def __init__(self, operation: str, message: str, quota_code: str | None = None) -> None:
        code = f" (quota {quota_code})" if quota_code else ""
        super().__init__(
            f"The account's quota is full{code}: {message or operation} "
            "Terminate a machine (suspended ones count too) or raise the quota."
        )
        self.operation = operation
        self.message = message
        self.quota_code = quota_code


class CapacityShort(GatewayError):
    """The service has no capacity for this size at the moment."""

    def __init__(self, operation: str, message: str) -> None:
        super().__init__(
            f"The service has no capacity now: {message or operation} "
            "Try again later, or use a smaller image."
        )
        self.operation = operation
        self.message = message


class AccessDenied(GatewayError):
    """403 from the control plane. Without a message it is often the region or the ARN."""

    def __init__(self, operation: str, message: str | None, region: str) -> None:
        hint = message or (
            f"no reason given; check that the region {region!r} has Lambda MicroVMs "
            "and that the image ARN is of this account and uses ':microvm-image:'"
        )
        super().__init__(f"{operation} was denied: {hint}")
        self.operation = operation
        self.message = message
        self.region = region


class CredentialsTrouble(GatewayError):
    """There are no AWS credentials, or they are expired or not accepted."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"AWS credentials: {problem}. Sign in again (for example `aws sso login`) "
            "or set AWS_PROFILE."
        )
        self.problem = problem


class Unreachable(GatewayError):
    """Nobody answered: no route, no name, refused connection, or a timeout."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"Cannot reach {what}: {problem}")
        self.what = what
        self.problem = problem


class LaunchFailed(GatewayError):
    """A machine was accepted by the service and never became usable."""

    def __init__(self, microvm_id: str, reason: str) -> None:
        super().__init__(f"Machine {microvm_id} did not start: {reason or 'no reason given'}")
        self.microvm_id = microvm_id
        self.reason = reason


# -- gone ---------------------------------------------------------------------


class Gone(GatewayError):
    """Something that existed is no more, and the service said so."""


class MachineGone(Gone):
    """The machine is terminated or unknown to the service: positive evidence of loss."""

    def __init__(self, microvm_id: str, reason: str) -> None:
        super().__init__(f"Machine {microvm_id} is gone: {reason or 'no reason given'}")
        self.microvm_id = microvm_id
        self.reason = reason


class KernelGone(Gone):
    """The kernel process ended; its machine may still be there."""

    def __init__(self, exit_status: int) -> None:
        super().__init__(f"The kernel process ended with status {exit_status}.")
        self.exit_status = exit_status


class ImageNotFound(Gone):
    """No such image, or no active version of it."""

    def __init__(self, image: str, message: str) -> None:
        super().__init__(
            f"Image {image} cannot be used: {message or 'not found'}; "
            "build it with `jupyter microvm image build` or correct image_arn."
        )
        self.image = image
        self.message = message


# -- time and doubt -----------------------------------------------------------


class TimedOut(GatewayError):
    """A wait of ours reached its bound."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"Gave up waiting for {what} after {seconds:g} s.")
        self.what = what
        self.seconds = seconds


class TeardownPending(GatewayError):
    """TerminateMicrovm was sent and the service has not confirmed the end."""

    def __init__(self, microvm_id: str, reason: str) -> None:
        super().__init__(
            f"Machine {microvm_id} was asked to terminate but this is not confirmed "
            f"({reason}); it may still cost money. Try again."
        )
        self.microvm_id = microvm_id
        self.reason = reason


class OutcomeUnknown(GatewayError):
    """A request was sent and its machine is gone: it may have run. Never re-run by us."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what} may have run: {reason}")
        self.what = what
        self.reason = reason


class NotExecuted(GatewayError):
    """A request never left the gateway: it certainly did not run."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what} was not executed: {reason}")
        self.what = what
        self.reason = reason


class LocalServiceTrouble(GatewayError):
    """The local service cannot be started, or its state folder cannot be used."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"Local service: {problem}")
        self.problem = problem
