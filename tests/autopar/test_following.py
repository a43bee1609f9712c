"""A function that follows a train step takes its state as it lies, on one mesh or on stages, and is `jax.jit`'s."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autopar
from passes.ir import TensorType
from passes.planners import counterparts
from tests.sample import slow

LAYERS, WIDTH = 4, 16
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


def layers(params: Any, x: Any) -> Any:
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params["head"]


def train(state: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((layers(p, x) - x) ** 2))(state["params"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
    return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments), "moments": moments}, loss


def evaluate(params: Any, x: Any) -> Any:
    outputs = layers(params, x)
    return jnp.mean((outputs - x) ** 2), outputs


def generate(params: Any, x: Any) -> Any:
    return jax.lax.scan(lambda row, _: (jnp.tanh(layers(params, row)),) * 2, x, None, length=3)[1]


def made() -> Any:
    rng = np.random.default_rng(1)
    draw = lambda *shape: (rng.normal(size=shape) / 4).astype(np.float32)  # noqa: E731
    params = {
        "layers": [{"w": draw(WIDTH, WIDTH), "b": draw(WIDTH)} for _ in range(LAYERS)],
        "head": draw(WIDTH, WIDTH),
    }
    return {"params": params, "moments": jax.tree.map(np.zeros_like, params)}


PLANNERS = {
    "zero": autopar.Zero(3),
    "searched": autopar.Auto(),
    "megatron": autopar.Megatron(data=4, tensor=2),
    "stages": autopar.Pipeline(stages=2, microbatches=4),
    "stages in turn": autopar.Pipeline(stages=2, microbatches=4, interleave=2),
}


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("stages", evaluate),
        *(slow(name, evaluate) for name in ("zero", "searched", "megatron", "stages in turn")),
        *(slow(name, generate) for name in ("zero", "searched", "megatron")),  # a loop that reads all has no stages
    ],
)
def test_a_following_function_moves_nothing_of_the_state(name: str, function: Any):
    step = autopar.parallelize(train, planner=PLANNERS[name])
    state, _ = step(made(), X)
    followed = autopar.parallelize(function, follow=step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = followed(state["params"], X)
    params = jax.tree.map(np.asarray, state["params"])
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(jax.jit(function)(params, X)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    there = followed.placement(state["params"], X)[0][0]
    for array, struct in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(there), strict=True):
        assert struct.sharding.is_equivalent_to(array.sharding, array.ndim)


def test_modules_are_followed_as_they_lie():
    def changed(model: nnx.Module, x: Any) -> Any:
        grads = nnx.grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))

    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    step = autopar.parallelize(changed, planner=autopar.Zero(3))
    step(model, X)
    assert step.compilations.last is not None
    followed = autopar.parallelize(lambda model, x: model(x), follow=step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(followed(model, X), model(X), rtol=1e-4, atol=1e-5)


def test_a_function_follows_what_has_a_plan():
    step = autopar.parallelize(train)
    with pytest.raises(autopar.ArgumentError, match="has not been planned yet"):
        autopar.parallelize(evaluate, follow=step).plan(made()["params"], X)
    with pytest.raises(autopar.ArgumentError, match="what parallelize"):
        autopar.parallelize(evaluate, follow=train)


def test_weights_read_in_another_order_have_no_such_stages():
    def backwards(params: Any, x: Any) -> Any:
        x = x @ params["head"]
        for layer in reversed(params["layers"]):
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return x

    step = autopar.parallelize(train, planner=PLANNERS["stages"], cluster="4:h100")
    step.plan(made(), X)
    followed = autopar.parallelize(backwards, follow=step)
    with pytest.raises(autopar.PlanningError, match="in order"):
        followed.plan(made()["params"], X)


@pytest.mark.parametrize(("rows", "microbatches"), [(16, 4), (6, 2)])
def test_stages_in_turn_take_as_many_microbatches_as_suit_their_submeshes(rows: int, microbatches: int):
    step = autopar.parallelize(train, planner=PLANNERS["stages in turn"], cluster="4:h100")
    step.plan(made(), X)
    plan = autopar.parallelize(evaluate, follow=step).plan(made()["params"], X[:rows])
    assert (plan.microbatches, plan.chunks, len(plan.stages)) == (microbatches, 2, 4)


def test_a_batch_that_stages_in_turn_cannot_take_is_refused_by_what_would_do():
    step = autopar.parallelize(train, planner=PLANNERS["stages in turn"], cluster="4:h100")
    step.plan(made(), X)
    params = made()["params"]
    for options, rows in (({}, 5), ({"microbatches": 3}, 6)):
        with pytest.raises(autopar.PlanningError, match=r"follow=.*multiples of 2(.|\n)*a multiple of 2 rows"):
            autopar.parallelize(evaluate, follow=step, **options).plan(params, X[:rows])


def test_more_microbatches_than_the_followed_plan_has_are_as_asked():
    step = autopar.parallelize(train, planner=PLANNERS["stages"], cluster="4:h100")
    step.plan(made(), X)
    followed = autopar.parallelize(evaluate, follow=step, microbatches=8)
    assert followed.plan(made()["params"], X).microbatches == 8


def test_an_array_is_the_one_with_the_longest_end_of_its_path():
    small, large = (TensorType(shape=(n,), dtype="float32") for n in (2, 4))
    known = [
        ("state.params['a']['w']", small),
        ("state.params['b']['w']", small),
        ("state.mu['a']['w']", small),
        ("state.params['b']['w']", large),
        ("step", small),
    ]
    arrays = [("params['b']['w']", small), ("params['a']['w']", small), ("w", large), ("batch", small), ("v", large)]
    assert counterparts(arrays, known) == [1, 0, 3, None, None]


def test_a_key_of_a_followed_plan_keeps_the_plan_alive():
    """Another plan gets the `id` of one that is gone, and would be taken for it."""
    state = made()
    training = autopar.parallelize(train)
    evaluation = autopar.parallelize(evaluate, follow=training)
    training.plan(state, X)
    evaluation.plan(state["params"], X)
    plan = weakref.ref(training.plan(state, X))
    training.clear_cache()
    gc.collect()
    assert plan() is not None
    evaluation.clear_cache()
    gc.collect()
    assert plan() is None


def test_a_following_function_keeps_other_arguments_where_they_arrive():
    """With `placed="keep"` the batch stays as it comes, and the state as the followed plan has it."""
    step = autopar.parallelize(train, planner=autopar.Zero(3))
    state, _ = step(made(), X)
    mesh = jax.make_mesh((2, 4), ("rows", "columns"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    batch = jax.device_put(X, jax.NamedSharding(mesh, jax.P(None, "columns")))
    followed = autopar.parallelize(evaluate, follow=step, placed="keep")
    (places, rows), _ = followed.placement(state["params"], batch)
    assert rows.sharding.is_equivalent_to(batch.sharding, 2)
    for array, place in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(places), strict=True):
        assert array.sharding.is_equivalent_to(place.sharding, array.ndim)
    loss, _ = followed(state["params"], batch)
    assert abs(loss - evaluate(jax.tree.map(np.asarray, state["params"]), X)[0]) < 1e-5
