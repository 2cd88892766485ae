"""Configuration: file, environment, application, in that order of strength."""

from __future__ import annotations

from pathlib import Path

import pytest
from traitlets.config import Config

from gateway.config import ENV_PREFIX, MicroVMGateway, load_gateway
from gateway.errors import ConfigError, ProfileError

ARN = "arn:aws:lambda:eu-west-1:123456789012:microvm-image:kernels"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("JUPYTER_NO_CONFIG", raising=False)
    for name in MicroVMGateway.class_trait_names(config=True):
        monkeypatch.delenv(ENV_PREFIX + name.upper(), raising=False)
    return tmp_path


def write(folder: Path, text: str, name: str = "jupyter_microvm_config.py") -> None:
    (folder / name).write_text(text)


def test_nothing_configured_is_the_embedded_default(folder: Path) -> None:
    settings = load_gateway()
    assert settings.profile().embedded
    assert settings.profile().name == "default"
    assert settings.warnings() == []


def test_going_to_aws_is_only_configuration(folder: Path) -> None:
    write(
        folder,
        f"c.MicroVMGateway.image_arn = {ARN!r}\n"
        "c.MicroVMGateway.execution_role_arn = 'arn:aws:iam::123456789012:role/r'\n"
        "c.MicroVMGateway.egress_connectors = ['arn:x']\n"
        "c.MicroVMGateway.profiles = {'quick': {'idle': {'max_idle_s': 60}}}\n",
    )
    settings = load_gateway()
    profile = settings.profile()
    assert (profile.image_arn, profile.region, profile.endpoint_url) == (ARN, "eu-west-1", None)
    assert profile.egress_connectors == ("arn:x",)
    assert settings.profile("quick").execution_role_arn == profile.execution_role_arn
    assert len(settings.warnings()) == 1


def test_environment_beats_default_file_beats_environment_application_beats_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_MICROVM_TOKEN_MINUTES", "7")
    assert load_gateway().profile().token_minutes == 7
    write(folder, '{"MicroVMGateway": {"token_minutes": 8}}', "jupyter_microvm_config.json")
    assert load_gateway().profile().token_minutes == 8
    application = Config({"MicroVMGateway": {"token_minutes": 9}})
    assert load_gateway(application).profile().token_minutes == 9
    monkeypatch.setenv("JUPYTER_NO_CONFIG", "1")
    assert load_gateway().profile().token_minutes == 7


def test_every_plain_setting_has_a_mirror(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_MICROVM_ENVIRONMENT", "A, B_*")
    monkeypatch.setenv("JUPYTER_MICROVM_SUSPEND_AFTER_S", "90")
    monkeypatch.setenv("JUPYTER_MICROVM_REGION", "")
    profile = load_gateway().profile()
    assert profile.environment == ("A", "B_*")
    assert profile.suspend_after_s == 90.0
    assert profile.region is None
    for name, trait in MicroVMGateway.class_traits(config=True).items():
        assert trait.help, name
        assert name == "profiles" or "read_env" in trait.metadata


@pytest.mark.parametrize(
    ("name", "value"), [("TOKEN_MINUTES", "many"), ("TOKEN_MINUTES", "99"), ("KEEP_AWAKE", "x")]
)
def test_a_wrong_mirror_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"JUPYTER_MICROVM_{name}", value)
    with pytest.raises(ConfigError):
        load_gateway().profile()


@pytest.mark.parametrize(
    "text", ["c.MicroVMGateway.token_minutes = 'x'", "1/0", "c.MicroVMGateway.profiles = 5"]
)
def test_a_broken_file_is_one_sentence(folder: Path, text: str) -> None:
    write(folder, text)
    with pytest.raises(ConfigError):
        load_gateway().profile()


def test_an_unknown_profile_names_the_known(folder: Path) -> None:
    write(folder, "c.MicroVMGateway.profiles = {'big': {}}")
    with pytest.raises(ProfileError, match="available: big, default"):
        load_gateway().profile("small")
