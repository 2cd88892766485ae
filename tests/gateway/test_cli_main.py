"""`jupyter microvm`: what it says, and with which code it ends. Nothing here starts a machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jupyter_core.application import JupyterApp

from gateway.cli.main import main
from gateway.image_build import guest_version

COMMANDS = ["", "run", "image", "image build", "kernelspec", "kernelspec install", "local"]
PROGRAM = [sys.executable, "-m", "gateway.cli"]


class Ended:
    """How a command ended."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stdout, self.stderr = code, stdout, stderr

    def sentence(self, code: int = 2) -> str:
        """The one sentence of a refused command."""
        assert (self.code, self.stdout) == (code, ""), self.stderr
        (line,) = self.stderr.splitlines()
        assert line.startswith("jupyter microvm: ")
        return line


Microvm = Callable[..., Ended]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and nothing of this user's configuration."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("JUPYTER", "AWS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("JUPYTER_MICROVM_LOCAL_DIR", str(tmp_path / "local"))
    return tmp_path


@pytest.fixture
def microvm(here: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Microvm]:
    """The command, in this process."""

    def command(*arguments: str) -> Ended:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        _forget_instances(JupyterApp)
        assert isinstance(caught.value.code, int)
        shown = capsys.readouterr()
        return Ended(caught.value.code, shown.out, shown.err)

    yield command
    assert not (here / "local").exists(), "the local service was started for nothing"


def _forget_instances(kind: type[JupyterApp]) -> None:
    """Applications are singletons; a process runs one of them, this one many."""
    for below in kind.__subclasses__():
        _forget_instances(below)
    kind.clear_instance()


def _empty_notebook(path: Path) -> None:
    path.write_text('{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}')


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(microvm: Microvm, command: str) -> None:
    done = microvm(*command.split(), "--help")
    assert (done.code, done.stderr) == (0, "")
    assert "jupyter microvm " in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_version(microvm: Microvm, command: str) -> None:
    assert microvm(*command.split(), "--version").stdout.strip() == guest_version()


@pytest.mark.parametrize("command", ["", "image"])
def test_without_a_command_the_help_is_shown(microvm: Microvm, command: str) -> None:
    done = microvm(*command.split())
    assert done.code == 2
    assert "Subcommands" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], "no command 'frobnicate'"),
        (["run"], "Say which notebook"),
        (["run", "absent.ipynb"], "There is no notebook"),
        (["run", "x.ipynb", "--colect=*.csv"], "no option --colect"),
        (["run", "x.ipynb", "--jobs=0"], "should not be less than 1"),
        (["run", "x.ipynb", "--timeout=soon"], "expected a float"),
        (["run", "good.ipynb", "-p", "1x=2"], "cannot be the name"),
        (["run", "good.ipynb", "--input=absent"], "no such file"),
        (["run", "good.ipynb", "--profile=absent"], "no profile named 'absent'"),
        (["run", "good.ipynb", "--output-dir=good.ipynb"], "Cannot write into"),
        (["run", "good.ipynb", "--output-dir=."], "is the notebook itself"),
        (["run", "good.ipynb", "broken.ipynb"], "is not valid JSON"),
        (["image", "build", "extra"], "Unexpected argument"),
        (["image", "build", "--create"], "--create needs --name"),
        (["image", "build", "--name=x"], "--name is for --create"),
        (["image", "build", "--memory=3"], "memory"),
        (["image", "build", "--source=absent"], "Cannot read"),
        (["image", "build", "--output=/proc/none/x.zip"], "Cannot write"),
        (["image", "build", "--create", "--name=x", "--bucket=b"], "needs --build-role"),
    ],
)
def test_wrong_usage_is_one_sentence_and_code_2(
    here: Path, microvm: Microvm, arguments: list[str], words: str
) -> None:
    _empty_notebook(here / "good.ipynb")
    (here / "broken.ipynb").write_text("{")
    assert words in microvm(*arguments).sentence()


def test_a_broken_configuration_is_one_sentence(here: Path, microvm: Microvm) -> None:
    (here / "config").mkdir()
    (here / "config" / "jupyter_microvm_config.py").write_text("c.MicroVMGateway.profiles = {\n")
    _empty_notebook(here / "good.ipynb")
    assert "SyntaxError" in microvm("run", "good.ipynb").sentence()


def test_a_wrong_environment_value_is_one_sentence(
    here: Path, microvm: Microvm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_MICROVM_TOKEN_MINUTES", "soon")
    _empty_notebook(here / "good.ipynb")
    assert "JUPYTER_MICROVM_TOKEN_MINUTES" in microvm("run", "good.ipynb").sentence()


def test_image_build_writes_the_zip(here: Path, microvm: Microvm) -> None:
    done = microvm("image", "build", "--output=x/guest.zip", "--json")
    assert (done.code, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert Path(facts["zip"]) == here / "x" / "guest.zip"
    assert facts["bytes"] == Path(facts["zip"]).stat().st_size


def test_what_nobody_foresaw_is_a_sentence_too(
    here: Path, microvm: Microvm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr("gateway.cli.run.plan_runs", fail)
    said = microvm("run", "good.ipynb").sentence(3)
    assert "Unexpected KeyError: 'surprise'" in said
    assert "--debug" in said


def test_ctrl_c_before_anything_runs(microvm: Microvm, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gateway.cli.run.plan_runs", interrupt)
    assert microvm("run", "good.ipynb").sentence(130) == "jupyter microvm: Interrupted."


def test_as_a_program(here: Path) -> None:
    done = subprocess.run([*PROGRAM, "run"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "jupyter microvm: Say which notebook: jupyter microvm run NOTEBOOK.ipynb.\n"
    )


def test_a_reader_that_went_away_is_no_traceback(here: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*PROGRAM, "--help"], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert "Traceback" not in done.stderr
