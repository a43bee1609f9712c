"""One element a row inside loops over layers: what counts the rows enters their bodies from outside, and the backward
loop takes the indices that the forward one saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from passes.errors import PlanningError
from tests.sample import slow

ROWS, LENGTH, WIDTH, LAYERS, KEPT = 16, 6, 8, 3, 2
DRAW = np.random.default_rng(0)
WEIGHTS, BATCH = 0.5 * DRAW.normal(size=(LAYERS, WIDTH, WIDTH)), DRAW.normal(size=(ROWS, LENGTH, WIDTH))

Layer = Callable[[jax.Array, Any], jax.Array]


def chosen(h: jax.Array, w: jax.Array) -> jax.Array:
    return lax.top_k((h @ w)[..., 0], KEPT)[1]


def layer(h: jax.Array, w: jax.Array) -> jax.Array:
    """A mixture of depths: of each row the best tokens are read, multiplied, written back, and marked."""
    rows, places = jnp.arange(len(h))[:, None], chosen(h, w)
    marked = jnp.zeros(h.shape[:2]).at[rows, places].set(1)
    return jnp.tanh(h.at[rows, places].add(h[rows, places] @ w)) * (1 + 0.1 * marked[..., None])


def plain(h: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(h @ w)


def scanned(layer: Layer, h: jax.Array, xs: Any) -> jax.Array:
    return lax.scan(lambda h, x: (layer(h, x), None), h, xs)[0]


def twice(layer: Layer) -> Layer:
    return lambda h, w: scanned(layer, h, jnp.stack([w, 2 * w]))


def some_of(*branches: Layer) -> Layer:
    return lambda h, x: lax.switch(x[1] % len(branches), branches, h, x[0])


def looped(w: jax.Array, h: jax.Array) -> jax.Array:
    rows = jnp.arange(ROWS)[:, None]
    return lax.fori_loop(0, LAYERS, lambda i, h: h.at[rows, chosen(h, w[i])].add(h[:, :KEPT] @ w[i]), h)


def waited_for(w: jax.Array, h: jax.Array) -> jax.Array:
    rows = jnp.arange(ROWS)[:, None]

    def body(state: Any) -> Any:
        count, h = state
        return count + 1, jnp.tanh(h.at[rows, chosen(h, jnp.eye(WIDTH))].add(h[:, :KEPT]))

    return lax.while_loop(lambda state: state[0] < LAYERS, body, (0, h))[1] @ w[0]


Model = Callable[[jax.Array, jax.Array], jax.Array]

OF_THEIR_OWN: dict[str, Model] = {
    "a scan": lambda w, h: scanned(layer, h, w),
    "a scan of recomputed layers": lambda w, h: scanned(jax.checkpoint(layer), h, w),
    "a scan of branches": lambda w, h: scanned(some_of(layer, plain), h, (w, jnp.arange(LAYERS))),
    "a recomputed scan": lambda w, h: jax.checkpoint(lambda w, h: scanned(layer, h, w))(w, h),
    "layers that save products": lambda w, h: scanned(
        jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable), h, w
    ),
    "scans in a scan": lambda w, h: scanned(twice(layer), h, w),
    "recomputed scans in a scan": lambda w, h: scanned(jax.checkpoint(twice(jax.checkpoint(layer))), h, w),
    "a branch": lambda w, h: lax.cond(w[0, 0, 0] > 0, layer, plain, h, w[0]),
    "recomputed branches": lambda w, h: scanned(
        jax.checkpoint(some_of(plain, layer, twice(layer))), h, (w, jnp.arange(LAYERS))
    ),
    "a loop of so many": looped,
    "a loop that waits": waited_for,
}

OF_OTHERS: dict[str, Model] = {
    "rows backwards": lambda w, h: scanned(
        lambda h, w: jnp.tanh(h.at[jnp.arange(ROWS)[::-1][:, None], chosen(h, w)].add(h[:, :KEPT] @ w)), h, w
    ),
    "rows that a loop counts on": lambda w, h: lax.scan(
        lambda state, w: (
            (
                jnp.tanh(state[0] + state[0][state[1], chosen(*(state[0], w))].sum(1, keepdims=True)),
                (state[1] + 1) % ROWS,
            ),
            None,
        ),
        (h, jnp.arange(ROWS)[:, None]),
        w,
    )[0][0],
    "rows that a branch turns around": lambda w, h: scanned(
        lambda h, x: (
            h[
                lax.cond(x[1] > 0, lambda: jnp.arange(ROWS), lambda: ROWS - 1 - jnp.arange(ROWS))[:, None],
                chosen(h, x[0]),
            ].sum(1, keepdims=True)
            + h
        ),
        h,
        (w, jnp.arange(LAYERS)),
    ),
    "rows of each layer": lambda w, h: scanned(
        lambda h, x: h + h[x[1], chosen(h, x[0])].sum(1, keepdims=True),
        h,
        (w, (jnp.arange(LAYERS)[:, None, None] + jnp.arange(ROWS)[:, None]) % ROWS),
    ),
}
"""What needs other rows."""

WAYS: dict[str, dict[str, Any]] = {
    "data parallel": {"planner": autopar.DataParallel()},
    "searched": {},
    "microbatches": {"microbatches": 2},
    "a pipeline": {"planner": autopar.Pipeline(stages=2, microbatches=2)},
}


def step_of(model: Model) -> Callable[..., Any]:
    def step(weights: jax.Array, batch: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(lambda weights: jnp.mean(model(weights, batch) ** 2))(weights)
        return weights - 0.1 * gradient, value

    return step


def sent_by(model: Model) -> set[str]:
    """The kinds of what data parallelism sends."""
    arguments = [jax.ShapeDtypeStruct(x.shape, "float32") for x in (WEIGHTS, BATCH)]
    step = autopar.parallelize(step_of(model), planner=autopar.DataParallel(), cluster="8:a100-80g")
    return {collective.kind for collective in step.plan(*arguments).collectives}


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_data_parallelism_sends_gradients_alone(name: str) -> None:
    assert sent_by(OF_THEIR_OWN[name]) == {"all_reduce"}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_other_rows_are_still_sent_for(name: str) -> None:
    assert "all_gather" in sent_by(OF_OTHERS[name])


@pytest.mark.parametrize("name", OF_OTHERS)
def test_other_rows_are_in_no_microbatch(name: str) -> None:
    with pytest.raises(PlanningError, match=r"needs (as a whole|its whole batch)"):
        autopar.parallelize(step_of(OF_OTHERS[name]), microbatches=2).plan(WEIGHTS, BATCH)


QUICK = {("a scan", "data parallel"), ("a scan of branches", "microbatches"), ("scans in a scan", "searched")}
CASES = [(name, way) for name in OF_THEIR_OWN for way in WAYS] + [
    (name, way) for name in OF_OTHERS for way in ("data parallel", "searched")
]


@pytest.mark.parametrize(("name", "way"), [case if case in QUICK else slow(*case) for case in CASES])
def test_the_step_is_jits(name: str, way: str) -> None:
    step = step_of((OF_THEIR_OWN | OF_OTHERS)[name])
    with jax.enable_x64(True):
        got, wanted = autopar.parallelize(step, **WAYS[way])(WEIGHTS, BATCH), jax.jit(step)(WEIGHTS, BATCH)
        for ours, jits in zip(got, wanted, strict=True):
            np.testing.assert_allclose(ours, jits, rtol=1e-10, atol=1e-12)


def test_arrays_that_are_known_enter_loops_too() -> None:
    """Keys and numbers are asked whether they count rows as well."""
    rows, keys, narrow = (
        np.arange(ROWS)[:, None],
        jax.random.split(jax.random.key(0), ROWS),
        jnp.arange(ROWS, dtype="int4"),
    )

    def drawn(h: jax.Array, w: jax.Array) -> jax.Array:
        noise = jax.vmap(jax.random.uniform)(keys) + narrow.astype("float32")
        return jnp.tanh(h.at[rows, chosen(h, w)].add(h[:, :KEPT] @ w + noise[:, None, None]))

    def model(w: jax.Array, h: jax.Array) -> jax.Array:
        return scanned(drawn, h, w)

    assert sent_by(model) == {"all_reduce"}
    ours, jits = (wrap(step_of(model))(WEIGHTS, BATCH)[0] for wrap in (autopar.parallelize, jax.jit))
    np.testing.assert_allclose(ours, jits, rtol=1e-5, atol=1e-6)
