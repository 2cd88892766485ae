"""Medians, spreads, and whether two series differ. Pure, standard library only."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: Shuffles of the permutation test: resolves probabilities down to about 0.0005.
PERMUTATIONS = 4_000


@dataclass(frozen=True)
class Spread:
    """What a list of measurements looks like."""

    median: float
    low: float
    high: float
    quartile_1: float
    quartile_3: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Median, extremes and quartiles; of at least one value."""
    ordered = sorted(values)
    quartiles = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else ordered * 3
    return Spread(
        statistics.median(ordered),
        ordered[0],
        ordered[-1],
        quartiles[0],
        quartiles[2],
        len(ordered),
    )


def rounded(values: Spread) -> dict[str, Any]:
    """For a JSON line."""
    return {name: round(value, 4) for name, value in asdict(values).items()}


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank; ``percent`` from 0 to 100."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]


def chance(first: Sequence[float], second: Sequence[float], seed: int = 0) -> float:
    """Probability that shuffled labels separate the ranks as far as the real ones do."""
    pool = [*first, *second]
    rank = {value: index for index, value in enumerate(sorted(pool))}
    ranks = [rank[value] for value in pool]
    observed = _imbalance(ranks, len(first))
    shuffle = random.Random(seed)
    hits = 0
    for _ in range(PERMUTATIONS):
        shuffle.shuffle(ranks)
        hits += _imbalance(ranks, len(first)) >= observed
    return (hits + 1) / (PERMUTATIONS + 1)


def _imbalance(ranks: Sequence[int], size: int) -> float:
    expected = sum(ranks) * size / len(ranks)
    return abs(sum(ranks[:size]) - expected)
