"""Costs of stages and boundaries as arrays, with bounds on what any partition into stages takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from passes.inter_op.choices import Candidate, Places, StageTable
from passes.inter_op.schedule_table import build
from passes.inter_op.schedules import in_flight

Floats = NDArray[np.float64]


Entry = tuple[int, int, int]
"""A stage: the index of its submesh, its first layer, and the one after its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Stages [choices, layers, layers + 1] and boundaries [cuts, choices, choices, offsets] as arrays; infinite: none.

    `pace` is busy + finish / microbatches. `room` is the most microbatches in flight that fit, below 1 for none; `base`
    and `each` are the bytes without them and of each, also where they do not fit.
    """

    candidates: Mapping[Entry, Candidate]
    forward: Floats
    chain: Floats
    busy: Floats
    finish: Floats
    pace: Floats
    room: Floats
    base: Floats
    each: Floats
    onward: Floats
    back: Floats
    there_and_back: Floats


def tabulate(
    n_layers: int,
    places: Places,
    candidates: Mapping[Entry, Candidate | None],
    hops: tuple[Floats, Floats],
    microbatches: int,
    split: bool,
    dispatch_seconds: float,
    memory_limit: float,
) -> Costs:
    """The candidates as arrays, with the backward whole or split."""
    found = {entry: candidate for entry, candidate in candidates.items() if candidate and _can(candidate, split)}
    shape = (len(places.choices), n_layers, n_layers + 1)
    forward, chain, weights, finish, base = (np.full(shape, math.inf) for _ in range(5))
    each = np.zeros(shape)
    for entry, candidate in found.items():
        halves = (candidate.input_gradient_seconds, candidate.weight_gradient_seconds) if split else (None, None)
        forward[entry] = candidate.forward_seconds
        chain[entry] = candidate.backward_seconds if halves[0] is None else halves[0]
        weights[entry] = 0.0 if halves[1] is None else halves[1] + dispatch_seconds
        finish[entry] = candidate.finish_seconds
        base[entry] = candidate.needed_nbytes(0)
        each[entry] = candidate.in_flight_nbytes
    spare = memory_limit - np.where(np.isfinite(base), base, 0.0)
    room = np.where(each > 0, np.floor(spare / np.maximum(each, 1)), np.where(spare >= 0, math.inf, -1.0))
    room[~np.isfinite(base)] = -1.0
    forward[room < 1] = math.inf
    forward += dispatch_seconds
    chain += forward + dispatch_seconds
    busy = chain + weights
    return Costs(
        candidates=found,
        forward=forward,
        chain=chain,
        busy=busy,
        finish=finish,
        pace=busy + finish / microbatches,
        room=room,
        base=base,
        each=each,
        onward=hops[0],
        back=hops[1],
        there_and_back=hops[0] + hops[1],
    )


def _can(candidate: Candidate, split: bool) -> bool:
    """Whether there are costs for the backward."""
    return not split or None not in (candidate.input_gradient_seconds, candidate.weight_gradient_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Schedules that read stages alike (all split the backward, or none), one number of microbatches.

    `after_chain` and `after_forward` [choices, cuts, offsets] are least (2) and (3) of what comes after a stage of that
    choice before a cut, for any number of stages; `least_seconds` and `least_pace`, of everything.
    """

    microbatches: int
    schedules: tuple[str, ...]
    numbers: tuple[int, ...]
    costs: Costs
    after_chain: Floats
    after_forward: Floats
    least_seconds: float
    least_pace: float

    @property
    def n_layers(self) -> int:
        return self.costs.chain.shape[1]

    def counts(self, schedule: str, n_stages: int) -> tuple[int, ...]:
        """Microbatches in flight on each stage."""
        return live(schedule, n_stages, self.microbatches)

    def families(self, rooms: Floats) -> dict[tuple[float, ...], dict[int, list[str]]]:
        """Schedules by number of stages, together where one program serves them: by the room that a stage needs.

        The room is that of a stage with none to come, one to come, ..., rounded up to one of `rooms`, if there is one.
        """
        profiles: list[tuple[tuple[float, ...], str]] = []
        for n_stages in reversed(self.numbers):
            for name in self.schedules:
                counts = np.array(self.counts(name, n_stages)[::-1], dtype=float)
                index = np.searchsorted(rooms, counts)
                rounded = np.where(index < len(rooms), np.append(rooms, math.inf)[index], counts)
                profiles.append((tuple(rounded.tolist()), name))
        families: dict[tuple[float, ...], dict[int, list[str]]] = {}
        for profile, name in profiles:
            longest = next((known for known in families if known[: len(profile)] == profile), profile)
            families.setdefault(longest, {}).setdefault(len(profile), []).append(name)
        return families


def pose(
    places: Places, costs: Costs, microbatches: int, schedules: tuple[str, ...], numbers: tuple[int, ...]
) -> Problem:
    """The problem with its bounds."""
    work = microbatches * costs.busy + costs.finish
    still, level = np.zeros_like(costs.onward), np.where(np.isfinite(costs.chain), 0.0, math.inf)
    after_chain, first = _relax(microbatches * costs.chain, costs.chain, costs.there_and_back, places)
    after_forward, second = _relax(work, costs.forward, costs.onward, places)
    _, pace = _relax(costs.pace, level, still, places)
    return Problem(
        microbatches=microbatches,
        schedules=schedules,
        numbers=numbers,
        costs=costs,
        after_chain=after_chain,
        after_forward=after_forward,
        least_seconds=max(first, second),
        least_pace=pace,
    )


def entries(n_layers: int, places: Places, numbers: Sequence[int]) -> Iterator[Entry]:
    """The entries of the table that a partition into one of these `numbers` of stages may use."""
    smallest = min(choice.n_devices for choice in places.choices)
    most, fewest = max(numbers, default=0), min(numbers, default=0)
    for index, choice in enumerate(places.choices):
        others = (places.n_devices - choice.n_devices) // smallest
        for first in range(n_layers):
            for last in range(first + 1, n_layers + 1):
                around = (first > 0) + (last < n_layers)
                if around < most and around <= others and n_layers - (last - first) >= fewest - 1:
                    yield index, first, last


def boundaries(n_layers: int, places: Places, table: StageTable, microbatches: int) -> tuple[Floats, Floats]:
    """Seconds of the transfers at each cut [cuts, senders, receivers, offsets]: onward, and back.

    The offset is where the sender ends; those of stages that cannot stand there are infinite.
    """
    shape = (n_layers + 1, len(places.choices), len(places.choices), len(places.final))
    onward, back = np.zeros(shape), np.zeros(shape)
    onward[1:n_layers] = back[1:n_layers] = math.inf
    nbytes = [table.boundary_nbytes(cut, microbatches) for cut in range(1, n_layers)]
    seconds = cache(table.transfer_seconds)
    for sender, receiver in np.ndindex(shape[1:3]):
        for here, there, offsets in places.side_by_side(sender, receiver):
            at = np.s_[1:n_layers, sender, receiver, offsets]
            onward[at] = np.array([seconds(here, there, each) for each in nbytes])[:, None]
            back[at] = np.array([seconds(there, here, each) for each in nbytes])[:, None]
    return onward, back


def _relax(local: Floats, latency: Floats, hops: Floats, places: Places) -> tuple[Floats, float]:
    """Least max over stages of (latencies and hops before it, + local), any number of stages: after a cut, and at all.

    After a cut: from the end of a stage of that choice before it [choices, cuts, offsets].
    """
    n_choices, n_layers, _ = local.shape
    after = np.full((n_choices, n_layers + 1, len(places.final)), math.inf)
    after[:, n_layers, places.final] = 0.0
    whole = after[:, 0].copy()
    for first in range(n_layers - 1, -1, -1):
        for choice, ends in enumerate(places.ends):
            stages = np.s_[choice, first, first + 1 :, None]
            onward = latency[stages] + after[choice, first + 1 :][:, ends]
            whole[choice] = np.maximum(local[stages], onward).min(0)
        if first:
            after[:, first] = (hops[first] + whole).min(1)
    return after, float(whole[:, 0].min())


@cache
def live(schedule: str, n_stages: int, microbatches: int) -> tuple[int, ...]:
    """Microbatches in flight on each stage, from the formulas of `passes.inter_op.schedules` where there is one."""
    left = range(n_stages, 0, -1)
    match schedule:
        case "gpipe":
            return (microbatches,) * n_stages
        case "1f1b":
            return tuple(min(microbatches, n) for n in left)
        case "eager-1f1b":
            return tuple(min(microbatches, 2 * n - 1) for n in left)
        case "zero-bubble-h1":
            return (min(microbatches, n_stages),) * n_stages
        case _:
            return in_flight(build(schedule, n_stages, microbatches))
