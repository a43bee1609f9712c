"""A named grid over the devices of a cluster, and the groups of devices that talk along its axes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from passes.cluster.cluster import Cluster, HostGroup, Link, Measured
from passes.cluster.wiring import is_torus, reach
from passes.errors import InternalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of devices that run one collective together: `ranks` devices on `hosts` hosts.

    `intra` is the link of a device to the others inside its host; a message passes all of them in `hops`, or any of
    them in one hop if `direct`. `inter` is the group's share of one host's network link when all groups of the mesh
    communicate at once. `measured` are the collectives that were measured inside a host. A torus of several hosts
    counts as one host.
    """

    ranks: int
    hosts: int
    intra: Link
    inter: Link
    hops: int
    direct: bool = True
    measured: tuple[Measured, ...] = ()

    @classmethod
    def of(cls, ranks: int, hosts: int, intra: Link, inter: Link, measured: tuple[Measured, ...] = ()) -> Group:
        """The group of devices that are one hop from each other inside a host."""
        inside = -(-ranks // hosts) - 1
        return cls(ranks=ranks, hosts=hosts, intra=intra, inter=inter, hops=inside, measured=measured)


class Axes(Protocol):
    """Named axes with sizes, without a cluster: all that the shape of a device's piece depends on."""

    @property
    def axes(self) -> tuple[str, ...]: ...

    def axis_size(self, axis: str) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Named axes over the first `size` devices of a cluster, row-major: neighbours differ along the last axis.

    Plans for it use no collective of a `forbidden` kind.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    cluster: Cluster
    forbidden: tuple[str, ...] = ()

    def __hash__(self) -> int:
        """A hash of the axes and sizes, which tell most meshes apart: meshes are keys of many tables."""
        return hash((self.axes, self.sizes, self.cluster.name))

    @cached_property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes)

    def axis_size(self, axis: str) -> int:
        """The number of devices along an axis."""
        return self.sizes[self.axes.index(axis)]

    def group(self, axes: tuple[str, ...]) -> Group:
        """The devices that differ only in their coordinates along `axes`."""
        return _group(self, tuple(sorted(axes, key=self.axes.index)))

    def verify(self) -> None:
        """Raises InternalError unless the axes are distinct and fit the cluster."""
        if len(set(self.axes)) != len(self.axes) or len(self.axes) != len(self.sizes):
            raise InternalError(f"mesh axes {self.axes} and sizes {self.sizes} do not match")
        if self.size > self.cluster.n_devices:
            raise InternalError(f"a mesh of {self.size} devices on a cluster of {self.cluster.n_devices}")

    def __str__(self) -> str:
        axes = " x ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True)) or "1 device"
        return f"{axes} without {', '.join(self.forbidden)}" if self.forbidden else axes


@lru_cache(maxsize=4096)
def _group(mesh: Mesh, axes: tuple[str, ...]) -> Group:
    """The slowest of the groups along `axes`: groups need not lie on hosts alike, and the mesh waits for that one."""
    hosts = mesh.cluster.group()
    ranks = math.prod(mesh.axis_size(axis) for axis in axes)
    last = range(-len(axes), 0)
    devices = np.arange(mesh.size).reshape(mesh.sizes)
    rows = np.moveaxis(devices, [mesh.axes.index(axis) for axis in axes], list(last)).reshape(-1, ranks)
    if is_torus(hosts.wiring):
        intra, hops = _inside(hosts, rows.tolist())
        return Group(
            ranks=ranks, hosts=1, intra=intra, inter=hosts.inter, hops=hops, direct=False, measured=hosts.measured
        )
    spans = [Counter[int](row.tolist()) for row in rows // hosts.devices_per_host]
    widest = max(map(len, spans))
    inter = replace(hosts.inter, bytes_per_second=_across(hosts, [span for span in spans if len(span) > 1]))
    intra = hosts.intra if hosts.wiring == "switch" else _inside(hosts, _by_host(hosts, rows))[0]
    hops = -(-ranks // widest) - 1
    return Group(ranks=ranks, hosts=widest, intra=intra, inter=inter, hops=hops, measured=hosts.measured)


def _across(hosts: HostGroup, spans: Sequence[Counter[int]]) -> float:
    """Bytes per second that each group gets of a host's network link, given its members in each host."""
    whole = hosts.inter.bytes_per_second
    if not spans:
        return whole
    sharing = max(Counter(host for span in spans for host in span).values())
    fewest = min(members for span in spans for members in span.values())
    return whole * min(1 / sharing, hosts.adapted(fewest))


def _inside(hosts: HostGroup, groups: Iterable[list[int]]) -> tuple[Link, int]:
    """The link and the hops of the groups inside hosts, of the worst-wired group."""
    reaches = [reach(hosts, group) for group in groups if len(group) > 1]
    share = min((group_reach.share for group_reach in reaches), default=1.0)
    link = replace(hosts.intra, bytes_per_second=hosts.intra.bytes_per_second * share)
    return link, max((group_reach.hops for group_reach in reaches), default=0)


def _by_host(hosts: HostGroup, rows: NDArray[np.int_]) -> list[list[int]]:
    """The devices of each group on each host, numbered from 0 in that host."""
    size = hosts.devices_per_host
    parts = {tuple((row[row // size == host] % size).tolist()) for row in rows for host in np.unique(row // size)}
    return [list(part) for part in parts]


def shapes(n_devices: int, *, max_axes: int = 2) -> tuple[tuple[int, ...], ...]:
    """Every factorisation of `n_devices` into at most `max_axes` ordered sizes above 1, fewest axes first.

    A single device gives one shape without axes.
    """
    if n_devices == 1:
        return ((),)
    shapes_found: list[tuple[int, ...]] = [(n_devices,)]
    for axes in range(2, max_axes + 1):
        shapes_found.extend(_factorisations(n_devices, axes))
    return tuple(shapes_found)


def _factorisations(n: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(n,)] if n > 1 else []
    return [(d, *others) for d in range(2, n) if n % d == 0 for others in _factorisations(n // d, parts - 1)]
