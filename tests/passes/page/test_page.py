"""The page of a plan: every operator is on it once, its numbers are the plan's, and nothing of the user's ends it."""

import html as markup
import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import autopar
from passes.errors import PlanningError
from passes.inter_op import SCHEDULES, StageCost
from passes.layers import layer_names
from passes.page import Measured, html, page_data
from passes.page.blocks import blocks_of
from passes.page.data import Pool
from passes.page.html import SCRIPTS, asset
from passes.page.measured import MeasuredSpan
from passes.plan import Alternative, AnyPlan
from passes.plan.account import alternatives_from_json
from passes.plan.json import as_object
from passes.plan.text import everything
from tests.passes.plan.made_up import make_pipeline, make_plan

PLANS = [make_plan(), make_pipeline()]


@pytest.mark.parametrize("plan", PLANS, ids=["mesh", "pipeline"])
def test_every_operator_is_in_one_block_of_its_stage(plan: AnyPlan) -> None:
    blocks = blocks_of(plan.programs)
    for stage, program in enumerate(plan.programs):
        counted = sum(block.operators for block in blocks if block.stage == stage)
        assert counted == sum(1 for _ in everything(program.operators))


def test_operators_of_a_block_are_listed_by_phase() -> None:
    plan = make_plan()
    transposed = replace(plan.operators[0], scope="transpose(jvp(h_0))")
    blocks = blocks_of((replace(plan, operators=(*plan.operators, transposed)),))
    listed = {block.name: {at: sum(row.count for row in rows) for at, rows in block.rows.items()} for block in blocks}
    assert listed == {"h_0": {"forward": 2, "backward": 1}, "h_1": {"forward": 2}, layer_names.UPDATE: {"apply": 2}}


def test_equal_layers_share_their_list_of_operators() -> None:
    data = page_data(make_plan())
    lists = {name: places for name, _, _, places, _ in data["blocks"]}  # pyright: ignore
    assert lists["h_0"] == lists["h_1"] != lists[layer_names.UPDATE]


def test_a_pool_has_each_entry_once() -> None:
    pool = Pool()
    assert [pool.at(word) for word in "abca"] == [0, 1, 2, 0]
    assert pool.entries == ["a", "b", "c"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_over_time_reaches_the_peak_that_the_simulation_has(schedule: str) -> None:
    cost = StageCost(
        forward_seconds=1.0,
        backward_seconds=2.0,
        input_gradient_seconds=1.0,
        weight_gradient_seconds=1.0,
        finish_seconds=0.5,
        in_flight_nbytes=7,
        persistent_nbytes=100,
        working_nbytes=3,
        finish_nbytes=2,
    )
    chunks = 2 if "interleaved" in schedule else 1
    plan = make_pipeline()
    stages, costs = plan.stages * chunks, (cost, replace(cost, in_flight_nbytes=20)) * chunks
    plan = replace(
        plan,
        schedule_name=schedule,
        chunks=chunks,
        microbatches=4,
        stages=stages,
        costs=costs,
        firsts=tuple(range(len(stages))),
        transfers=plan.transfers * (len(stages) - 1),
        sent_nbytes=(8,) * len(stages),
    )
    curves = page_data(plan)["memory"]
    tops = [max(size for _, size in curve["points"]) for curve in curves]  # pyright: ignore
    assert tops == list(plan.timeline.peak_nbytes)


def test_spans_on_the_page_are_those_of_the_timeline() -> None:
    plan = make_pipeline()
    drawn = page_data(plan)["timeline"]
    assert len(drawn["spans"]) == len(plan.timeline.spans)  # pyright: ignore
    assert max(end for *_, end in drawn["spans"]) == pytest.approx(plan.timeline.seconds)  # pyright: ignore


def test_the_dearest_collectives_come_first_and_are_priced_as_the_plan_has_them() -> None:
    plan = make_plan()
    dearest = page_data(plan)["dearest"]
    spent = [one["seconds"] for one in dearest]  # pyright: ignore
    assert spent == sorted(spent, reverse=True)
    assert sum(spent) == pytest.approx(sum(c.seconds(plan.mesh) for c in plan.collectives))


def test_a_page_needs_nothing_from_elsewhere_and_no_name_ends_it() -> None:
    name = "params['</script><script>alert(1)</script>']"
    plan = make_plan()
    plan = replace(plan, input_names=(name, *plan.input_names[1:]))
    page = html(plan)
    assert "default-src 'none'" in page
    assert set(re.findall(r"https?://[^\"' ]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"(?!data:)", page)
    assert page.count("</script>") == 2
    embedded = re.search(r'<script id="plan" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert embedded
    assert name in json.loads(embedded[1])["texts"]


def test_a_page_tells_what_was_rejected() -> None:
    plan = make_plan().beside([Alternative(name="mesh x=8", seconds=2.0, why="dearer")])
    assert page_data(plan)["alternatives"] == [{"name": "mesh x=8", "seconds": 2.0, "peak": None, "why": "dearer"}]


@pytest.mark.parametrize("plan", PLANS, ids=["mesh", "pipeline"])
def test_a_saved_plan_keeps_what_was_rejected_and_the_cheapest_of_each_name(plan: AnyPlan, tmp_path: Path) -> None:
    others = [Alternative(name=f"mesh x={i % 20}", seconds=float(30 - i), why="dearer") for i in range(30)]
    kept = plan.beside(others).beside([Alternative(name="none", seconds=99.0, why="", peak_nbytes=3)])
    kept.save(tmp_path / "plan.json")
    assert type(plan).load(tmp_path / "plan.json") == kept != plan
    assert [one.seconds for one in kept.met] == [float(n) for n in range(1, 13)]


def test_a_field_of_what_was_rejected_is_named_where_it_is_wrong() -> None:
    fields = as_object({"alternatives": [{"name": "mesh x=8", "seconds": "soon", "why": ""}]}, "solution")
    with pytest.raises(PlanningError, match=r"solution.alternatives\[0\].seconds should be a number"):
        alternatives_from_json(fields)


def test_a_search_tells_of_the_other_meshes() -> None:
    step = autopar.parallelize(lambda w, x: x @ w, cluster="2x2:a100-80g")
    plan = step.plan(jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32"))
    (other,) = {"mesh x=4", "mesh x=2 x y=2"} - {f"mesh {plan.mesh}"}
    assert other in [one.name for one in plan.met]
    assert all(one.seconds >= plan.step_seconds for one in plan.met)


def test_scripts_are_short_and_have_short_functions() -> None:
    for script in SCRIPTS:
        lines = asset(script).splitlines()
        assert len(lines) < 400
        starts = [i for i, line in enumerate(lines) if line.startswith("function ")]
        for start in starts:
            end = next(i for i in range(start, len(lines)) if lines[i] == "}")
            assert end - start < 60, lines[start]


def test_measured_tasks_are_of_kinds_that_the_schedule_has() -> None:
    """A plan of another schedule may be of the same program in as many stages."""
    plan = make_pipeline()
    span = MeasuredSpan(group=0, stage=0, microbatch=0, kind="forward", start_seconds=0.0, end_seconds=1.0)
    measured = Measured(program=plan.fingerprint, shape=plan.shape, step_seconds=1.0, spans=(span,))
    assert "forward" in html(plan, measured)
    wrong = replace(measured, spans=(span, replace(span, kind="input_gradient")))
    with pytest.raises(PlanningError, match=r"of kind 'input_gradient', and the plan's schedule has .*forward"):
        html(plan, wrong)


def test_a_notebook_shows_a_plan_as_its_page(tmp_path) -> None:
    make_plan().save(tmp_path / "plan.json")
    plan = autopar.Plan.load(tmp_path / "plan.json")
    shown = plan._repr_html_()
    assert markup.escape(plan.to_html()) in shown
    assert shown.startswith("<iframe")
