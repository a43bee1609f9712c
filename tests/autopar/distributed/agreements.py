"""What two processes must agree on, and what they read of each other: a script for `launch`. Each line is a finding."""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar import DataParallel, Megatron, Pipeline, Zero, comparing
from autopar.profiling import timed

RANK = jax.process_index()
KEY = jax.random.key(0)


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


def close(ours: Any, theirs: Any) -> bool:
    """Whether what this process has of some arrays is as it should be."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return all(
        np.allclose(shard.data, np.asarray(other)[shard.index], rtol=1e-5, atol=1e-6)
        for mine, other in pairs
        for shard in mine.addressable_shards
    )


def nbytes_of(arrays: Any) -> int:
    """The bytes of arrays, of which several processes have a part each."""
    return sum(array.nbytes for array in arrays)


def changed(params: Any) -> Any:
    """The parameters with another first element of the third on the last device of the second process."""
    shards = [np.array(shard.data) for shard in params[2].addressable_shards]
    shards[-1][0, 0] += RANK
    devices = [shard.device for shard in params[2].addressable_shards]
    arrays = [jax.device_put(shard, device) for shard, device in zip(shards, devices, strict=True)]
    there = jax.make_array_from_single_device_arrays(params[2].shape, params[2].sharding, arrays)
    return [*params[:2], there, *params[3:]]


def say(*words: object) -> None:
    """Prints a line that can be told from what Gloo writes in pieces, also where it has begun the line."""
    print("said:", *words)


def main() -> None:
    params = [np.full((4, 4), 0.1 + i, np.float32) for i in range(4)]
    batch = np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)
    parallel = autopar.parallelize(step, planner=DataParallel())
    if RANK == 0:  # the first process plans, and waits for nobody
        say("hosts", parallel.plan(params, batch).cluster.groups[0].hosts)
    say("arguments", refused(parallel, params, batch + RANK))
    say("constants", refused(scaled, 1.0 + RANK, batch))
    say("programs", refused(autopar.parallelize(lambda x: x + 1 if RANK else x * 2), batch))
    say("planner", refused(autopar.parallelize(step, planner=Broken()), params, batch))
    say("arrays", refused(parallel, [jnp.asarray(params[0] + RANK), *params[1:]], batch))
    plain = jax.jit(step)
    # Across both processes, on the second the later stage, each stage cut in two.
    planner = Megatron(data=1, tensor=2, pipeline=2, microbatches=2)
    pipelined = autopar.parallelize(step, planner=planner)
    before = {id(array) for array in jax.live_arrays()}
    made = pipelined.init(lambda key: [p + jax.random.normal(key, p.shape) for p in params], KEY, others=(batch,))
    here = [array for array in jax.live_arrays() if id(array) not in before and array.dtype == np.float32]
    say("init", sum(shard.data.nbytes for array in here for shard in array.addressable_shards), nbytes_of(made))
    state, loss = pipelined(params, batch)
    again, less = parallel(state, batch)  # what one plan has made is an argument of another
    theirs, wanted = plain(params, batch)
    equal = close((state, loss), (theirs, wanted)) and close((again, less), plain(theirs, batch))
    say("equal", equal, round(float(loss), 3))
    checks = parallel.checks(every=1)
    say("checks", refused(checks, 1, again), refused(checks, 2, changed(again)))
    drawn, plain = autopar.parallelize(dropped, planner=Pipeline(stages=2, microbatches=2)), jax.jit(dropped)
    ours = theirs = (params, jax.random.key(3))
    for _ in range(2):
        (ours, total), (theirs, wanted) = drawn(ours, batch), plain(theirs, batch)
        say("keys", bool(abs(total - wanted) < 1e-5))
    # By the clock of the second process a step is long, and any other plan's is longer.
    ticks = itertools.count()
    comparing.timed = partial(timed, clock=(lambda: 100.0 * next(ticks) ** 2) if RANK else time.perf_counter)
    comparison = autopar.compare(parallel, (params, batch), planners={"zero": Zero(3)})
    say("compared", [row.name for row in comparison.rows])


if __name__ == "__main__":
    main()
