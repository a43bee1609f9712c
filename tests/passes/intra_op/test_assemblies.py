"""A small step as a sharding problem, and back: what placements cost, hold and stand for, whoever chose them."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from passes.cluster import Mesh
from passes.errors import PlanningError
from passes.intra_op import assemble
from passes.intra_op.assembly import Subproblem, full_placements, full_target, stacked
from passes.intra_op.axis_choices import axis_choices
from passes.intra_op.batch_reach import a_loop_runs_over, batch_reach
from passes.intra_op.build_problem import remade
from passes.intra_op.computing import compute_seconds
from passes.intra_op.flops import product_flops
from passes.intra_op.memory_budgets import budget, live, resident
from passes.intra_op.memory_limit import is_infeasible, ruled_out
from passes.intra_op.mesh_memory import MeshMemory
from passes.intra_op.mesh_problems import MeshProblems, Solved
from passes.intra_op.offloading import (
    away,
    buffers,
    idle_state,
    offloaded_nbytes,
    restricted_to,
    row_with_host,
    transfer_seconds,
    with_host,
)
from passes.intra_op.peak_node import peak_node
from passes.intra_op.restrictions import data_parallel, zero
from passes.intra_op.roles import roles
from passes.intra_op.strategies import Strategy
from passes.intra_op.strategy_filter import StrategyFilter, restricted
from passes.intra_op.strategy_space import subsets
from passes.ir import Graph, Node, TensorType
from passes.ir.control import PortUse
from passes.memory import peak
from passes.placement import group, resharding_plan
from passes.planners.checks import check_devices
from passes.sharding import Resharder, ShardingSpec, parse_spec, replicated
from passes.solver import SolverOptions, solve
from passes.step import Step
from tests.passes.intra_op.small_step import CLUSTER, FORWARD, GRAPH, GROUPING, MESH, RESHARDER, STATE, M, W, X, whole


def assembled():
    return assemble(GRAPH, MESH, GROUPING, RESHARDER, STATE)


def choices(assembly, count=20):
    """Random answers, each strategy one that can be had."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield tuple(int(rng.choice(np.flatnonzero(np.isfinite(s)))) for s in assembly.problem.seconds)


def test_seconds_of_computing_are_those_of_the_strategies() -> None:
    assembly, met = assembled(), 0
    for choice in choices(assembly):
        if not np.isfinite(assembly.problem.evaluate(choice)):
            continue
        read = compute_seconds(GRAPH, GROUPING, MESH, assembly.layout(choice))
        assert read == pytest.approx(assembly.root.compute_seconds(choice))
        met += 1
    assert met


def test_flops_of_products_are_divided_by_the_parts() -> None:
    flops = 2 * (2 * 8 * 16 * 32)
    assert product_flops(GROUPING, whole().placements, MESH) == flops
    assembly = assembled()
    answer = solve(zero(assembly, 1).problem, SolverOptions())
    assert product_flops(GROUPING, assembly.layout(answer.choice).placements, MESH) == flops / MESH.size


def test_a_budget_rules_out_the_answer_that_it_was_made_for() -> None:
    assembly = assembled()
    for at, choice in itertools.product(range(len(GRAPH.nodes)), choices(assembly, 5)):
        path = ((at, -1),)
        everything = live(assembly, path, np.inf)
        used = assembly.problem.usage(everything, choice)
        row = budget(assembly.problem, everything, choice, 2 * used, used)
        assert assembly.problem.usage(row, choice) > row.limit


@pytest.mark.parametrize("slack", [1.0, 1.5, 8.0])
def test_budgets_rule_an_answer_out_however_much_they_let_through(slack: float) -> None:
    """The row that it fills most has the share asked for, and no row is raised."""
    assembly = assembled()
    for choice in choices(assembly, 20):
        rows = [resident(assembly, np.inf), live(assembly, ((3, -1),), np.inf)]
        used = [assembly.problem.usage(row, choice) for row in rows]
        budgets = (replace(rows[0], limit=slack * used[0]), replace(rows[1], limit=2 * slack * used[1]))
        changed = ruled_out(replace(assembly.problem, budgets=budgets), choice, 0.9).budgets
        assert changed[0].limit == pytest.approx(0.9 * used[0])
        assert all(after.limit <= 0.9 * before.limit for after, before in zip(changed, budgets, strict=True))


def test_live_bytes_at_a_node_are_inputs_and_values_still_read() -> None:
    assembly = assembled()
    plain = zero(assembly, 1).problem
    choice = solve(plain, SolverOptions()).choice
    layout = assembly.layout(choice)
    inputs = sum(s.local_nbytes(GRAPH.types[v], MESH) for v, s in zip(GRAPH.inputs, layout.inputs, strict=True))
    used = [assembly.problem.usage(live(assembly, ((at, -1),), np.inf), choice) for at in range(len(GRAPH.nodes))]
    assert min(used) >= inputs
    offloading = with_host(assembly, (1,))
    row = row_with_host(partial(live, at=((0, -1),), limit=np.inf), offloading)
    spared = offloading.problem.usage(row, offloading.offloading(choice, offloading.idle))
    assert used[0] - spared == layout.inputs[1].local_nbytes(GRAPH.types[M], MESH)
    assert offloading.problem.usage(row, choice) == used[0]


def test_resident_bytes_are_the_inputs_and_at_most_the_peak() -> None:
    assembly = assembled()
    row, offloading = resident(assembly, np.inf), with_host(assembly, (1,))
    row_offloading = row_with_host(partial(resident, limit=np.inf), offloading)
    donated = (True,) * len(GRAPH.inputs)
    for choice in choices(assembly, 20):
        layout = assembly.layout(choice)
        sizes = [s.local_nbytes(GRAPH.types[v], MESH) for v, s in zip(GRAPH.inputs, layout.inputs, strict=True)]
        assert assembly.problem.usage(row, choice) == sum(sizes)
        away = offloading.offloading(choice, offloading.idle)
        assert offloading.problem.usage(row_offloading, choice) == sum(sizes)
        assert offloading.problem.usage(row_offloading, away) == sum(sizes) - sizes[1]
        reshardings = resharding_plan(GRAPH, layout, Resharder(MESH), regather=True)
        memory = peak(GRAPH, GROUPING, MESH, layout, reshardings, (), donated)
        assert sum(sizes) <= memory.peak_nbytes


def test_a_limit_below_the_smallest_strategies_is_infeasible() -> None:
    assembly = assembled()
    row = live(assembly, ((2, -1),), np.inf)
    least = sum(float(sizes.min()) for sizes in row.nbytes.values())
    most = sum(float(sizes.max()) for sizes in row.nbytes.values())
    within = [replace(assembly.problem, budgets=(replace(row, limit=limit),)) for limit in (0.9 * least, most)]
    assert list(map(is_infeasible, within)) == [True, False]


def test_state_that_the_update_alone_reads_is_idle_and_offloading_it_leaves_two_buffers() -> None:
    assert idle_state(GRAPH, STATE) == (M,)
    assert offloaded_nbytes(GRAPH, whole(), (W, M), MESH) == [16 * 32 * 4] * 2
    assert away([5, 3, 4, 2]) == 14 - 2 * 5
    assert away([5, 3]) == away([]) == 0
    assert buffers([5, 3, 4, 2]) == 2 * 5


def test_a_problem_with_the_host_has_every_placement_of_state_twice_at_the_price_of_its_transfers() -> None:
    assembly = assembled()
    offloading = with_host(assembly, (1,))
    (node,) = offloading.idle
    assert offloading.idle[node] == (1,)
    for choice in choices(assembly, 20):
        there = offloading.offloading(choice, [node])
        assert (offloading.offloaded(choice), offloading.offloaded(there)) == ((), (1,))
        assert offloading.placements_of(there) == offloading.placements_of(choice) == choice
        assert offloading.layout(there) == assembly.layout(choice)
        nbytes = offloaded_nbytes(GRAPH, assembly.layout(choice), (1,), MESH)
        seconds = assembly.problem.evaluate(choice)
        assert offloading.problem.evaluate(choice) == seconds
        assert offloading.problem.evaluate(there) == pytest.approx(seconds + transfer_seconds(nbytes, MESH))


def test_a_hand_made_plan_may_offload_what_it_places() -> None:
    hand_made, offloading = zero(assembled(), 1), with_host(assembled(), (1,))
    problem = restricted_to(offloading, hand_made).problem
    choice = solve(hand_made.problem, SolverOptions()).choice
    away = offloading.offloading(choice, offloading.idle)
    assert np.isfinite([problem.evaluate(choice), problem.evaluate(away)]).all()
    (node,) = offloading.idle
    kept = np.isfinite(hand_made.problem.seconds[node])
    assert not kept.all()
    assert np.isfinite(problem.seconds[node]).tolist() == [*kept, *kept]


def test_most_is_live_where_the_gradient_is_made_beside_what_it_is_made_of() -> None:
    layout = whole()
    ((at, body),) = peak_node(GRAPH, GROUPING, MESH, layout, resharding_plan(GRAPH, layout, RESHARDER))
    assert body == -1
    assert at in (2, 3, 4)  # the product is read for the last time at 2; the update's values leave at 3 and 4


def test_of_a_mesh_s_memory_offloading_leaves_buffers_and_only_as_much_is_offloaded_as_the_limit_takes() -> None:
    problems = MeshProblems(step=Step(graph=GRAPH, state_pairs=STATE), offload=True)
    solved = Solved.unsolved(problems.assembled(MESH, regather=False))
    needed = problems.peak(solved, solved.answer.choice).nbytes
    assert problems.lowest_nbytes == needed
    roomy, tight = (MeshMemory(problems=problems, solved=solved, limit=limit) for limit in (needed, needed / 2))
    assert roomy.room(solved.answer.choice) < roomy.limit
    assembly = solved.assembly
    assert not assembly.offloaded(roomy.settled(solved.answer).choice)
    assert assembly.offloaded(tight.settled(solved.answer).choice) == (1,)


def test_roles_of_a_step() -> None:
    step_roles = roles(assembled())
    assert dict(step_roles.batch) == {X: 0}
    assert step_roles.parameters == {W}
    assert step_roles.state == {M}
    alone = Graph(
        types=GRAPH.types[:2], nodes=(Node(primitive="neg", inputs=(0,), outputs=(1,)),), inputs=(0,), outputs=(1,)
    )
    with pytest.raises(PlanningError, match="needs an input that is not returned as state"):
        roles(assemble(alone, MESH, group(alone), RESHARDER, ((0, 0),)))


def test_the_batch_reaches_the_product_and_what_is_summed_over_it() -> None:
    root = assembled().root
    on_batch, aligned, _ = batch_reach(root, {X: 0}, {W}, set(), MESH.size)
    product = GROUPING.operator_group_of(GRAPH.nodes[0])
    assert product is not None
    assert root.first + product in on_batch
    assert on_batch.keys().isdisjoint(aligned)
    assert not a_loop_runs_over(root, {X: 0})


class NothingWhole(StrategyFilter):
    """Inputs cut over the first axis."""

    def keeps_input(self, value: int, spec: ShardingSpec) -> bool:
        return any(MESH.axes[0] in axes for axes in spec.dims)


class Nothing(StrategyFilter):
    """No strategy at all."""

    def keeps(self, subproblem: Subproblem, group: int, strategy: Strategy) -> bool:
        return False


def test_a_node_that_would_lose_all_strategies_keeps_them() -> None:
    assembly = assembled()
    cut = assembly.layout(solve(restricted(assembly, NothingWhole()).problem, SolverOptions()).choice)
    assert all(any(MESH.axes[0] in axes for axes in spec.dims) for spec in cut.inputs)
    same = restricted(assembly, Nothing()).problem.seconds
    assert all(np.array_equal(a, b) for a, b in zip(same, assembly.problem.seconds, strict=True))


def test_data_parallelism_cuts_the_batch_and_nothing_of_the_state() -> None:
    mesh = Mesh(axes=("x",), sizes=(8,), cluster=CLUSTER)
    assembly = assemble(GRAPH, mesh, GROUPING, Resharder(mesh), STATE)
    layout = assembly.layout(solve(data_parallel(assembly).problem, SolverOptions()).choice)
    assert list(map(str, layout.inputs)) == ["[-, -]", "[-, -]", "[x, -]"]


def test_a_mesh_of_other_than_all_devices_is_refused() -> None:
    check_devices(CLUSTER, data=4, tensor=2)
    with pytest.raises(PlanningError, match="this makes 6 devices, and cluster '8:a100-80g' has 8"):
        check_devices(CLUSTER, data=3, tensor=2)


def test_placements_without_partial_axes_begin_with_none_cut() -> None:
    matrix, odd = (TensorType(shape=shape, dtype="float32") for shape in ((8, 2), (3, 5)))
    placements_found = full_placements(matrix, RESHARDER)
    assert placements_found[0] == replicated(2)
    assert len(set(placements_found)) == len(placements_found)
    assert not any(spec.partial for spec in placements_found)
    assert {str(spec) for spec in full_placements(odd, RESHARDER)} == {"[-, -]"}
    partial = parse_spec("[-, -] add@x")
    best = full_target(matrix, partial, RESHARDER)
    assert RESHARDER.cost(matrix, partial, best) == min(
        RESHARDER.cost(matrix, partial, spec) for spec in placements_found
    )
    assert full_target(matrix, placements_found[-1], RESHARDER) == placements_found[-1]


def test_a_stack_is_not_cut_where_its_slices_are_stacked() -> None:
    spec = parse_spec("[x, -]")
    assert str(stacked(spec, PortUse(port=0, stacked=True))) == "[-, x, -]"
    assert stacked(spec, PortUse(port=0)) == spec


def test_choices_give_each_axis_a_class_or_none() -> None:
    found = axis_choices((0, 1), ("x", "y"))
    assert len(set(found)) == len(found)
    assert {frozenset(pick) for pick in found} == {
        frozenset((axis, c) for axis, c in zip("xy", classes, strict=True) if c is not None)
        for classes in itertools.product((None, 0, 1), repeat=2)
    }
    assert {(("x", 0), ("y", 0)), (("y", 0), ("x", 0))} <= set(found)  # axes of one class in either order


def test_sets_of_axes_are_in_the_order_of_their_numbers() -> None:
    assert subsets(("x", "y")) == ((), ("x",), ("y",), ("x", "y"))


def masked() -> Graph:
    """Scores of a batch [8,4,4] beside a mask [4,4] that is broadcast over it, for a loop: by a barrier, say."""
    types = tuple(
        TensorType(shape=shape, dtype="float32") for shape in ((8, 4, 4), (4, 4), (8, 4, 4), (8, 4, 4), (8, 4, 4), ())
    )
    over = {"shape": (8, 4, 4), "broadcast_dimensions": (1, 2)}
    nodes = (
        Node(primitive="broadcast_in_dim", inputs=(1,), outputs=(2,), params=over, scope=FORWARD),
        Node(primitive="optimization_barrier", inputs=(2,), outputs=(3,), scope=FORWARD),
        Node(primitive="add", inputs=(0, 3), outputs=(4,), scope=FORWARD),
        Node(primitive="reduce_sum", inputs=(4,), outputs=(5,), params={"axes": (0, 1, 2)}, scope=FORWARD),
    )
    return Graph(types=types, nodes=nodes, inputs=(0, 1), outputs=(5, 1))


def test_data_parallelism_cuts_what_is_broadcast_over_the_batch():
    graph, mesh = masked(), Mesh(axes=("x",), sizes=(8,), cluster=CLUSTER)
    assembly = data_parallel(assemble(graph, mesh, group(graph), Resharder(mesh), ((1, 1),)))
    layout = assembly.layout(solve(assembly.problem, SolverOptions()).choice)
    assert layout.placements[0].results[0] == parse_spec("[x, -, -]")


def test_a_broadcast_that_its_readers_fuse_passes_no_memory():
    graph = masked()
    fused = replace(graph, nodes=(graph.nodes[0], replace(graph.nodes[2], inputs=(0, 2)), graph.nodes[3]))
    assert remade(graph, group(graph)) == frozenset()
    assert remade(fused, group(fused)) == {2}
