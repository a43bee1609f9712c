"""Tables of strategies: what sharing them between meshes and programs may not change."""

import pytest

from passes.cluster import Mesh, parse_cluster
from passes.intra_op import assemble
from passes.intra_op.axis_choices import axis_choices
from passes.intra_op.group_walks import GroupWalks, Signature, SizelessRule
from passes.intra_op.strategies import Operator, Tabulator
from passes.ir import Graph, Node, TensorType
from passes.placement import group
from passes.rules import rule_of
from passes.sharding import Resharder
from passes.solver.dominance import without_dominated

CLUSTER = parse_cluster("4x8:a100-80g")
SIZES = [(), (1,), (8,), (3,), (2, 4), (3, 2), (6, 4), (2, 2, 2)]


def product(rows=24, inner=16, columns=48):
    """Of a matrix's product with a weight, the sum, and what is left of the product without its largest."""
    types = [(rows, inner), (inner, columns), (rows, columns), (rows,), (rows, columns), (rows, columns)]
    params = {"dimension_numbers": (((1,), (0,)), ((), ()))}
    spread = {"shape": (rows, columns), "broadcast_dimensions": (0,)}
    nodes = (
        Node(primitive="dot_general", inputs=(0, 1), outputs=(2,), params=params),
        Node(primitive="reduce_max", inputs=(2,), outputs=(3,), params={"axes": (1,)}),
        Node(primitive="broadcast_in_dim", inputs=(3,), outputs=(4,), params=spread),
        Node(primitive="sub", inputs=(2, 4), outputs=(5,)),
    )
    return Graph(
        types=tuple(TensorType(shape=shape, dtype="float32") for shape in types),
        nodes=nodes,
        inputs=(0, 1),
        outputs=(2, 5),
    )


def mesh_of(sizes):
    return Mesh(axes=tuple("xyz"[: len(sizes)]), sizes=sizes, cluster=CLUSTER)


def tables(graph, resharder):
    return assemble(graph, resharder.mesh, group(graph), resharder, ()).root.tables


def content(table):
    return table.strategies, table.inputs, table.makes, table.seconds.tolist()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_strategy_is_legal_for_every_member(sizes):
    graph, mesh = product(), mesh_of(sizes)
    grouping = group(graph)
    found = assemble(graph, mesh, grouping, Resharder(mesh), ()).root.tables
    for operator_group, table in zip(grouping.operator_groups, found, strict=True):
        for strategy in table.strategies:
            for member, assignment in zip(sorted(operator_group.members), strategy.assignments, strict=True):
                assert assignment in grouping.rules[member].assignments(mesh)
        for specs in table.makes.values():
            assert len(specs) == len(table.strategies)


def test_a_single_operator_has_every_assignment_once():
    graph, mesh = product(), mesh_of((2, 4))
    rule, (table, _) = group(graph).rules[0], tables(graph, Resharder(mesh))
    of_no_sums = {a for a in rule.assignments(mesh) if all(rule.factors[factor].size for _, factor in a)}
    assert {strategy.assignments[0] for strategy in table.strategies} == of_no_sums


def test_a_walk_cuts_every_member_that_has_the_class():
    """A sum of two arrays, whose rows are class 0 and whose columns are class 1."""
    node = Node(primitive="add", inputs=(0, 1), outputs=(2,))
    types = (TensorType(shape=(4, 4), dtype="float32"),) * 3
    rule = rule_of(node, Graph(types=types, nodes=(node,), inputs=(0, 1), outputs=(2,)))
    signature = Signature(
        axes=("x",),
        options=(0, 1),
        rules=(SizelessRule(rule=rule, grows=()),),
        operands=((("out", 0), ("out", 1)),),
        makes=((0,),),
        visible=(0,),
        absorbed=(),
        classes=((0, 1),),
    )
    choices = axis_choices(signature.options, signature.axes)
    results = [str(walk.home[0]) for choice in choices for walk in GroupWalks(signature).under(choice)]
    assert results == ["[-, -]", "[x, -]", "[-, x]"]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tables_do_not_depend_on_what_was_tabulated_before(sizes):
    """Neither on other programs on the mesh, nor on other meshes that have the same ways."""
    shared = Resharder(mesh_of(sizes))
    for other in (product(rows=8), product(columns=24)):
        tables(other, shared)
    for again, alone in zip(tables(product(), shared), tables(product(), Resharder(mesh_of(sizes))), strict=True):
        assert content(again) == content(alone)


def test_equal_operator_groups_of_two_programs_share_a_table():
    resharder = Resharder(mesh_of((2, 4)))
    first, second = (tables(product(), resharder) for _ in range(2))
    assert list(map(id, first)) == list(map(id, second))
    taller = tables(product(rows=48), resharder)
    assert not set(map(id, first)) & set(map(id, taller))


def test_operators_of_two_names_are_told_apart():
    graph, mesh = product(), mesh_of((2,))
    tabulator = Resharder(mesh).kept(Tabulator)
    grouping = group(graph)
    numbers = tabulator.operators(graph, grouping)
    assert len(set(numbers)) == len(graph.nodes)
    assert numbers == tabulator.operators(graph, group(graph))
    assert len({Operator(primitive=n, rule=grouping.rules[3], reads=(), writes=()) for n in ("sub", "add")}) == 2


def test_a_tabulator_is_made_once_for_a_resharder():
    resharder, other = Resharder(mesh_of((2,))), Resharder(mesh_of((4,)))
    assert resharder.kept(Tabulator) is resharder.kept(Tabulator)
    assert resharder.kept(Tabulator) is not other.kept(Tabulator)


def test_one_of_equals_always_stays():
    mesh, graph = mesh_of((2, 4)), product()
    resharder = Resharder(mesh)
    assembly = assemble(graph, mesh, group(graph), resharder, ())
    thin = without_dominated(assembly.problem)
    for before, after in zip(assembly.problem.seconds, thin.seconds, strict=True):
        assert after.min() == before.min()
