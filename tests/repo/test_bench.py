"""The arithmetic of the benchmarks: medians, spreads, chance."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def arithmetic() -> ModuleType:
    name = "statistics_of_series"
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_spread_of_one_and_of_many(arithmetic: ModuleType) -> None:
    assert arithmetic.spread([3.0]).median == 3.0
    many = arithmetic.spread([5.0, 1.0, 3.0])
    assert (many.low, many.median, many.high, many.count) == (1.0, 3.0, 5.0, 3)


def test_percentiles_are_measured_values(arithmetic: ModuleType) -> None:
    values = [float(n) for n in range(101)]
    assert [arithmetic.percentile(values, p) for p in (0, 50, 95, 100)] == [0, 50, 95, 100]


def test_chance_is_small_for_what_differs_and_large_for_what_does_not(
    arithmetic: ModuleType,
) -> None:
    low, high = [1.0, 1.1, 1.2, 1.05, 1.15, 1.3, 1.01], [2.0, 2.1, 2.2, 2.05, 2.15, 2.3, 2.01]
    assert arithmetic.chance(low, high) < 0.01
    assert arithmetic.chance(low, [value + 0.001 for value in low]) > 0.3
