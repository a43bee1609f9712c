"""The costs of stages and boundaries as arrays, with bounds on the step time of any partition."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from passes.inter_op.choices import Candidate, Places, StageTable
from passes.inter_op.schedule_registry import SCHEDULES, Builder, build
from passes.inter_op.schedules import in_flight

Floats = NDArray[np.float64]


Entry = tuple[int, int, int]
"""A stage: the index of its submesh, its first layer, and the one after its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostArrays:
    """Costs of stages [choices, layers, layers + 1] and of boundaries [cuts, choices, choices, offsets]; infinite where
    there is none.

    In the words of `passes.inter_op.partitions`, `forward` is F of a stage, `chain` c, `busy` t and `finish` f;
    `onward` and `back` are the transfers at a boundary, and `there_and_back` their sum, h. `period` is busy + finish /
    microbatches. `max_in_flight` is the number of microbatches in flight that fit, below 1 where none does.
    """

    candidates: Mapping[Entry, Candidate]
    forward: Floats
    chain: Floats
    busy: Floats
    finish: Floats
    period: Floats
    max_in_flight: Floats
    onward: Floats
    back: Floats
    there_and_back: Floats


class BoundarySeconds(NamedTuple):
    """Seconds of the transfers at every cut, forward (`onward`) and backward (`back`).

    Both are [cuts, senders, receivers, offsets]: senders and receivers are submeshes by index, and the offset is where
    the sender's devices end. Those of stages that cannot stand there are infinite.
    """

    onward: Floats
    back: Floats


def tabulate(
    candidates: Mapping[Entry, Candidate | None],
    boundaries: BoundarySeconds,
    microbatches: int,
    *,
    split: bool,
    dispatch_seconds: float,
    memory_limit: float,
) -> CostArrays:
    """The candidates' costs as arrays, for schedules that `split` the backward or run it whole.

    A device has `memory_limit` bytes, and is busy for `dispatch_seconds` with each task beside its work.
    """
    usable = {entry: candidate for entry, candidate in candidates.items() if candidate and _can(candidate, split)}
    n_cuts, n_choices, *_ = boundaries.onward.shape
    shape = (n_choices, n_cuts - 1, n_cuts)
    forward, chain, weights, finish, base = (np.full(shape, math.inf) for _ in range(5))
    in_flight = np.zeros(shape)
    for entry, candidate in usable.items():
        halves = (candidate.input_gradient_seconds, candidate.weight_gradient_seconds) if split else (None, None)
        forward[entry] = candidate.forward_seconds
        chain[entry] = candidate.backward_seconds if halves[0] is None else halves[0]
        weights[entry] = 0.0 if halves[1] is None else halves[1] + dispatch_seconds
        finish[entry] = candidate.finish_seconds
        base[entry] = candidate.needed_nbytes(0)
        in_flight[entry] = candidate.in_flight_nbytes
    spare = memory_limit - np.where(np.isfinite(base), base, 0.0)
    max_in_flight = np.where(
        in_flight > 0, np.floor(spare / np.maximum(in_flight, 1)), np.where(spare >= 0, math.inf, -1.0)
    )
    max_in_flight[~np.isfinite(base)] = -1.0
    forward[max_in_flight < 1] = math.inf
    forward += dispatch_seconds
    chain += forward + dispatch_seconds
    busy = chain + weights
    return CostArrays(
        candidates=usable,
        forward=forward,
        chain=chain,
        busy=busy,
        finish=finish,
        period=busy + finish / microbatches,
        max_in_flight=max_in_flight,
        onward=boundaries.onward,
        back=boundaries.back,
        there_and_back=boundaries.onward + boundaries.back,
    )


def _can(candidate: Candidate, split: bool) -> bool:
    """Whether a candidate has the seconds of both halves of its backward, where it is to be `split`."""
    return not split or None not in (candidate.input_gradient_seconds, candidate.weight_gradient_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The costs and bounds of partitions in one number of microbatches, under schedules that all split the backward or
    all do not.

    `after_chain` and `after_forward` [choices, cuts, offsets] are the least that (2) and (3) can come to for the stages
    after a cut, given the choice before it, for any number of stages. `least_seconds` and `least_period` are those of a
    whole step.
    """

    microbatches: int
    schedules: tuple[str, ...]
    numbers: tuple[int, ...]
    costs: CostArrays
    after_chain: Floats
    after_forward: Floats
    least_seconds: float
    least_period: float

    @property
    def n_layers(self) -> int:
        return self.costs.chain.shape[1]

    def counts(self, schedule: str, n_stages: int) -> tuple[int, ...]:
        """The number of microbatches in flight on each stage [stages]."""
        return in_flight_counts(schedule, n_stages, self.microbatches)

    def schedule_groups(self, capacities: Floats) -> dict[tuple[float, ...], dict[int, list[str]]]:
        """Capacities -> number of stages -> schedules; one dynamic program serves all schedules of a group.

        Capacities are the microbatches in flight of a stage with 0, 1, ... stages after it, each rounded up to one of
        the given `capacities`, if there is one.
        """
        profiles: list[tuple[tuple[float, ...], str]] = []
        for n_stages in reversed(self.numbers):
            for name in self.schedules:
                counts = np.array(self.counts(name, n_stages)[::-1], dtype=float)
                index = np.searchsorted(capacities, counts)
                rounded = np.where(index < len(capacities), np.append(capacities, math.inf)[index], counts)
                profiles.append((tuple(rounded.tolist()), name))
        groups: dict[tuple[float, ...], dict[int, list[str]]] = {}
        for profile, name in profiles:
            longest = next((group for group in groups if group[: len(profile)] == profile), profile)
            groups.setdefault(longest, {}).setdefault(len(profile), []).append(name)
        return groups


def with_bounds(
    places: Places, costs: CostArrays, microbatches: int, schedules: tuple[str, ...], numbers: tuple[int, ...]
) -> Problem:
    """The problem of these costs, with its bounds."""
    work = microbatches * costs.busy + costs.finish
    still, level = np.zeros_like(costs.onward), np.where(np.isfinite(costs.chain), 0.0, math.inf)
    after_chain, first = _relax(microbatches * costs.chain, costs.chain, costs.there_and_back, places)
    after_forward, second = _relax(work, costs.forward, costs.onward, places)
    _, period = _relax(costs.period, level, still, places)
    return Problem(
        microbatches=microbatches,
        schedules=schedules,
        numbers=numbers,
        costs=costs,
        after_chain=after_chain,
        after_forward=after_forward,
        least_seconds=max(first, second),
        least_period=period,
    )


def entries(n_layers: int, places: Places, numbers: Sequence[int]) -> Iterator[Entry]:
    """The entries of the table that some partition into one of these `numbers` of stages may have."""
    smallest = min(choice.n_devices for choice in places.choices)
    most_stages, fewest_stages = max(numbers, default=0), min(numbers, default=0)
    for index, choice in enumerate(places.choices):
        other_stages = (places.n_devices - choice.n_devices) // smallest
        for first in range(n_layers):
            for last in range(first + 1, n_layers + 1):
                around = (first > 0) + (last < n_layers)
                if around < most_stages and around <= other_stages and n_layers - (last - first) >= fewest_stages - 1:
                    yield index, first, last


def boundary_seconds(n_layers: int, places: Places, table: StageTable, microbatches: int) -> BoundarySeconds:
    """Seconds of a microbatch's transfers at every cut, by the bytes that the table has for it."""
    shape = (n_layers + 1, len(places.choices), len(places.choices), len(places.final))
    onward, back = np.zeros(shape), np.zeros(shape)
    onward[1:n_layers] = back[1:n_layers] = math.inf
    nbytes = [table.boundary_nbytes(cut, microbatches) for cut in range(1, n_layers)]
    seconds = cache(table.transfer_seconds)
    for sender, receiver in np.ndindex(shape[1:3]):
        for senders, receivers, offsets in places.adjacent(sender, receiver):
            at = np.s_[1:n_layers, sender, receiver, offsets]
            onward[at] = np.array([seconds(senders, receivers, size) for size in nbytes])[:, None]
            back[at] = np.array([seconds(receivers, senders, size) for size in nbytes])[:, None]
    return BoundarySeconds(onward, back)


def _relax(local: Floats, latency: Floats, hops: Floats, places: Places) -> tuple[Floats, float]:
    """(least seconds after each cut [choices, cuts, offsets], least seconds of a whole step): lower bounds for any
    number of stages.

    The seconds of a partition are the greatest, over its stages, of the `latency` and `hops` before a stage plus its
    `local` cost.
    """
    n_choices, n_layers, _ = local.shape
    remaining = np.full((n_choices, n_layers + 1, len(places.final)), math.inf)
    remaining[:, n_layers, places.final] = 0.0
    total = remaining[:, 0].copy()
    for first in range(n_layers - 1, -1, -1):
        for choice, ends in enumerate(places.ends):
            stages = np.s_[choice, first, first + 1 :, None]
            onward = latency[stages] + remaining[choice, first + 1 :][:, ends]
            total[choice] = np.maximum(local[stages], onward).min(0)
        if first:
            remaining[:, first] = (hops[first] + total).min(1)
    return remaining, float(total[:, 0].min())


FORMULAS = frozenset(("gpipe", "1f1b", "eager-1f1b", "zero-bubble-h1"))
"""The schedules of which `in_flight_counts` has a formula."""


def in_flight_counts(schedule: str, n_stages: int, microbatches: int) -> tuple[int, ...]:
    """The number of microbatches in flight on each stage [stages], by a formula for the schedules of `FORMULAS`."""
    remaining = range(n_stages, 0, -1)
    match schedule:
        case "gpipe":
            return (microbatches,) * n_stages
        case "1f1b":
            return tuple(min(microbatches, n) for n in remaining)
        case "eager-1f1b":
            return tuple(min(microbatches, 2 * n - 1) for n in remaining)
        case "zero-bubble-h1":
            return (min(microbatches, n_stages),) * n_stages
        case _:
            return _counted(SCHEDULES.get(schedule), schedule, n_stages, microbatches)


@cache
def _counted(builder: Builder | None, schedule: str, n_stages: int, microbatches: int) -> tuple[int, ...]:
    """The counts of a schedule's tasks; `builder` is the function under that name, and part of the cache's key."""
    del builder
    return in_flight(build(schedule, n_stages, microbatches))
