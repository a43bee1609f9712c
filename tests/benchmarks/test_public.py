"""Steps of public code's shapes under every planner: equal to `jax.jit`, or refused for a reason of the mathematics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import public
from benchmarks.public import NAMES, SHAPES, WAYS, outcome, planners

DEVICES = 4
QUICK = {"q learning, optax", "dropout, train state"}
BY_HAND = [name for name in planners(DEVICES) if name not in ("auto", "stages")]


def test_there_are_sixty_steps():
    assert len(NAMES) == len(set(NAMES)) == len(SHAPES) * len(WAYS) >= 60


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_the_search_gives_what_jit_gives(name: str):
    assert outcome(name, {}, DEVICES) == "equal"


def test_a_nan_that_jit_has_not_is_a_difference(monkeypatch: pytest.MonkeyPatch):
    """Wherever among the results it is: `max` passes over it behind the first one."""

    def broken(step: Any, **options: Any) -> Any:
        def run(*args: Any) -> Any:
            state, loss = jax.jit(step)(*args)
            return state, loss * jnp.nan

        return run

    monkeypatch.setattr(public.autopar, "parallelize", broken)
    assert outcome("mlp, optax", {}, DEVICES) == "differs by nan of the largest entry"


@pytest.mark.slow
@pytest.mark.parametrize("planner", [*BY_HAND, "stages"])
@pytest.mark.parametrize("name", NAMES)
def test_planners_give_what_jit_gives_or_say_why_not(name: str, planner: str):
    result = outcome(name, planners(DEVICES)[planner], DEVICES)
    assert result == "equal" or result.startswith("refused: "), result
