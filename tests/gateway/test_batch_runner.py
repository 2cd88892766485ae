"""One notebook in a stock local kernel: every way a run can end, and what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from gateway.batch.notebooks import PlannedRun, plan_runs
from gateway.batch.progress import Moment, SilentProgress
from gateway.batch.queue import run_all
from gateway.batch.result import RunResult, Status
from gateway.batch.runner import RunOptions
from gateway.clock import SystemClock

from .local_host import LocalHost

# A stock kernel binds its sockets to TCP and says so on the terminal; that is not ours.
pytestmark = pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning")


class Recorder(SilentProgress):
    """Remembers what was shown, and lets a test act at a moment."""

    def __init__(self, on_show: Callable[[Moment], None] = lambda moment: None) -> None:
        self.shown: list[str] = []
        self.notes: list[str] = []
        self._on_show = on_show

    def show(self, moment: Moment) -> None:
        self.shown.append(f"{moment.phase} {moment.cell}" if moment.cell else moment.phase)
        self._on_show(moment)

    def note(self, text: str) -> None:
        self.notes.append(text)


def write(folder: Path, *sources: str, name: str = "n", **metadata: Any) -> Path:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    path = folder / f"{name}.ipynb"
    path.write_text(nbformat.v4.writes(notebook))
    return path


class Setting:
    """A folder for sources, one for outputs, one for the workspace."""

    def __init__(self, root: Path) -> None:
        self.source, self.out = root / "src", root / "out"
        self.host = LocalHost(root / "workspace")
        for folder in (self.source, self.host.files.folder):
            folder.mkdir()
        self.progress = Recorder()

    def plan(self, *paths: Path) -> list[PlannedRun]:
        return plan_runs([str(path) for path in paths], str(self.out))

    def run_all(self, *paths: Path, jobs: int = 1, **options: Any) -> list[RunResult]:
        return asyncio.run(
            run_all(
                self.plan(*paths),
                RunOptions("default", **options),
                self.host,
                self.progress,
                SystemClock(),
                jobs=jobs,
            )
        )

    def run(self, *sources: str, **options: Any) -> RunResult:
        (result,) = self.run_all(write(self.source, *sources), **options)
        return result

    def outputs(self, name: str = "n") -> list[list[Any]]:
        document = json.loads((self.out / f"{name}.ipynb").read_text())
        return [cell.get("outputs", []) for cell in document["cells"]]


@pytest.fixture
def setting(tmp_path: Path) -> Any:
    made = Setting(tmp_path)
    yield made
    for provisioner in made.host.provisioners:
        assert not provisioner.has_process, "a kernel was left running"
    for manager in made.host.managers:
        assert not Path(manager.connection_file).exists()


def test_a_notebook_runs_to_its_end(setting: Setting) -> None:
    result = setting.run("x = 20", "# only a comment", "", "print(x)\nx + 22")
    assert result.failure is None
    assert (result.cells_total, result.cells_executed, result.cells_failed) == (3, 3, 0)
    assert [phase.name for phase in result.phases] == ["launch", "connect", "execute", "teardown"]
    stream, value = setting.outputs()[3]
    assert stream["text"] == ["20\n"]
    assert value["data"]["text/plain"] == ["42"]
    assert setting.progress.shown == [
        "launch", "connect", "execute", "execute 1", "execute 2", "execute 3", "teardown",
    ]  # fmt: skip


def test_parameters_inputs_and_collected_files(setting: Setting, tmp_path: Path) -> None:
    from gateway.batch.inputs import plan_inputs

    (tmp_path / "in.txt").write_text("hello")
    workspace = setting.host.files.folder
    code = (
        f"import os; os.chdir({str(workspace)!r})\nopen('o.txt','w').write(open('in.txt').read()+n)"
    )
    result = setting.run(
        code,
        parameters={"n": " you"},
        inputs=plan_inputs([str(tmp_path / "in.txt")]),
        collect=["*.txt"],
    )
    assert result.failure is None
    assert result.warnings == ["No cell is tagged 'parameters'; the values were put first."]
    assert (setting.out / "o.txt").read_text() == "hello you"
    assert [phase.name for phase in result.phases][2:5] == ["inputs", "execute", "collect"]


def test_a_glob_that_matches_nothing_is_a_warning(setting: Setting) -> None:
    result = setting.run("1", collect=["*.absent"])
    assert result.failure is None
    assert result.warnings == ["--collect *.absent matched no file."]


def test_an_error_stops_the_run_and_keeps_what_there_is(setting: Setting) -> None:
    result = setting.run("print('kept')", "1 / 0", "print('never')")
    assert result.failure is not None
    assert result.failure.status is Status.NOTEBOOK_ERROR
    assert result.failure.sentence == "Cell 2 of 3 raised ZeroDivisionError: division by zero"
    assert (result.cells_executed, result.cells_failed) == (2, 1)
    first, second, third = setting.outputs()
    assert first[0]["text"] == ["kept\n"]
    assert second[0]["output_type"] == "error"
    assert third == []


def test_files_are_collected_after_an_error_too(setting: Setting) -> None:
    (setting.host.files.folder / "log.txt").write_text("why")
    result = setting.run("1 / 0", collect=["log.txt"])
    assert result.status is Status.NOTEBOOK_ERROR
    assert (setting.out / "log.txt").read_text() == "why"


def test_allowed_errors_do_not_stop_the_run(setting: Setting) -> None:
    result = setting.run("1 / 0", "print('on')", allow_errors=True)
    assert result.failure is None
    assert result.cells_failed == 1
    assert setting.outputs()[1][0]["text"] == ["on\n"]


def test_a_cell_that_takes_too_long(setting: Setting) -> None:
    result = setting.run("print('begun', flush=True)\nimport time; time.sleep(60)", timeout_s=1.0)
    assert result.failure is not None
    assert result.failure.sentence == "Cell 1 of 1 did not finish within 1 s (--timeout)."
    assert result.status is Status.NOTEBOOK_ERROR
    assert setting.outputs()[0][0]["text"] == ["begun\n"]


def test_input_is_an_error_and_not_a_hang(setting: Setting) -> None:
    result = setting.run("input('name? ')")
    assert result.failure is not None
    assert result.failure.sentence.startswith("Cell 1 of 1 asks for input")


def test_a_kernel_that_dies(setting: Setting) -> None:
    result = setting.run("print('last', flush=True)", "import os; os._exit(7)")
    assert result.failure is not None
    assert result.status is Status.TROUBLE
    assert result.failure.sentence == "The kernel died in cell 2 of 2."
    assert setting.outputs()[0][0]["text"] == ["last\n"]


def test_a_kernel_that_never_starts(setting: Setting, tmp_path: Path) -> None:
    setting.host = LocalHost(tmp_path, [sys.executable, "-c", "raise SystemExit(3)"])
    result = setting.run("1")
    assert result.status is Status.TROUBLE
    assert result.output is None
    assert not (setting.out / "n.ipynb").exists()


def test_a_kernel_that_cannot_be_launched(setting: Setting, tmp_path: Path) -> None:
    setting.host = LocalHost(tmp_path, ["/no/such/program"])
    result = setting.run("1")
    assert result.status is Status.TROUBLE
    assert result.failure is not None
    assert "\n" not in result.failure.sentence


def test_a_notebook_of_another_language_is_refused(setting: Setting) -> None:
    path = write(setting.source, "x <- 1", language_info={"name": "R"})
    (result,) = setting.run_all(path)
    assert result.status is Status.REFUSED
    assert result.failure is not None
    assert "written in R, but" in result.failure.sentence


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_saves_and_tears_down(setting: Setting, number: int, times: int) -> None:
    def on_show(moment: Moment) -> None:
        if moment.cell == 2:
            os.kill(os.getpid(), number)
        if moment.phase == "teardown" and times == 2:
            os.kill(os.getpid(), number)

    setting.progress = Recorder(on_show)
    result = setting.run("print('kept')", "import time; time.sleep(60)")
    assert result.failure is not None
    assert result.status is Status.INTERRUPTED
    assert result.failure.sentence == "Interrupted in cell 2 of 2."
    assert setting.outputs()[0][0]["text"] == ["kept\n"]
    assert len(setting.progress.notes) == times


def test_a_signal_during_launch_leaves_nothing(setting: Setting) -> None:
    def on_show(moment: Moment) -> None:
        if moment.phase == "launch":
            os.kill(os.getpid(), signal.SIGINT)

    setting.progress = Recorder(on_show)
    result = setting.run("1")
    assert result.status is Status.INTERRUPTED
    assert not (setting.out / "n.ipynb").exists()


def test_several_notebooks_at_once_each_with_its_kernel(setting: Setting) -> None:
    barrier = (
        "import os, time, pathlib\n"
        f"here = pathlib.Path({str(setting.host.files.folder)!r})\n"
        "(here / str(os.getpid())).touch()\n"
        "while len(list(here.iterdir())) < 2: time.sleep(0.01)\n"
    )
    paths = [write(setting.source, barrier, name=name) for name in "ab"]
    results = setting.run_all(*paths, jobs=2, timeout_s=60.0)
    assert [result.status for result in results] == [Status.COMPLETED] * 2
    assert [result.notebook for result in results] == paths


def test_a_failing_notebook_does_not_stop_the_next(setting: Setting) -> None:
    paths = [write(setting.source, "1 / 0", name="a"), write(setting.source, "1", name="b")]
    statuses = [result.status for result in setting.run_all(*paths)]
    assert statuses == [Status.NOTEBOOK_ERROR, Status.COMPLETED]


def test_after_a_signal_waiting_notebooks_never_start(setting: Setting) -> None:
    setting.progress = Recorder(
        lambda moment: os.kill(os.getpid(), signal.SIGTERM) if moment.cell else None
    )
    paths = [write(setting.source, "import time; time.sleep(60)", name=name) for name in "ab"]
    first, second = setting.run_all(*paths)
    assert first.status is second.status is Status.INTERRUPTED
    assert len(setting.host.managers) == 1


def test_text_of_one_stream_is_one_output(setting: Setting) -> None:
    code = """
import sys
for n in range(2000):
    print(n, flush=True)
print("err", file=sys.stderr, flush=True)
print("more", flush=True)
"""
    setting.run(
        code, "from IPython.display import clear_output\nprint(1); clear_output(); print(2)"
    )
    first, second = setting.outputs()
    assert [output["name"] for output in first] == ["stdout", "stderr", "stdout"]
    assert second[-1]["text"] == ["2\n"]


def test_a_notebook_is_saved_while_it_goes_on(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gateway.batch import runner

    monkeypatch.setattr(runner, "SAVE_INTERVAL_S", -1.0)
    monkeypatch.setattr(runner, "SAVE_SHARE", 0)
    output = str(setting.out / "n.ipynb")
    setting.run("print('first')", f"print('first' in open({output!r}).read())")
    assert setting.outputs()[1][0]["text"] == ["True\n"]
