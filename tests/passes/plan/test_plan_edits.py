"""Plan files that cannot be read say where; edits that cannot be are refused, and stale numbers are marked."""

from dataclasses import replace

import pytest

from passes.errors import PlanMismatchError, PlanningError
from passes.plan import Plan
from passes.plan.legality import placements
from passes.rules import rule_of
from tests.passes.plan.made_up import GRAPH, MESH, edited, floats, make_other, make_plan, placed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"format": NaN}', "NaN is no number of JSON"),
        ('{"format": -Infinity}', "-Infinity is no number of JSON"),
        ("[]", "should be an object"),
        ("{}", "not a plan"),
        ('{"schema": 1}', "not a plan"),
        ('{"schema": 99, "autopar": "7.0", "fingerprint": "f"}', r"schema 99, written by autopar 7\.0.*reads schema 1"),
        ('{"schema": 1, "autopar": "7.0", "fingerprint": "f"}', "no field 'cluster'"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, content, message):
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
        ('"microbatches": 1', '"microbatches": 0', "microbatches should be a whole number from 1, and is 0"),
    ],
)
def test_an_edit_that_cannot_be_read_says_where(plan, old, new, message):
    with pytest.raises(PlanningError, match=message):
        Plan.from_json(edited(plan, old, new))


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
    legal = list(placements(rule_of(GRAPH.nodes[0], GRAPH), MESH))
    assert len(set(map(str, legal))) == len(legal) > 1
    for placement in legal:
        first = replace(plan.operators[0], placement=placement)
        replace(plan, operators=(first, *plan.operators[1:])).verify(GRAPH)


def test_free_operators_and_aliases_may_lie_anywhere(plan):
    *products, free, alias = plan.operators
    moved = (
        replace(free, placement=placed("[] -> [data, tensor]")),
        replace(alias, placement=placed("[tensor, data] -> [tensor, data]")),
    )
    replace(plan, operators=(*products, *moved)).verify(GRAPH)


def test_a_barrier_changes_no_placement(plan):
    *others, alias = plan.operators
    moved = replace(alias, placement=placed("[data, -] -> [tensor, data]"))
    with pytest.raises(PlanMismatchError, match=r"\[data, -\] and leaves as \[tensor, data\]"):
        replace(plan, operators=(*others, moved)).verify(GRAPH)


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
