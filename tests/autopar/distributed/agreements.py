"""What two processes must agree on, and what they read of each other: a script for `launch`. Each line is a finding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar import DataParallel, Pipeline

RANK = jax.process_index()


def step(params, batch):
    def loss(params):
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, gradient), value


def dropped(state, batch):
    """A step whose layers draw from a key that the state holds."""
    params, key = state
    key, *keys = jax.random.split(key, 1 + len(params))

    def loss(params):
        x = batch
        for w, k in zip(params, keys, strict=True):
            x = jnp.tanh(x @ w) * jax.random.bernoulli(k, 0.5, w.shape[1:])
        return jnp.mean(x**2)

    return (jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params)), key), params[0].sum()


def scaled(factor: float, x: np.ndarray):
    return autopar.parallelize(lambda x: x * np.float32(factor))(x)


class Broken:
    def plan(self, step: Any, cluster: Any, options: Any) -> Any:
        raise autopar.OverBudgetError("nothing fits")


def refused(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except autopar.PlanningError as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return "not refused"


def main() -> None:
    params = [np.full((4, 4), 0.1 + i, np.float32) for i in range(4)]
    batch = np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)
    parallel = autopar.parallelize(step, planner=DataParallel())
    if RANK == 0:  # the first process plans, and waits for nobody
        print("hosts", parallel.plan(params, batch).cluster.groups[0].hosts)
    print("arguments", refused(parallel, params, batch + RANK))
    print("constants", refused(scaled, 1.0 + RANK, batch))
    print("programs", refused(autopar.parallelize(lambda x: x + 1 if RANK else x * 2), batch))
    print("planner", refused(autopar.parallelize(step, planner=Broken()), params, batch))
    print("arrays", refused(parallel, [jnp.asarray(params[0] + RANK), *params[1:]], batch))
    for planner in (DataParallel(), Pipeline(stages=2, microbatches=2)):
        state, loss = autopar.parallelize(step, planner=planner)(params, batch)
        again, _ = parallel(state, batch)  # what one plan has made is an argument of another
        print(
            "again",
            all(np.isfinite(shard.data).all() for p in again for shard in p.addressable_shards),
            round(float(loss), 3),
        )
    drawn, plain = autopar.parallelize(dropped, planner=Pipeline(stages=2, microbatches=2)), jax.jit(dropped)
    ours = theirs = (params, jax.random.key(3))
    for _ in range(2):
        (ours, total), (theirs, wanted) = drawn(ours, batch), plain(theirs, batch)
        print("keys", bool(abs(total - wanted) < 1e-5))


if __name__ == "__main__":
    main()
