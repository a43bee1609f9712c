"""Seconds of a collective under the alpha-beta model: one small function an algorithm, the cheapest wins, as in NCCL.

Every algorithm is a line over B, the bytes on the larger side of one device's buffer. With n ranks over h hosts,
r = n / h on each, links of latency a and bandwidth w (`i` inside a host; `x` across hosts, shared by a host's ranks),
and w the slower of the two that are used:

    ring          all-reduce      2 S + 2 (n-1)/n B / w               S = (n-h) a_i + (h-1) a_x
                  all-gather      S + (n-1)/n B / w                   and reduce-scatter
    tree          all-reduce      2 log2(r) a_i + 2 log2(h) a_x + 2 B / w
    one-shot      all-reduce      a_i + (n-1) B / w_i                 on one host: everybody sends everything
    switch        all-reduce      2 a_i + B / (0.72 w_i)              on one host whose switch adds (NVLink SHARP)
    hierarchical  all-reduce      reduce-scatter in the host, all-reduce across, all-gather in the host, as a
                                  pipeline: latencies add up, the slowest stage sets the rate
    pairwise      all-to-all      (r-1) a_i + (h-1) a_x + max((n-1)/n B / w_i, r (n-r)/n B / w_x)
    direct        permute         a + B / w

Where a network is congested, w_x falls with h (see `Link`). The launch of the kernel comes on top.

Reference: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005), sections
3 and 4; Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009); NCCL,
src/graph/tuning.cc, which adds up hops inside and between hosts in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from passes.cluster.mesh import Group, Mesh
from passes.text import quantities

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]

Floats = NDArray[np.float64]

SWITCH_EFFICIENCY = 0.72
"""Bytes all-reduced by NVLink SHARP per byte of ring bandwidth: 270 of 366 GB/s on H200, 479 of 682 on B200.

Source: stas00/ml-engineering, network/README.md, 8 GiB over 8 devices, SHARP on and off.
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
    """Seconds of one collective; `nbytes` is the larger side of one device's buffer, one number or an array of them.

    That is the buffer itself for all-reduce, all-to-all and permute, the result for all-gather, the input for
    reduce-scatter. A group of one device needs no time.
    """
    if isinstance(nbytes, np.ndarray):
        return np.minimum.reduce([cost.latency_seconds + cost.seconds_per_byte * nbytes for cost in costs(kind, group)])
    return min(cost.latency_seconds + cost.seconds_per_byte * nbytes for cost in costs(kind, group))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The time of one algorithm: a latency, and seconds for every byte of the payload."""

    latency_seconds: float
    seconds_per_byte: float


@lru_cache(maxsize=4096)
def costs(kind: Kind, group: Group) -> tuple[Cost, ...]:
    """The cost of each algorithm that can run `kind` over this group, or of a measurement with about as many ranks."""
    if group.ranks == 1:
        return (Cost(latency_seconds=0.0, seconds_per_byte=0.0),)
    measured = [m for m in group.measured if m.kind == kind] if group.hosts == 1 else []
    if measured:
        nearest = min(measured, key=lambda m: abs(m.ranks - group.ranks))
        return (Cost(latency_seconds=nearest.alpha_seconds, seconds_per_byte=1 / nearest.bytes_per_second),)
    candidates = (algorithm(group) for algorithm in ALGORITHMS[kind])
    return tuple(cost for cost in candidates if cost is not None)


def ring_all_reduce(group: Group) -> Cost:
    """The cost of an all-reduce as a reduce-scatter ring, then an all-gather ring."""
    once = ring(group)
    return Cost(latency_seconds=2 * once.latency_seconds, seconds_per_byte=2 * once.seconds_per_byte)


def ring(group: Group) -> Cost:
    """The cost of an all-gather or reduce-scatter in a ring: a piece of 1/n goes round in n - 1 hops, h - 1 of them
    between hosts.
    """
    n, h = group.ranks, group.hosts
    hops = (n - h) * group.intra.alpha_seconds + (h - 1) * group.inter.alpha_seconds
    return Cost(latency_seconds=hops, seconds_per_byte=(n - 1) / n / _slowest(group))


def tree(group: Group) -> Cost:
    """The cost of a double binary tree: up and down, in the host and across, each half of the data on its tree."""
    up = _log2(_ranks_per_host(group)) * group.intra.alpha_seconds + _log2(group.hosts) * group.inter.alpha_seconds
    return Cost(latency_seconds=2 * up, seconds_per_byte=2 / _slowest(group))


def one_shot(group: Group) -> Cost | None:
    """The cost where every rank sends everything to every other: the least latency, n - 1 times the bytes."""
    if group.hosts > 1:
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


def hierarchical_ring(group: Group) -> Cost | None:
    """The cost of an all-reduce in the host with a ring across hosts between its two halves."""
    return _hierarchical(group, ring_all_reduce)


def hierarchical_tree(group: Group) -> Cost | None:
    """The cost of an all-reduce in the host with a tree across hosts between its two halves."""
    return _hierarchical(group, tree)


def pairwise(group: Group) -> Cost:
    """The cost of an all-to-all: to each device of the host, then to each other host (data for all its devices at
    once).
    """
    n, h, r = group.ranks, group.hosts, _ranks_per_host(group)
    hops = (r - 1) * group.intra.alpha_seconds + (h - 1) * group.inter.alpha_seconds
    leaving = r * (n - r) / n / _across(group) if h > 1 else 0.0
    return Cost(latency_seconds=hops, seconds_per_byte=max((n - 1) / n / group.intra.bytes_per_second, leaving))


def direct(group: Group) -> Cost:
    """The cost of a permute: every rank sends once, and one of a host's ranks sends to the next host."""
    link = group.inter if group.hosts > 1 else group.intra
    return Cost(latency_seconds=link.alpha_seconds, seconds_per_byte=1 / _slowest(group))


Algorithm = Callable[[Group], Cost | None]

ALGORITHMS: Mapping[Kind, tuple[Algorithm, ...]] = {
    "all_reduce": (ring_all_reduce, tree, one_shot, switched, hierarchical_ring, hierarchical_tree),
    "all_gather": (ring,),
    "reduce_scatter": (ring,),
    "all_to_all": (pairwise,),
    "permute": (direct,),
}


def _hierarchical(group: Group, across: Callable[[Group], Cost]) -> Cost | None:
    """The cost of the three stages as a pipeline; each of a host's r ranks sends 1/r of the data across."""
    r = _ranks_per_host(group)
    if group.hosts == 1 or r == 1:
        return None
    host = replace(group, ranks=r, hosts=1)
    inside = switched(host) or ring_all_reduce(host)
    between = across(replace(group, ranks=group.hosts, intra=group.inter))
    return Cost(
        latency_seconds=inside.latency_seconds + between.latency_seconds,
        seconds_per_byte=max(inside.seconds_per_byte, between.seconds_per_byte),
    )


def _ranks_per_host(group: Group) -> int:
    return -(-group.ranks // group.hosts)


def _across(group: Group) -> float:
    """Bytes per second that a host's ranks send through the network together while all hosts talk."""
    return group.inter.bytes_per_second * group.hosts**-group.inter.congestion


def _slowest(group: Group) -> float:
    """Bytes per second of the slower link on the way."""
    inside = group.intra.bytes_per_second
    return min(inside, _across(group)) if group.hosts > 1 else inside


def _log2(n: int) -> int:
    return math.ceil(math.log2(n))
