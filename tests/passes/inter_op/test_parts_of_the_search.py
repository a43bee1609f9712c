"""The halves of the search over stages, each by itself against brute force: dynamic program, branch and bound."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from passes.inter_op import Submesh, partitions
from passes.inter_op.choices import LowerBound, place
from passes.inter_op.costs import entries
from passes.inter_op.dynamic_program import Stages, bounds_with, levels, trace
from passes.inter_op.requests import Requests
from passes.inter_op.search import branch_and_bound
from tests.passes.inter_op.made_up import CASES, Alike, Random, brute_force, host, partition, shaped

LAYERS, DEVICES = 4, 4


def values_of(seed: int, choices: tuple[Submesh, ...]) -> np.ndarray:
    """Random values of stages [choices, layers, layers + 1], some of which cannot be had."""
    rng = np.random.default_rng(seed)
    values = rng.uniform(1, 2, (len(choices), LAYERS, LAYERS + 1))
    values[rng.random(values.shape) < 0.1] = math.inf
    return np.where(np.tri(LAYERS, LAYERS + 1, dtype=bool), math.inf, values)


def partitions_of(values: np.ndarray, choices: tuple[Submesh, ...], n_stages: int) -> list[list[tuple[int, int, int]]]:
    """Every (choice, first, last) of so many stages that cover the layers and find room on one host."""
    return [
        list(zip(shapes, (0, *cuts), (*cuts, LAYERS), strict=True))
        for cuts in itertools.combinations(range(1, LAYERS), n_stages - 1)
        for shapes in itertools.product(range(len(choices)), repeat=n_stages)
        if sum(choices[c].n_devices for c in shapes) <= DEVICES
    ]


@pytest.mark.parametrize("combine", [np.add, np.maximum])
@pytest.mark.parametrize("seed", range(6))
def test_levels_are_the_least_of_all_partitions(seed: int, combine: np.ufunc) -> None:
    places = place(host(DEVICES), shaped(host(DEVICES), (1, 2, 4)), idle=True)
    choices, values = places.choices, values_of(seed, places.choices)
    hops = np.zeros((LAYERS + 1, len(choices), len(choices), len(places.final)))
    program = (lambda _: Stages.of(values), hops, places, combine)
    tables = levels(*program, LAYERS, np.full((LAYERS + 1, len(places.final)), math.inf))
    for n_stages in range(1, LAYERS + 1):
        every = partitions_of(values, choices, n_stages)
        best = min((float(combine.reduce([values[stage] for stage in stages])) for stages in every), default=math.inf)
        level = tables[n_stages - 1][:, 0, 0].min() if n_stages <= len(tables) else math.inf
        assert level == pytest.approx(best)
        if math.isfinite(best):
            stages = trace(*program, tables[:n_stages])
            assert list(stages) in every
            assert combine.reduce([values[stage] for stage in stages]) == pytest.approx(best)


def test_entries_are_requested_from_the_lowest_bound_on() -> None:
    """Stages on both devices are bounded by a second; those on one of them, which take longer, by two."""
    places, asked_for = place(host(2), shaped(host(2), (1, 2)), idle=True), list[Any]()
    requests = Requests(
        places=places,
        table=Alike(seconds=2.0),
        entries=tuple(entries(1, places, [1])),
        n_layers=1,
        memory_limit=math.inf,
        chained=True,
        lower_bound=lambda first, last, submesh, m: LowerBound(2.0 / submesh.n_devices, 2.0 / submesh.n_devices, 0),
        prefetch=lambda runs, seconds: asked_for.append([submesh.n_devices for _, _, submesh, _ in runs]),
        known={1: {}},
    )
    assert requests.ask(math.inf)
    assert not requests.ask(1.5)
    assert requests.ask(3.0)
    assert not requests.ask(3.0)
    assert asked_for == [[2], [1]]


@pytest.mark.parametrize("seed", range(6))
def test_no_partition_with_a_stage_stays_below_its_bound(seed: int) -> None:
    """With no latencies a step takes at least the period of its slowest stage."""
    places = place(host(DEVICES), shaped(host(DEVICES), (1, 2, 4)), idle=True)
    periods = values_of(seed, places.choices)
    bounds = bounds_with(periods, np.where(np.isfinite(periods), 0.0, math.inf), places)
    least = np.full(periods.shape, math.inf)
    for n_stages in range(1, LAYERS + 1):
        for stages in partitions_of(periods, places.choices, n_stages):
            slowest = max(periods[stage] for stage in stages)
            for stage in stages:
                least[stage] = min(least[stage], slowest)
    assert (bounds <= least * (1 + 1e-9)).all()
    assert (bounds[np.isfinite(periods)] >= periods[np.isfinite(periods)]).all()


@pytest.mark.parametrize("seed", range(4))
def test_branch_and_bound_alone_comes_to_the_optimum(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n_layers, whole, sizes = CASES[seed % len(CASES)]
    choices, options = shaped(whole, sizes), {"schedules": ("gpipe", "1f1b"), "microbatches": (4,)}
    proofs: list[float] = []
    monkeypatch.setattr(partitions, "search_single_stages", lambda *_: None)
    monkeypatch.setattr(partitions, "search_by_period", lambda *_: None)

    def proved(*arguments: Any) -> float:
        proofs.append(branch_and_bound(*arguments))
        return proofs[-1]

    monkeypatch.setattr(partitions, "branch_and_bound", proved)
    partition_found = partition(n_layers, whole, choices, Random(seed=seed), **options, most_extended=10**6)
    best = brute_force(n_layers, whole, choices, Random(seed=seed), **options)
    assert partition_found.statistics.programs == 0
    assert partition_found.seconds == pytest.approx(best)
    assert partition_found.bound == pytest.approx(best)
    assert proofs == [partition_found.bound]
