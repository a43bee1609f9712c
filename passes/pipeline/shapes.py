"""Pipelines before any stage of them is planned: where stages begin and on how many devices they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from passes.inter_op import Partition
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
class Limits:
    """The bytes that a device of a pipeline may need: of stages `by_hand` all there are, of `searched` ones less.

    What is searched is what predictions flatter, so it leaves a margin for what they miss.
    """

    searched: float
    by_hand: float

    def of(self, shape: Shape, table: StageCostTable) -> float:
        """The limit of a shape: it is by hand if its stages are even and on equal submeshes."""
        even = table.step.cuts(next(iter(table.step.samples))).even
        is_by_hand = len(set(shape.devices)) == 1 and even.get(len(shape.begins)) == shape.begins
        return self.by_hand if is_by_hand else self.searched

    def times(self, factor: float) -> Limits:
        """Limits larger by a factor."""
        return Limits(searched=factor * self.searched, by_hand=factor * self.by_hand)


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

    def excess(self, limits: Limits) -> float:
        """The bytes that it needs by its prices as a multiple of its limit: it fits up to one."""
        return self.peak_nbytes / limits.of(self.shape, self.table)


def evenly(n_devices: int) -> list[tuple[int, int]]:
    """Every (groups, chunks) in which so many devices have equal submeshes."""
    groups = [n for n in range(2, n_devices + 1) if n_devices % n == 0]
    return [(n, chunks) for n in groups for chunks in CHUNKS]


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


def first_of_each(ordered: Sequence[Draft]) -> list[Draft]:
    """The first draft of each shape in each number of microbatches: its other schedules are tried with its plan."""
    firsts: dict[object, Draft] = {}
    for draft in ordered:
        firsts.setdefault(draft.key, draft)
    return list(firsts.values())
