"""Shapes and drafts: pipelines before any stage of them is planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from passes.inter_op import Partition
from passes.limits import Limits
from passes.pipeline.stage_table import StageCostTable

CHUNKS = (1, 2, 3, 4)
"""The numbers of stages that a group may have in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The stages of a pipeline by the blocks that they begin with; group g of `devices` has stages g, g + groups, ...
    in turn.
    """

    begins: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def chunks(self) -> int:
        """The number of stages of each group."""
        return len(self.begins) // len(self.devices)

    def places(self) -> list[range]:
        """The devices of each stage, by number."""
        ends = [0, *accumulate(self.devices)]
        return [range(ends[k % len(self.devices)], ends[k % len(self.devices) + 1]) for k in range(len(self.begins))]

    def limit_nbytes(self, limits: Limits, table: StageCostTable) -> float:
        """The bytes that a device of it may need: it counts as hand-made if its stages are even and on equal
        submeshes.
        """
        even = table.step.cuts(next(iter(table.step.samples))).even
        is_hand_made = len(set(self.devices)) == 1 and even.get(len(self.begins)) == self.begins
        return limits.hand_made if is_hand_made else limits.searched


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A shape in a number of microbatches under a schedule, with its seconds and bytes by the prices of `table`.

    For a pipeline laid out as by Megatron, that is a table of such placements alone.
    """

    shape: Shape
    microbatches: int
    schedule: str
    seconds: float
    peak_nbytes: int
    table: StageCostTable

    @property
    def key(self) -> object:
        """The identity of the plans of its stages: everything but the schedule."""
        return self.shape, self.microbatches, id(self.table)

    def excess(self, limits: Limits) -> float:
        """The bytes that it needs by its prices as a multiple of its limit: it fits if that is at most 1."""
        return self.peak_nbytes / self.shape.limit_nbytes(limits, self.table)


def evenly(n_devices: int) -> list[tuple[int, int]]:
    """Every (groups, chunks) in which that many devices make equal submeshes."""
    groups = [n for n in range(2, n_devices + 1) if n_devices % n == 0]
    return [(n, chunks) for n in groups for chunks in CHUNKS]


def hand_made(table: StageCostTable, n_devices: int, microbatches: int) -> Iterator[Shape]:
    """The shapes of even stages on equal submeshes, cut as the sample in `microbatches` is."""
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
    """The first draft of each key: its plan is tried under the other schedules as well."""
    firsts: dict[object, Draft] = {}
    for draft in ordered:
        firsts.setdefault(draft.key, draft)
    return list(firsts.values())
