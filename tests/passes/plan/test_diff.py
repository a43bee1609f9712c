"""Differences between two plans, piece by piece."""

from passes.cluster import Collective
from passes.plan import Plan
from passes.plan.diff import Amount, Change, amounts, changes, collective_amounts, operator_changes, value_changes
from passes.sharding import parse_spec
from tests.passes.plan.made_up import make_other


def reduction(nbytes: int, count: int, axes: tuple[str, ...] = ("data",)) -> Collective:
    return Collective(kind="all_reduce", axes=axes, dtype="float32", nbytes=nbytes, count=count, where="a.py:1")


def test_only_pairs_that_differ_are_changes() -> None:
    assert changes({"mesh": ("8", "8"), "planner": ("dp", "auto")}) == (
        Change(name="planner", before="dp", after="auto"),
    )


def test_amounts_name_every_cause_or_none() -> None:
    assert amounts({"compute": 1.0}, {"compute": 1.0}) == ()
    assert set(amounts({"compute": 1.0, "copies": 2.0}, {"compute": 1.0, "all_reduce": 3.0})) == {
        Amount(name="compute", before=1.0, after=1.0),
        Amount(name="copies", before=2.0, after=0.0),
        Amount(name="all_reduce", before=0.0, after=3.0),
    }


def test_collectives_are_summed_by_kind_and_axes() -> None:
    before = [reduction(10, 2), reduction(5, 1), reduction(7, 1, ("tensor",))]
    after = [reduction(10, 3), reduction(7, 1, ("tensor",))]
    tensors, nbytes = collective_amounts(before, after)
    assert [(a.name, a.before, a.after) for a in tensors] == [("all_reduce data", 3, 3)]
    assert [(a.name, a.before, a.after) for a in nbytes] == [("all_reduce data", 25, 30)]
    assert collective_amounts(before, before[::-1]) == ((), ())


def test_an_input_that_one_plan_lacks_is_absent_there() -> None:
    whole, cut = parse_spec("[-]"), parse_spec("[data]")
    changes_found = value_changes((("a", "b"), ("a", "c")), ((whole, whole), (cut, whole)))
    assert {(c.name, c.before, c.after) for c in changes_found} == {
        ("a", str(whole), str(cut)),
        ("b", str(whole), "absent"),
        ("c", "absent", str(whole)),
    }


def test_operators_are_compared_one_by_one(plan: Plan) -> None:
    other = make_other()
    changes_found = operator_changes(plan.operators, other.operators)
    moved = [a for a, b in zip(plan.operators, other.operators, strict=True) if a.placement != b.placement]
    assert [change.where for change in changes_found] == [operator.source for operator in moved]
    assert operator_changes(plan.operators, plan.operators) == ()
