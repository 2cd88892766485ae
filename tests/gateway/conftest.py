"""Fixtures for tests of the gateway."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.session_kit import Kit, running_service


@pytest.fixture(scope="session")
def local_service() -> Iterator[Kit]:
    """One real local service for all tests that ask for it; started by the first kernel."""
    with running_service() as kit:
        yield kit
