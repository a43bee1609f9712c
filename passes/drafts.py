"""Pipelines by their prices, before any stage of them is planned: stages that a search found, and those made by hand.

A shape says where stages begin and on how many devices they run; even stages on equal submeshes are what is made by
hand. In some number of microbatches and under each schedule it is simulated with the prices of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from passes.boundaries import boundary_seconds
from passes.cluster import HostGroup
from passes.inter_op import Partition
from passes.pipeline import DISPATCH_SECONDS
from passes.schedules import build, is_chunked
from passes.simulate import StageCost, Transfer, simulate
from passes.stage_table import StageCosts

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
    table: StageCosts

    @property
    def key(self) -> object:
        """What its stages are planned by: all but the schedule."""
        return self.shape, self.microbatches, id(self.table)


def evenly(n_devices: int, chunks: Sequence[int] = CHUNKS) -> list[tuple[int, int]]:
    """Every (groups, chunks) in which so many devices have equal submeshes."""
    groups = [n for n in range(2, n_devices + 1) if n_devices % n == 0]
    return [(n, each) for n in groups for each in chunks]


def by_hand(table: StageCosts, n_devices: int, microbatches: int) -> Iterator[Shape]:
    """The shapes of even stages on equal submeshes."""
    even = table.cuts(microbatches).even
    for groups, chunks in evenly(n_devices):
        if begins := even.get(groups * chunks):
            yield Shape(begins=begins, devices=(n_devices // groups,) * groups)


def found(table: StageCosts, partition: Partition, microbatches: int) -> Shape:
    """The shape of a partition."""
    layers = table.cuts(microbatches).layers
    return Shape(
        begins=tuple(layers[stage.first] for stage in partition.stages),
        devices=tuple(stage.submesh.n_devices for stage in partition.stages),
    )


def drafts(
    shape: Shape, table: StageCosts, microbatches: int, schedules: Sequence[str], beneath: float
) -> Iterator[Draft]:
    """A shape under each schedule that it can have; none once it is seen that it takes `beneath` seconds or more."""
    costs = _costs(shape, table, microbatches, beneath)
    if costs is None:
        return
    transfers = _transfers(shape, table, microbatches)
    for schedule in schedules:
        if is_chunked(schedule) != (shape.chunks > 1) or (shape.chunks > 1 and microbatches % len(shape.devices)):
            continue
        timeline = simulate(
            build(schedule, len(shape.begins), microbatches, shape.chunks),
            costs,
            transfers,
            dispatch_seconds=DISPATCH_SECONDS,
        )
        if timeline.seconds < beneath:
            yield Draft(
                shape=shape,
                microbatches=microbatches,
                schedule=schedule,
                seconds=timeline.seconds,
                peak_nbytes=max(timeline.peak_nbytes),
                table=table,
            )


def _costs(shape: Shape, table: StageCosts, microbatches: int, beneath: float) -> list[StageCost] | None:
    """What each stage costs; None once one of them cannot be had, or takes too long for all microbatches."""
    ends = (*shape.begins[1:], len(table.cuts(microbatches).blocks))
    costs: list[StageCost] = []
    for stage, (begin, end) in enumerate(zip(shape.begins, ends, strict=True)):
        n_devices = shape.devices[stage % len(shape.devices)]
        stage_found = table.stage(begin, end, n_devices, microbatches, beneath / microbatches)
        if stage_found is None:
            return None
        costs.append(stage_found.cost())
    return costs


def _transfers(shape: Shape, table: StageCosts, microbatches: int) -> list[Transfer]:
    hosts, places = table.cluster.group(), shape.places()
    edges = [table.edge_nbytes(block, microbatches) for block in shape.begins[1:]]
    return [
        _transfer(hosts, here, there, nbytes) for (here, there), nbytes in zip(pairwise(places), edges, strict=True)
    ]


def _transfer(hosts: HostGroup, here: range, there: range, nbytes: int) -> Transfer:
    return Transfer(
        forward_seconds=boundary_seconds(hosts, here, there, nbytes),
        backward_seconds=boundary_seconds(hosts, there, here, nbytes),
    )
