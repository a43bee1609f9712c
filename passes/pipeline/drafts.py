"""The search over drafts: pipelines with seconds and bytes by the prices of their blocks, before a stage is planned.

Drafts have the stages of a partition that a search found, or even stages on equal submeshes, as hand-made pipelines do;
each is simulated in several numbers of microbatches under each schedule. They are priced in the order of their lower
bounds, which rise as blocks are priced, until none is left that may be the best.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from passes.inter_op import NamedSchedule, StageCost, is_chunked, splits_backward
from passes.limits import Limits
from passes.pipeline.draft_prices import (
    least_seconds,
    price_deciding,
    priced_drafts,
    runs_of,
    transfers_of,
)
from passes.pipeline.draft_space import DraftSpace
from passes.pipeline.shapes import Draft, Shape, hand_made
from passes.pipeline.stage_bytes import least_bytes, partly_priced
from passes.pipeline.stage_table import StageCostTable


@dataclass(slots=True, kw_only=True)
class DraftSearch:
    """The `drafts` of a search over a `space`, each with its seconds by the prices of its blocks.

    A draft fits if it needs at most its one of the `limits` of a device. `best` is the seconds of the fastest one that
    fits and whose key is not in `unfit`, where plans are known not to fit. Drafts are not priced if they must take the
    space's `reach` times the best or more, or `limit_seconds`; if they must need more than `slack` times their limit;
    or if they cannot save the space's `least_gain`. `least_refused` is a lower bound in seconds on all drafts that were
    left out for their bytes.
    """

    space: DraftSpace
    limits: Limits
    slack: float
    limit_seconds: float
    unfit: Set[object] = frozenset()
    best: float = math.inf
    least_refused: float = math.inf
    drafts: list[Draft] = field(default_factory=list[Draft])
    _seen: set[object] = field(default_factory=set[object])

    @property
    def table(self) -> StageCostTable:
        """The prices of stages."""
        return self.space.table

    @property
    def schedules(self) -> Sequence[str]:
        """The schedules that pipelines may have."""
        return self.space.schedules

    @property
    def cutoff(self) -> float:
        """The seconds that a draft must stay below."""
        return min(self.space.reach * self.best, self.limit_seconds)

    @property
    def fastest(self) -> Draft | None:
        """The fastest draft that fits by its price; None if there is none."""
        fitting = (draft for draft in self.drafts if draft.excess(self.limits) <= 1)
        return min(fitting, key=lambda draft: draft.seconds, default=None)

    def take(self, draft: Draft) -> None:
        if draft.seconds < self.cutoff:
            self.drafts.append(draft)
            if draft.excess(self.limits) <= 1 and draft.key not in self.unfit:
                self.best = min(self.best, draft.seconds)

    def most_nbytes(self, shape: Shape) -> float:
        """The bytes of a device that a shape may need by its prices, with the slack for what its plan may save."""
        return self.slack * shape.limit_nbytes(self.limits, self.table)

    def add(self, shapes: Iterable[tuple[Shape, int]]) -> None:
        """Prices these shapes, each in a number of microbatches, under each schedule, in the order of their bounds."""
        queue: list[tuple[float, int, Shape, int, tuple[str, ...]]] = []
        for shape, count in dict.fromkeys(shapes):
            for names in _schedule_groups(shape, count, self.schedules):
                if (shape, count, names) not in self._seen:
                    self._seen.add((shape, count, names))
                    queue.append((self._bound(shape, count, names), len(queue), shape, count, names))
        heapq.heapify(queue)
        while queue and (1 + self.space.least_gain) * queue[0][0] < self.cutoff:
            bound, number, shape, count, names = heapq.heappop(queue)
            most = self.most_nbytes(shape)
            fitting = tuple(name for name in names if self.least_nbytes(shape, count, name) <= most)
            likely = self._expected_to_fit(shape, self.table, count, fitting)
            if len(likely) < len(names):
                self.least_refused = min(self.least_refused, bound)
            if not (likely or any(self._megatron_tables(shape, count, fitting))) or not self.space.has(count):
                continue
            least = self._bound(shape, count, names)
            if queue and least > queue[0][0] and least > bound:
                heapq.heappush(queue, (least, number, shape, count, names))
                continue
            over = dict.fromkeys(fitting, least)
            if likely:
                drafts = priced_drafts(shape, self.table, count, likely, self.cutoff, most)
                slow = () if drafts is None else likely
                over = {name: seconds for name, seconds in over.items() if name not in slow}
                over |= {draft.schedule: draft.seconds for draft in drafts or () if draft.excess(self.limits) > 1}
                for draft in drafts or ():
                    self.take(draft)
                    if draft.excess(self.limits) > 1:
                        self.least_refused = min(self.least_refused, draft.seconds)
            self._add_megatron(shape, count, over)

    def _add_megatron(self, shape: Shape, count: int, over: Mapping[str, float]) -> None:
        """Prices a shape that does not fit with submeshes laid out as by Megatron.

        `over` maps the schedules under which it does not fit to its seconds: Megatron's placements take no less.
        """
        tables = list(self._megatron_tables(shape, count, tuple(over)))
        if math.isfinite(self.cutoff):  # the first prices bound the others
            price_deciding(shape, [table for table, _ in tables], count, self.cutoff)
        for table, likely in tables:
            names = tuple(name for name in likely if over[name] < self.cutoff)
            most = self.most_nbytes(shape)
            drafts = priced_drafts(shape, table, count, names, self.cutoff, most) if names else None
            for draft in drafts or ():
                self.take(draft)

    def _megatron_tables(
        self, shape: Shape, count: int, names: Sequence[str]
    ) -> Iterator[tuple[StageCostTable, tuple[str, ...]]]:
        """(table, schedules) with submeshes laid out as by Megatron, weights cut over some or all of their devices, and
        the schedules under which that may fit.
        """
        size = shape.devices[0]
        if not names or len(set(shape.devices)) > 1:
            return
        known = _known(self.table, count)
        for tensor in (parts for parts in range(size, 0, -1) if size % parts == 0):
            if _most_state_nbytes(shape, self.table, known, tensor) <= shape.limit_nbytes(self.limits, self.table):
                table = self.space.megatron_table(size, tensor)
                if likely := self._expected_to_fit(shape, table, count, names):
                    yield table, likely

    def _expected_to_fit(
        self, shape: Shape, table: StageCostTable, count: int, names: Sequence[str]
    ) -> tuple[str, ...]:
        """The schedules under which a shape may fit, by the bytes of its blocks in other numbers of microbatches."""
        stages = _rescaled(shape, table, count)
        tasks = {name: NamedSchedule(name, len(shape.begins), count, shape.chunks) for name in names}
        most = self.most_nbytes(shape)
        return tuple(name for name in names if not stages or tasks[name].peak_nbytes(stages) <= most)

    def is_tight(self, n_devices: int) -> bool:
        """Whether some even stages must need too much in the largest number of microbatches that has a sample."""
        names, count = [name for name in self.schedules if not is_chunked(name)], max(self.table.step.samples)
        shapes = (shape for shape in hand_made(self.table, n_devices, count) if shape.chunks == 1)
        return any(
            min((self.least_nbytes(shape, count, name) for name in names), default=0.0) > self.most_nbytes(shape)
            for shape in shapes
        )

    def least_nbytes(self, shape: Shape, count: int, schedule: str) -> float:
        """A lower bound on the bytes of a device of the group that needs most: its state, and what is in flight."""
        known = _known(self.table, count)
        runs, groups = runs_of(shape, self.table, known), len(shape.devices)
        state_nbytes = [self.table.bounds.of_blocks(*run, known).nbytes for run in runs]
        each = [self.table.kept_nbytes(*run, known) * known // count for run in runs]
        flying = NamedSchedule(schedule, len(runs), count, shape.chunks).in_flight(each)
        return max(nbytes + sum(state_nbytes[group::groups]) for group, nbytes in enumerate(flying))

    def _bound(self, shape: Shape, count: int, names: Sequence[str]) -> float:
        """A lower bound in seconds on a shape under these schedules, which split the backward alike."""
        known = _known(self.table, count)
        bounds = [self.table.bounds.of_blocks(*run, count) for run in runs_of(shape, self.table, known)]
        return least_seconds(
            bounds, transfers_of(shape, self.table, known, count), shape, count, splits_backward(names[0])
        )


def _schedule_groups(shape: Shape, microbatches: int, schedules: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The schedules that a shape can have, in two groups: those with a whole backward, and those that split it."""
    if shape.chunks > 1 and microbatches % len(shape.devices):
        return
    names = [name for name in schedules if is_chunked(name) == (shape.chunks > 1)]
    for split in (False, True):
        if same_backward := tuple(name for name in names if splits_backward(name) == split):
            yield same_backward


def _known(table: StageCostTable, count: int) -> int:
    """That number of microbatches if it has a sample, else the next smaller one that has."""
    samples = table.step.samples
    return max((n for n in samples if n <= count), default=min(samples))


def _rescaled(shape: Shape, table: StageCostTable, microbatches: int) -> list[StageCost]:
    """The bytes of a shape's stages, from prices in the nearest number of microbatches that has some; empty where none
    has.

    The mesh of least memory counts. What a microbatch keeps is taken to shrink as the microbatch does; stages without a
    price count with a lower bound.
    """
    for known in sorted(table.step.samples, key=lambda n: abs(math.log(n / microbatches))):
        runs = runs_of(shape, table, known)
        priced = [partly_priced(table, *run, known) for run in runs]
        if any(priced):
            leanest = [
                min(each or [least_bytes(table, *run, known)], key=lambda cost: cost.needed_nbytes(len(shape.devices)))
                for run, each in zip(runs, priced, strict=True)
            ]
            return [replace(c, in_flight_nbytes=c.in_flight_nbytes * known // microbatches) for c in leanest]
    return []


def _most_state_nbytes(shape: Shape, table: StageCostTable, microbatches: int, parts: int) -> int:
    """The least bytes on one device for the state of the group that has most of it, cut into `parts`."""
    runs = runs_of(shape, table, microbatches)
    state = [table.state_nbytes(begin, end, microbatches, parts) for begin, end, _ in runs]
    return max(sum(state[group :: len(shape.devices)]) for group in range(len(shape.devices)))
