"""The search finds what brute force finds, keeps within memory and devices, and stays fast on large clusters."""

import itertools
import math
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from passes.cluster import Cluster
from passes.devices import parse_cluster
from passes.errors import ClusterError, PlanningError
from passes.inter_op import Candidate, Partition, Submesh, even, partition, submeshes
from passes.schedules import build, in_flight
from passes.simulate import Transfer, simulate
from passes.stage_choices import Floor
from passes.stage_costs import live
from tests.sample import some

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "zero-bubble-h1")


def host(size: int) -> Submesh:
    return Submesh(hosts=1, devices_per_host=size)


@dataclass(kw_only=True)
class Random:
    """A table of random entries; `asked` counts."""

    seed: int
    holes: float = 0.1
    hop: float = 1.0
    nbytes: int = 10
    asked: dict[tuple[int, int, Submesh, int], int] = field(default_factory=dict)

    def _random(self, *key: object) -> random.Random:
        return random.Random(repr((self.seed, *key)))

    def candidate(self, first: int, last: int, submesh: Submesh, microbatches: int) -> Candidate | None:
        key = first, last, submesh, microbatches
        self.asked[key] = self.asked.get(key, 0) + 1
        return self.entry(*key)

    def entry(self, first: int, last: int, submesh: Submesh, microbatches: int) -> Candidate | None:
        r = self._random("stage", first, last, submesh, microbatches)
        if r.random() < self.holes:
            return None
        work = sum(self._random("layer", layer).uniform(0.5, 2) for layer in range(first, last))
        work *= r.uniform(0.7, 1.5) * (1 + 3 / submesh.n_devices) / microbatches
        inputs, weights = work * r.uniform(0.6, 1.2), work * r.uniform(0.6, 1.2)
        return Candidate(
            forward_seconds=work,
            backward_seconds=inputs + weights * r.uniform(0.9, 1),
            input_gradient_seconds=inputs,
            weight_gradient_seconds=weights,
            finish_seconds=r.uniform(0, 1),
            persistent_nbytes=r.randrange(self.nbytes) * (last - first) // submesh.n_devices,
            in_flight_nbytes=r.randrange(self.nbytes) * (last - first) // microbatches,
            transient_nbytes=r.randrange(self.nbytes),
            key=key_of(first, last, submesh),
        )

    def boundary_nbytes(self, cut: int, microbatches: int) -> int:
        return self._random("cut", cut).randrange(1, 100) // microbatches

    def transfer_seconds(self, senders: range, receivers: range, nbytes: int) -> float:
        return self._random("link", senders, receivers).uniform(0, self.hop / 20) * nbytes


def key_of(first: int, last: int, submesh: Submesh) -> str:
    return f"{first}-{last} on {submesh}"


def placements(
    whole: Submesh, choices: tuple[Submesh, ...], n_stages: int, idle: bool
) -> Iterator[tuple[Submesh, ...]]:
    """All assignments of submeshes to stages that can stand side by side in order, by trying all first devices."""
    size = whole.devices_per_host

    def stand(shapes: tuple[Submesh, ...], free: int) -> bool:
        if not shapes:
            return idle or free == whole.n_devices
        n = shapes[0].n_devices
        for start in range(free, whole.n_devices - n + 1) if idle else [free]:
            inside = start % size + n <= size if n <= size else start % size == 0
            if inside and start + n <= whole.n_devices and stand(shapes[1:], start + n):
                return True
        return False

    yield from (shapes for shapes in itertools.product(choices, repeat=n_stages) if stand(shapes, 0))


def in_front(whole: Submesh, shapes: tuple[Submesh, ...]) -> list[range]:
    """The devices of each stage, as far in front as it can stand."""
    free, found = 0, list[range]()
    for shape in shapes:
        n, host = shape.n_devices, whole.devices_per_host
        start = free if free % host + n <= host or free % host == 0 else -(-free // host) * host
        free = start + n
        found.append(range(start, free))
    return found


def near(whole: Submesh, a: range, b: range) -> tuple[range, range]:
    """Two stages' devices, numbered from the first device of the first one's host."""
    shift = a.start // whole.devices_per_host * whole.devices_per_host
    return range(a.start - shift, a.stop - shift), range(b.start - shift, b.stop - shift)


def brute_force(
    n_layers: int,
    whole: Submesh,
    choices: tuple[Submesh, ...],
    table: Random,
    *,
    schedules: tuple[str, ...],
    microbatches: tuple[int, ...],
    memory_limit: float = math.inf,
    dispatch_seconds: float = 0.0,
    idle: bool = True,
) -> float:
    """The shortest simulated step of all."""
    best = math.inf
    for n_stages in range(1, n_layers + 1):
        shapes = list(placements(whole, choices, n_stages, idle))
        for inner in itertools.combinations(range(1, n_layers), n_stages - 1):
            cuts = (0, *inner, n_layers)
            for on, m in itertools.product(shapes, microbatches):
                found = [table.entry(a, b, s, m) for a, b, s in zip(cuts, cuts[1:], on, strict=False)]
                stages = [c for c in found if c]
                if len(stages) < n_stages:
                    continue
                devices = in_front(whole, on)
                hops = [
                    Transfer(
                        forward_seconds=table.transfer_seconds(a, b, table.boundary_nbytes(cut, m)),
                        backward_seconds=table.transfer_seconds(b, a, table.boundary_nbytes(cut, m)),
                    )
                    for cut, (a, b) in zip(inner, map(partial(near, whole), devices, devices[1:]), strict=False)
                ]
                for name in schedules:
                    schedule = build(name, n_stages, m)
                    counts = in_flight(schedule)
                    if all(c.needed_nbytes(n) <= memory_limit for c, n in zip(stages, counts, strict=True)):
                        costs = [c.cost() for c in stages]
                        timeline = simulate(schedule, costs, hops, dispatch_seconds=dispatch_seconds)
                        best = min(best, timeline.seconds)
    return best


def check(found: Partition, n_layers: int, whole: Submesh, memory_limit: float) -> None:
    """Whether the stages follow each other, layer by layer and device by device, and fit."""
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


CASES = [
    (4, host(4), (1, 2, 3, 4)),
    (5, host(3), (1, 2, 3)),
    (4, Submesh(hosts=2, devices_per_host=2), (1, 2, 4)),
    (3, Submesh(hosts=3, devices_per_host=2), (1, 2, 4, 6)),
    (6, host(4), (1, 2, 4)),
]


def shaped(whole: Submesh, sizes: tuple[int, ...]) -> tuple[Submesh, ...]:
    size = whole.devices_per_host
    return tuple(host(n) if n <= size else Submesh(hosts=n // size, devices_per_host=size) for n in sizes)


@pytest.mark.parametrize("seed", some(range(250), 120))
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
            proof=proof,
        )

    if math.isinf(best):
        with pytest.raises(PlanningError):
            search(10**6)
        return
    found = search(10**6)
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert found.gap == pytest.approx(0, abs=1e-9)
    check(found, n_layers, whole, memory_limit)
    assert set(table.asked.values()) == {1}


def outcome(*args: Any, **options: Any) -> Partition | str:
    """The partition, or why there is none."""
    try:
        return partition(*args, **options)
    except PlanningError as error:
        return str(error)


@pytest.mark.parametrize("schedules", [("gpipe", "1f1b"), SCHEDULES])
@pytest.mark.parametrize("seed", some(range(30), 12))
def test_what_cannot_be_in_the_best_partition_need_not_be_asked_for(seed: int, schedules: tuple[str, ...]) -> None:
    n_layers, whole, sizes = CASES[seed % len(CASES)]
    everything, few = Random(seed=seed), Random(seed=seed)

    def least(first: int, last: int, submesh: Submesh, microbatches: int) -> Floor:
        found = everything.entry(first, last, submesh, microbatches)
        if found is None:
            return Floor(seconds=0.0, pace=0.0, nbytes=0.0)
        share = random.Random(repr((seed, first, last, submesh))).uniform(0.5, 1)
        return Floor(
            seconds=share * (found.forward_seconds + found.backward_seconds),
            pace=share * found.pace(microbatches),
            nbytes=share * found.persistent_nbytes,
        )

    options: dict[str, Any] = {
        "schedules": schedules,
        "microbatches": (4, 6),
        "memory_limit": 12 + seed,
        "proof": 10**6,
    }
    wanted = outcome(n_layers, whole, shaped(whole, sizes), everything, **options)
    found = outcome(n_layers, whole, shaped(whole, sizes), few, **options, least=least)
    if isinstance(wanted, str) or isinstance(found, str):
        assert found == wanted
        return
    assert found.seconds == pytest.approx(wanted.seconds, rel=1e-9)
    assert found.gap == pytest.approx(0, abs=1e-9)
    assert set(few.asked.values()) == {1}
    assert found.statistics.asked == len(few.asked) <= len(everything.asked)


@pytest.mark.parametrize("seed", some(range(6), 3))
def test_an_interrupted_search_returns_the_best_until_then(seed: int) -> None:
    n_layers, whole, sizes = CASES[seed % len(CASES)]

    def found(stop: int = 10**9, *, interruptible: bool = True) -> tuple[Partition, int]:
        """The partition, and how many entries were asked for, Ctrl-C being pressed at the one after `stop`."""
        table, options = Random(seed=seed), {"microbatches": (4, 6), "interruptible": interruptible}

        class Pressed(Random):
            def candidate(self, first: int, last: int, submesh: Submesh, microbatches: int) -> Candidate | None:
                if len(table.asked) >= stop:
                    raise KeyboardInterrupt
                return table.candidate(first, last, submesh, microbatches)

        def least(*key: Any) -> Floor:
            if (entry := table.entry(*key)) is None:
                return Floor(seconds=0.0, pace=0.0, nbytes=0.0)
            share = random.Random(repr((seed, *key))).uniform(0.5, 1)
            seconds = share * (entry.forward_seconds + entry.backward_seconds)
            return Floor(seconds=seconds, pace=share * entry.pace(key[3]), nbytes=0.0)

        pressed = Pressed(seed=seed)
        return partition(n_layers, whole, shaped(whole, sizes), pressed, least=least, **options), len(table.asked)

    best, asked = found()
    assert not best.interrupted
    stopped = list[Partition]()
    for stop in range(asked):
        with suppress(KeyboardInterrupt):  # there was none yet
            stopped.append(found(stop)[0])
    assert stopped
    assert all(one.interrupted and one.seconds >= best.seconds * (1 - 1e-9) for one in stopped)
    with pytest.raises(KeyboardInterrupt):
        found(asked - 1, interruptible=False)


def test_devices_that_are_too_few_are_not_asked_for() -> None:
    asked: list[tuple[int, int, Submesh, int]] = []

    class Told(Alike):
        def candidate(self, first: int, last: int, submesh: Submesh, microbatches: int) -> Candidate:
            asked.append((first, last, submesh, microbatches))
            return super().candidate(first, last, submesh, microbatches)

    def least(first: int, last: int, submesh: Submesh, microbatches: int) -> Floor:
        seconds = 3.0 * (last - first) / microbatches / submesh.n_devices
        return Floor(seconds=seconds, pace=seconds, nbytes=0.0)

    found = partition(8, host(8), SIZES, Told(), microbatches=(8,), least=least)
    assert shapes(found) == [(8, 8)]
    assert {(first, last) for first, last, submesh, _ in asked if submesh.n_devices == 1} == set()


@pytest.mark.parametrize("seed", some(range(30), 12))
def test_the_dynamic_program_alone_is_close(seed: int) -> None:
    """Without transfers and holes, what is found with no proof is at most 6 % longer than the best."""
    n_layers, whole, sizes = CASES[seed % len(CASES)]
    table, choices = Random(seed=seed, holes=0, hop=0), shaped(whole, sizes)
    options: dict[str, Any] = {"schedules": ("gpipe", "1f1b"), "microbatches": (4, 6)}
    best = brute_force(n_layers, whole, choices, table, **options)
    found = partition(n_layers, whole, choices, table, **options, proof=0)
    assert found.bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= found.seconds <= 1.06 * best


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Layers that all take `seconds` of one device for a whole step; a device more is worth `efficiency` of one."""

    seconds: float = 3.0
    efficiency: float = 1.0
    finish_seconds: float = 0.0
    persistent_nbytes: int = 0
    in_flight_nbytes: int = 0
    hop_seconds: float = 0.0

    def candidate(self, first: int, last: int, submesh: Submesh, microbatches: int) -> Candidate:
        speed = 1 + (submesh.n_devices - 1) * self.efficiency
        part = (last - first) * self.seconds / microbatches / speed / 3
        return Candidate(
            forward_seconds=part,
            backward_seconds=2 * part,
            input_gradient_seconds=part,
            weight_gradient_seconds=part,
            finish_seconds=self.finish_seconds,
            persistent_nbytes=(last - first) * self.persistent_nbytes // submesh.n_devices,
            in_flight_nbytes=(last - first) * self.in_flight_nbytes // submesh.n_devices,
        )

    def boundary_nbytes(self, cut: int, microbatches: int) -> int:
        return 1

    def transfer_seconds(self, senders: range, receivers: range, nbytes: int) -> float:
        return self.hop_seconds * nbytes


SIZES = shaped(host(8), tuple(range(1, 9)))


def shapes(found: Partition) -> list[tuple[int, int]]:
    return [(stage.last - stage.first, stage.submesh.n_devices) for stage in found.stages]


def test_no_pipeline_wins_where_devices_work_well_together() -> None:
    found = partition(8, host(8), SIZES, Alike(), microbatches=(1, 8, 32))
    assert shapes(found) == [(8, 8)]
    assert found.seconds == pytest.approx(3)


def test_a_pipeline_wins_where_they_do_not() -> None:
    found = partition(8, host(8), SIZES, Alike(efficiency=0.1), microbatches=(1, 8, 32), n_stages=(1, 2, 4, 8))
    assert shapes(found) == [(1, 1)] * 8
    assert found.microbatches == 32
    assert found.seconds == pytest.approx(3 * (32 + 7) / 32)


def test_stages_may_have_unequal_submeshes() -> None:
    found = partition(4, host(8), shaped(host(8), (2, 4)), Alike(), microbatches=(64,), n_stages=(3,), idle=False)
    assert sorted(shapes(found)) == [(1, 2), (1, 2), (2, 4)]
    assert found.stages[0].first_device == 0
    found = partition(4, host(8), shaped(host(8), (2, 6)), Alike(), microbatches=(64,), n_stages=(2,))
    assert sorted(shapes(found)) == [(1, 2), (3, 6)]


def test_devices_stay_idle_if_that_is_faster() -> None:
    costly = Alike(efficiency=-0.1)
    assert shapes(partition(4, host(8), SIZES, costly)) == [(4, 1)]
    assert shapes(partition(4, host(8), SIZES, costly, idle=False, n_stages=(1,))) == [(4, 8)]


def test_a_stage_does_not_straddle_hosts() -> None:
    whole = Submesh(hosts=2, devices_per_host=4)
    found = partition(6, whole, shaped(whole, (3,)), Alike(), microbatches=(6,), n_stages=(2,))
    assert [stage.first_device for stage in found.stages] == [0, 4]
    with pytest.raises(PlanningError, match="no stages that cover the layers and the devices can be had"):
        partition(6, whole, shaped(whole, (3,)), Alike(), microbatches=(6,), idle=False)


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
    with pytest.raises(PlanningError) as error:
        partition(4, host(4), (host(1),), table, memory_limit=39, **options)
    assert str(error.value) == (
        "memory_limit=39 bytes (39 B): no partition fits\n"
        "  closest is 1f1b of 8 microbatches: stage 0 of 4, layers 0 to 0 on 1x1, needs 40 bytes (40 B) "
        "with 4 microbatches in flight\n"
        "  give more memory or devices, more microbatches, or a schedule with fewer of them in flight"
    )


def test_zero_bubble_is_chosen_where_the_backward_can_be_split() -> None:
    names = ("1f1b", "zero-bubble-h1")
    options: dict[str, Any] = {"schedules": names, "microbatches": (8,), "n_stages": (4,)}
    assert partition(4, host(4), (host(1),), Alike(), **options).schedule == "zero-bubble-h1"

    class Whole(Alike):
        def candidate(self, first: int, last: int, submesh: Submesh, microbatches: int) -> Candidate:
            found = super().candidate(first, last, submesh, microbatches)
            return replace(found, input_gradient_seconds=None, weight_gradient_seconds=None)

    assert partition(4, host(4), (host(1),), Whole(), **options).schedule == "1f1b"
    with pytest.raises(PlanningError, match="no stages that cover"):
        partition(4, host(4), (host(1),), Whole(), **{**options, "schedules": ("zero-bubble-h1",)})


@pytest.mark.parametrize("name", SCHEDULES)
def test_in_flight_formulas_are_those_of_the_schedules(name: str) -> None:
    for n_stages, m in itertools.product(range(1, 9), range(1, 20)):
        assert live(name, n_stages, m) == in_flight(build(name, n_stages, m))


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
    ({"n_stages": (3,)}, "no stages that cover"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
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


@pytest.mark.parametrize("seed", range(50))
def test_even_cuts_are_the_best(seed: int) -> None:
    r = random.Random(seed)
    weights = [r.choice([0.0, 1.0, r.random()]) for _ in range(r.randint(1, 9))]
    n_stages = r.randint(1, len(weights))
    ranges = even(weights, n_stages)
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]
    assert ranges[-1][1] == len(weights)
    assert all(first < last for first, last in ranges)

    def largest(cuts: tuple[int, ...]) -> float:
        return max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, len(weights))))

    best = min(map(largest, itertools.combinations(range(1, len(weights)), n_stages - 1)))
    assert max(sum(weights[first:last]) for first, last in ranges) == pytest.approx(best)


def test_even_cuts_are_even() -> None:
    assert even([1] * 10, 4) == ((0, 3), (3, 6), (6, 8), (8, 10))
    assert even([1] * 8, 4) == ((0, 2), (2, 4), (4, 6), (6, 8))
    with pytest.raises(PlanningError, match="n_stages=3: each needs a layer, and there are 2"):
        even([1, 1], 3)


@pytest.mark.slow
def test_many_layers_and_hosts_are_partitioned_fast() -> None:
    whole = Submesh(hosts=8, devices_per_host=8)
    choices = shaped(whole, (*range(1, 8), *range(8, 65, 8)))
    start = time.perf_counter()
    found = partition(48, whole, choices, Alike(efficiency=0.95, hop_seconds=1e-4), microbatches=(8, 32))
    assert time.perf_counter() - start < 30
    assert found.gap < 0.2
