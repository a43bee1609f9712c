"""LayerBounds of runs of layers, from the floors of their blocks."""

import numpy as np
import pytest

from passes.pipeline.lower_bounds import LayerBounds


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
