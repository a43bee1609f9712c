"""What the search over stages chooses from and answers: submeshes and their places, candidates, partitions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from passes.cluster import Cluster
from passes.errors import PlanningError, explain
from passes.inter_op.simulator import StageCost, Timeline


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Submesh:
    """A shape of consecutive devices: part of one host, or whole hosts."""

    hosts: int
    devices_per_host: int

    @property
    def n_devices(self) -> int:
        return self.hosts * self.devices_per_host

    def __str__(self) -> str:
        return f"{self.hosts}x{self.devices_per_host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What one stage would cost: seconds of a microbatch, and of the end of a step; bytes of one device.

    The halves of the backward are for schedules that split it. `transient_nbytes` are needed while a task runs; `key`
    is the caller's, and comes back untouched.
    """

    forward_seconds: float
    backward_seconds: float
    input_gradient_seconds: float | None = None
    weight_gradient_seconds: float | None = None
    finish_seconds: float = 0.0
    persistent_nbytes: int = 0
    in_flight_nbytes: int = 0
    transient_nbytes: int = 0
    key: object = None

    @classmethod
    def together(cls, costs: Sequence[tuple[StageCost, int]], key: object) -> Self:
        """So many blocks of each cost as one stage."""
        return cls(
            forward_seconds=math.fsum(n * c.forward_seconds for c, n in costs),
            backward_seconds=math.fsum(n * c.backward_seconds for c, n in costs),
            input_gradient_seconds=math.fsum(n * (c.input_gradient_seconds or 0.0) for c, n in costs),
            weight_gradient_seconds=math.fsum(n * (c.weight_gradient_seconds or 0.0) for c, n in costs),
            finish_seconds=math.fsum(n * c.finish_seconds for c, n in costs),
            persistent_nbytes=sum(n * c.persistent_nbytes for c, n in costs),
            in_flight_nbytes=sum(n * c.in_flight_nbytes for c, n in costs),
            key=key,
        )

    def needed_nbytes(self, microbatches: int) -> int:
        """Bytes with that many microbatches in flight."""
        return self.persistent_nbytes + self.transient_nbytes + microbatches * self.in_flight_nbytes

    def pace(self, microbatches: int) -> float:
        """Seconds of one of so many microbatches, with its share of the end of a step."""
        return self.forward_seconds + self.backward_seconds + self.finish_seconds / microbatches

    def cost(self) -> StageCost:
        """The candidate as the simulator takes it."""
        return StageCost(
            forward_seconds=self.forward_seconds,
            backward_seconds=self.backward_seconds,
            input_gradient_seconds=self.input_gradient_seconds,
            weight_gradient_seconds=self.weight_gradient_seconds,
            finish_seconds=self.finish_seconds,
            in_flight_nbytes=self.in_flight_nbytes,
            persistent_nbytes=self.persistent_nbytes,
            working_nbytes=self.transient_nbytes,
        )


class Floor(NamedTuple):
    """What no candidate goes below: `seconds` of a microbatch, forward and backward; these with its share of what comes
    after all of them, `pace`; and bytes of one device.
    """

    seconds: float
    pace: float
    nbytes: float


class StageTable(Protocol):
    """What stages and the boundaries between them cost; asked at most once for each entry, when it is needed."""

    def candidate(self, first: int, last: int, submesh: Submesh, microbatches: int) -> Candidate | None:
        """The stage of layers first..last (`last` excluded) on a submesh; None if it cannot be had."""
        ...

    def boundary_nbytes(self, cut: int, microbatches: int) -> int:
        """Bytes of one microbatch from layer cut - 1 to layer cut; their gradients are as many."""
        ...

    def transfer_seconds(self, senders: range, receivers: range, nbytes: int) -> float:
        """Seconds of so many bytes from some devices to others, which are numbered from the first of any host."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """Layers first..last (`last` excluded) on the submesh that starts at `first_device`."""

    first: int
    last: int
    submesh: Submesh
    first_device: int
    candidate: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What a search did: entries asked of the table, dynamic programs, simulations, partial partitions looked at."""

    asked: int
    programs: int
    simulated: int
    expanded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stages in order, how they are scheduled, and the simulated step; no other takes less than `bound` seconds.

    Where the search was `interrupted`, others were not looked at.
    """

    stages: tuple[StageChoice, ...]
    schedule: str
    microbatches: int
    timeline: Timeline
    bound: float
    statistics: Statistics
    interrupted: bool = False

    @property
    def seconds(self) -> float:
        return self.timeline.seconds

    @property
    def gap(self) -> float:
        """(seconds - bound) / seconds: 0 is proven optimal."""
        return (self.seconds - self.bound) / self.seconds if self.seconds else 0.0


def submeshes(cluster: Cluster, *, every: bool | None = None) -> tuple[Submesh, ...]:
    """The shapes that stages may have, smallest first: parts of a host, then whole hosts.

    Sizes are `every` one, or divisors and powers of two; by default, every one up to 8. More hosts than 64 are not
    cut below one host. Raises ClusterError for a cluster of several kinds of hosts.
    """
    group = cluster.group()
    parts = _sizes(group.devices_per_host, every) if group.hosts <= 64 else (group.devices_per_host,)
    within = (Submesh(hosts=1, devices_per_host=size) for size in parts)
    across = (Submesh(hosts=n, devices_per_host=group.devices_per_host) for n in _sizes(group.hosts, every) if n > 1)
    return (*within, *across)


def _sizes(whole: int, every: bool | None) -> tuple[int, ...]:
    if every or (every is None and whole <= 8):
        return tuple(range(1, whole + 1))
    return tuple(n for n in range(1, whole + 1) if whole % n == 0 or n & (n - 1) == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where stages may stand; an offset counts free devices from the front, in units that all sizes share.

    `starts` and `ends` [choices, offsets] are those of a stage placed at an offset; the last offset is past the end.
    `final` [offsets] says where the last stage may end.
    """

    choices: tuple[Submesh, ...]
    n_devices: int
    devices_per_host: int
    unit: int
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    final: NDArray[np.bool_]

    @property
    def n_slots(self) -> int:
        return len(self.final) - 2

    def side_by_side(self, sender: int, receiver: int) -> Iterator[tuple[range, range, slice]]:
        """Where a stage of one choice may end and one of another come next, as devices numbered from a host's first.

        With the offsets at which that is so; those at which both cannot be had are left out.
        """
        behind, ahead, host = self.choices[sender].n_devices, self.choices[receiver].n_devices, self.devices_per_host
        period, outside = host // self.unit, len(self.final) - 1
        least = behind // self.unit
        for first in range(least, min(least + period, outside)):
            offsets = [o for o in range(first, outside, period) if self.starts[receiver, o] < outside]
            if offsets:
                start, begin = first * self.unit - behind, int(self.starts[receiver, first]) * self.unit
                shift = start // host * host
                here, there = range(start - shift, start - shift + behind), range(begin - shift, begin - shift + ahead)
                yield here, there, slice(first, offsets[-1] + 1, period)


def place(whole: Submesh, choices: Sequence[Submesh], idle: bool) -> Places:
    """The places of `choices` in `whole`, each as far in front as it can stand."""
    host = whole.devices_per_host
    for choice in choices:
        if choice.devices_per_host > host or (choice.hosts > 1 and choice.devices_per_host < host):
            rule = "is neither part of a host nor whole hosts"
            raise PlanningError(explain(f"submesh {choice}", rule, f"hosts have {host} devices", "leave it out"))
    kept = tuple(sorted({choice for choice in choices if choice.hosts <= whole.hosts}))
    if not kept:
        raise PlanningError(explain("choices", "no submesh that stages may have", "", "take those of `submeshes`"))
    unit = math.gcd(host, *(choice.n_devices for choice in kept))
    outside = whole.n_devices // unit + 1
    starts = np.full((len(kept), outside + 1), outside)
    ends = starts.copy()
    for index, choice in enumerate(kept):
        for offset in range(outside):
            used = offset * unit % host
            skipped = (host - used) // unit if used + min(choice.n_devices, host) > host else 0
            end = offset + skipped + choice.n_devices // unit
            if end < outside and (idle or not skipped):
                starts[index, offset], ends[index, offset] = offset + skipped, end
    final = np.arange(outside + 1) < outside if idle else np.arange(outside + 1) == outside - 1
    return Places(
        choices=kept,
        n_devices=whole.n_devices,
        devices_per_host=host,
        unit=unit,
        starts=starts,
        ends=ends,
        final=final,
    )
