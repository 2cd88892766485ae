"""Much output over a line of 4 MB/s, the bandwidth of a small machine (LM 4.4)."""

from __future__ import annotations

from collections.abc import Iterator

import nbformat
import pytest
from nbclient import NotebookClient

from tests.e2e.sandbox import Sandbox, entered, sandbox

DISPLAY_BYTES = 30_000_000


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with sandbox(switches=("bandwidth_caps=true",)) as made, entered(made):
        yield made


def run(cell: str) -> list[nbformat.NotebookNode]:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    NotebookClient(notebook, kernel_name="microvm", timeout=600).execute()
    outputs: list[nbformat.NotebookNode] = notebook.cells[0].outputs
    return outputs


@pytest.mark.long
@pytest.mark.parametrize("turn", range(3))
def test_every_line_arrives_once_and_in_order(box: Sandbox, turn: int) -> None:
    outputs = run("for i in range(20_000): print(i, flush=True)")
    text = "".join(output.text for output in outputs)
    assert text.split() == [str(i) for i in range(20_000)]


@pytest.mark.long
def test_a_display_of_30_mb_arrives_whole(box: Sandbox) -> None:
    code = "from IPython.display import display\nimport random\n"
    # Digits of a random number, so that compression cannot make it small.
    code += f"text = str(random.randbytes({DISPLAY_BYTES // 2}).hex())\n"
    code += "display({'text/plain': text}, raw=True)\nprint(hash(text) == hash(text))"
    outputs = run(code)
    assert len(outputs[0].data["text/plain"]) == DISPLAY_BYTES
    assert outputs[1].text == "True\n"
