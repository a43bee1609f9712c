"""Callbacks run once a step, on whole operands, in order where that is asked for; all devices get what they return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import autopar
from tests.sample import half

X = jnp.arange(64.0).reshape(8, 8) / 8
SCALAR = jax.ShapeDtypeStruct((), np.float32)
Log = Callable[..., None]


def doubling(log: Log) -> Callable[..., Any]:
    """A callback that logs a number and returns twice of it."""

    def call(number: Any) -> Any:
        log(round(float(number), 3))
        return np.float32(2 * number)

    return call


def reported(log: Log, a: Any) -> Any:
    io_callback(log, None, a.sum())
    return a * 2


def pure(log: Log, a: Any) -> Any:
    return a * jax.pure_callback(doubling(log), SCALAR, a.sum())


def counted(log: Log, a: Any) -> Any:
    """Each call returns another number: devices that called for themselves would differ."""
    calls: list[int] = []

    def count() -> Any:
        calls.append(log(len(calls)) or 1)
        return np.int32(len(calls))

    return a + io_callback(count, jax.ShapeDtypeStruct((), np.int32))


def of_nothing(log: Log, a: Any) -> Any:
    io_callback(lambda: log("here"), None)
    jax.debug.callback(lambda: log("there"))
    return a


def shapes(log: Log, a: Any) -> Any:
    jax.debug.callback(lambda x: log(x.shape, round(float(x.sum()), 2)), jnp.tanh(a @ a.T))
    return a.T @ a


def many_types(log: Log, a: Any) -> Any:
    def call(x: Any) -> Any:
        log(x.shape)
        return x > 3, x.astype(np.int8), (x + 1j).astype(np.complex64), np.where(x > 2, np.nan, -np.inf), x.T

    dtypes = (np.bool_, np.int8, np.complex64, np.float32, np.float32)
    flags, *others = jax.pure_callback(call, tuple(jax.ShapeDtypeStruct(a.shape, d) for d in dtypes), a @ a)
    return flags, others[-1] @ a, others


def in_a_scan(log: Log, a: Any) -> Any:
    def body(carry: Any, x: Any) -> Any:
        told = io_callback(doubling(log), SCALAR, carry.mean() + x, ordered=True)
        return carry * 0.5 + told, told

    return lax.scan(body, a, jnp.arange(4.0))


def in_a_while(log: Log, a: Any) -> Any:
    def body(state: Any) -> Any:
        jax.debug.callback(log, state[0], ordered=True)
        return state[0] + 1, state[1] @ a / 9

    return lax.while_loop(lambda state: state[0] < 3, body, (0, a))


def in_a_test(log: Log, a: Any) -> Any:
    def test(state: Any) -> Any:
        return io_callback(lambda i: (log(int(i)), np.bool_(i < 3))[1], jax.ShapeDtypeStruct((), bool), state[0])

    return lax.while_loop(test, lambda state: (state[0] + 1, state[1] * 2), (0, a))


def in_an_ordered_test(log: Log, a: Any) -> Any:
    def test(state: Any) -> Any:
        flag = jax.ShapeDtypeStruct((), bool)
        return io_callback(lambda i: (log(int(i)), np.bool_(i < 3))[1], flag, state[0], ordered=True)

    return lax.while_loop(test, lambda state: (state[0] + 1, state[1] * 2), (0, a))


def in_both_branches(log: Log, a: Any) -> Any:
    def yes(a: Any) -> Any:
        io_callback(lambda s: log("yes", round(float(s), 2)), None, a.sum())
        return a * 2

    def no(a: Any) -> Any:
        return a + io_callback(doubling(log), SCALAR, a.sum())

    return lax.cond(a[1, 1] > 0, yes, no, a), lax.cond(a[1, 1] < 0, yes, no, a)


def ordered(log: Log, a: Any) -> Any:
    for i in range(6):
        io_callback(lambda s, i=i: log(i, round(float(s), 2)), None, (a @ a).sum() * i, ordered=True)
    return a


def ordered_debugging(log: Log, a: Any) -> Any:
    jax.debug.callback(lambda x: log(x.shape), a @ a, ordered=True)
    for i in range(4):
        jax.debug.callback(lambda s, i=i: log(i, float(s)), a.max() + i, ordered=True)
    return a


def recomputed(log: Log, a: Any) -> Any:
    def loss(w: Any) -> Any:
        hidden = jnp.tanh(a @ w)
        jax.debug.callback(lambda s: log(round(float(s), 2)), hidden.sum())
        return (jnp.tanh(hidden @ w) ** 2).mean()

    return jax.grad(jax.checkpoint(loss))(a)


def a_row_at_a_time(log: Log, a: Any) -> Any:
    def row(v: Any) -> Any:
        io_callback(lambda s: log(round(float(s), 2)), None, v.sum())
        return v.sum()

    return jax.vmap(row)(a)


FUNCTIONS = [
    reported,
    pure,
    counted,
    of_nothing,
    shapes,
    many_types,
    in_a_scan,
    in_a_while,
    in_a_test,
    in_an_ordered_test,
    in_both_branches,
    ordered,
    ordered_debugging,
    recomputed,
    a_row_at_a_time,
]
IN_ORDER = {in_a_scan, in_a_while, in_an_ordered_test, ordered, ordered_debugging}


def run(decorate: Any, fun: Any, *args: Any) -> tuple[list[Any], Any, Any]:
    """What two calls of a function log, what the second returns, and the decorated function."""
    seen: list[Any] = []

    def log(*what: Any) -> None:
        seen.append(tuple(w.item() if hasattr(w, "item") else w for w in what))

    decorated = decorate(lambda *args: fun(log, *args))
    for _ in range(2):
        results = jax.block_until_ready(decorated(*args))
        jax.effects_barrier()
    return seen if fun in IN_ORDER else sorted(seen, key=str), results, decorated


def assert_equal(ours: Any, theirs: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, theirs)


def assert_as_jit(fun: Any, *args: Any, **options: Any) -> Any:
    seen, results, _ = run(jax.jit, fun, *args)
    ours, found, step = run(lambda f: autopar.parallelize(f, **options), fun, *args)
    assert ours == seen
    assert_equal(found, results)
    return step


PLANNERS = {"auto": autopar.Auto(), "megatron": autopar.Megatron(data=2, tensor=4)}


@pytest.mark.parametrize(("fun", "planner"), half(FUNCTIONS, PLANNERS))
def test_callbacks_run_as_in_jit(fun: Any, planner: str):
    step = assert_as_jit(fun, X, planner=PLANNERS[planner])
    step.lower(X).verify().check()


@pytest.mark.parametrize("fun", [in_a_scan, counted, ordered_debugging])
def test_callbacks_run_as_in_jit_on_one_device(fun: Any):
    assert_as_jit(fun, X, devices=jax.devices()[:1])


def test_every_device_holds_what_one_was_told():
    *_, step = run(autopar.parallelize, counted, X)
    result = step(X)
    pieces = {float((shard.data - X[shard.index]).min()) for shard in result.addressable_shards}
    assert len(pieces) == 1


@pytest.mark.parametrize("is_ordered", [False, True])
def test_prints_once(is_ordered: bool, capfd: pytest.CaptureFixture[str]):
    def f(a):
        jax.debug.print("total {}", a.sum(), ordered=is_ordered)
        jax.debug.print("nothing", ordered=is_ordered)
        return a * 2

    assert_equal(autopar.parallelize(f)(jnp.arange(64.0)), 2 * jnp.arange(64.0))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "nothing", "total 2016.0"]


def training(log: Log, w: Any, batch: Any) -> Any:
    """Numbers from the host up front, what a layer makes, a loss and the whole batch afterwards."""
    rate = io_callback(lambda: (log("rate"), np.float32(0.1))[1], SCALAR)

    def loss(w: Any) -> Any:
        hidden = jnp.tanh(batch @ w)
        jax.debug.callback(lambda x: log("hidden", x.shape, round(float(x.sum()), 2)), hidden)
        return (hidden**2).mean()

    value, gradient = jax.value_and_grad(loss)(w)
    io_callback(lambda s: log("loss", round(float(s), 4)), None, value)
    io_callback(lambda s: log("batch", round(float(s), 2)), None, batch.sum())
    return w - rate * gradient, value


def ordered_training(log: Log, w: Any, batch: Any) -> Any:
    def loss(w: Any) -> Any:
        hidden = jnp.tanh(batch @ w)
        io_callback(lambda x: log("hidden", x.shape), None, lax.stop_gradient(hidden), ordered=True)
        return (hidden**2).mean()

    value, gradient = jax.value_and_grad(loss)(w)
    io_callback(lambda s: log("loss", round(float(s), 4)), None, value, ordered=True)
    return w - gradient, value


IN_ORDER.add(ordered_training)
WEIGHT, BATCH = jnp.ones((8, 8)) / 9, jnp.arange(128.0).reshape(16, 8) / 99


@pytest.mark.parametrize("fun", [training, ordered_training])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_microbatches_call_back_once_a_step(fun: Any, microbatches: int):
    assert_as_jit(fun, WEIGHT, BATCH, microbatches=microbatches)


def test_a_search_over_stages_plans_callbacks_without_stages():
    assert_as_jit(training, WEIGHT, BATCH, planner=autopar.Auto(pipeline=True))


def test_stages_have_no_callbacks():
    step = autopar.parallelize(
        lambda w, batch: training(print, w, batch), planner=autopar.Pipeline(stages=2, microbatches=2)
    )
    with pytest.raises(autopar.PlanningError, match=r"io_callback at .* in a pipeline"):
        step.plan(WEIGHT, BATCH)


def looped(log: Log, w: Any, batch: Any) -> Any:
    """A callback in what every microbatch runs."""

    def layer(state: Any, w: Any) -> Any:
        jax.debug.callback(log, state[1])
        return (jnp.tanh(state[0] @ w), state[1] + 1), None

    return jax.grad(lambda w: (lax.scan(layer, (batch, 0), jnp.stack([w, w]))[0][0] ** 2).mean())(w)


def out_of_order(log: Log, w: Any, batch: Any) -> Any:
    """A report of what microbatches make, and then a number that they need."""
    hidden = jnp.tanh(batch @ w)
    io_callback(lambda s: log(float(s)), None, lax.stop_gradient(hidden).sum(), ordered=True)
    scale = io_callback(lambda: np.float32(1), SCALAR, ordered=True)
    return jax.grad(lambda w: (scale * jnp.tanh(batch @ w) ** 2).mean())(w)


def coupled(log: Log, w: Any, batch: Any) -> Any:
    """A callback in the middle of the model."""

    def summed(x: Any) -> Any:
        given = lax.stop_gradient(x)
        along_rows = functools.partial(np.cumsum, axis=0)
        return jax.pure_callback(lambda x: along_rows(np.asarray(x)), jax.ShapeDtypeStruct(x.shape, x.dtype), given)

    return jax.grad(lambda w: (summed(batch @ w) * (batch @ w)).mean())(w)


def test_a_callback_between_loops_over_microbatches_runs_once_on_whole_operands() -> None:
    """A second loop computes the forward pass again, behind the callback."""
    assert_as_jit(coupled, WEIGHT, BATCH, microbatches=4)


@pytest.mark.parametrize(
    ("fun", "words", "coupling"),
    [
        *((looped, "every microbatch computes", coupling) for coupling in ("exact", "independent")),
        *((out_of_order, "results of the second", coupling) for coupling in ("exact", "independent")),
        (coupled, "a callback runs once, on whole operands", "independent"),
    ],
)
def test_microbatches_that_would_change_a_callback_are_refused(fun: Any, words: str, coupling: Any):
    step = autopar.parallelize(
        lambda *a: fun(print, *a), donate_argnums=0, microbatches=4, microbatch_semantics=coupling
    )
    with pytest.raises(autopar.PlanningError, match=words) as caught:
        step.plan(WEIGHT, BATCH)
    assert f"at {__file__}:" in str(caught.value)
