"""Pipelines by their prices, before any stage of them is planned: stages that a search found, and those made by hand.

A shape says where stages begin and on how many devices they run; even stages on equal submeshes are what is made by
hand. In some number of microbatches and under each schedule it is simulated with the prices of its blocks.

A pipeline of p groups in m microbatches takes, with the floors c_j of stages (forward and backward of a microbatch),
P_g of all stages of a group with their share of the end of a step, and transfers x_j onward and y_j back, at least

    max over g of  sum over j < g of (c_j + x_j + y_j) + m sum over stages of g of c      a backward being one task
    max over g of  sum over j < g of x_j + m P_g

for a group begins when the first microbatch has come to it. Drafts are priced in the order of that bound, which rises
as blocks are priced, until none is left that may be the best.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, pairwise

from passes.cluster import HostGroup, boundary_seconds
from passes.inter_op import LowerBound, Partition, StageCost, Transfer, build, is_chunked, named_schedule
from passes.pipeline.lower_bounds import SLACK
from passes.pipeline.stage_bytes import least_bytes, partly_priced
from passes.pipeline.stage_table import StageCostTable

CHUNKS = (1, 2, 3, 4)
"""Stages that a submesh has in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Stages that begin at blocks `begins`; group g of `devices` has stages g, g + groups, ... in turn."""

    begins: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def chunks(self) -> int:
        """Stages of each group."""
        return len(self.begins) // len(self.devices)

    def places(self) -> list[range]:
        """The devices of each stage."""
        ends = [0, *accumulate(self.devices)]
        return [range(ends[k % len(self.devices)], ends[k % len(self.devices) + 1]) for k in range(len(self.begins))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A shape in so many microbatches under a schedule, with what it takes by its prices.

    Prices are those of `table`, which is one of restricted placements where a pipeline by hand restricts them.
    """

    shape: Shape
    microbatches: int
    schedule: str
    seconds: float
    peak_nbytes: int
    table: StageCostTable

    @property
    def key(self) -> object:
        """The identity of the plans of its stages: all but the schedule."""
        return self.shape, self.microbatches, id(self.table)


def evenly(n_devices: int, chunks: Sequence[int] = CHUNKS) -> list[tuple[int, int]]:
    """Every (groups, chunks) in which so many devices have equal submeshes."""
    groups = [n for n in range(2, n_devices + 1) if n_devices % n == 0]
    return [(n, each) for n in groups for each in chunks]


def by_hand(table: StageCostTable, n_devices: int, microbatches: int) -> Iterator[Shape]:
    """The shapes of even stages on equal submeshes, cut as the step is in so many microbatches."""
    even = table.step.cuts(microbatches).even
    for groups, chunks in evenly(n_devices):
        if begins := even.get(groups * chunks):
            yield Shape(begins=begins, devices=(n_devices // groups,) * groups)


def shape_of(table: StageCostTable, partition: Partition, microbatches: int) -> Shape:
    """The shape of a partition."""
    layers = table.step.cuts(microbatches).layers
    return Shape(
        begins=tuple(layers[stage.first] for stage in partition.stages),
        devices=tuple(stage.submesh.n_devices for stage in partition.stages),
    )


def drafted(table: StageCostTable, partition: Partition) -> Draft:
    """A partition as a draft."""
    return Draft(
        shape=shape_of(table, partition, partition.microbatches),
        microbatches=partition.microbatches,
        schedule=partition.schedule,
        seconds=partition.seconds,
        peak_nbytes=max(partition.timeline.peak_nbytes),
        table=table,
    )


@dataclass(slots=True, kw_only=True)
class DraftSearch:
    """The `drafts` of a search, each with the seconds that it takes by its prices.

    `best` is what the fastest of them takes that needs at most `limit` bytes of a device; none is priced that takes
    `reach` times that or more, or `limit_seconds`, nor what is seen before to need more than `most_nbytes` or to gain
    no more than the share `least_gain`. `has` makes a sample in so many microbatches, and says whether there is one;
    `megatron_table(n, tensor)` has Megatron's prices on n devices of which so many cut the weights.
    """

    table: StageCostTable
    schedules: Sequence[str]
    limit: float
    most_nbytes: float
    limit_seconds: float
    reach: float
    least_gain: float
    has: Callable[[int], bool]
    megatron_table: Callable[[int, int], StageCostTable]
    best: float = math.inf
    drafts: list[Draft] = field(default_factory=list[Draft])
    _seen: set[object] = field(default_factory=set[object])

    @property
    def cutoff(self) -> float:
        """Seconds that a draft must stay below."""
        return min(self.reach * self.best, self.limit_seconds)

    def take(self, draft: Draft) -> None:
        if draft.seconds < self.cutoff:
            self.drafts.append(draft)
            if draft.peak_nbytes <= self.limit:
                self.best = min(self.best, draft.seconds)

    def add(self, shapes: Iterable[tuple[Shape, int]]) -> None:
        """Prices these shapes in so many microbatches under each schedule, in the order of their bounds."""
        queue: list[tuple[float, int, Shape, int, tuple[str, ...]]] = []
        for shape, count in dict.fromkeys(shapes):
            for names in _schedule_groups(shape, count, self.schedules):
                if (shape, count, names) not in self._seen:
                    self._seen.add((shape, count, names))
                    queue.append((self._bound(shape, count, names), len(queue), shape, count, names))
        heapq.heapify(queue)
        while queue and (1 + self.least_gain) * queue[0][0] < self.cutoff:
            bound, number, shape, count, names = heapq.heappop(queue)
            fitting = tuple(name for name in names if self.least_nbytes(shape, count, name) <= self.most_nbytes)
            likely = self._expected_to_fit(shape, self.table, count, fitting)
            if not (likely or any(self._megatron_tables(shape, count, fitting))) or not self.has(count):
                continue
            least = self._bound(shape, count, names)
            if queue and least > queue[0][0] and least > bound:
                heapq.heappush(queue, (least, number, shape, count, names))
                continue
            over = dict.fromkeys(fitting, least)
            if likely:
                drafts = priced_drafts(shape, self.table, count, likely, self.cutoff, self.most_nbytes)
                slow = () if drafts is None else likely
                over = {name: seconds for name, seconds in over.items() if name not in slow}
                over |= {draft.schedule: draft.seconds for draft in drafts or () if draft.peak_nbytes > self.limit}
                for draft in drafts or ():
                    self.take(draft)
            self._add_megatron(shape, count, over)

    def _add_megatron(self, shape: Shape, count: int, over: Mapping[str, float]) -> None:
        """Adds what does not fit as Megatron's plans, under the schedules by which it takes so many seconds or more."""
        for table, likely in self._megatron_tables(shape, count, tuple(over)):
            names = tuple(name for name in likely if over[name] < self.cutoff)
            drafts = priced_drafts(shape, table, count, names, self.cutoff, self.most_nbytes) if names else None
            for draft in drafts or ():
                self.take(draft)

    def _megatron_tables(
        self, shape: Shape, count: int, names: Sequence[str]
    ) -> Iterator[tuple[StageCostTable, tuple[str, ...]]]:
        """The tables of every submesh laid out as Megatron does, weights cut over all or some of it, and the schedules
        under which that may fit."""
        size = shape.devices[0]
        if not names or len(set(shape.devices)) > 1:
            return
        state_nbytes = _most_state_nbytes(shape, self.table, _known(self.table, count))
        for tensor in (parts for parts in range(size, 0, -1) if size % parts == 0):
            if state_nbytes <= tensor * self.limit:
                table = self.megatron_table(size, tensor)
                if likely := self._expected_to_fit(shape, table, count, names):
                    yield table, likely

    def _expected_to_fit(
        self, shape: Shape, table: StageCostTable, count: int, names: Sequence[str]
    ) -> tuple[str, ...]:
        """The schedules under which a shape may fit, by what its blocks need in other numbers of microbatches."""
        stages = _rescaled(shape, table, count)
        tasks = {name: named_schedule(name, len(shape.begins), count, shape.chunks) for name in names}
        return tuple(name for name in names if not stages or tasks[name].peak_nbytes(stages) <= self.most_nbytes)

    def is_tight(self, n_devices: int) -> bool:
        """Whether some even stages are seen not to fit in as many microbatches as there are samples of."""
        names, count = [name for name in self.schedules if not is_chunked(name)], max(self.table.step.samples)
        shapes = (shape for shape in by_hand(self.table, n_devices, count) if shape.chunks == 1)
        needed = (min((self.least_nbytes(shape, count, name) for name in names), default=0.0) for shape in shapes)
        return any(nbytes > self.most_nbytes for nbytes in needed)

    def least_nbytes(self, shape: Shape, count: int, schedule: str) -> float:
        """The least bytes of a device that some group of a shape needs: what it holds, and what is in flight."""
        known = _known(self.table, count)
        runs, groups = _runs(shape, self.table, known), len(shape.devices)
        state_nbytes = [self.table.bounds.of_blocks(*run, known).nbytes for run in runs]
        each = [self.table.kept_nbytes(*run, known) * known // count for run in runs]
        flying = named_schedule(schedule, len(runs), count, shape.chunks).in_flight(each)
        return max(nbytes + sum(state_nbytes[group::groups]) for group, nbytes in enumerate(flying))

    def _bound(self, shape: Shape, count: int, names: Sequence[str]) -> float:
        known = _known(self.table, count)
        bounds = [self.table.bounds.of_blocks(*run, count) for run in _runs(shape, self.table, known)]
        return least_seconds(bounds, _transfers(shape, self.table, known, count), shape, count, _splits(names[0]))


def least_seconds(
    bounds: Sequence[LowerBound], transfers: Sequence[Transfer], shape: Shape, microbatches: int, split: bool
) -> float:
    """The least seconds that a shape takes; with the backward `split` nothing need follow a group's last task."""
    groups, before, onward, least = len(shape.devices), 0.0, 0.0, 0.0
    for group in range(groups):
        of_group = bounds[group::groups]
        busy, period = sum(bound.seconds for bound in of_group), sum(bound.period for bound in of_group)
        least = max(least, onward + microbatches * period, before + microbatches * busy)
        if group + 1 < groups:
            hop = transfers[group]
            onward += hop.forward_seconds
            before += hop.forward_seconds
            before += 0.0 if split else hop.backward_seconds + bounds[group].seconds
    return least


def _schedule_groups(shape: Shape, microbatches: int, schedules: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The schedules that a shape can have, those with a whole backward apart from those with halves of it."""
    if shape.chunks > 1 and microbatches % len(shape.devices):
        return
    names = [name for name in schedules if is_chunked(name) == (shape.chunks > 1)]
    for split in (False, True):
        if same_backward := tuple(name for name in names if _splits(name) == split):
            yield same_backward


@cache
def _splits(schedule: str) -> bool:
    """Whether a schedule has halves of the backward."""
    return any(task.kind == "weight_gradient" for task in build(schedule, 1, 1).groups[0])


def _known(table: StageCostTable, count: int) -> int:
    """That number of microbatches if there is a sample in so many, else the next fewer that there is one of."""
    samples = table.step.samples
    return max((n for n in samples if n <= count), default=min(samples))


def _rescaled(shape: Shape, table: StageCostTable, microbatches: int) -> list[StageCost]:
    """The bytes of stages as they are priced in the nearest number of microbatches that has some, on the leanest mesh.

    What a microbatch keeps is taken to shrink as it does; stages without a price count with the least that they may
    need. None where nothing is priced in any.
    """
    for known in sorted(table.step.samples, key=lambda n: abs(math.log(n / microbatches))):
        runs = _runs(shape, table, known)
        priced = [partly_priced(table, *run, known) for run in runs]
        if any(priced):
            leanest = [
                min(each or [least_bytes(table, *run, known)], key=lambda cost: cost.needed_nbytes(len(shape.devices)))
                for run, each in zip(runs, priced, strict=True)
            ]
            return [replace(c, in_flight_nbytes=c.in_flight_nbytes * known // microbatches) for c in leanest]
    return []


def _most_state_nbytes(shape: Shape, table: StageCostTable, microbatches: int) -> int:
    """The most bytes of state that the stages of a group have, all devices together."""
    state = [table.state_nbytes(begin, end, microbatches) for begin, end, _ in _runs(shape, table, microbatches)]
    return max(sum(state[group :: len(shape.devices)]) for group in range(len(shape.devices)))


def _runs(shape: Shape, table: StageCostTable, microbatches: int) -> list[tuple[int, int, int]]:
    """The first block of each stage, the one after its last, and its devices."""
    ends = (*shape.begins[1:], len(table.step.cuts(microbatches).blocks))
    sizes = (shape.devices[stage % len(shape.devices)] for stage in range(len(ends)))
    return list(zip(shape.begins, ends, sizes, strict=True))


def priced_drafts(
    shape: Shape, table: StageCostTable, count: int, schedules: Sequence[str], cutoff: float, most_nbytes: float
) -> list[Draft] | None:
    """The shape in so many microbatches under each of these schedules by which it takes less than `cutoff` seconds.

    None once it is seen that it needs more than `most_nbytes` of a device under each of them.
    """
    runs, transfers = _runs(shape, table, count), _transfers(shape, table, count, count)
    scheduled = {name: named_schedule(name, len(shape.begins), count, shape.chunks) for name in schedules}
    least = [least_bytes(table, *run, count) for run in runs]

    def fits(costs: Mapping[int, StageCost]) -> bool:
        stages = [costs.get(stage, nbytes) for stage, nbytes in enumerate(least)]
        return any(tasks.peak_nbytes(stages) <= most_nbytes for tasks in scheduled.values())

    costs = _costs(shape, table, count, transfers, _splits(schedules[0]), cutoff, fits)
    if costs is None or len(costs) < len(runs):
        return None if costs else []
    device = table.cluster.group().device
    drafts: list[Draft] = []
    for name, tasks in scheduled.items():
        seconds = tasks.seconds(costs, transfers, device.dispatch_seconds, device.send_overlap)
        nbytes = tasks.peak_nbytes(costs)
        draft = Draft(shape=shape, microbatches=count, schedule=name, seconds=seconds, peak_nbytes=nbytes, table=table)
        drafts += [draft] if seconds < cutoff else []
    return drafts


def _costs(
    shape: Shape,
    table: StageCostTable,
    microbatches: int,
    transfers: Sequence[Transfer],
    split: bool,
    cutoff: float,
    fits: Callable[[Mapping[int, StageCost]], bool],
) -> list[StageCost] | None:
    """The cost of each stage; None once a stage cannot be had, or all that is known of them takes `cutoff` seconds.

    Stages of the group that has most to do are priced first: a pipeline that takes too long is mostly seen to there.
    Each may take what the others of its group leave. Those priced so far where they are seen not to fit.
    """
    runs, groups = _runs(shape, table, microbatches), len(shape.devices)
    costs: dict[int, StageCost] = {}

    def least() -> list[LowerBound]:
        """The least that each stage takes, by what is known of it."""
        bounds = [table.bounds.of_blocks(*run, microbatches) for run in runs]
        for stage, cost in costs.items():
            busy = cost.forward_seconds + cost.backward_seconds
            bounds[stage] = LowerBound(busy, cost.period(microbatches), 0.0)
        return bounds

    periods = [bound.period for bound in least()]
    for stage in sorted(range(len(runs)), key=lambda stage: (-sum(periods[stage % groups :: groups]), stage)):
        bounds = least()
        if least_seconds(bounds, transfers, shape, microbatches, split) >= cutoff:
            return None
        others = sum(bound.period for bound in bounds[stage % groups :: groups]) - bounds[stage].period
        cost = table.stage(*runs[stage], microbatches, SLACK * (cutoff / microbatches - others))
        if cost is None:
            return None
        is_new = cost not in costs.values()
        costs[stage] = cost
        if is_new and len(costs) < len(runs) and not fits(costs):
            return list(costs.values())
    if least_seconds(least(), transfers, shape, microbatches, split) >= cutoff:
        return None
    return [costs[stage] for stage in range(len(runs))]


def _transfers(shape: Shape, table: StageCostTable, known: int, microbatches: int) -> list[Transfer]:
    """The transfers between stages, in as many microbatches as a sample has, or in proportion in others."""
    hosts, places = table.cluster.group(), shape.places()
    edges = [table.step.edge_nbytes(block, known) * known // microbatches for block in shape.begins[1:]]
    return [
        _transfer(hosts, here, there, nbytes) for (here, there), nbytes in zip(pairwise(places), edges, strict=True)
    ]


def _transfer(hosts: HostGroup, here: range, there: range, nbytes: int) -> Transfer:
    return Transfer(
        forward_seconds=boundary_seconds(hosts, here, there, nbytes),
        backward_seconds=boundary_seconds(hosts, there, here, nbytes),
    )


def first_of_each(ordered: Sequence[Draft]) -> list[Draft]:
    """The first draft of each shape in each number of microbatches: its other schedules are tried with its plan."""
    firsts: dict[object, Draft] = {}
    for draft in ordered:
        firsts.setdefault(draft.key, draft)
    return list(firsts.values())
