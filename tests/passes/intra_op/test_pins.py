"""Placements and a mesh that a user chose: kept by the plan, cheaper without, refused with what is possible."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from passes.cluster import parse_cluster
from passes.errors import PlanningError
from passes.intra_op import layouts
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
        ({"pins": {"up/kernel": "[x,]"}}, "'' is no mesh axis"),
        ({"pins": {"up/kernel": "[x, x]"}}, "axis 'x' is written 2 times, and an axis cuts once"),
        ({"pins": 3}, "pins are a dict"),
        ({"mesh": {"x": 3}}, "this makes 3 devices"),
        ({"mesh": {"x": 1}}, "this makes 1 device, and"),
        ({"mesh": {"x": "8"}}, "a mesh is a dict"),
        ({"mesh": {"x": 8}, "pipeline": True}, "of plans without stages"),
        ({"mesh": {"x": 8}, "stages": 2}, "of plans without stages"),
        ({"stages": 1}, "two stages or more"),
        ({"stages": 99}, "layers at most"),
        ({"stages": 2, "pins": {"nothing": P()}}, "no input of the step has such a name"),
        ({"forbid": {"gather"}}, "no kind of collective; these are all_gather"),
        ({"allow": "all_reduce"}, "no kind of collective"),
        ({"allow": {"all_reduce"}, "forbid": {"all_gather"}}, "not both"),
    ],
)
def test_impossible_choices_are_refused_with_the_possible_ones(choices, words):
    with pytest.raises(PlanningError, match=words):
        planned(**choices)


def test_a_pin_that_does_not_divide_says_by_what():
    planner = autopar.Auto(pins={"w": P("x")}, mesh={"x": 8})
    function = autopar.parallelize(lambda w, x: x @ w, cluster="8:h100", planner=planner)
    with pytest.raises(PlanningError, match=r"does not divide dimension 0 of 12"):
        function.plan(F32((12, 8), "float32"), F32((8, 12), "float32"))


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        *[("kernel", 3), ("params/*/kernel", 2), ("params/up/kernel", 1), ("ernel", 0), ("*", 5), ("", 0)],
        *[("s.step", 1), (".step", 1), ("s.params['up']['kernel']", 1), ("s.params/up/kernel", 1), ("/s.mu/*", 1)],
    ],
)
def test_a_pattern_names_the_end_of_a_path(pattern, count):
    names = ["s.params['up']['kernel']", "s.params['a']['b']['kernel']", "s.mu['up']['kernel']", "batch", "s.step"]
    assert len(matching(pattern, names)) == count


def test_a_name_is_a_path():
    assert path_of("state.opt_state[1][0].mu['embed']['w']") == "state/opt_state/1/0/mu/embed/w"


def test_pins_and_meshes_that_are_checked_stay():
    pins = (("a", parse_spec("[x, -]")),)
    assert checked_pins(pins) == pins
    assert (checked_pins(None), checked_mesh(None), checked_mesh((("x", 2),))) == ((), (), (("x", 2),))


def kinds(plan):
    return {collective.kind for program in plan.programs for collective in program.collectives}


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_plan_does_without_what_is_forbidden_and_costs_no_less(kind, tmp_path):
    free = planned(mesh={"x": 8}, pins={"batch": P("x")})
    plan = planned(mesh={"x": 8}, pins={"batch": P("x")}, forbid={kind})
    assert kind not in kinds(plan)
    assert plan.step_seconds >= free.step_seconds
    others = {"all_reduce", "all_gather", "all_to_all", "reduce_scatter"} - {kind}
    assert planned(mesh={"x": 8}, pins={"batch": P("x")}, allow=others).diff(plan).is_empty
    plan.save(tmp_path / "plan.json")
    saved = autopar.Plan.load(tmp_path / "plan.json")
    assert saved.mesh == plan.mesh
    again = autopar.parallelize(step, cluster="8:h100", planner=autopar.Manual(saved)).plan(*shapes())
    assert again.diff(plan).is_empty


def test_forbidden_kinds_are_named_where_no_plan_does_without():
    with pytest.raises(PlanningError, match="step cannot do without") as caught:
        planned(
            mesh={"x": 8},
            pins={"batch": P("x"), "*/kernel": P()},
            forbid={"all_reduce", "reduce_scatter", "all_gather", "all_to_all"},
        )
    assert "Auto(forbid=['all_gather', 'all_reduce', 'all_to_all', 'reduce_scatter'])" in str(caught.value)
    assert "allow one of" in str(caught.value)
    assert "these are all kinds of collectives there are: nothing can be moved" in str(caught.value)


def test_a_kind_that_is_none_is_said_with_all_that_was_written():
    written = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter", "permute"]
    with pytest.raises(PlanningError, match="'permute' is no kind") as caught:
        autopar.Auto(forbid=written)
    assert f"forbid={written}:" in str(caught.value)


def deep(params, batch):
    def loss(params):
        x = batch
        for layer in range(4):
            x = x + jnp.tanh(x @ params[f"up{layer}"]) @ params[f"down{layer}"]
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def deep_shapes():
    layers = range(4)
    ups, downs = (
        {f"up{i}": F32((16, 32), "float32") for i in layers},
        {f"down{i}": F32((32, 16), "float32") for i in layers},
    )
    return ups | downs, F32((32, 16), "float32")


def placed(plan):
    return {n: str(s) for program in plan.programs for n, s in zip(program.input_names, program.inputs, strict=True)}


def test_each_submesh_of_a_pipeline_is_laid_out_and_pinned_as_it_was_written():
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype), deep_shapes())
    planner = autopar.Pipeline(
        stages=2, microbatches=2, meshes=({"a": 2}, {"b": 2}), pins={"up0": P(None, "a"), "down3": P(None, "b")}
    )
    function = autopar.parallelize(deep, planner=planner, devices=jax.devices()[:4])
    plan = function.plan(*args)
    assert [str(stage.mesh) for stage in plan.stages] == ["a=2", "b=2"]
    assert (placed(plan)["params['up0']"], placed(plan)["params['down3']"]) == ("[-, a]", "[-, b]")
    for ours, theirs in zip(jax.tree.leaves(function(*args)), jax.tree.leaves(jax.jit(deep)(*args)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_options_are_of_their_submesh_alone_and_go_before_those_of_all():
    def plan(**options):
        planner = autopar.Pipeline(stages=2, microbatches=2, max_axes=1, **options)
        return autopar.parallelize(deep, planner=planner, cluster="4:h100").plan(*deep_shapes())

    def kinds_of(stage):
        return {collective.kind for collective in stage.collectives}

    pins = {"up*": P(None, "x")}
    free, pinned = plan(), plan(options=(None, {"pins": pins}))
    assert [placed(pinned)[f"params['up{i}']"] for i in (2, 3)] == ["[-, x]"] * 2
    assert pinned.stages[0].layout == free.stages[0].layout
    assert placed(plan(pins=pins, options=({"pins": {}}, None))) == placed(pinned)
    all_pinned = plan(pins=pins)
    kind = min(kinds_of(all_pinned.stages[0]) & kinds_of(all_pinned.stages[1]))
    without = plan(pins=pins, options=({"forbid": {kind}}, None))
    assert [kind in kinds_of(stage) for stage in without.stages] == [False, True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"meshes": ({"a": 2},)}, "names 1 meshes, and there are 2"),
        ({"meshes": ({"a": 3}, None)}, "this makes 3 devices, and the stage has 2"),
        ({"pins": {"none": P()}}, "no input of the step has such a name"),
        ({"options": ({"forbid": {"all_to_all"}},)}, "names 1 options, and there are 2"),
        ({"options": ({"mesh": {"a": 2}}, None)}, "'mesh' is no option of a submesh; these are forbid, pins, max_axes"),
        ({"options": ({"forbid": {"gather"}}, None)}, "'gather' is no kind of collective"),
        ({"options": ({"pins": {"none": P()}}, None)}, "no input of the step has such a name"),
    ],
)
def test_impossible_options_of_submeshes_are_refused(options, words):
    def plan():
        planner = autopar.Pipeline(stages=2, microbatches=2, **options)
        return autopar.parallelize(deep, planner=planner, cluster="4:h100").plan(*deep_shapes())

    with pytest.raises(PlanningError, match=words):
        plan()


@pytest.mark.slow
def test_stages_are_searched_in_the_number_asked_for_around_pins_and_forbidden_kinds():
    for n in (2, 4):
        planner = autopar.Auto(stages=n, pins={"up*": P(None, "x")}, forbid={"all_to_all"}, max_axes=1)
        plan = autopar.parallelize(deep, planner=planner, cluster="8:v100-16g").plan(*deep_shapes())
        assert len(plan.stages) == n
        several = [placed(stage) for stage in plan.stages if stage.mesh.size > 1]
        pinned = [spec for specs in several for name, spec in specs.items() if "up" in name]
        assert pinned == ["[-, x]"] * len(pinned)
        assert pinned
        assert "all_to_all" not in kinds(plan)


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("6:v100-16g", [(6,), (3, 2)]),  # 0 and 1, 2, 3 share links, pairs across do not
        ("8:v100-16g", [(8,), (2, 4)]),
        ("8:h100", [(8,), (2, 4)]),
        ("12:tpu-v5p", [(12,), (2, 6), (4, 3)]),
    ],
)
def test_axes_within_a_host_are_in_the_order_that_may_be_fastest(text: str, shapes: list[tuple[int, ...]]) -> None:
    cluster = parse_cluster(text)
    assert {mesh.sizes for mesh in layouts(cluster, cluster.n_devices, 2)} == set(shapes)


@pytest.mark.parametrize("name", ["é", "forbidden", "data-parallel", ""])
def test_a_name_that_xla_or_a_file_does_not_take_is_refused(name: str):
    with pytest.raises(PlanningError, match="ASCII letters, digits, _"):
        checked_mesh({name: 8})


def test_a_plan_on_a_mesh_of_the_users_is_read_whatever_its_axes_are_called(tmp_path: Path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data-parallel",))

    def summed(x: jax.Array) -> jax.Array:
        spec = jax.sharding.PartitionSpec("data-parallel")
        mapped = jax.shard_map(lambda x: x.sum(keepdims=True), mesh=mesh, in_specs=spec, out_specs=spec)
        return mapped(x)

    plan = autopar.parallelize(summed).plan(jnp.ones(16))
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json").mesh.axes == ("data-parallel",)
