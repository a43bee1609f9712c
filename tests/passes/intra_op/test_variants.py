"""The trials of variants: those that wait, those that do not fit, and plans that are put off until the search ends."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from passes.intra_op import variants
from passes.intra_op.incumbent import Incumbent
from passes.intra_op.unfit_trials import Trial, UnfitTrials
from passes.intra_op.variant_trials import VariantTrials
from passes.intra_op.variants import cheapest_variant
from passes.limits import Limits
from passes.plan import INTERRUPTED
from passes.progress import Deadline, SearchContext
from passes.step import Variant


@dataclass
class Found:
    """As much of a plan as the search looks at."""

    step_seconds: float
    status: str = ""

    def ended(self, status: str) -> Found:
        return Found(self.step_seconds, status)


def searching(seconds: float, deadline: Deadline | None = None) -> VariantTrials:
    """A search at a plan of so many seconds, where one is what the step takes without a limit."""
    context = SearchContext(deadline=deadline or Deadline(), interruptible=True)
    search = VariantTrials(step=cast("Any", None), limits=Limits.equal(1.0), search=cast("Any", None), context=context)
    search.incumbent = Incumbent(best=cast("Any", Found(seconds)), least_seconds=1.0)
    search.put_off()
    return search


@pytest.mark.parametrize(("seconds", "deadline", "waits"), [(3.9, None, False), (4.1, None, True), (4.1, 60.0, False)])
def test_a_plan_by_offloading_waits_where_it_is_slow_and_time_is_not_short(
    seconds: float, deadline: float | None, waits: bool
):
    search = searching(seconds, Deadline(deadline))
    assert (search.best is None) == waits
    assert (search.incumbent.by_offloading is not None) == waits


def test_an_interruption_takes_the_plan_that_waits(monkeypatch: pytest.MonkeyPatch):
    def interrupted(trials: VariantTrials) -> None:
        raise KeyboardInterrupt

    search = searching(5.0)
    monkeypatch.setattr(variants, "_cheapest", interrupted)
    plan: Any = cheapest_variant(search)
    assert (plan.step_seconds, plan.status) == (5.0, INTERRUPTED)


def unfit(count: int, expected_nbytes: float, lowest_nbytes: float = 0.0, *, left_out: bool = False) -> Trial:
    """A trial in so many microbatches whose plans exceed the limit."""
    search = SimpleNamespace(
        expected_nbytes=expected_nbytes,
        problems=SimpleNamespace(lowest_nbytes=lowest_nbytes),
        hand_made=SimpleNamespace(left_out=left_out),
    )
    return Trial(variant=Variant(microbatches=count), search=cast("Any", search))


@pytest.mark.parametrize(("count", "nbytes"), [(2, 80.0), (4, 80.0), (8, 40.0), (16, 20.0)])
def test_bytes_are_expected_by_the_same_variant_in_other_microbatches(count: int, nbytes: float):
    trials = UnfitTrials()
    assert trials.expected_nbytes(Variant(microbatches=count)) == 0
    trials.put_off(unfit(4, 80.0))
    assert trials.expected_nbytes(Variant(microbatches=count)) == nbytes
    assert trials.expected_nbytes(Variant(microbatches=count, offload=True)) == 0


def test_the_variants_of_least_memory_are_kept_and_those_whose_hand_made_plans_were_left_out():
    trials = UnfitTrials()
    for count, nbytes in ((1, 9.0), (2, 5.0), (4, 7.0), (8, 3.0), (16, 4.0)):
        trials.add(unfit(count, 10.0, nbytes, left_out=count == 2))
    assert [trial.variant.count for trial in trials.low_memory] == [8, 16, 2, 4]
    assert [trial.variant.count for trial in trials.refused] == [2]
    assert not trials.waiting
