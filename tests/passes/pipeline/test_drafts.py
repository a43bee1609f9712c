"""Bounds of pipelines are never above what the simulator says of them."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from passes.errors import PlanningError
from passes.inter_op import (
    SCHEDULES,
    LowerBound,
    NamedSchedule,
    StageCost,
    Transfer,
    build,
    is_chunked,
    simulate,
    splits_backward,
)
from passes.inter_op.schedules import in_flight
from passes.limits import Limits
from passes.pipeline.draft_prices import least_seconds
from passes.pipeline.search import StagedSearch
from passes.pipeline.shapes import Draft, Shape
from tests.sample import some


def drawn(seed: int, name: str) -> tuple[Shape, int, list[StageCost], list[Transfer]]:
    """A shape in so many microbatches, what its stages cost and what crosses between them."""
    r = random.Random(repr((seed, name)))
    groups, chunks = r.randint(2, 4), r.randint(2, 3) if is_chunked(name) else 1
    count = groups * r.randint(1, 4) if chunks > 1 else r.randint(1, 9)
    scale = r.choice((0.01, 1.0, 10.0))

    def cost() -> StageCost:
        inputs, weights = r.random(), r.random()
        return StageCost(
            forward_seconds=r.random(),
            backward_seconds=inputs + weights,
            input_gradient_seconds=inputs,
            weight_gradient_seconds=weights,
            finish_seconds=scale * r.random(),
        )

    costs = [cost() for _ in range(groups * chunks)]
    hops = [Transfer(forward_seconds=scale * r.random(), backward_seconds=scale * r.random()) for _ in costs[1:]]
    return Shape(begins=tuple(range(len(costs))), devices=(1,) * groups), count, costs, hops


def bound(shape: Shape, count: int, costs: list[StageCost], hops: list[Transfer], name: str) -> float:
    busy = [cost.forward_seconds + cost.backward_seconds for cost in costs]
    floors = [LowerBound(own, own + cost.finish_seconds / count, 0.0) for own, cost in zip(busy, costs, strict=True)]
    return least_seconds(floors, hops, shape, count, splits_backward(name))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", some(range(60), 20))
def test_no_pipeline_takes_less_than_its_bound(seed: int, name: str) -> None:
    shape, count, costs, hops = drawn(seed, name)
    seconds = simulate(build(name, len(costs), count, shape.chunks), costs, hops).seconds
    assert 0 < bound(shape, count, costs, hops, name) <= seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_the_bound_of_equal_stages_without_transfers_is_what_they_take(name: str) -> None:
    cost, hop = StageCost.split(1, 1, 1), Transfer(forward_seconds=0, backward_seconds=0)
    shape = Shape(begins=(0, 1, 2, 3), devices=(1,) * 4)
    seconds = simulate(build(name, 4, 8, 1), [cost] * 4, [hop] * 3).seconds
    assert bound(shape, 8, [cost] * 4, [hop] * 3, name) == pytest.approx(seconds)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", some(range(60), 20))
def test_seconds_and_bytes_without_a_timeline_are_those_of_the_timeline(seed: int, name: str) -> None:
    shape, count, costs, hops = drawn(seed, name)
    costs = [replace(one, in_flight_nbytes=7 * at + 3, persistent_nbytes=at % 3) for at, one in enumerate(costs)]
    schedule, tasks = (
        build(name, len(costs), count, shape.chunks),
        NamedSchedule(name, len(costs), count, shape.chunks),
    )
    for overlap in (0.0, 0.5, 1.0):
        timeline = simulate(schedule, costs, hops, dispatch_seconds=0.125, overlap=overlap)
        assert tasks.seconds(costs, hops, 0.125, overlap) == pytest.approx(timeline.seconds)
    assert tasks.peak_nbytes(costs) == max(timeline.peak_nbytes)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_as_much_is_in_flight_in_few_rounds_as_in_many(groups: int, chunks: int) -> None:
    each = [random.Random(stage).randint(1, 100) for stage in range(groups * chunks)]
    for rounds in range(1, 9):
        schedule = build("interleaved", groups * chunks, rounds * groups, chunks)
        tasks = NamedSchedule("interleaved", groups * chunks, rounds * groups, chunks)
        assert tasks.in_flight(each) == list(in_flight(schedule, each))


EVEN = Shape(begins=(0, 2), devices=(1, 1))


def drafted(*, microbatches: int, seconds: float, nbytes: int, shape: Shape = EVEN) -> Draft:
    """A draft of a step of four equal blocks."""
    step = SimpleNamespace(samples={1: None}, cuts=lambda count: SimpleNamespace(even={2: (0, 2)}))
    table: Any = SimpleNamespace(step=step)
    return Draft(
        shape=shape, microbatches=microbatches, schedule="1f1b", seconds=seconds, peak_nbytes=nbytes, table=table
    )


class Plans:
    """Plans of drafts by their seconds: what takes less than 2 s cannot be planned, though its blocks can."""

    def plan(self, draft: Draft) -> SimpleNamespace:
        if draft.seconds < 2:
            raise PlanningError("this stage cannot be there")
        return SimpleNamespace(seconds=draft.seconds, peak_nbytes=draft.peak_nbytes)


def test_an_interrupted_search_takes_the_first_draft_that_can_be_planned() -> None:
    drafts = [drafted(microbatches=n, seconds=float(n), nbytes=9 if n == 2 else 1) for n in (3, 1, 2)]
    search = object.__new__(StagedSearch)
    search.options = SimpleNamespace(limits=Limits.equal(5.0))
    search.plans = Plans()
    plan = search._of_drafts_so_far(SimpleNamespace(drafts=drafts))
    assert plan is not None
    assert plan.seconds == 3


@pytest.mark.parametrize(
    ("begins", "devices", "hand_made"), [((0, 2), (2, 2), 1), ((0, 3), (2, 2), 0), ((0, 2), (1, 3), 0)]
)
def test_hand_made_stages_are_even_and_on_equal_submeshes(
    begins: tuple[int, ...], devices: tuple[int, ...], hand_made: int
) -> None:
    """They may need all that there is, searched ones leave a margin."""
    draft = drafted(microbatches=4, seconds=1.0, nbytes=15, shape=Shape(begins=begins, devices=devices))
    limits = Limits(searched=10.0, hand_made=20.0)
    assert draft.excess(limits) == (0.75 if hand_made else 1.5)
    assert draft.excess(limits.times(3)) == (0.25 if hand_made else 0.5)
