"""Placements and a mesh that a user chose: kept by the plan, cheaper without, refused with what is possible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from passes.errors import PlanningError
from passes.intra_op.pins import checked_mesh, checked_pins, matching, path_of
from passes.sharding import parse_spec

F32 = jax.ShapeDtypeStruct


def step(state, batch):
    def loss(params):
        return jnp.mean((jnp.tanh(batch @ params["up"]["kernel"]) @ params["down"]["kernel"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value


def shapes(batch=64):
    params = {"up": {"kernel": F32((32, 64), "float32")}, "down": {"kernel": F32((64, 32), "float32")}}
    return {"params": params}, F32((batch, 32), "float32")


def planned(**choices):
    return autopar.parallelize(step, cluster="8:h100", planner=autopar.Auto(**choices)).plan(*shapes())


@pytest.mark.parametrize("written", [P(None, "x"), "[-, x]", P("x"), P(("x",), None), P()])
def test_a_pinned_input_lies_as_it_is_pinned_and_costs_no_less(written):
    plan = planned(pins={"params/up/kernel": written}, mesh={"x": 8})
    (position,) = matching("up/kernel", plan.input_names)
    (spec,) = (spec for _, spec in checked_pins({"": written}))
    assert plan.inputs[position].dims == (*spec.dims, *[()] * (2 - len(spec.dims)))
    assert plan.outputs[position] == plan.inputs[position]  # it is state
    assert plan.step_seconds >= planned(mesh={"x": 8}).step_seconds


def test_a_mesh_has_the_names_that_it_was_given():
    plan = planned(mesh={"data": 4, "model": 2}, pins={"*/kernel": P(None, "model")})
    assert (plan.mesh.axes, plan.mesh.sizes) == (("data", "model"), (4, 2))
    assert [str(spec) for spec in plan.inputs[:2]] == ["[-, model]", "[-, model]"]


def test_a_pinned_plan_computes_what_jit_does():
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype), shapes())
    planner = autopar.Auto(pins={"up/kernel": P("b", "a"), "batch": P(None, "a")}, mesh={"a": 2, "b": 4})
    got = autopar.parallelize(step, planner=planner)(*args)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"pins": {"up/kernl": P()}}, "did you mean"),
        ({"pins": {"nothing": P()}}, "no input of the step has such a name"),
        ({"pins": {"up/kernel": P("z")}}, "has no axis 'z'"),
        ({"pins": {"up/kernel": P(None, None, "x")}}, "has 3 dimensions"),
        ({"pins": {"up/kernel": P(3)}}, "is not None, a mesh axis"),
        ({"pins": {"up/kernel": 3}}, "a placement is a PartitionSpec"),
        ({"pins": {"up/kernel": "x"}}, "a placement is a PartitionSpec"),
        ({"pins": 3}, "pins are a dict"),
        ({"mesh": {"x": 3}}, "this makes 3 devices"),
        ({"mesh": {"x": "8"}}, "a mesh is a dict"),
        ({"mesh": {"x": 8}, "pipeline": True}, "of plans without stages"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(choices, words):
    with pytest.raises(PlanningError, match=words):
        planned(**choices)


def test_a_pin_that_does_not_divide_says_by_what():
    planner = autopar.Auto(pins={"w": P("x")}, mesh={"x": 8})
    function = autopar.parallelize(lambda w, x: x @ w, cluster="8:h100", planner=planner)
    with pytest.raises(PlanningError, match=r"does not divide dimension 0 of 12"):
        function.plan(F32((12, 8), "float32"), F32((8, 12), "float32"))


@pytest.mark.parametrize(
    ("pattern", "count"), [("kernel", 3), ("params/*/kernel", 2), ("params/up/kernel", 1), ("ernel", 0), ("*", 4)]
)
def test_a_pattern_names_the_end_of_a_path(pattern, count):
    names = ["s.params['up']['kernel']", "s.params['a']['b']['kernel']", "s.mu['up']['kernel']", "batch"]
    assert len(matching(pattern, names)) == count


def test_a_name_is_a_path():
    assert path_of("state.opt_state[1][0].mu['embed']['w']") == "state/opt_state/1/0/mu/embed/w"


def test_what_is_checked_already_stays():
    pins = (("a", parse_spec("[x, -]")),)
    assert checked_pins(pins) == pins
    assert (checked_pins(None), checked_mesh(None), checked_mesh((("x", 2),))) == ((), (), (("x", 2),))
