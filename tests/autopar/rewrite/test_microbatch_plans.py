"""Collectives of steps in microbatches: no more for a penalty on weights, or for a weight that is read transposed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from passes.ir import scan_of
from passes.transforms import loop_of
from tests.sample import each, slow

WIDTH, HIDDEN, ROWS = 256, 512, 64
CLUSTER = "8:a100-80g"
SCALAR_NBYTES = 8

Loss = Callable[[dict[str, Any], Any], Any]


def plain(params: dict[str, Any], batch: Any) -> Any:
    hidden = jnp.tanh(jnp.tanh(batch @ params["up"]) @ params["mix"])
    return jnp.mean((hidden @ params["down"] - batch) ** 2)


def penalised(params: dict[str, Any], batch: Any) -> Any:
    return plain(params, batch) + 1e-3 * sum(jnp.sum(p**2) for p in params.values())


def tied(params: dict[str, Any], batch: Any) -> Any:
    """Its last product reads the first weight transposed."""
    hidden = jnp.tanh(jnp.tanh(batch @ params["up"]) @ params["mix"])
    return jnp.mean((hidden @ params["up"].T - batch) ** 2)


def tied_early(params: dict[str, Any], batch: Any) -> Any:
    """The weight is transposed before the first layer and read after the last."""
    transposed = params["up"].T
    hidden = jnp.tanh(jnp.tanh(batch @ params["up"]) @ params["mix"])
    return jnp.mean((hidden @ transposed - batch) ** 2)


def step_of(loss: Loss) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    return step


def arguments(dtype: str = "float32") -> tuple[dict[str, Any], Any]:
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, HIDDEN), "mix": (HIDDEN, HIDDEN), "down": (HIDDEN, WIDTH)}
    params = {name: jnp.asarray(0.1 * rng.normal(size=shape), dtype) for name, shape in shapes.items()}
    return params, jnp.asarray(rng.normal(size=(ROWS, WIDTH)), dtype)


def sent(loss: Loss, planner: Any, microbatches: int = 2) -> dict[str, int]:
    """Bytes that come out of the collectives of each kind in a step, but for single numbers."""
    step = autopar.parallelize(step_of(loss), cluster=CLUSTER, planner=planner, microbatches=microbatches)
    totals: dict[str, int] = {}
    for collective in step.plan(*arguments()).collectives:
        if collective.nbytes > SCALAR_NBYTES:
            totals[collective.kind] = totals.get(collective.kind, 0) + collective.nbytes * collective.count
    return totals


@pytest.mark.parametrize(
    "planner",
    [autopar.DataParallel(), autopar.Zero(2), autopar.Zero(3)],
    ids=["dp", "zero2", "zero3"],
)
def test_a_penalty_on_weights_sends_nothing(planner: Any):
    """Its gradients were added in the loop, for which each microbatch reduced the others; and the operators of all
    weights' penalties were placed as one, for which weights were gathered.
    """
    assert sent(penalised, planner) == sent(plain, planner)


def test_a_penalty_is_added_after_the_loop():
    traced = autopar.parallelize(step_of(penalised), devices=jax.devices()[:2], microbatches=2).trace(*arguments())
    index = loop_of(traced.graph)
    assert index is not None
    scan = scan_of(traced.graph.nodes[index])
    assert scan is not None
    (body,) = traced.graph.nodes[index].subgraphs
    entering = {body.types[v].shape for v in body.inputs[: scan.constants]}
    assert entering == {(WIDTH, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, WIDTH)}
    assert scan.constants == len(arguments()[0])  # of the penalty nothing


@pytest.mark.parametrize("loss", [tied, tied_early])
def test_a_weight_that_is_read_transposed_as_well_is_fetched_once(loss: Loss):
    """It was transposed before the loop, in parts: two values, each of which was gathered in every microbatch."""
    once = sent(loss, autopar.Zero(3), microbatches=1)
    twice = sent(loss, autopar.Zero(3))
    assert twice["all_gather"] == 2 * once["all_gather"]
    assert twice["reduce_scatter"] == once["reduce_scatter"]


@pytest.mark.parametrize("loss", [tied, tied_early])
def test_a_transposed_weight_does_not_cross_stages_with_every_microbatch(loss: Loss):
    planner = autopar.Pipeline(stages=2, microbatches=2)
    plan = autopar.parallelize(step_of(loss), planner=planner).plan(*arguments())
    assert isinstance(plan, autopar.PipelinePlan)
    weight = arguments()[0]["up"]
    for stage in plan.stages:
        streams = zip(stage.input_names, stage.input_types, strict=True)
        shapes = {type.shape[1:] for name, type in streams if name.startswith("stream ")}
        assert shapes.isdisjoint({weight.shape, weight.shape[::-1]})


WAYS: dict[str, dict[str, Any]] = {
    "zero3": {"planner": autopar.Zero(3), "microbatches": 2},
    "auto": {"planner": autopar.Auto(), "microbatches": 4},
    "pipeline": {"planner": autopar.Pipeline(stages=2, microbatches=2)},
    "independent": {"planner": autopar.Zero(2), "microbatches": 2, "microbatch_semantics": "independent"},
}


ON_ONE_MESH = [name for name in WAYS if name != "pipeline"]
LOSSES = (penalised, tied, tied_early)


@pytest.mark.parametrize(("way", "loss"), [*each(ON_ONE_MESH, LOSSES), *(slow("pipeline", loss) for loss in LOSSES)])
def test_the_step_is_that_of_jit(way: str, loss: Loss):
    options = WAYS[way]
    with jax.enable_x64(True):
        given = arguments("float64")
        ours, theirs = (f(*given) for f in (autopar.parallelize(step_of(loss), **options), jax.jit(step_of(loss))))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), ours, theirs)


def in_a_stack(params: dict[str, Any], batch: Any) -> Any:
    """Layers written out, whose weights are rows of one array."""
    hidden = jnp.tanh(batch @ params["up"])
    for weight in params["mix"]:
        hidden = jnp.tanh(hidden @ weight)
    return jnp.mean((hidden @ params["down"] - batch) ** 2)


def in_columns(params: dict[str, Any], batch: Any) -> Any:
    """As layers in a stack, which are columns of one matrix."""
    hidden = jnp.tanh(batch @ params["up"])
    for weight in jnp.split(params["mix"], params["mix"].shape[1] // HIDDEN, axis=1):
        hidden = jnp.tanh(hidden @ weight)
    return jnp.mean((hidden @ params["down"] - batch) ** 2)


def at_some_places(params: dict[str, Any], batch: Any) -> Any:
    """The first rows of a table, for the places of what may be longer."""
    hidden = jnp.tanh(batch @ params["up"]).reshape(-1, 4, HIDDEN // 4)
    hidden = jnp.tanh(hidden + params["mix"][jnp.arange(4)]).reshape(-1, HIDDEN)
    return jnp.mean((hidden @ params["down"] - batch) ** 2)


def projected(params: dict[str, Any], batch: Any) -> Any:
    """A weight that is read through a constant matrix, of whose columns each independent microbatch would take some."""
    basis = jnp.cos(jnp.arange(HIDDEN * HIDDEN, dtype=batch.dtype).reshape(HIDDEN, HIDDEN) / 7)
    hidden = jnp.tanh(jnp.tanh(batch @ params["up"]) @ (params["mix"] @ basis / HIDDEN))
    return jnp.mean((hidden @ params["down"] - batch) ** 2)


def stacked_arguments(loss: Loss, dtype: str = "float32", layers: int = 3) -> tuple[dict[str, Any], Any]:
    params, batch = arguments(dtype)
    if loss is projected:
        return params, batch
    if loss is at_some_places:
        return params | {"mix": params["mix"][:, : HIDDEN // 4]}, batch
    axis = 0 if loss is in_a_stack else 1
    mix = [params["mix"] * (1 - i / 4) for i in range(layers)]
    return params | {"mix": jnp.stack(mix) if axis == 0 else jnp.concatenate(mix, axis=1)}, batch


@pytest.mark.parametrize("loss", [in_a_stack, in_columns, at_some_places])
@pytest.mark.parametrize("planner", [autopar.DataParallel(), autopar.Zero(2)], ids=["dp", "zero2"])
def test_gradients_that_are_put_into_one_array_are_reduced_once(loss: Loss, planner: Any):
    """They were put there in the loop, for which each microbatch reduced them."""
    params, batch = stacked_arguments(loss)
    step = autopar.parallelize(step_of(loss), cluster=CLUSTER, planner=planner, microbatches=4)
    nbytes = sum(array.nbytes for name, array in params.items() if name != "mix")
    nbytes += params["mix"][: 4 if loss is at_some_places else None].nbytes
    kinds = {"all_reduce": 1, "reduce_scatter": 8}
    reduced = sum(c.nbytes * c.count * kinds.get(c.kind, 0) for c in step.plan(params, batch).collectives)
    assert nbytes <= reduced <= nbytes + SCALAR_NBYTES


@pytest.mark.parametrize(("way", "loss"), each(WAYS, (in_a_stack, in_columns, at_some_places, projected)))
def test_the_step_with_layers_in_one_array_is_that_of_jit(way: str, loss: Loss):
    with jax.enable_x64(True):
        given = stacked_arguments(loss, "float64")
        ours, theirs = (f(*given) for f in (autopar.parallelize(step_of(loss), **WAYS[way]), jax.jit(step_of(loss))))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), ours, theirs)


def standardised(batch: dict[str, jax.Array]) -> jax.Array:
    return (batch["gain"] - batch["gain"].mean()) / (batch["gain"].std() + 1e-8)


def masked(batch: dict[str, jax.Array]) -> jax.Array:
    counts = batch["gain"] > 0
    return counts * batch["gain"] / counts.sum()


def scaled(batch: dict[str, jax.Array]) -> jax.Array:
    return batch["gain"] / jnp.abs(batch["gain"]).max()


@pytest.mark.parametrize("weigh", [standardised, masked, scaled])
def test_reductions_over_the_batch_move_no_rows(
    weigh: Callable[[dict[str, jax.Array]], jax.Array],
):
    """Sums that are made of other sums or of what the loop reads too, and what is no sum, were computed whole, of rows
    that were brought to every device.
    """

    def step(state: tuple[jax.Array, jax.Array], batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        weight, largest = state
        gains = weigh(batch)

        def loss(weight: jax.Array) -> jax.Array:
            return jnp.sum(jnp.tanh(batch["x"] @ weight)[:, 0] * gains)

        return weight - 0.1 * jax.grad(loss)(weight), 0.9 * largest + jnp.abs(batch["x"]).max()

    with jax.enable_x64(True):
        draws = np.random.default_rng(0)
        state, batch = (
            (draws.normal(size=(8, 4)), np.float64(1)),
            {"x": draws.normal(size=(16, 8)), "gain": draws.normal(size=16)},
        )
        parallel = autopar.parallelize(
            step, planner=autopar.DataParallel(), devices=jax.devices()[:4], microbatches=2, donate_argnums=0
        )
        assert {collective.kind for collective in parallel.plan(state, batch).collectives} == {"all_reduce"}
        for mine, theirs in zip(parallel(state, batch), jax.jit(step)(state, batch), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)
