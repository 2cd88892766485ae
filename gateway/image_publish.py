"""CreateMicrovmImage from a zip, and waiting until its first version is usable or failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.clock import Clock
from gateway.control import Control
from gateway.errors import GatewayError, TimedOut

HOOK_PORT = 9000

# A build takes two to six minutes (LM 12); ten times that is "something is stuck".
BUILD_TIMEOUT_S = 3600.0
POLL_INTERVAL_S = 2.0
LOCAL_POLL_INTERVAL_S = 0.2

_RUNNING = frozenset({"CREATING", "UPDATING"})
_GOOD = frozenset({"CREATED", "UPDATED"})

# Time limits are always said, because the service's defaults are one second (LM 7.1). `ready`
# covers importing everything in the template on a cold disk; `run` forks the agent.
HOOKS: dict[str, Any] = {
    "port": HOOK_PORT,
    "microvmImageHooks": {
        "ready": "ENABLED",
        "readyTimeoutInSeconds": 300,
        "validate": "ENABLED",
        "validateTimeoutInSeconds": 120,
    },
    "microvmHooks": {
        "run": "ENABLED",
        "runTimeoutInSeconds": 30,
        "resume": "ENABLED",
        "resumeTimeoutInSeconds": 30,
        "suspend": "ENABLED",
        "suspendTimeoutInSeconds": 60,
        "terminate": "ENABLED",
        "terminateTimeoutInSeconds": 10,
    },
}


class ImageBuildFailed(GatewayError):  # noqa: N818  # as the tree in gateway/errors.py
    """The service could not make the image; `reason` is what its builds say."""

    def __init__(self, image: str, reason: str) -> None:
        super().__init__(
            f"Image {image} was not built: {reason or 'no reason given'}. The reasons can stay "
            "empty when the build role may not write logs."
        )
        self.image = image
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """What an image is made from (LM 9.1)."""

    name: str
    artifact_uri: str
    base_image_arn: str
    build_role_arn: str
    memory_mib: int = 2048
    architecture: str = "ARM_64"
    description: str = "Guest of microvm-kernel-gateway"

    def parameters(self) -> dict[str, Any]:
        """Of CreateMicrovmImage."""
        return {
            "name": self.name,
            "codeArtifact": {"uri": self.artifact_uri},
            "baseImageArn": self.base_image_arn,
            "buildRoleArn": self.build_role_arn,
            "description": self.description,
            "resources": [{"minimumMemoryInMiB": self.memory_mib}],
            "cpuConfigurations": [{"architecture": self.architecture}],
            "hooks": HOOKS,
        }


def managed_base_image(region: str) -> str:
    """ARN of the only managed image (LM 9.1)."""
    return f"arn:aws:lambda:{region}:aws:microvm-image:al2023-1"


async def create_image(
    control: Control,
    request: ImageRequest,
    clock: Clock,
    on_progress: Callable[[str, float], None],
    *,
    poll_interval_s: float = POLL_INTERVAL_S,
) -> str:
    """Create the image and return its ARN once a version is active.

    `on_progress(state, seconds)` is called at every look. Raises ImageBuildFailed, TimedOut,
    or what the service answered.
    """
    begun_s = clock.monotonic_s()
    made = await control.create_image(**request.parameters())
    image = made
    while image.state in _RUNNING:
        waited_s = clock.monotonic_s() - begun_s
        if waited_s > BUILD_TIMEOUT_S:
            raise TimedOut(f"the build of {request.name}", BUILD_TIMEOUT_S)
        on_progress(image.state, waited_s)
        await clock.sleep_s(poll_interval_s)
        image = await control.get_image(made.image_arn)
    on_progress(image.state, clock.monotonic_s() - begun_s)
    if image.state not in _GOOD:
        raise ImageBuildFailed(request.name, await _failure_reason(control, made.image_arn))
    return made.image_arn


async def _failure_reason(control: Control, image_arn: str) -> str:
    """The builds' `stateReason`: the only place where the service says why (LM 9.2)."""
    versions = await control.call("list_microvm_image_versions", imageIdentifier=image_arn)
    reasons: list[str] = []
    for version in versions.get("items", []):
        builds = await control.call(
            "list_microvm_image_builds",
            imageIdentifier=image_arn,
            imageVersion=version["imageVersion"],
        )
        reasons += [build.get("stateReason") or "" for build in builds.get("items", [])]
        reasons.append(version.get("stateReason") or "")
    return "; ".join(dict.fromkeys(filter(None, reasons)))
