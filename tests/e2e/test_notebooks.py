"""The demo notebooks run, as the README says, and say what they promise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.e2e.sandbox import Sandbox, sandbox
from tests.e2e.service import assert_nothing_left, machine_states

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with sandbox() as made:
        shutil.copytree(ROOT / "notebooks", made.folder / "notebooks")
        yield made


def outputs(path: Path) -> list[Any]:
    """All outputs of a notebook, in order."""
    cells = nbformat.read(path, as_version=4).cells
    return [output for cell in cells for output in cell.get("outputs", [])]


def text(path: Path) -> str:
    return "".join(output.get("text", "") for output in outputs(path))


def kinds(path: Path) -> set[str]:
    return {kind for output in outputs(path) for kind in output.get("data", {})}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_ships_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not outputs(path), "outputs belong to whoever runs it"
    assert all(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
    assert notebook.metadata.kernelspec.name == "python3"


def test_quickstart(box: Sandbox) -> None:
    done = box.run(
        "jupyter-microvm", "run", "notebooks/quickstart.ipynb", "--output-dir", "demo-output"
    )
    executed = box.folder / "demo-output" / "quickstart.ipynb"
    assert "executed notebook: demo-output/quickstart.ipynb" in done.stdout
    assert {"image/png", "text/markdown", "image/svg+xml"} <= kinds(executed)
    assert "400 samples, 3 peaks, the highest at step 29" in text(executed)
    assert_nothing_left(box)


def test_batch_report(box: Sandbox) -> None:
    done = box.run(
        "jupyter-microvm", "run", "notebooks/batch_report.ipynb", "--json", "--output-dir", "out",
        "-p", "year=2013", "-p", "top=5", "-p", "save_as=wettest.csv", "--collect", "wettest.csv",
    )  # fmt: skip
    executed = box.folder / "out" / "batch_report.ipynb"
    assert "365 days of 2013, 828 mm" in text(executed)
    assert {"text/html", "image/png"} <= kinds(executed)
    wettest = (box.folder / "out" / "wettest.csv").read_text().splitlines()
    assert wettest[0] == "date,precipitation,temp_max,wind,weather"
    assert len(wettest) == 6
    assert json.loads(done.stdout)["notebooks"][0]["collected"] == [
        str(box.folder / "out" / "wettest.csv")
    ]
    assert not (box.folder / "notebooks" / "wettest.csv").exists()
    assert_nothing_left(box)


def test_batch_report_of_a_year_without_data(box: Sandbox) -> None:
    done = box.run(
        "jupyter-microvm", "run", "notebooks/batch_report.ipynb", "-p", "year=1999",
        "--output-dir", "out", check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "raised AssertionError: there are no measurements of 1999" in done.stderr


def test_sleep_and_wake(box: Sandbox) -> None:
    # In a local kernel, as in JupyterLab; it starts its own kernel in a machine.
    before = set(machine_states(box))
    box.run(
        "jupyter", "execute", "--kernel_name=python3", "--output=executed", "sleep_and_wake.ipynb",
        cwd=box.folder / "notebooks",
    )  # fmt: skip
    shown = text(box.folder / "notebooks" / "executed.ipynb")
    (machine,) = set(machine_states(box)) - before
    assert f"{machine} RUNNING" in shown
    assert "SUSPENDED\nalive, says the client: True" in shown
    assert "sum 332833500, thread alive: True" in shown
    assert shown.endswith("TERMINATED\n")
    assert "image/png" in kinds(box.folder / "notebooks" / "executed.ipynb")
    assert_nothing_left(box)
