"""The search over stages: when it is interrupted, where networks or memory are short, and options that it refuses."""

import itertools
import math
import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from passes.cluster import Cluster, parse_cluster
from passes.errors import ClusterError, PlanningError
from passes.inter_op import Candidate, LowerBound, Partition, Submesh, build, submeshes
from passes.inter_op.costs import in_flight_counts
from passes.inter_op.schedules import in_flight
from passes.progress import SearchContext
from tests.passes.inter_op.made_up import CASES, SCHEDULES, Alike, Random, brute_force, host, partition, shaped
from tests.sample import some


@pytest.mark.parametrize("seed", some(range(6), 1))
def test_an_interrupted_search_returns_the_best_until_then(seed: int) -> None:
    n_layers, whole, sizes = CASES[seed % len(CASES)]

    def found(stop: int = 10**9, *, interruptible: bool = True) -> tuple[Partition, int, bool]:
        """The partition, how many entries were requested, and whether Ctrl-C at the one after `stop` ended that."""
        table, context = Random(seed=seed), SearchContext(interruptible=interruptible)
        options = {"microbatches": (4, 6), "context": context}

        class Pressed(Random):
            def candidate(
                self, first: int, last: int, submesh: Submesh, microbatches: int, cutoff: float = math.inf
            ) -> Candidate | None:
                if len(table.asked) >= stop:
                    raise KeyboardInterrupt
                return table.candidate(first, last, submesh, microbatches)

        def least(*key: Any) -> LowerBound:
            if (entry := table.entry(*key)) is None:
                return LowerBound(seconds=0.0, period=0.0, nbytes=0.0)
            share = random.Random(repr((seed, *key))).uniform(0.5, 1)
            seconds = share * (entry.forward_seconds + entry.backward_seconds)
            return LowerBound(seconds=seconds, period=share * entry.period(key[3]), nbytes=0.0)

        pressed = Pressed(seed=seed)
        best = partition(n_layers, whole, shaped(whole, sizes), pressed, lower_bound=least, **options)
        return best, len(table.asked), context.is_interrupted

    best, asked, is_interrupted = found()
    assert not is_interrupted
    stopped = list[tuple[Partition, int, bool]]()
    for stop in range(asked):
        with suppress(KeyboardInterrupt):  # there was none yet
            stopped.append(found(stop))
    assert stopped
    assert all(ended and one.bound == 0 and one.seconds >= best.seconds * (1 - 1e-9) for one, _, ended in stopped)
    with pytest.raises(KeyboardInterrupt):
        found(asked - 1, interruptible=False)


def test_devices_that_are_too_few_are_not_asked_for() -> None:
    asked: list[tuple[int, int, Submesh, int]] = []

    class Told(Alike):
        def candidate(
            self, first: int, last: int, submesh: Submesh, microbatches: int, cutoff: float = math.inf
        ) -> Candidate:
            asked.append((first, last, submesh, microbatches))
            return super().candidate(first, last, submesh, microbatches)

    def least(first: int, last: int, submesh: Submesh, microbatches: int) -> LowerBound:
        seconds = 3.0 * (last - first) / microbatches / submesh.n_devices
        return LowerBound(seconds=seconds, period=seconds, nbytes=0.0)

    best = partition(8, host(8), SIZES, Told(), microbatches=(8,), lower_bound=least)
    assert shapes(best) == [(8, 8)]
    assert {(first, last) for first, last, submesh, _ in asked if submesh.n_devices == 1} == set()


@pytest.mark.parametrize("seed", some(range(30), 12))
def test_the_dynamic_program_alone_is_close(seed: int) -> None:
    """Without transfers and holes, what is found with no proof is at most 6 % longer than the best."""
    n_layers, whole, sizes = CASES[seed % len(CASES)]
    table, choices = Random(seed=seed, holes=0, hop=0), shaped(whole, sizes)
    options: dict[str, Any] = {"schedules": ("gpipe", "1f1b"), "microbatches": (4, 6)}
    best = brute_force(n_layers, whole, choices, table, **options)
    partition_found = partition(n_layers, whole, choices, table, **options, most_extended=0)
    assert partition_found.bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= partition_found.seconds <= 1.06 * best


SIZES = shaped(host(8), tuple(range(1, 9)))


def shapes(found: Partition) -> list[tuple[int, int]]:
    return [(stage.last - stage.first, stage.submesh.n_devices) for stage in found.stages]


def test_no_pipeline_wins_where_devices_work_well_together() -> None:
    best = partition(8, host(8), SIZES, Alike(), microbatches=(1, 8, 32))
    assert shapes(best) == [(8, 8)]
    assert best.seconds == pytest.approx(3)


def test_a_pipeline_wins_where_they_do_not() -> None:
    best = partition(8, host(8), SIZES, Alike(efficiency=0.1), microbatches=(1, 8, 32), n_stages=(1, 2, 4, 8))
    assert shapes(best) == [(1, 1)] * 8
    assert best.microbatches == 32
    assert best.seconds == pytest.approx(3 * (32 + 7) / 32)


def test_stages_may_have_unequal_submeshes() -> None:
    best = partition(4, host(8), shaped(host(8), (2, 4)), Alike(), microbatches=(64,), n_stages=(3,), idle=False)
    assert sorted(shapes(best)) == [(1, 2), (1, 2), (2, 4)]
    assert best.stages[0].first_device == 0
    best = partition(4, host(8), shaped(host(8), (2, 6)), Alike(), microbatches=(64,), n_stages=(2,))
    assert sorted(shapes(best)) == [(1, 2), (3, 6)]


def test_devices_stay_idle_if_that_is_faster() -> None:
    costly = Alike(efficiency=-0.1)
    assert shapes(partition(4, host(8), SIZES, costly)) == [(4, 1)]
    assert shapes(partition(4, host(8), SIZES, costly, idle=False, n_stages=(1,))) == [(4, 8)]


def test_a_stage_does_not_straddle_hosts() -> None:
    whole = Submesh(hosts=2, devices_per_host=4)
    best = partition(6, whole, shaped(whole, (3,)), Alike(), microbatches=(6,), n_stages=(2,))
    assert [stage.first_device for stage in best.stages] == [0, 4]
    assert partition(6, whole, shaped(whole, (3,)), Alike(), microbatches=(6,), idle=False) is None


def test_slow_links_and_dispatch_make_pipelines_shorter() -> None:
    def n_stages(**options: Any) -> int:
        table = Alike(efficiency=0.3, hop_seconds=options.pop("hop_seconds", 0))
        return len(partition(8, host(8), SIZES, table, microbatches=(8,), **options).stages)

    assert n_stages() > n_stages(hop_seconds=0.2) > n_stages(hop_seconds=10) == 1
    assert n_stages() > n_stages(dispatch_seconds=10) == 1


def test_memory_chooses_the_schedule() -> None:
    """GPipe keeps all microbatches, 1F1B as many as stages to come."""
    table = Alike(efficiency=0, in_flight_nbytes=10)
    options: dict[str, Any] = {"microbatches": (8,), "n_stages": (4,)}
    one = partition(4, host(4), (host(1),), table, memory_limit=40, **options)
    assert one.schedule == "1f1b"
    assert one.timeline.peak_nbytes == (40, 30, 20, 10)
    assert partition(4, host(4), (host(1),), table, memory_limit=39, **options) is None


def test_zero_bubble_is_chosen_where_the_backward_can_be_split() -> None:
    names = ("1f1b", "zero-bubble-h1")
    options: dict[str, Any] = {"schedules": names, "microbatches": (8,), "n_stages": (4,)}
    assert partition(4, host(4), (host(1),), Alike(), **options).schedule == "zero-bubble-h1"

    class Whole(Alike):
        def candidate(
            self, first: int, last: int, submesh: Submesh, microbatches: int, cutoff: float = math.inf
        ) -> Candidate:
            candidate = super().candidate(first, last, submesh, microbatches)
            return replace(candidate, input_gradient_seconds=None, weight_gradient_seconds=None)

    assert partition(4, host(4), (host(1),), Whole(), **options).schedule == "1f1b"
    assert partition(4, host(4), (host(1),), Whole(), **{**options, "schedules": ("zero-bubble-h1",)}) is None


@pytest.mark.parametrize("name", SCHEDULES)
def test_in_flight_formulas_are_those_of_the_schedules(name: str) -> None:
    for n_stages, m in itertools.product(range(1, 9), range(1, 20)):
        assert in_flight_counts(name, n_stages, m) == in_flight(build(name, n_stages, m))


def test_only_what_is_needed_is_asked() -> None:
    table, choices = Random(seed=1, holes=0), shaped(host(4), (2, 4))
    partition(5, host(4), choices, table, n_stages=(1,))
    assert {(first, last) for first, last, *_ in table.asked} == {(0, 5)}
    partition(5, host(4), choices, table)
    assert {(first, last) for first, last, submesh, _ in table.asked if submesh == host(4)} == {(0, 5)}


WRONG: list[tuple[dict[str, object], str]] = [
    ({"n_stages": (5,)}, "n_stages=5: each needs a layer, and there are 4"),
    ({"n_stages": (0,)}, "n_stages=0: a plan has at least 1 stage"),
    ({"microbatches": (4, 0)}, "microbatches=0: a step has at least 1 microbatch"),
    ({"microbatches": ()}, r"microbatches=\(\): a step has at least 1"),
    ({"schedules": ()}, r"schedules=\(\): stages need a schedule"),
    ({"schedules": ("interleaved",)}, "'interleaved': puts several stages on a device group"),
    ({"schedules": ("1f2b",)}, "schedule '1f2b': is not known"),
    ({"choices": (host(8),)}, "submesh 1x8: is neither part of a host nor whole hosts"),
    ({"choices": ()}, "choices: no submesh"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanningError, match=message):
        partition(**{"n_layers": 4, "whole": host(4), "choices": (host(2), host(4)), "table": Alike(), **options})


def test_submeshes_are_parts_of_a_host_or_whole_hosts() -> None:
    def sizes(text: str, **options: bool) -> list[str]:
        return list(map(str, submeshes(parse_cluster(text), **options)))

    assert sizes("1x8:a100-80g") == [f"1x{n}" for n in range(1, 9)]
    assert sizes("1x8:a100-80g", every=False) == ["1x1", "1x2", "1x4", "1x8"]
    assert sizes("3x2:a100-80g") == ["1x1", "1x2", "2x2", "3x2"]
    assert sizes("12x1:a100-80g") == ["1x1", *(f"{n}x1" for n in (2, 3, 4, 6, 8, 12))]
    assert sizes("384x8:a100-80g")[:4] == ["1x8", "2x8", "3x8", "4x8"]
    group = parse_cluster("2x2:a100-80g").groups[0]
    with pytest.raises(ClusterError, match="kinds of hosts"):
        submeshes(Cluster(name="two", groups=(group, group)))


@pytest.mark.slow
def test_many_layers_and_hosts_are_partitioned_in_few_programs() -> None:
    whole = Submesh(hosts=8, devices_per_host=8)
    choices = shaped(whole, (*range(1, 8), *range(8, 65, 8)))
    best = partition(48, whole, choices, Alike(efficiency=0.95, hop_seconds=1e-4), microbatches=(8, 32))
    done = best.statistics
    assert done.entries <= 2 * len(choices) * 48 * 49 / 2
    assert done.programs <= 8
    assert done.simulated <= 24
    assert done.expanded <= 2000
    assert best.gap < 0.2
