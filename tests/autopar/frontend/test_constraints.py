"""Values inside a step that their user places: kept by every plan, the identity otherwise, refused where impossible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import ArgumentError
from passes.errors import PlanningError

MESH = {"data": 2, "model": 4}
WEIGHT, BATCH = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate([(16, 32), (8, 16)]))


def step_with(spec: P):
    def step(weight, batch):
        def loss(weight):
            hidden = jax.vmap(lambda row: autopar.constrain(jnp.tanh(row @ weight), P(*spec[1:])))(batch)
            return jnp.mean(autopar.constrain(hidden, spec) ** 2)

        value, grads = jax.value_and_grad(loss)(weight)
        return weight - grads, value

    return step


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (P("data", "model"), "[data, model]"),
        (P(None, ("model", "data")), "[-, model+data]"),
        (P("model"), "[model, -]"),
    ],
)
def test_a_constrained_value_lies_as_it_is_said_and_computes_what_jit_does(spec, text):
    function = autopar.parallelize(step_with(spec), planner=autopar.Auto(mesh=MESH))
    plan = function.plan(WEIGHT, BATCH)
    (of_rows, whole, *_) = [str(o.placement.results[0]) for o in plan.operators if o.primitive == "autopar_constrain"]
    assert whole == text
    assert of_rows.partition(", ")[2] == text.partition(", ")[2]  # of the rows, the batch may lie anyhow
    for ours, theirs in zip(function(WEIGHT, BATCH), jax.jit(step_with(spec))(WEIGHT, BATCH), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_constraint_is_the_identity_and_has_its_gradient():
    tree = {"a": BATCH, "b": BATCH[0]}
    jax.tree.map(np.testing.assert_array_equal, autopar.constrain(tree, P("x")), tree)
    grad = jax.grad(lambda x: (autopar.constrain(x, P("x", P.UNCONSTRAINED)) ** 3).sum())(BATCH)
    np.testing.assert_allclose(grad, 3 * BATCH**2, rtol=1e-6)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("x", "a placement is a PartitionSpec"),
        (P(None, None, "x"), "3 entries"),
        (P(3), "3 is no name of a mesh axis"),
        (P("x", ("y", "x")), "axis 'x' is written 2 times"),
    ],
)
def test_a_spec_that_is_no_placement_of_the_value_is_refused(spec, words):
    with pytest.raises(ArgumentError, match=words):
        autopar.constrain(BATCH, spec)


def test_an_axis_that_no_mesh_has_is_named_with_the_line():
    with pytest.raises(PlanningError, match=r"to \[any, expert\]: the mesh .* has no axis expert") as caught:
        autopar.parallelize(step_with(P(None, "expert")), planner=autopar.Auto(mesh=MESH)).plan(WEIGHT, BATCH)
    assert "test_constraints.py" in str(caught.value)
