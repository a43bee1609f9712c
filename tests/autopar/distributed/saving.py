"""Training that is saved and gone on with under other plans and processes: a script for `launch`.

Arguments: a folder, the planner, the step to go on to; a line comes out for each checkpoint restored or saved, and a
digest of the last state.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.checkpoint.digests import digest, partial_sum, pieces_of
from benchmarks.trainings import MODELS


def main(folder: str, name: str, planner: str, until: str) -> None:
    autopar.distributed.initialize()
    training = MODELS[name].training("float32", least=True)
    step = autopar.parallelize(training.step, planner=eval(planner, vars(autopar)), donate_argnums=0)
    (like, _), _ = step.placement(training.state, training.batch)
    with autopar.Checkpoints(folder) as checkpoints:
        saved = checkpoints.restore(like)
        if saved:
            state, first = saved.state, saved.step
            print("restored", first, digest_of(state), saved.position, flush=True)
        else:
            state, first = step.init(lambda: jax.tree.map(jnp.asarray, training.state)), 0
        for _ in range(first, int(until)):
            state, _ = step(state, training.batch)
        checkpoints.save(int(until), state, position=int(until), plan=step.plan(state, training.batch))
    print("saved", until, digest_of(state), flush=True)


def digest_of(state: Any) -> str:
    """A digest of this process's part of a state, summed over processes."""
    sums = [partial_sum(pieces_of(leaf, is_global=True), np.shape(leaf)) for leaf in jax.tree.leaves(state)]
    if jax.process_count() > 1:
        from autopar.distributed import among

        rows = among(jax.devices()).gather("digests", " ".join(map(str, sums)))  # pyright: ignore
        sums = [sum(column) for column in zip(*(map(int, row.split()) for row in rows), strict=True)]
    return digest([int(digest([value]), 16) * (3 + 2 * at) for at, value in enumerate(sums)])


if __name__ == "__main__":
    main(*sys.argv[1:])
