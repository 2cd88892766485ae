"""Jupyter's own applications, unchanged, with the `microvm` kernelspec.

Each runs code in a machine of the local service; afterwards `aws lambda-microvms list-microvms`
shows its machine terminated and no process of it is left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pexpect
import pytest

from tests.e2e.sandbox import BIN, Sandbox, sandbox

#: What makes a machine recognisable from inside: its folder is the kernel session's, its parent
#: is not the application.
WHERE = "import os, sys; print('pid', os.getpid(), 'ppid', os.getppid())"


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with sandbox() as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(box: Sandbox) -> Iterator[None]:
    before = len(box.machine_states())
    yield
    box.assert_all_terminated(at_least=before + 1)


def outputs(path: Path) -> list[str]:
    notebook = nbformat.read(path, as_version=4)
    return [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_jupyter_execute(box: Sandbox) -> None:
    path = box.notebook("x = 6 * 7", "print(x)", "import os; print(os.getcwd())")
    box.run("jupyter", "execute", "--kernel_name=microvm", "--inplace", str(path))
    assert outputs(path) == ["", "42\n", f"{box.folder}\n"]


def test_a_relative_path_of_the_notebook_works(box: Sandbox) -> None:
    (box.folder / "data.txt").write_text("neighbour\n")
    path = box.notebook("print(open('data.txt').read())", "open('made.txt', 'w').write('back')")
    box.run("jupyter", "execute", "--kernel_name=microvm", "--inplace", str(path))
    assert outputs(path)[0].strip() == "neighbour"
    assert (box.folder / "made.txt").read_text() == "back"


def test_papermill(box: Sandbox) -> None:
    path = box.notebook("print('by papermill')")
    made = box.folder / "out.ipynb"
    box.run("papermill", "-k", "microvm", "--no-progress-bar", str(path), str(made))
    assert outputs(made) == ["by papermill\n"]


def test_a_failing_notebook_fails_and_still_ends_its_machine(box: Sandbox) -> None:
    path = box.notebook("1 / 0")
    done = box.run("jupyter", "execute", "--kernel_name=microvm", str(path), check=False)
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr


def test_jupyter_run_shuts_down_at_exit(box: Sandbox) -> None:
    script = box.folder / "script.py"
    script.write_text("import sys; print('from', sys.implementation.name)\n")
    done = box.run("jupyter", "run", "--kernel", "microvm", str(script))
    assert "from cpython" in done.stdout


def test_jupyter_console(box: Sandbox) -> None:
    child = pexpect.spawn(
        str(BIN / "jupyter"),
        ["console", "--kernel", "microvm", "--simple-prompt"],
        cwd=str(box.folder), env={**box.environment, "TERM": "dumb"}, timeout=60, encoding="utf-8",
    )  # fmt: skip
    try:
        child.expect(r"In \[1\]: ")
        child.sendline("print('4' + '2')")
        child.expect("42\r\n")
        child.expect(r"In \[2\]: ")
        child.sendline("name = input('who? ')")
        child.expect(r"who\? ")
        child.sendline("Ada")
        child.expect(r"In \[3\]: ")
        child.sendline("print(name * 2)")
        child.expect("AdaAda")
        child.sendline("exit")
        child.expect(pexpect.EOF)
    finally:
        child.close(force=True)
    assert child.exitstatus == 0


def test_a_client_that_forgets_to_shut_down_leaves_no_machine(box: Sandbox) -> None:
    code = (
        "import jupyter_client\n"
        "km = jupyter_client.KernelManager(kernel_name='microvm')\n"
        "km.start_kernel()\n"
        "print('started')\n"
    )
    assert box.run("python", "-c", code).stdout == "started\n"


def test_a_client_that_forks_after_a_start_keeps_its_kernel(box: Sandbox) -> None:
    code = """if True:
        import os
        from jupyter_client.manager import start_new_kernel
        km, kc = start_new_kernel(kernel_name="microvm")
        child = os.fork()
        if child == 0:
            raise SystemExit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(kc.execute_interactive("print(1)", timeout=30)["content"]["status"])
        kc.stop_channels()
        km.shutdown_kernel()
    """
    assert box.run("python", "-c", code).stdout.split() == ["1", "ok"]


def test_a_child_of_a_fork_starts_its_own_kernel(box: Sandbox) -> None:
    code = """if True:
        import os
        from jupyter_client.manager import run_kernel
        with run_kernel(kernel_name="microvm") as kc:
            kc.execute_interactive("print('parent')", timeout=30)
        child = os.fork()
        with run_kernel(kernel_name="microvm") as kc:
            kc.execute_interactive(f"print('side', {bool(child)})", timeout=30)
        if child:
            assert os.waitpid(child, 0)[1] == 0
    """
    lines = sorted(box.run("python", "-u", "-W", "ignore", "-c", code).stdout.splitlines())
    assert lines == ["parent", "side False", "side True"]


def test_an_unknown_profile_is_one_sentence(box: Sandbox) -> None:
    spec = box.folder / "prefix/share/jupyter/kernels/other/kernel.json"
    spec.parent.mkdir(exist_ok=True)
    text = (spec.parent.parent / "microvm/kernel.json").read_text()
    spec.write_text(text.replace('"default"', '"nosuch"'))
    path = box.notebook("1")
    done = box.run("jupyter", "execute", "--kernel_name=other", str(path), check=False)
    assert done.returncode != 0
    assert "There is no profile named 'nosuch'; available: default." in done.stderr
    # The fixture wants a machine per test; this one rightly made none.
    box.run("jupyter", "execute", "--kernel_name=microvm", str(path))


def test_a_kernelspec_cannot_set_anything_but_the_profile(box: Sandbox) -> None:
    spec = box.folder / "prefix/share/jupyter/kernels/greedy/kernel.json"
    spec.parent.mkdir(exist_ok=True)
    described = json.loads((spec.parent.parent / "microvm/kernel.json").read_text())
    stanza = described["metadata"]["kernel_provisioner"]
    stanza["config"] = {"profile": "default", "execution_role_arn": "arn:aws:iam::1:role/admin"}
    spec.write_text(json.dumps(described))
    path = box.notebook("1")
    done = box.run("jupyter", "execute", "--kernel_name=greedy", str(path), check=False)
    assert done.returncode != 0
    assert "only 'profile' may be set there" in done.stderr
    box.run("jupyter", "execute", "--kernel_name=microvm", str(path))
