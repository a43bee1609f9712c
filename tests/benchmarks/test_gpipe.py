"""GPipe's schedule, in which stages compute activations again before gradients are there."""

from __future__ import annotations

import pytest

from benchmarks.published.gpipe import seconds_ahead
from passes.inter_op import StageCost, Transfer, build, simulate

COST = StageCost(forward_seconds=1.0, backward_seconds=3.0, finish_seconds=0.5)


@pytest.mark.parametrize(
    ("stages", "microbatches", "seconds"),
    [(1, 1, 1 + 3), (2, 1, 2 + 1 + 2 * 2), (8, 1, 8 + 1 + 2 * 8), (8, 4, 11 + 4 * 3 + 2 * 7)],
)
def test_only_gradients_are_waited_for(stages: int, microbatches: int, seconds: float) -> None:
    transfers = [Transfer(forward_seconds=0.0, backward_seconds=0.0)] * (stages - 1)
    assert seconds_ahead([COST] * stages, transfers, microbatches) == pytest.approx(seconds + COST.finish_seconds)


def test_nothing_is_computed_ahead_where_the_backward_pass_is_all_gradients() -> None:
    cost = StageCost(forward_seconds=0.0, backward_seconds=2.0)
    transfers = [Transfer(forward_seconds=0.1, backward_seconds=0.2)] * 3
    simulated = simulate(build("gpipe", 4, 6), [cost] * 4, transfers)
    assert seconds_ahead([cost] * 4, transfers, 6) == pytest.approx(simulated.seconds)
