"""Pipelines: stages on submeshes of their own take the very step that `jax.jit` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import GPipe, Megatron, Pipeline
from autopar.runtime import build
from autopar.runtime.program import Send
from autopar.runtime.segments import Stage
from benchmarks.loaded_pipeline import live_activations
from benchmarks.trainings import MODELS, QUICK
from passes.errors import PlanningError
from passes.inter_op.schedules import in_flight
from passes.transforms import loop_of, stages
from tests.autopar.runtime.pipeline_steps import OPTIMIZERS, dropped, mlp, predict, squared, step_of, tied, written
from tests.closeness import assert_close
from tests.sample import slow


def assert_equals_jit(name: str, planner: Any, steps: int = 2) -> None:
    with jax.enable_x64(True):
        training = MODELS[name].training("float64", least=True)
        ours = theirs = training.state
        parallel = autopar.parallelize(training.step, planner=planner)
        plain = jax.jit(training.step, compiler_options=QUICK)
        for _ in range(steps):
            got, wanted = parallel(ours, training.batch), plain(theirs, training.batch)
            assert_close(got, wanted)
            ours, theirs = got[0], wanted[0]


QUICK_CASES = [
    ("gpt", Pipeline(stages=3, microbatches=4, submeshes=(4, 2, 2))),
]
SLOW_CASES = [
    ("transformer", Pipeline(stages=4, microbatches=4, schedule="zero-bubble-h1")),
    ("gpt", Megatron(data=2, tensor=2, pipeline=2, microbatches=2)),
    ("bert", Pipeline(stages=2, microbatches=2, submeshes=(6, 2), schedule="eager-1f1b")),
    ("gpt", GPipe(2, 8)),
    ("gpt", Pipeline(stages=1, microbatches=2)),
    ("gpt", Pipeline(stages=4, microbatches=8)),
    ("gpt", Pipeline(stages=2, microbatches=1)),
    ("llama", Pipeline(stages=2, microbatches=2)),
    ("llama-scan", Pipeline(stages=2, microbatches=2)),
    ("moe", Pipeline(stages=2, microbatches=4)),
    ("alexnet", Pipeline(stages=2, microbatches=2)),
    ("dlrm", Pipeline(stages=2, microbatches=2)),
    ("transformer", Pipeline(stages=3, microbatches=2, submeshes=(4, 2, 2))),
]


@pytest.mark.parametrize(("name", "planner"), QUICK_CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_pipeline_equals_jit(name: str, planner: Any):
    assert_equals_jit(name, planner)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "planner"), SLOW_CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_more_pipelines_equal_jit(name: str, planner: Any):
    assert_equals_jit(name, planner)


@pytest.mark.parametrize(
    ("loss", "optimizer"),
    [
        slow(squared, "adamw+clip"),
        (tied, "adamw+clip"),
        slow(dropped, "sgd"),
        slow(squared, "sgd"),
        slow(tied, "sgd"),
        slow(dropped, "adamw+clip"),
    ],
)
def test_losses_and_optimizers(loss: Callable[..., jax.Array], optimizer: str):
    with jax.enable_x64(True):
        params, batch = mlp()
        step = step_of(loss, OPTIMIZERS[optimizer])
        planner = Pipeline(stages=2, microbatches=4)
        parallel = autopar.parallelize(step, planner=planner, devices=jax.devices()[:4])
        ours = theirs = (params, OPTIMIZERS[optimizer].init(params))
        for _ in range(3):
            (ours, told), (theirs, wanted) = parallel(ours, batch), jax.jit(step)(theirs, batch)
            assert_close((ours, told), (theirs, wanted))


@pytest.mark.parametrize("schedule", [slow("1f1b"), "zero-bubble-h1", slow("gpipe"), slow("eager-1f1b")])
def test_schedules(schedule: str):
    with jax.enable_x64(True):
        params, batch = mlp()
        step = step_of(squared, OPTIMIZERS["sgd"])
        planner = Pipeline(stages=4, microbatches=8, schedule=schedule)
        parallel = autopar.parallelize(step, planner=planner, devices=jax.devices()[:4])
        state = (params, OPTIMIZERS["sgd"].init(params))
        assert_close(parallel(state, batch), jax.jit(step)(state, batch))


@pytest.mark.slow
def test_interleaved_stages():
    with jax.enable_x64(True):
        params, batch = mlp()
        step = step_of(tied, OPTIMIZERS["adamw+clip"])
        planner = Pipeline(stages=2, microbatches=4, interleave=2)
        parallel = autopar.parallelize(step, planner=planner, devices=jax.devices()[:4])
        state = (params, OPTIMIZERS["adamw+clip"].init(params))
        plan = parallel.plan(state, batch)
        assert plan.offsets == (0, 2, 0, 2)
        assert plan.schedule.name == "interleaved"
        assert_close(parallel(state, batch), jax.jit(step)(state, batch))


def test_every_segment_is_compiled_for_the_devices_of_its_stage(monkeypatch: pytest.MonkeyPatch):
    """Those that begin sums and join rows, too: options that XLA has for CPUs are none of an accelerator."""

    def step(params: Any, batch: Any) -> Any:
        gradients = jax.grad(squared)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), predict(params, batch["x"])

    params, batch = mlp()
    parallel = autopar.parallelize(step, planner=Pipeline(stages=2, microbatches=4), devices=jax.devices()[:2])
    plan, traced = parallel.plan(params, batch), parallel.trace(params, batch)
    monkeypatch.setattr(Stage, "platform", "gpu")
    program = build(traced, plan, stages.cut(traced.graph, plan.firsts, traced.state_pairs), jax.devices()[:2])
    assert {"zero", "rows"} <= {segment.name.split()[0] for segment in program.segments}
    assert {segment.platform for segment in program.segments} == {"gpu"}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
def test_as_many_microbatches_are_kept_as_the_schedule_says(schedule: str):
    """On every stage; two layers each, so that the first has something to keep too."""
    plan, _, program = written(Pipeline(stages=4, microbatches=8, schedule=schedule), layers=8)
    assert live_activations(program, 4) == in_flight(plan.schedule)


def test_of_weights_only_a_tied_one_and_its_gradient_cross():
    _, cut, program = written(Pipeline(stages=2, microbatches=4), tied)
    streams = {v for part in cut.parts for v in part.boundary_values}
    first, last = (
        {n: part.graph.types[v] for v, n in zip(part.graph.inputs, part.graph.input_names, strict=True)}
        for part in cut.parts
    )
    assert {n for n in first if n.startswith("state[0]")} & set(last) == {"state[0][0]"}
    gradients = [n for n, t in (*first.items(), *last.items()) if n.startswith("value") and t.shape == (8, 8)]
    assert len(gradients) == 1
    sends = [i for i in program.instructions if isinstance(i, Send)]
    assert len(streams) == 2
    assert len(sends) <= 2 * 4 + 2 + 8  # the rest are scalars: the step counter, parts of the norm


def test_layers_by_name():
    training = MODELS["bert"].training("float32", least=True)
    planner = Pipeline(stages=2, microbatches=2, layers="Block_*")
    parallel = autopar.parallelize(training.step, planner=planner, devices=jax.devices()[:2])
    plan = parallel.plan(training.state, training.batch)
    graph = parallel.trace(training.state, training.batch).graph
    index = loop_of(graph)
    assert index is not None
    nodes = graph.nodes[index].subgraphs[0].nodes
    here, before = (nodes[plan.firsts[1] - back].scope.split("/")[1] for back in (0, 1))
    assert here != before
    assert "Block" in here + before
    with pytest.raises(PlanningError, match="may fit no module"):
        autopar.parallelize(
            training.step, planner=Pipeline(stages=2, microbatches=2, layers="Bloc"), devices=jax.devices()[:2]
        ).plan(training.state, training.batch)


def test_state_may_be_read_in_another_stage_than_makes_it_anew():
    """As the memory of a Transformer-XL, which the first layers read and the last ones leave."""

    def step(state: Any, x: jax.Array) -> Any:
        params, memory = state

        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            hidden = jnp.tanh(jnp.concatenate([memory, x], 1) @ params["up"])
            return jnp.mean((hidden @ params["down"]) ** 2), hidden[:, -memory.shape[1] :]

        (value, memory), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), memory), value

    with jax.enable_x64(True):
        draw = np.random.default_rng(0).normal
        ours = theirs = {"up": draw(size=(8, 8)), "down": draw(size=(8, 8))}, np.zeros((16, 3, 8))
        parallel = autopar.parallelize(step, planner=GPipe(2, 2), donate_argnums=0)
        for _ in range(3):
            x = draw(size=(16, 4, 8))
            (ours, value), (theirs, wanted) = parallel(ours, x), jax.jit(step)(theirs, x)
            assert_close((ours, value), (theirs, wanted))


@pytest.mark.parametrize("donate", [(), (0,)], ids=["kept", "donated"])
def test_weights_that_are_not_updated_are_where_they_are_read(donate: tuple[int, ...]):
    """All that a step returns as it came was on the first stage: the whole of a model under low-rank updates."""

    def step(state: Any, batch: Any) -> Any:
        frozen, added = state
        loss = lambda added: squared([w + a @ b for w, (a, b) in zip(frozen, added, strict=True)], batch)  # noqa: E731
        value, gradients = jax.value_and_grad(loss)(added)
        return (frozen, jax.tree.map(lambda w, g: w - 1e-2 * g, added, gradients)), value

    with jax.enable_x64(True):
        frozen, batch = mlp(layers=8)
        state = frozen, [(jnp.full((8, 1), 0.1), jnp.full((1, 8), 0.1)) for _ in frozen]
        planner = Pipeline(stages=4, microbatches=4)
        parallel = autopar.parallelize(step, planner=planner, devices=jax.devices()[:4], donate_argnums=donate)
        plan, traced = parallel.plan(state, batch), parallel.trace(state, batch)
        wanted = jax.jit(step)(state, batch)
        assert_close(parallel(jax.tree.map(jnp.copy, state), batch), wanted)
    parts = stages.cut(traced.graph, plan.firsts, traced.state_pairs).parts
    weights = [[n for n in part.graph.input_names if n.startswith("state[0]")] for part in parts]
    assert list(map(len, weights)) == [2, 2, 2, 2]
    assert sorted(n for names in weights for n in names) == sorted(f"state[0][{i}]" for i in range(8))
