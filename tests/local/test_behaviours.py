"""The list of behaviours and the code are equal, and the list is well formed."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import gateway.local
from gateway.local.behaviours import BEHAVIOURS, Evidence, implements

ROOT = Path(next(iter(gateway.local.__path__)))


def marked_in_code() -> Counter[str]:
    """Every id that an `implements(...)` in the local service names."""
    found: Counter[str] = Counter()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "implements":
                found.update(str(ast.literal_eval(argument)) for argument in node.args)
    return found


def test_list_and_code_are_equal() -> None:
    listed = {behaviour.id for behaviour in BEHAVIOURS}
    assert listed - marked_in_code().keys() == set(), "listed, but nowhere implemented"
    assert marked_in_code().keys() - listed == set(), "implemented, but not listed"


def test_ids_are_unique_and_sections_exist() -> None:
    assert [n for n, count in Counter(b.id for b in BEHAVIOURS).items() if count > 1] == []
    for behaviour in BEHAVIOURS:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", behaviour.id)
        assert re.fullmatch(r"\d{1,2}(\.\d)?", behaviour.section), behaviour
        assert behaviour.text.endswith("."), behaviour


def test_every_kind_of_evidence_is_in_use() -> None:
    assert {behaviour.evidence for behaviour in BEHAVIOURS} == set(Evidence)


def test_a_mark_changes_nothing() -> None:
    def target() -> int:
        return 1

    assert implements("anything")(target) is target
