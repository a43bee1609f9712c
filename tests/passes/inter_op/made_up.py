"""Made-up stages and clusters, and the best partition by trying all, for the tests of the search over stages."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from passes.inter_op import Candidate, Submesh, Transfer, build, partitions, simulate
from passes.inter_op.schedules import in_flight

PARTS_OF_THE_SEARCH = ("lower_bound", "prefetch", "most_extended", "context")

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

    def candidate(
        self, first: int, last: int, submesh: Submesh, microbatches: int, cutoff: float = math.inf
    ) -> Candidate | None:
        key = first, last, submesh, microbatches
        self.asked[key] = self.asked.get(key, 0) + 1
        entry = self.entry(*key)
        return None if entry is None or entry.period(microbatches) >= cutoff else entry

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
            working_nbytes=r.randrange(self.nbytes),
            key=key_of(first, last, submesh),
        )

    def boundary_nbytes(self, cut: int, microbatches: int) -> int:
        return self._random("cut", cut).randrange(1, 100) // microbatches

    def transfer_seconds(self, senders: range, receivers: range, nbytes: int) -> float:
        return self._random("link", senders, receivers).uniform(0, self.hop / 20) * nbytes


def partition(n_layers: int, whole: Submesh, choices: tuple[Submesh, ...], table: Any, **options: Any) -> Any:
    """The best partition, by options of the search and of its space together."""
    searching = {name: options.pop(name) for name in PARTS_OF_THE_SEARCH if name in options}
    space = partitions.Space(n_layers=n_layers, whole=whole, choices=choices, **options)
    return partitions.partition(space, table, **searching)


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
                        timeline = simulate(schedule, stages, hops, dispatch_seconds=dispatch_seconds)
                        best = min(best, timeline.seconds)
    return best


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


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Layers that all take `seconds` of one device for a whole step; a device more is worth `efficiency` of one."""

    seconds: float = 3.0
    efficiency: float = 1.0
    finish_seconds: float = 0.0
    persistent_nbytes: int = 0
    in_flight_nbytes: int = 0
    hop_seconds: float = 0.0

    def candidate(
        self, first: int, last: int, submesh: Submesh, microbatches: int, cutoff: float = math.inf
    ) -> Candidate:
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
