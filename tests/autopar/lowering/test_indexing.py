"""Rows of a table that is cut by rows: whichever device has a row reads or writes it, in bounds or not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar

TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(64, 16)), jnp.float32)


def looked_up(table: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    return table.at[indices].get(mode="fill", fill_value=7), table.at[indices].add(1.0, mode="drop")


@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_barrier_stands_before_a_single_index_alone(count: int):
    """With several, it would keep as many zeros as a gradient is scattered into."""
    cut = NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
    step = autopar.parallelize(looked_up, in_shardings=(cut, None), out_shardings=(None, cut))
    r = np.random.default_rng(count)
    text = step.lower(TABLE, jnp.zeros(count, jnp.int32)).as_text()
    assert text.count("optimization_barrier") == (2 if count == 1 else 0)
    for _ in range(10):
        indices = jnp.asarray(r.integers(-100, 100, count), jnp.int32)
        for ours, theirs in zip(step(TABLE, indices), jax.jit(looked_up)(TABLE, indices), strict=True):
            np.testing.assert_array_equal(ours, theirs)
