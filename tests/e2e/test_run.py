"""`jupyter microvm run` as a user runs it: a process, the local service, and what is left after.

After every test each machine is TERMINATED and none of its processes is left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.e2e.sandbox import Sandbox, sandbox
from tests.e2e.service import assert_nothing_left, machine_states


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with sandbox() as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(box: Sandbox) -> Iterator[None]:
    yield
    assert_nothing_left(box)


def run(box: Sandbox, *arguments: object, **options: Any) -> Any:
    return box.run("jupyter-microvm", "run", *map(str, arguments), check=False, **options)


def texts(path: Path) -> list[str]:
    """The text of each code cell's outputs."""
    notebook = nbformat.read(path, as_version=4)
    return ["".join(o.get("text", "") for o in c.get("outputs", [])) for c in notebook.cells]


def test_a_notebook_runs_in_a_machine(box: Sandbox) -> None:
    path = box.notebook("x = 6 * 7", "print(x)", "import os; print(os.getppid() != 1)")
    done = run(box, path, "--output-dir", "out")
    assert done.returncode == 0, done.stderr
    assert texts(box.folder / "out" / "test.ipynb") == ["", "42\n", "True\n"]
    words = [line.split()[0] for line in done.stdout.splitlines()]
    assert words == [
        "test.ipynb:",
        "machine",
        "launch",
        "connect",
        "execute",
        "teardown",
        "executed",
    ]
    assert done.stdout.rstrip().endswith("executed notebook: out/test.ipynb")
    assert "test  execute  cell 3 of 3" in done.stderr
    assert texts(path) == ["", "", ""]


def test_json_says_everything(box: Sandbox) -> None:
    done = run(box, box.notebook("1", "print(2)"), "--json", "--output-dir", "out")
    document = json.loads(done.stdout)
    (notebook,) = document["notebooks"]
    assert document["exit_code"] == done.returncode == 0
    assert notebook["cells"] == {"total": 2, "executed": 2, "failed": 0}
    assert notebook["machine"]["microvm_id"] in machine_states(box)
    assert {phase["name"] for phase in notebook["phases"]} == {
        "launch", "connect", "execute", "teardown",
    }  # fmt: skip
    names = {event["event"] for event in notebook["events"]}
    assert {"launch_started", "launch_running", "teardown_complete"} <= names
    assert notebook["output"] == str(box.folder / "out" / "test.ipynb")


def test_no_kernelspec_is_needed_and_the_notebooks_own_has_no_say(box: Sandbox) -> None:
    path = box.notebook("print('here')")
    notebook = json.loads(path.read_text())
    notebook["metadata"]["kernelspec"] = {
        "name": "no-such-kernel",
        "display_name": "x",
        "language": "python",
        "metadata": {"kernel_provisioner": {"config": {"profile": "root"}}},
    }
    path.write_text(json.dumps(notebook))
    done = run(box, path, "--output-dir", "out")
    assert done.returncode == 0, done.stderr
    assert texts(box.folder / "out" / "test.ipynb") == ["here\n"]


def test_relative_paths_work_and_the_current_folder_gets_the_result(box: Sandbox) -> None:
    folder = box.folder / "project"
    folder.mkdir(exist_ok=True)
    (folder / "data.txt").write_text("neighbour")
    path = box.notebook("print(open('data.txt').read())", name="project/paths.ipynb")
    done = run(box, path)
    assert done.returncode == 0, done.stderr
    assert texts(box.folder / "paths.executed.ipynb") == ["neighbour\n"]


def test_parameters_inputs_and_collected_files(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "big.bin").write_bytes(bytes(range(256)) * 20_000)
    path = tmp_path / "job.ipynb"
    path.write_text(box.notebook(
        "import pathlib; data = pathlib.Path('in/big.bin').read_bytes()",
        "pathlib.Path('made').mkdir()\n"
        "pathlib.Path('made/copy.bin').write_bytes(data)\n"
        "pathlib.Path('made/n.txt').write_text(repr(n))",
        name="job.ipynb",
    ).read_text())  # fmt: skip
    done = run(
        box, "job.ipynb", "-p", "n=[1, 2.5]", "--input", "in", "--collect", "made/*",
        "--output-dir", "out", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "made" / "n.txt").read_text() == "[1, 2.5]"
    copied = (tmp_path / "out" / "made" / "copy.bin").read_bytes()
    assert copied == (tmp_path / "in" / "big.bin").read_bytes()
    assert not (tmp_path / "made").exists(), "the run wrote into the user's folder"


def test_each_of_several_notebooks_has_its_machine(box: Sandbox) -> None:
    paths = [box.notebook("import os; print(os.getpid())", name=f"{n}.ipynb") for n in "abc"]
    done = run(box, *paths, "--jobs", "3", "--json", "--output-dir", "out")
    notebooks = json.loads(done.stdout)["notebooks"]
    assert done.returncode == 0, done.stderr
    assert len({notebook["machine"]["microvm_id"] for notebook in notebooks}) == 3
    assert len({texts(box.folder / "out" / f"{n}.ipynb")[0] for n in "abc"}) == 3


def test_a_cell_that_raises(box: Sandbox) -> None:
    done = run(box, box.notebook("print('kept')", "1 / 0", "2"), "--output-dir", "out")
    assert done.returncode == 1
    assert done.stderr.endswith(
        "test.ipynb: Cell 2 of 3 raised ZeroDivisionError: division by zero\n"
    )
    assert texts(box.folder / "out" / "test.ipynb") == ["kept\n", "", ""]


def test_allowed_errors(box: Sandbox) -> None:
    path = box.notebook("1 / 0", "print('on')")
    done = run(box, path, "--allow-errors", "--output-dir", "out")
    assert done.returncode == 0
    assert texts(box.folder / "out" / "test.ipynb")[1] == "on\n"


def test_a_cell_that_takes_too_long(box: Sandbox) -> None:
    done = run(box, box.notebook("while True: pass"), "--timeout", "1", "--output-dir", "out")
    assert done.returncode == 1
    assert "Cell 1 of 1 did not finish within 1 s (--timeout)." in done.stderr


def test_input_is_an_error_and_not_a_hang(box: Sandbox) -> None:
    done = run(box, box.notebook("input('name? ')"), "--output-dir", "out")
    assert done.returncode == 1
    assert "Cell 1 of 1 asks for input, which nobody can type" in done.stderr


def test_a_notebook_in_a_language_that_the_image_lacks(box: Sandbox) -> None:
    path = box.notebook("x <- 1")
    notebook = json.loads(path.read_text())
    notebook["metadata"]["kernelspec"] = {"name": "ir", "display_name": "R", "language": "R"}
    path.write_text(json.dumps(notebook))
    done = run(box, path, "--output-dir", "out-r")
    assert done.returncode == 2
    assert "test.ipynb is written in R, but the profile 'default' runs python" in done.stderr
    assert not (box.folder / "out-r" / "test.ipynb").exists()


def test_much_output_and_a_large_display(box: Sandbox) -> None:
    path = box.notebook(
        "line = 'x' * 999\nfor n in range(200_000): print(line)",
        "from IPython.display import Image\nimport os\n"
        "Image(data=b'\\x89PNG' + os.urandom(22_500_000), format='png')",
    )
    done = run(box, path, "--output-dir", "out")
    assert done.returncode == 0, done.stderr
    first, second = nbformat.read(box.folder / "out" / "test.ipynb", as_version=4).cells
    assert sum(len(output.text) for output in first.outputs) == 200_000_000
    assert len(second.outputs[0].data["image/png"]) >= 30_000_000
    (box.folder / "out" / "test.ipynb").unlink()
