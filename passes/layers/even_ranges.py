"""Consecutive layers divided into stages of weights as even as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from passes.errors import InternalError

_ROUNDING = 1e-9
"""The share by which equal sums of squares may differ: cuts that differ by less are equal, and the last is taken."""


def even_ranges(weights: Sequence[float], n_stages: int) -> tuple[tuple[int, int], ...]:
    """The range (first, last) of layers of each stage, `last` excluded, with the least possible largest sum of weights.

    Of those with that sum, they have the least sum of squares. There are at least as many layers as stages.
    """
    n_layers = len(weights)
    if not 1 <= n_stages <= n_layers:
        raise InternalError(f"{n_layers} layers cannot be divided into {n_stages} stages")
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
