"""Recomputation: the step is the same, computes again, and needs less memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Plan
from autopar.checks.hlo_flops import product_flops
from benchmarks.trainings import MODELS, QUICK
from benchmarks.trainings import training as trained
from passes.errors import PlanningError
from passes.ir import Graph, phase
from passes.memory import PERSISTENT
from passes.rules import rule_of
from passes.transforms import KEPT, recompute
from passes.transforms.remat import layers
from passes.transforms.remat_loops import loops
from tests.autopar.rewrite.deep_steps import DEPTH, arguments, train_step
from tests.closeness import assert_close
from tests.sample import each, slow


def products(graph: Graph) -> int:
    """The flops of a graph's matrix products."""
    return sum(int(rule_of(node, graph).flops) for node in graph.nodes if node.primitive == "dot_general")


@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT)
def test_the_step_is_the_same(kept: Any):
    with jax.enable_x64(True):
        given = arguments("float64")
        step = autopar.parallelize(train_step, planner=autopar.Megatron(data=2, tensor=4), remat=kept)
        assert_close(step(*given), jax.jit(train_step)(*given))


MODEL_CASES = [
    (name, kept, planner)
    for name, kept in (
        ("gpt", "inputs"),
        ("llama-scan", "matmuls"),
        ("gpt", "matmuls"),
        ("gpt-scan", "inputs"),
        ("moe", "inputs"),
        ("bert", "matmuls"),
        ("transformer", "inputs"),
        ("wide-resnet", "matmuls"),
        ("llama", "inputs"),
    )
    for planner in (autopar.DataParallel(), autopar.Zero(3))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kept", "planner"), MODEL_CASES, ids=lambda x: x if isinstance(x, str) else type(x).__name__
)
def test_models_take_the_same_step(name: str, kept: Any, planner: Any):
    with jax.enable_x64(True):
        training = MODELS[name].training("float64", least=True)
        step = autopar.parallelize(training.step, planner=planner, devices=jax.devices()[:4], remat=kept)
        compiled = step.lower(training.state, training.batch).compile(QUICK)
        wanted = jax.jit(training.step, compiler_options=QUICK)(training.state, training.batch)
        assert_close(compiled(training.state, training.batch), wanted)


def test_recomputation_works_in_microbatches_and_in_a_saved_plan(tmp_path: Any):
    with jax.enable_x64(True):
        given = arguments("float64")
        step = autopar.parallelize(train_step, planner=autopar.DataParallel()).replan(remat="inputs", microbatches=4)
        plan = step.plan(*given)
        assert (plan.microbatches, set(plan.remat)) == (4, {"inputs"})
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json").remat == plan.remat
        again = autopar.parallelize(train_step, planner=autopar.Manual(tmp_path / "plan.json"))
        assert_close(again(*given), jax.jit(train_step)(*given))


@pytest.mark.usefixtures("as_users_compile")
def test_recomputation_survives_compilation():
    """The compiled program multiplies as often as the graph says, so barriers have kept XLA from merging."""
    given = arguments(depth=2 * DEPTH)
    flops: dict[str, float] = {}
    temporaries: dict[str, int] = {}
    for kept in KEPT:
        step = autopar.parallelize(train_step, planner=autopar.DataParallel(), devices=jax.devices()[:1], remat=kept)
        compiled = step.lower(*given).compile()
        flops[kept] = compiled.cost_analysis()["flops"]
        temporaries[kept] = compiled.memory_analysis().temp_size_in_bytes
        held = compiled.plan.nbytes
        predicted = sum(size for cause, size in held.items() if cause not in (*PERSISTENT, "outputs"))
        assert temporaries[kept] == pytest.approx(predicted, rel=0.05), kept
        planned = products(step.trace(*given).graph)
        # The rest is elementwise; XLA may merge what the last layer computes again, which nothing stands between.
        assert 0.95 * planned <= flops[kept] <= 1.2 * planned, kept
    more = flops["inputs"] / flops["everything"]
    assert 1.1 < more < 1.34, "at most a forward pass more, which is a third of the rest"
    assert temporaries["inputs"] < 0.6 * temporaries["everything"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-scan", "llama-scan"])
def test_loops_stack_less(name: str):
    """A loop over layers stacks what is kept of each, and multiplies as often as its graph says."""
    training = MODELS[name].training(least=True)
    temporaries: list[int] = []
    flops: list[float] = []
    for kept in KEPT:
        planner = autopar.DataParallel()
        step = autopar.parallelize(training.step, planner=planner, devices=jax.devices()[:1], remat=kept)
        lowered = step.lower(training.state, training.batch)
        compiled = lowered.compile()
        assert compiled.plan.remat == (kept,)
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
        flops.append(product_flops(compiled.as_text()))
    work = lowered.verify()
    assert work.compiled_flops == work.planned_flops == flops[2]
    assert "products of one step" in str(work)
    assert temporaries[0] > temporaries[1] > temporaries[2]
    assert flops[0] <= flops[1] < flops[2] < 1.34 * flops[0]


@pytest.mark.parametrize("name", [slow("gpt"), slow("gpt-scan")])
def test_layers_recompute_in_microbatches_and_stages(name: str):
    with jax.enable_x64(True):
        training = MODELS[name].training("float64", least=True)
        given = training.state, training.batch
        wanted = jax.jit(training.step, compiler_options=QUICK)(*given)
        for planner, count in ((autopar.DataParallel(), 2), (autopar.Pipeline(stages=2, microbatches=2), None)):
            devices = jax.devices()[:2]
            step = autopar.parallelize(
                training.step, planner=planner, devices=devices, remat="inputs", microbatches=count
            )
            assert_close(step(*given), wanted)


def test_layers_under_the_users_own_checkpoint_are_left_alone():
    """Where the user's own `jax.checkpoint` keeps inputs alone, there is nothing left to drop."""
    training = MODELS["gpt-scan"].training(least=True)
    graph = autopar.parallelize(training.step).trace(training.state, training.batch).graph
    assert len(loops(graph)) == 1
    model = MODELS["gpt-scan"]
    own = trained(model.module, replace(model.least, remat=True), model.least_batch)
    assert not loops(autopar.parallelize(own.step).trace(own.state, own.batch).graph)


def test_layers_are_the_numbered_modules():
    training = MODELS["gpt"].training()
    graph = autopar.parallelize(training.step).trace(training.state, training.batch).graph
    found = [graph.nodes[index].scope.split("/")[1] for index in layers(graph)]
    assert found[:2] == ["Block_0", "Block_1"]
    assert not found[-1].startswith("Block")


def test_products_with_weights_are_kept_and_attention_is_not():
    training = MODELS["gpt"].training(least=True)
    graph = autopar.parallelize(training.step).trace(training.state, training.batch).graph
    new = recompute(graph, ("matmuls",) * len(layers(graph))).graph
    copies = [node for node in new.nodes if node.is_recomputed]
    assert copies
    assert len(new.nodes) - len(copies) == len(graph.nodes)
    assert all(phase(node) == "backward" for node in copies)
    more = products(new) - products(graph)
    scores = [n for n in graph.nodes if n.primitive == "dot_general" and graph.types[n.outputs[0]].rank == 4]
    forward = [n for n in scores if phase(n) == "forward"]
    assert more <= sum(int(rule_of(n, graph).flops) for n in forward)


def test_a_step_without_a_gradient_has_no_layers():
    graph = autopar.parallelize(lambda x: jnp.tanh(x) @ x).trace(jnp.ones((8, 8))).graph
    assert layers(graph) == ()


def test_a_wrong_number_of_layers_is_said():
    with pytest.raises(PlanningError, match="layers"):
        autopar.parallelize(train_step, remat=("inputs", "inputs")).plan(*arguments())


def test_an_unknown_word_is_said():
    with pytest.raises(PlanningError, match="everything, matmuls, inputs"):
        autopar.parallelize(train_step, remat="dots").plan(*arguments())


def _sharpness_aware(loss: Any, params: Any, batch: Any) -> Any:
    """Two gradients one after another, the second where the first leads to."""
    gradients = jax.grad(loss)(params, batch)
    ahead = jax.tree.map(lambda p, g: p + 0.05 * g, params, gradients)
    value, gradients = jax.value_and_grad(loss)(ahead, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def _through_a_gradient(loss: Any, params: Any, batch: Any) -> Any:
    """A gradient through a step of its own."""

    def after_a_step(params: Any) -> jax.Array:
        gradients = jax.grad(loss)(params, batch)
        return loss(jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients), batch)

    value, gradients = jax.value_and_grad(after_a_step)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


@pytest.mark.parametrize(
    ("step", "kept", "planner"),
    each(
        (_sharpness_aware, _through_a_gradient),
        ("inputs", "matmuls"),
        (autopar.Auto(), autopar.DataParallel()),
    ),
)
def test_steps_of_several_passes_recompute_each_where_it_is_read(step: Any, kept: Any, planner: Any):
    def loss(params: Any, batch: jax.Array) -> jax.Array:
        for weights in params:
            batch = jnp.tanh(batch @ weights)
        return jnp.sum(batch**2)

    draw = np.random.default_rng(0).normal
    params, batch = (
        [jnp.asarray(0.3 * draw(size=(16, 16)), "float32") for _ in range(4)],
        jnp.asarray(draw(size=(32, 16))),
    )
    train_step = partial(step, loss)
    got, expected = autopar.parallelize(train_step, remat=kept, planner=planner), jax.jit(train_step)
    for ours, jits in zip(*(jax.tree.leaves(run(params, batch)) for run in (got, expected)), strict=True):
        np.testing.assert_allclose(ours, jits, rtol=1e-5, atol=1e-5)
