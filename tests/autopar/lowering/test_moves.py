"""Changes of placement: each compiles to the collectives that were planned, and changes no value."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.frontend import Traced, trace
from autopar.lowering import build
from autopar.lowering.lower import Program
from benchmarks.partitioner import constrain
from benchmarks.placements import by_collectives, changes, compiled, mesh_of, planned, sent, stacked_shape
from passes.ir import TensorType
from passes.placement import Placement, Resharding, is_free
from passes.plan import Operator, Plan, Solution
from passes.planners import Auto, Megatron, Planner, PlanOptions, Zero
from passes.rules import rule_of
from passes.sharding import Resharder, ShardingSpec, replicated
from passes.step import Step
from tests.sample import slow, some

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


@pytest.mark.parametrize("batch", some(range(BATCHES), 1))
def test_whole_arrays(batch: int) -> None:
    assert_moved(WHOLE[batch::BATCHES])


@pytest.mark.parametrize("batch", some(range(2), 1))
def test_sums(batch: int) -> None:
    assert_moved(SUMS[batch :: 2 * BATCHES])


def test_maxima() -> None:
    assert_moved(MAXIMA[:: 2 * BATCHES])


def assert_moved(moves: tuple[Resharding, ...]) -> None:
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


def arguments() -> tuple[dict[str, np.ndarray], np.ndarray, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"embed": (64, 16), "up": (16, 64), "down": (64, 16)}
    state = {name: rng.normal(size=shape, scale=0.3).astype(np.float32) for name, shape in shapes.items()}
    return state, rng.integers(0, 64, (16, 8)), jax.random.key(0)


@pytest.mark.parametrize(
    "planner", [slow(Auto()), Zero(3), slow(Megatron(data=2, tensor=4))], ids=lambda p: type(p).__name__
)
def test_both_lowerings_agree_with_jit(planner: Planner) -> None:
    traced = trace(train_step, arguments(), {})
    step = Step(graph=traced.graph, state_pairs=traced.state_pairs, donated=traced.donated)
    plan: Any = planner.plan(step, MESH.cluster, PlanOptions()).plan
    assert plan.mesh.size == 8
    for lowering in (build, constrain):
        assert_steps_as_jit(lowering(traced, plan, jax.devices()))


@pytest.mark.parametrize("seed", some(range(2), 1))
def test_any_legal_placements_agree_with_jit(seed: int) -> None:
    """Operators placed at random: nobody would plan so, and every kind of move is made."""
    traced = trace(train_step, arguments(), {})
    assert_steps_as_jit(build(traced, scattered(traced, seed), jax.devices()))


def scattered(traced: Traced, seed: int) -> Plan:
    """A plan that places every operator by a random assignment of its rule that its operands can be brought to."""
    graph, resharder, rng = traced.graph, Resharder(MESH), np.random.default_rng(seed)

    def cut(value: int) -> ShardingSpec:
        type = graph.types[value]
        specs = [s for s in resharder.placements(type.rank) if not s.partial and divides(s, type)]
        return specs[rng.integers(len(specs))] if not type.dtype.startswith("key") else replicated(type.rank)

    def divides(spec: ShardingSpec, type: TensorType) -> bool:
        return math.isfinite(resharder.cost(type, replicated(type.rank), spec))

    inputs, outputs = tuple(map(cut, graph.inputs)), tuple(map(cut, graph.outputs))
    home = dict(zip(graph.inputs, inputs, strict=True))
    home |= {value: replicated(graph.types[value].rank) for value in graph.constants}
    operators: list[Operator] = []
    for index, node in enumerate(graph.nodes):
        rule = rule_of(node, graph)
        legal = [Placement.of(rule, assignment) for assignment in rule.assignments(MESH)]
        reachable = [
            placement
            for placement in legal
            if all(
                value not in home or math.isfinite(resharder.cost(graph.types[value], home[value], spec))
                for value, spec in zip(node.inputs, placement.operands, strict=True)
            )
        ]
        placement = reachable[rng.integers(len(reachable))]
        if not is_free(graph, index):
            home.update(zip(node.outputs, placement.results, strict=True))
        operators.append(Operator(primitive=node.primitive, source=node.source, scope=node.scope, placement=placement))
    return Plan(
        fingerprint=graph.fingerprint,
        cluster=MESH.cluster,
        mesh=MESH,
        operators=tuple(operators),
        inputs=inputs,
        outputs=outputs,
        input_names=graph.input_names,
        output_names=graph.output_names,
        collectives=(),
        seconds={},
        nbytes={},
        solution=Solution(planner="random", status="random", objective=0.0, bound=0.0),
    )


def assert_steps_as_jit(program: Program) -> None:
    """Runs a lowered train step and compares it with `jax.jit`."""
    args = arguments()
    jitted = jax.jit(
        program.function,
        in_shardings=program.in_shardings,
        out_shardings=program.out_shardings,
        compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
    )
    wanted = jax.tree.leaves(jax.jit(train_step)(*args))
    for found, want in zip(jitted(*jax.tree.leaves(args)), wanted, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
