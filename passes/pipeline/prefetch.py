"""Prices that a search is going to ask for one by one, found at once, so that worker processes share the work.

Asked for one by one, each would be bounded by those before, so a few prices are found here that would not be needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from passes.inter_op import Candidate, Submesh
from passes.pipeline.block_costs import PriceRequest
from passes.pipeline.stage_table import LEAST_GAIN, PRICE_TOLERANCE, StageCostTable
from passes.pipeline.step_blocks import Counted

Blocks = tuple[int, int, int]
"""The first block of a stage, the one after its last, and its devices."""

_Run = tuple[Sequence[Counted], int, int, float]
"""Blocks on so many devices in so many microbatches, and the period in seconds that they must stay below."""


def price_layers(table: StageCostTable, layers: Sequence[tuple[int, int, Submesh, int]], seconds: float) -> None:
    """Finds the prices that `table.candidate` asks for with each of these arguments, for steps below some seconds."""
    runs: list[_Run] = [
        (table.step.in_layers(first, last, count), submesh.n_devices, count, seconds / count)
        for first, last, submesh, count in layers
    ]
    _price(table, runs, (1, None))  # the heaviest block may be too much


def price_stages(table: StageCostTable, stages: Sequence[tuple[Blocks, float]], microbatches: int) -> None:
    """Finds the prices that `table.stage` asks for, for each of these stages with its cutoff."""
    runs: list[_Run] = [
        (table.step.counted(begin, end, microbatches), n_devices, microbatches, cutoff)
        for (begin, end, n_devices), cutoff in stages
    ]
    _price(table, runs, (None,))


def price_first(stages: Sequence[tuple[StageCostTable, Blocks, float]], microbatches: int) -> None:
    """Finds the prices that `stage` asks for first, for each of these tables with a stage and its cutoff."""
    by_costs: dict[int, tuple[StageCostTable, list[PriceRequest]]] = {}
    for table, (begin, end, n_devices), cutoff in stages:
        chosen = table.step.counted(begin, end, microbatches)
        (_, mesh), *_ = table.order(chosen, n_devices)
        _, requests = by_costs.setdefault(id(table.block_costs), (table, []))
        requests += table.requests(chosen, mesh, cutoff)[: 1 if math.isfinite(cutoff) else None]
    for table, requests in by_costs.values():
        table.price_all(requests)


def price_near(table: StageCostTable, stages: Sequence[Blocks], microbatches: int) -> None:
    """Finds the prices that `table.near` asks for, for each of these stages, whose best mesh is known."""
    requests: list[PriceRequest] = []
    for begin, end, n_devices in stages:
        chosen = table.step.counted(begin, end, microbatches)
        first, *others = table.by_wins(n_devices)
        costs = table.costs(chosen, first, math.inf)
        period = Candidate.together(costs, first).period(microbatches) if costs else math.inf
        requests += table.ahead(chosen, others, (1 + PRICE_TOLERANCE) * period)
    table.price_all(requests)


def _price(table: StageCostTable, runs: Sequence[_Run], rounds: Sequence[int | None]) -> None:
    """Prices runs on the mesh that is tried first for each, so many blocks in each round, and then on the others."""
    meshes = [[mesh for _, mesh in table.order(chosen, n_devices)] for chosen, n_devices, *_ in runs]
    for most in rounds:
        table.price_all(
            [
                request
                for (chosen, *_, cutoff), (mesh, *_) in zip(runs, meshes, strict=True)
                for request in table.requests(chosen, mesh, cutoff)[: most if math.isfinite(cutoff) else None]
            ]
        )
    requests: list[PriceRequest] = []
    for (chosen, n_devices, count, cutoff), (first, *others) in zip(runs, meshes, strict=True):
        costs = table.costs(chosen, first, cutoff)
        period = Candidate.together(costs, first).period(count) if costs else 0.0
        if period > table.good_enough(chosen, n_devices):
            requests += table.ahead(chosen, others, period / (1 + LEAST_GAIN))
    table.price_all(requests)
