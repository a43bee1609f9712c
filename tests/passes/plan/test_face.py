"""A plan of one mesh and one of a pipeline are shown, saved and loaded by one face."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from passes.errors import PlanningError
from passes.plan import INTERRUPTED, AnyPlan, PipelinePlan, Plan
from passes.plan.reading import SCHEMA, read_plan
from passes.plan.storable import Storable
from passes.step import Variant
from tests.passes.plan.made_up import make_pipeline, make_plan


@pytest.mark.parametrize(
    ("plan", "devices", "shape"),
    [(make_plan(), 8, "data=4 x tensor=2"), (make_pipeline(), 16, "2 stages")],
    ids=["mesh", "pipeline"],
)
def test_a_plan_says_the_same_things_of_whatever_kind_it_is(
    plan: AnyPlan, devices: int, shape: str, tmp_path: Path
) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = type(plan).load(tmp_path / "plan.json")
    assert (loaded, loaded.step_seconds, loaded.peak_nbytes) == (plan, plan.step_seconds, plan.peak_nbytes)
    assert plan.n_devices == devices
    assert shape in plan.shape
    assert plan.step_seconds > 0
    assert not plan.is_interrupted
    assert str(plan) == plan.format() == "\n\n".join(table.format(80) for table in plan.tables())
    assert len(plan.format(operators=True)) > len(plan.format())


def test_the_fullest_device_and_the_last_task_count() -> None:
    plan = make_pipeline()
    assert plan.peak_nbytes == 300
    # Two forwards and backwards of one stage in a row, and the other stage's with the way there and back.
    assert plan.step_seconds >= 2 * (1.0 + 2.0) + (1.0 + 2.0) + 0.25 + 0.5


def test_a_pipeline_that_lacks_what_a_stage_sends_is_refused() -> None:
    with pytest.raises(PlanningError, match="bytes it sends for each stage"):
        replace(make_pipeline(), sent_nbytes=(8,)).verify()


@pytest.mark.parametrize(("kind", "other"), [(Plan, make_pipeline()), (PipelinePlan, make_plan())])
def test_a_file_of_the_other_kind_is_refused_by_its_name(kind: type[AnyPlan], other: AnyPlan, tmp_path: Path) -> None:
    other.save(tmp_path / "other.json")
    with pytest.raises(PlanningError, match=r"other\.json"):
        kind.load(tmp_path / "other.json")


@pytest.mark.parametrize("plan", [make_plan(), make_pipeline()], ids=["mesh", "pipeline"])
def test_plans_of_one_mesh_and_of_pipelines_have_the_same_properties(plan: AnyPlan) -> None:
    assert isinstance(plan, Storable)
    assert all(type(program) is Plan for program in plan.programs)
    assert (plan.timeline is None) == (len(plan.programs) == 1)
    assert plan.gap == max(program.gap for program in plan.programs)
    assert sum(plan.nbytes.values()) == plan.peak_nbytes
    assert plan.collectives == sum((program.collectives for program in plan.programs), ())
    ended = plan.ended(INTERRUPTED)
    assert ended.is_interrupted
    assert not plan.is_interrupted
    assert plan.diff(plan).is_empty
    assert not plan.diff(ended).is_empty
    assert plan.variant().count == plan.microbatches
    elsewhere = plan.on(replace(plan.cluster, name="elsewhere"))
    assert [program.mesh.cluster.name for program in elsewhere.programs] == ["elsewhere"] * len(plan.programs)


def test_plans_of_different_kinds_are_compared() -> None:
    plan, pipeline = make_plan(), make_pipeline()
    there, back = plan.diff(pipeline), pipeline.diff(plan)
    assert ("stages", "none", "2") in [(c.name, c.before, c.after) for c in there.words]
    assert [(c.name, c.after, c.before) for c in back.words] == [(c.name, c.before, c.after) for c in there.words]
    assert [(a.before, a.after) for a in there.seconds] == [(plan.step_seconds, pipeline.step_seconds)]


def test_a_plan_says_which_variant_of_the_step_it_is_of() -> None:
    variant = Variant(microbatches=4, kept=("inputs", "matmuls"))
    assert make_plan().of_variant(variant).variant() == variant
    kept = Variant(microbatches=2, kept=variant.kept, stages=2)
    assert make_pipeline().of_variant(kept).variant() == kept
    assert make_pipeline().variant() == Variant(microbatches=2, stages=2)
    assert make_pipeline().variant(8) == Variant(microbatches=2, stages=8)


def test_a_file_of_another_schema_names_both() -> None:
    data = make_plan().to_json() | {"schema": SCHEMA + 1}
    with pytest.raises(PlanningError, match=f"has schema {SCHEMA + 1}, .* reads schema {SCHEMA}"):
        read_plan(data, Plan)
    data = make_pipeline().to_json() | {"schema": SCHEMA + 1}
    with pytest.raises(PlanningError, match=f"has schema {SCHEMA + 1}, .* reads schema {SCHEMA}. Plan again"):
        PipelinePlan.from_json(data)


def test_an_argument_that_is_no_path_or_plan_is_named_with_the_call() -> None:
    nothing: Any = None
    number: Any = 5
    with pytest.raises(PlanningError, match=r"^Plan\.save\(None\): a file goes by its path"):
        make_plan().save(nothing)
    with pytest.raises(PlanningError, match=r"^PipelinePlan\.load\(5\): a file goes by its path"):
        PipelinePlan.load(number)
    for plan in (make_plan(), make_pipeline()):
        with pytest.raises(PlanningError, match=r"^plan\.diff\(None\): plans are compared with plans"):
            plan.diff(nothing)
