"""The figures that a plan promises, by their closed forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from passes.inter_op import StageCost, Transfer
from passes.plan import Estimate, PipelinePlan, Plan
from tests.passes.plan.made_up import CLUSTER, DEVICE, make_plan

PHASES = {"forward": 8.0, "backward": 16.0, "apply": 4.0}


def stage(**changes: Any) -> Plan:
    """A stage's plan that spends 28 seconds, all of them on computing unless it says otherwise."""
    return replace(make_plan(), **{"seconds": {"compute": 28.0}, "phases": PHASES, "computing": PHASES} | changes)


def pipeline(
    p: int, m: int, *, plan: Plan | None = None, transfer: float = 0.0, finish: float = 0.0, schedule: str = "1f1b"
) -> PipelinePlan:
    """Equal stages, forward 1 s and backward 2 s a microbatch, whose host starts tasks at no cost."""
    (group,) = CLUSTER.groups
    device = replace(DEVICE, dispatch_seconds=0.0)
    cluster = replace(CLUSTER, groups=(replace(group, hosts=p * group.hosts, device=device),))
    plan = plan or stage()
    return PipelinePlan(
        fingerprint=plan.fingerprint,
        cluster=cluster,
        planner="made up",
        schedule_name=schedule,
        chunks=1,
        microbatches=m,
        firsts=tuple(range(p)),
        stages=(plan,) * p,
        costs=(StageCost(forward_seconds=1.0, backward_seconds=2.0, finish_seconds=finish),) * p,
        transfers=(Transfer(forward_seconds=transfer, backward_seconds=transfer),) * (p - 1),
        sent_nbytes=(0,) * p,
        input_names=plan.input_names,
        output_names=plan.output_names,
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 1), (2, 8), (4, 8), (4, 32)])
def test_the_bubble_of_equal_stages_is_the_textbooks(p: int, m: int, schedule: str) -> None:
    estimate = Estimate.of(pipeline(p, m, schedule=schedule))
    assert estimate.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert estimate.step_seconds == pytest.approx(3.0 * (m + p - 1))


def test_a_plan_of_one_mesh_has_no_bubble_and_exposes_its_collectives() -> None:
    estimate = Estimate.of(stage(seconds={"compute": 3.0, "all_reduce": 0.75, "all_gather": 0.25, "copies": 1.0}))
    assert (estimate.bubble, estimate.exposed_seconds, estimate.exposed_share) == (0.0, 1.0, 0.2)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_transfers_are_exposed_where_a_stage_waits_for_them(p: int) -> None:
    """One microbatch waits for each boundary twice; with none to wait for, nothing is exposed."""
    assert Estimate.of(pipeline(p, 1, transfer=0.5)).exposed_seconds == pytest.approx(2 * (p - 1) * 0.5)
    assert Estimate.of(pipeline(p, 8)).exposed_seconds == 0.0


def test_of_a_pipeline_the_collectives_of_every_phase_are_exposed_where_they_are() -> None:
    """A fourth of the forward, half of the backward and all of the end of a step: 2 x (1/4 + 2/2) + 3 of 9 seconds."""
    computing = {"forward": 6.0, "backward": 8.0, "apply": 0.0}
    plan = stage(computing=computing, seconds={"compute": 14.0, "all_reduce": 14.0})
    estimate = Estimate.of(pipeline(1, 2, plan=plan, finish=3.0))
    assert estimate.step_seconds == pytest.approx(9.0)
    assert estimate.exposed_seconds == pytest.approx(2 * (0.25 + 1.0) + 3.0)
    copies = replace(plan, seconds={"compute": 14.0, "all_reduce": 7.0, "copies": 7.0})
    assert Estimate.of(pipeline(1, 2, plan=copies, finish=3.0)).exposed_seconds == pytest.approx(2.75)


def test_utilization_is_model_flops_by_the_peak_of_the_dtype_of_most() -> None:
    plan = stage(flops={"bfloat16": 6e12, "float32": 2e12}, seconds={"compute": 0.25})
    estimate = Estimate.of(plan)
    assert (estimate.dtype, estimate.devices) == ("bfloat16", 8)
    assert estimate.flops_per_second_per_device == 8e12 / 0.25 / 8
    assert estimate.mfu == pytest.approx(4e12 / 312e12)
    staged = Estimate.of(pipeline(2, 4, plan=plan))
    assert (staged.flops, staged.devices, staged.dtype) == (16e12, 16, "bfloat16")


def test_a_dtype_that_is_computed_in_another_has_its_peak() -> None:
    widened = replace(DEVICE, widened={"bfloat16": "float32"})
    cluster = replace(CLUSTER, groups=(replace(CLUSTER.groups[0], device=widened),))
    plan = stage(flops={"bfloat16": 1e12})
    assert Estimate.of(replace(plan, cluster=cluster)).peak_flops_per_second == 156e12
    assert Estimate.of(replace(plan, flops={"float16": 1e12})).peak_flops_per_second == 156e12


def test_figures_that_an_earlier_plan_lacks_are_none() -> None:
    plan = stage(computing={}, flops={})
    estimate = Estimate.of(pipeline(2, 2, plan=plan))
    assert (estimate.exposed_seconds, estimate.exposed_share, estimate.mfu) == (None, None, None)


def test_days_are_tokens_by_tokens_a_second_and_cost_is_by_device_and_hour() -> None:
    estimate = Estimate.of(stage(seconds={"compute": 2.0}))
    per_second = 4096 / 2.0
    assert estimate.days(per_second * 86400 * 3, 4096) == pytest.approx(3.0)
    assert estimate.cost(per_second * 86400 * 3, 4096, 2.5) == pytest.approx(3 * 24 * 8 * 2.5)


def test_a_file_keeps_what_estimates_are_made_of(tmp_path: Any) -> None:
    plan = pipeline(2, 4, plan=stage(flops={"bfloat16": 6e12}, computing={"forward": 1.0, "backward": 2.0}))
    plan.save(tmp_path / "plan.json")
    loaded = PipelinePlan.load(tmp_path / "plan.json")
    assert Estimate.of(loaded) == Estimate.of(plan)
