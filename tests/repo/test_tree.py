"""What a healthy repository has, and what must never be in it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {
    "pyproject.toml", "gateway", "kernel_guest", "notebooks", "tests", "image", "README.md",
    "docs", "bench", "Makefile", ".ci", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE",
    "constraints.txt", ".gitignore",
}  # fmt: skip
#: Hard limit of a source file; CONTRIBUTING says 500 and asks for a reason above it.
MOST_LINES = 600


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout (an unpacked sdist has no index)")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_top_level_is_fixed() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in tracked()} == TOP_LEVEL


def test_no_machine_paths_in_the_tree() -> None:
    forbidden = re.compile(rb"/(work|home/[a-z]+|root)/[a-z]")
    offenders = [
        path
        for path in tracked()
        if path.suffix in {".py", ".md", ".toml", ".ipynb", ".txt", ".sh"}
        and path != Path(__file__)
        and path.is_file()
        and forbidden.search(path.read_bytes())
    ]
    assert not offenders


def test_source_files_stay_readable() -> None:
    sizes = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8").count("\n")
        for path in tracked()
        if path.suffix == ".py" and path.is_file() and path.parts[len(ROOT.parts)] != "tests"
    }
    assert not {name: lines for name, lines in sizes.items() if lines > MOST_LINES}


def test_every_module_of_the_packages_imports_cleanly() -> None:
    names = [
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for path in tracked()
        if path.suffix == ".py" and path.parts[len(ROOT.parts)] in {"gateway", "kernel_guest"}
        and path.name not in {"__main__.py", "__init__.py"}
    ]  # fmt: skip
    code = "import importlib, sys\nfor n in sys.argv[1:]: importlib.import_module(n)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *names],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
