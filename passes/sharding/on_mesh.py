"""Placements by device numbers on a plan's mesh, whose axes have strides of their own."""

from __future__ import annotations

from collections.abc import Sequence

from passes.cluster import Mesh
from passes.device_placement import DevicePlacement, Runs, joined
from passes.sharding.spec import ShardingSpec


def boundaries(mesh: Mesh) -> frozenset[int]:
    """The strides of a mesh's axes, and its size."""
    return frozenset((mesh.size, *_strides(mesh).values()))


def is_placed(dims: Sequence[tuple[str, ...]], placement: DevicePlacement, mesh: Mesh) -> bool:
    """Whether each device has the piece that it should if these axes cut the dimensions."""
    if not placement.is_whole and placement.devices != mesh.size:
        return False
    pairs = zip(dims, placement.dims, strict=True)
    return all(runs is None or _runs(axes, mesh) == runs for axes, runs in pairs)


def spec_on(placement: DevicePlacement, mesh: Mesh) -> ShardingSpec | None:
    """The spec that places an array so, with open dimensions whole; None where the mesh has no such axes."""
    dims = tuple(_axes(runs or (), mesh) for runs in placement.dims)
    spec = ShardingSpec(dims=dims)
    closed = DevicePlacement(devices=placement.devices, dims=tuple(runs or () for runs in placement.dims))
    return spec if is_placed(dims, closed, mesh) else None


def _strides(mesh: Mesh) -> dict[str, int]:
    strides, stride = dict[str, int](), 1
    for axis, size in reversed(list(zip(mesh.axes, mesh.sizes, strict=True))):
        strides[axis], stride = stride, stride * size
    return strides


def _runs(axes: Sequence[str], mesh: Mesh) -> Runs:
    strides = _strides(mesh)
    return joined((mesh.axis_size(axis), strides[axis]) for axis in axes)


def _axes(runs: Runs, mesh: Mesh) -> tuple[str, ...]:
    """The axes of several devices that lie within the runs of devices, major first."""
    strides = _strides(mesh)
    return tuple(
        axis
        for pieces, stride in runs
        for axis in mesh.axes
        if stride <= strides[axis] < strides[axis] * mesh.axis_size(axis) <= stride * pieces
    )
