"""Which variables reach a kernel."""

from __future__ import annotations

from gateway.environment import select_environment

SERVER = {
    "PATH": "/usr/bin",
    "HOME": "/home/ada",
    "LANG": "de_DE.UTF-8",
    "LC_TIME": "C",
    "TZ": "Europe/Berlin",
    "KERNEL_USERNAME": "ada",
    "JPY_SESSION_NAME": "a.ipynb",
    "JPY_PARENT_PID": "1",
    "AWS_SECRET_ACCESS_KEY": "x",
    "JUPYTER_TOKEN": "x",
    "GITHUB_TOKEN": "x",
    "DB_PASSWORD": "x",
    "KERNEL_API_KEY": "x",
    "EDITOR": "vi",
}


def test_locale_zone_and_kernel_names_pass_and_nothing_else() -> None:
    assert set(select_environment(SERVER)) == {
        "LANG", "LC_TIME", "TZ", "KERNEL_USERNAME", "JPY_SESSION_NAME",
    }  # fmt: skip


def test_the_kernelspec_may_set_names_but_not_secrets_or_paths() -> None:
    chosen = select_environment(SERVER, {"MY_FLAG": "1", "PATH": "/evil", "AWS_PROFILE": "x"})
    assert chosen["MY_FLAG"] == "1"
    assert "PATH" not in chosen
    assert "AWS_PROFILE" not in chosen


def test_the_profile_names_more_by_pattern_but_secrets_only_exactly() -> None:
    assert "EDITOR" in select_environment(SERVER, profile=["EDIT*"])
    assert "GITHUB_TOKEN" not in select_environment(SERVER, profile=["GITHUB_*", "*"])
    assert select_environment(SERVER, profile=["GITHUB_TOKEN"])["GITHUB_TOKEN"] == "x"


def test_an_endless_value_is_left_out() -> None:
    assert "TZ" not in select_environment({"TZ": "x" * 100_000})
