"""The inputs and results of the search over stages: submeshes and their places, candidates, partitions."""

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

EVERY_SIZE = 8
"""Devices of a host, or hosts, up to which a submesh may have any number of them, so that stages of unequal work get
unequal shares; of more, divisors and powers of two, as tables grow with the square of their number. `python -m
benchmarks.settings` shows what half and double of it find."""

MOST_CUT_HOSTS = 64
"""Hosts up to which stages may have parts of one: of more, a stage within a host would hold less of the model than a
sixty-fourth, and places are counted in the smallest size, so that tables grow with hosts times parts."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Submesh:
    """The shape of a group of consecutive devices: part of one host, or whole hosts."""

    hosts: int
    devices_per_host: int

    @property
    def n_devices(self) -> int:
        return self.hosts * self.devices_per_host

    def __str__(self) -> str:
        return f"{self.hosts}x{self.devices_per_host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(StageCost):
    """The cost of a possible stage; `key` belongs to the caller, and is returned as it was given."""

    key: object = None

    @classmethod
    def together(cls, costs: Sequence[tuple[StageCost, int]], key: object) -> Self:
        """The cost of one stage made of n blocks of each cost, for every pair (cost, n) in `costs`."""
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


class LowerBound(NamedTuple):
    """Lower bounds on the cost of a stage: `seconds` of a microbatch, forward and backward; its `period`, which has the
    microbatch's share of the end of the step; and `nbytes` of one device.
    """

    seconds: float
    period: float
    nbytes: float


class StageTable(Protocol):
    """The costs of stages and of the boundaries between them; each entry is requested at most once, when needed."""

    def candidate(
        self, first: int, last: int, submesh: Submesh, microbatches: int, cutoff: float = math.inf
    ) -> Candidate | None:
        """The cost of layers first..last (`last` excluded) as a stage on a submesh; None where there is no such stage.

        None as well where its period is seen to be `cutoff` seconds or more.
        """
        ...

    def boundary_nbytes(self, cut: int, microbatches: int) -> int:
        """Bytes that one microbatch sends from layer cut - 1 to layer cut; as many come back as gradients."""
        ...

    def transfer_seconds(self, senders: range, receivers: range, nbytes: int) -> float:
        """Seconds to send `nbytes` between two groups of devices, which are numbered from the first of any host."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """A stage of a partition: layers first..last (`last` excluded) on the submesh that starts at `first_device`."""

    first: int
    last: int
    submesh: Submesh
    first_device: int
    candidate: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Counts of a search's work: table entries requested, dynamic programs, simulations, partial partitions."""

    entries: int
    programs: int
    simulated: int
    expanded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The stages in order, their schedule, and the simulated step; no partition takes less than `bound` seconds."""

    stages: tuple[StageChoice, ...]
    schedule: str
    microbatches: int
    timeline: Timeline
    bound: float
    statistics: Statistics

    @property
    def seconds(self) -> float:
        return self.timeline.seconds

    @property
    def gap(self) -> float:
        """(seconds - bound) / seconds: 0 is proven optimal."""
        return (self.seconds - self.bound) / self.seconds if self.seconds else 0.0


def submeshes(cluster: Cluster, *, every: bool | None = None) -> tuple[Submesh, ...]:
    """The submeshes that a stage may have, smallest first: parts of a host, then whole hosts.

    Sizes are `every` one, or else divisors and powers of two; by default every one up to `EVERY_SIZE`. In a cluster of
    more than `MOST_CUT_HOSTS` hosts no stage has a part of a host. Raises ClusterError for a cluster of several kinds
    of hosts.
    """
    group = cluster.group()
    parts = _sizes(group.devices_per_host, every) if group.hosts <= MOST_CUT_HOSTS else (group.devices_per_host,)
    within = (Submesh(hosts=1, devices_per_host=size) for size in parts)
    across = (Submesh(hosts=n, devices_per_host=group.devices_per_host) for n in _sizes(group.hosts, every) if n > 1)
    return (*within, *across)


def _sizes(whole: int, every: bool | None) -> tuple[int, ...]:
    """The sizes up to `whole`: all of them, or its divisors and the powers of two."""
    if every or (every is None and whole <= EVERY_SIZE):
        return tuple(range(1, whole + 1))
    return tuple(n for n in range(1, whole + 1) if whole % n == 0 or n & (n - 1) == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The positions that stages may have on devices; an offset counts devices from the front, in units that divide all
    sizes.

    `starts` and `ends` [choices, offsets] say where a stage of that choice starts and ends if the devices before an
    offset are taken; the last offset is past the end. `final` [offsets] says where the last stage may end.
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

    def adjacent(self, sender: int, receiver: int) -> Iterator[tuple[range, range, slice]]:
        """Every (senders, receivers, offsets): devices of a stage of one choice and of the next stage of another, from
        0 in a host.

        The offsets are those where the first of the two stages ends, for which the devices are these.
        """
        behind, ahead, host = self.choices[sender].n_devices, self.choices[receiver].n_devices, self.devices_per_host
        period, outside = host // self.unit, len(self.final) - 1
        earliest = behind // self.unit
        for first in range(earliest, min(earliest + period, outside)):
            offsets = [o for o in range(first, outside, period) if self.starts[receiver, o] < outside]
            if offsets:
                start, begin = first * self.unit - behind, int(self.starts[receiver, first]) * self.unit
                shift = start // host * host
                senders = range(start - shift, start - shift + behind)
                receivers = range(begin - shift, begin - shift + ahead)
                yield senders, receivers, slice(first, offsets[-1] + 1, period)


def place(whole: Submesh, choices: Sequence[Submesh], idle: bool) -> Places:
    """The places of `choices` in `whole`, each as far in front as possible. Raises PlanningError where none fits."""
    host = whole.devices_per_host
    for choice in choices:
        if choice.devices_per_host > host or (choice.hosts > 1 and choice.devices_per_host < host):
            rule = "is neither part of a host nor whole hosts"
            raise PlanningError(explain(f"submesh {choice}", rule, f"hosts have {host} devices", "leave it out"))
    usable = tuple(sorted({choice for choice in choices if choice.hosts <= whole.hosts}))
    if not usable:
        raise PlanningError(explain("choices", "no submesh that stages may have", "", "take those of `submeshes`"))
    unit = math.gcd(host, *(choice.n_devices for choice in usable))
    outside = whole.n_devices // unit + 1
    starts = np.full((len(usable), outside + 1), outside)
    ends = starts.copy()
    for index, choice in enumerate(usable):
        for offset in range(outside):
            used = offset * unit % host
            skipped = (host - used) // unit if used + min(choice.n_devices, host) > host else 0
            end = offset + skipped + choice.n_devices // unit
            if end < outside and (idle or not skipped):
                starts[index, offset], ends[index, offset] = offset + skipped, end
    final = np.arange(outside + 1) < outside if idle else np.arange(outside + 1) == outside - 1
    return Places(
        choices=usable,
        n_devices=whole.n_devices,
        devices_per_host=host,
        unit=unit,
        starts=starts,
        ends=ends,
        final=final,
    )
