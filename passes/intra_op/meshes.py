"""The meshes that a program is planned over: every layout of a cluster's devices, or the one that the program names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations

from passes.cluster import Cluster, Mesh, shapes
from passes.errors import PlanningError, explain
from passes.ir import Graph
from passes.rules import boundaries_of, pinned_mesh
from passes.sharding import boundaries


def layouts(cluster: Cluster, n_devices: int, max_axes: int) -> list[Mesh]:
    """The meshes over the first devices of a cluster, one for each layout that may be the fastest."""
    meshes = [_mesh(cluster, sizes) for sizes in shapes(n_devices, max_axes=max_axes)]
    if n_devices > cluster.group().devices_per_host:
        return meshes
    rates = [_rates(mesh) for mesh in meshes]
    slower = {a for a, b in permutations(range(len(meshes)), 2) if _is_slower(rates[a], rates[b], equal=b < a)}
    return [mesh for place, mesh in enumerate(meshes) if place not in slower]


def for_constraints(graph: Graph, cluster: Cluster, max_axes: int) -> list[Mesh]:
    """The layouts of all devices on which the user's placements are possible, or else the coarsest such mesh.

    That one may have any number of axes. Empty where no placement of the user's asks for a mesh; all layouts where none
    is possible.
    """
    needed, size = boundaries_of(graph), cluster.n_devices
    if needed <= {1, size}:
        return []
    meshes = [_mesh(cluster, sizes) for sizes in shapes(size, max_axes=max_axes)]
    edges = sorted({1, size, *needed}, reverse=True)
    coarsest = tuple(outer // inner for outer, inner in pairwise(edges) if outer % inner == 0)
    if math.prod(coarsest) != size:
        return meshes
    return [mesh for mesh in meshes if needed <= boundaries(mesh)] or [_mesh(cluster, coarsest)]


def allowed(graph: Graph, meshes: Sequence[Mesh]) -> Sequence[Mesh]:
    """The meshes; where `shard_map`s of the program name a mesh, that one alone."""
    pinned = pinned_mesh(graph)
    if pinned is None:
        return meshes
    names, sizes = tuple(pinned), tuple(pinned.values())
    same = [mesh for mesh in meshes if sorted(mesh.sizes) == sorted(s for s in sizes if s > 1)]
    if not same:
        named_axes = ", ".join(f"{name}={size}" for name, size in pinned.items())
        tried, count = " or ".join(map(str, meshes)), math.prod(sizes)
        remedy = f"give it a mesh of that shape, or plan with Auto(max_axes={max(2, len(sizes))})"
        if count != meshes[0].size:
            remedy = f"give it a mesh of all devices, or plan for its own {count}: devices=jax.devices()[:{count}]"
        raise PlanningError(
            explain(
                f"a shard_map over the mesh ({named_axes})",
                "a shard_map runs on the very mesh that it names, with all of its devices",
                f"this planner tried {tried}",
                remedy,
            )
        )
    return [replace(same[0], axes=names, sizes=sizes)]


def _mesh(cluster: Cluster, sizes: tuple[int, ...]) -> Mesh:
    names = ("x", "y", "z", *(f"x{number}" for number in range(3, len(sizes))))
    return Mesh(axes=names[: len(sizes)], sizes=sizes, cluster=cluster)


def named(cluster: Cluster, *axes: tuple[str, int]) -> Mesh:
    """The mesh of these named axes; axes of one device are left out."""
    used = [(name, size) for name, size in axes if size > 1]
    return Mesh(axes=tuple(name for name, _ in used), sizes=tuple(size for _, size in used), cluster=cluster)


def _rates(mesh: Mesh) -> dict[tuple[int, ...], list[tuple[float, int]]]:
    """(bytes per second, -hops) of the groups along axes of these sizes, the slowest first."""
    rates: dict[tuple[int, ...], list[tuple[float, int]]] = {}
    for length in range(1, len(mesh.axes) + 1):
        for axes in combinations(mesh.axes, length):
            group = mesh.group(axes)
            sizes = tuple(sorted(map(mesh.axis_size, axes)))
            rates.setdefault(sizes, []).append((group.intra.bytes_per_second, -group.hops))
    return {sizes: sorted(each) for sizes, each in rates.items()}


def _is_slower(
    these: Mapping[tuple[int, ...], list[tuple[float, int]]],
    those: Mapping[tuple[int, ...], list[tuple[float, int]]],
    *,
    equal: bool,
) -> bool:
    """Whether a mesh has another one's axes in an order in which no group is faster, and some are slower unless
    `equal`.

    Behind a switch all distances within a host are equal, so that two orders differ in names alone.
    """
    if these.keys() != those.keys() or (these == those and not equal):
        return False
    pairs = [(a, b) for sizes in these for a, b in zip(these[sizes], those[sizes], strict=True)]
    return all(rate <= faster and hops <= fewer for (rate, hops), (faster, fewer) in pairs)
