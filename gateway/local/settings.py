"""The local service's switches and its two presets.

`fast` has no artificial delays and generous rates: it is what a person at a
notebook wants.  `realistic` has the delays and rates that observers measured,
so that a program which works here is not surprised there.  Wherever the truth
about the real service is unknown, the behaviour is a switch here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.local.interfaces import PendingPolicy, ProxyLimits

REGION = "us-east-1"
ACCOUNT = "000000000000"
MAXIMUM_DURATION_S = 28_800  # LM 6.2: 8 h, the default and the hard cap
DEFAULT_MEMORY_MIB = 2048  # LM 9.1
PEAK_FACTOR = 4  # LM 9.1, 11: a machine counts as its peak, four times its baseline
MEMORY_SIZES_MIB = (512, 1024, 2048, 4096, 8192)  # LM 9.1

#: LM 11, calls per second, burst equal to the rate.  The operations that the fact
#: sheet has no figure for share `OTHER_RATE_PER_S`.
RATES_PER_S: Mapping[str, float] = {
    "RunMicrovm": 5,
    "ResumeMicrovm": 5,
    "SuspendMicrovm": 2,
    "TerminateMicrovm": 10,
    "GetMicrovm": 100,
    "CreateMicrovmAuthToken": 50,
    "CreateMicrovmShellAuthToken": 5,
}
OTHER_RATE_PER_S = 10.0  # guessed; LM 3.4 says only that bursts of ListMicrovms throttle quickly


class SettingError(ValueError):
    """A switch that does not exist, or a value that it cannot take; the text says which."""


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Every switch, with the values of the `fast` preset as defaults."""

    preset: str = "fast"
    launch_delay_s: float = 0.0
    suspend_delay_s: float = 0.0
    resume_delay_s: float = 0.0
    terminate_delay_s: float = 0.0
    build_delay_s: float = 0.0
    delete_delay_s: float = 0.0
    state_lag_s: float = 0.0
    throttle: bool = False
    memory_quota_mib: int = 1024 * 1024  # LM 11: 1,024 GB in us-east-1
    image_quota: int = 100  # LM 11
    version_quota: int = 50  # LM 11
    pending: str = "hold"
    held_request_s: float = 120.0
    window_after_explicit_suspend: bool = False
    cut_on_suspend: bool = True
    count_stream_bytes: bool = True
    quiet_socket_s: float = 60.0  # LM 4.4, 5.2
    connection_caps: bool = True
    request_caps: bool = False
    bandwidth_caps: bool = False
    kept_logs: int = 200  # of ended machines, in the state folder
    ended_retention_s: float = 86_400.0  # LM 3.4: "about a day"; others saw longer

    @property
    def pending_policy(self) -> PendingPolicy:
        return PendingPolicy(self.pending)

    def proxy_limits(self, memory_mib: int) -> ProxyLimits:
        """The data plane's limits for a machine of this size."""
        peak_vcpu = max(1, memory_mib // 512)  # LM 9.1: 1 peak vCPU per 512 MiB of baseline
        return ProxyLimits(
            max_connections=8 * peak_vcpu if self.connection_caps else None,  # LM 4.4
            requests_per_s=10.0 * peak_vcpu if self.request_caps else None,  # LM 4.4
            bandwidth_bytes_per_s=1e6 * peak_vcpu if self.bandwidth_caps else None,  # LM 4.4
            quiet_socket_s=self.quiet_socket_s or None,
        )


#: LM 12 and 13.1 for the delays, LM 3.4 for the lag.
_REALISTIC: Mapping[str, object] = {
    "launch_delay_s": 2.5,
    "suspend_delay_s": 1.5,
    "resume_delay_s": 1.0,
    "terminate_delay_s": 2.0,
    "build_delay_s": 120.0,
    "delete_delay_s": 30.0,  # LM 9.2
    "state_lag_s": 0.5,
    "throttle": True,
    "pending": "502",
    "request_caps": True,
    "bandwidth_caps": True,
}

_PRESETS: Mapping[str, Mapping[str, object]] = {"fast": {}, "realistic": _REALISTIC}
PRESETS = tuple(_PRESETS)


def preset_settings(preset: str = "fast", switches: Iterable[str] = ()) -> ServiceSettings:
    """The preset's settings, changed by `name=value` switches.  Raises SettingError."""
    if preset not in _PRESETS:
        raise SettingError(f"There is no preset {preset!r}; there are: {', '.join(PRESETS)}.")
    values: dict[str, object] = {**_PRESETS[preset], "preset": preset}
    values.update(_parse_switch(switch) for switch in switches)
    return ServiceSettings(**values)  # type: ignore[arg-type]  # checked by _parse_switch


def _parse_switch(switch: str) -> tuple[str, object]:
    name, equals, text = switch.partition("=")
    name = name.strip().replace("-", "_")
    kinds = {f.name: f.default for f in dataclasses.fields(ServiceSettings)}
    if not equals or name not in kinds or name == "preset":
        known = ", ".join(sorted(kinds.keys() - {"preset"}))
        raise SettingError(f"{switch!r} is not a switch (name=value); the names are: {known}.")
    try:
        return name, _parse_value(text.strip(), kinds[name])
    except ValueError as error:
        raise SettingError(f"The switch {name} cannot be {text!r}: {error}.") from error


def _parse_value(text: str, like: object) -> object:
    if isinstance(like, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError("it is either true or false")
        return text.lower() == "true"
    if isinstance(like, str):
        return PendingPolicy(text).value
    number = int(text) if isinstance(like, int) else float(text)
    if number < 0:
        raise ValueError("it cannot be negative")
    return number
