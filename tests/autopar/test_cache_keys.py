"""The keys of the plan cache: a user's schedule counts by its order of tasks, not by its name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cache import PlanCache, key_of
from autopar.errors import ArgumentError
from passes.cluster import parse_cluster
from passes.inter_op import SCHEDULES


def step(weights: Any, x: Any) -> Any:
    return weights - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weights)


def digest(planner: Any) -> str:
    given = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    key = key_of(autopar.parallelize(step).step(given, given), parse_cluster("1x8:a100-80g"), planner, {})
    assert key is not None
    return key.digest


@pytest.mark.parametrize(
    "planner", [autopar.Pipeline(stages=2, microbatches=2), autopar.Auto(pipeline=True, schedules=("1f1b",))]
)
def test_a_users_schedule_counts_by_what_it_does(planner: Any, monkeypatch: pytest.MonkeyPatch):
    def as_gpipe(stages: int, microbatches: int) -> autopar.Schedule:
        return SCHEDULES["gpipe"](stages, microbatches)

    def edited(stages: int, microbatches: int) -> autopar.Schedule:
        return SCHEDULES["1f1b"](stages, microbatches)

    def same_again(stages: int, microbatches: int) -> autopar.Schedule:
        return as_gpipe(stages, microbatches)

    def of_few(stages: int, microbatches: int) -> autopar.Schedule:
        if stages > 2:
            raise ValueError("of two stages alone")
        return as_gpipe(stages, microbatches)

    digests = {"none": digest(planner)}
    for schedule in (as_gpipe, edited, same_again, of_few):
        monkeypatch.setitem(SCHEDULES, "mine", schedule)
        digests[schedule.__name__] = digest(planner)
    assert digests.pop("same_again") == digests["as_gpipe"]
    assert len(set(digests.values())) == 4


@pytest.mark.parametrize("folder", [5, "", None, ["plans"]])
def test_a_cache_without_a_folder_is_refused(folder: Any):
    with pytest.raises(ArgumentError, match=r"PlanCache\(.*\n.*PlanCache\('plans'\)"):
        PlanCache(folder)
