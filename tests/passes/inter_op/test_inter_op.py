"""The search finds what brute force finds, keeps within memory and devices, and stays fast on large clusters."""

import math
import random
from typing import Any

import pytest

from passes.errors import PlanningError
from passes.inter_op import LowerBound, Partition, Submesh
from tests.passes.inter_op.made_up import CASES, SCHEDULES, Random, brute_force, key_of, partition, shaped
from tests.sample import some


def assert_stages_follow(found: Partition, n_layers: int, whole: Submesh, memory_limit: float) -> None:
    """Fails unless the stages follow each other, layer by layer and device by device, and fit."""
    assert [stage.first for stage in found.stages] == [0, *(stage.last for stage in found.stages[:-1])]
    assert found.stages[-1].last == n_layers
    free = 0
    for stage in found.stages:
        n, size = stage.submesh.n_devices, whole.devices_per_host
        assert stage.first_device >= free
        assert stage.first_device % size + n <= size or stage.first_device % size == 0
        free = stage.first_device + n
        assert stage.candidate.key == key_of(stage.first, stage.last, stage.submesh)
    assert free <= whole.n_devices
    assert max(found.timeline.peak_nbytes) <= memory_limit
    assert found.bound <= found.seconds


@pytest.mark.parametrize("seed", some(range(250), 60))
def test_nothing_is_better_than_what_is_found(seed: int) -> None:
    r = random.Random(seed)
    n_layers, whole, sizes = CASES[seed % len(CASES)]
    choices = shaped(whole, sizes)
    table = Random(seed=seed, holes=r.choice([0, 0.1, 0.4]), hop=r.choice([0, 0.1, 1]))
    idle, memory_limit = r.random() < 0.6, r.choice([math.inf, 40, 25, 15])
    names, microbatches = tuple(r.sample(SCHEDULES, 2)), tuple(r.sample([1, 2, 3, 4, 6], 2))
    dispatch = r.choice([0, 0.05])
    best = brute_force(
        n_layers,
        whole,
        choices,
        table,
        schedules=names,
        microbatches=microbatches,
        memory_limit=memory_limit,
        dispatch_seconds=dispatch,
        idle=idle,
    )

    def search(proof: int) -> Partition:
        return partition(
            n_layers,
            whole,
            choices,
            table,
            schedules=names,
            microbatches=microbatches,
            memory_limit=memory_limit,
            dispatch_seconds=dispatch,
            idle=idle,
            most_extended=proof,
        )

    if math.isinf(best):
        assert search(10**6) is None
        return
    found = search(10**6)
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert found.gap == pytest.approx(0, abs=1e-9)
    assert_stages_follow(found, n_layers, whole, memory_limit)
    assert set(table.asked.values()) == {1}


def outcome(*args: Any, **options: Any) -> Partition | str:
    """The partition, or why there is none."""
    try:
        return partition(*args, **options)
    except PlanningError as error:
        return str(error)


@pytest.mark.parametrize("schedules", [("gpipe", "1f1b"), SCHEDULES])
@pytest.mark.parametrize("seed", some(range(30), 12))
def test_entries_outside_the_best_partition_need_not_be_asked_for(seed: int, schedules: tuple[str, ...]) -> None:
    n_layers, whole, sizes = CASES[seed % len(CASES)]
    everything, few = Random(seed=seed), Random(seed=seed)

    def least(first: int, last: int, submesh: Submesh, microbatches: int) -> LowerBound:
        found = everything.entry(first, last, submesh, microbatches)
        if found is None:
            return LowerBound(seconds=0.0, period=0.0, nbytes=0.0)
        share = random.Random(repr((seed, first, last, submesh))).uniform(0.5, 1)
        return LowerBound(
            seconds=share * (found.forward_seconds + found.backward_seconds),
            period=share * found.period(microbatches),
            nbytes=share * found.persistent_nbytes,
        )

    options: dict[str, Any] = {
        "schedules": schedules,
        "microbatches": (4, 6),
        "memory_limit": 12 + seed,
        "most_extended": 10**6,
    }
    wanted = outcome(n_layers, whole, shaped(whole, sizes), everything, **options)
    found = outcome(n_layers, whole, shaped(whole, sizes), few, **options, lower_bound=least)
    if isinstance(wanted, str) or isinstance(found, str):
        assert found == wanted
        return
    assert found.seconds == pytest.approx(wanted.seconds, rel=1e-9)
    assert found.gap == pytest.approx(0, abs=1e-9)
    assert set(few.asked.values()) == {1}
    assert found.statistics.entries == len(few.asked) <= len(everything.asked)
