"""Shardings as users write them, as the device numbers of every piece; and the shardings in which arguments arrive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from autopar import jax_compat
from autopar.errors import UnsupportedError, explain
from autopar.jax_compat import Device
from autopar.plan import axes_of
from passes.device_placement import DevicePlacement, Runs, joined

Devices = tuple[Device, ...]
Placed = tuple[Sharding | None, ...]
"""The sharding of each flat argument or result; None where the plan chooses."""


def placement_of(
    sharding: Sharding, shape: Sequence[int], free: Iterable[int] = (), source: str = ""
) -> DevicePlacement:
    """The device numbers of an array of this shape in a sharding; dimensions in `free` are for the planner to decide.

    So is a dimension that the devices do not divide. Raises UnsupportedError for a sharding without a mesh.
    """
    whole = DevicePlacement(devices=sharding.num_devices, dims=((),) * len(shape))
    if not isinstance(sharding, NamedSharding):
        if sharding.is_fully_replicated:
            return whole
        rule = "a plan places arrays on meshes, by jax.sharding.NamedSharding"
        raise UnsupportedError(explain(f"a sharding {sharding!r:.80}", rule, source, "name a mesh and a PartitionSpec"))
    if 0 in shape:
        return whole
    strides = _strides(sharding.mesh.shape)
    entries = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    dims: list[Runs | None] = []
    for number, (entry, size) in enumerate(zip(entries, shape, strict=True)):
        if number in free or entry is PartitionSpec.UNCONSTRAINED:
            dims.append(None)
            continue
        runs = joined((sharding.mesh.shape[axis], strides[axis]) for axis in axes_of(entry))
        dims.append(None if size % math.prod(pieces for pieces, _ in runs) else runs)
    return DevicePlacement(devices=sharding.mesh.size, dims=tuple(dims))


def left_to_plan(sharding: Sharding) -> Sharding:
    """The same sharding on axes that JAX's types do not track, in which a value may be constrained."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh, auto = sharding.mesh, (AxisType.Auto,) * len(sharding.mesh.axis_names)
    if isinstance(mesh, Mesh):
        return NamedSharding(Mesh(mesh.devices, mesh.axis_names, axis_types=auto), sharding.spec)
    return NamedSharding(AbstractMesh(mesh.axis_sizes, mesh.axis_names, auto), sharding.spec)


def _strides(shape: Mapping[str, int]) -> dict[str, int]:
    strides, stride = dict[str, int](), 1
    for axis, size in reversed(list(shape.items())):
        strides[axis], stride = stride, stride * size
    return strides


def devices_of(sharding: Any) -> Devices | None:
    """The devices of a sharding or mesh, in its order; None for one without devices."""
    mesh = getattr(sharding, "mesh", sharding)
    if isinstance(mesh, Mesh):
        return tuple(np.ravel(mesh.devices).tolist())
    if mesh is None or isinstance(mesh, AbstractMesh):
        return None
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def arriving(leaves: Sequence[Any]) -> Placed:
    """The sharding of each argument that is on a mesh, or whose type says where it will be; None for others."""
    return tuple(map(_committed, leaves))


def _committed(leaf: Any) -> Sharding | None:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or jax_compat.is_traced(leaf):
        return None
    return sharding if getattr(leaf, "committed", True) else None


def specified(shardings: Sequence[Any]) -> Placed:
    """The shardings with None for those that are unspecified, for which JAX has a value of its own."""
    return tuple(s if isinstance(s, Sharding) else None for s in shardings)
