"""Planners of one's own: what they are given, what they give, and what is said where that is wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import ArgumentError
from passes.plan import Plan
from tests.closeness import assert_close

STEP = autopar.Step
CLUSTER = "1x4:a100-80g"


def alike(plan: Any) -> Any:
    """All of a plan but the seconds that planning took, and the function that it is bound to."""
    return plan.timeline and plan.costs, [
        (one.fingerprint, one.mesh, one.layout, one.seconds, one.nbytes, one.microbatches, one.remat)
        for one in plan.programs
    ]


def train_step(params: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p["up"]) @ p["down"]))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def given() -> tuple[Any, Any]:
    draws = np.random.default_rng(0)
    params = {"up": draws.normal(size=(8, 16)), "down": draws.normal(size=(16, 8))}
    return params, draws.normal(size=(16, 8))


@dataclass(frozen=True)
class HalfTheDevices:
    """ZeRO on half of the devices of each host."""

    def plan(self, step: autopar.Step, cluster: autopar.Cluster, options: autopar.PlanOptions) -> autopar.Planned:
        (group,) = cluster.groups
        half = replace(group, devices_per_host=group.devices_per_host // 2)
        return autopar.Zero(3).plan(step, autopar.Cluster(name="half", groups=(half,)), options)


@dataclass(frozen=True)
class InMicrobatches:
    """Data parallelism in a number of microbatches of its own."""

    count: int

    def plan(self, step: Any, cluster: Any, options: Any) -> autopar.Planned:
        return autopar.DataParallel().plan(step.variant(autopar.Variant(microbatches=self.count)), cluster, options)


@dataclass(frozen=True)
class Replicated:
    """The whole step on every device: a plan that is made of nothing but the step's graph."""

    def plan(self, step: autopar.Step, cluster: autopar.Cluster, options: autopar.PlanOptions) -> autopar.Planned:
        searched = autopar.Auto(max_axes=1).plan(step, cluster, options).plan
        assert isinstance(searched, Plan)
        whole = autopar.DataParallel().plan(step, autopar.Cluster.from_json(cluster.to_json()), options).plan
        return autopar.Planned.of(min(searched, whole, key=lambda plan: plan.step_seconds), step)


@pytest.mark.parametrize("planner", [HalfTheDevices(), InMicrobatches(4), Replicated()], ids=lambda p: type(p).__name__)
def test_the_step_of_a_planner_of_ones_own_is_jits(planner: Any):
    with jax.enable_x64(True):
        step = autopar.parallelize(train_step, planner=planner, devices=jax.devices()[:4])
        assert_close(step(*given()), jax.jit(train_step)(*given()))


def test_a_planner_may_choose_cluster_and_variant():
    assert autopar.parallelize(train_step, planner=HalfTheDevices(), cluster=CLUSTER).plan(*given()).mesh.size == 2
    step = autopar.parallelize(train_step, planner=InMicrobatches(4), cluster=CLUSTER)
    assert step.plan(*given()).microbatches == 4
    assert step.trace(*given()).stacked


def test_a_planner_gets_the_users_options_in_its_step():
    class Asked:
        def plan(self, step: Any, cluster: Any, options: Any) -> autopar.Planned:
            assert (step.chosen.microbatches, step.counts, step.layers) == (2, (2,), 0)
            assert set(step.chosen.kept) == {"inputs"}
            assert options.memory_limit == 3 * 2**30
            return autopar.DataParallel().plan(step, cluster, options)

    options = {"microbatches": 2, "remat": "inputs", "memory_limit": "3 GiB", "cluster": CLUSTER}
    plan = autopar.parallelize(train_step, planner=Asked(), **options).plan(*given())
    assert plan.microbatches == 2
    assert set(plan.remat) == {"inputs"}


def test_a_step_of_a_graph_is_planned_without_a_function():
    traced = autopar.parallelize(train_step).trace(*given())
    step = STEP(graph=traced.graph, state_pairs=traced.state_pairs, donated=traced.donated)
    cluster = autopar.parallelize(train_step, cluster=CLUSTER).plan(*given()).cluster
    for planner in (autopar.Auto(), autopar.DataParallel(), autopar.Zero(2), autopar.Megatron(data=2, tensor=2)):
        planned = planner.plan(step, cluster)
        assert planned.step is step
        by_function = autopar.parallelize(train_step, cluster=CLUSTER, planner=planner).plan(*given())
        assert alike(planned.plan) == alike(by_function)
    with pytest.raises(autopar.PlanningError, match="a graph alone"):
        step.variant(autopar.Variant(microbatches=2))


def momentum_step(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p["up"]) @ p["down"]))(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum), "momentum": momentum}, loss


def test_megatron_cuts_optimizer_state_over_its_data_devices_with_zero_1_and_nothing_else():
    params, batch = given()
    state = {"params": params, "momentum": jax.tree.map(np.ones_like, params)}
    with jax.enable_x64(True):
        expected = jax.jit(momentum_step)(state, batch)
        for sizes in ({"data": 2, "tensor": 2}, {"data": 2, "tensor": 1, "pipeline": 2, "microbatches": 2}):
            planner = autopar.Megatron(**sizes, zero=1)
            step = autopar.parallelize(momentum_step, planner=planner, devices=jax.devices()[:4])
            assert_close(step(state, batch), expected)
            for program in step.plan(state, batch).programs:
                cut = {n: "data" in s.axes for n, s in zip(program.input_names, program.inputs, strict=True)}
                assert {n: on for n, on in cut.items() if "momentum" in n} == {n: True for n in cut if "momentum" in n}
                assert not any(on for n, on in cut.items() if "params" in n)
    with pytest.raises(autopar.PlanningError, match="zero=0 or 1"):
        autopar.parallelize(train_step, cluster=CLUSTER, planner=autopar.Megatron(data=2, tensor=2, zero=2)).plan(
            *given()
        )


class Wrong:
    """Gives what `answer` makes of a right answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def plan(self, step: Any, cluster: Any, options: Any) -> Any:
        return self.answer(autopar.DataParallel().plan(step, cluster, options), step)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda planned, step: planned.plan, "no autopar.Planned"),
        (lambda planned, step: None, "it returned None"),
        (lambda planned, step: replace(planned, step=STEP(graph=step.graph)), "another step than it was given"),
        (lambda planned, step: replace(planned, step=step.variant(autopar.Variant(microbatches=2))), "with a step of"),
    ],
)
def test_answers_that_are_wrong_are_refused(answer: Any, words: str):
    with pytest.raises(ArgumentError, match=words):
        autopar.parallelize(train_step, planner=Wrong(answer), cluster=CLUSTER).plan(*given())


# What was written before there were steps.


class OfGraphs:
    def plan(self, graph: Any, cluster: Any, **options: Any) -> Any:
        return autopar.DataParallel().plan(graph, cluster, **options)


def test_planners_of_graphs_are_warned_about_and_work():
    with pytest.warns(DeprecationWarning, match=r"OfGraphs.plan\(step, cluster, options\)") as warned:
        step = autopar.parallelize(train_step, planner=OfGraphs(), cluster=CLUSTER, microbatches=2)
    assert len(warned) == 1
    plan = step.plan(*given())
    hand_made = autopar.parallelize(train_step, planner=autopar.DataParallel(), cluster=CLUSTER, microbatches=2)
    assert alike(plan) == alike(hand_made.plan(*given()))


def test_our_planners_take_graphs_with_a_warning():
    traced = autopar.parallelize(train_step).trace(*given())
    plan = autopar.parallelize(train_step, cluster=CLUSTER, planner=autopar.DataParallel()).plan(*given())
    with pytest.warns(DeprecationWarning, match="Step\\(graph=graph"):
        given_graph = autopar.DataParallel().plan(traced.graph, plan.cluster, tied=traced.state_pairs)
    assert alike(given_graph) == alike(plan)


def test_an_option_that_is_no_planner_is_refused():
    class Half:
        def plan(self, step: Any) -> Any:
            return step

    for planner in (Half(), autopar.Auto, "auto"):
        with pytest.raises(ArgumentError, match="planner="):
            autopar.parallelize(train_step, planner=planner)


# Names and words.


def test_limits_in_words_are_bytes():
    assert autopar.Auto(memory_limit="12 GiB").memory_limit == 12 * 2**30
    assert autopar.Auto(memory_limit="12 GiB") == autopar.Auto(memory_limit=12 * 2**30)
    for wrong in ("much", 0, -1, float("nan"), True):
        with pytest.raises(autopar.PlanningError, match="memory_limit="):
            autopar.Auto(memory_limit=wrong)


def test_gpipe_is_a_pipeline_under_its_schedule():
    step = autopar.parallelize(train_step, cluster=CLUSTER, planner=autopar.GPipe(2, 4))
    same = autopar.Pipeline(stages=2, microbatches=4, schedule="gpipe")
    assert alike(step.plan(*given())) == alike(step.replan(planner=same).plan(*given()))


def test_schedules_are_a_table_that_users_add_to(monkeypatch: pytest.MonkeyPatch):
    assert {"gpipe", "1f1b", "interleaved"} <= set(autopar.SCHEDULES)
    with pytest.raises(autopar.PlanningError, match="is in the table"):
        autopar.register_schedule("gpipe")(lambda stages, microbatches: autopar.SCHEDULES["1f1b"](stages, microbatches))
    name = "of the test"
    monkeypatch.setitem(autopar.SCHEDULES, name, autopar.SCHEDULES["gpipe"])
    planner = autopar.Pipeline(stages=2, microbatches=4, schedule=name)
    plan = autopar.parallelize(train_step, cluster=CLUSTER, planner=planner).plan(*given())
    assert isinstance(plan.schedule, autopar.Schedule)
    assert plan.schedule_name == name


def test_a_device_of_ones_own_is_planned_for():
    spec = autopar.parallelize(train_step, cluster=CLUSTER).plan(*given()).cluster.groups[0]
    slow = autopar.Link(alpha_seconds=1e-3, bytes_per_second=1e9)
    device = replace(spec.device, name="Of-The-Test")
    autopar.register_device(autopar.HostSpec(device=device, devices_per_host=4, intra=slow, inter=slow))
    plan = autopar.parallelize(train_step, cluster="4:of-the-test").plan(*given())
    assert isinstance(plan.cluster.groups[0], autopar.HostGroup)
    assert isinstance(plan.cluster.groups[0].device, autopar.DeviceSpec)
    assert plan.cluster.groups[0].intra == slow


def test_a_saved_plan_counts_for_the_cluster_that_is_named():
    step = autopar.parallelize(train_step, cluster="8:a100-80g", planner=autopar.DataParallel())
    plan = step.plan(*given())
    again = step.replan(cluster="8:h100", planner=autopar.Manual(plan)).plan(*given())
    expected = step.replan(cluster="8:h100").plan(*given())
    assert (again.cluster.name, again.step_seconds) == ("8:h100", expected.step_seconds)
    assert again.step_seconds < plan.step_seconds
    here = autopar.parallelize(train_step, planner=autopar.Manual(plan)).plan(*given())
    assert here.cluster == plan.cluster  # none is named: it stays what it was made for


@pytest.mark.parametrize(
    ("planner", "name"),
    [
        (autopar.Pipeline(stages=2, microbatches=2), "pipeline of 2"),
        (autopar.Pipeline(stages=2, microbatches=2, interleave=2), "pipeline of 2, interleave 2"),
        (autopar.Megatron(data=2, tensor=2, pipeline=2, interleave=2, microbatches=2), "megatron 2x2x2, interleave 2"),
    ],
)
def test_pipelines_are_named_with_their_interleave(planner: Any, name: str):
    params = {f"w{i}": jnp.ones((16, 16)) for i in range(8)}

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch
            for i in range(8):
                x = jnp.tanh(x @ params[f"w{i}"])
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    plan = autopar.parallelize(step, cluster="8:a100-80g", planner=planner).plan(params, jnp.ones((16, 16)))
    assert plan.planner == name
    assert f"bubble        {100 * plan.bubble:.1f} %" in str(plan)
