"""Planned programs as they run: the meaning of `jax.jit`, and arguments that move only when they must."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from tests.sample import half, slow

OPTIMIZER = optax.adam(1e-2)


def train_step(state, batch):
    def loss(params):
        hidden = jnp.tanh(batch["inputs"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["targets"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(state["params"])
    updates, moments = OPTIMIZER.update(gradient, state["moments"])
    return {
        "params": optax.apply_updates(state["params"], updates),
        "moments": moments,
        "step": state["step"] + 1,
    }, value


def example():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"up": jax.random.normal(keys[0], (16, 64)), "down": jax.random.normal(keys[1], (64, 8))}
    batch = {"inputs": jax.random.normal(keys[2], (32, 16)), "targets": jax.random.normal(keys[3], (32, 8))}
    return {"params": params, "moments": OPTIMIZER.init(params), "step": 0}, batch


def parallel(fun: Any = train_step, **options: Any) -> autopar.ParallelFunction:
    return autopar.parallelize(fun, **{"planner": autopar.DataParallel(), **options})


def assert_same(ours: Any, expected: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("planner", "n_devices"), half([autopar.DataParallel(), autopar.Zero(3), autopar.Auto()], [1, 8])
)
def test_steps_equal_jit(planner: Any, n_devices: int):
    step = parallel(planner=planner, devices=jax.devices()[:n_devices])
    ours, batch = example()
    expected = ours
    for _ in range(3):
        ours, loss = step(ours, batch)
        expected, expected_loss = jax.jit(train_step)(expected, batch)
        assert_same((ours, loss), (expected, expected_loss))


def test_results_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch):
    step = parallel(planner=autopar.Zero(3))
    state, batch = example()
    batch = jax.device_put(batch, step.lower(state, batch).compile().input_shardings[0][1])
    state, _ = step(state, batch)
    moved: list[Any] = []
    monkeypatch.setattr(jax, "device_put", lambda *given: moved.append(given))
    for _ in range(2):
        state, _ = step(state, batch)
    assert not moved


def test_donated_state_is_gone_even_if_it_moved_first():
    step = parallel(planner=autopar.Zero(3), donate_argnums=0)
    state, batch = example()
    for _ in range(2):
        after, _ = step(state, batch)
        leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
        assert leaves
        assert all(leaf.is_deleted() for leaf in leaves)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((after, batch)))
        state = after


@pytest.mark.parametrize("n_devices", [1, 8])
def test_donated_state_is_updated_in_place(n_devices: int):
    step = parallel(donate_argnums=0, devices=jax.devices()[:n_devices])
    state, batch = example()
    state, _ = step(state, batch)
    compiled = step.lower(state, batch).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    if n_devices == 1:
        places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
        state, _ = step(state, batch)
        assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)] == places


def test_ahead_of_time():
    step = parallel()
    state, batch = example()
    lowered = step.lower(*jax.eval_shape(lambda: (state, batch)))
    assert "module" in lowered.as_text()
    compiled = lowered.compile()
    assert "HloModule jit_train_step" in compiled.as_text()
    assert compiled.cost_analysis()
    assert lowered.plan is compiled.plan is step.plan(state, batch)
    (args, kwargs), outputs = compiled.input_shardings, compiled.output_shardings
    assert args[1]["inputs"].spec == P("data")
    assert kwargs == {}
    assert outputs[1].is_fully_replicated
    assert_same(compiled(state, batch), jax.jit(train_step)(state, batch))


def test_a_compiled_program_takes_only_its_own_types():
    state, batch = example()
    compiled = parallel().lower(state, batch).compile()
    wrong = {**batch, "inputs": batch["inputs"][:16]}
    with pytest.raises(autopar.ArgumentError, match=r"batch\['inputs'\] is float32\[16,16\].*float32\[32,16\]"):
        compiled(state, wrong)
    with pytest.raises(autopar.ArgumentError, match="structure"):
        compiled(state, [batch])


@pytest.mark.parametrize("planner", [slow(autopar.DataParallel()), autopar.Pipeline(stages=2, microbatches=2)])
def test_a_compiled_program_takes_types_as_weak_as_they_come(planner: Any):
    """A scale that is made of a Python number comes back strong, and the second step was refused."""

    def step(state: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jnp.mean((jnp.tanh(batch @ weights[0]) @ weights[1]) ** 2) * state["scale"]

        value, gradient = jax.value_and_grad(loss)(state["weights"])
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, state["weights"], gradient)
        scale = jnp.where(jnp.isfinite(value), state["scale"], jnp.float32(1.0))
        return {"weights": weights, "scale": scale}, value

    (_, batch), weights = example(), [0.1 * jnp.ones((16, 32)), 0.1 * jnp.ones((32, 8))]
    ours = theirs = {"weights": weights, "scale": jnp.asarray(2.0)}
    inputs = batch["inputs"]
    compiled, jitted = (f.lower(ours, inputs).compile() for f in (parallel(step, planner=planner), jax.jit(step)))
    for _ in range(2):
        (ours, value), (theirs, wanted) = compiled(ours, inputs), jitted(theirs, inputs)
        assert_same((ours, value), (theirs, wanted))
    assert_same(compiled({**ours, "scale": 3.0}, inputs), jitted({**theirs, "scale": 3.0}, inputs))


@pytest.mark.parametrize("kind", ["numpy", "elsewhere", "explicit", "ambient"])
def test_arguments_may_lie_anywhere(kind: str):
    state, batch = example()
    step = parallel()
    expected = jax.jit(train_step)(state, batch)
    mesh = jax.make_mesh((4,), ("q",), axis_types=(AxisType.Explicit,))
    match kind:
        case "numpy":
            batch = jax.tree.map(np.asarray, batch)
        case "elsewhere":
            batch = jax.device_put(batch, jax.devices()[3])
        case _:
            batch = jax.device_put(batch, NamedSharding(mesh, P("q")))
    if kind != "ambient":
        assert_same(step(state, batch), expected)
        return
    with jax.set_mesh(mesh):
        assert_same(step(state, batch), expected)
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh


def test_outputs_of_every_kind():
    def f(x, key, scale=2.0):
        return {"input": x, "constant": np.arange(3), "number": 1.5, "nothing": None, "key": key, "scaled": x * scale}

    x, key = jnp.arange(8.0), jax.random.key(1)
    for args in ((x, key), (x, key, 3), (x, key, np.float32(4))):
        ours, expected = parallel(f)(*args), jax.jit(f)(*args)
        ours["key"], expected["key"] = jax.random.key_data(ours["key"]), jax.random.key_data(expected["key"])
        assert_same(ours, expected)


def test_function_of_nothing():
    def f():
        return jnp.ones(8), 2

    assert_same(autopar.parallelize(f)(), jax.jit(f)())


def test_function_of_nothing_takes_options_of_the_compiler():
    step = parallel(planner=None, fun=lambda: jnp.arange(8), compiler_options={"xla_cpu_enable_fast_min_max": True})
    assert_same(step(), jnp.arange(8))


def test_static_and_keyword_arguments():
    def f(x, n, *, scale=1.0):
        return x**n * scale

    step = parallel(f, static_argnums=1)
    x = jnp.arange(8.0)
    assert_same(step(x, 2), x**2)
    assert_same(step(x, n=3, scale=2.0), x**3 * 2)


def test_inside_other_transformations():
    def plain(x, w):
        return jnp.tanh(x @ w).sum()

    step = autopar.parallelize(plain)
    x, w = jnp.ones((8, 4)), jnp.full((4, 2), 0.1)
    assert_same(jax.jit(lambda x, w: step(x, w) * 2)(x, w), jax.jit(lambda x, w: plain(x, w) * 2)(x, w))
    numbers = autopar.parallelize(lambda: jnp.arange(8.0))
    assert_same(jax.jit(lambda: numbers() * 2)(), jnp.arange(8.0) * 2)
    assert_same(jax.grad(step, argnums=1)(x, w), jax.grad(plain, argnums=1)(x, w))


def test_a_method_runs():
    class Model:
        scale = 3.0

        @autopar.parallelize(static_argnums=0, planner=autopar.DataParallel())
        def __call__(self, x):
            return x * self.scale

    assert_same(Model()(jnp.ones(8)), jnp.ones(8) * 3.0)


@pytest.mark.parametrize("place", [int, np.asarray, jnp.asarray], ids=["number", "numpy", "array"])
def test_state_that_is_no_array_yet_is_compiled_for_once(place: Any, caplog: pytest.LogCaptureFixture):
    """As the `step=0` of a flax TrainState: it came back as an array on all devices, for which JAX compiled anew."""

    def step(state: Any, x: jax.Array) -> Any:
        weight, count = state
        return (weight - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(weight), count + 1), count

    state, x = (np.ones((4, 4), np.float32), place(0)), np.ones((16, 4), np.float32)
    parallel = autopar.parallelize(step, planner=autopar.DataParallel(), donate_argnums=0)
    state, _ = parallel(state, x)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        (_, count), before = parallel(state, x)
    assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
    assert (int(before), int(count)) == (1, 2)
