"""What is planned is what is compiled: every placement change sends the planned tensors and changes no value."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.lower import build
from autopar.oracle import constrain
from autopar.trace import trace
from benchmarks.placements import by_collectives, changes, compiled, mesh_of, planned, sent, stacked_shape
from passes.devices import parse_cluster
from passes.ir import TensorType
from passes.moves import Move
from passes.planner import Auto, Megatron, Planner, Zero
from passes.sharding import ShardingSpec

TYPE = TensorType(shape=(8, 16, 24), dtype="float32")
MESH = mesh_of((2, 4))
BATCHES = 6
"""Programs that the changes are shared out to: one each would take minutes to compile."""

WHOLE = changes(MESH, TYPE)
SUMS = changes(MESH, TYPE, partial=True)
MAXIMA = changes(MESH, TYPE, "max", partial=True)


def test_a_rank_3_array_has_342_changes() -> None:
    assert len(WHOLE) == 342
    assert {step.kind for move in WHOLE for step in move.steps} == {"slice", "all_gather", "all_to_all"}
    reducing = {"slice", "keep", "all_gather", "all_to_all", "all_reduce", "reduce_scatter"}
    assert {step.kind for move in SUMS for step in move.steps} == reducing


@pytest.mark.parametrize("batch", range(BATCHES))
def test_whole_arrays(batch: int) -> None:
    check(WHOLE[batch::BATCHES])


@pytest.mark.parametrize("batch", range(2))
def test_sums(batch: int) -> None:
    check(SUMS[batch :: 2 * BATCHES])


def test_maxima() -> None:
    check(MAXIMA[:: 2 * BATCHES])


def check(moves: tuple[Move, ...]) -> None:
    """Compiles changes into one program, compares what it sends with the plan, runs it and compares values."""
    program = compiled(by_collectives, moves, MESH, TYPE)
    for move, found in zip(moves, sent(program, moves, MESH), strict=True):
        assert found == planned(move, MESH, TYPE), f"{move.before} -> {move.after} by {', '.join(map(str, move.steps))}"
    whole = np.random.default_rng(0).integers(-99, 99, TYPE.shape).astype(TYPE.dtype)
    for move, result in zip(moves, program(*(summands(whole, move.before) for move in moves)), strict=True):
        found = reduced(np.asarray(result), move.after)
        np.testing.assert_array_equal(found, whole, err_msg=f"{move.before} -> {move.after}")


def summands(whole: np.ndarray, spec: ShardingSpec) -> np.ndarray:
    """The array, or what each device along the partial axes of `spec` has of it, stacked in front."""
    if not spec.partial:
        return whole
    others = np.random.default_rng(1).integers(-9, 9, stacked_shape(spec, MESH, TYPE)).astype(whole.dtype)
    others[0] += whole - (others.sum(0) if spec.reduction == "add" else others[0])
    return others if spec.reduction == "add" else np.minimum(others, whole)


def reduced(stacked: np.ndarray, spec: ShardingSpec) -> np.ndarray:
    if not spec.partial:
        return stacked
    return stacked.sum(0) if spec.reduction == "add" else stacked.max(0)


def train_step(
    state: dict[str, jax.Array], tokens: jax.Array, key: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Embedding, a layer with dropout, softmax: lookups, random bits, sums and maxima."""

    def loss(state: dict[str, jax.Array]) -> jax.Array:
        x = state["embed"][tokens]
        hidden = jnp.tanh(x @ state["up"])
        hidden = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden, 0.0)
        scores = jax.nn.log_softmax((x + hidden @ state["down"]) @ state["embed"].T)
        return -jnp.mean(jnp.take_along_axis(scores, tokens[..., None], -1))

    value, gradient = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda x, g: x - 0.1 * g, state, gradient), value


@pytest.mark.parametrize("planner", [Auto(), Zero(3), Megatron(data=2, tensor=4)], ids=lambda p: type(p).__name__)
def test_both_lowerings_agree_with_jit(planner: Planner) -> None:
    rng = np.random.default_rng(0)
    shapes = {"embed": (64, 16), "up": (16, 64), "down": (64, 16)}
    state = {name: rng.normal(size=shape, scale=0.3).astype(np.float32) for name, shape in shapes.items()}
    args = (state, rng.integers(0, 64, (16, 8)), jax.random.key(0))
    wanted = jax.tree.leaves(jax.jit(train_step)(*args))
    traced = trace(train_step, args, {})
    plan = planner.plan(traced.graph, parse_cluster("8:a100-80g"), tied=traced.tied, donated=traced.donated)
    assert plan.mesh.size == 8
    for lowering in (build, constrain):
        program = lowering(traced, plan, jax.devices())
        jitted = jax.jit(program.function, in_shardings=program.in_shardings, out_shardings=program.out_shardings)
        for found, want in zip(jitted(*jax.tree.leaves(args)), wanted, strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6, err_msg=lowering.__name__)
