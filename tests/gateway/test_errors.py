"""The error tree: drawn as it is, with a sentence and an exit code for each."""

from __future__ import annotations

import inspect
import re

import pytest

from gateway import errors
from gateway.errors import GatewayError, Misuse

MADE = [
    errors.UsageError("No such notebook: a.ipynb"),
    errors.ConfigError("region", "is empty"),
    errors.ProfileError("big", ("default", "small")),
    errors.ForbiddenError("eve", "big"),
    errors.WrongPhase("suspend", "stopped"),
    errors.ServiceFault("RunMicrovm", 502, ""),
    errors.ServiceFault("RunMicrovm", None, "html"),
    errors.RequestRefused("RunMicrovm", "ValidationException", ""),
    errors.LinkRefused("stale_epoch", "newer"),
    errors.GuestFault("text frame"),
    errors.CallFailed("start", "unknown_kernel", "no R here"),
    errors.Throttled("RunMicrovm", 2.5),
    errors.Throttled("RunMicrovm"),
    errors.QuotaFull("RunMicrovm", "limit reached.", "L-1"),
    errors.CapacityShort("RunMicrovm", ""),
    errors.AccessDenied("RunMicrovm", None, "mars-1"),
    errors.CredentialsTrouble("expired"),
    errors.Unreachable("the service", "refused"),
    errors.LaunchFailed("microvm-1", ""),
    errors.MachineGone("microvm-1", "Success."),
    errors.KernelGone(-9),
    errors.ImageNotFound("arn", ""),
    errors.TimedOut("a launch", 60),
    errors.TeardownPending("microvm-1", "silent"),
    errors.OutcomeUnknown("The cell", "machine gone"),
    errors.NotExecuted("The cell", "machine gone"),
    errors.LocalServiceTrouble("no room"),
]


def tree() -> dict[str, type[GatewayError]]:
    return {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, GatewayError)
    }


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn: dict[str, tuple[int, int]] = {}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ([│ ├└─]*)(\w+) +(\d) ", line + " "):
            drawn[match[2]] = (len(match[1]) // 4, int(match[3]))
    assert drawn == {
        name: (len(kind.__mro__) - len(GatewayError.__mro__), kind.exit_code)
        for name, kind in tree().items()
    }


def test_every_error_is_exported_and_made_here() -> None:
    assert sorted(tree()) == sorted(errors.__all__)
    groups = {"GatewayError", "Misuse", "RemoteFault", "Gone"}
    assert {type(error).__name__ for error in MADE} == set(tree()) - groups


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_a_sentence_for_people_and_a_code_for_shells(error: GatewayError) -> None:
    assert str(error) == error.sentence
    assert "None" not in error.sentence
    assert error.sentence[0].isupper()
    assert error.exit_code == (2 if isinstance(error, Misuse) else 3)


def test_a_wrong_profile_names_those_that_exist() -> None:
    assert "available: default, small" in errors.ProfileError("big", ("small", "default")).sentence
