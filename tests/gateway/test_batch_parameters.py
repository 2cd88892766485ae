"""Parameters: what a value means, which names are refused, where the cell goes."""

from __future__ import annotations

import math
from typing import Any

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batch.parameters import (
    inject_parameters,
    notebook_language,
    parameters_source,
    parse_parameters,
    parse_value,
)
from gateway.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2024", 2024),
        ("-1", -1),
        ("1e3", 1000.0),
        ("true", True),
        ("True", True),
        ("null", None),
        ("None", None),
        ('"12"', "12"),
        ("'12'", "12"),
        ("[1, 2]", [1, 2]),
        ("['a', 'b']", ["a", "b"]),
        ('{"a": [true]}', {"a": [True]}),
        ("(1, 2)", (1, 2)),
        # Everything else is text, also what some languages would read as a number.
        ("", ""),
        ("Bern", "Bern"),
        ("007", "007"),
        ("1_000", "1_000"),
        ("yes", "yes"),
        ("a=b", "a=b"),
        ("[1, 2", "[1, 2"),
        ("[open('x')]", "[open('x')]"),
        ("__import__('os')", "__import__('os')"),
    ],
)
def test_a_value_is_the_literal_it_spells(text: str, value: Any) -> None:
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


def test_the_last_value_of_a_name_wins() -> None:
    assert parse_parameters(["a=1", "b=x=y", "a=2"]) == {"a": 2, "b": "x=y"}


@pytest.mark.parametrize("assignment", ["a", "=1", "1a=2", "class=2", "a b=2", "a.b=1", "a\n=1"])
def test_a_bad_name_is_one_sentence(assignment: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_parameters([assignment])
    assert "\n" not in caught.value.sentence
    assert "-p name=value" in caught.value.sentence


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(json_values)
def test_the_cell_assigns_exactly_the_value(value: Any) -> None:
    namespace: dict[str, Any] = {}
    exec(parameters_source({"x": value}), namespace)  # as the kernel does
    assert _same(namespace["x"], value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(b, float) and math.isnan(b):
        return isinstance(a, float) and math.isnan(a)
    if isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in b)
    return bool(a == b and type(a) is type(b))


def _notebook(*tags: str | None, minor: int = 5) -> Any:
    notebook = nbformat.v4.new_notebook(nbformat_minor=minor)
    for number, tag in enumerate(tags):
        cell = nbformat.v4.new_code_cell(f"# {number}")
        cell.metadata["tags"] = [tag] if tag else []
        if minor < 5:
            del cell["id"]
        notebook.cells.append(cell)
    return notebook


def _sources(notebook: Any) -> list[str]:
    return [cell.source for cell in notebook.cells]


def test_the_cell_follows_the_one_tagged_parameters() -> None:
    notebook = _notebook(None, "parameters", None)
    assert inject_parameters(notebook, {"a": 1})
    assert _sources(notebook) == ["# 0", "# 1", "# Parameters\na = 1", "# 2"]
    assert notebook.cells[2].metadata.tags == ["injected-parameters"]
    nbformat.validate(notebook)


def test_an_injected_cell_is_replaced() -> None:
    notebook = _notebook("parameters", None, "injected-parameters")
    assert inject_parameters(notebook, {"a": 1})
    assert _sources(notebook) == ["# 0", "# 1", "# Parameters\na = 1"]


def test_without_a_tag_the_cell_is_first_and_the_caller_is_told() -> None:
    notebook = _notebook(None)
    assert not inject_parameters(notebook, {"a": 1})
    assert _sources(notebook) == ["# Parameters\na = 1", "# 0"]


def test_no_parameters_no_cell() -> None:
    notebook = _notebook("parameters")
    assert inject_parameters(notebook, {})
    assert len(notebook.cells) == 1


def test_an_old_notebook_stays_valid() -> None:
    notebook = _notebook("parameters", minor=4)
    inject_parameters(notebook, {"a": 1})
    assert "id" not in notebook.cells[1]
    nbformat.validate(notebook)


def test_only_python_notebooks_take_parameters() -> None:
    notebook = _notebook("parameters")
    notebook.metadata["kernelspec"] = {"name": "ir", "display_name": "R", "language": "R"}
    with pytest.raises(UsageError, match="this one is R"):
        inject_parameters(notebook, {"a": 1})


@pytest.mark.parametrize(
    ("metadata", "language"),
    [
        ({}, "python"),
        ({"kernelspec": {"language": "Julia"}}, "Julia"),
        ({"language_info": {"name": "R"}}, "R"),
        ({"language_info": {"name": "ipython"}}, "python"),
    ],
)
def test_the_language_a_notebook_names(metadata: dict[str, Any], language: str) -> None:
    notebook = _notebook()
    notebook.metadata.update(nbformat.from_dict(metadata))
    assert notebook_language(notebook) == language
