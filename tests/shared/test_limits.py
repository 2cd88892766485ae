"""Bounds of a link."""

from __future__ import annotations

from typing import Any

import pytest

from kernel_guest.shared.limits import MAX_CHUNK_BYTES, LinkLimits


def test_the_defaults_are_those_of_the_specification() -> None:
    limits = LinkLimits()
    assert limits.chunk_bytes == MAX_CHUNK_BYTES == 256 * 1024
    assert limits.message_bytes == 512 * 1024**2
    assert limits.windows == (4 * 1024**2, 16 * 1024**2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk_bytes": 63},
        {"chunk_bytes": MAX_CHUNK_BYTES + 1},
        {"parts": 0},
        {"parts": 65_536},
        {"message_bytes": 0},
        {"message_bytes": 2**31},
        {"urgent_window_bytes": 0},
        {"ordered_window_bytes": -1},
        {"queue_bytes": 0},
        {"low_water_bytes": -1},
    ],
)
def test_impossible_bounds_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|at most"):
        LinkLimits(**wrong)
