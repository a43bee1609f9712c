"""Plans that the search finds for clusters that are not here: the textbook's where it is best, never a dearer one."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from models import gpt
from passes.pipeline.draft_space import DraftSpace
from passes.pipeline.drafting import Drafting
from passes.solver import SolverOptions
from tests.sample import slow

SMALL = gpt.Config(vocab_size=256, sequence_length=128, hidden=128, layers=2, heads=8, dtype="bfloat16")
WIDE = gpt.Config(vocab_size=51200, sequence_length=1024, hidden=8192, layers=1, heads=64, dtype="bfloat16")


@functools.cache
def plan(config, batch_size, planner, cluster="1x8:a100-80g", dropout=False):
    """A plan of one AdamW step from shapes alone."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(state, batch, key):
        params, moments = state
        loss, grads = jax.value_and_grad(lambda p: gpt.loss(config, p, batch, key if dropout else None))(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(functools.partial(gpt.init, config), key)
    state = (params, jax.eval_shape(optimizer.init, params))
    tokens = jax.ShapeDtypeStruct((batch_size, config.sequence_length), jnp.int32)
    step = autopar.parallelize(step, planner=planner, cluster=cluster, donate_argnums=0)
    return step.plan(state, {"inputs": tokens, "targets": tokens}, key)


def specs(plan, part):
    return {n: s for n, s in zip(plan.input_names, plan.inputs, strict=True) if part in n}


def total(plan, kind):
    return sum(c.count for c in plan.collectives if c.kind == kind)


def parameters(config):
    return len(jax.tree.leaves(jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0))))


def test_small_parameters_and_a_large_batch_give_data_parallelism():
    planned = plan(SMALL, 64, autopar.Auto(max_axes=1))
    batch = specs(planned, "batch")
    assert len(batch) == 2
    assert all(spec.dims[0] == ("x",) for spec in batch.values())
    kernels = specs(planned, "state[0]")
    assert kernels
    assert all(s.is_replicated for s in kernels.values()), kernels
    assert {c.kind for c in planned.collectives} == {"all_reduce"}


def test_wide_layers_and_a_small_batch_give_tensor_parallelism():
    """Column then row split: the input side of a block's second matrix is cut where the output side of its first is."""
    planned = plan(WIDE, 4, autopar.Auto(max_axes=1))
    kernels = {n: s for n, s in specs(planned, "state[0]").items() if "kernel" in n}
    by_name = {n.split("Block_0")[1]: s for n, s in kernels.items()}
    first, second = (next(s for n, s in by_name.items() if key in n) for key in ("mlp']['up", "mlp']['down"))
    assert first.dims == ((), ("x",))
    assert second.dims == (("x",), ())
    qkv, out = (next(s for n, s in by_name.items() if key in n) for key in ("qkv", "attention']['out"))
    assert qkv.dims == ((), (), ("x",), ())
    assert out.dims == (("x",), (), ())


@pytest.mark.parametrize(("config", "batch_size"), [(SMALL, 64), slow(WIDE, 8)], ids=["small", "wide"])
@pytest.mark.slow
def test_the_search_is_never_dearer_than_a_textbook_plan(config, batch_size):
    best = plan(config, batch_size, autopar.Auto(max_axes=1))
    for planner in (autopar.DataParallel(), autopar.Zero(3), autopar.Zero(1), autopar.Megatron(data=1, tensor=8)):
        other = plan(config, batch_size, planner)
        assert best.solution.objective <= other.solution.objective * (1 + 1e-6), planner


@pytest.mark.slow
def test_two_axes_are_never_dearer_than_one():
    best = plan(SMALL, 64, autopar.Auto())
    for planner in (autopar.Auto(max_axes=1), autopar.Megatron(data=2, tensor=4)):
        other = plan(SMALL, 64, planner)
        assert best.solution.objective <= other.solution.objective * (1 + 1e-6), planner


@pytest.mark.parametrize("dropout", [False, slow(True)])
def test_data_parallelism_reduces_every_gradient_once_and_the_loss(dropout):
    planned = plan(SMALL, 64, autopar.DataParallel(), dropout=dropout)
    assert {c.kind for c in planned.collectives} == {"all_reduce"}
    assert total(planned, "all_reduce") == parameters(SMALL) + 1


@pytest.mark.slow
def test_zero_cuts_state_and_leaves_the_batch_cut():
    one, three = plan(SMALL, 64, autopar.Zero(1)), plan(SMALL, 64, autopar.Zero(3))
    for found in (one, three):
        moments = [s for n, s in specs(found, "state[1]").items() if ".mu" in n or ".nu" in n]
        assert len(moments) == 2 * parameters(SMALL)
        assert all(any(s.dims) for s in moments)
        assert all(s.dims[0] == ("data",) for s in specs(found, "batch").values())
    assert not any(any(s.dims) for s in specs(one, "state[0]").values())
    assert all(any(s.dims) for s in specs(three, "state[0]").values())
    assert three.nbytes["parameters"] < 0.3 * one.nbytes["parameters"]
    there = {"cluster": "8:tpu-v5e"}  # a GPU's compiler gathers this little model's weights all at once
    assert plan(SMALL, 64, autopar.Zero(3), **there).peak_nbytes < plan(SMALL, 64, autopar.Zero(1), **there).peak_nbytes


def test_the_predicted_step_is_what_the_program_minimised():
    for planner in (autopar.DataParallel(), autopar.Zero(3), autopar.Auto(max_axes=1)):
        planned = plan(SMALL, 64, planner)
        assert planned.step_seconds == pytest.approx(planned.solution.objective, rel=0.02)


@pytest.mark.parametrize("tensor", [4, 8])
def test_a_sum_before_a_barrier_is_priced_once(tensor: int):
    """Recomputation reads the sum that the forward pass had, so the program must not pay for another."""

    def block(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ weights[0]) @ weights[1]

    def loss(layers: Any, x: jax.Array) -> jax.Array:
        for weights in layers:
            x = jax.checkpoint(block)(weights, x)
        return jnp.mean(x**2)

    def step(layers: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, layers, jax.grad(loss)(layers, x))

    inner, outer, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((512, 2048), (2048, 512), (64, 512)))
    hand_made, auto = (
        autopar.parallelize(step, cluster="8:a100-80g", planner=planner, donate_argnums=0).plan([(inner, outer)] * 3, x)
        for planner in (autopar.Megatron(data=8 // tensor, tensor=tensor), autopar.Auto())
    )
    assert hand_made.solution.objective == pytest.approx(hand_made.step_seconds, rel=1e-9)
    assert auto.step_seconds <= hand_made.step_seconds


@pytest.mark.parametrize(("config", "batch_size"), [slow(SMALL, 64), slow(WIDE, 8)], ids=["small", "wide"])
def test_tying_equal_layers_costs_nothing_here(config, batch_size):
    tied, apart = (
        plan(config, batch_size, autopar.Auto(max_axes=1, solver=SolverOptions(tie_radius=radius)))
        for radius in (2, None)
    )
    assert tied.solution.objective == pytest.approx(apart.solution.objective, rel=1e-4)


def test_state_comes_back_where_it_was():
    for planner in (autopar.Auto(max_axes=1), autopar.Zero(3)):
        planned = plan(SMALL, 64, planner)
        inputs = [s for n, s in zip(planned.input_names, planned.inputs, strict=True) if n.startswith("state")]
        assert planned.outputs[: len(inputs)] == tuple(inputs)


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (autopar.DataParallel(), "do not divide its leading"),
        (autopar.Megatron(data=3, tensor=2), "has 8"),
    ],
)
def test_a_step_that_cannot_be_planned_says_what_to_change(planner, message):
    with pytest.raises(autopar.PlanningError, match=message):
        plan(SMALL, 12, planner)


@pytest.mark.parametrize("is_large", [slow(True), slow(False)])
def test_hand_made_pipelines_near_the_best_bound_the_partition_of_a_large_step(monkeypatch, is_large):
    """GPT-1T was cut below 296 s, which 12 stages take, where 128 take 96 in more microbatches."""
    calls, best = [], []
    hand_made, partition = Drafting._draft_hand_made, Drafting._partition

    def record_hand_made(self, search, *bases):
        calls.append(bases)
        hand_made(self, search, *bases)
        best.append(self._best_count(search))

    def record_partition(self, search, context):
        calls.append(("partition",))
        return partition(self, search, context)

    monkeypatch.setattr(DraftSpace, "is_large", property(lambda _: is_large))
    monkeypatch.setattr(Drafting, "_draft_hand_made", record_hand_made)
    monkeypatch.setattr(Drafting, "_partition", record_partition)
    config = replace(SMALL, layers=4)
    plan.__wrapped__(config, 256, autopar.Auto(pipeline=True, layers=4), "2x1:v100-16g")
    before = calls[: next(i for i, call in enumerate(calls) if call[0] == "partition")]
    assert before[1:] == ([(best[0],)] if is_large else [])
