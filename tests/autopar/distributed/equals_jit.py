"""Steps of models on the devices of all processes, held against `jax.jit`'s by each of them: a script for `launch`.

An argument is a model and a planner, as in `gpt=Pipeline(stages=2, microbatches=4)`. A line comes out for each, with
the losses.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from benchmarks.trainings import MODELS, QUICK

STEPS = 3
TOLERANCE = 1e-10


def main(cases: list[str]) -> None:
    autopar.distributed.initialize()
    jax.config.update("jax_enable_x64", True)
    for case in cases:
        name, _, planner = case.partition("=")
        losses = trained(name, eval(planner, vars(autopar)))
        print(f"equal: {case}: {losses}", flush=True)


def trained(name: str, planner: Any) -> list[float]:
    """The losses, after every array that this process has a part of is found equal to that of `jax.jit`."""
    training = MODELS[name].training("float64", least=True)
    ours, theirs = jax.tree.map(jnp.array, training.state), training.state
    parallel = autopar.parallelize(training.step, planner=planner, donate_argnums=0)
    plain = jax.jit(training.step, compiler_options=QUICK)
    # The first batch is a whole one on every process; of the others each has its rows alone.
    batches = [training.batch, *[jax.tree.map(by_process, training.batch)] * (STEPS - 1)]
    losses: list[float] = []
    for batch in batches:
        (ours, loss), (theirs, wanted) = parallel(ours, batch), plain(theirs, training.batch)
        for mine, other in zip(jax.tree.leaves((ours, loss)), jax.tree.leaves((theirs, wanted)), strict=True):
            assert_close(mine, np.asarray(other))
        losses.append(float(loss))
    return losses


def by_process(batch: Any) -> jax.Array:
    """A batch as a global array, of which every process has given its own rows; whole, if they cannot be shared."""
    rows = np.asarray(batch)
    if len(rows) % jax.process_count():
        return batch
    devices = np.asarray(jax.devices(), dtype=object).reshape(jax.process_count(), -1)
    sharding = NamedSharding(Mesh(devices, ("process", "device")), PartitionSpec("process"))
    return jax.make_array_from_process_local_data(
        sharding, np.split(rows, jax.process_count())[jax.process_index()], rows.shape
    )


def assert_close(mine: jax.Array, other: np.ndarray) -> None:
    assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
    scale = max(float(np.max(np.abs(other), initial=0.0)), 1e-30)
    for shard in mine.addressable_shards:
        error = np.max(np.abs(np.asarray(shard.data) - other[shard.index]), initial=0.0) / scale
        assert error <= TOLERANCE, error


if __name__ == "__main__":
    main(sys.argv[1:])
