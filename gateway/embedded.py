"""The embedded default: no AWS account, no image, one command.

A profile without ``image_arn`` gets its machines from the local service on
this computer, started on demand, and its image from this very environment: the
folder of the running Python becomes a code artifact, the service makes a
template from it. Same client, same calls as for AWS; only this module and the
commands know the local service at all.

Warm, none of this costs a call: that the service lives is seen from a lock file,
and the image's ARN follows from the environment (prefix, Python, installed
distributions), so RunMicrovm goes first, and only the service's "no such image"
makes us create it. `pip install` changes the set of distributions and with it
the name: the next machine has what was installed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from gateway.clock import Clock, SystemClock
from gateway.control import (
    Control,
    LaunchRequest,
    MachineInfo,
    managed_base_image,
    managed_connector,
    prewarm,
    settle,
)
from gateway.errors import (
    ImageNotFound,
    LaunchFailed,
    LocalServiceTrouble,
    RequestRefused,
    TimedOut,
)
from gateway.profiles import Profile, ServiceAccess

__all__ = [
    "access_of",
    "control_for",
    "environment_arn",
    "known_access",
    "launch",
    "prewarm_default",
    "settle_default",
]

LOCAL_ACCOUNT = "000000000000"
LOCAL_REGION = "us-east-1"

# Making a template imports ipykernel and what the profile names: seconds on a busy machine.
IMAGE_TIMEOUT_S = 120.0
IMAGE_POLL_S = 0.1
START_SERVICE_TIMEOUT_S = 20.0

_HOOKS = {
    "port": 9000,
    "microvmImageHooks": {
        "ready": "ENABLED",
        "readyTimeoutInSeconds": 60,
        "validate": "ENABLED",
        "validateTimeoutInSeconds": 60,
    },
    "microvmHooks": {
        "run": "ENABLED",
        "runTimeoutInSeconds": 10,
        "resume": "ENABLED",
        "resumeTimeoutInSeconds": 10,
        "suspend": "ENABLED",
        "suspendTimeoutInSeconds": 60,
        "terminate": "ENABLED",
        "terminateTimeoutInSeconds": 5,
    },
}


# -- where the control plane is ----------------------------------------------------


def access_of(profile: Profile) -> ServiceAccess:
    """Blocking. Starts the local service when the profile is embedded and none runs.

    Raises LocalServiceTrouble.
    """
    if not profile.embedded:
        return _configured(profile)
    from gateway.local import client

    try:
        info = client.ensure_running(
            _state_dir(profile), preset=profile.local_preset, wait_s=START_SERVICE_TIMEOUT_S
        )
    except (OSError, TimeoutError, RuntimeError) as error:
        raise LocalServiceTrouble(str(error)) from error
    return _access(info)


def known_access(profile: Profile) -> ServiceAccess | None:
    """What ``access_of`` would answer if nothing had to be started; None when it would."""
    if not profile.embedded:
        return _configured(profile)
    from gateway.local import client

    info = client.read_info(_state_dir(profile))
    return _access(info) if info is not None else None


def _access(info: object) -> ServiceAccess:
    return ServiceAccess(
        region=getattr(info, "region", LOCAL_REGION),
        endpoint_url=info.endpoint_url,  # type: ignore[attr-defined]
        access_key_id=info.access_key_id,  # type: ignore[attr-defined]
        secret_access_key=info.secret_access_key,  # type: ignore[attr-defined]
    )


def _configured(profile: Profile) -> ServiceAccess:
    return ServiceAccess(
        region=profile.region or os.environ.get("AWS_REGION") or LOCAL_REGION,
        endpoint_url=profile.endpoint_url,
        aws_profile=profile.aws_profile,
    )


def _state_dir(profile: Profile) -> Path | None:
    return Path(profile.local_state_dir) if profile.local_state_dir else None


# -- one Control per place ------------------------------------------------------------

_controls: dict[tuple[object, ...], Control] = {}


def control_for(profile: Profile, clock: Clock | None = None) -> Control:
    """The Control of the profile's account and region, shared by all sessions of this process.

    Makes no call: the service is looked for, or started, by the first use.
    """
    place = (
        os.getpid(),
        profile.embedded,
        profile.region,
        profile.endpoint_url,
        profile.aws_profile,
        profile.local_state_dir,
        os.environ.get("JUPYTER_MICROVM_LOCAL_DIR"),
    )
    if place not in _controls:
        _controls[place] = Control(_access_function(profile), clock or SystemClock())
    return _controls[place]


def _access_function(profile: Profile) -> Callable[[], ServiceAccess]:
    return functools.partial(access_of, profile)


def prewarm_default(profile: Profile) -> None:
    """Begin to make the profile's service client; does not block, starts no service.

    Who calls: the provisioner, as soon as it knows the profile.
    """
    prewarm(functools.partial(known_access, profile))


def settle_default(profile: Profile) -> None:
    """After a process's first launch: a client of its own. Blocking; on a worker."""
    settle(functools.partial(known_access, profile))


# -- the image of this environment -----------------------------------------------------


def environment_arn(prefix: str = sys.prefix) -> str:
    """ARN of the image of an environment; blocking, about a millisecond."""
    return (
        f"arn:aws:lambda:{LOCAL_REGION}:{LOCAL_ACCOUNT}:microvm-image:{_environment_name(prefix)}"
    )


def _environment_name(prefix: str) -> str:
    place = hashlib.sha256(f"{os.path.realpath(prefix)}\0{prefix}\0{sys.version}".encode())
    return f"env-{place.hexdigest()[:12]}-{_installed_digest(prefix)}"


def _installed_digest(prefix: str) -> str:
    """Of the names of all installed distributions, which bear their versions."""
    names: list[str] = []
    for folder in _site_folders(prefix):
        names += [
            entry.name
            for entry in _scan(folder)
            if entry.name.endswith((".dist-info", ".egg-info", ".egg-link", ".pth"))
        ]
    return hashlib.sha256("\0".join(sorted(names)).encode()).hexdigest()[:12]


def _site_folders(prefix: str) -> set[str]:
    """Where distributions can be. Not by sysconfig, whose import costs as much as the rest."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    places = (
        ("lib", version, "site-packages"),
        ("lib64", version, "site-packages"),
        ("lib", version, "dist-packages"),
        ("lib", "python3", "dist-packages"),
    )
    return {os.path.realpath(os.path.join(prefix, *place)) for place in places}


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


async def launch(control: Control, request: LaunchRequest, clock: Clock) -> MachineInfo:
    """RunMicrovm of this environment's image, made first if the service has none.

    ``request.image_arn`` is from :func:`environment_arn`. Raises as ``run_microvm``
    does, LaunchFailed when the image cannot be made.
    """
    await control.renew()
    try:
        return await control.run_microvm(request)
    except ImageNotFound:
        await _make_image(control, request.image_arn, clock)
        return await control.run_microvm(request)


async def _make_image(control: Control, arn: str, clock: Clock) -> None:
    try:
        await control.create_image(**_image_parameters(arn, sys.prefix))
    except RequestRefused as error:
        # Somebody else makes it at this moment: wait for theirs (LM 9.2 has the text).
        if "already exists" not in error.message:
            raise
    deadline_s = clock.monotonic_s() + IMAGE_TIMEOUT_S
    while True:
        image = await control.get_image(arn)
        if image.latest_active_version is not None:
            return
        if image.state.endswith("FAILED"):
            raise LaunchFailed(arn, await control.build_failure(arn))
        if clock.monotonic_s() > deadline_s:
            raise TimedOut(f"the image of {sys.prefix}", IMAGE_TIMEOUT_S)
        await clock.sleep_s(IMAGE_POLL_S)


def _image_parameters(arn: str, prefix: str) -> dict[str, object]:
    return {
        "name": arn.rpartition(":")[2],
        "description": f"Python environment {prefix}",
        "codeArtifact": {"uri": Path(prefix).as_uri()},
        "baseImageArn": managed_base_image(LOCAL_REGION),
        "buildRoleArn": f"arn:aws:iam::{LOCAL_ACCOUNT}:role/local",
        "egressNetworkConnectors": [managed_connector(LOCAL_REGION, "INTERNET_EGRESS")],
        "hooks": _HOOKS,
    }
