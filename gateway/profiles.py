"""Profiles: trusted configuration of a kind of kernel.

Role, image, network and limits come from here and from nowhere else: not from
a request, a notebook's metadata, a kernelspec that a user can write, or an
environment value (design 6.7). ``config.py`` reads them; this module is pure.

A profile that names no ``image_arn`` means the embedded local service with
this interpreter's own environment. Going to AWS is only configuration: region,
image ARN, role, connectors, no endpoint.

Small values here and in the other rooms are named tuples: making a frozen
dataclass takes a millisecond, a named tuple a tenth, and a kernel's first start
waits for the import of all of them (2026-11-30, Python 3.11).
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple, get_type_hints

from gateway.errors import ConfigError, ForbiddenError, ProfileError

__all__ = [
    "BREAK_EVEN_IDLE_S",
    "DEFAULT_PROFILE_NAME",
    "IdlePolicy",
    "JournalLimits",
    "Profile",
    "ServiceAccess",
    "UploadLimits",
    "choose_profile",
    "idle_warning",
    "parse_profiles",
]

DEFAULT_PROFILE_NAME = "default"

# A suspend and resume of a 2 GB machine costs as much as about five minutes of
# running it (LM 12, prices of 2026-10-24): sleeping sooner than this costs money.
BREAK_EVEN_IDLE_S = 300

# Limits of the service (LM 2.2, 6.1): whole policy or none, 60 s at least.
SERVICE_MIN_IDLE_S = 60
SERVICE_MAX_DURATION_S = 28_800

AGENT_PORT = 8080

_IMAGE_ARN = re.compile(
    r"arn:aws[a-z-]*:lambda:[a-z0-9-]+:[0-9]*:microvm-image:[A-Za-z0-9_-]{1,64}"
)


class IdlePolicy(NamedTuple):
    """What the service does by itself; fixed at launch (LM 6.1)."""

    max_idle_s: int = 900
    suspended_s: int = SERVICE_MAX_DURATION_S
    auto_resume: bool = True


class JournalLimits(NamedTuple):
    """How much the guest keeps of what the gateway has not acknowledged."""

    memory_bytes: int = 32 * 1024 * 1024
    disk_bytes: int = 256 * 1024 * 1024


class UploadLimits(NamedTuple):
    """Bounds of ``workspace_source = "upload"``; beyond them the start is refused."""

    max_files: int = 2_000
    max_bytes: int = 100 * 1024 * 1024
    excludes: tuple[str, ...] = (
        ".git",
        ".venv",
        "node_modules",
        "__pycache__",
        ".ipynb_checkpoints",
    )


class ServiceAccess(NamedTuple):
    """Where the control plane is and who we are there.

    ``endpoint_url`` is None for AWS. Without ``access_key_id`` the ordinary
    credential chain of boto3 applies.
    """

    region: str
    endpoint_url: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = None
    aws_profile: str | None = None

    def __repr__(self) -> str:
        return f"<ServiceAccess {self.endpoint_url or self.region}>"


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of kernel. Times are seconds, sizes bytes; see ``config.py`` for the prose."""

    name: str = DEFAULT_PROFILE_NAME
    # where: None everywhere means the embedded local service
    region: str | None = None
    endpoint_url: str | None = None
    aws_profile: str | None = None
    image_arn: str | None = None
    image_version: str | None = None
    execution_role_arn: str | None = None
    ingress_connectors: tuple[str, ...] = ()
    egress_connectors: tuple[str, ...] = ()
    local_state_dir: str | None = None
    local_preset: str = "fast"
    # the machine's life
    idle: IdlePolicy = field(default_factory=IdlePolicy)
    maximum_duration_s: int = SERVICE_MAX_DURATION_S
    keep_awake: str = "busy"  # busy | always | never
    park_after_s: float = 30.0
    suspend_after_s: float | None = None
    max_unattended_awake_s: float = 14_400.0
    token_minutes: int = 30
    launch_timeout_s: float = 120.0
    # the kernel
    kernel_name: str | None = None  # None: the image's Python
    start: str = "eager"  # eager | lazy
    wake_for_completion: bool = True
    environment: tuple[str, ...] = ()  # further variable names that may reach the kernel
    isolation: str = "none"  # none | strict
    # its files
    workspace_source: str = "folder"  # folder | upload | none
    upload: UploadLimits = field(default_factory=UploadLimits)
    journal: JournalLimits = field(default_factory=JournalLimits)
    store_uri: str | None = None
    # who may use it
    users: tuple[str, ...] = ("*",)

    @property
    def embedded(self) -> bool:
        """True when machines come from the local service that we start ourselves."""
        return self.image_arn is None

    @property
    def workspace(self) -> str:
        """``workspace_source`` as it can be done: a machine of AWS cannot see our folder."""
        if self.workspace_source == "folder" and not self.embedded and self.endpoint_url is None:
            return "upload"
        return self.workspace_source

    @property
    def fingerprint(self) -> str:
        """Names what a machine was made from: a changed profile is a changed machine."""
        return _fingerprint(self)

    @property
    def role_fingerprint(self) -> str | None:
        """Names the execution role without telling it; None without a role."""
        role = self.execution_role_arn
        return hashlib.sha256(role.encode()).hexdigest()[:16] if role else None

    def admits(self, user: str) -> bool:
        return "*" in self.users or user in self.users


# What makes two machines different (design 4). Gateway-side habits, such as
# when to park, do not: they may change under a living machine.
_MACHINE_FACTS = frozenset(
    {
        "name",
        "region",
        "endpoint_url",
        "image_arn",
        "image_version",
        "execution_role_arn",
        "ingress_connectors",
        "egress_connectors",
        "idle",
        "maximum_duration_s",
        "isolation",
        "workspace_source",
        "store_uri",
    }
)


@functools.lru_cache(maxsize=64)
def _fingerprint(profile: Profile) -> str:
    facts = {name: value for name, value in asdict(profile).items() if name in _MACHINE_FACTS}
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_CHOICES = {
    "keep_awake": ("busy", "always", "never"),
    "start": ("eager", "lazy"),
    "isolation": ("none", "strict"),
    "workspace_source": ("folder", "upload", "none"),
    "local_preset": ("fast", "realistic"),
}

# Promised by the design and refused until it is true: running with less isolation than asked for
# would be worse than not running.
_NOT_BUILT = ("strict", "lazy")


def choose_profile(profiles: Mapping[str, Profile], name: str, user: str | None = None) -> Profile:
    """The profile of that name; raises ProfileError or ForbiddenError."""
    try:
        profile = profiles[name]
    except KeyError:
        raise ProfileError(name, tuple(profiles)) from None
    if user is not None and not profile.admits(user):
        raise ForbiddenError(user, name)
    return profile


def parse_profiles(
    table: Mapping[str, Mapping[str, Any]], base: Profile | None = None
) -> dict[str, Profile]:
    """Profiles from plain dictionaries, as a configuration file holds them.

    ``base`` supplies what an entry leaves out, and is itself the profile
    "default" unless the table defines one. Raises ConfigError naming the entry.
    """
    base = base or Profile()
    profiles = {DEFAULT_PROFILE_NAME: check_profile(base)}
    for name, entry in table.items():
        profiles[name] = _parse_one(name, entry, replace(base, name=name))
    return profiles


def _parse_one(name: str, entry: Mapping[str, Any], base: Profile) -> Profile:
    where = f"profiles[{name!r}]"
    if not isinstance(entry, Mapping):
        raise ConfigError(where, "must be a dictionary")
    known = {f.name for f in fields(Profile)} - {"name"}
    if unknown := sorted(set(entry) - known):
        raise ConfigError(where, f"unknown settings {', '.join(unknown)}; known: {_list(known)}")
    values = {key: _convert(f"{where}.{key}", key, value) for key, value in entry.items()}
    return check_profile(replace(base, **values), where)


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names))


_NESTED = {"idle": IdlePolicy, "journal": JournalLimits, "upload": UploadLimits}


@functools.cache
def _hints(kind: Any) -> dict[str, str]:
    """Types of a class's fields as text; late, because only configuration needs them."""
    return {name: str(hint) for name, hint in get_type_hints(kind).items()}


def _convert(where: str, key: str, value: Any) -> Any:
    """Bring a value from a file into the type of its field, or say why not."""
    if key in _NESTED:
        return _convert_nested(where, _NESTED[key], value)
    hint = _hints(Profile)[key]
    if "tuple" in hint:
        if isinstance(value, str) or not all(isinstance(item, str) for item in value):
            raise ConfigError(where, "must be a list of strings")
        return tuple(value)
    return _check_scalar(where, hint, value)


def _check_scalar(where: str, hint: str, value: Any) -> Any:
    allowed: tuple[type, ...] = (str,)
    if "int" in hint:
        allowed = (int,)
    elif "float" in hint:
        allowed = (int, float)
    elif "bool" in hint:
        allowed = (bool,)
    if value is None and "None" in hint:
        return None
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise ConfigError(where, f"must be {allowed[-1].__name__}, not {type(value).__name__}")
    return value


def _convert_nested(where: str, kind: Any, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(where, "must be a dictionary")
    known = set(kind._fields)
    if unknown := sorted(set(value) - known):
        raise ConfigError(where, f"unknown settings {', '.join(unknown)}; known: {_list(known)}")
    hints = _hints(kind)
    values: dict[str, Any] = {}
    for key, item in value.items():
        if "tuple" in hints[key]:
            values[key] = tuple(item)
        else:
            values[key] = _check_scalar(f"{where}.{key}", hints[key], item)
    return kind(**values)


def check_profile(profile: Profile, where: str | None = None) -> Profile:
    """Refuse what the service would refuse later, or what cannot work together."""
    where = where or f"profile {profile.name!r}"
    for key, choices in _CHOICES.items():
        if getattr(profile, key) not in choices:
            raise ConfigError(f"{where}.{key}", f"must be one of {', '.join(choices)}")
        if getattr(profile, key) in _NOT_BUILT:
            raise ConfigError(f"{where}.{key}", f"{getattr(profile, key)!r} is not built yet")
    _check_times(profile, where)
    if profile.image_arn is None:
        return profile
    if not _IMAGE_ARN.fullmatch(profile.image_arn):
        raise ConfigError(
            f"{where}.image_arn",
            "must look like arn:aws:lambda:<region>:<account>:microvm-image:<name>",
        )
    if profile.region is None:
        return replace(profile, region=profile.image_arn.split(":")[3])
    return profile


def _check_times(profile: Profile, where: str) -> None:
    if not 1 <= profile.maximum_duration_s <= SERVICE_MAX_DURATION_S:
        raise ConfigError(f"{where}.maximum_duration_s", "must be 1 to 28800 (LM 6.2)")
    if not SERVICE_MIN_IDLE_S <= profile.idle.max_idle_s <= SERVICE_MAX_DURATION_S:
        raise ConfigError(f"{where}.idle.max_idle_s", "must be 60 to 28800 (LM 6.1)")
    if profile.idle.suspended_s < 0:
        raise ConfigError(f"{where}.idle.suspended_s", "must not be negative")
    if not 1 <= profile.token_minutes <= 60:
        raise ConfigError(f"{where}.token_minutes", "must be 1 to 60 (LM 4.5)")


def idle_warning(profile: Profile) -> str | None:
    """A sentence when sleeping early costs more than it saves, else None."""
    shortest_s = min(profile.idle.max_idle_s, profile.suspend_after_s or profile.idle.max_idle_s)
    if profile.embedded or shortest_s >= BREAK_EVEN_IDLE_S:
        return None
    return (
        f"Profile {profile.name!r} lets a machine sleep after {shortest_s:g} s without work; "
        f"a suspend and resume costs about as much as {BREAK_EVEN_IDLE_S} s of running, "
        "so shorter windows cost more than they save."
    )
