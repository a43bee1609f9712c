"""Shortcuts of planning, each turned off: the plan is the same, or as good.

Tying, leaving out what is dominated, arrays in place of a model; and in the search over stages: prices shared between
blocks that are alike, meshes and stages given up early, plans of equal stages shared.
"""

import functools
import math
import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar.rewrite import microbatched
from models import gpt
from passes import inter_op
from passes.cluster import Mesh, parse_cluster
from passes.intra_op import MeshProblems, assemble, cheapest_plan, layouts
from passes.layers import in_blocks
from passes.pipeline import Sample, block_solver, body_of
from passes.pipeline.assemble import layout_cost, restated
from passes.pipeline.block_costs import BlockCosts
from passes.pipeline.block_solver import ROUGH, BlockSolver
from passes.pipeline.blocks import Block
from passes.pipeline.prefetch import price_layers
from passes.pipeline.stage_table import StageCostTable
from passes.pipeline.step_blocks import StepBlocks
from passes.placement import group
from passes.sharding import Resharder
from passes.solver import SolverOptions, solve
from passes.solver.symmetry import merge_equal_nodes
from passes.step import Step
from passes.transforms import stages
from tests.autopar.rewrite.traced_steps import traced_step
from tests.sample import slow

MESH = Mesh(axes=("x", "y"), sizes=(2, 4), cluster=parse_cluster("2x4:a100-80g"))
EXACT = SolverOptions(gap=1e-10)


def mlp():
    """Three equal layers, then one that is not."""
    sizes = [(256, 256)] * 3 + [(256, 64)]
    params = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]

    def loss(params, batch):
        x, y = batch
        for weight in params:
            x = jnp.tanh(x @ weight)
        return jnp.mean((x - y) ** 2)

    shapes = tuple(jax.ShapeDtypeStruct((512, width), jnp.float32) for width in (256, 64))
    return traced_step(loss, params, shapes, optax.adamw(1e-3))


@functools.cache
def small_gpt(layers=1):
    config = replace(gpt.Config.tiny(), layers=layers)
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    batch = jax.eval_shape(lambda: gpt.example_batch(config, 16, jax.random.key(0)))
    return traced_step(lambda params, batch: gpt.loss(config, params, batch), params, batch, optax.adamw(1e-3))


def assembled(traced):
    resharder = Resharder(MESH)
    grouping = group(traced.graph)
    return assemble(traced.graph, MESH, grouping, resharder, traced.state_pairs, regather=False), resharder


@pytest.fixture(scope="module", params=[mlp, small_gpt])
def assembly(request):
    return assembled(request.param())


def test_tying_and_reducing_cost_nothing(assembly):
    whole, _ = assembly
    apart = solve(whole.problem, replace(EXACT, tie_radius=None))
    assert solve(whole.problem, EXACT).objective == pytest.approx(apart.objective, rel=1e-9)
    assert len(merge_equal_nodes(whole.problem, 2).problem.seconds) <= len(whole.problem.seconds)


@pytest.mark.parametrize("step", [mlp, slow(small_gpt)])
def test_a_model_in_pulp_and_our_search_agree(step):
    whole, _ = assembled(step())
    ours, theirs = solve(whole.problem, EXACT), solve(whole.problem, replace(EXACT, solver="cbc"))
    assert ours.objective == pytest.approx(theirs.objective, rel=1e-9)


def test_equal_layers_share_their_tables_and_placements():
    whole, _ = assembled(small_gpt(layers=3))
    tables = {id(table) for table in whole.root.tables}
    assert len(tables) < len(whole.root.tables) / 2
    matrices = {id(edge.seconds) for edge in whole.problem.edges}
    assert len(matrices) < len(whole.problem.edges) / 2


def test_classes_are_kept_as_their_representatives():
    kept = [
        (operator_group, classes)
        for operator_group in group(small_gpt().graph).operator_groups
        for classes in (*operator_group.factor_classes.values(), *operator_group.value_classes.values())
    ]
    assert any(len(set(classes)) > 1 for _, classes in kept)
    for operator_group, classes in kept:
        assert [operator_group.find(cls) for cls in classes] == classes


@functools.cache
def in_microbatches(layers, *counts):
    """A small GPT, its state, and its graph in each number of microbatches."""
    traced = small_gpt(layers)
    structs = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in (traced.graph.types[v] for v in traced.graph.inputs)]
    return traced, {count: microbatched(traced, structs, count).graph for count in counts}


class EveryPrice(StageCostTable):
    """The table of stages without its shortcuts: every block is priced on every mesh."""

    def _good_enough(self, chosen, n_devices):
        return 0.0

    def _mesh_cutoff(self, best_period):
        return math.inf


class PlannedSolver(BlockSolver):
    """The costs of blocks by their plans, as exact as these."""

    def _cost(self, first, mesh, cutoff):
        return self.planned_cost(first.block, mesh)


def table_of(traced, graphs, cluster, n_layers, block_costs, kind=StageCostTable):
    samples = {count: Sample(graph=graph, state_pairs=traced.state_pairs) for count, graph in graphs.items()}
    return kind(
        step=StepBlocks(samples=samples, n_layers=n_layers),
        cluster=cluster,
        meshes=lambda n: layouts(cluster, n, 2),
        block_costs=block_costs,
        on_price=lambda mesh: None,
    )


@pytest.mark.parametrize("cluster", [slow("1x4:v100-16g"), slow("2x2:v100-16g")])
def test_stages_and_meshes_that_are_given_up_early_are_not_missed(cluster):
    cluster = parse_cluster(cluster)
    traced, graphs = in_microbatches(4, 4, 8)
    host = cluster.group()
    whole = inter_op.Submesh(hosts=host.hosts, devices_per_host=host.devices_per_host)
    found = {}
    for lazy in (True, False):
        block_costs = BlockCosts(BlockSolver(options=SolverOptions()))
        table = table_of(traced, graphs, cluster, 4, block_costs, StageCostTable if lazy else EveryPrice)
        if lazy:
            table.survey([choice.n_devices for choice in inter_op.submeshes(cluster)])
        space = inter_op.partitions.Space(
            n_layers=4,
            whole=whole,
            choices=inter_op.submeshes(cluster),
            schedules=("1f1b", "eager-1f1b"),
            microbatches=(4, 8),
            idle=False,
        )
        partition = inter_op.partitions.partition(
            space,
            table,
            lower_bound=table.bounds.of_layers if lazy else None,
            prefetch=functools.partial(price_layers, table) if lazy else None,
        )
        found[lazy] = partition, block_costs.solved
    (few, solved), (everything, all_solved) = found[True], found[False]
    assert (few.stages, few.schedule, few.microbatches) == (
        everything.stages,
        everything.schedule,
        everything.microbatches,
    )
    assert few.seconds == everything.seconds
    assert solved <= all_solved


@pytest.fixture(scope="module")
def many_blocks():
    """What a step of six layers is cut into."""
    traced, graphs = in_microbatches(6, 4)
    return table_of(traced, graphs, MESH.cluster, 3, BlockCosts(BlockSolver(options=SolverOptions()))).step.blocks(4)


def test_blocks_that_are_alike_have_the_same_price(many_blocks):
    """Arguments come in the order of their names: block 10 before block 9, which changes nothing but the order."""
    block = many_blocks[2]
    graph, last = block.part.graph, len(block.part.graph.inputs) - 1
    names = graph.input_names[::-1]
    part = replace(block.part, graph=replace(graph, inputs=graph.inputs[::-1], input_names=names))
    other = Block.of(part, *(tuple((o, last - i) for o, i in pairs) for pairs in (block.state_pairs, block.chain)))
    assert other.kind == block.kind
    assert other.part.graph.fingerprint != graph.fingerprint
    mesh = Mesh(axes=("x",), sizes=(4,), cluster=MESH.cluster)
    one, same = (BlockCosts(PlannedSolver(options=EXACT)).price(each, mesh) for each in (block, other))
    assert one.forward_seconds == pytest.approx(same.forward_seconds, rel=1e-9)
    assert one.backward_seconds == pytest.approx(same.backward_seconds, rel=1e-9)
    assert (one.persistent_nbytes, one.in_flight_nbytes) == (same.persistent_nbytes, same.in_flight_nbytes)


def test_the_kind_of_a_block_is_what_it_does(many_blocks):
    first, *_, last = many_blocks
    assert first.kind != last.kind
    part = many_blocks[2].part
    node = part.graph.nodes[-1]
    other = replace(part.graph, nodes=(*part.graph.nodes[:-1], replace(node, primitive="another")))
    assert (
        Block.of(replace(part, graph=other), many_blocks[2].state_pairs, many_blocks[2].chain).kind
        != many_blocks[2].kind
    )
    assert Block.of(part, many_blocks[2].state_pairs[1:], many_blocks[2].chain).kind != many_blocks[2].kind


def test_rough_prices_are_close(many_blocks):
    exact, rough = BlockCosts(PlannedSolver(options=EXACT)), BlockCosts(BlockSolver(options=SolverOptions()))
    for block in many_blocks[:2]:
        for mesh in layouts(MESH.cluster, 4, 2):
            one, other = (block_costs.price(block, mesh) for block_costs in (exact, rough))
            seconds = [4 * (c.forward_seconds + c.backward_seconds) + c.finish_seconds for c in (one, other)]
            assert seconds[0] * (1 - 1e-9) <= seconds[1] <= seconds[0] * (1 + ROUGH)
            least, nbytes = rough.least(block, MESH.cluster, 4)
            assert least <= min(c.forward_seconds + c.backward_seconds for c in (one, other))
            assert nbytes <= min(c.persistent_nbytes for c in (one, other))


@pytest.mark.slow
def test_prices_and_plans_are_the_same_in_another_process(many_blocks):
    """What is sent there and back is what is found here."""
    here = BlockSolver(options=SolverOptions())
    for block in many_blocks[:3]:
        for mesh in layouts(MESH.cluster, 4, 2):
            there = pickle.loads(pickle.dumps(here))
            task = pickle.loads(pickle.dumps((block, mesh, math.inf)))
            assert pickle.loads(pickle.dumps(there.cost(*task))) == here.cost(block, mesh, math.inf)
    block, meshes = many_blocks[2], layouts(MESH.cluster, 4, 2)
    task = ("stage", Step(graph=block.part.graph, state_pairs=block.state_pairs, donated=()), meshes, SolverOptions())
    plan, same = here.plan(*task), pickle.loads(pickle.dumps(here)).plan(*pickle.loads(pickle.dumps(task)))
    assert replace(pickle.loads(pickle.dumps(same)), solution=plan.solution) == plan


def test_blocks_that_cost_too_much_are_left_with_a_bound(many_blocks):
    block, block_costs, meshes = many_blocks[2], BlockCosts(BlockSolver(options=EXACT)), layouts(MESH.cluster, 4, 2)
    assert len(meshes) > 1
    for mesh in meshes:
        period = block.period(BlockCosts(BlockSolver(options=EXACT)).price(block, mesh))
        assert block_costs.price(block, mesh, 0.9 * period) is None
        assert not block_costs.is_known(block, mesh)
        _, least = block_costs.lower_bound(block, mesh)
        assert 0.9 * period <= least <= period * (1 + 1e-6)
        assert block.period(block_costs.price(block, mesh, 1.1 * period)) == pytest.approx(period, rel=ROUGH)


@pytest.mark.slow
def test_more_microbatches_take_no_less(monkeypatch: pytest.MonkeyPatch):
    """Prices in few microbatches are bounds of those in more, which is what `fewer` kinds are for."""
    monkeypatch.setattr(block_solver, "ROUGH", 0.0)  # a bound is as far below its price as that allows
    traced, graphs = in_microbatches(6, 4, 8)
    table = table_of(traced, graphs, MESH.cluster, 3, BlockCosts(BlockSolver(options=EXACT)))
    few, many = table.step.blocks(4), table.step.blocks(8)
    assert [block.fewer for block in many] == [(block.kind,) for block in few]
    for mesh in layouts(MESH.cluster, 4, 2):
        for one, other in zip(few, many, strict=True):
            before = table.block_costs.lower_bound(other, mesh)[1]
            least = 4 * one.period(table.block_costs.price(one, mesh))
            after = table.block_costs.lower_bound(other, mesh)[1]
            assert after >= max(before, 0.99 * least / 8)
            assert 8 * other.period(table.block_costs.price(other, mesh)) >= least * (1 - 1e-6)


@pytest.mark.parametrize("cluster", [slow("1x8:v100-16g"), slow("2x4:a100-80g"), slow("4x2:v100-16g")])
def test_more_devices_save_no_more_than_their_share(many_blocks, cluster):
    """What a survey's bounds are made of: on the best mesh, half of the devices take at most twice as long."""
    cluster, block_costs = parse_cluster(cluster), BlockCosts(BlockSolver(options=EXACT))
    for block in many_blocks[:3]:
        spent = [
            n * min(block.period(block_costs.price(block, mesh)) for mesh in layouts(cluster, n, 2))
            for n in (1, 2, 4, 8)
        ]
        assert spent == sorted(spent)


@pytest.mark.slow
def test_a_chain_of_blocks_costs_what_its_blocks_do():
    traced, graphs = in_microbatches(6, 4)
    table = table_of(traced, graphs, MESH.cluster, 3, BlockCosts(BlockSolver(options=EXACT)))
    blocks = table.step.blocks(4)
    kinds = [block.kind for block in blocks]
    middle = max(kinds, key=kinds.count)
    first, count = kinds.index(middle), kinds.count(middle)
    assert count >= 4
    assert kinds[first : first + count] == [middle] * count
    begins = in_blocks(body_of(graphs[4]), 3).firsts
    run = stages.cut(graphs[4], (0, begins[first], begins[first + count]), traced.state_pairs).parts[1]
    for mesh in layouts(MESH.cluster, 4, 2):
        state_pairs = stages.state_pairs_of(run, graphs[4], traced.state_pairs)
        plan = cheapest_plan("stage", MeshProblems(step=Step(graph=run.graph, state_pairs=state_pairs)), [mesh], EXACT)
        together, one = (
            layout_cost(run, plan.layout, plan.mesh, plan.phases),
            table.block_costs.price(blocks[first], mesh),
        )
        whole, each = (cost.forward_seconds + cost.backward_seconds for cost in (together, one))
        assert whole == pytest.approx(count * each, rel=0.1)
        assert together.persistent_nbytes == pytest.approx(count * one.persistent_nbytes, rel=0.1)


@pytest.mark.slow
def test_the_plan_of_a_stage_is_restated_for_an_equal_one():
    traced, graphs = in_microbatches(4, 2)
    graph = graphs[2]
    table = table_of(traced, graphs, MESH.cluster, 4, BlockCosts(BlockSolver(options=SolverOptions())))
    cut = stages.cut(graph, table.step.firsts(graph, table.step.cuts(2).layers, 2), traced.state_pairs)
    by_print = {}
    for part in cut.parts:
        by_print.setdefault(part.graph.fingerprint, []).append(part)
    first, second = next(parts for parts in by_print.values() if len(parts) > 1)[:2]
    plans = []
    for part in (first, second):
        state_pairs = stages.state_pairs_of(part, graph, traced.state_pairs)
        step = Step(graph=part.graph, state_pairs=state_pairs)
        plans.append(cheapest_plan("stage", MeshProblems(step=step), layouts(MESH.cluster, 4, 2), SolverOptions()))
    state_pairs = stages.state_pairs_of(second, graph, traced.state_pairs)
    elsewhere = replace(first.graph, nodes=tuple(replace(node, source="") for node in first.graph.nodes))
    for planned in (first.graph, elsewhere):
        again = restated(plans[0], planned, Step(graph=second.graph, state_pairs=state_pairs))
        assert replace(again, solution=plans[1].solution) == plans[1]
    ours, theirs = (layout_cost(second, one.layout, one.mesh, one.phases) for one in (again, plans[1]))
    assert ours == theirs
