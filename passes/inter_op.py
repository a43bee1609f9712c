"""The inter-operator search: layers x submeshes -> stages, as a pure function of a table of stage costs.

Stages are consecutive layers on consecutive devices: a submesh never straddles two hosts unless it is made of whole
ones. With p stages, m microbatches, and for stage i the chain seconds c_i (forward, and the backward that the stage
before waits for), the busy seconds t_i >= c_i of a microbatch, the finish seconds f_i and the transfers h_i (there and
back) to the next one, a step takes about

    sum of (c_i + h_i) + (m - 1) pace,    pace = max of (t_i + f_i / m)                                   (1)

and, whatever the schedule, at least (with forward seconds F_i and onward transfers x_i)

    max over i of  sum over j < i of (c_j + h_j) + m c_i + f_0                                            (2)
    max over i of  sum over j < i of (F_j + x_j) + m t_i + f_i                                            (3)

1. `_levels` minimises the sum in (1) for one pace and every number of stages, over the states (stages left, layer,
   devices left, submesh); `_sweep` does so for paces a factor 1 + epsilon apart, and ends where m paces reach the best.
2. Every partition found is simulated, unless a bound shows that it is no better: the simulator is the judge, so the
   answer is never slower in it than any partition compared, one stage on all devices among them.
3. `_prove` goes best first through all partitions in the order of (2) and (3): the answer is optimal where it comes to
   the end, and otherwise the least bound left is given. The judge and (1) differ where transfers or unequal stages
   make 1F1B wait, or let it fill its bubbles; this search covers what the dynamic program cannot see.

Reference: Zheng et al., Alpa (2201.12023), section 5, equations 2 to 4.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from passes import quantities
from passes.cluster import Cluster
from passes.errors import InternalError, PlanningError, explain
from passes.quantities import count
from passes.schedules import build, in_flight
from passes.simulate import StageCost, Timeline, Transfer, simulate

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

STEP = 1.1
"""Paces that share a lower bound of the step are so far apart."""

CLOSE = 1 - 1e-12
"""What is within this factor of the best is no better: bounds and simulations add in different orders."""

SLACK = 1.03
"""Partial solutions are dropped whose step by (1) is longer than the best simulated one by this factor."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Submesh:
    """A shape of consecutive devices: part of one host, or whole hosts."""

    hosts: int
    devices_per_host: int

    @property
    def n_devices(self) -> int:
        return self.hosts * self.devices_per_host

    def __str__(self) -> str:
        return f"{self.hosts}x{self.devices_per_host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What one stage would cost: seconds of a microbatch, and of the end of a step; bytes of one device.

    The halves of the backward are for schedules that split it. `transient_nbytes` are needed while a task runs; `key`
    is the caller's, and comes back untouched.
    """

    forward_seconds: float
    backward_seconds: float
    input_gradient_seconds: float | None = None
    weight_gradient_seconds: float | None = None
    finish_seconds: float = 0.0
    persistent_nbytes: int = 0
    in_flight_nbytes: int = 0
    transient_nbytes: int = 0
    key: object = None

    def needed_nbytes(self, microbatches: int) -> int:
        """Bytes with that many microbatches in flight."""
        return self.persistent_nbytes + self.transient_nbytes + microbatches * self.in_flight_nbytes

    def cost(self) -> StageCost:
        """The candidate as the simulator takes it; transient bytes count as persistent."""
        return StageCost(
            forward_seconds=self.forward_seconds,
            backward_seconds=self.backward_seconds,
            input_gradient_seconds=self.input_gradient_seconds,
            weight_gradient_seconds=self.weight_gradient_seconds,
            finish_seconds=self.finish_seconds,
            in_flight_nbytes=self.in_flight_nbytes,
            persistent_nbytes=self.persistent_nbytes + self.transient_nbytes,
        )


class StageTable(Protocol):
    """What stages and the boundaries between them cost; asked at most once for each entry, when it is needed."""

    def candidate(self, first: int, last: int, submesh: Submesh, microbatches: int) -> Candidate | None:
        """The stage of layers first..last (`last` excluded) on a submesh; None if it cannot be had."""
        ...

    def boundary_nbytes(self, cut: int, microbatches: int) -> int:
        """Bytes of one microbatch from layer cut - 1 to layer cut; their gradients are as many."""
        ...

    def transfer_seconds(self, sender: Submesh, receiver: Submesh, nbytes: int) -> float:
        """Seconds of so many bytes from one submesh to another."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """Layers first..last (`last` excluded) on the submesh that starts at `first_device`."""

    first: int
    last: int
    submesh: Submesh
    first_device: int
    candidate: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What a search did: entries asked of the table, dynamic programs, simulations, partial partitions looked at."""

    asked: int
    programs: int
    simulated: int
    expanded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stages in order, how they are scheduled, and the simulated step; no other takes less than `bound` seconds."""

    stages: tuple[StageChoice, ...]
    schedule: str
    microbatches: int
    timeline: Timeline
    bound: float
    statistics: Statistics

    @property
    def seconds(self) -> float:
        return self.timeline.seconds

    @property
    def gap(self) -> float:
        """(seconds - bound) / seconds: 0 is proven optimal."""
        return (self.seconds - self.bound) / self.seconds if self.seconds else 0.0


def submeshes(cluster: Cluster, *, every: bool | None = None) -> tuple[Submesh, ...]:
    """The shapes that stages may have, smallest first: parts of a host, then whole hosts.

    Sizes are `every` one, or divisors and powers of two; by default, every one up to 8. More hosts than 64 are not
    cut below one host. Raises ClusterError for a cluster of several kinds of hosts.
    """
    group = cluster.group()
    parts = _sizes(group.devices_per_host, every) if group.hosts <= 64 else (group.devices_per_host,)
    within = (Submesh(hosts=1, devices_per_host=size) for size in parts)
    across = (Submesh(hosts=n, devices_per_host=group.devices_per_host) for n in _sizes(group.hosts, every) if n > 1)
    return (*within, *across)


def _sizes(whole: int, every: bool | None) -> tuple[int, ...]:
    if every or (every is None and whole <= 8):
        return tuple(range(1, whole + 1))
    return tuple(n for n in range(1, whole + 1) if whole % n == 0 or n & (n - 1) == 0)


def even(weights: Sequence[float], n_stages: int) -> tuple[tuple[int, int], ...]:
    """Layers cut into ranges (first, last), `last` excluded, with the least possible largest sum of weights.

    Of those cuts, one with the least sum of squares. Raises PlanningError for more stages than layers.
    """
    n_layers = len(weights)
    _check_stages(n_layers, [n_stages])
    sums = np.array([0.0, *accumulate(weights)])
    spans = np.where(np.tri(n_layers, n_layers + 1, dtype=bool), math.inf, sums - sums[:-1, None])
    levels = [np.where(np.arange(n_layers + 1) < n_layers, math.inf, 0.0)]
    for _ in range(n_stages):
        levels.append(np.append(np.maximum(spans, levels[-1]).min(1), math.inf))
    squares = np.where(spans <= levels[-1][0], spans**2, math.inf)
    levels = levels[:1]
    for _ in range(n_stages):
        levels.append(np.append((squares + levels[-1]).min(1), math.inf))
    cuts = [0]
    for onward in levels[-2::-1]:
        scores = squares[cuts[-1]] + onward
        cuts.append(int(np.flatnonzero(scores <= scores.min() * (1 + 1e-9))[-1]))
    return tuple(pairwise(cuts))


def partition(
    n_layers: int,
    whole: Submesh,
    choices: Sequence[Submesh],
    table: StageTable,
    *,
    schedules: Sequence[str] = ("gpipe", "1f1b"),
    microbatches: Sequence[int] = (1,),
    memory_limit: float = math.inf,
    dispatch_seconds: float = 0.0,
    n_stages: Sequence[int] | None = None,
    idle: bool = True,
    epsilon: float = 0.02,
    proof: int = 2000,
) -> Partition:
    """The stages, schedule and number of microbatches whose simulated step is the shortest.

    Stages take devices of `whole`, which starts a host, in shapes of `choices`; some may stay `idle`. `n_stages` are
    the numbers of stages allowed, by default all. `memory_limit` is in bytes of one device. `proof` is the most
    partial partitions that the last part of the search extends. Schedules with several stages on a device group are
    not searched. Raises PlanningError for numbers that make no sense, and where no partition fits in memory.
    """
    numbers = _check(n_layers, n_stages, microbatches, schedules)
    places = _places(whole, choices, idle)
    numbers = tuple(p for p in numbers if p <= places.n_slots)
    splits = {name: any(task.kind == "weight_gradient" for task in build(name, 1, 1).groups[0]) for name in schedules}
    judge = _Judge(places=places, dispatch_seconds=dispatch_seconds)
    problems: list[_Problem] = []
    for m in dict.fromkeys(microbatches):
        candidates = dict(_ask(n_layers, places, table, m, numbers))
        hops = _hops(n_layers, places.choices, table, m)
        judge.asked += len(candidates)
        for split in dict.fromkeys(splits.values()):
            costs = _costs(n_layers, places, candidates, hops, m, split, dispatch_seconds, memory_limit)
            names = tuple(name for name in splits if splits[name] == split)
            problems.append(_problem(places, costs, m, names, numbers))
    problems.sort(key=lambda problem: problem.least_seconds)
    for problem in problems:
        _alone(problem, judge)
    for problem in problems:
        _sweep(problem, judge, epsilon)
    bound = _prove(problems, judge, proof)
    if judge.best is None:
        raise _unfit(problems, places, memory_limit)
    return judge.answer(bound)


def _check(
    n_layers: int, n_stages: Sequence[int] | None, microbatches: Sequence[int], schedules: Sequence[str]
) -> tuple[int, ...]:
    """The numbers of stages to try. Raises PlanningError for numbers that make no sense, and chunked schedules."""
    for m in microbatches or [0]:
        if m < 1:
            what = f"microbatches={m}" if microbatches else "microbatches=()"
            raise PlanningError(explain(what, "a step has at least 1 microbatch", "", "give numbers from 1"))
    if not schedules:
        raise PlanningError(explain("schedules=()", "stages need a schedule", "", "name one, such as '1f1b'"))
    for name in schedules:
        if build(name, 2, 2).name != name:
            rule = "puts several stages on a device group, and the search gives each its own"
            raise PlanningError(explain(f"schedule {name!r}", rule, "", "try '1f1b', or plan it by hand"))
    return _check_stages(n_layers, range(1, n_layers + 1) if n_stages is None else n_stages)


def _check_stages(n_layers: int, n_stages: Sequence[int]) -> tuple[int, ...]:
    """The numbers of stages in order. Raises PlanningError unless every stage gets a layer."""
    for number in n_stages or [0]:
        if not 1 <= number <= n_layers:
            rule = f"each needs a layer, and there are {n_layers}" if number > 0 else "a plan has at least 1 stage"
            remedy = f"ask for {n_layers} or fewer" if n_layers > 1 else "ask for 1"
            raise PlanningError(explain(f"n_stages={number}", rule, "", remedy))
    return tuple(sorted(set(n_stages)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Where stages may stand; an offset counts free devices from the front, in units that all sizes share.

    `starts` and `ends` [choices, offsets] are those of a stage placed at an offset; the last offset is past the end.
    `final` [offsets] says where the last stage may end.
    """

    choices: tuple[Submesh, ...]
    n_devices: int
    unit: int
    starts: Integers
    ends: Integers
    final: NDArray[np.bool_]

    @property
    def n_slots(self) -> int:
        return len(self.final) - 2


def _places(whole: Submesh, choices: Sequence[Submesh], idle: bool) -> _Places:
    """The places of `choices` in `whole`, each as far in front as it can stand."""
    host = whole.devices_per_host
    for choice in choices:
        if choice.devices_per_host > host or (choice.hosts > 1 and choice.devices_per_host < host):
            rule = "is neither part of a host nor whole hosts"
            raise PlanningError(explain(f"submesh {choice}", rule, f"hosts have {host} devices", "leave it out"))
    kept = tuple(sorted({choice for choice in choices if choice.hosts <= whole.hosts}))
    if not kept:
        raise PlanningError(explain("choices", "no submesh that stages may have", "", "take those of `submeshes`"))
    unit = math.gcd(host, *(choice.n_devices for choice in kept))
    outside = whole.n_devices // unit + 1
    starts = np.full((len(kept), outside + 1), outside)
    ends = starts.copy()
    for index, choice in enumerate(kept):
        for offset in range(outside):
            used = offset * unit % host
            skipped = (host - used) // unit if used + min(choice.n_devices, host) > host else 0
            end = offset + skipped + choice.n_devices // unit
            if end < outside and (idle or not skipped):
                starts[index, offset], ends[index, offset] = offset + skipped, end
    final = np.arange(outside + 1) < outside if idle else np.arange(outside + 1) == outside - 1
    return _Places(choices=kept, n_devices=whole.n_devices, unit=unit, starts=starts, ends=ends, final=final)


Entry = tuple[int, int, int]
"""A stage: the index of its submesh, its first layer, and the one after its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """Stages [choices, layers, layers + 1] and boundaries [cuts, choices, choices] as arrays; infinite: none.

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
    there_and_back: Floats


def _costs(
    n_layers: int,
    places: _Places,
    candidates: Mapping[Entry, Candidate | None],
    hops: tuple[Floats, Floats],
    microbatches: int,
    split: bool,
    dispatch_seconds: float,
    memory_limit: float,
) -> _Costs:
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
    return _Costs(
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
        there_and_back=hops[1],
    )


def _can(candidate: Candidate, split: bool) -> bool:
    """Whether there are costs for the backward."""
    return not split or None not in (candidate.input_gradient_seconds, candidate.weight_gradient_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """Schedules that read stages alike (all split the backward, or none), one number of microbatches.

    `after_chain` and `after_forward` [choices, cuts, offsets] are least (2) and (3) of what comes after a stage of that
    choice before a cut, for any number of stages; `least_seconds` and `least_pace`, of everything.
    """

    microbatches: int
    schedules: tuple[str, ...]
    numbers: tuple[int, ...]
    costs: _Costs
    after_chain: Floats
    after_forward: Floats
    least_seconds: float
    least_pace: float

    @property
    def n_layers(self) -> int:
        return self.costs.chain.shape[1]

    def counts(self, schedule: str, n_stages: int) -> tuple[int, ...]:
        """Microbatches in flight on each stage."""
        return _live(schedule, n_stages, self.microbatches)

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


def _problem(
    places: _Places, costs: _Costs, microbatches: int, schedules: tuple[str, ...], numbers: tuple[int, ...]
) -> _Problem:
    """The problem with its bounds."""
    work = microbatches * costs.busy + costs.finish
    still, level = 0 * costs.onward, np.where(np.isfinite(costs.chain), 0.0, math.inf)
    after_chain, first = _relax(microbatches * costs.chain, costs.chain, costs.there_and_back, places)
    after_forward, second = _relax(work, costs.forward, costs.onward, places)
    _, pace = _relax(costs.pace, level, still, places)
    return _Problem(
        microbatches=microbatches,
        schedules=schedules,
        numbers=numbers,
        costs=costs,
        after_chain=after_chain,
        after_forward=after_forward,
        least_seconds=max(first, second),
        least_pace=pace,
    )


def _ask(
    n_layers: int, places: _Places, table: StageTable, microbatches: int, numbers: Sequence[int]
) -> Iterator[tuple[Entry, Candidate | None]]:
    """The entries of the table that a partition into one of these `numbers` of stages may use."""
    smallest = min(choice.n_devices for choice in places.choices)
    most, fewest = max(numbers, default=0), min(numbers, default=0)
    for index, choice in enumerate(places.choices):
        others = (places.n_devices - choice.n_devices) // smallest
        for first in range(n_layers):
            for last in range(first + 1, n_layers + 1):
                around = (first > 0) + (last < n_layers)
                if around < most and around <= others and n_layers - (last - first) >= fewest - 1:
                    yield (index, first, last), table.candidate(first, last, choice, microbatches)


def _hops(n_layers: int, choices: Sequence[Submesh], table: StageTable, microbatches: int) -> tuple[Floats, Floats]:
    """Seconds of the transfers at each cut [cuts, senders, receivers]: onward, and there and back."""
    seconds = cache(table.transfer_seconds)
    onward, both = (np.zeros((n_layers + 1, len(choices), len(choices))) for _ in range(2))
    for cut in range(1, n_layers):
        nbytes = table.boundary_nbytes(cut, microbatches)
        onward[cut] = [[seconds(sender, receiver, nbytes) for receiver in choices] for sender in choices]
        both[cut] = onward[cut] + onward[cut].T
    return onward, both


def _relax(local: Floats, latency: Floats, hops: Floats, places: _Places) -> tuple[Floats, float]:
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
            after[:, first] = (hops[first][:, :, None] + whole).min(1)
    return after, float(whole[:, 0].min())


def _before(values: Floats) -> Floats:
    """The least sum of values of stages up to each cut, whatever the devices [cuts]."""
    least, n_layers = values.min(0), values.shape[1]
    sums = np.zeros(n_layers + 1)
    for cut in range(1, n_layers + 1):
        sums[cut] = (sums[:cut] + least[:cut, cut]).min()
    return np.where(np.isfinite(sums), sums, 0.0)


def _levels(
    values: Callable[[int], Floats], hops: Floats, places: _Places, combine: np.ufunc, most: int, ceiling: Floats
) -> list[Floats]:
    """The least combination of the values of 1, 2, ... `most` stages that end it all [choices, cuts, offsets].

    Those above the ceiling of their first layer [cuts] are infinite; where all are, the list ends.
    """
    levels: list[Floats] = []
    for level in range(1, most + 1):
        stages = values(level)
        n_choices, n_layers, _ = stages.shape
        found = np.full((n_choices, n_layers + 1, len(places.final)), math.inf)
        if level == 1:
            for choice, ends in enumerate(places.ends):
                found[choice, :n_layers] = np.where(places.final[ends], stages[choice, :, n_layers:], math.inf)
        else:
            reached = np.flatnonzero(np.isfinite(levels[-1]).any((1, 2))).tolist()
            used = np.isfinite(stages)
            summed = np.empty_like(found[0])
            for choice in np.flatnonzero(used.any((1, 2))).tolist():
                after = np.full_like(found[0], math.inf)
                for other in reached:
                    np.add(levels[-1][other], hops[:, choice, other, None], out=summed)
                    np.minimum(after, summed, out=after)
                firsts, lasts = np.nonzero(used[choice])
                after = after[:, places.ends[choice]]
                for length in np.unique(lasts - firsts).tolist():
                    scores = summed[: n_layers + 1 - length]
                    combine(stages[choice].diagonal(length)[:, None], after[length:], out=scores)
                    np.minimum(found[choice, : len(scores)], scores, out=found[choice, : len(scores)])
        found[found > ceiling[:, None]] = math.inf
        if not np.isfinite(found).any():
            break
        levels.append(found)
    return levels


def _trace(
    values: Callable[[int], Floats], hops: Floats, places: _Places, combine: np.ufunc, levels: Sequence[Floats]
) -> tuple[Entry, ...]:
    """The stages behind the least value of the last level."""
    choice, first, offset = int(levels[-1][:, 0, 0].argmin()), 0, 0
    found: list[Entry] = []
    for level in range(len(levels), 1, -1):
        offset = places.ends[choice, offset]
        after = levels[level - 2][:, :, offset].T + hops[:, choice]
        scores = combine(values(level)[choice, first][:, None], after)
        last, other = divmod(int(scores.argmin()), len(places.choices))
        found.append((choice, first, last))
        choice, first = other, last
    return (*found, (choice, first, levels[0].shape[1] - 1))


@cache
def _live(schedule: str, n_stages: int, microbatches: int) -> tuple[int, ...]:
    """Microbatches in flight on each stage, from the formulas of `passes.schedules` where there is one."""
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


@dataclass(slots=True, kw_only=True)
class _Judge:
    """Simulates partitions and keeps the best."""

    places: _Places
    dispatch_seconds: float
    seconds: float = math.inf
    best: tuple[_Problem, str, tuple[Entry, ...]] | None = None
    seen: set[tuple[int, str, tuple[Entry, ...]]] = field(default_factory=set[tuple[int, str, tuple[Entry, ...]]])
    asked: int = 0
    programs: int = 0
    expanded: int = 0

    def consider(self, problem: _Problem, schedule: str, stages: tuple[Entry, ...]) -> None:
        """Simulates unless it is known, does not fit in memory, or bounds (2) and (3) say that it is no better."""
        key = (problem.microbatches, schedule, stages)
        counts = problem.counts(schedule, len(stages))
        fits = all(problem.costs.room[entry] >= n for entry, n in zip(stages, counts, strict=True))
        if key in self.seen or not fits or _least(problem, stages) >= self.seconds * CLOSE:
            return
        self.seen.add(key)
        seconds = self.simulate(problem, schedule, stages).seconds
        if seconds < self.seconds:
            self.seconds, self.best = seconds, (problem, schedule, stages)

    def simulate(self, problem: _Problem, schedule: str, stages: tuple[Entry, ...]) -> Timeline:
        """The timeline of these stages."""
        costs = problem.costs
        pairs = [(right[1], left[0], right[0]) for left, right in pairwise(stages)]
        return simulate(
            build(schedule, len(stages), problem.microbatches),
            [costs.candidates[entry].cost() for entry in stages],
            [
                Transfer(
                    forward_seconds=float(costs.onward[cut, left, right]),
                    backward_seconds=float(costs.onward[cut, right, left]),
                )
                for cut, left, right in pairs
            ],
            dispatch_seconds=self.dispatch_seconds,
        )

    def answer(self, bound: float) -> Partition:
        """The best partition found."""
        if self.best is None:
            raise InternalError("no partition was found")
        problem, schedule, stages = self.best
        offset, choices = 0, list[StageChoice]()
        for choice, first, last in stages:
            start = int(self.places.starts[choice, offset]) * self.places.unit
            offset = self.places.ends[choice, offset]
            candidate = problem.costs.candidates[choice, first, last]
            submesh = self.places.choices[choice]
            choices.append(
                StageChoice(first=first, last=last, submesh=submesh, first_device=start, candidate=candidate)
            )
        return Partition(
            stages=tuple(choices),
            schedule=schedule,
            microbatches=problem.microbatches,
            timeline=self.simulate(problem, schedule, stages),
            bound=min(bound, self.seconds),
            statistics=Statistics(
                asked=self.asked, programs=self.programs, simulated=len(self.seen), expanded=self.expanded
            ),
        )


def _least(problem: _Problem, stages: Sequence[Entry]) -> float:
    """Bounds (2) and (3) of a partition."""
    costs, m = problem.costs, problem.microbatches
    chain = forward = least = 0.0
    for before, entry in zip((None, *stages), stages, strict=False):
        if before:
            hop = (entry[1], before[0], entry[0])
            chain += float(costs.there_and_back[hop])
            forward += float(costs.onward[hop])
        least = max(
            least,
            chain + m * float(costs.chain[entry]) + float(costs.finish[stages[0]]),
            forward + m * float(costs.busy[entry]) + float(costs.finish[entry]),
        )
        chain += float(costs.chain[entry])
        forward += float(costs.forward[entry])
    return least


def _alone(problem: _Problem, judge: _Judge) -> None:
    """Considers one stage on each submesh: no pipeline."""
    for choice, ends in enumerate(judge.places.ends):
        entry = (choice, 0, problem.n_layers)
        if 1 in problem.numbers and judge.places.final[ends[0]] and entry in problem.costs.candidates:
            for schedule in problem.schedules:
                judge.consider(problem, schedule, (entry,))


def _sweep(problem: _Problem, judge: _Judge, epsilon: float) -> None:
    """Considers the partitions with the least sum in (1) for each pace and number of stages.

    Paces rise in steps of `STEP`, and fall within one to just below that of the partitions found, by 1 + epsilon.
    """
    costs, m = problem.costs, problem.microbatches
    paces = np.unique(costs.pace[np.isfinite(costs.pace) & (costs.pace >= problem.least_pace)])
    families = problem.families(np.unique(costs.room))
    start = 0
    while start < len(paces) and m * paces[start] < judge.seconds * CLOSE:
        low = float(paces[start])
        start = int(np.searchsorted(paces, low * STEP, side="right"))
        for rooms, names in families.items():
            high = float(paces[start - 1])
            while high >= low:
                high = _program(problem, judge, rooms, names, low, high) / (1 + epsilon)


def _program(
    problem: _Problem,
    judge: _Judge,
    rooms: Sequence[float],
    names: Mapping[int, Sequence[str]],
    low: float,
    high: float,
) -> float:
    """Considers the partition with the least sum for each number of stages, of stages whose pace is at most `high`.

    Gives the slowest pace of those partitions, 0 for none. Paces below `low` are known.
    """
    costs, m = problem.costs, problem.microbatches
    usable = np.where(costs.pace <= high, costs.chain, math.inf)

    @cache
    def fitting(room: float) -> Floats:
        return np.where(costs.room >= room, usable, math.inf)

    def values(level: int) -> Floats:
        return fitting(rooms[level - 1])

    ceiling = SLACK * judge.seconds - (m - 1) * low - _before(usable)
    levels = _levels(values, costs.there_and_back, judge.places, np.add, len(rooms), ceiling)
    judge.programs += 1
    slowest = 0.0
    for n_stages in range(1, len(levels) + 1):
        if n_stages in names and np.isfinite(levels[n_stages - 1][:, 0, 0]).any():
            stages = _trace(values, costs.there_and_back, judge.places, np.add, levels[:n_stages])
            slowest = max(slowest, *(float(costs.pace[entry]) for entry in stages))
            for schedule in names[n_stages]:
                judge.consider(problem, schedule, stages)
    return slowest


Node = tuple[float, int, _Problem, str, int, tuple[Entry, ...], int, float, float, float]
"""Bound, number, what is partitioned how into how many stages, the first of them, where their devices end, their
latencies along the chain and forward, and their own part of the bound."""


def _prove(problems: Sequence[_Problem], judge: _Judge, most: int) -> float:
    """Considers partitions in the order of their bounds until none is left that may be better, or `most` were extended.

    Gives the least bound of what is left, at most the best seconds.
    """
    nodes: list[Node] = []
    for problem in problems:
        for schedule in problem.schedules:
            for n_stages in problem.numbers:
                nodes.append((problem.least_seconds, len(nodes), problem, schedule, n_stages, (), 0, 0.0, 0.0, 0.0))
    heapq.heapify(nodes)
    made = len(nodes)
    while nodes and nodes[0][0] < judge.seconds * CLOSE and judge.expanded < most:
        node = heapq.heappop(nodes)
        judge.expanded += 1
        if len(node[5]) == node[4]:
            judge.consider(node[2], node[3], node[5])
            continue
        for child in _extended(node, judge):
            made += 1
            heapq.heappush(nodes, (child[0], made, *child[2:]))
    return min(nodes[0][0], judge.seconds) if nodes else judge.seconds


def _extended(node: Node, judge: _Judge) -> Iterator[Node]:
    """The partial partitions with one stage more that may be better than the best."""
    _, _, problem, schedule, n_stages, stages, offset, chain, forward, own = node
    costs, m, places, n_layers = problem.costs, problem.microbatches, judge.places, problem.n_layers
    needed = problem.counts(schedule, n_stages)[len(stages)]
    left = n_stages - len(stages) - 1
    before, _, first = stages[-1] if stages else (0, 0, 0)
    lasts = slice(first + 1, n_layers + 1 - left) if left else slice(n_layers, n_layers + 1)
    for choice, all_ends in enumerate(places.ends):
        end = int(all_ends[offset])
        row = (choice, first, lasts)
        start = chain + (costs.there_and_back[first, before, choice] if stages else 0.0)
        ready = forward + (costs.onward[first, before, choice] if stages else 0.0)
        finish = costs.finish[stages[0]] if stages else costs.finish[row]
        owns = np.maximum(start + m * costs.chain[row] + finish, ready + m * costs.busy[row] + costs.finish[row])
        owns = np.maximum(owns, own)
        chains, forwards = start + costs.chain[row], ready + costs.forward[row]
        onward = chains + problem.after_chain[choice, lasts, end] + finish
        bounds = np.maximum(np.maximum(owns, onward), forwards + problem.after_forward[choice, lasts, end])
        for index in np.flatnonzero((bounds < judge.seconds * CLOSE) & (costs.room[row] >= needed)).tolist():
            entry = (choice, first, lasts.start + index)
            sums = (float(chains[index]), float(forwards[index]), float(owns[index]))
            yield float(bounds[index]), 0, problem, schedule, n_stages, (*stages, entry), end, *sums


def _unfit(problems: Sequence[_Problem], places: _Places, memory_limit: float) -> PlanningError:
    """The error that names the partition that needs the least memory."""
    least, what = math.inf, "no stages that cover the layers and the devices can be had"
    for problem in problems:
        costs = problem.costs
        for counts, names in problem.families(np.arange(0.0)).items():

            def values(level: int, costs: _Costs = costs, counts: Sequence[float] = counts) -> Floats:
                return costs.base + counts[level - 1] * costs.each

            program = (values, 0 * costs.onward, places, np.maximum)
            levels = _levels(*program, len(counts), np.full(problem.n_layers + 1, math.inf))
            for n_stages, level in enumerate(levels, 1):
                if n_stages not in names or not level[:, 0, 0].min() < least:
                    continue
                stages = _trace(*program, levels[:n_stages])
                needs = [float(values(n_stages - index)[entry]) for index, entry in enumerate(stages)]
                least = max(needs)
                worst = needs.index(least)
                choice, first, last = stages[worst]
                flying = count(int(counts[n_stages - worst - 1]), "microbatch", "microbatches")
                what = (
                    f"closest is {names[n_stages][0]} of {count(problem.microbatches, 'microbatch', 'microbatches')}: "
                    f"stage {worst} of {n_stages}, layers {first} to {last - 1} on {places.choices[choice]}, "
                    f"needs {least:.0f} bytes ({quantities.nbytes(least)}) with {flying} in flight"
                )
    if not math.isfinite(least):
        return PlanningError(explain("the table of stages", what, "", "allow more submeshes, idle devices or stages"))
    limit = f"memory_limit={memory_limit:.0f} bytes ({quantities.nbytes(memory_limit)})"
    remedy = "give more memory or devices, more microbatches, or a schedule with fewer of them in flight"
    return PlanningError(explain(limit, "no partition fits", what, remedy))
