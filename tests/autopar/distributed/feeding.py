"""Batches of Grain's on several processes, gone on with where a checkpoint says: a script for `launch`.

Arguments: a folder, whether each process reads its `own` rows or `whole` batches, and the step to stop behind. What all
elements add up to, each weighed with its step, comes out.
"""

from __future__ import annotations

import sys
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

import autopar

ROWS, ELEMENTS = 4, 64


def step(total: jax.Array, batch: Any) -> jax.Array:
    """A sum by which an element that is left out, taken twice or out of turn is seen."""
    return 3 * total + jnp.sum(batch["x"] * (1 + jnp.arange(ROWS, dtype=jnp.uint32)[:, None]))


def loader(kind: str) -> Any:
    """The batches of an epoch and more, in a random order."""
    data, rows = grain.MapDataset.range(ELEMENTS).seed(7).shuffle().repeat(), ROWS
    if kind == "own":
        data, rows = data[jax.process_index() :: jax.process_count()], ROWS // jax.process_count()
    return data.map(lambda at: {"x": np.full(3, at, np.uint32)}).batch(rows).to_iter_dataset()


def main(folder: str, kind: str, until: str) -> None:
    parallel = autopar.parallelize(step, planner=autopar.DataParallel())
    types = {"x": jax.ShapeDtypeStruct((ROWS, 3), np.uint32)}
    (like, _), _ = parallel.placement(jax.ShapeDtypeStruct((), np.uint32), types)
    with autopar.Checkpoints(folder) as checkpoints:
        saved = checkpoints.restore(like)
        total, first = (saved.state, saved.step) if saved else (np.uint32(1), 0)
        print("from", first, flush=True)
        position = saved.position if saved else None
        data = parallel.batches(loader(kind), prefetch=3, position=position, own_rows=kind == "own")
        for _ in range(first, int(until)):
            total = parallel(total, next(data))
        checkpoints.save(int(until), total, position=data.position)
    print("total", int(total), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
