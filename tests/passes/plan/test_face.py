"""A plan of one mesh and one of a pipeline are shown, saved and loaded by one face."""

from dataclasses import replace
from pathlib import Path

import pytest

from passes.errors import PlanningError
from passes.inter_op import StageCost, Transfer
from passes.plan import AnyPlan, PipelinePlan, Plan
from tests.passes.plan.made_up import CLUSTER, make_plan


def make_pipeline() -> PipelinePlan:
    """Two stages of equal plans, each on a cluster's devices of its own, with two microbatches."""
    stage, cost = make_plan(), StageCost(forward_seconds=1.0, backward_seconds=2.0, persistent_nbytes=100)
    (group,) = CLUSTER.groups
    return PipelinePlan(
        fingerprint=stage.fingerprint,
        cluster=replace(CLUSTER, groups=(replace(group, hosts=2 * group.hosts),)),
        planner="made up",
        schedule_name="1f1b",
        chunks=1,
        microbatches=2,
        firsts=(0, 1),
        stages=(stage, stage),
        costs=(cost, replace(cost, persistent_nbytes=300)),
        transfers=(Transfer(forward_seconds=0.25, backward_seconds=0.5),),
        sent_nbytes=(8, 0),
        input_names=stage.input_names,
        output_names=stage.output_names,
    )


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
