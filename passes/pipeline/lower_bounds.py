"""The least that all runs of layers can take on so many devices, from the least of each kind of block on each mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

SLACK = 1 + 1e-9
"""Sums in different orders differ by less: what is slower by more is slower."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Floors:
    """The floors of all runs of layers on so many devices [layers, layers + 1], when so many prices were `found`."""

    found: int
    seconds: Floats
    periods: Floats
    nbytes: Floats

    @classmethod
    def of(cls, sums: Floats, floors: Floats, known: NDArray[np.bool_], nbytes: Floats, found: int) -> Self:
        """From the seconds and periods of kinds of blocks on meshes [2, kinds, meshes], of which some are `known`.

        `sums` [layers + 1, kinds] counts the blocks before each layer, of which each holds `nbytes` [kinds]. Meshes do
        not count that are dearer than one on which all is known.
        """
        counts = np.maximum(sums - sums[:, None], 0.0)[:-1]
        some = (counts > 0).astype(np.float64)
        finite = np.isfinite(floors)
        totals = counts @ np.where(finite, floors, 0.0)[:, None]
        totals[some @ ~finite[:, None] > 0] = np.inf
        seconds, periods = totals
        best = np.where(some @ ~known > 0, np.inf, periods).min(axis=2, keepdims=True)
        chosen = np.where(periods <= best * SLACK, seconds, np.inf)
        return cls(found=found, seconds=chosen.min(axis=2), periods=periods.min(axis=2), nbytes=counts @ nbytes)
