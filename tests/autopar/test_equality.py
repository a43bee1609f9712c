"""The parallel step equals `jax.jit` over consecutive steps, sends what its plan says, and feeds itself."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import autopar
from autopar.checks import verify
from autopar.checks.hlo import UNCOMBINED
from models import gpt
from tests.sample import each, slow

BATCH = 16
STEPS = 5
PLANNERS: dict[str, Any] = {
    "auto": autopar.Auto(),
    "data_parallel": autopar.DataParallel(),
    "megatron": autopar.Megatron(data=2, tensor=4),
    "zero": autopar.Zero(3),
}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    # Softmax ignores the keys' bias: its gradient is rounding alone, which the usual eps of 1e-8 would blow up.
    "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-5)),
}
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 3e-2}
QUICK = {"xla_backend_optimization_level": 0}
"""Compiler options that leave the machine code unoptimized: most of these tests' time is LLVM's."""


@dataclass(frozen=True)
class Training:
    """A train step with the state it starts from and the arguments of each of its calls."""

    step: Callable[..., Any]
    state: Any
    calls: tuple[tuple[Any, ...], ...]

    @functools.cached_property
    def expected(self) -> list[Any]:
        """(state, loss) after every step, by `jax.jit`."""
        state, results, step = self.state, [], jax.jit(self.step, compiler_options=QUICK)
        for call in self.calls:
            state, loss = step(state, *call)
            results.append(jax.tree.map(np.asarray, (state, loss)))
        return results


@functools.cache
def gpt_training(dtype: str, dropout: float, optimizer: str, *, remat: bool = False) -> Training:
    """GPT with one layer and random parameters, those that usually start as zeros or ones too."""
    config = gpt.Config(
        vocab_size=64,
        sequence_length=16,
        hidden=32,
        layers=1,
        heads=8,
        dropout=dropout,
        dtype=dtype,
        param_dtype=dtype,
        remat=remat,
    )
    tx = OPTIMIZERS[optimizer]

    def train_step(state, batch, key):
        params, moments = state
        loss, gradient = jax.value_and_grad(lambda params: gpt.loss(config, params, batch, key))(params)
        updates, moments = tx.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    rng = np.random.default_rng(0)

    def draw(struct: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(rng.normal(scale=0.2, size=struct.shape), struct.dtype)

    params = jax.tree.map(draw, jax.eval_shape(lambda: gpt.init(config, jax.random.key(0))))
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (STEPS, BATCH, config.sequence_length + 1)), jnp.int32)
    calls = tuple(({"inputs": tokens[i, :, :-1], "targets": tokens[i, :, 1:]}, jax.random.key(i)) for i in range(STEPS))
    return Training(train_step, (params, tx.init(params)), calls)


@functools.cache
def mlp_training(dtype: str) -> Training:
    """Two layers, the sum of squares as loss and plain gradient descent, without optax."""

    def train_step(params, batch):
        def loss(params):
            hidden = jnp.tanh(batch["inputs"] @ params["up"] + params["bias"])
            return jnp.sum((hidden @ params["down"] - batch["targets"]) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - jnp.asarray(1e-3, p.dtype) * g, params, gradient), value

    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(scale=0.25, size=shape), dtype)

    params = {"up": draw(16, 64), "bias": draw(64), "down": draw(64, 8)}
    calls = tuple(({"inputs": draw(32, 16), "targets": draw(32, 8)},) for _ in range(STEPS))
    return Training(train_step, params, calls)


@dataclass(frozen=True)
class Watched:
    """What a parallel training planned, and its (state, loss) after every step."""

    plan: Any
    results: list[Any]


def train(training: Training, planner: Any) -> Watched:
    """The training in parallel; checks on the way what holds for every program."""
    step = autopar.parallelize(training.step, planner=planner, donate_argnums=0)
    state = jax.tree.map(jnp.array, training.state)
    compiled = step.lower(state, *training.calls[0]).compile({**UNCOMBINED, **QUICK})
    verify(compiled.plan, compiled.as_text()).check()
    wanted = compiled.input_shardings[0][0]
    results = []
    for call in training.calls:
        state, loss = compiled(state, *call)
        # Placed as the next call wants it, so that nothing moves between steps.
        assert jax.tree.all(jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding, state, wanted))
        results.append(jax.tree.map(np.asarray, (state, loss)))
    # State that NumPy has seen is copied on CPU, not given up; this one it has not.
    unseen, _ = compiled(state, *training.calls[-1])
    compiled(unseen, *training.calls[-1])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(unseen)), "donated state outlives the step"
    return Watched(compiled.plan, results)


def assert_equal(ours: list[Any], expected: list[Any], tolerance: float) -> None:
    """Every array of every step is within `tolerance`, relative to the array's largest entry."""
    for number, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            x, y = x.astype(np.float64), y.astype(np.float64)
            error = np.max(np.abs(x - y)) / max(float(np.max(np.abs(y))), 1e-30)
            assert error <= tolerance, f"step {number}, {jax.tree_util.keystr(path)}: relative error {error:.1e}"


SAMPLE = {
    ("auto", "float64", 0.0, "adamw"),
}
"""The combinations of a default run; ZeRO is in `test_remat_equals_jit`.

Dropout's bits are most of what XLA compiles here, so it is there once.
"""

COMBINATIONS = [
    pytest.param(*combination, marks=() if combination in SAMPLE else pytest.mark.slow)
    for combination in itertools.product(PLANNERS, ("float64", "float32"), (0.0, 0.1), OPTIMIZERS)
]


@pytest.mark.parametrize(("planner", "dtype", "dropout", "optimizer"), COMBINATIONS)
def test_gpt_equals_jit(planner: str, dtype: str, dropout: float, optimizer: str):
    with jax.enable_x64(dtype == "float64"):
        training = gpt_training(dtype, dropout, optimizer)
        watched = train(training, PLANNERS[planner])
        assert_equal(watched.results, training.expected, TOLERANCE[dtype])
        if planner == "data_parallel":
            assert_one_reduction_a_parameter(watched.plan, training.state[0])


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["data_parallel", "zero"])
@pytest.mark.usefixtures("as_users_compile")
def test_remat_equals_jit(planner: str):
    with jax.enable_x64(True):
        training = gpt_training("float64", 0.0, "sgd", remat=True)
        assert_equal(train(training, PLANNERS[planner]).results, training.expected, TOLERANCE["float64"])


@pytest.mark.parametrize(("planner", "dtype"), each(PLANNERS, TOLERANCE))
def test_mlp_equals_jit(planner: str, dtype: str):
    with jax.enable_x64(dtype == "float64"):
        training = mlp_training(dtype)
        watched = train(training, PLANNERS[planner])
        assert_equal(watched.results, training.expected, TOLERANCE[dtype])
        if planner == "data_parallel":
            assert_one_reduction_a_parameter(watched.plan, training.state)


def assert_one_reduction_a_parameter(plan: Any, params: Any) -> None:
    """Each gradient once, the loss once, nothing else; small ones are packed into one."""
    assert {(c.kind, c.axes) for c in plan.collectives} == {("all_reduce", ("data",))}
    gradients = jax.tree.leaves(params)
    sent = sum(c.count * c.nbytes for c in plan.collectives)
    assert sent == sum(gradient.nbytes for gradient in gradients) + max(gradients[0].dtype.itemsize, 4)


def test_saved_plan_replays_without_solving(tmp_path: Path):
    training, path = mlp_training("float32"), tmp_path / "plan.json"
    first = train(training, autopar.Megatron(data=2, tensor=4))
    first.plan.save(path)
    again = train(training, autopar.Manual(path))
    # The solver's wall-clock times are part of the plan, so equality says that nothing was solved again.
    assert again.plan == autopar.Plan.load(path)
    assert again.plan.solution.phase_seconds == autopar.Plan.load(path).solution.phase_seconds
    jax.tree.map(np.testing.assert_array_equal, again.results, first.results)


def test_saved_plan_of_other_shapes_is_refused(tmp_path: Path):
    training, path = mlp_training("float32"), tmp_path / "plan.json"
    autopar.parallelize(training.step).plan(training.state, *training.calls[0]).save(path)
    larger = jax.tree.map(lambda x: jnp.concatenate([x, x]), training.calls[0])
    replayed = autopar.parallelize(training.step, planner=autopar.Manual(path))
    with pytest.raises(autopar.PlanMismatchError, match="belongs to one function"):
        replayed.plan(training.state, *larger)


def test_plan_for_absent_devices_from_shapes():
    training = gpt_training("float32", 0.0, "adamw")
    shapes = jax.eval_shape(lambda *args: args, training.state, *training.calls[0])
    step = autopar.parallelize(training.step, cluster="2x8:a100-80g", planner=autopar.Zero(3))
    plan = step.plan(*shapes)
    assert plan.mesh.size == 16 > len(jax.devices())
    assert plan.collectives
    assert plan.step_seconds > 0
    with pytest.raises(autopar.DeviceError, match="16 devices"):
        step.lower(*shapes)


@pytest.mark.parametrize(
    "of_rows",
    [
        slow(lambda h: lax.associative_scan(jnp.add, h, axis=1)),
        lambda h: jnp.concatenate([h, h[:, :0]], axis=1),
        lambda h: jnp.concatenate(jnp.split(h, [h.shape[1]], axis=1)[::-1], axis=1),
    ],
    ids=["associative scan", "with nothing", "split at the end"],
)
def test_gradients_of_pieces_of_which_one_is_empty(of_rows: Callable[[jax.Array], jax.Array]) -> None:
    """The first result of their `split` is as large as the operand, and there is another one."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(of_rows(x @ weights) ** 2)

    step = jax.value_and_grad(loss)
    keys = jax.random.split(jax.random.key(0))
    arguments = jax.random.normal(keys[0], (8, 8)), jax.random.normal(keys[1], (16, 4, 8))
    expected, got = jax.jit(step)(*arguments), autopar.parallelize(step)(*arguments)
    for this, that in zip(got, expected, strict=True):
        np.testing.assert_allclose(this, that, rtol=1e-5, atol=1e-5 * float(jnp.abs(that).max()))


@pytest.mark.parametrize("planner", [autopar.Megatron(data=2, tensor=4), slow(autopar.Auto())])
def test_fourier_transforms_beside_collectives(planner: Any):
    """A layer in the frequencies, whose transforms XLA:CPU would have in the order that collectives want."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        frequencies = jnp.einsum("bxyi,ioxy->bxyo", jnp.fft.rfft2(x, axes=(1, 2)), weights + 0j)
        return jnp.mean((jnp.fft.irfft2(frequencies, s=(8, 8), axes=(1, 2)) - x) ** 2)

    step = jax.value_and_grad(loss)
    arguments = jnp.full((4, 4, 8, 5), 0.1), jax.random.normal(jax.random.key(0), (8, 8, 8, 4))
    expected, got = jax.jit(step)(*arguments), autopar.parallelize(step, planner=planner)(*arguments)
    for this, that in zip(got, expected, strict=True):
        np.testing.assert_allclose(this, that, rtol=1e-5, atol=1e-5 * float(jnp.abs(that).max()))
