"""Lower bounds of runs of layers, and of blocks in other numbers of microbatches, from the floors of their blocks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from passes.pipeline.lower_bounds import BlockBounds, LayerBounds


@pytest.mark.parametrize("seed", range(8))
def test_floors_are_those_of_the_best_mesh_worth_having(seed: int) -> None:
    """One run after the other: sums of its blocks on each mesh; meshes dearer than one all known do not count."""
    rng = np.random.default_rng(seed)
    layers, kinds, meshes = 4, 3, 3
    blocks = rng.integers(0, 2, (layers, kinds))
    sums = np.vstack([np.zeros((1, kinds)), blocks.cumsum(0)])
    floors = rng.uniform(1, 2, (2, kinds, meshes))
    floors[:, rng.random((kinds, meshes)) < 0.2] = np.inf
    known, nbytes = rng.random((kinds, meshes)) < 0.5, rng.uniform(1, 2, kinds)
    found = LayerBounds.of(sums, floors, known, nbytes, 7)
    assert found.n_prices == 7
    for first in range(layers):
        for last in range(first + 1, layers + 1):
            count = blocks[first:last].sum(0)
            own = np.flatnonzero(count)
            seconds, periods = ([sum(count[k] * table[k, m] for k in own) for m in range(meshes)] for table in floors)
            best = min((periods[m] for m in range(meshes) if known[own, m].all()), default=np.inf)
            assert found.periods[first, last] == pytest.approx(min(periods))
            worth = [s for s, period in zip(seconds, periods, strict=True) if period <= best * (1 + 1e-9)]
            assert found.seconds[first, last] == pytest.approx(min(worth, default=np.inf))
            assert found.nbytes[first, last] == pytest.approx(count @ nbytes)


def test_a_number_of_microbatches_without_a_price_takes_no_less_than_between_its_neighbours() -> None:
    """A microbatch takes min over two ways of (a / count + b): the chord of known steps is below each step between."""
    counts = (4, 16, 32, 64, 128)
    period = {n: min(6 / n + 0.05, 4 / n + 0.07) for n in counts}
    priced = {4, 16, 128}

    def lower_bound(block: Any, mesh: object) -> tuple[float, float]:
        exact = period[block.count] if block.count in priced else 0.01 / block.count
        return exact, exact

    costs: Any = SimpleNamespace(
        n_prices=len(priced),
        is_known=lambda block, mesh: block.count in priced,
        lower_bound=lower_bound,
        least=lambda block, cluster, n_devices: (0.0, 7.0),
    )
    step: Any = SimpleNamespace(
        samples=dict.fromkeys(counts),
        counted=lambda begin, end, n: ((SimpleNamespace(kind=f"of {n}", count=n), end - begin),),
        kinds=lambda begin, end, n: ((f"of {n}", end - begin),),
    )
    mesh: Any = SimpleNamespace(size=2)
    cluster: Any = None
    bounds = BlockBounds(step=step, cluster=cluster, meshes=lambda n: [mesh], block_costs=costs)
    for n in counts:
        bound = bounds.of_blocks(0, 3, 2, n)
        assert bound.period <= 3 * period[n] * (1 + 1e-9)
        assert bound.nbytes == 21
        if n in priced:
            assert bound.period == pytest.approx(3 * period[n])
        else:
            share = (n - 16) / 112
            assert bound.period == pytest.approx(3 * ((1 - share) * 16 * period[16] + share * 128 * period[128]) / n)
