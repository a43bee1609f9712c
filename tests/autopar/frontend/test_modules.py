"""Steps on modules of Flax NNX and Equinox, as their own `jit` takes them, under the decorator alone."""

from __future__ import annotations

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from autopar.frontend import modules
from tests.sample import slow

X = jax.random.normal(jax.random.key(1), (16, 8))
DESCENT = optax.sgd(0.1, momentum=0.9)
PLANNERS = [autopar.DataParallel(), slow(autopar.Zero(3)), slow(autopar.Pipeline(stages=2, microbatches=4))]


def assert_close(mine: Any, theirs: Any) -> None:
    """Arrays close, and everything else the very same object."""
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        if isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        else:
            assert x is y or bool(jnp.all(x == y))


class Net(nnx.Module):
    """Layers with parameters, running statistics or a stream of keys."""

    def __init__(self, is_normed: bool) -> None:
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs) if is_normed else nnx.LayerNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def changed_in_place(model: Net, optimizer: nnx.Optimizer[Any], x: jax.Array) -> None:
    _, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, grads)


def trained(step: Any, is_normed: bool) -> Any:
    model = Net(is_normed)
    optimizer = nnx.Optimizer(model, DESCENT, wrt=nnx.Param)
    for _ in range(2):
        step(model, optimizer, X)
    return nnx.state((model, optimizer))


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_step_for_nnx_jit_updates_its_modules(planner: Any):
    is_normed = not isinstance(planner, autopar.Pipeline)  # statistics of a batch are those of no microbatch
    step = autopar.parallelize(changed_in_place, planner=planner, donate_argnums=(0, 1), devices=jax.devices()[:4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = trained(step, is_normed)
    assert_close(state, trained(nnx.jit(changed_in_place), is_normed))


@pytest.mark.parametrize("planner", [autopar.DataParallel(), slow(autopar.Pipeline(stages=2, microbatches=4))])
def test_a_compiled_program_takes_and_updates_modules(planner: Any):
    parallel = autopar.parallelize(changed_in_place, planner=planner, devices=jax.devices()[:4])
    model = Net(False)
    compiled = parallel.lower(model, nnx.Optimizer(model, DESCENT, wrt=nnx.Param), X).compile()
    assert compiled.plan.n_devices == 4
    assert_close(trained(compiled, False), trained(nnx.jit(changed_in_place), False))


def test_the_state_of_modules_is_known_as_such():
    model = Net(is_normed=True)
    optimizer = nnx.Optimizer(model, DESCENT, wrt=nnx.Param)
    step = autopar.parallelize(changed_in_place).step(model, optimizer, X)
    names = [step.graph.input_names[i] for _, i in step.state_pairs]
    assert "model['up']['kernel'].value" in names
    assert len(names) == len(step.graph.inputs) - 1
    assert [step.graph.input_names[i] for i in step.batch] == ["x"]


def test_modes_are_compiled_apart_and_new_modules_come_out():
    def evaluated(model: Net, x: jax.Array) -> tuple[jax.Array, Net]:
        model.eval()
        return model(x), nnx.clone(model)

    (mine, theirs), step = (Net(True), Net(True)), autopar.parallelize(evaluated, devices=jax.devices()[:2])
    for _ in range(2):  # the second call takes modules in the mode in which the first one left them
        got, wanted = step(mine, X), nnx.jit(evaluated)(theirs, X)
        assert_close(got[0], wanted[0])
        assert_close(nnx.state(got[1]), nnx.state(wanted[1]))
        assert mine.dropout.deterministic


class Layers(eqx.Module):
    """Leaves that are arrays, and leaves that are none."""

    layers: list[eqx.nn.Linear]
    activation: Any
    dropout: eqx.nn.Dropout
    is_residual: bool

    def __init__(self) -> None:
        up, down = jax.random.split(jax.random.key(0))
        self.layers = [eqx.nn.Linear(8, 16, key=up), eqx.nn.Linear(16, 8, key=down)]
        self.activation, self.dropout, self.is_residual = jax.nn.relu, eqx.nn.Dropout(0.25), True

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        y = self.layers[1](self.dropout(self.activation(self.layers[0](x)), key=key))
        return x + y if self.is_residual else y


def filtered(model: Layers, state: Any, x: jax.Array, key: jax.Array, kind: str) -> Any:
    @eqx.filter_value_and_grad
    def loss(model: Layers) -> jax.Array:
        error = jax.vmap(model)(x, jax.random.split(key, len(x))) - x / 2
        return jnp.mean(error**2 if kind == "squares" else jnp.abs(error))

    value, grads = loss(model)
    updates, state = DESCENT.update(grads, state)
    return eqx.apply_updates(model, updates), state, value, kind


@pytest.mark.parametrize("planner", [autopar.DataParallel(), slow(autopar.Zero(3))])
def test_a_step_for_filter_jit_takes_leaves_that_are_no_arrays(planner: Any):
    step = autopar.parallelize(filtered, planner=planner, devices=jax.devices()[:4])
    model = Layers()
    state, key = DESCENT.init(eqx.filter(model, eqx.is_array)), jax.random.PRNGKey(3)
    for kind in ("squares", "absolute values"):
        assert_close(step(model, state, X, key, kind), eqx.filter_jit(filtered)(model, state, X, key, kind))
    traced = step.step(model, state, X, key, "squares")
    assert [traced.graph.input_names[i] for i in traced.batch] == ["x"]
    assert len(traced.state_pairs) == len(jax.tree.leaves(eqx.filter((model, state), eqx.is_array)))


def test_modules_alone_are_taken_apart():
    assert modules.library_of(((X, {"state": nnx.state(Net(True))}), {})) is None
    assert modules.library_of(((X, Net(True)), {})) is not None
    assert modules.library_of(((), {"model": [Layers()]})) is not None


def test_a_step_of_which_nothing_is_computed_warns():
    def lost(data: dict[str, jax.Array]) -> None:
        data["x"] = data["x"] + 1

    with pytest.warns(UserWarning, match="nothing of it is computed"):
        autopar.parallelize(lost)({"x": X})


def test_a_module_of_equinox_is_made_and_described_as_others_are():
    def step(model: eqx.nn.MLP, x: jax.Array) -> tuple[eqx.nn.MLP, jax.Array]:
        loss, grads = eqx.filter_value_and_grad(lambda model: jnp.mean((jax.vmap(model)(x) - x) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    def init(key: jax.Array) -> eqx.nn.MLP:
        return eqx.nn.MLP(8, 8, 16, 2, key=key)

    parallel = autopar.parallelize(step, planner=autopar.Zero(3))
    model = init(jax.random.key(0))
    made = parallel.init(init, jax.random.key(0), others=(X,))
    assert_close(made, model)
    (placed, of_batch), _ = parallel.placement(model, X)
    assert jax.tree.structure(placed) == jax.tree.structure(model)
    assert placed.activation is model.activation
    assert placed.layers[0].weight.sharding == made.layers[0].weight.sharding
    after, loss = parallel.eval_shape(model, X)
    assert after.activation is model.activation
    assert (loss.shape, after.layers[0].weight.shape) == ((), (16, 8))
    assert all(batch.sharding == of_batch.sharding for batch in parallel.batches([X, X, X]))
