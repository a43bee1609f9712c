"""A plan that waits until the end of the search over variants is there whenever that ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from passes.intra_op import variants
from passes.intra_op.incumbent import Incumbent
from passes.intra_op.variant_trials import VariantTrials
from passes.intra_op.variants import cheapest_variant
from passes.plan import INTERRUPTED
from passes.progress import Deadline, SearchContext


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
    search = VariantTrials(step=cast("Any", None), limit=1.0, search=cast("Any", None), context=context)
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
