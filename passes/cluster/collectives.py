"""Seconds of a collective under the alpha-beta model: those of the algorithm that takes least, as NCCL chooses.

Every algorithm is a line over B, the bytes on the larger side of one device's buffer. With n ranks over h hosts,
r = n / h on each, links of latency a and bandwidth w (`i` inside a host; `x` across hosts, a host's ranks together),
w the slower of the two that are used, and k = r - 1 hops past a host's ranks (fewer on a torus):

    ring          all-gather      S + (n-1)/n B / w                   S = h k a_i + (h-1) a_x; and reduce-scatter
    doubling      all-gather      log2(h) a_x + (n-1)/n B / w_x       one rank a host; and reduce-scatter
    halves        all-reduce      a reduce-scatter, then an all-gather: twice the above
    tree          all-reduce      2 k a_i + 2 log2(h) a_x + 2 B / (0.75 w)
    one-shot      all-reduce      a_i + (n-1) B / w_i                 on one host: everybody sends everything
    switch        all-reduce      2 a_i + B / (0.72 w_i)              on one host whose switch adds (NVLink SHARP)
    hierarchical  all-reduce      switches add in hosts, which halve and double between, as a pipeline:
                                  2 a_i + 2 log2(h) a_x + max(B / (0.72 w_i), 2 (h-1)/h B / w_x)
    all-reduce    all-gather      of zeros beside one's own part; reduce-scatter: an all-reduce of which a part is kept
    pairwise      all-to-all      k a_i + (h-1) a_x + max((n-1)/n B / w_i, r (n-r)/n B / w_x)
    direct        permute         a + B / w

so that a reduce-scatter or an all-gather never costs more than the all-reduce, and that never more than both. There is
no hierarchical all-gather or reduce-scatter: NCCL has none, and measured ones follow the ring; over two axes of a mesh
they are two steps of a plan. Links with `low_latency` run each of these under every protocol, which short messages
profit from. Where a network is congested, w_x falls with h (see `Link`). The launch of the kernel comes on top.

Reference: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005), sections
3 and 4; Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009); NCCL,
src/graph/tuning.cc, which adds up hops inside and between hosts in the same way, and chooses a protocol by size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import overload

import numpy as np
from numpy.typing import NDArray

from passes.cluster.cluster import Kind, Link
from passes.cluster.mesh import Group, Mesh
from passes.text import quantities

Floats = NDArray[np.float64]

SWITCH_EFFICIENCY = 0.72
"""Bytes all-reduced by NVLink SHARP per byte of ring bandwidth: 270 of 366 GB/s on H200, 479 of 682 on B200.

Source: stas00/ml-engineering, network/README.md, 8 GiB over 8 devices, SHARP on and off.
"""

TREE_EFFICIENCY = 0.75
"""The share of a ring's bandwidth that a tree gets: NCCL takes 0.9, of which messages of 1 to 64 MB reach 0.5 to 0.9
(NCCL, src/graph/tuning.cc).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A group of `count` equal collectives over `axes` that one source line (`where`) causes in a step.

    `nbytes` is the result of one of them on one device.
    """

    kind: Kind
    axes: tuple[str, ...]
    dtype: str
    nbytes: int
    count: int
    where: str

    def payload_nbytes(self, ranks: int) -> int:
        """Bytes on the larger side of one device's buffer, which is what `seconds` asks for."""
        return self.nbytes * ranks if self.kind == "reduce_scatter" else self.nbytes

    def seconds(self, mesh: Mesh) -> float:
        """Seconds of all of them, one after another."""
        group = mesh.group(self.axes)
        return self.count * seconds(self.kind, self.payload_nbytes(group.ranks), group)

    def __str__(self) -> str:
        times = f"{self.count:,} x " if self.count != 1 else ""
        where = f"  # {self.where}" if self.where else ""
        return f"{times}{self.kind}@{'+'.join(self.axes)} {self.dtype} {quantities.nbytes(self.nbytes)}{where}"


@overload
def seconds(kind: Kind, nbytes: float, group: Group) -> float: ...
@overload
def seconds(kind: Kind, nbytes: Floats, group: Group) -> Floats: ...
def seconds(kind: Kind, nbytes: float | Floats, group: Group) -> float | Floats:
    """Seconds of one collective over a group; `nbytes` may be one number or an array, and the result is of its shape.

    `nbytes` is the larger side of one device's buffer: the buffer itself for all-reduce, all-to-all and permute, the
    result for all-gather, the input for reduce-scatter. A group of one device needs no time.
    """
    lines = measured_costs(kind, group)
    if isinstance(nbytes, np.ndarray):
        reduce = np.maximum.reduce if lines else np.minimum.reduce
        return reduce([cost.latency_seconds + cost.seconds_per_byte * nbytes for cost in lines or costs(kind, group)])
    choose = max if lines else min
    return choose(cost.latency_seconds + cost.seconds_per_byte * nbytes for cost in lines or costs(kind, group))


def bucket_share(kind: Kind, nbytes: Floats, group: Group, bucket_nbytes: float) -> Floats:
    """The share of a full bucket's seconds that each of these arrays takes; infinite on a device without buckets."""
    if not bucket_nbytes:
        return np.full(nbytes.shape, np.inf)
    return nbytes / bucket_nbytes * seconds(kind, bucket_nbytes, group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The time of one algorithm: a latency, and seconds for every byte of the payload."""

    latency_seconds: float
    seconds_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One of NCCL's protocols: the time to start, and factors for the latency and bandwidth of a link."""

    start_seconds: float
    latency: float
    bandwidth: float


PROTOCOLS = (
    Protocol(start_seconds=8e-6, latency=1.0, bandwidth=1.0),
    Protocol(start_seconds=8e-6, latency=0.4, bandwidth=0.85),
    Protocol(start_seconds=4e-6, latency=0.2, bandwidth=0.25),
)
"""NCCL's Simple, LL128 and LL. Of src/graph/tuning.cc: 8.4, 10 to 14 and 3.6 to 6.6 us to start; 3.4 (times 1.9 for
long messages over several hosts), 1.9 and 0.6 us a hop on NVLink, 9.6 to 14, 4 to 8.5 and 2.7 to 5 us between hosts;
bandwidth whole, 0.92 (less where 16.7 GB/s a channel are fewer) and 1/4 to 1/3."""


@lru_cache(maxsize=4096)
def measured_costs(kind: Kind, group: Group) -> tuple[Cost, ...]:
    """The costs of `kind` as measured with about as many ranks, the slowest of which counts; empty where none was
    measured.
    """
    several = [m for m in group.measured if m.kind == kind] if group.ranks > 1 and group.hosts == 1 else []
    nearest = min((m.ranks for m in several), key=lambda ranks: abs(ranks - group.ranks), default=0)
    return tuple(
        Cost(latency_seconds=m.alpha_seconds, seconds_per_byte=1 / m.bytes_per_second)
        for m in several
        if m.ranks == nearest
    )


@lru_cache(maxsize=4096)
def costs(kind: Kind, group: Group) -> tuple[Cost, ...]:
    """The costs of the fastest algorithms for `kind` over this group, each the fastest for some number of bytes, by
    rising latency.
    """
    if group.ranks == 1:
        return (Cost(latency_seconds=0.0, seconds_per_byte=0.0),)
    return _fastest(
        replace(cost, latency_seconds=start + cost.latency_seconds)
        for start, way in _protocols(group)
        for cost in ALGORITHMS[kind](way)
    )


def _protocols(group: Group) -> Iterator[tuple[float, Group]]:
    """(seconds to start, group) pairs: the group with its links as they are, or as each protocol changes them."""
    links = (group.intra, group.inter) if group.hosts > 1 else (group.intra,)
    if not any(link.low_latency for link in links):
        yield 0.0, group
        return
    for protocol in PROTOCOLS:
        yield (
            protocol.start_seconds,
            replace(group, intra=_under(protocol, group.intra), inter=_under(protocol, group.inter)),
        )


def _under(protocol: Protocol, link: Link) -> Link:
    """The link as a protocol changes it; the link itself where it has no protocols."""
    if not link.low_latency:
        return link
    alpha, rate = link.alpha_seconds * protocol.latency, link.bytes_per_second * protocol.bandwidth
    return replace(link, alpha_seconds=alpha, bytes_per_second=rate)


def _fastest(costs: Iterable[Cost]) -> tuple[Cost, ...]:
    """The costs that are least for some number of bytes, by rising latency: the lower envelope of their lines."""
    kept: list[Cost] = []
    for line in sorted(costs, key=lambda cost: (cost.latency_seconds, cost.seconds_per_byte)):
        if kept and line.seconds_per_byte >= kept[-1].seconds_per_byte:
            continue
        while len(kept) > 1 and _meet(kept[-2], line) <= _meet(kept[-2], kept[-1]):
            kept.pop()
        kept.append(line)
    return tuple(kept)


def _meet(line: Cost, other: Cost) -> float:
    """The number of bytes from which the first cost, of more latency and fewer seconds per byte, is the lower."""
    return (other.latency_seconds - line.latency_seconds) / (line.seconds_per_byte - other.seconds_per_byte)


def ring(group: Group) -> Cost:
    """The cost of an all-gather or reduce-scatter in a ring: pieces of 1/n of the buffer travel n - 1 hops, h - 1 of
    them between hosts.
    """
    n, h = group.ranks, group.hosts
    hops = h * group.hops * group.intra.alpha_seconds + (h - 1) * group.inter.alpha_seconds
    return Cost(latency_seconds=hops, seconds_per_byte=(n - 1) / n / _slowest(group))


def doubling(group: Group) -> Cost | None:
    """The cost of an all-gather by doubling, or of a reduce-scatter by halving, among hosts with one rank each: NCCL's
    PAT, which has no form for several.
    """
    n = group.ranks
    if group.hosts < n or n == 1:
        return None
    return Cost(latency_seconds=_log2(n) * group.inter.alpha_seconds, seconds_per_byte=(n - 1) / n / _slowest(group))


def tree(group: Group) -> Cost:
    """The cost of a double binary tree between hosts of chains in them: up and down, half of the data on each tree."""
    up = group.hops * group.intra.alpha_seconds + _log2(group.hosts) * group.inter.alpha_seconds
    return Cost(latency_seconds=2 * up, seconds_per_byte=2 / (TREE_EFFICIENCY * _slowest(group)))


def one_shot(group: Group) -> Cost | None:
    """The cost where every rank sends its data to every other: the least latency, and n - 1 times the bytes."""
    if group.hosts > 1 or not group.direct:
        return None
    return Cost(
        latency_seconds=group.intra.alpha_seconds,
        seconds_per_byte=(group.ranks - 1) / group.intra.bytes_per_second,
    )


def switched(group: Group) -> Cost | None:
    """The cost where the switch adds on the way up and copies on the way down: the bytes do not grow with n."""
    if group.hosts > 1 or not group.intra.reduces:
        return None
    rate = SWITCH_EFFICIENCY * group.intra.bytes_per_second
    return Cost(latency_seconds=2 * group.intra.alpha_seconds, seconds_per_byte=1 / rate)


def switched_hosts(group: Group) -> Cost | None:
    """The cost where switches add in the hosts and, between their halves, hosts halve and double."""
    inside = switched(replace(group, hosts=1))
    if group.hosts == 1 or _ranks_per_host(group) == 1 or inside is None:
        return None
    across = 2 * (group.hosts - 1) / group.hosts / _across(group)
    return Cost(
        latency_seconds=inside.latency_seconds + 2 * _log2(group.hosts) * group.inter.alpha_seconds,
        seconds_per_byte=max(inside.seconds_per_byte, across),
    )


def pairwise(group: Group) -> Cost:
    """The cost of an all-to-all: to each device of the host, then to each other host (data for all its devices at
    once).
    """
    n, h, r = group.ranks, group.hosts, _ranks_per_host(group)
    hops = group.hops * group.intra.alpha_seconds + (h - 1) * group.inter.alpha_seconds
    leaving = r * (n - r) / n / _across(group) if h > 1 else 0.0
    return Cost(latency_seconds=hops, seconds_per_byte=max((n - 1) / n / group.intra.bytes_per_second, leaving))


def direct(group: Group) -> Cost:
    """The cost of a permute: every rank sends once, and one of a host's ranks sends to the next host."""
    link = group.inter if group.hosts > 1 else group.intra
    return Cost(latency_seconds=link.alpha_seconds, seconds_per_byte=1 / _slowest(group))


def halves(group: Group) -> list[Cost]:
    """The costs of a reduce-scatter, which are those of an all-gather as well: it takes the same steps backwards."""
    return _of(group, (ring, doubling))


def reductions(group: Group) -> list[Cost]:
    """The costs of an all-reduce, as a reduce-scatter and an all-gather, or at once."""
    in_two = [
        Cost(latency_seconds=2 * half.latency_seconds, seconds_per_byte=2 * half.seconds_per_byte)
        for half in halves(group)
    ]
    return in_two + _of(group, (tree, one_shot, switched, switched_hosts))


def _half(group: Group) -> list[Cost]:
    """The costs of a reduce-scatter or an all-gather: its own algorithms, or an all-reduce of which a part is kept."""
    return halves(group) + reductions(group)


Algorithms = Callable[[Group], list[Cost]]

ALGORITHMS: Mapping[Kind, Algorithms] = {
    "all_reduce": reductions,
    "all_gather": _half,
    "reduce_scatter": _half,
    "all_to_all": lambda group: [pairwise(group)],
    "permute": lambda group: [direct(group)],
}


def _of(group: Group, algorithms: Iterable[Callable[[Group], Cost | None]]) -> list[Cost]:
    """The costs of the algorithms that can run over the group."""
    return [cost for algorithm in algorithms if (cost := algorithm(group)) is not None]


def _ranks_per_host(group: Group) -> int:
    return -(-group.ranks // group.hosts)


def _across(group: Group) -> float:
    """Bytes per second that a host's ranks send through the network together while all hosts talk."""
    return group.inter.bytes_per_second * group.hosts**-group.inter.congestion


def _slowest(group: Group) -> float:
    """Bytes per second of the slower of the links that the group uses."""
    inside = group.intra.bytes_per_second
    return min(inside, _across(group)) if group.hosts > 1 else inside


def _log2(n: int) -> int:
    return math.ceil(math.log2(n))
