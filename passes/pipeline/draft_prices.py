"""The seconds of pipelines before any stage of them is planned: lower bounds, and drafts by the prices of blocks.

A pipeline of p groups in m microbatches takes, with lower bounds c_j on stages (forward and backward of a microbatch),
P_g on all stages of a group with their share of the end of a step, and transfers x_j onward and y_j back, at least

    max over g of  sum over j < g of (c_j + x_j + y_j) + m sum over stages of g of c      a backward being one task
    max over g of  sum over j < g of x_j + m P_g

since a group begins when the first microbatch has come to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from passes.inter_op import LowerBound, NamedSchedule, StageCost, Transfer, splits_backward
from passes.pipeline import prefetch
from passes.pipeline.lower_bounds import SLACK
from passes.pipeline.shapes import Draft, Shape
from passes.pipeline.stage_bytes import least_bytes
from passes.pipeline.stage_table import StageCostTable


def least_seconds(
    bounds: Sequence[LowerBound], transfers: Sequence[Transfer], shape: Shape, microbatches: int, split: bool
) -> float:
    """A lower bound in seconds on a step in this shape.

    If schedules `split` the backward, no other group need follow the last task of a group.
    """
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


def runs_of(shape: Shape, table: StageCostTable, microbatches: int) -> list[tuple[int, int, int]]:
    """(first block, block after the last, devices) of each stage."""
    ends = (*shape.begins[1:], len(table.step.cuts(microbatches).blocks))
    sizes = (shape.devices[stage % len(shape.devices)] for stage in range(len(ends)))
    return list(zip(shape.begins, ends, sizes, strict=True))


def priced_drafts(
    shape: Shape, table: StageCostTable, count: int, schedules: Sequence[str], cutoff: float, most_nbytes: float
) -> list[Draft] | None:
    """The drafts of a shape in `count` microbatches that take less than `cutoff` seconds, one for each schedule.

    None where the shape is seen to need more than `most_nbytes` on a device under all of them.
    """
    runs, transfers = runs_of(shape, table, count), transfers_of(shape, table, count, count)
    scheduled = {name: NamedSchedule(name, len(shape.begins), count, shape.chunks) for name in schedules}
    least = [least_bytes(table, *run, count) for run in runs]

    def fits(costs: Mapping[int, StageCost]) -> bool:
        stages = [costs.get(stage, nbytes) for stage, nbytes in enumerate(least)]
        return any(tasks.peak_nbytes(stages) <= most_nbytes for tasks in scheduled.values())

    costs = _costs(shape, table, count, transfers, splits_backward(schedules[0]), cutoff, fits)
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
    """The cost of each stage; None where a stage is not possible, or the pipeline is seen to take `cutoff` seconds or
    more.

    Stages of the group with most work are priced first, as that mostly shows that a pipeline takes too long; each may
    take what the others of its group leave. Where they are seen not to fit, only the costs found so far.
    """
    runs, groups = runs_of(shape, table, microbatches), len(shape.devices)
    costs: dict[int, StageCost] = {}

    def least() -> list[LowerBound]:
        """A lower bound on each stage, by the costs found so far."""
        bounds = [table.bounds.of_blocks(*run, microbatches) for run in runs]
        for stage, cost in costs.items():
            busy = cost.forward_seconds + cost.backward_seconds
            bounds[stage] = LowerBound(busy, cost.period(microbatches), 0.0)
        return bounds

    bounds = least()
    if least_seconds(bounds, transfers, shape, microbatches, split) >= cutoff:
        return None
    order = _heaviest_first(bounds, groups)
    period = cutoff / microbatches
    prefetch.price_stages(
        table, [(runs[stage], _allowed(bounds, groups, stage, period)) for stage in order], microbatches
    )
    for stage in order:
        bounds = least()
        if least_seconds(bounds, transfers, shape, microbatches, split) >= cutoff:
            return None
        cost = table.stage(*runs[stage], microbatches, _allowed(bounds, groups, stage, period))
        if cost is None:
            return None
        is_new = cost not in costs.values()
        costs[stage] = cost
        if is_new and len(costs) < len(runs) and not fits(costs):
            return list(costs.values())
    if least_seconds(least(), transfers, shape, microbatches, split) >= cutoff:
        return None
    return [costs[stage] for stage in range(len(runs))]


def price_deciding(shape: Shape, tables: Sequence[StageCostTable], microbatches: int, cutoff: float) -> None:
    """Prices at once, for each table, the stages that decide whether the shape takes less than `cutoff` seconds."""
    groups, stages = len(shape.devices), list[tuple[StageCostTable, prefetch.Blocks, float]]()
    for table in tables:
        runs = runs_of(shape, table, microbatches)
        bounds = [table.bounds.of_blocks(*run, microbatches) for run in runs]
        stage = _heaviest_first(bounds, groups)[0]
        stages.append((table, runs[stage], _allowed(bounds, groups, stage, cutoff / microbatches)))
    prefetch.price_first(stages, microbatches)


def _heaviest_first(bounds: Sequence[LowerBound], groups: int) -> list[int]:
    """The stages in an order that begins with those of the group with most work."""
    periods = [bound.period for bound in bounds]
    return sorted(range(len(bounds)), key=lambda stage: (-sum(periods[stage % groups :: groups]), stage))


def _allowed(bounds: Sequence[LowerBound], groups: int, stage: int, period: float) -> float:
    """The period in seconds that a stage may have if its group has `period`: what the other stages of the
    group leave.
    """
    others = sum(bound.period for bound in bounds[stage % groups :: groups]) - bounds[stage].period
    return SLACK * (period - others)


def transfers_of(shape: Shape, table: StageCostTable, known: int, microbatches: int) -> list[Transfer]:
    """The transfers between stages: as in the sample in `known` microbatches, in proportion to `microbatches`."""
    edges = [table.step.edge_nbytes(block, known) * known // microbatches for block in shape.begins[1:]]
    return [
        Transfer(
            forward_seconds=table.transfer_seconds(here, there, nbytes),
            backward_seconds=table.transfer_seconds(there, here, nbytes),
        )
        for (here, there), nbytes in zip(pairwise(shape.places()), edges, strict=True)
    ]
