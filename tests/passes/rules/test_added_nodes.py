"""The nodes that rewrites add are ones that planning has rules for."""

from passes.cluster import Mesh, parse_cluster
from passes.ir import Graph, TensorType
from passes.rules import rule_of
from passes.rules.added_nodes import barrier, sum_of

MESH = Mesh(axes=("x",), sizes=(2,), cluster=parse_cluster("2:a100-80g"))


def test_a_sum_is_cut_like_its_operands_and_a_barrier_passes_on_what_it_is_given() -> None:
    made = sum_of(0, 1, 2, source="a.py:1", scope="loop")
    passed = barrier((2, 0), (3, 4), source="a.py:2", scope="loop")
    graph = Graph(
        types=(TensorType(shape=(4, 6), dtype="float32"),) * 5, nodes=(made, passed), inputs=(0, 1), outputs=(3, 4)
    )
    graph.verify()
    for node in graph.nodes:
        rule = rule_of(node, graph)
        for assignment in rule.assignments(MESH):
            operands = [rule.operand_spec(i, assignment).dims for i in range(len(node.inputs))]
            results = [rule.result_spec(i, assignment).dims for i in range(len(node.outputs))]
            assert results == (operands if node is passed else operands[:1])
    cut = [a for a in rule_of(made, graph).assignments(MESH) if a]
    assert len({rule_of(made, graph).result_spec(0, a).dims for a in cut}) >= 2  # rows and columns
