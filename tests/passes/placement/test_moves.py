"""Moves of random layouts, walked node by node: everything is where it is wanted, and nothing is brought twice."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from passes.cluster import Mesh, parse_cluster
from passes.ir import Graph, Node, TensorType, phase
from passes.placement import Layout, Placement, collectives, is_free, occurrences, resharding_plan, shared
from passes.sharding import Resharder, ShardingSpec, replicated

MESH = Mesh(axes=("x", "y"), sizes=(2, 4), cluster=parse_cluster("2x4:a100-80g"))
SQUARE = TensorType(shape=(8, 8), dtype="float32")
RESHARDER = Resharder(MESH)
SPECS = [spec for spec in RESHARDER.placements(2) if not spec.partial]
CUT = ShardingSpec(dims=(("x",), ()))
OTHER = ShardingSpec(dims=((), ("x",)))
PARTIAL = ShardingSpec(dims=((), ()), partial=("y",))
SCOPES = ("jvp(f)/layer", "transpose(jvp(f))/layer", "update")
SEEDS = range(80)


def drawn(seed: int) -> tuple[Graph, Layout]:
    """A program of sums of two that goes through all phases, every operand and result placed at random."""
    r = random.Random(seed)
    types, nodes = [SQUARE] * 4, list[Node]()
    literal = 3
    for number in range(r.randint(6, 14)):
        scope = SCOPES[min(number // 4, 2)]
        types.append(SQUARE)
        if r.random() < 0.1:
            nodes.append(Node(primitive="neg", inputs=(literal,), outputs=(len(types) - 1,), scope=scope))
            continue
        recent = r.randrange(max(0, len(types) - 6), len(types) - 1)
        operands = (r.randrange(len(types) - 1), recent)
        nodes.append(Node(primitive="add", inputs=operands, outputs=(len(types) - 1,), scope=scope))
    outputs = tuple(r.sample(range(4, len(types)), 2))
    graph = Graph(
        types=tuple(types), nodes=tuple(nodes), inputs=(0, 1), outputs=outputs, constants=(2,), literals={literal: 1.0}
    )
    graph.verify()
    few = r.sample(SPECS, 3)

    def spec() -> ShardingSpec:
        return r.choice(few)

    placements = tuple(
        Placement(
            operands=tuple(spec() for _ in n.inputs),
            results=tuple(PARTIAL if r.random() < 0.15 else spec() for _ in n.outputs),
        )
        for n in nodes
    )
    return graph, Layout(inputs=(spec(), spec()), placements=placements, outputs=(spec(), spec()))


def brought_again(graph: Graph) -> set[int]:
    """Arguments, and what the forward pass and the update make of one of them and numbers alone."""
    members = set(graph.inputs)
    for node in graph.nodes:
        arrays = [v for v in node.inputs if v not in graph.literals]
        if len(arrays) == 1 and arrays[0] in members and phase(node) != "backward":
            members.update(node.outputs)
    return members


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_everything_is_brought_where_it_is_wanted_once(seed: int, regather: bool) -> None:
    graph, layout = drawn(seed)
    schedule = resharding_plan(graph, layout, RESHARDER, regather=regather)
    assert len(schedule.before) == len(graph.nodes) + 1
    home = dict(zip(graph.inputs, layout.inputs, strict=True)) | {v: replicated(2) for v in graph.constants}
    anywhere = set(graph.literals) | {v for i, n in enumerate(graph.nodes) if is_free(graph, i) for v in n.outputs}
    held = {(v, spec, "forward") for v, spec in home.items()} | {(v, spec, "backward") for v, spec in home.items()}
    fetched = brought_again(graph)
    made, backward, source = set(home), set[int](), dict[int, ShardingSpec]()
    for index, due_here in enumerate(schedule.before):
        node = graph.nodes[index] if index < len(graph.nodes) else None
        placement = layout.placements[index] if node else None
        wanted = (
            list(zip(node.inputs, placement.operands, strict=True))
            if node and placement
            else list(zip(graph.outputs, layout.outputs, strict=True))
        )
        when = "backward" if node and regather and phase(node) == "backward" else "forward"
        for move in due_here:
            assert move.value in made
            assert move.before == source.get(move.value, home[move.value])
            if move.before.partial and not move.after.partial:
                source[move.value] = move.after  # a sum is reduced once; others have it from there
            assert (move.value, move.after) in wanted
            assert (move.value, move.after, move.phase) not in held
            assert move.phase == (when if move.value in fetched else "forward")
            held.add((move.value, move.after, move.phase))
            spec = move.before
            for step in move.steps:
                spec = step.apply(spec)
            assert spec == move.after
            late = move.phase == "backward" and any(not step.is_local for step in move.steps)
            assert move.after_value is None or (late and move.after_value in backward)
            read = backward & set(node.inputs) if node else set()
            assert (move.after_value is not None) == bool(late and read)
        if node is None or not is_free(graph, index):
            for value, spec in wanted:
                at = when if value in fetched else "forward"
                assert value in anywhere or (value, spec, at) in held
        if node and placement:
            made.update(node.outputs)
            home.update(zip(node.outputs, placement.results, strict=True))
            held |= {
                (v, s, at)
                for v, s in zip(node.outputs, placement.results, strict=True)
                for at in ("forward", "backward")
            }
            backward |= set(node.outputs) - anywhere if regather and phase(node) == "backward" else set()


@pytest.mark.parametrize("seed", SEEDS)
def test_sharing_equal_objects_changes_nothing(seed: int) -> None:
    graph, layout = drawn(seed)
    one = shared(layout)
    assert one == layout
    specs = [s for p in one.placements for s in (*p.operands, *p.results)] + [*one.inputs, *one.outputs]
    assert len({id(spec) for spec in specs}) == len(set(specs))
    assert resharding_plan(graph, one, RESHARDER) == resharding_plan(graph, layout, RESHARDER)


@pytest.mark.parametrize("seed", SEEDS)
def test_collectives_are_those_of_the_steps(seed: int) -> None:
    graph, layout = drawn(seed)
    schedule = resharding_plan(graph, layout, RESHARDER)
    wanted: Counter[tuple[str, tuple[str, ...], int]] = Counter()
    for move in (move for before in schedule.before for move in before):
        spec = move.before
        for step in move.steps:
            spec = step.apply(spec)
            if not step.is_local:
                wanted[step.kind, step.axes, math.prod(spec.local_shape(SQUARE.shape, MESH)) * 4] += 1
    counts: Counter[tuple[str, tuple[str, ...], int]] = Counter()
    for one in collectives(graph, schedule, MESH):
        assert one.dtype == "float32"
        counts[one.kind, one.axes, one.nbytes] += one.count
    assert counts == wanted


def looped(primitive: str, trips: int) -> tuple[Graph, Layout]:
    """A loop or a branch over a body that brings its carry somewhere else and back."""
    body = Graph(
        types=(SQUARE, SQUARE),
        nodes=(Node(primitive="neg", inputs=(0,), outputs=(1,), source="body.py:1"),),
        inputs=(0,),
        outputs=(1,),
    )
    inside = Layout(inputs=(CUT,), placements=(Placement(operands=(OTHER,), results=(OTHER,)),), outputs=(CUT,))
    if primitive == "scan":
        params: dict[str, object] = {"length": trips, "num_consts": 0, "num_carry": 1, "reverse": False, "unroll": 1}
        node = Node(primitive="scan", inputs=(0,), outputs=(2,), params=params, subgraphs=(body,), source="step.py:2")
        placement = Placement(operands=(CUT,), results=(CUT,), bodies=(inside,))
    else:
        node = Node(primitive="cond", inputs=(1, 0), outputs=(2,), subgraphs=(body,) * trips, source="step.py:2")
        placement = Placement(operands=(replicated(0), CUT), results=(CUT,), bodies=(inside,) * trips)
    types = (SQUARE, TensorType(shape=(), dtype="int32"), SQUARE)
    graph = Graph(types=types, nodes=(node,), inputs=(0, 1), outputs=(2,))
    return graph, Layout(inputs=(CUT, replicated(0)), placements=(placement,), outputs=(CUT,))


def test_reshardings_inside_a_loop_count_in_every_iteration() -> None:
    graph, layout = looped("scan", 5)
    schedule = resharding_plan(graph, layout, RESHARDER)
    assert [len(before) for before in schedule.before] == [0, 0]
    (inner,) = schedule.bodies[0]
    assert [len(before) for before in inner.before] == [1, 1]
    told = list(occurrences(graph, schedule))
    assert [(one.trips, one.share, one.where) for one in told] == [(5, 1.0, "body.py:1"), (5, 1.0, "step.py:2")]
    (there, back) = collectives(graph, schedule, MESH)
    assert (there.kind, there.count, there.where) == ("all_to_all", 5, "body.py:1")
    assert (back.kind, back.count, back.where) == ("all_to_all", 5, "step.py:2")
    assert there.nbytes == back.nbytes == SQUARE.nbytes // 2


def test_a_branch_is_taken_with_its_share() -> None:
    graph, layout = looped("cond", 4)
    told = list(occurrences(graph, resharding_plan(graph, layout, RESHARDER), trips=3))
    assert len(told) == 2 * 4
    assert {(one.trips, one.share) for one in told} == {(3, 0.25)}


def test_a_sum_is_reduced_once_for_all_that_read_it() -> None:
    """The second reader has it from where the first one brought it."""
    nodes = tuple(
        Node(primitive="neg", inputs=(source,), outputs=(source + k,)) for source, k in ((0, 1), (1, 1), (1, 2))
    )
    graph = Graph(types=(SQUARE,) * 4, nodes=nodes, inputs=(0,), outputs=(2, 3))
    first, second, third = (
        Placement(operands=(CUT,), results=(PARTIAL,)),
        Placement(operands=(CUT,), results=(CUT,)),
        Placement(operands=(OTHER,), results=(OTHER,)),
    )
    layout = Layout(inputs=(CUT,), placements=(first, second, third), outputs=(CUT, OTHER))
    found = [move for before in resharding_plan(graph, layout, RESHARDER).before for move in before]
    assert [(m.value, m.before, m.after) for m in found] == [(1, PARTIAL, CUT), (1, CUT, OTHER)]
    kinds = [step.kind for move in found for step in move.steps]
    assert sum(kind in ("all_reduce", "reduce_scatter") for kind in kinds) == 1
