"""Fixtures for tests of the guest's processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest.machines import Machine, TemplateProcess, running_template


@pytest.fixture(scope="session")
def template() -> Iterator[TemplateProcess]:
    """One template for all tests that do not change it."""
    with running_template() as made:
        yield made


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for socket names (pytest's own are too long)."""
    with tempfile.TemporaryDirectory(prefix="kg-") as made:
        yield Path(made)


@pytest.fixture
def machine(template: TemplateProcess, short_folder: Path) -> Iterator[Machine]:
    """A machine of the shared template."""
    with template.machine(short_folder) as made:
        yield made
