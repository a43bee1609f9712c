"""Arguments that no program can run on are named: ints that are too large, arrays that are gone, types."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import DataParallel, Pipeline
from tests.sample import half, some

PLANNERS = [DataParallel(), Pipeline(stages=2, microbatches=4)]


def train_step(state: dict[str, Any], batch: Any, count: Any = 0) -> tuple[dict[str, Any], Any]:
    def loss_of(state: dict[str, Any]) -> jax.Array:
        return jnp.mean((jnp.tanh(jnp.tanh(batch @ state["v"]) @ state["w"]) - batch) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - g, state, grads), loss + count


def state_of() -> dict[str, Any]:
    return {"v": jnp.eye(16), "w": jnp.eye(16)}


BATCH = jnp.ones((16, 16))


def told(call: Callable[[], Any], kind: type[Exception]) -> str:
    """An error as it is shown, with its notes."""
    with pytest.raises(kind) as raised:
        call()
    return "".join(traceback.format_exception_only(raised.value))


@pytest.mark.parametrize("count", [2**31, -(2**31) - 1, 2**70])
@pytest.mark.parametrize("known", [False, True])
def test_an_int_that_is_too_large_is_named(count: int, known: bool):
    step = autopar.parallelize(train_step, planner=DataParallel())
    if known:
        step(state_of(), BATCH, 3)
    text = rf"argument count = {count} of type int: a Python int is int32 here, from -2,147,483,648 to 2,147,483,647"
    for call in (step, step.plan, step.lower):
        with pytest.raises(autopar.ArgumentError, match=text):
            call(state_of(), BATCH, count)
    with pytest.raises(autopar.ArgumentError, match=text):
        step.lower(state_of(), BATCH, 3).compile()(state_of(), BATCH, count)


@pytest.mark.parametrize(("planner", "compiled"), half(PLANNERS, [False, True]))
def test_an_argument_that_was_donated_before_is_named_in_the_error(planner: Any, compiled: bool):
    """Plain JAX ends the process (SIGSEGV) where such an array lies as planned on several devices."""
    state = state_of()
    step: Any = autopar.parallelize(train_step, planner=planner, donate_argnums=0)
    step = step.lower(state, BATCH).compile() if compiled else step
    placed, _ = step(state, BATCH)
    step(placed, BATCH)
    for gone in (state, placed):
        text = told(lambda gone=gone: step(gone, BATCH), RuntimeError)
        assert "deleted" in text
        assert compiled or "argument state['v']: it has been deleted, or donated to an earlier call" in text


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_deleted_argument_is_named_in_the_error(planner: Any):
    step = autopar.parallelize(train_step, planner=planner)
    state, _ = step(state_of(), BATCH)
    state["w"].delete()
    assert "argument state['w']: it has been deleted" in told(lambda: step(state, BATCH), RuntimeError)


@pytest.mark.parametrize("planner", some(PLANNERS, 1))
def test_a_type_in_place_of_an_array_is_named(planner: Any):
    step = autopar.parallelize(train_step, planner=planner)
    batch = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    text = told(lambda: step(state_of(), batch), Exception)
    assert "argument batch: a jax.ShapeDtypeStruct is enough for plan() and lower(), and a call takes arrays" in text


def test_the_way_to_a_static_argument_is_one_that_jit_takes():
    """Those of `*args` have no name that counts, and a leaf is none."""

    def scaled(w: jax.Array, *how: Any) -> jax.Array:
        return w * (2 if how == ("twice",) else 1)

    def placed(w: Any, /, way: Any, *, mode: Any = "") -> jax.Array:
        return w * 2

    w = jnp.ones(8)
    assert "count it in static_argnums=1 if how[0] is" in told(
        lambda: autopar.parallelize(scaled)(w, "twice"), autopar.ArgumentError
    )
    assert float(autopar.parallelize(scaled, static_argnums=1)(w, "twice")[0]) == 2
    assert "count it in static_argnums=0 if w is" in told(
        lambda: autopar.parallelize(placed)("w", w), autopar.ArgumentError
    )
    assert "name way in static_argnames if way is" in told(
        lambda: autopar.parallelize(placed)(w, "way"), autopar.ArgumentError
    )
    assert "name mode in static_argnames if mode is" in told(
        lambda: autopar.parallelize(placed)(w, w, mode="fast"), autopar.ArgumentError
    )
    assert "take it out of way, into an argument that static_argnames names" in told(
        lambda: autopar.parallelize(placed)(w, {"a": "way"}), autopar.ArgumentError
    )


def test_a_static_argument_without_a_hash_is_said_once():
    with pytest.raises(autopar.ArgumentError, match="must be hashable") as raised:
        autopar.parallelize(lambda x, n: x, static_argnums=1)(1.0, [1])
    assert "".join(traceback.format_exception(raised.value)).count("ArgumentError: ") == 1


@pytest.mark.parametrize("measured", ["report", "compare"])
def test_measuring_names_what_no_step_can_be_taken_on(measured: str):
    step: Any = autopar.parallelize(train_step, planner=DataParallel(), donate_argnums=0)
    measure = {"report": step.report, "compare": lambda *args: autopar.compare(step, args, planners={})}[measured]
    types = {"v": jax.ShapeDtypeStruct((16, 16), jnp.float32), "w": jnp.eye(16)}
    with pytest.raises(
        autopar.ArgumentError, match=rf"argument state\['v'\] of {measured}\(\): a jax.ShapeDtypeStruct"
    ):
        measure(types, BATCH)
    gone = state_of()
    gone["w"].delete()
    with pytest.raises(autopar.ArgumentError, match=rf"argument state\['w'\] of {measured}\(\): it has been deleted"):
        measure(gone, BATCH)
