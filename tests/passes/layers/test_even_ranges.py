"""Layers divided into stages of even weights, compared with every other way."""

from __future__ import annotations

import itertools
import random

import pytest

from passes.errors import InternalError
from passes.layers.even_ranges import even_ranges


@pytest.mark.parametrize("seed", range(50))
def test_no_other_ranges_have_a_lighter_heaviest_one(seed: int) -> None:
    r = random.Random(seed)
    weights = [r.choice([0.0, 1.0, r.random()]) for _ in range(r.randint(1, 9))]
    n_stages = r.randint(1, len(weights))
    ranges = even_ranges(weights, n_stages)
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]
    assert ranges[-1][1] == len(weights)
    assert all(first < last for first, last in ranges)

    def largest(cuts: tuple[int, ...]) -> float:
        return max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, len(weights))))

    best = min(map(largest, itertools.combinations(range(1, len(weights)), n_stages - 1)))
    assert max(sum(weights[first:last]) for first, last in ranges) == pytest.approx(best)


def test_earlier_ranges_have_the_remainder_and_none_is_empty() -> None:
    assert even_ranges([1] * 10, 4) == ((0, 3), (3, 6), (6, 8), (8, 10))
    assert even_ranges([1] * 8, 4) == ((0, 2), (2, 4), (4, 6), (6, 8))
    with pytest.raises(InternalError, match="2 layers cannot be divided into 3 stages"):
        even_ranges([1, 1], 3)
