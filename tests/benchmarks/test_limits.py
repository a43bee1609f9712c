"""Violations that the benchmark of plans within limits reports."""

import numpy as np
import pytest

from benchmarks import limits
from benchmarks.limits import Within


def within(why: str, limit: float, nbytes: float, seconds: float, bound: float = 0.0) -> Within:
    return Within(why=why, limit=limit, nbytes=nbytes, seconds=seconds, bound=bound, how="", cpu=0.0)


HAND = within("hand-made", np.inf, 50.0, 3.0)
LEAN, FREE = within("lean", 110.0, 90.0, 2.0), within("free", np.inf, 200.0, 1.0)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (within("more", 150.0, 120.0, 1.5, bound=1.4), None),
        (within("more", 150.0, 154.0, 1.5), "the plan needs 1.027 of the limit"),
        (within("more", 150.0, 120.0, 2.1), "1.050 times 'lean', which fits"),
        (within("more", 150.0, np.inf, np.inf), "refused, and 'lean' keeps the limit"),
        (within("more", 150.0, 120.0, 1.9, bound=2.5), "a bound of 2.5 s, and 'lean' takes 2"),
        (within("more", 240.0, 120.0, 1.9), "1.900 times 'free', which fits"),
    ],
    ids=["right", "over", "slower", "refused", "bound", "free"],
)
def test_a_plan_beaten_by_another_is_named_with_it(plan: Within, said: str | None):
    wrong = limits._violations([LEAN, plan], [FREE, HAND])
    assert wrong == ([f"more: {said}"] if said else [])


def test_a_refusal_of_what_a_hand_made_plan_keeps_is_missed():
    tight = within("tight", 54.0, np.inf, np.inf)
    assert limits._violations([tight], [FREE, HAND]) == ["tight: refused, and 'hand-made' keeps the limit"]
    assert limits._violations([within("tight", 49.0, np.inf, np.inf)], [FREE, HAND]) == []
