"""Layers cut into stages as even in weight as can be, where nothing else is known of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from passes.errors import PlanningError, explain

_ROUNDING = 1e-9
"""The share by which equal sums of squares may differ: cuts that differ by less are equal, and the last is taken."""


def even(weights: Sequence[float], n_stages: int) -> tuple[tuple[int, int], ...]:
    """Ranges (first, last) of layers, `last` excluded, with the least possible largest sum of weights.

    Of those cuts, one with the least sum of squares. Raises PlanningError for more stages than layers.
    """
    n_layers = len(weights)
    check_stages(n_layers, [n_stages])
    sums = np.array([0.0, *accumulate(weights)])
    spans = np.where(np.tri(n_layers, n_layers + 1, dtype=bool), math.inf, sums - sums[:-1, None])
    nothing_left = np.where(np.arange(n_layers + 1) < n_layers, math.inf, 0.0)
    largest = nothing_left
    for _ in range(n_stages):
        largest = np.append(np.maximum(spans, largest).min(1), math.inf)
    squares = np.where(spans <= largest[0], spans**2, math.inf)
    sums_of_squares = [nothing_left]
    for _ in range(n_stages - 1):
        sums_of_squares.append(np.append((squares + sums_of_squares[-1]).min(1), math.inf))
    cuts = [0]
    for onward in reversed(sums_of_squares):
        scores = squares[cuts[-1]] + onward
        cuts.append(int(np.flatnonzero(scores <= scores.min() * (1 + _ROUNDING))[-1]))
    return tuple(pairwise(cuts))


def check_stages(n_layers: int, n_stages: Sequence[int]) -> tuple[int, ...]:
    """The numbers of stages, sorted and distinct. Raises PlanningError unless every stage gets a layer."""
    for number in n_stages or [0]:
        if not 1 <= number <= n_layers:
            rule = f"each needs a layer, and there are {n_layers}" if number > 0 else "a plan has at least 1 stage"
            remedy = f"ask for {n_layers} or fewer" if n_layers > 1 else "ask for 1"
            raise PlanningError(explain(f"n_stages={number}", rule, "", remedy))
    return tuple(sorted(set(n_stages)))
