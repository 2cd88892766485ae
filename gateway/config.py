"""Configuration: traitlets, a file, environment mirrors.

``jupyter_microvm_config.py`` (or ``.json``) is looked for along
``jupyter_config_path()``, like any Jupyter application's; ``jupyter_config.*``
is read before it. An application's own configuration (command line, its config
files) beats both. Every plain setting has a mirror ``JUPYTER_MICROVM_<NAME>``
in the environment, which stands between the file and the default. Order, first
wins: application, file, environment, default.

    c.MicroVMGateway.image_arn = "arn:aws:lambda:eu-west-1:123456789012:microvm-image:kernels"
    c.MicroVMGateway.execution_role_arn = "arn:aws:iam::123456789012:role/notebook"
    c.MicroVMGateway.profiles = {"large": {"image_arn": "…", "park_after_s": 60}}

With an empty configuration there is one profile, "default": the embedded local
service with this environment's own Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_config_path
from traitlets import Dict, Float, Int, TraitError, TraitType, Unicode
from traitlets import List as ListTrait
from traitlets.config import Config
from traitlets.config.configurable import Configurable
from traitlets.config.loader import ConfigFileNotFound, JSONFileConfigLoader, PyFileConfigLoader

from gateway.errors import ConfigError
from gateway.profiles import (
    DEFAULT_PROFILE_NAME,
    IdlePolicy,
    JournalLimits,
    Profile,
    choose_profile,
    idle_warning,
    parse_profiles,
)

__all__ = ["CONFIG_NAME", "MicroVMGateway", "load_config_files", "load_gateway"]

CONFIG_NAME = "jupyter_microvm_config"
ENV_PREFIX = "JUPYTER_MICROVM_"

_BASE = Profile()


def _mirrored(trait: TraitType[Any, Any], read: Callable[[str], Any]) -> TraitType[Any, Any]:
    """Mark a trait as mirrored by the environment; ``read`` turns text into its value."""
    return trait.tag(config=True, read_env=read)


def _text(default: str | None, help_text: str) -> TraitType[Any, Any]:
    return _mirrored(Unicode(default, allow_none=True, help=help_text), lambda text: text or None)


def _number(default: float, help_text: str) -> TraitType[Any, Any]:
    return _mirrored(Float(default, help=help_text), float)


def _whole(default: int, help_text: str) -> TraitType[Any, Any]:
    return _mirrored(Int(default, help=help_text), int)


def _names(help_text: str) -> TraitType[Any, Any]:
    return _mirrored(
        ListTrait(Unicode(), help=help_text),
        lambda text: [item.strip() for item in text.split(",") if item.strip()],
    )


class MicroVMGateway(Configurable):
    """Settings of the profile "default", and the table of further profiles.

    Each setting is also the starting value of every profile in ``profiles``.
    """

    profiles = Dict(
        help="Further profiles: name -> settings. Unnamed settings are those of this class."
    ).tag(config=True)

    default_profile = _text(DEFAULT_PROFILE_NAME, "The profile of a kernelspec that names none.")

    region = _text(None, "AWS region. Default: the one in image_arn.")
    endpoint_url = _text(None, "Other address of the control API; for AWS leave it empty.")
    aws_profile = _text(None, "Profile of the AWS configuration to take credentials from.")
    image_arn = _text(
        None, "Full ARN of the image. Empty: the embedded local service and this Python."
    )
    image_version = _text(None, "Version of the image. Default: the newest active one.")
    execution_role_arn = _text(
        None, "Role of the machine. Everything in the notebook may use it; default: none."
    )
    ingress_connectors = _names("Ingress connector ARNs. Default: the managed HTTP_INGRESS.")
    egress_connectors = _names("Egress connector ARNs. Default: the managed INTERNET_EGRESS.")
    local_state_dir = _text(None, "Folder of the embedded local service.")
    local_preset = _text(_BASE.local_preset, "Timing of the embedded service: fast or realistic.")

    idle_window_s = _whole(
        _BASE.idle.max_idle_s, "The service suspends after so long without traffic, 60 to 28800."
    )
    suspended_window_s = _whole(
        _BASE.idle.suspended_s, "The service ends a machine that slept so long."
    )
    maximum_duration_s = _whole(_BASE.maximum_duration_s, "Life of a machine, asleep or not.")
    keep_awake = _text(_BASE.keep_awake, "Keep the machine awake: busy, always or never.")
    park_after_s = _number(_BASE.park_after_s, "Close the link after so long without work.")
    suspend_after_s = _mirrored(
        Float(None, allow_none=True, help="Suspend after so long without work; empty: never."),
        lambda text: float(text) if text else None,
    )
    max_unattended_awake_s = _number(
        _BASE.max_unattended_awake_s, "Suspend work that nobody has looked at for so long."
    )
    launch_timeout_s = _number(_BASE.launch_timeout_s, "Give a launch so long.")
    token_minutes = _whole(_BASE.token_minutes, "Life of a proxy token, 1 to 60.")

    kernel_name = _text(None, "Kernelspec inside the machine. Default: the image's Python.")
    environment = _names("Further environment variables (patterns) that may reach the kernel.")
    isolation = _text(_BASE.isolation, "Isolation of the kernel in its machine; only none so far.")
    workspace_source = _text(_BASE.workspace_source, "The kernel's files: folder, upload or none.")
    store_uri = _text(None, "Checkpoint store: file:///folder or s3://bucket/prefix.")
    journal_memory_bytes = _whole(
        _BASE.journal.memory_bytes, "What the guest keeps in memory for a slow client."
    )
    journal_disk_bytes = _whole(_BASE.journal.disk_bytes, "What it keeps on disk beyond that.")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._apply_environment()

    def _apply_environment(self) -> None:
        """Values from the environment for every setting that no configuration gave."""
        given = set(self.config.get(type(self).__name__, {}))
        for name, trait in self.traits(config=True).items():
            read = trait.metadata.get("read_env")
            text = os.environ.get(ENV_PREFIX + name.upper())
            if read is None or text is None or name in given:
                continue
            try:
                setattr(self, name, read(text))
            except (ValueError, TraitError) as error:
                raise ConfigError(ENV_PREFIX + name.upper(), str(error)) from error

    def base_profile(self) -> Profile:
        """The profile "default", unchecked."""
        return Profile(
            region=self.region,
            endpoint_url=self.endpoint_url,
            aws_profile=self.aws_profile,
            image_arn=self.image_arn,
            image_version=self.image_version,
            execution_role_arn=self.execution_role_arn,
            ingress_connectors=tuple(self.ingress_connectors),
            egress_connectors=tuple(self.egress_connectors),
            local_state_dir=self.local_state_dir,
            local_preset=self.local_preset,
            idle=IdlePolicy(self.idle_window_s, self.suspended_window_s),
            maximum_duration_s=self.maximum_duration_s,
            keep_awake=self.keep_awake,
            park_after_s=self.park_after_s,
            suspend_after_s=self.suspend_after_s,
            max_unattended_awake_s=self.max_unattended_awake_s,
            launch_timeout_s=self.launch_timeout_s,
            token_minutes=self.token_minutes,
            kernel_name=self.kernel_name,
            environment=tuple(self.environment),
            isolation=self.isolation,
            workspace_source=self.workspace_source,
            store_uri=self.store_uri,
            journal=JournalLimits(self.journal_memory_bytes, self.journal_disk_bytes),
        )

    def all_profiles(self) -> dict[str, Profile]:
        """Every profile by name, checked. Raises ConfigError."""
        return parse_profiles(self.profiles, self.base_profile())

    def profile(self, name: str | None = None, user: str | None = None) -> Profile:
        """One profile; the default one without a name.

        Raises ProfileError with the names that exist, ForbiddenError, ConfigError.
        """
        return choose_profile(self.all_profiles(), name or self.default_profile, user)

    def warnings(self) -> list[str]:
        """What a person should know about these settings, one sentence each."""
        found = (idle_warning(profile) for profile in self.all_profiles().values())
        return [sentence for sentence in found if sentence]


def load_config_files(log: Any = None) -> Config:
    """What the configuration files say; nothing when JUPYTER_NO_CONFIG is set.

    Raises ConfigError for a file that cannot be read.
    """
    config = Config()
    if os.environ.get("JUPYTER_NO_CONFIG"):
        return config
    # Later files win, and jupyter_config_path() has the most important folder first.
    for folder in reversed(jupyter_config_path()):
        for name in ("jupyter_config", CONFIG_NAME):
            for suffix, loader in ((".py", PyFileConfigLoader), (".json", JSONFileConfigLoader)):
                path = Path(folder, name + suffix)
                if path.is_file():
                    config.merge(_load_file(path, partial(loader, log=log)))
    return config


def _load_file(path: Path, loader: Callable[..., Any]) -> Config:
    try:
        loaded: Config = loader(path.name, path=str(path.parent)).load_config()
    except ConfigFileNotFound:  # removed since we looked
        return Config()
    except Exception as error:  # a config file is a program: anything can come out of it
        raise ConfigError(str(path), f"{type(error).__name__}: {error}") from error
    return loaded


def load_gateway(application: Config | None = None, log: Any = None) -> MicroVMGateway:
    """The settings in force. ``application`` is the running Jupyter application's own config.

    Raises ConfigError.
    """
    config = load_config_files(log)
    if application is not None:
        config.merge(application)
    try:
        return MicroVMGateway(config=config)
    except TraitError as error:
        raise ConfigError(CONFIG_NAME, str(error)) from error
