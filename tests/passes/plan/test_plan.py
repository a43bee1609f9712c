"""Plans survive their JSON, and they and their differences read as their golden text.

`python -m tests.passes.plan.test_plan`, run from the checkout, writes the golden files again.
"""

import json
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from passes.cluster import Collective
from passes.errors import InternalError
from passes.ir import TensorType
from passes.placement import Placement
from passes.plan import Operator, Plan, Solution
from passes.plan.json import text
from passes.sharding import REDUCTIONS, ShardingSpec, parse_spec, replicated
from tests.passes.plan.made_up import CLUSTER, DOWN, GRAPH, floats, make_other, make_plan

GOLDEN = Path(__file__).parents[2] / "golden"


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


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_placement_that_is_partial_in_any_way_is_read_back(plan, reduction):
    """A batch of loops, each of which ends by itself, asks whether `any` row goes on."""
    partial = ShardingSpec(dims=((), ("data",)), partial=("tensor",), reduction=reduction)
    first, *others = plan.operators
    placement = replace(first.placement, results=(partial,))
    changed = replace(plan, operators=(replace(first, placement=placement), *others))
    assert Plan.from_json(json.loads(text(changed.to_json()))).operators == changed.operators


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


def test_planning_takes_what_the_whole_search_took(plan):
    """A search over variants of a step takes longer than the phases of the one that was chosen, whose sum was shown."""
    solution = plan.solution.took(42.0)
    assert sum(solution.phase_seconds.values()) == pytest.approx(42.0)
    assert solution.phase_seconds["peaks and variants"] == pytest.approx(42.0 - 1.7)
    assert sum(plan.solution.took(0.0).phase_seconds.values()) == pytest.approx(1.7)


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


def test_a_plan_is_one_line_in_messages():
    assert repr(make_plan()) == "<megatron 4x2 plan, data=4 x tensor=2>"
