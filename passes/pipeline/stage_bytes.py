"""The bytes of stages of which not all blocks are priced yet."""

from __future__ import annotations

from collections.abc import Sequence

from passes.inter_op import Candidate, StageCost
from passes.pipeline.blocks import Block
from passes.pipeline.stage_table import StageCostTable
from passes.pipeline.step_blocks import Counted


def least_bytes(table: StageCostTable, begin: int, end: int, n_devices: int, microbatches: int) -> StageCost:
    """A stage with the least bytes that some blocks need, their state and what microbatches keep; its seconds are 0."""
    key = table.step.kinds(begin, end, microbatches), n_devices
    if key not in table.least_bytes:
        chosen = table.step.counted(begin, end, microbatches)
        table.least_bytes[key] = Candidate.together([(_of_block(table, b, n_devices), n) for b, n in chosen], None)
    return table.least_bytes[key]


def partly_priced(table: StageCostTable, begin: int, end: int, n_devices: int, microbatches: int) -> list[StageCost]:
    """The stage of some blocks on each mesh where blocks that keep more than half of the bytes have a price.

    The others count with their least bytes, and take no time.
    """
    key = table.step.kinds(begin, end, microbatches), n_devices
    n_prices, stages = table.partly_priced.get(key, (-1, []))
    if n_prices != table.bounds.n_prices:
        stages = _partly_priced(table, table.step.counted(begin, end, microbatches), n_devices)
        table.partly_priced[key] = table.bounds.n_prices, stages
    return stages


def _partly_priced(table: StageCostTable, chosen: Sequence[Counted], n_devices: int) -> list[StageCost]:
    least = [(_of_block(table, block, n_devices), n) for block, n in chosen]
    stages: list[StageCost] = []
    for mesh in table.bounds.meshes_of(n_devices):
        known = [table.block_costs.is_known(block, mesh) for block, _ in chosen]
        prices = [table.block_costs.price(b, mesh) if table.block_costs.is_known(b, mesh) else None for b, _ in chosen]
        if any(is_known and not price for is_known, price in zip(known, prices, strict=True)):
            continue  # it cannot be there
        kept = [(n * floor.in_flight_nbytes, is_known) for (floor, n), is_known in zip(least, known, strict=True)]
        if all(known) or 2 * sum(size for size, is_known in kept if is_known) > sum(size for size, _ in kept):
            costs = [(price or floor, n) for price, (floor, n) in zip(prices, least, strict=True)]
            stages.append(Candidate.together(costs, mesh))
    return stages


def _of_block(table: StageCostTable, block: Block, n_devices: int) -> StageCost:
    return StageCost(
        forward_seconds=0.0,
        backward_seconds=0.0,
        persistent_nbytes=int(table.block_costs.least(block, table.cluster, n_devices)[1]),
        in_flight_nbytes=table.block_costs.kept_nbytes(block) // n_devices,
    )
