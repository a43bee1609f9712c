"""Plans survive their JSON, refuse edits that cannot be, and read as their golden text.

`python -m tests.passes.plan.test_plan`, run from the checkout, writes the golden files again.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from passes.cluster import Cluster, Collective, DeviceSpec, HostGroup, Mesh
from passes.cluster.cluster import Link
from passes.errors import InternalError, PlanMismatchError, PlanningError
from passes.ir import Graph, Node, TensorType
from passes.placement import Placement
from passes.plan import Operator, Plan, Solution
from passes.plan.json import text
from passes.plan.legality import placements
from passes.rules import rule_of
from passes.sharding import parse_spec, replicated
from passes.text import Column, Table, quantities

GOLDEN = Path(__file__).parents[2] / "golden"

LINK = Link(alpha_seconds=5e-6, bytes_per_second=150e9)
DEVICE = DeviceSpec(
    name="made-up",
    flops_per_second={"bfloat16": 312e12, "float32": 156e12},
    matmul_efficiency=0.7,
    memory_nbytes=80 * 2**30,
    memory_bytes_per_second=2e12,
    launch_seconds=3e-6,
    source="made up for this test",
)
CLUSTER = Cluster(
    name="2x4:made-up", groups=(HostGroup(hosts=2, devices_per_host=4, device=DEVICE, intra=LINK, inter=LINK),)
)
MESH = Mesh(axes=("data", "tensor"), sizes=(4, 2), cluster=CLUSTER)


def floats(*shape: int) -> TensorType:
    return TensorType(shape=shape, dtype="float32")


def matmul(left: int, right: int, result: int, line: int, layer: int) -> Node:
    return Node(
        primitive="dot_general",
        inputs=(left, right),
        outputs=(result,),
        params={"dimension_numbers": (((1,), (0,)), ((), ()))},
        source=f"mlp.py:{line} (Layer.__call__)",
        scope=f"jvp(h_{layer})",
    )


GRAPH = Graph(
    types=(floats(64, 512), *[floats(512, 512)] * 4, *[floats(64, 512)] * 5, floats(), floats(64, 512)),
    nodes=(
        matmul(0, 1, 5, 12, 0),
        matmul(5, 2, 6, 13, 0),
        matmul(6, 3, 7, 12, 1),
        matmul(7, 4, 8, 13, 1),
        Node(
            primitive="broadcast_in_dim", inputs=(10,), outputs=(11,), params={"shape": (64, 512)}, source="mlp.py:20"
        ),
        Node(primitive="optimization_barrier", inputs=(8,), outputs=(9,), source="mlp.py:21 (apply)"),
    ),
    inputs=(0, 1, 2, 3, 4),
    outputs=(9, 1),
    literals={10: 0.0},
    input_names=("batch['x']", *(f"params['h_{i}']['{w}']" for i in (0, 1) for w in ("up", "down"))),
    output_names=("result[0]", "result[1]"),
)


def placed(written: str) -> Placement:
    operands, _, results = written.partition(" -> ")
    sides = ([parse_spec(s.strip()) for s in side.split(" | ")] for side in (operands, results))
    return Placement(**dict(zip(("operands", "results"), map(tuple, sides), strict=True)))


UP = placed("[data, -] | [-, tensor] -> [data, tensor]")
DOWN = placed("[data, tensor] | [tensor, -] -> [data, -] add@tensor")
REST = (placed("[] -> [-, -]"), placed("[data, -] -> [data, -]"))


def make_plan() -> Plan:
    specs = ("[data, -]", "[-, tensor]", "[tensor, -]", "[-, tensor]", "[tensor, -]")
    return Plan(
        fingerprint=GRAPH.fingerprint,
        cluster=CLUSTER,
        mesh=MESH,
        operators=tuple(
            Operator(primitive=node.primitive, source=node.source, scope=node.scope, placement=placement)
            for node, placement in zip(GRAPH.nodes, (UP, DOWN, UP, DOWN, *REST), strict=True)
        ),
        inputs=tuple(map(parse_spec, specs)),
        outputs=(parse_spec("[data, -]"), parse_spec("[-, tensor]")),
        input_names=GRAPH.input_names,
        output_names=GRAPH.output_names,
        collectives=(
            Collective(
                kind="all_reduce", axes=("tensor",), dtype="float32", nbytes=2**15, count=2, where=GRAPH.nodes[1].source
            ),
            Collective(
                kind="all_reduce", axes=("tensor",), dtype="float32", nbytes=2**15, count=1, where=GRAPH.nodes[0].source
            ),
            Collective(
                kind="all_gather", axes=("data", "tensor"), dtype="float32", nbytes=2**21, count=1, where="output"
            ),
        ),
        seconds={"compute": 0.00123, "all_reduce": 4.56e-4, "copies": 7.8e-6},
        nbytes={"arguments": 3 * 2**20, "outputs": 2**17, "temporaries": 2**29},
        solution=Solution(
            planner="megatron 4x2",
            status="optimal",
            objective=0.0017,
            bound=0.0016915,
            phase_seconds={"trace": 0.4, "tables": 0.05, "solve": 1.25},
        ),
        replicated=("mystery at mlp.py:30 (odd)", "fft at mlp.py:31 (odd)"),
        input_types=tuple(GRAPH.types[v] for v in GRAPH.inputs),
        output_types=tuple(GRAPH.types[v] for v in GRAPH.outputs),
    )


def make_other() -> Plan:
    """The same program, data parallel."""
    plan = make_plan()
    alone = placed("[data, -] | [-, -] -> [data, -]")
    return replace(
        plan,
        operators=tuple(replace(op, placement=alone) if op.primitive == "dot_general" else op for op in plan.operators),
        inputs=(plan.inputs[0], *[replicated(2)] * 4),
        collectives=plan.collectives[2:],
        seconds={"compute": 0.00246, "copies": 7.8e-6},
        nbytes={**plan.nbytes, "arguments": 5 * 2**20},
        solution=replace(plan.solution, planner="data parallel"),
    )


@pytest.fixture
def plan() -> Plan:
    return make_plan()


def edited(plan: Plan, old: str, new: str) -> object:
    written = text(plan.to_json())
    assert old in written
    return json.loads(written.replace(old, new, 1))


# Round trips

SPECS = st.sampled_from(
    ["[]", "[-]", "[data]", "[-, tensor]", "[tensor+data, -]", "[-, -] add@data+tensor", "[data] max@tensor"]
)
NAMES = st.text(max_size=20)
NUMBERS = st.floats(allow_nan=False)
OPERATORS = st.builds(
    Operator,
    primitive=NAMES,
    source=st.sampled_from(["", "a.py:1 (f)", "b.py:2"]),
    scope=NAMES,
    placement=st.builds(
        Placement,
        operands=st.lists(SPECS.map(parse_spec)).map(tuple),
        results=st.lists(SPECS.map(parse_spec)).map(tuple),
    ),
)
COLLECTIVES = st.builds(
    Collective,
    kind=st.sampled_from(["all_gather", "all_to_all"]),
    axes=st.sampled_from([("data",), ("data", "tensor")]),
    dtype=NAMES,
    nbytes=st.integers(0, 2**50),
    count=st.integers(1, 9),
    where=NAMES,
)
SOLUTIONS = st.builds(
    Solution,
    planner=NAMES,
    status=NAMES,
    objective=NUMBERS,
    bound=NUMBERS,
    phase_seconds=st.dictionaries(NAMES, NUMBERS, max_size=3),
)
TYPES = st.sampled_from([floats(), floats(4, 8), TensorType(shape=(2,), dtype="key<fry>")])


@st.composite
def plans(draw) -> Plan:
    values = draw(st.lists(st.tuples(NAMES, TYPES, SPECS.map(parse_spec)), min_size=1, max_size=4))
    names, types, specs = zip(*values, strict=True)
    return replace(
        make_plan(),
        operators=tuple(draw(st.lists(OPERATORS, max_size=5))),
        collectives=tuple(draw(st.lists(COLLECTIVES, max_size=3))),
        solution=draw(SOLUTIONS),
        seconds=draw(st.dictionaries(NAMES, NUMBERS, max_size=3)),
        inputs=specs,
        input_names=names,
        input_types=draw(st.sampled_from([types, ()])),
    )


@settings(max_examples=50, deadline=None)
@given(plans())
def test_json_gives_the_plan_back(plan):
    assert Plan.from_json(json.loads(text(plan.to_json()))) == plan


def test_a_file_gives_the_plan_back(plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("an older file")
    plan.save(path)
    assert Plan.load(path) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_golden_json(plan):
    written = json.loads(text(plan.to_json()))
    golden = json.loads((GOLDEN / "plan.json").read_text())
    assert written | {"autopar": ""} == golden | {"autopar": ""}


def test_json_has_one_operator_a_line(plan):
    lines = text(plan.to_json()).splitlines()
    assert sum("dot_general" in line for line in lines) == 4
    assert max(map(len, lines)) < 600


def test_a_plan_on_part_of_another_cluster_is_a_bug(plan):
    elsewhere = replace(plan.mesh, cluster=replace(CLUSTER, name="elsewhere"))
    with pytest.raises(InternalError, match="another cluster"):
        replace(plan, mesh=elsewhere).to_json()


# Files that are no plans


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "should be an object"),
        ("{}", "not a plan"),
        ('{"schema": 1}', "not a plan"),
        ('{"schema": 99, "autopar": "7.0", "fingerprint": "f"}', r"schema 99, written by autopar 7\.0.*reads schema 1"),
        ('{"schema": 1, "autopar": "7.0", "fingerprint": "f"}', "no field 'cluster'"),
    ],
)
def test_what_is_not_a_plan_says_so(tmp_path, content, message):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(PlanningError, match=f"plan.json: .*{message}"):
        Plan.load(path)


def test_a_missing_file_says_so(tmp_path, plan):
    with pytest.raises(PlanningError, match=r"absent\.json: .*No such file"):
        Plan.load(tmp_path / "absent.json")
    with pytest.raises(PlanningError, match="cannot be written"):
        plan.save(tmp_path / "absent" / "plan.json")


def test_a_file_from_before_fingerprints_of_placements_is_read(plan):
    data = {key: value for key, value in plan.to_json().items() if key != "placed"}
    assert Plan.from_json(data) == plan
    assert not Plan.from_json(data).is_stale


@pytest.mark.parametrize(
    "name", [key for key in make_plan().to_json() if key not in ("autopar", "schema", "fingerprint", "placed")]
)
def test_every_missing_field_is_named(plan, name):
    data = {key: value for key, value in plan.to_json().items() if key != name}
    with pytest.raises(PlanningError, match=f"no field '{name}'"):
        Plan.from_json(data)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[-, tensor] -> [data, tensor]",
            "[-, tensor -> [data, tensor]",
            r"operator 0 \(dot_general at mlp.py:12 .*arrow",
        ),
        ("[-, tensor] -> [data, tensor]", "[-; tensor] -> [data, tensor]", "operand 1: .* is not a placement"),
        ("[-, tensor] -> [data, tensor]", "[-, width] -> [data, tensor]", "axis 'width'; the mesh has data, tensor"),
        ("[-, tensor] -> [data, tensor]", "[-, tensor] -> [data, data]", "result 0: .* 'data' twice"),
        ("add@tensor", "mean@tensor", "is not operands, an arrow|is not a placement"),
        ('"tensor": 2', '"tensor": 0', "size 0"),
        ('"tensor": 2', '"tensor": 4', "needs 16 devices"),
        ('"tensor": 2', '"tensor": "2"', "mesh.tensor should be a whole number"),
        ('"all_reduce", "axes"', '"all_divide", "axes"', r"collectives\[0\].kind is 'all_divide'"),
        ('"float32[64,512]"', '"float32(64,512)"', "a type like"),
        ('"nbytes": {"arguments": 3145728', '"nbytes": {"arguments": 1.5', "nbytes.arguments should be a whole number"),
        ('"microbatches": 1', '"microbatches": null', "microbatches should be a whole number"),
    ],
)
def test_an_edit_that_cannot_be_read_says_where(plan, old, new, message):
    with pytest.raises(PlanningError, match=message):
        Plan.from_json(edited(plan, old, new))


# Plans against their program


def test_a_legal_plan_passes(plan):
    plan.check(GRAPH)
    make_other().check(GRAPH)


def test_another_program_is_refused(plan):
    other = replace(GRAPH, nodes=GRAPH.nodes[:-1], outputs=(8, 1))
    with pytest.raises(PlanMismatchError, match="a plan belongs to one function"):
        plan.check(other)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[-, tensor] -> [data, tensor]", "[-, -] -> [data, tensor]", r"operator 0 .*nearest of \d+ legal placements"),
        (
            "[-, tensor] -> [data, tensor]",
            "[-] -> [data, tensor]",
            r"operand 1: \[-\] has 1 dimension, float32\[512,512\]",
        ),
        ("[data, -] [-, tensor] -> ", "[data, -] -> ", "has 2 operands, the plan places 1"),
        ("-> [data, -] add@tensor", "-> [data, -]", "no cut of this operator gives"),
        ('"placement": "[data, -]"', '"placement": "[data, -] add@tensor"', "input batch.*partial"),
        ('["dot_general"', '["dot"', r"operator 0 \(dot at mlp.py:12 .* is dot_general in the function"),
    ],
)
def test_an_edit_that_is_illegal_says_what_would_be_legal(plan, old, new, message):
    with pytest.raises(PlanMismatchError, match=message):
        Plan.from_json(edited(plan, old, new)).check(GRAPH)


def test_an_axis_must_divide(plan):
    odd = replace(GRAPH, types=(floats(66, 512), *GRAPH.types[1:]))
    with pytest.raises(PlanMismatchError, match=r"dimension 0 of float32\[66,512\] over data, 4 devices.*divide 66"):
        plan.verify(odd)


def test_every_placement_of_a_rule_is_legal(plan):
    rule = rule_of(GRAPH.nodes[0], GRAPH)
    for placement in placements(rule, MESH):
        first = replace(plan.operators[0], placement=placement)
        replace(plan, operators=(first, *plan.operators[1:])).verify(GRAPH)


def test_free_operators_and_aliases_may_lie_anywhere(plan):
    *products, free, alias = plan.operators
    moved = (
        replace(free, placement=placed("[] -> [data, tensor]")),
        replace(alias, placement=placed("[tensor, data] -> [tensor, data]")),
    )
    replace(plan, operators=(*products, *moved)).verify(GRAPH)


def test_what_passes_a_barrier_is_not_moved_by_it(plan):
    *others, alias = plan.operators
    moved = replace(alias, placement=placed("[data, -] -> [tensor, data]"))
    with pytest.raises(PlanMismatchError, match=r"\[data, -\] and leaves as \[tensor, data\]"):
        replace(plan, operators=(*others, moved)).verify(GRAPH)


# Text


@pytest.mark.parametrize("name", ["plan.txt", "plan_operators.txt", "plan_diff.txt"])
def test_golden_text(name):
    assert golden_texts()[name] == (GOLDEN / name).read_text()


@pytest.mark.parametrize("width", [72, 80, 120])
def test_text_keeps_to_its_width(plan, width):
    written = plan.format(operators=True, width=width) + plan.diff(make_other()).format(width=width)
    assert max(map(len, written.splitlines())) <= width


def test_inputs_of_numbered_names_share_a_row(plan):
    written = plan.format()
    assert "params['h_*']['up']" in written
    assert "params['h_0']" not in written


def test_a_plan_without_types_or_cuts_still_prints(plan):
    bare = replace(plan, inputs=(replicated(2),) * 5, input_types=(), collectives=(), replicated=())
    assert "sharded inputs: 0 of 5" in bare.format()
    assert "collectives of one step: 0\n\n" in bare.format()


def test_paths_are_shortened_where_people_read_them(plan):
    first = replace(plan.operators[0], source="/home/ada/lab/models/mlp.py:12 (Layer.__call__)")
    moved = replace(plan, operators=(first, *plan.operators[1:]))
    assert "\n        models/mlp.py:12 (Layer.__call__)" in moved.format(operators=True)
    assert "/home/ada/lab/models/mlp.py:12" in text(moved.to_json())


# Differences


def test_a_plan_does_not_differ_from_itself(plan):
    slower = replace(plan, solution=replace(plan.solution, phase_seconds={"solve": 99.0}))
    assert plan.diff(slower).is_empty
    assert plan.diff(slower).format() == "no difference"


def test_a_difference_counts_what_moved(plan):
    diff = plan.diff(make_other())
    assert not diff.is_empty
    assert [c.name for c in diff.inputs] == list(GRAPH.input_names[1:])
    assert len(diff.operators) == 4
    assert [(a.name, a.before, a.after) for a in diff.tensors] == [("all_reduce tensor", 3, 0)]
    assert [(a.name, a.before, a.after) for a in diff.sent_nbytes] == [("all_reduce tensor", 3 * 2**15, 0)]
    assert {a.name: a.after for a in diff.nbytes}["arguments"] == 5 * 2**20
    json.dumps(diff.to_json(), allow_nan=False)


def test_a_long_difference_names_how_much_is_left_out(plan):
    operators = tuple(replace(plan.operators[0], primitive=f"op{i}") for i in range(30))
    before = replace(plan, operators=operators)
    after = replace(plan, operators=tuple(replace(op, placement=DOWN) for op in operators))
    assert "10 more operators in 10 more groups" in before.diff(after).format()
    assert len(before.diff(after).to_json()["operators"]) == 30


def test_plans_of_different_programs_are_not_compared_by_operator(plan):
    shorter = replace(plan, operators=plan.operators[1:])
    assert not plan.diff(shorter).is_empty
    assert "not compared" in plan.diff(shorter).format()


# Quantities and tables


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0 s"),
        (1.5e-9, "1.50 ns"),
        (1e-12, "0.00 ns"),
        (1.234e-6, "1.23 us"),
        (999.96e-6, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.5, "500 ms"),
        (59.94, "59.9 s"),
        (9.65, "9.65 s"),
        (4321.0, "4321 s"),
        (float("inf"), "inf s"),
    ],
)
def test_seconds(value, written):
    assert quantities.seconds(value) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1023 * 1024, "1.00 MiB"),
        (4.5 * 2**30, "4.50 GiB"),
        (5000 * 2**50, "5000 PiB"),
    ],
)
def test_nbytes(value, written):
    assert quantities.nbytes(value) == written


def test_shares_changes_and_counts():
    assert (quantities.share(1, 8), quantities.share(1, 0)) == ("12.5 %", "-")
    assert [quantities.change(*p) for p in ((2, 2), (2, 3), (2, 1), (0, 1))] == ["=", "+50.0 %", "-50.0 %", "new"]
    assert (quantities.count(1, "device"), quantities.count(2048, "device")) == ("1 device", "2,048 devices")


@given(st.lists(st.tuples(st.text("ab ./]", max_size=90), st.text("xyz", max_size=9)), min_size=1, max_size=4))
def test_wrapping_loses_nothing(rows):
    table = Table(title="", columns=(Column(heading="a", flexible=True), Column(heading="b")), rows=tuple(rows))
    written = table.format(40)
    assert all(len(line) <= 40 for line in written.splitlines())
    for letter in "abxyz./]":
        assert written.count(letter) == sum(cell.count(letter) for cell in itertools.chain(*rows, "ab"))


@pytest.mark.parametrize(
    ("old", "new"),
    [('"microbatches": 1', '"microbatches": 2'), ('"placement": "[data, -]"', '"placement": "[-, data]"')],
    ids=["microbatches", "placement"],
)
def test_numbers_from_before_an_edit_are_marked_until_it_is_undone(plan, old, new):
    read = Plan.from_json(edited(plan, old, new))
    assert read.is_stale
    assert read.counted_for == plan.placed != read.placed
    shown = read.format(width=200)
    assert "The placements were edited" in shown
    assert "--planner manual:" in shown
    assert shown.count("before the edit\n") == 3  # seconds, bytes, collectives
    assert "optimal" not in shown
    assert read.to_json()["edited"] is True
    assert Plan.from_json(read.to_json()) == read
    back = Plan.from_json(edited(read, new, old))
    assert back == plan
    assert not back.is_stale
    assert "edit" not in back.format()
    assert "edited" not in back.to_json()


def golden_texts() -> dict[str, str]:
    plan = make_plan()
    return {
        "plan.txt": plan.format() + "\n",
        "plan_operators.txt": plan.format(operators=True) + "\n",
        "plan_diff.txt": plan.diff(make_other()).format() + "\n",
    }


def refresh() -> None:
    for name, written in golden_texts().items():
        (GOLDEN / name).write_text(written)
    make_plan().save(GOLDEN / "plan.json")
    make_other().save(GOLDEN / "plan_other.json")


if __name__ == "__main__":
    refresh()
