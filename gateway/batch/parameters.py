"""Parameters of a batch run: `-p name=value` to a cell of assignments.

The rules are papermill's, so that a notebook written for one runs with the other: the new
cell is tagged `injected-parameters`, it replaces an older one of that tag, else it follows
the first cell tagged `parameters`, else it becomes the first cell. Values are literals: JSON
first, then Python's spelling of the same things, and everything else is a string. Nothing is
ever evaluated.
"""

from __future__ import annotations

import ast
import json
import keyword
import math
from collections.abc import Iterable, Mapping
from typing import Any

import nbformat

from gateway.errors import UsageError

_HINT = "Write -p name=value, for example -p year=2024."

INJECTED_TAG = "injected-parameters"
PARAMETERS_TAG = "parameters"

_WORDS: Mapping[str, Any] = {"True": True, "False": False, "None": None}


def parse_parameters(assignments: Iterable[str]) -> dict[str, Any]:
    """`["year=2024", "city=Bern"]` to `{"year": 2024, "city": "Bern"}`; the last of a name wins.

    Raises UsageError for a missing `=` or a name that is no Python identifier.
    """
    return dict(_parse_one(assignment) for assignment in assignments)


def _parse_one(assignment: str) -> tuple[str, Any]:
    name, equals, text = assignment.partition("=")
    if not equals:
        raise UsageError(f"The parameter {assignment!r} has no value. {_HINT}")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"{name!r} cannot be the name of a parameter. {_HINT}")
    return name, parse_value(text)


def parse_value(text: str) -> Any:
    """The literal that `text` spells, else `text` itself."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except ValueError:
        return _python_literal(text)


def _python_literal(text: str) -> Any:
    # Only quoted strings and brackets: 1_000, 0x10 or 1j are more likely meant as text.
    if not text.startswith(("[", "{", "(", "'", '"')):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def parameters_source(parameters: Mapping[str, Any]) -> str:
    """The source of the injected cell."""
    lines = [f"{name} = {_literal(value)}" for name, value in parameters.items()]
    return "\n".join(["# Parameters", *lines])


def _literal(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    return repr(value)


def inject_parameters(notebook: nbformat.NotebookNode, parameters: Mapping[str, Any]) -> bool:
    """Put the cell of assignments into `notebook`; no parameters, no cell.

    Returns whether the notebook says where parameters belong; if not, the caller tells the
    user that they were put first. Raises UsageError for a notebook that is not in Python.
    """
    if not parameters:
        return True
    _require_python(notebook)
    cell = nbformat.v4.new_code_cell(parameters_source(parameters))  # type: ignore[no-untyped-call]
    cell.metadata["tags"] = [INJECTED_TAG]
    if not _cells_have_ids(notebook):
        del cell["id"]
    start, end, expected = _place(notebook)
    notebook.cells[start:end] = [cell]
    return expected


def _place(notebook: nbformat.NotebookNode) -> tuple[int, int, bool]:
    injected = _first_tagged(notebook, INJECTED_TAG)
    if injected is not None:
        return injected, injected + 1, True
    declared = _first_tagged(notebook, PARAMETERS_TAG)
    if declared is not None:
        return declared + 1, declared + 1, True
    return 0, 0, False


def _first_tagged(notebook: nbformat.NotebookNode, tag: str) -> int | None:
    tagged = (i for i, c in enumerate(notebook.cells) if tag in c.metadata.get("tags", []))
    return next(tagged, None)


def _cells_have_ids(notebook: nbformat.NotebookNode) -> bool:
    # Cell ids exist since notebook format 4.5 (nbformat's changelog).
    return (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)


def _require_python(notebook: nbformat.NotebookNode) -> None:
    language = notebook_language(notebook)
    if language.lower() != "python":
        raise UsageError(f"Parameters can be set in Python notebooks only, this one is {language}.")


def notebook_language(notebook: nbformat.NotebookNode) -> str:
    """The language the notebook says it is written in, as it spells it; else "python"."""
    spec = notebook.metadata.get("kernelspec", {})
    info = notebook.metadata.get("language_info", {})
    language = str(spec.get("language") or info.get("name") or "python")
    return "python" if language.lower().startswith("ipython") else language
