"""`jupyter microvm` as a process: what it says, and with which code it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = ["", "run", "image", "image build", "kernelspec", "kernelspec install", "local"]


def microvm(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from gateway.cli.main import main; main()", *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    isolated = {
        "JUPYTER_CONFIG_DIR": str(cwd / "config"),
        "JUPYTER_MICROVM_LOCAL_DIR": str(cwd / "local"),
        "JUPYTER_NO_CONFIG": "1",
    }
    return subprocess.run(
        command, cwd=cwd, env={**clean, **isolated, **env}, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def refused(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """The one sentence of a refused command."""
    assert done.returncode == code, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("jupyter microvm: ")
    return line


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(tmp_path: Path, command: str) -> None:
    done = microvm(*command.split(), "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "jupyter microvm " in done.stdout


def test_version(tmp_path: Path) -> None:
    from gateway.image_build import guest_version

    assert microvm("--version", cwd=tmp_path).stdout.strip() == guest_version()
    assert microvm("run", "--version", cwd=tmp_path).stdout.strip() == guest_version()


def test_without_a_command_the_help_is_shown(tmp_path: Path) -> None:
    done = microvm(cwd=tmp_path)
    assert done.returncode == 2
    assert "kernelspec" in done.stdout


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
        (["run", "broken.ipynb"], "is not valid JSON"),
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
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}
    (tmp_path / "good.ipynb").write_text(json.dumps(notebook))
    (tmp_path / "broken.ipynb").write_text("{")
    assert words in refused(microvm(*arguments, cwd=tmp_path))
    assert not (tmp_path / "local").exists(), "the local service was started for nothing"


def test_a_broken_configuration_is_one_sentence(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "jupyter_microvm_config.py").write_text("c.MicroVMGateway.profiles = {\n")
    (tmp_path / "good.ipynb").write_text("{}")
    done = microvm("run", "good.ipynb", cwd=tmp_path, JUPYTER_NO_CONFIG="")
    assert "SyntaxError" in refused(done)


def test_a_wrong_environment_value_is_one_sentence(tmp_path: Path) -> None:
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}
    (tmp_path / "good.ipynb").write_text(json.dumps(notebook))
    done = microvm("run", "good.ipynb", cwd=tmp_path, JUPYTER_MICROVM_TOKEN_MINUTES="soon")
    assert "JUPYTER_MICROVM_TOKEN_MINUTES" in refused(done)


def test_image_build_writes_the_zip(tmp_path: Path) -> None:
    done = microvm("image", "build", "--output=x/guest.zip", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert Path(facts["zip"]) == tmp_path / "x" / "guest.zip"
    assert facts["bytes"] == Path(facts["zip"]).stat().st_size


def test_a_reader_that_went_away_is_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from gateway.cli.main import main; main()", "--help"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert "Traceback" not in done.stderr
