"""Plans of pipelines: weights of two stages, microbatches, differences, clusters of several kinds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Megatron, Pipeline
from autopar.tools.cli import main
from benchmarks.trainings import MODELS, Training
from passes.cluster import parse_cluster
from passes.errors import PlanningError
from passes.layers import blocks
from passes.pipeline import body_of
from passes.plan.pipeline_diff import PipelineDiff
from passes.transforms import loop_of, stages
from tests.autopar.runtime.pipeline_steps import KEY, OPTIMIZERS, mlp, residual, squared, step_of, tied, written
from tests.closeness import assert_close
from tests.sample import half, some


@pytest.mark.parametrize(("vocabulary", "tensor"), half([96, 97], [1, 2]))
def test_a_weight_that_two_stages_read_is_a_parameter_of_both(vocabulary: int, tensor: int):
    step, args = residual(vocabulary)
    planner = Megatron(data=2, tensor=tensor, pipeline=2, microbatches=4)
    plan = autopar.parallelize(step, planner=planner, cluster=f"1x{4 * tensor}:v100-16g").plan(*args)
    assert isinstance(plan, autopar.PipelinePlan)
    for stage in plan.stages:
        specs = dict(zip(stage.input_names, stage.layout.inputs, strict=True))
        embedding = specs["params['embedding']"]
        assert not any("data" in axes for axes in embedding.dims)
        assert any("tensor" in axes for axes in embedding.dims) == (tensor == 2)
        over_data = [c for c in stage.collectives if c.axes == ("data",)]
        assert over_data  # gradients, each once a step: none is reduced in every microbatch
        assert sum(c.count for c in over_data) <= len(specs) + 1  # of the loss, too


def test_a_device_says_what_its_host_takes_to_start_a_task():
    """The first stage starts its forwards one after the other: each is late by the host's seconds."""
    step, args = residual()
    plan = autopar.parallelize(step, planner=Pipeline(stages=2, microbatches=4), cluster="1x2:v100-16g").plan(*args)
    assert isinstance(plan, autopar.PipelinePlan)
    (group,) = plan.cluster.groups
    slow = replace(group.device, dispatch_seconds=group.device.dispatch_seconds + 1.0)
    late = replace(plan, cluster=replace(plan.cluster, groups=(replace(group, device=slow),)))
    for before, after in zip(plan.timeline.busy_seconds, late.timeline.busy_seconds, strict=True):
        assert after == pytest.approx(before + 2 * 4)  # a forward and a backward of each microbatch
    assert late.step_seconds > plan.step_seconds + 8


def test_microbatches_change_nothing_of_how_megatron_cuts_weights():
    """The loop over microbatches hides who reads a weight, and what no reader is known of was left whole."""
    step, args = residual()
    found = []
    for count in (1, 4):
        planner = Megatron(data=2, tensor=2, microbatches=count)
        plan = autopar.parallelize(step, planner=planner, cluster="1x4:v100-16g").plan(*args)
        found.append(dict(zip(plan.input_names, map(str, plan.layout.inputs), strict=True)))
    weights = [name for name in found[0] if name.startswith("params")]
    assert len(weights) == 13  # the embedding and two of each of six blocks
    assert all("tensor" in found[1][name] for name in weights)
    assert all("data" not in found[1][name] for name in weights)


def in_time(weights: Any, batch: jax.Array) -> jax.Array:
    """Layers of which each takes all rows of one time after the other."""
    x = batch.swapaxes(0, 1)
    for weight in weights:
        x = x + jnp.tanh(x @ weight)
    return jnp.mean(x.swapaxes(0, 1) ** 2)


def of_samples(weights: Any, batch: jax.Array) -> jax.Array:
    """Layers of three samples of each row, which no number of devices divides."""
    x = batch + jax.random.normal(jax.random.key(0), (3, *batch.shape))
    for weight in weights:
        x = x + jnp.tanh(x @ weight)
    return jnp.mean(jax.nn.logsumexp(x, 0) ** 2)


@pytest.mark.parametrize(("loss", "zero"), half([in_time, of_samples], [0, 1]))
def test_stages_take_rows_wherever_they_are(loss: Any, zero: int):
    """What came between stages was cut along its first dimension: times were sent around, and samples refused."""

    def step(weights: Any, batch: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    draw = np.random.default_rng(0)
    weights = [jnp.asarray(draw.normal(size=(8, 8)) / 4, jnp.float32) for _ in range(4)]
    batch = jnp.asarray(draw.normal(size=(16, 16, 8)), jnp.float32)
    planner = Megatron(data=4, tensor=1, pipeline=2, microbatches=2, zero=zero)
    parallel = autopar.parallelize(step, planner=planner)
    sent = [c for stage in parallel.plan(weights, batch).stages for c in stage.collectives]
    assert {c.kind for c in sent} <= {"all_reduce", *(["all_gather", "reduce_scatter"] if zero else [])}
    assert sum(c.nbytes * c.count for c in sent) < batch.nbytes / 4  # the weights once or twice, no activation
    assert_close(parallel(weights, batch), jax.jit(step)(weights, batch), tolerance=1e-5)


@pytest.mark.slow
def test_tied_weights_cut_over_tensor_run_as_under_jit():
    with jax.enable_x64(True):
        step, args = residual()
        planner = Megatron(data=2, tensor=2, pipeline=2, microbatches=4)
        assert_close(autopar.parallelize(step, planner=planner)(*args), jax.jit(step)(*args))


@pytest.mark.parametrize("n_stages", [2, 3, 4])
def test_stages_are_cut_between_blocks(n_stages: int):
    step, args = residual()
    parallel = autopar.parallelize(
        step, planner=Pipeline(stages=n_stages, microbatches=2), cluster=f"1x{n_stages}:v100-16g"
    )
    plan, body = parallel.plan(*args), body_of(parallel.trace(*args).graph)
    assert isinstance(plan, autopar.PipelinePlan)
    assert len(blocks(body)) >= 6
    assert set(plan.firsts) <= {0, *blocks(body)}


def test_stages_take_what_they_use_of_the_batch():
    _, cut, _ = written(Pipeline(stages=2, microbatches=4))
    first, last = ({n for n in part.graph.input_names if n.startswith("batch")} for part in cut.parts)
    assert first == {"batch['x']"}
    assert last == {"batch['y']"}


def test_the_whole_step_is_in_the_stages_once():
    params, batch = mlp()
    step = step_of(squared, OPTIMIZERS["sgd"])
    planner = Pipeline(stages=4, microbatches=4)
    parallel = autopar.parallelize(step, planner=planner, devices=jax.devices()[:4])
    arguments = (params, OPTIMIZERS["sgd"].init(params)), batch
    plan, graph = parallel.plan(*arguments), parallel.trace(*arguments).graph
    cut = stages.cut(graph, plan.firsts)
    index = loop_of(graph)
    assert index is not None
    products = [n for n in graph.nodes[index].subgraphs[0].nodes if n.primitive == "dot_general"]
    inside = [n for part in cut.parts for n in part.body.nodes if n.primitive == "dot_general"]
    assert len(inside) == len(products)
    assert [sum(n.primitive == "dot_general" for n in part.body.nodes) for part in cut.parts] == [2, 3, 3, 3]


@pytest.mark.parametrize(
    ("planner", "words"),
    [
        (Pipeline(stages=3, microbatches=2), "cannot be spread evenly"),
        (Pipeline(stages=2, microbatches=2, submeshes=(4, 2)), "has 4"),
        (Pipeline(stages=2, microbatches=3), "must divide the batch, which is 16"),
        (Pipeline(stages=2, microbatches=2, submeshes=(1,)), "one submesh for each stage"),
        (Pipeline(stages=40, microbatches=2, submeshes=(1,) * 40), "has 4"),
    ],
)
def test_a_step_that_cannot_be_a_pipeline_says_why(planner: Pipeline, words: str):
    params, batch = mlp()
    step = step_of(squared, OPTIMIZERS["sgd"])
    state = (params, OPTIMIZERS["sgd"].init(params))
    with pytest.raises(PlanningError, match=words):
        autopar.parallelize(step, planner=planner, cluster="4:a100-80g").plan(state, batch)


def test_devices_that_no_stage_has_are_told_of():
    params, batch = mlp()
    step = step_of(squared, OPTIMIZERS["sgd"])
    state = (params, OPTIMIZERS["sgd"].init(params))
    planner = Pipeline(stages=2, microbatches=2, submeshes=(1, 2))
    with pytest.warns(UserWarning, match=r"1 of 4 devices of cluster .* stand idle"):
        plan = autopar.parallelize(step, planner=planner, cluster="4:a100-80g").plan(state, batch)
    assert [stage.mesh.size for stage in plan.stages] == [1, 2]


def test_more_stages_than_places_to_cut():
    params, batch = mlp(layers=1)
    step = step_of(squared, OPTIMIZERS["sgd"])
    state = (params, OPTIMIZERS["sgd"].init(params))
    planner = Pipeline(stages=64, microbatches=2)
    with pytest.raises(PlanningError, match="too few or too uneven"):
        autopar.parallelize(step, planner=planner, cluster="8x8:a100-80g").plan(state, batch)


def test_a_saved_pipeline_is_a_planner(tmp_path: Any):
    params, batch = mlp()
    step = step_of(squared, OPTIMIZERS["sgd"])
    state = (params, OPTIMIZERS["sgd"].init(params))
    devices = jax.devices()[:4]
    planned = autopar.parallelize(step, planner=Pipeline(stages=2, microbatches=4), devices=devices)
    plan = planned.plan(state, batch)
    plan.save(tmp_path / "plan.json")
    assert autopar.PipelinePlan.load(tmp_path / "plan.json") == plan
    replayed = autopar.parallelize(step, planner=autopar.Manual(tmp_path / "plan.json"), devices=devices)
    assert replayed.plan(state, batch) == plan
    assert_close(replayed(state, batch), jax.jit(step)(state, batch), 1e-5)
    with pytest.raises(PlanningError, match="pipeline"):
        autopar.Plan.load(tmp_path / "plan.json")
    with pytest.raises(PlanningError, match="traces to program"):
        autopar.parallelize(step_of(tied, OPTIMIZERS["sgd"]), planner=autopar.Manual(plan)).plan(state, batch)


def test_a_pipeline_is_told_in_80_columns():
    plan, _, _ = written(Pipeline(stages=4, microbatches=8))
    text = str(plan)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "bubble" in text
    assert "1f1b" in text
    events = plan.timeline.to_trace()
    assert sum(event["ph"] == "X" for event in events) >= 4 * 8 * 2


def test_pipelines_are_compared(tmp_path: Any, capsys: Any):
    plan, _, _ = written(Pipeline(stages=2, microbatches=8))
    assert plan.diff(plan).is_empty
    other, _, _ = written(Pipeline(stages=2, microbatches=8, schedule="gpipe"))
    longer, _, _ = written(Pipeline(stages=4, microbatches=8))
    found = plan.diff(other)
    assert isinstance(found, PipelineDiff)
    assert [(c.name, c.before, c.after) for c in found.words if c.name == "schedule"] == [("schedule", "1f1b", "gpipe")]
    assert all(stage.is_empty for stage in found.stages)
    apart = plan.diff(longer)
    assert isinstance(apart, PipelineDiff)
    assert not apart.stages
    assert ("stages", "2", "4") in [(c.name, c.before, c.after) for c in apart.words]
    assert [(a.before, a.after) for a in apart.seconds] == [(plan.step_seconds, longer.step_seconds)]
    whole = plan.diff(plan.stages[0])
    assert ("stages", "2", "none") in [(c.name, c.before, c.after) for c in whole.words]
    plan.save(tmp_path / "a.json")
    other.save(tmp_path / "b.json")
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json"]) == 1
    assert '"schedule"' in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1
    text = capsys.readouterr().out
    assert "gpipe" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def slow_network(cluster: str, bytes_per_second: float) -> autopar.Cluster:
    """A cluster whose hosts are far apart, and whose stages compute while they send."""
    found = parse_cluster(cluster)
    group = found.group()
    inter = replace(group.inter, bytes_per_second=bytes_per_second, sent=1.0)
    device = replace(group.device, send_seconds=0.0, send_overlap=1.0)
    return replace(found, groups=(replace(group, inter=inter, device=device),))


def wide_mlp() -> tuple[Any, Any]:
    params = [jax.ShapeDtypeStruct((8192, 8192), jnp.float32) for _ in range(4)]
    rows = jax.ShapeDtypeStruct((16384, 8192), jnp.float32)
    return params, {"x": rows, "y": rows}


def test_the_search_finds_stages_where_hosts_are_far_apart():
    params, batch = wide_mlp()
    step = step_of(squared, OPTIMIZERS["sgd"])
    state = (params, jax.eval_shape(OPTIMIZERS["sgd"].init, params))
    planner = autopar.Auto(pipeline=True, layers=2, max_axes=1)
    far, near = (slow_network("2x1:a100-80g", rate) for rate in (1e10, 1e13))
    found = {
        name: autopar.parallelize(step, cluster=cluster, planner=planner).plan(state, batch)
        for name, cluster in (("far", far), ("near", near))
    }
    assert isinstance(found["far"], autopar.PipelinePlan)
    assert [plan.mesh.size for plan in found["far"].stages] == [1, 1]
    assert isinstance(found["near"], autopar.Plan)
    for cluster, plan in ((far, found["far"]), (near, found["near"])):
        for count in (4, 16):
            hand_made = Pipeline(stages=2, microbatches=count)
            other = autopar.parallelize(step, cluster=cluster, planner=hand_made).plan(state, batch)
            assert plan.step_seconds <= other.step_seconds * (1 + 1e-9)
        whole = autopar.parallelize(step, cluster=cluster).plan(state, batch)
        assert plan.step_seconds <= whole.step_seconds * (1 + 1e-9)


def test_a_searched_pipeline_runs_as_under_jit():
    with jax.enable_x64(True):
        params, batch = mlp()
        step = step_of(tied, OPTIMIZERS["sgd"])
        state = (params, OPTIMIZERS["sgd"].init(params))
        planner = autopar.Auto(pipeline=True, layers=2)
        parallel = autopar.parallelize(step, planner=planner, devices=jax.devices()[:2])
        assert_close(parallel(state, batch), jax.jit(step)(state, batch))


class Normed(nn.Module):
    """Dense layers with batch statistics between them."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = nn.Dense(8, use_bias=False, param_dtype=jnp.float64)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, param_dtype=jnp.float64)(x))
        return nn.Dense(4, param_dtype=jnp.float64)(x)


def normed() -> Training:
    """A step of descent, its statistics moved along."""
    rng = np.random.default_rng(0)
    batch = {"x": jnp.asarray(rng.normal(size=(16, 8))), "y": jnp.asarray(rng.normal(size=(16, 4)))}

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            out, changed = Normed().apply({**state, "params": params}, batch["x"], mutable=["batch_stats"])
            return jnp.mean((out - batch["y"]) ** 2), changed["batch_stats"]

        (value, moved), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads), "batch_stats": moved}, value

    return Training(step=step, state=Normed().init(KEY, batch["x"]), batch=batch)


@pytest.mark.parametrize("name", some(["dense", "wide-resnet"], 0))
def test_batch_statistics_in_a_pipeline_are_each_microbatchs_own(name: str):
    with jax.enable_x64(True):
        training = normed() if name == "dense" else MODELS[name].training("float64", least=True)
        independent: dict[str, Any] = {"microbatch_semantics": "independent", "donate_argnums": ()}
        planner = Pipeline(stages=2, microbatches=2)
        piped = autopar.parallelize(training.step, planner=planner, devices=jax.devices()[:2], **independent)
        alone = autopar.parallelize(training.step, microbatches=2, devices=jax.devices()[:1], **independent)
        assert_close(piped(training.state, training.batch), alone(training.state, training.batch))
        with pytest.raises(PlanningError, match="BatchNorm"):
            autopar.parallelize(training.step, planner=planner, devices=jax.devices()[:2]).plan(
                training.state, training.batch
            )
