"""Planners on a graph that no function was traced for: Auto against hand-made ones, and limits that nothing keeps."""

from __future__ import annotations

import pytest

from passes.cluster import parse_cluster
from passes.errors import OverBudgetError, PlanningError
from passes.memory import margin_of
from passes.planners import Auto, DataParallel, Megatron, Planner, PlanOptions, Zero
from passes.planners.planner import limit_nbytes
from passes.solver import SolverOptions
from passes.step import Step
from tests.passes.intra_op.small_step import STATE
from tests.passes.intra_op.small_step import step as graph_of
from tests.sample import slow

CLUSTER = parse_cluster("4:a100-80g")
STEP = Step(graph=graph_of(), state_pairs=STATE, donated=(True, True, False))


@pytest.mark.parametrize("planner", [DataParallel(), Zero(1), Zero(3), Megatron(data=2, tensor=2)], ids=repr)
def test_no_hand_made_plan_is_faster_than_the_one_that_is_searched(planner: Planner) -> None:
    searched, hand_made = (p.plan(STEP, CLUSTER, PlanOptions()) for p in (Auto(), planner))
    assert searched.step is hand_made.step is STEP
    assert searched.plan.step_seconds <= hand_made.plan.step_seconds
    assert searched.searched
    assert not hand_made.searched


def test_a_limit_that_nothing_keeps_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(
        OverBudgetError, match=r"4 devices with 1\.00 KiB each(?s:.*)\(memory_limit=[\d,]+ bytes\)"
    ) as error:
        Auto().plan(STEP, CLUSTER, PlanOptions(memory_limit=1024))
    least = int(str(error.value).partition("(memory_limit=")[2].partition(" bytes")[0].replace(",", ""))
    assert Auto(memory_limit=least).plan(STEP, CLUSTER).plan.peak_nbytes <= least


@pytest.mark.parametrize(
    ("limits", "expected"), [((), None), ((None, 7), 7), (("12 GiB", 7), 12 * 2**30), (("1.5 kB",), 1500)]
)
def test_the_first_limit_counts(limits: tuple[object, ...], expected: int | None) -> None:
    assert limit_nbytes(*limits) == expected


@pytest.mark.parametrize("limit", [0, -1, float("inf"), True, "twelve", [1]])
def test_a_limit_that_is_no_number_of_bytes_is_refused(limit: object) -> None:
    with pytest.raises(PlanningError):
        limit_nbytes(limit)


@pytest.mark.parametrize("cluster", ["4:h100", slow("4:tpu-v5e"), slow("4:a100-80g")])
def test_a_limit_leaves_free_what_an_accelerators_compiler_may_need_more(cluster: str) -> None:
    """The limit that the message names has room for the margin, too, and is kept with it."""
    machine = parse_cluster(cluster)
    margin = margin_of(machine.group().device)
    assert 0.0 < margin < 0.25
    with pytest.raises(OverBudgetError) as caught:
        Auto(memory_limit=1).plan(STEP, machine)
    least = caught.value.least_memory_plan
    assert least is not None
    named = int(str(caught.value).split("memory_limit=")[1].split(" ")[0].replace(",", ""))
    assert named >= (1 + margin) * least.peak_nbytes > least.peak_nbytes
    planned = Auto(memory_limit=named).plan(STEP, machine).plan
    assert (1 + margin) * planned.peak_nbytes <= named


def test_a_limit_that_nothing_keeps_is_refused_as_one_when_there_is_no_time() -> None:
    with pytest.raises(OverBudgetError, match="the plan of least memory found needs"):
        Auto(memory_limit=1, solver=SolverOptions(time_limit=0.0)).plan(STEP, CLUSTER)
