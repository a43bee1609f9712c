"""The dynamic program over stages: the least sum (or largest value) of 1, 2, ... stages that end it all.

A state is the submesh of the first of these stages, its first layer, and the offset up to which devices are taken
before it. `frame` leaves out the states and stages that no partition within a budget can have: what must come before
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
    """The stages that begin with one layer, in order of their choices; each of `present` begins at one of `begins`."""

    choices: NDArray[np.intp]
    lasts: NDArray[np.intp]
    values: Floats
    present: NDArray[np.intp]
    begins: NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Values of stages [choices, layers, layers + 1], and the finite ones by first layer [layers]."""

    values: Floats
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, values: Floats) -> Self:
        return cls(values=values, rows=tuple(_row(part) for part in values.swapaxes(0, 1)))


def _row(values: Floats) -> Row:
    """The finite values [choices, layers + 1] of stages that begin with one layer."""
    choices, lasts = np.nonzero(np.isfinite(values))
    return _cut(choices, lasts, values[choices, lasts])


def _cut(choices: NDArray[np.intp], lasts: NDArray[np.intp], values: Floats) -> Row:
    """The row of stages in order of their choices."""
    begins = np.flatnonzero(np.concatenate(([True], choices[1:] != choices[:-1]))[: len(choices)])
    return Row(choices=choices, lasts=lasts, values=values, present=choices[begins], begins=begins)


def frame(values: Floats, hops: Floats, places: Places, budget: float) -> tuple[Floats, Floats]:
    """The values of stages that some partition whose sum is within the budget may have, and a ceiling.

    The ceiling [cuts, offsets] is what stages from there on may come to: what the budget leaves, -inf for nothing.
    """
    between = hops.min((1, 2, 3))
    before = _before(values, between, places)
    kept = np.full_like(values, math.inf)
    after = np.full_like(before, math.inf)
    after[-1, places.final] = 0.0
    onward = np.full((len(places.choices), *before.shape), math.inf)
    onward[:, -1] = after[-1][places.ends]
    for first, row in reversed(list(enumerate(Stages.of(values).rows))):
        if not len(row.lasts):
            continue
        scores = row.values[:, None] + onward[row.choices, row.lasts]
        within = ((scores + before[first]) <= budget).any(1) & np.isfinite(scores).any(1)
        kept[row.choices[within], first, row.lasts[within]] = row.values[within]
        after[first] = scores.min(0)
        onward[:, first] = (after[first] + between[first])[places.ends]
    possible = np.isfinite(before + after) & (before + after <= budget)
    return kept, np.subtract(budget, before, out=np.full_like(before, -math.inf), where=possible)


def with_each(paces: Floats, latencies: Floats, places: Places) -> Floats:
    """Seconds of a step below which no partition stays that has a stage [choices, layers, layers + 1].

    Of each stage the least `paces` of all microbatches and the least `latencies` of one: bound (2) of `passes.inter_op`
    without transfers, or (3).
    """
    none = np.zeros(paces.shape[2])
    sums, slowest = _before(latencies, none, places), _before(paces, none, places, np.maximum)
    after = np.full((len(places.choices), paces.shape[2], len(places.final)), math.inf)
    after[:, -1] = np.where(places.final, 0.0, math.inf)[places.ends]
    for first in range(paces.shape[1] - 1, 0, -1):
        latency = latencies[:, first, first + 1 :, None] + after[:, first + 1 :]
        onward = np.maximum(paces[:, first, first + 1 :, None], latency).min((0, 1))
        after[:, first] = onward[places.ends]
    bounds = np.full_like(paces, math.inf)
    for entry in zip(*(axis.tolist() for axis in np.nonzero(np.isfinite(paces))), strict=True):
        choice, first, last = entry
        onward = sums[first] + np.maximum(paces[entry], latencies[entry] + after[choice, last])
        bounds[entry] = np.maximum(slowest[first], onward).min()
    return bounds


def _before(values: Floats, between: Floats, places: Places, combine: np.ufunc = np.add) -> Floats:
    """The least sum of values of stages before each cut that end at an offset or earlier, and of what is between.

    Or their least other combination; infinite where no stages do [cuts, offsets].
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
    stages: Callable[[int], Stages], hops: Floats, places: Places, combine: np.ufunc, most: int, ceiling: Floats
) -> list[Floats]:
    """The least combination of the values of 1, 2, ... `most` stages that end it all [choices, cuts, offsets].

    `stages` are those that may have so many to come, themselves included. What is above the ceiling [cuts, offsets] is
    infinite; where all is, the list ends.
    """
    found: list[Floats] = []
    bands = [_band(limits > -math.inf) for limits in ceiling]
    onward = np.full((len(places.choices), *ceiling.shape), math.inf)
    onward[:, -1] = np.where(places.final, 0.0, math.inf)[places.ends]
    for level in range(1, most + 1):
        alive: NDArray[np.bool_] = onward.min((0, 2)) < math.inf
        least = np.full_like(onward, math.inf)
        for first, (row, band) in enumerate(zip(stages(level).rows, bands, strict=False)):
            near = alive[row.lasts]
            if band.start == band.stop or not near.any():
                continue
            if not near.all():
                row = _cut(row.choices[near], row.lasts[near], row.values[near])
            scores = combine(row.values[:, None], onward[row.choices, row.lasts, band])
            best = np.minimum.reduceat(scores, row.begins)
            least[row.present, first, band] = np.where(best <= ceiling[first, band], best, math.inf)
        if not np.isfinite(least).any():
            break
        found.append(least)
        onward = _onward(least, hops, places)
    return found


def _band(which: NDArray[np.bool_]) -> slice:
    """From the first to the last that holds."""
    holds = np.flatnonzero(which)
    return slice(int(holds[0]), int(holds[-1]) + 1) if len(holds) else slice(0, 0)


def _onward(level: Floats, hops: Floats, places: Places) -> Floats:
    """The least of a level and the hop to it after a stage [choices, cuts, offsets], by the offset of that stage."""
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
    stages: Callable[[int], Stages], hops: Floats, places: Places, combine: np.ufunc, found: Sequence[Floats]
) -> tuple[Entry, ...]:
    """The stages behind the least value of the last level."""
    choice, first, offset = int(found[-1][:, 0, 0].argmin()), 0, 0
    chosen: list[Entry] = []
    for level in range(len(found), 1, -1):
        offset = places.ends[choice, offset]
        after = found[level - 2][:, :, offset].T + hops[:, choice, :, offset]
        scores = combine(stages(level).values[choice, first][:, None], after)
        last, other = divmod(int(scores.argmin()), len(places.choices))
        chosen.append((choice, first, last))
        choice, first = other, last
    return (*chosen, (choice, first, found[0].shape[1] - 1))
