"""Profiles: parsing, checking, choosing, and what they warn about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import ConfigError, ForbiddenError, ProfileError
from gateway.profiles import (
    IdlePolicy,
    Profile,
    ServiceAccess,
    choose_profile,
    idle_warning,
    parse_profiles,
)

ARN = "arn:aws:lambda:eu-west-1:123456789012:microvm-image:kernels"


def test_an_empty_table_gives_the_embedded_default() -> None:
    profiles = parse_profiles({})
    assert list(profiles) == ["default"]
    assert profiles["default"].embedded
    assert profiles["default"].workspace == "folder"


def test_an_entry_inherits_and_overrides() -> None:
    base = Profile(token_minutes=5)
    big = parse_profiles(
        {"big": {"image_arn": ARN, "idle": {"max_idle_s": 600}, "users": ["ada"]}}, base
    )["big"]
    assert big.name == "big"
    assert big.token_minutes == 5
    assert big.region == "eu-west-1"
    assert big.idle == IdlePolicy(600)
    assert big.users == ("ada",)
    assert not big.embedded
    assert big.workspace == "upload"  # a machine of AWS cannot see our folder


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"image": ARN}, "unknown settings image"),
        ({"token_minutes": "5"}, "must be int"),
        ({"token_minutes": True}, "must be int"),
        ({"token_minutes": 61}, "1 to 60"),
        ({"park_after_s": "soon"}, "must be float"),
        ({"idle": 5}, "must be a dictionary"),
        ({"idle": {"max_idle_s": 59}}, "60 to 28800"),
        ({"idle": {"max": 60}}, "unknown settings max"),
        ({"idle": {"suspended_s": -1}}, "negative"),
        ({"maximum_duration_s": 30000}, "1 to 28800"),
        ({"users": "ada"}, "list of strings"),
        ({"users": [1]}, "list of strings"),
        ({"keep_awake": "often"}, "one of busy, always, never"),
        ({"image_arn": "kernels"}, "must look like arn:"),
        ({"image_arn": ARN.replace("microvm-image:", "microvm-image/")}, "must look like arn:"),
        ({"region": 5}, "must be str"),
        ("large", "must be a dictionary"),
    ],
)
def test_what_is_wrong_is_named(entry: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_profiles({"big": entry})
    assert "big" in caught.value.where
    assert caught.value.exit_code == 2


def test_choosing() -> None:
    profiles = parse_profiles({"big": {"users": ["ada"]}})
    assert choose_profile(profiles, "big", "ada").name == "big"
    assert choose_profile(profiles, "default", "eve").name == "default"
    with pytest.raises(ForbiddenError):
        choose_profile(profiles, "big", "eve")
    with pytest.raises(ProfileError, match="available: big, default"):
        choose_profile(profiles, "huge")


def test_the_fingerprint_changes_with_the_machine_and_not_with_habits() -> None:
    profile = Profile(image_arn=ARN)
    assert replace(profile, park_after_s=1.0).fingerprint == profile.fingerprint
    for change in ({"image_version": "2.0"}, {"idle": IdlePolicy(60)}, {"isolation": "strict"}):
        assert replace(profile, **change).fingerprint != profile.fingerprint
    assert profile.role_fingerprint is None
    role = replace(profile, execution_role_arn="arn:aws:iam::1:role/r").role_fingerprint
    assert role
    assert "role" not in role


def test_sleeping_before_the_break_even_is_warned_about_where_it_costs() -> None:
    short = Profile(image_arn=ARN, idle=IdlePolicy(60))
    assert "300 s" in (idle_warning(short) or "")
    assert idle_warning(replace(short, idle=IdlePolicy(300))) is None
    assert idle_warning(replace(short, idle=IdlePolicy(900), suspend_after_s=30.0))
    assert idle_warning(Profile(idle=IdlePolicy(60))) is None  # local machines cost nothing


def test_keys_stay_out_of_repr() -> None:
    assert "hush" not in repr(ServiceAccess("r", "http://x", "AKIA", "hush"))


@pytest.mark.parametrize(("setting", "value"), [("isolation", "strict"), ("start", "lazy")])
def test_what_is_not_built_is_refused_rather_than_ignored(setting: str, value: str) -> None:
    with pytest.raises(ConfigError, match="not built yet"):
        parse_profiles({"guarded": {setting: value}})
