"""Presets and switches."""

from __future__ import annotations

import dataclasses

import pytest

from gateway.local.interfaces import PendingPolicy, ProxyLimits
from gateway.local.settings import ServiceSettings, SettingError, preset_settings


def test_fast_has_no_delays_and_realistic_has_all_of_them() -> None:
    fast, realistic = preset_settings("fast"), preset_settings("realistic")
    delays = [f.name for f in dataclasses.fields(ServiceSettings) if f.name.endswith("delay_s")]
    assert len(delays) == 6
    assert {getattr(fast, name) for name in delays} == {0}
    assert all(getattr(realistic, name) > 0 for name in delays)
    assert (fast.throttle, realistic.throttle) == (False, True)
    assert (fast.preset, realistic.preset) == ("fast", "realistic")
    assert realistic.pending_policy is PendingPolicy.REFUSE


def test_switches_change_single_values() -> None:
    settings = preset_settings(
        "fast", ["memory_quota_mib=8192", "state-lag-s=0.5", "throttle=true", "pending=502"]
    )
    assert settings.memory_quota_mib == 8192
    assert settings.state_lag_s == 0.5
    assert settings.throttle is True
    assert settings.pending_policy is PendingPolicy.REFUSE


@pytest.mark.parametrize(
    "switch",
    [
        "nonsense=1", "throttle", "throttle=yes", "memory_quota_mib=1.5", "state_lag_s=soon",
        "state_lag_s=-1", "pending=maybe", "preset=fast", "=", "",
    ],
)  # fmt: skip
def test_switches_that_are_none(switch: str) -> None:
    with pytest.raises(SettingError):
        preset_settings("fast", [switch])


def test_there_are_two_presets() -> None:
    with pytest.raises(SettingError, match="there are: fast, realistic"):
        preset_settings("slow")


@pytest.mark.parametrize(
    ("memory_mib", "connections"), [(512, 8), (1024, 16), (2048, 32), (8192, 128)]
)
def test_limits_of_a_size(memory_mib: int, connections: int) -> None:
    limits = preset_settings("realistic").proxy_limits(memory_mib)
    assert limits == ProxyLimits(
        connections, connections / 8 * 10, connections / 8 * 1e6, quiet_socket_s=60
    )
    fast = preset_settings("fast", ["quiet_socket_s=0"]).proxy_limits(memory_mib)
    assert fast == ProxyLimits(connections, None, None, quiet_socket_s=None)
