"""The dynamic program over stages: the least sum (or maximum) over 1, 2, ... stages that end with the last layer.

A state is the submesh of the first of these stages, its first layer, and the offset up to which devices are taken
before it. `prune` leaves out the states and stages that no partition within a budget can have: what must come before
a state, and after a stage, is bounded by the same recursion for any number of stages.

Reference: Zheng et al., Alpa (2201.12023), section 5, equations 2 to 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from passes.inter_op.choices import Places
from passes.inter_op.costs import Entry, Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The stages that begin with one layer, sorted by choice: the choice of each, the layer after its last, and its
    value.

    `present` are the choices that occur, and the stages of `present[i]` stand from `begins[i]` on.
    """

    choices: NDArray[np.intp]
    lasts: NDArray[np.intp]
    values: Floats
    present: NDArray[np.intp]
    begins: NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Values of stages [choices, layers, layers + 1], with the finite ones by first layer in `rows` [layers]."""

    values: Floats
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, values: Floats) -> Self:
        """The stages of an array of values; infinite values are no stages."""
        return cls(values=values, rows=tuple(_row(part) for part in values.swapaxes(0, 1)))


def _row(values: Floats) -> Row:
    """The row of stages that begin with one layer, from their values [choices, layers + 1]."""
    choices, lasts = np.nonzero(np.isfinite(values))
    return _cut(choices, lasts, values[choices, lasts])


def _cut(choices: NDArray[np.intp], lasts: NDArray[np.intp], values: Floats) -> Row:
    """The row of these stages of a row, which are in order of their choices."""
    begins = np.flatnonzero(np.concatenate(([True], choices[1:] != choices[:-1]))[: len(choices)])
    return Row(choices=choices, lasts=lasts, values=values, present=choices[begins], begins=begins)


def prune(values: Floats, hops: Floats, places: Places, budget: float) -> tuple[Floats, Floats]:
    """The values of stages that some partition within the budget may have, and a ceiling [cuts, offsets].

    The ceiling is the most that the stages after a cut may come to: what the budget leaves, or -inf where it leaves
    nothing.
    """
    between = hops.min((1, 2, 3))
    before_cut = _before(values, between, places)
    usable = np.full_like(values, math.inf)
    after_cut = np.full_like(before_cut, math.inf)
    after_cut[-1, places.final] = 0.0
    onward = np.full((len(places.choices), *before_cut.shape), math.inf)
    onward[:, -1] = after_cut[-1][places.ends]
    for first, row in reversed(list(enumerate(Stages.of(values).rows))):
        if not len(row.lasts):
            continue
        scores = row.values[:, None] + onward[row.choices, row.lasts]
        affordable = ((scores + before_cut[first]) <= budget).any(1) & np.isfinite(scores).any(1)
        usable[row.choices[affordable], first, row.lasts[affordable]] = row.values[affordable]
        after_cut[first] = scores.min(0)
        onward[:, first] = (after_cut[first] + between[first])[places.ends]
    possible = np.isfinite(before_cut + after_cut) & (before_cut + after_cut <= budget)
    return usable, np.subtract(budget, before_cut, out=np.full_like(before_cut, -math.inf), where=possible)


def bounds_with(periods: Floats, latencies: Floats, places: Places) -> Floats:
    """A lower bound in seconds on every partition that has a given stage [choices, layers, layers + 1].

    `periods` are the least seconds of all microbatches on each stage, `latencies` those of one microbatch: bound (2) of
    `passes.inter_op.partitions` without transfers, or bound (3).
    """
    none = np.zeros(periods.shape[2])
    sums, slowest = _before(latencies, none, places), _before(periods, none, places, np.maximum)
    remaining = np.full((len(places.choices), periods.shape[2], len(places.final)), math.inf)
    remaining[:, -1] = np.where(places.final, 0.0, math.inf)[places.ends]
    for first in range(periods.shape[1] - 1, 0, -1):
        latency = latencies[:, first, first + 1 :, None] + remaining[:, first + 1 :]
        onward = np.maximum(periods[:, first, first + 1 :, None], latency).min((0, 1))
        remaining[:, first] = onward[places.ends]
    bounds = np.full_like(periods, math.inf)
    for choice, first in np.argwhere(np.isfinite(periods).any(2)).tolist():
        lasts = np.flatnonzero(np.isfinite(periods[choice, first]))
        stages = np.s_[choice, first, lasts, None]
        onward = sums[first] + np.maximum(periods[stages], latencies[stages] + remaining[choice, lasts])
        bounds[choice, first, lasts] = np.maximum(slowest[first], onward).min(1)
    return bounds


def _before(values: Floats, between: Floats, places: Places, combine: np.ufunc = np.add) -> Floats:
    """The least sum, or other combination, of the stages before each cut and the `between` of each cut [cuts, offsets].

    Those stages end at the offset or earlier; where there are none, it is infinite.
    """
    n_layers, outside = values.shape[1], len(places.final) - 1
    earliest = np.minimum.accumulate(places.ends[:, ::-1], axis=1)[:, ::-1]
    offsets = np.arange(outside + 1)
    starts = np.stack([np.searchsorted(ends, offsets, side="right") - 1 for ends in earliest])
    sums = np.full((n_layers + 1, outside + 1), math.inf)
    moved = np.full((len(places.choices), *sums.shape), math.inf)
    sums[0, :outside] = 0.0
    for cut in range(n_layers + 1):
        if cut:
            choices, firsts = np.nonzero(np.isfinite(values[:, :cut, cut]))
            if len(firsts):
                sums[cut] = combine(values[choices, firsts, cut][:, None], moved[choices, firsts]).min(0) + between[cut]
                sums[cut, outside] = math.inf
        moved[:, cut] = np.where(starts < 0, math.inf, sums[cut][starts])
    return sums


def levels(
    stages: Callable[[int], Stages], hops: Floats, places: Places, combine: np.ufunc, most_stages: int, ceiling: Floats
) -> list[Floats]:
    """The tables of the dynamic program [choices, cuts, offsets]: the least combination of values of the last stages.

    There is one table for 1, 2, ... `most_stages` last stages. `stages(n)` are those that may be the first of the last
    n. Values above the ceiling [cuts, offsets] are infinite; where all are, the list ends.
    """
    tables: list[Floats] = []
    bands = [_band(limits > -math.inf) for limits in ceiling]
    onward = np.full((len(places.choices), *ceiling.shape), math.inf)
    onward[:, -1] = np.where(places.final, 0.0, math.inf)[places.ends]
    for level in range(1, most_stages + 1):
        alive: NDArray[np.bool_] = onward.min((0, 2)) < math.inf
        table = np.full_like(onward, math.inf)
        for first, (row, band) in enumerate(zip(stages(level).rows, bands, strict=False)):
            feasible = alive[row.lasts]
            if band.start == band.stop or not feasible.any():
                continue
            if not feasible.all():
                row = _cut(row.choices[feasible], row.lasts[feasible], row.values[feasible])
            scores = combine(row.values[:, None], onward[row.choices, row.lasts, band])
            best = np.minimum.reduceat(scores, row.begins)
            table[row.present, first, band] = np.where(best <= ceiling[first, band], best, math.inf)
        if not np.isfinite(table).any():
            break
        tables.append(table)
        onward = _onward(table, hops, places)
    return tables


def _band(flags: NDArray[np.bool_]) -> slice:
    """The range [first, last) that spans all true flags."""
    holds = np.flatnonzero(flags)
    return slice(int(holds[0]), int(holds[-1]) + 1) if len(holds) else slice(0, 0)


def _onward(level: Floats, hops: Floats, places: Places) -> Floats:
    """The least of a table and the hop into it, after a stage of each choice [choices, cuts, offsets]."""
    onward = np.full_like(level, math.inf)
    reached: NDArray[np.bool_] = level.min(2) < math.inf
    offsets: NDArray[np.bool_] = level.min(0) < math.inf
    index = np.arange(len(level))[:, None]
    for cut in np.flatnonzero(reached.any(0)).tolist():
        some, band = np.flatnonzero(reached[:, cut]), _band(offsets[cut])
        ends = np.full(level.shape[::2], math.inf)
        ends[:, band] = (hops[cut][:, some, band] + level[None, some, cut, band]).min(1)
        onward[:, cut] = ends[index, places.ends]
    return onward


def trace(
    stages: Callable[[int], Stages], hops: Floats, places: Places, combine: np.ufunc, tables: Sequence[Floats]
) -> tuple[Entry, ...]:
    """The stages that attain the least value of the last table."""
    choice, first, offset = int(tables[-1][:, 0, 0].argmin()), 0, 0
    chosen: list[Entry] = []
    for level in range(len(tables), 1, -1):
        offset = places.ends[choice, offset]
        following = tables[level - 2][:, :, offset].T + hops[:, choice, :, offset]
        scores = combine(stages(level).values[choice, first][:, None], following)
        last, next_choice = divmod(int(scores.argmin()), len(places.choices))
        chosen.append((choice, first, last))
        choice, first = next_choice, last
    return (*chosen, (choice, first, tables[0].shape[1] - 1))
