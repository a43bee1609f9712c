"""Rows that are drawn at random beside the batch, as a generator's noise: data parallelism cuts them too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.frontend import trace
from passes.layers import batch_inputs
from tests.sample import each

ROWS, NOISE, WIDTH = 4096, 24, 48
State = tuple[Any, jax.Array]


def adversarial(state: State, real: jax.Array) -> State:
    (generator, critic), key = state
    key, here = jax.random.split(key)
    noise = jax.random.normal(here, (len(real), NOISE), real.dtype)

    def judged(critic: jax.Array, generator: jax.Array) -> jax.Array:
        return jax.nn.softplus(jnp.tanh(noise @ generator) @ critic).mean()

    def loss(critic: jax.Array) -> jax.Array:
        return jax.nn.softplus(-real @ critic).mean() + judged(critic, generator)

    critic = critic - 0.1 * jax.grad(loss)(critic)
    return (generator + 0.1 * jax.grad(judged, argnums=1)(critic, generator), critic), key


def private(state: State, x: jax.Array) -> State:
    """Noise of as many rows as the batch has, by chance, on the gradient of a weight."""
    weight, key = state
    key, here = jax.random.split(key)
    grad = jax.grad(lambda weight: jnp.mean(jnp.tanh(x[:, :1] @ weight[:1]) ** 2))(weight)
    return weight - 0.1 * (grad + jax.random.normal(here, weight.shape, weight.dtype)), key


def replaying(state: State, seen: jax.Array) -> State:
    """Writes what was seen into a memory, and trains on rows that it draws from there, twice as many."""
    (weight, memory, count), key = state
    key, here = jax.random.split(key)
    memory = jax.lax.dynamic_update_slice_in_dim(memory, seen, count, axis=0)
    rows = memory[jax.random.randint(here, (2 * len(seen),), 0, len(memory))]
    weight = weight - 0.1 * jax.grad(lambda weight: jnp.mean((jnp.tanh(rows @ weight) - rows) ** 2))(weight)
    return (weight, memory, count + len(seen)), key


def remembering(state: State) -> State:
    """Trains on rows of a memory alone: there is no other batch."""
    (weight, memory, count), _ = state
    (weight, _, _), key = replaying(state, memory[:8])
    return (weight, memory[::-1], count), key


def state_of(rows: int, dtype: Any = "float32") -> dict[str, Any]:
    draws = np.random.default_rng(0)
    made = {
        "adversarial": (draws.normal(size=(NOISE, WIDTH)), draws.normal(size=(WIDTH, 1))),
        "private": draws.normal(size=(rows, WIDTH)),
        "sampling": draws.normal(size=(WIDTH, WIDTH)) / WIDTH,
        "replaying": (draws.normal(size=(WIDTH, WIDTH)) / WIDTH, draws.normal(size=(4 * rows, WIDTH)), 0),
    }
    made["remembering"] = made["replaying"]

    def as_state(x: Any) -> jax.Array:
        return jnp.asarray(x, dtype if np.ndim(x) else "int32")

    return {name: (jax.tree.map(as_state, each), jax.random.key(0)) for name, each in made.items()}


def sampling(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    """Trains, and samples as many rows as the batch has from noise that begins as zeros."""
    weight, key = state
    weight = weight - 0.1 * jax.grad(lambda weight: jnp.mean(jnp.tanh(x @ weight) ** 2))(weight)

    def less_noisy(trip: Any, rows: jax.Array) -> jax.Array:
        noise = jax.random.normal(jax.random.fold_in(key, trip), rows.shape, rows.dtype)
        return jnp.tanh(rows @ weight) + 0.1 * noise

    sampled = jax.lax.fori_loop(0, 4, less_noisy, jnp.zeros_like(x))
    return (weight, jax.random.split(key)[0]), sampled


STEPS = {"adversarial": adversarial, "private": private, "sampling": sampling, "replaying": replaying}


def test_a_generator_is_trained_on_rows_of_its_own_on_each_device():
    """All devices made all images, as nothing tied the noise to the batch."""
    state, x = jax.eval_shape(lambda: state_of(ROWS))["adversarial"], jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    plan = autopar.parallelize(adversarial, planner=autopar.DataParallel(), cluster="8:a100-80g").plan(state, x)
    sent = {(collective.kind, collective.nbytes) for collective in plan.collectives}
    assert sent == {("all_reduce", NOISE * WIDTH * 4), ("all_reduce", WIDTH * 4)}


def test_rows_that_are_drawn_for_all_microbatches_are_cut():
    """They are drawn before the loop, where there were as many as of no microbatch."""
    state, x = jax.eval_shape(lambda: state_of(ROWS))["adversarial"], jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    step = autopar.parallelize(adversarial, planner=autopar.DataParallel(), cluster="8:a100-80g", microbatches=2)
    sent = {(collective.kind, collective.nbytes) for collective in step.plan(state, x).collectives}
    assert {nbytes for kind, nbytes in sent if kind == "all_reduce"} == {NOISE * WIDTH * 4, WIDTH * 4}


def test_noise_on_weights_is_no_batch():
    state, x = jax.eval_shape(lambda: state_of(ROWS))["private"], jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    plan = autopar.parallelize(private, planner=autopar.DataParallel(), cluster="8:a100-80g").plan(state, x)
    assert {collective.kind for collective in plan.collectives} == {"all_reduce"}


@pytest.mark.parametrize("microbatches", [None, 4])
def test_noise_on_weights_before_the_gradient_is_no_batch(microbatches: int | None):
    """No operator of the forward pass reads a weight that noise was added to: the noise was taken for rows, as it had
    as many, and activations were gathered.
    """
    rows = 128 * (microbatches or 1)

    def step(state: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight, key = state
        key, here = jax.random.split(key)
        noisy = weight + 0.01 * jax.random.normal(here, weight.shape)
        return weight - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(noisy), key

    weight, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((128, WIDTH), (rows, 128)))
    key = jax.eval_shape(lambda: jax.random.key(0))
    options = {"planner": autopar.DataParallel(), "cluster": "8:a100-80g", "microbatches": microbatches}
    plan = autopar.parallelize(step, **options).plan((weight, key), x)
    assert [(c.kind, c.nbytes) for c in plan.collectives] == [("all_reduce", 128 * WIDTH * 4)]


def equation(state: State) -> State:
    """A network that solves u'' = -u, at points that are drawn in each step (Raissi et al. 2019)."""
    (up, down), key = state
    key, here = jax.random.split(key)
    points = jax.random.uniform(here, (ROWS,), up.dtype)

    def loss(weights: Any) -> jax.Array:
        def u(point: jax.Array) -> jax.Array:
            return jnp.tanh(point * weights[0]) @ weights[1]

        return jnp.mean((jax.vmap(jax.grad(jax.grad(u)))(points) + jax.vmap(u)(points)) ** 2)

    gradients = jax.grad(loss)((up, down))
    return jax.tree.map(lambda w, g: w - 0.1 * g, (up, down), gradients), key


def test_a_step_that_draws_all_its_rows_has_them_cut():
    """It was refused for want of a batch. What only makes weights still is: it has no rows."""
    weights, key = (jax.ShapeDtypeStruct((WIDTH,), "float32"),) * 2, jax.eval_shape(lambda: jax.random.key(0))
    parallel = autopar.parallelize(equation, planner=autopar.DataParallel(), cluster="8:a100-80g")
    plan = parallel.plan((weights, key))
    assert {(c.kind, c.nbytes) for c in plan.collectives} == {("all_reduce", WIDTH * 4)}
    made = autopar.parallelize(lambda key: jax.random.normal(key, (ROWS, WIDTH)), planner=autopar.DataParallel())
    with pytest.raises(autopar.PlanningError, match="has a batch dimension; this function has none"):
        made.plan(key)


def test_the_step_that_draws_all_its_rows_is_jits():
    with jax.enable_x64(True):
        draws = np.random.default_rng(0)
        state = (draws.normal(size=WIDTH), draws.normal(size=WIDTH)), jax.random.key(0)
        (got, _), (wanted, _) = autopar.parallelize(equation, planner=autopar.Zero(3))(state), jax.jit(equation)(state)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), got, wanted)


def test_a_loop_samples_rows_of_its_own_on_each_device():
    """All devices sampled all rows, as the loop's began as zeros, which nothing tied to the batch."""
    state, x = jax.eval_shape(lambda: state_of(ROWS))["sampling"], jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    plan = autopar.parallelize(sampling, planner=autopar.DataParallel(), cluster="8:a100-80g").plan(state, x)
    assert plan.outputs[-1].dims == (("data",), ())
    assert {(collective.kind, collective.nbytes) for collective in plan.collectives} == {("all_reduce", WIDTH**2 * 4)}


@pytest.mark.parametrize("has_batch", [True, False])
def test_rows_that_are_drawn_from_a_memory_are_cut(has_batch: bool):
    """All devices trained on all of them, and without another batch there was no plan."""
    step, name = (replaying, "replaying") if has_batch else (remembering, "remembering")
    state, x = jax.eval_shape(lambda: state_of(ROWS))[name], jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    plan = autopar.parallelize(step, planner=autopar.DataParallel(), cluster="8:a100-80g").plan(state, *[x] * has_batch)
    sent = {(collective.kind, collective.nbytes) for collective in plan.collectives}
    assert ("all_reduce", WIDTH**2 * 4) in sent
    assert sent <= {("all_reduce", WIDTH**2 * 4), ("all_gather", ROWS * WIDTH * 4)}  # the memory holds what all see


def test_candidates_that_are_drawn_from_trained_weights_are_no_batch():
    def step(table: jax.Array, ids: jax.Array, key: jax.Array) -> jax.Array:
        others = jax.random.randint(key, (512,), 0, len(table))

        def loss(table: jax.Array) -> jax.Array:
            return jax.nn.softplus(table[ids] @ table[others].T).mean()

        return table - jax.grad(loss)(table)

    table, ids = jax.ShapeDtypeStruct((1 << 14, WIDTH), "float32"), jax.ShapeDtypeStruct((ROWS,), "int32")
    key = jax.eval_shape(lambda: jax.random.key(0))
    planned = autopar.parallelize(step, planner=autopar.DataParallel(), cluster="8:a100-80g").plan(table, ids, key)
    assert {collective.kind for collective in planned.collectives} == {"all_reduce"}


def test_rows_that_a_loop_draws_from_a_memory_are_cut():
    """Several updates in one step, each from rows of its own."""

    def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        def update(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            weight, memory = state
            rows = memory[jax.random.randint(key, (ROWS,), 0, len(memory))]
            value, gradient = jax.value_and_grad(lambda weight: jnp.mean(jnp.tanh(rows @ weight) ** 2))(weight)
            return (weight - 0.1 * gradient, memory.at[0].set(0)), value

        return jax.lax.scan(update, state, jax.random.split(key, 4))

    state = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in ((WIDTH, WIDTH), (4 * ROWS, WIDTH)))
    key = jax.eval_shape(lambda: jax.random.key(0))
    plan = autopar.parallelize(step, planner=autopar.DataParallel(), cluster="8:a100-80g").plan(state, key)
    sent = {(collective.kind, collective.nbytes, collective.count) for collective in plan.collectives}
    assert ("all_reduce", WIDTH**2 * 4, 4) in sent


def test_seeds_of_rows_are_of_the_batch():
    """An array from which keys are made is a key only where it makes a single one."""

    def step(weight: jax.Array, rows: jax.Array, seeds: jax.Array) -> jax.Array:
        noise = jax.vmap(lambda seed: jax.random.normal(jax.random.key(seed), (WIDTH,)))(seeds)
        return weight - jax.grad(lambda weight: jnp.mean(jnp.tanh((rows + noise) @ weight) ** 2))(weight)

    traced = trace(step, (jnp.ones((WIDTH, WIDTH)), jnp.ones((16, WIDTH)), jnp.arange(16, dtype="uint32")), {})
    assert batch_inputs(traced.graph, traced.state_pairs) == (1, 2)


def test_a_key_of_numbers_is_no_batch():
    def step(weight: jax.Array, rows: jax.Array, key: jax.Array) -> jax.Array:
        drawn = rows[jax.random.randint(key, (ROWS // 4,), 0, ROWS)]
        return weight - jax.grad(lambda weight: jnp.mean(jnp.tanh(drawn @ weight) ** 2))(weight)

    types = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((WIDTH, WIDTH), (ROWS, WIDTH))]
    plan = autopar.parallelize(step, planner=autopar.DataParallel(), cluster="8:a100-80g").plan(
        *types, jax.ShapeDtypeStruct((2,), "uint32")
    )
    assert isinstance(plan, autopar.Plan)
    assert [str(spec) for spec in plan.inputs] == ["[-, -]", "[data, -]", "[-]"]


@pytest.mark.parametrize(("planner", "name"), each((autopar.DataParallel(), autopar.Zero(3)), STEPS))
def test_a_step_that_draws_is_jits(name: str, planner: Any):
    with jax.enable_x64(True):
        state, x = state_of(16, "float64")[name], np.random.default_rng(1).normal(size=(16, WIDTH))
        got, wanted = autopar.parallelize(STEPS[name], planner=planner)(state, x), jax.jit(STEPS[name])(state, x)
        for mine, theirs in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
            if jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
                mine, theirs = map(jax.random.key_data, (mine, theirs))
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)
