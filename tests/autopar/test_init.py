"""State made in place: the numbers of `init_fn`, on the devices that read them, and never whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from autopar import DataParallel, Megatron, Pipeline, Zero
from tests.sample import slow

LAYERS, WIDTH = 4, 16
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)


def init(key: jax.Array) -> Any:
    keys = jax.random.split(key, LAYERS)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) * 0.1 for k in keys]
    return params, OPTIMIZER.init(params), key


def init_stacked(key: jax.Array) -> Any:
    params = {"w": jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) * 0.1}
    return params, OPTIMIZER.init(params), key


def step(state: Any, batch: Any) -> Any:
    params, moments, key = state

    def loss(params: Any) -> jax.Array:
        x = batch
        if isinstance(params, dict):
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
        else:
            for w in params:
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    value, gradient = jax.value_and_grad(loss)(params)
    updates, moments = OPTIMIZER.update(gradient, moments)
    return (optax.apply_updates(params, updates), moments, key), value


BATCH = jax.ShapeDtypeStruct((8, WIDTH), np.float32)
CASES = [
    (init_stacked, Zero(3), 8),
    (init_stacked, Pipeline(stages=2, microbatches=2), 2),
    (init, DataParallel(), 1),
    (init, Zero(3), 8),
    (init, Pipeline(stages=2, microbatches=2), 1),
    (init, Megatron(data=2, tensor=2, pipeline=2, microbatches=2), 2),
]


@pytest.mark.parametrize(("init_fn", "planner", "ways"), [CASES[0], *(slow(*case) for case in CASES[1:])])
def test_a_state_is_made_where_it_is_read(init_fn: Any, planner: Any, ways: int):
    parallel = autopar.parallelize(step, planner=planner, donate_argnums=0)
    alive = jax.live_arrays()  # kept, so that no number is given again
    before = set(map(id, alive))
    state = parallel.init(init_fn, jax.random.key(0), others=(BATCH,))
    here = [array for array in jax.live_arrays() if id(array) not in before and array.dtype == np.float32]
    largest = max(shard.data.size for array in here for shard in array.addressable_shards)
    assert largest == max(np.size(leaf) for leaf in jax.tree.leaves(state)) // ways
    expected = jax.jit(init_fn)(jax.random.key(0))
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert str(jax.typeof(ours)) == str(jax.typeof(theirs))
        if ours.dtype == np.float32:
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    (places, _), _ = parallel.placement(state, BATCH)
    assert [a.sharding for a in jax.tree.leaves(state)] == [a.sharding for a in jax.tree.leaves(places)]


@pytest.mark.slow
@pytest.mark.parametrize(("init_fn", "planner"), [case[:2] for case in CASES])
def test_a_state_made_in_place_is_stepped_as_any(init_fn: Any, planner: Any):
    parallel = autopar.parallelize(step, planner=planner, donate_argnums=0)
    batch = np.linspace(-1, 1, 8 * WIDTH, dtype=np.float32).reshape(8, WIDTH)
    parallel.plan(jax.eval_shape(init_fn, jax.random.key(0)), batch)
    again = parallel.init(init_fn, jax.random.key(0))  # planned for by now
    expected = jax.jit(init_fn)(jax.random.key(0))
    ours, loss = parallel(again, batch)
    theirs, wanted = jax.jit(step)(expected, batch)
    assert abs(loss - wanted) < 1e-6
    for a, b in zip(jax.tree.leaves(ours[:2]), jax.tree.leaves(theirs[:2]), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(again[:2]))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.a, self.b = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(jnp.tanh(self.a(x)))


def net_step(net: Net, batch: jax.Array) -> Any:
    value, gradient = nnx.value_and_grad(lambda net: jnp.mean(net(batch) ** 2))(net)
    nnx.update(net, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(net, nnx.Param), gradient))
    return net, value


@pytest.mark.slow
@pytest.mark.parametrize(("planner", "ways"), [(Zero(3), 8), (Pipeline(stages=2, microbatches=2), 1)])
def test_a_module_of_nnx_is_made_where_it_is_read(planner: Any, ways: int):
    parallel = autopar.parallelize(net_step, planner=planner)
    before = {id(array) for array in jax.live_arrays()}
    net = parallel.init(lambda key: Net(nnx.Rngs(key)), jax.random.key(0), others=(BATCH,))
    here = [array for array in jax.live_arrays() if id(array) not in before and array.ndim == 2]
    assert max(shard.data.size for array in here for shard in array.addressable_shards) <= 2 * WIDTH**2 // ways
    expected = Net(nnx.Rngs(jax.random.key(0)))
    for ours, theirs in zip(jax.tree.leaves(net), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    batch = np.linspace(-1, 1, 8 * WIDTH, dtype=np.float32).reshape(8, WIDTH)
    (_, loss), (_, wanted) = parallel(net, batch), nnx.jit(net_step)(expected, batch)
    assert abs(loss - wanted) < 1e-6


def test_init_without_the_steps_other_arguments_is_refused():
    with pytest.raises(autopar.ArgumentError, match=r"init\(init_fn, key, others=\(batch,\)\)"):
        autopar.parallelize(step).init(init, jax.random.key(0))


def test_arguments_that_are_not_in_a_tuple_are_refused():
    with pytest.raises(autopar.ArgumentError, match=r"init\(others=.*\n.*others=\(batch,\)"):
        autopar.parallelize(step).init(init, jax.random.key(0), others=BATCH)  # pyright: ignore[reportArgumentType]
