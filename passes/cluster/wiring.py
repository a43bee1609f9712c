"""The part of a device's links that reaches the other devices of its group, by how the devices of hosts are wired.

A group communicates at the rate of its worst member: the links from it to neighbours in the group, as a part of all
links that a device has. Members that are no neighbours are reached through devices in between, whose traffic shares the
links, so on a torus links count 1 / distance; on a hybrid cube mesh such a pair is joined by PCI Express.

Reference: NVIDIA, "DGX-1 with Tesla V100 system architecture" (links of the hybrid cube mesh); jax-ml/scaling-book,
tpus.md (grids of pods, and which dimensions wrap around).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from passes.cluster.cluster import HostGroup, Wiring

# NVLinks between two of the 8 devices of a DGX-1 or AWS p3 host (NVIDIA).
CUBE_MESH = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)
CUBE_MESH_LINKS = 6
"""NVLinks of each device of a hybrid cube mesh: the sum of a row of the table above."""

PCIE_LINKS = 0.4
"""PCI Express as a number of NVLinks: 3 x16 through the host, assumed to give half of 15.75 GB/s, of 18.5 a link."""

Place = tuple[int, ...]

_DIMENSIONS: dict[Wiring, Literal[2, 3]] = {"2d torus of 16": 2, "3d torus of 4": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The part (`share`) of a device's bandwidth that reaches its group inside a host or torus, and the hops that a
    message takes past all members in a row.
    """

    share: float
    hops: int


def reach(hosts: HostGroup, devices: Sequence[int]) -> Reach:
    """The reach of a group of devices of one host or torus; devices are numbered from 0 in it."""
    return _reach(hosts.wiring, hosts.devices_per_host, hosts.hosts, tuple(devices))


def is_torus(wiring: Wiring) -> bool:
    """Whether the same links join devices of one host and of several."""
    return wiring in _DIMENSIONS


@lru_cache(maxsize=4096)
def _reach(wiring: Wiring, per_host: int, hosts: int, devices: tuple[int, ...]) -> Reach:
    whole = Reach(share=1.0, hops=len(devices) - 1)
    if wiring == "switch" or len(devices) < 2:
        return whole
    if wiring == "hybrid cube mesh":
        places = [device % per_host for device in devices]
        if max(places) >= len(CUBE_MESH):
            return whole
        links = min(sum(CUBE_MESH[place][other] for other in places) or PCIE_LINKS for place in places)
        return Reach(share=links / CUBE_MESH_LINKS, hops=len(devices) - 1)
    grid, wraps = torus(wiring, per_host * hosts)
    members = {_place(device, grid) for device in devices}
    extents = [max(line) - min(line) for line in zip(*members, strict=True)]
    links = min(len(members & _beside(member, grid, wraps)) for member in members)
    share = (links or _nearest(members, grid, wraps)) / (2 * len(grid))
    return Reach(share=share, hops=max(1, sum(extents)))


def torus(wiring: Wiring, n_devices: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """The sizes of the grid in which this many devices are sold, as even as can be, largest last, and which dimensions
    wrap around.
    """
    dimensions = _DIMENSIONS[wiring]
    whole = 16 if dimensions == 2 else 4
    shapes = [s for s in itertools.product(_divisors(n_devices), repeat=dimensions) if math.prod(s) == n_devices]
    grid = min((tuple(sorted(shape)) for shape in shapes), key=lambda sizes: (sum(sizes), sizes))
    wraps = tuple(size == whole if dimensions == 2 else size % whole == 0 for size in grid)
    return grid, wraps


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _place(device: int, grid: Place) -> Place:
    """The coordinates of a device; neighbouring numbers differ in the last one."""
    place: list[int] = []
    for size in reversed(grid):
        device, at = divmod(device, size)
        place.append(at)
    return tuple(reversed(place))


def _beside(place: Place, grid: Place, wraps: tuple[bool, ...]) -> set[Place]:
    """The coordinates of the neighbours of a place."""
    neighbours: set[Place] = set()
    for d, (size, wrap) in enumerate(zip(grid, wraps, strict=True)):
        for at in (place[d] - 1, place[d] + 1):
            if wrap or 0 <= at < size:
                neighbours.add((*place[:d], at % size, *place[d + 1 :]))
    return neighbours


def _nearest(members: set[Place], grid: Place, wraps: tuple[bool, ...]) -> float:
    """The links of a member of a group without neighbours: as many as there are nearest members, each shared with the
    devices in between.
    """
    first, *others = sorted(members)
    distances = [
        sum(
            min(abs(a - b), size - abs(a - b)) if wrap else abs(a - b)
            for a, b, size, wrap in zip(first, other, grid, wraps, strict=True)
        )
        for other in others
    ]
    nearest = min(distances)
    return distances.count(nearest) / nearest
