"""Laws of the memory model on small programs, every array of which is [64, 64] float32 unless said otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from passes.cluster import Cluster, DeviceSpec, HostGroup, Mesh
from passes.cluster.cluster import Link
from passes.ir import Graph, Node, TensorType
from passes.memory import Holder, Memory, Temporaries, peak
from passes.memory.all_reduces import combined
from passes.memory.holders import CAUSES
from passes.memory.operations import Operation
from passes.placement import Layout, Placement, group, resharding_plan, shared
from passes.sharding import Resharder, ShardingSpec, replicated

LINK = Link(alpha_seconds=5e-6, bytes_per_second=150e9)
DEVICE = DeviceSpec(
    name="made-up",
    flops_per_second={"float32": 156e12},
    matmul_efficiency=0.7,
    memory_nbytes=80 * 2**30,
    memory_bytes_per_second=2e12,
    launch_seconds=3e-6,
    source="made up for this test",
)
CLUSTER = Cluster(
    name="1x8:made-up", groups=(HostGroup(hosts=1, devices_per_host=8, device=DEVICE, intra=LINK, inter=LINK),)
)
MESH = Mesh(axes=("data",), sizes=(8,), cluster=CLUSTER)
SQUARE = TensorType(shape=(64, 64), dtype="float32")
NBYTES = SQUARE.nbytes
CUT = ShardingSpec(dims=(("data",), ()))
PARTIAL = ShardingSpec(dims=((), ()), partial=("data",))


class Program:
    """A graph as it is written; operations return the value that they make."""

    def __init__(self, inputs: int, shape: tuple[int, ...] = SQUARE.shape) -> None:
        self.types = [TensorType(shape=shape, dtype="float32")] * inputs
        self.inputs = tuple(range(inputs))
        self.nodes: list[Node] = []
        self.scope = ""

    def add(self, primitive: str, *operands: int, shape: tuple[int, ...] = SQUARE.shape, **params: object) -> int:
        self.types.append(TensorType(shape=shape, dtype="float32"))
        self.nodes.append(
            Node(
                primitive=primitive,
                inputs=operands,
                outputs=(len(self.types) - 1,),
                params=params,
                source=f"step.py:{len(self.nodes) + 1} (f)",
                scope=self.scope,
            )
        )
        return len(self.types) - 1

    def dot(self, left: int, right: int) -> int:
        return self.add("dot_general", left, right, dimension_numbers=(((1,), (0,)), ((), ())))

    def total(self, operand: int) -> int:
        return self.add("reduce_sum", operand, shape=(), axes=(0, 1))

    def graph(self, *outputs: int) -> Graph:
        names = tuple(f"x[{i}]" for i in self.inputs)
        return Graph(
            types=tuple(self.types),
            nodes=tuple(self.nodes),
            inputs=self.inputs,
            outputs=outputs,
            input_names=names,
            output_names=tuple(f"[{i}]" for i in range(len(outputs))),
        )


def whole(graph: Graph) -> Layout:
    """Every device has everything."""

    def specs(values: Sequence[int]) -> tuple[ShardingSpec, ...]:
        return tuple(replicated(graph.types[v].rank) for v in values)

    placements = (
        Placement(operands=specs(n.inputs), results=specs(n.outputs), bodies=tuple(map(whole, n.subgraphs)))
        for n in graph.nodes
    )
    return Layout(inputs=specs(graph.inputs), placements=tuple(placements), outputs=specs(graph.outputs))


def needed(
    graph: Graph, state_pairs: tuple[tuple[int, int], ...] = (), *, donated: bool = True, layout: Layout | None = None
) -> Memory:
    layout = layout or whole(graph)
    schedule = resharding_plan(graph, layout, Resharder(MESH))
    given = (graph, group(graph), MESH, layout, schedule, state_pairs, (donated,) * len(graph.inputs))
    memory = peak(*given)
    assert memory.peak_nbytes == max(memory.over_time) == sum(memory.nbytes.values())
    assert tuple(memory.nbytes) == CAUSES
    return memory


def test_arguments_stay_and_so_does_what_is_returned():
    program = Program(2)
    memory = needed(program.graph(program.dot(0, 1)))
    assert causes(memory) == {"other arguments": 2 * NBYTES, "outputs": NBYTES}


def test_a_state_that_is_donated_is_returned_in_its_own_place():
    program = Program(2)
    graph = program.graph(program.add("add", 0, 1))
    assert causes(needed(graph, ((0, 0),))) == {"optimizer state": NBYTES, "other arguments": NBYTES}
    assert needed(graph, ((0, 0),), donated=False).nbytes["outputs"] == NBYTES


def test_fused_operations_are_never_written():
    program = Program(2)
    once = program.add("exp", program.add("add", program.add("mul", 0, 1), 1))
    assert needed(program.graph(program.dot(once, 1))).nbytes["transients"] == NBYTES  # what the dot reads


def test_cheap_operations_are_computed_for_every_reader_and_expensive_ones_once():
    """One array lies where the second result will be: what the product reads, or what both results read."""
    for primitive, count in (("neg", 0), ("exp", 1)):
        program = Program(2)
        shared = program.add(primitive, 0)
        left = program.dot(program.add("add", shared, 0), 1)
        memory = needed(program.graph(left, program.add("sub", shared, left)))
        assert memory.nbytes["transients"] == count * NBYTES


def test_a_result_is_written_over_an_operand_that_nothing_reads_later():
    program = Program(2)
    shared = program.dot(0, 1)
    result = program.dot(program.add("mul", shared, 0), 1)
    assert needed(program.graph(result)).nbytes["transients"] == NBYTES


def test_a_value_lives_until_its_last_reader():
    program = Program(2)
    first = program.dot(0, 1)
    last = first
    for _ in range(4):
        last = program.dot(last, 1)
    assert needed(program.graph(last)).nbytes["transients"] == NBYTES  # every other one lies where the result will be
    graph = program.graph(program.dot(last, first))
    assert needed(graph).nbytes["transients"] == 2 * NBYTES


def test_equal_operations_are_one_unless_a_barrier_is_between_them():
    for barrier, count in ((False, 1), (True, 2)):
        program = Program(2)
        first = program.dot(0, 1)
        again = program.dot(program.add("optimization_barrier", 0) if barrier else 0, 1)
        memory = needed(program.graph(program.dot(first, again)))
        assert memory.nbytes["transients"] == count * NBYTES


def test_causes_follow_the_phases():
    program = Program(3)
    program.scope = "jvp(f)"
    kept = program.dot(1, 0)
    loss = program.total(program.add("sin", program.dot(kept, 0)))
    program.scope = "transpose(jvp(f))"
    back = program.dot(program.add("broadcast_in_dim", loss, broadcast_dimensions=()), 0)
    gradient = program.add("dot_general", kept, back, dimension_numbers=(((0,), (0,)), ((), ())))
    program.scope = ""
    moment = program.add("add", 2, gradient)
    graph = program.graph(program.add("sub", 0, moment), moment, loss)
    memory = needed(graph, ((0, 0), (1, 2)))
    assert (memory.nbytes["parameters"], memory.nbytes["optimizer state"]) == (NBYTES, NBYTES)
    assert memory.nbytes["saved for backward"] == NBYTES
    names = {holder.name: holder.cause for holder in memory.holders}
    assert names["x[0]"] == "parameters"
    assert names["dot_general at step.py:1 (f)"] == "saved for backward"
    assert memory.where.startswith("step.py:")


@pytest.mark.parametrize("length", [2, 16])
def test_the_body_of_a_loop_counts_once_and_what_it_stacks_as_often_as_it_runs(length: int):
    body = Program(2)
    inner = body.dot(body.dot(0, 1), 1)
    graph = Program(2)
    graph.types += [SQUARE, TensorType(shape=(length, *SQUARE.shape), dtype="float32")]
    loop = Node(
        primitive="scan",
        inputs=(1, 0),
        outputs=(2, 3),
        params={"num_consts": 1, "num_carry": 1, "length": length},
        subgraphs=(swapped(body.graph(inner, inner)),),
    )
    graph.nodes.append(loop)
    carried = graph.dot(2, 1)
    total = graph.add("reduce_sum", 3, axes=(0,))
    memory = needed(graph.graph(graph.dot(carried, total)))
    stack = length * NBYTES
    assert stack + NBYTES <= memory.nbytes["transients"] <= stack + 4 * NBYTES


def swapped(graph: Graph) -> Graph:
    """The same body with its constant before its carry."""
    return Graph(
        types=graph.types,
        nodes=graph.nodes,
        inputs=graph.inputs[::-1],
        outputs=graph.outputs,
        input_names=graph.input_names,
        output_names=graph.output_names,
    )


def summed(graph: Graph) -> Layout:
    """Every product is a partial sum, which its readers want whole."""
    plain = whole(graph)
    dots = (
        Placement(operands=p.operands, results=(PARTIAL,)) if n.primitive == "dot_general" else p
        for n, p in zip(graph.nodes, plain.placements, strict=True)
    )
    return Layout(inputs=plain.inputs, placements=tuple(dots), outputs=plain.outputs)


def test_all_reduces_that_wait_for_each_other_run_one_after_the_other():
    program = Program(2)
    last = program.dot(0, 1)
    for _ in range(3):
        last = program.dot(0, program.add("tanh", last))
    graph = program.graph(program.add("neg", last))
    memory = needed(graph, layout=summed(graph))
    assert memory.nbytes["transients"] + memory.nbytes["collective buffers"] == NBYTES  # beside the result's place


def test_all_reduces_that_do_not_wait_for_each_other_hold_everything_they_send():
    program = Program(4)
    sums = [program.dot(i, 0) for i in range(4)]
    graph = program.graph(*(program.add("add", s, 0) for s in sums))
    memory = needed(graph, layout=summed(graph))
    addresses = 64  # of the results, rounded up; what is sent lies where the outputs will be
    assert (memory.nbytes["transients"], memory.nbytes["collective buffers"]) == (0, 4 * NBYTES + addresses)


def test_of_a_cut_array_a_device_holds_one_piece():
    program = Program(1)
    graph = program.graph(program.add("neg", 0))
    piece = Placement(operands=(CUT,), results=(CUT,))
    memory = needed(graph, layout=Layout(inputs=(CUT,), placements=(piece,), outputs=(CUT,)))
    assert causes(memory) == {"other arguments": NBYTES // 8, "outputs": NBYTES // 8}


def causes(found: Memory) -> dict[str, int]:
    """The causes that hold anything."""
    return {cause: nbytes for cause, nbytes in found.nbytes.items() if nbytes}


def test_equal_placements_are_shared() -> None:
    def placement() -> Placement:
        return Placement(operands=(replicated(2),), results=(replicated(1),))

    layout = Layout(inputs=(replicated(2),), placements=(placement(), placement()), outputs=(replicated(1),))
    shared_layout = shared(layout)
    assert shared_layout == layout
    assert shared_layout.placements[0] is shared_layout.placements[1]
    assert shared_layout.inputs[0] is shared_layout.placements[0].operands[0]
    assert shared_layout.outputs[0] is shared_layout.placements[0].results[0]


def test_readers_of_a_combined_collective_come_after_it() -> None:
    def sent(operand: int) -> Operation:
        return Operation("collective", (operand,), (8,), "float32", 0, tag=("all_reduce", ("x",)))

    sources = [Operation("input", (), (8,), "float32", 0, tag=i) for i in range(2)]
    reader = Operation("elementwise", (2,), (8,), "float32", 0, tag="neg")
    operations, place = combined([*sources, sent(0), reader, sent(1)])
    assert [o.kind for o in operations] == ["input", "input", "collective", "result", "elementwise", "result"]
    assert place == (0, 1, 3, 4, 5)
    assert all(o < index for index, operation in enumerate(operations) for o in operation.operands)


def test_a_model_of_another_compiler_says_what_comes_and_goes():
    """Arguments and outputs are counted alike; only what is between them is up to the model."""
    program = Program(2)
    graph = program.graph(program.dot(0, 1))
    layout = whole(graph)
    schedule = resharding_plan(graph, layout, Resharder(MESH))

    def frugal(*given: object) -> Temporaries:
        assert given == (graph, grouping, MESH, layout, schedule, {})
        working = Holder(name="scratch", nbytes=40, cause="transients")
        return Temporaries(where="here", holders=(working,), gaps_nbytes=2, over_time=(0, 40))

    grouping = group(graph)
    memory = peak(graph, grouping, MESH, layout, schedule, (), (False, False), model=frugal)
    assert causes(memory) == {"other arguments": 2 * NBYTES, "outputs": NBYTES, "transients": 42}
    assert (memory.where, memory.over_time) == ("here", (3 * NBYTES + 2, 3 * NBYTES + 42))
