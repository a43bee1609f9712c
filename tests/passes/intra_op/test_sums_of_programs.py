"""Sums in a program's sharding problem: readers in their order, with the seconds from one reader's placement to the
next.
"""

import numpy as np

from passes.cluster import Mesh, parse_cluster
from passes.intra_op import assemble
from passes.intra_op.matrices import SharedTables
from passes.intra_op.reductions import Read
from passes.ir import Graph, Node, TensorType
from passes.placement import group
from passes.sharding import Resharder, parse_spec

MESH = Mesh(axes=("x", "y"), sizes=(4, 2), cluster=parse_cluster("8:a100-80g"))
CUT = {"dimension_numbers": (((1,), (0,)), ((), ()))}


def two_readers() -> Graph:
    """A product that two other products read, the second of the program first."""
    sizes = ((8, 16), (16, 32), (32, 64), (32, 8), (8, 32), (8, 64), (8, 8))
    nodes = (
        Node(primitive="dot_general", inputs=(0, 1), outputs=(4,), params=CUT, scope="jvp(net)"),
        Node(primitive="dot_general", inputs=(4, 3), outputs=(6,), params=CUT, scope="jvp(net)"),
        Node(primitive="dot_general", inputs=(4, 2), outputs=(5,), params=CUT, scope="jvp(net)"),
    )
    types = tuple(TensorType(shape=shape, dtype="float32") for shape in sizes)
    return Graph(types=types, nodes=nodes, inputs=(0, 1, 2, 3), outputs=(5, 6))


def test_readers_of_a_sum_stand_in_the_order_of_the_program():
    graph, resharder = two_readers(), Resharder(MESH)
    grouping = group(graph)
    assembly = assemble(graph, MESH, grouping, resharder, ())
    read = [edges for edges in assembly.problem.groups.values() if edges[0].sums is not None]
    assert [len(edges) for edges in read] == [2]
    first, second = (grouping.operator_groups[edge.target].members for edge in read[0])
    assert 1 in first
    assert 2 in second
    for edge in read[0]:
        sums, type = edge.sums, graph.types[4]
        assert [bool(spec.partial) for spec in edge.origins] == sums.rows.tolist()
        for label, name in zip(edge.labels, sums.names, strict=True):
            assert sums.ends[name] == (not label.partial)
            for other, after in zip(edge.labels, sums.names, strict=True):
                assert sums.onward[name, after] == resharder.cost(type, label, other)


def test_a_loop_or_a_body_reads_where_it_is_and_a_group_where_its_first_member_is():
    graph = two_readers()
    assembly = assemble(graph, MESH, group(graph), Resharder(MESH), ())
    reader = assembly.root.grouping.operator_group_of(graph.nodes[2])
    assert Read(assembly.root, 4, 7, None).first(0) == 7
    assert Read(assembly.root, 4, None, None).first(assembly.root.first + reader) == 2


def test_halves_of_a_matrix_are_what_sums_and_what_all_else_pay():
    resharder, type = Resharder(MESH), TensorType(shape=(8, 32), dtype="float32")
    shared = SharedTables(resharder)
    before, after = (
        shared.interned(tuple(parse_spec(spec) for spec in specs))
        for specs in (("[-, -] add@x", "[x, -]", "[-, y]", "[x, -]"), ("[-, -]", "[x, -]"))
    )
    whole, halves = shared.matrix(type, before, after, None), shared.halves(type, before, after, None)
    paid = [half.seconds[np.ix_(half.before, half.after)] for half in halves]
    expected = [[resharder.cost(type, spec, other) for other in after] for spec in before]
    assert np.array_equal(whole.seconds[np.ix_(whole.before, whole.after)], expected)
    assert np.array_equal(paid[0] + paid[1], expected)
    assert paid[0][0].min() > 0
    assert not paid[0][1:].any()
    assert not paid[1][0].any()
    assert shared.matrix(type, before, after, None) is whole
