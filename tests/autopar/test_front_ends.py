"""Unmodified train steps of the neural-network libraries: three of each, equal to `jax.jit`'s three."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import autopar
from tests.autopar.trainings import BATCH, STEPS, Training, assert_equals_jit, batches, images
from tests.sample import slow

# flax.linen


class Net(nn.Module):
    """A small image classifier with everything that linen keeps beside parameters."""

    @nn.compact
    def __call__(self, image: jax.Array, *, train: bool) -> jax.Array:
        hidden = nn.Conv(8, (3, 3), use_bias=False)(image)
        hidden = nn.relu(nn.BatchNorm(use_running_average=not train)(hidden))
        hidden = nn.avg_pool(hidden, (2, 2), (2, 2)).reshape(image.shape[0], -1)
        hidden = nn.Dropout(0.25, deterministic=not train)(nn.LayerNorm()(nn.Dense(16)(hidden)))
        return nn.Dense(8)(hidden)


class NetState(TrainState):
    batch_stats: Any
    key: jax.Array


def linen_train_state() -> Training:
    def train_step(state: NetState, batch: dict[str, jax.Array]) -> tuple[NetState, Any]:
        dropout = jax.random.fold_in(state.key, state.step)

        def loss(params: Any) -> tuple[jax.Array, Any]:
            logits, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["image"],
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": dropout},
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), (updates, (logits.argmax(-1) == batch["label"]).mean())

        (value, (updates, accuracy)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
        return state, {"loss": value, "accuracy": accuracy}

    net = Net()
    variables = jax.jit(functools.partial(net.init, train=False))(jax.random.key(0), jnp.zeros((1, 8, 8, 2)))
    tx = optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9, nesterov=True)
    state = NetState.create(
        apply_fn=net.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=variables["batch_stats"],
        key=jax.random.key(1),
    )
    return Training(train_step, state, tuple((batch,) for batch in images()), {"donate_argnums": 0})


def linen_scan_and_remat() -> Training:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, hidden: jax.Array, _: None) -> tuple[jax.Array, None]:
            return hidden + nn.tanh(nn.Dense(8)(nn.RMSNorm()(hidden))), None

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, inputs: jax.Array) -> jax.Array:
            blocks = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return nn.Dense(4)(blocks()(inputs, None)[0])

    net, tx = Deep(), optax.sgd(0.05)

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, moments = state
        value, grads = jax.value_and_grad(
            lambda params: jnp.mean((net.apply(params, batch["inputs"]) - batch["targets"]) ** 2)
        )(params)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = jax.jit(net.init)(jax.random.key(0), jnp.zeros((1, 8)))
    return Training(train_step, (params, tx.init(params)), tuple((batch,) for batch in batches()))


# flax.nnx


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        # A bias would be noise: what follows takes the mean away, so its gradient is rounding alone.
        self.up = nnx.Linear(8, 32, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return self.down(self.dropout(nnx.relu(self.norm(self.up(inputs)))))


def nnx_split_and_merge() -> Training:
    """The graph is a static argument, as it is hashable; all that changes is the state."""

    def train_step(state: Any, batch: Any, graph: Any) -> tuple[Any, Any]:
        model, optimizer = nnx.merge(graph, state)

        def loss(model: Model) -> jax.Array:
            return jnp.mean((model(batch["inputs"]) - batch["targets"]) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(optax.linear_schedule(0.1, 0.01, 5), momentum=0.9), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    return Training(train_step, state, tuple((batch, graph) for batch in batches()), {"static_argnums": 2})


def nnx_graph_in_state() -> Training:
    """(graph, state) travels as one pytree: the graph is a node without leaves."""

    def train_step(everything: Any, batch: Any) -> tuple[Any, Any]:
        model, optimizer = nnx.merge(*everything)
        model.train()

        def loss(model: Model) -> tuple[jax.Array, jax.Array]:
            outputs = model(batch["inputs"])
            return jnp.mean((outputs - batch["targets"]) ** 2), outputs.mean()

        values, grads = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, grads)
        return nnx.split((model, optimizer)), values

    model = Model(nnx.Rngs(0))
    everything = nnx.split((model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)))
    return Training(train_step, everything, tuple((batch,) for batch in batches()), {"donate_argnums": 0})


# Equinox, and no library at all


def equinox_filtered() -> Training:
    eqx = pytest.importorskip("equinox")

    class Regression(eqx.Module):
        layers: list[Any]
        scale: jax.Array
        activation: Callable[[jax.Array], jax.Array]
        name: str = eqx.field(static=True)

        def __init__(self, key: jax.Array) -> None:
            one, two = jax.random.split(key)
            self.layers = [eqx.nn.Linear(8, 32, key=one), eqx.nn.LayerNorm(32), eqx.nn.Linear(32, 4, key=two)]
            self.scale = jnp.ones(4)
            self.activation = jax.nn.gelu
            self.name = "regression"

        def __call__(self, inputs: jax.Array, key: jax.Array) -> jax.Array:
            up, norm, down = self.layers
            hidden = eqx.nn.Dropout(0.1)(self.activation(norm(up(inputs))), key=key)
            return down(hidden) * self.scale

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(optax.exponential_decay(0.1, 2, 0.5), momentum=0.9))
    arrays, rest = eqx.partition(Regression(jax.random.key(0)), eqx.is_array)

    def train_step(state: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
        arrays, moments = state
        model = eqx.combine(arrays, rest)

        @eqx.filter_value_and_grad
        def loss(model: Regression) -> jax.Array:
            outputs = jax.vmap(model)(batch["inputs"], jax.random.split(key, BATCH))
            return jnp.mean((outputs - batch["targets"]) ** 2)

        value, grads = loss(model)
        updates, moments = tx.update(grads, moments, eqx.filter(model, eqx.is_array))
        return (eqx.filter(eqx.apply_updates(model, updates), eqx.is_array), moments), value

    keys = jax.random.split(jax.random.key(1), STEPS)
    return Training(train_step, (arrays, tx.init(arrays)), tuple(zip(batches(), keys, strict=True)))


def pure_functions() -> Training:
    """Pairs of `init` and `apply` in the manner of Haiku and stax, composed by hand."""

    def dense(size: int) -> tuple[Any, Any]:
        def init(key: jax.Array, width: int) -> tuple[int, Any]:
            return size, {"w": jax.random.normal(key, (width, size)) / np.sqrt(width), "b": jnp.zeros(size)}

        return init, lambda params, inputs: inputs @ params["w"] + params["b"]

    def elementwise(function: Any) -> tuple[Any, Any]:
        return lambda key, width: (width, ()), lambda params, inputs: function(inputs)

    def serial(*layers: tuple[Any, Any]) -> tuple[Any, Any]:
        def init(key: jax.Array, width: int) -> tuple[int, Any]:
            params = []
            for one, (make, _) in zip(jax.random.split(key, len(layers)), layers, strict=True):
                width, made = make(one, width)
                params.append(made)
            return width, params

        def apply(params: Any, inputs: jax.Array) -> jax.Array:
            for one, (_, layer) in zip(params, layers, strict=True):
                inputs = layer(one, inputs)
            return inputs

        return init, apply

    init, apply = serial(dense(32), elementwise(jnp.tanh), dense(16), elementwise(jax.nn.silu), dense(4))

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, count = state
        value, grads = jax.value_and_grad(lambda p: jnp.mean((apply(p, batch["inputs"]) - batch["targets"]) ** 2))(
            params
        )
        rate = 0.1 * jnp.minimum(1.0, (count + 1) / 2) * 0.9**count
        return (jax.tree.map(lambda p, g: p - rate * g, params, grads), count + 1), value

    _, params = init(jax.random.key(0), 8)
    return Training(train_step, (params, jnp.asarray(0)), tuple((batch,) for batch in batches()))


FRONT_ENDS = {
    training.__name__.replace("_", " "): training
    for training in (
        linen_train_state,
        linen_scan_and_remat,
        nnx_split_and_merge,
        nnx_graph_in_state,
        equinox_filtered,
        pure_functions,
    )
}


SLOW = {"linen train state", "linen scan and remat", "equinox filtered", "nnx split and merge", "nnx graph in state"}


@pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in FRONT_ENDS])
def test_front_end_equals_jit(name: str):
    assert_equals_jit(FRONT_ENDS[name](), autopar.Auto())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pure functions", "linen train state", "nnx graph in state"])
def test_front_end_equals_jit_with_the_batch_cut(name: str):
    assert_equals_jit(FRONT_ENDS[name](), autopar.DataParallel())
