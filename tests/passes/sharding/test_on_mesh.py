"""Placements by device numbers: the law that a mesh's axes place an array so if every device gets its very piece."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from passes.cluster import Mesh, parse_cluster
from passes.device_placement import DevicePlacement, joined
from passes.sharding import ShardingSpec, boundaries, is_placed, spec_on

CLUSTER = parse_cluster("12:a100-80g")
SIZES = [(12,), (3, 4), (4, 3), (2, 6), (6, 2), (2, 2, 3), (3, 2, 2), (2, 3, 2), (2, 1, 6)]


def mesh_of(sizes: tuple[int, ...]) -> Mesh:
    return Mesh(axes=("x", "y", "z")[: len(sizes)], sizes=sizes, cluster=CLUSTER)


def coordinates(sizes: tuple[int, ...]) -> np.ndarray:
    """The place of each device along each axis, [devices, axes]."""
    return np.stack(np.unravel_index(np.arange(12), sizes), axis=-1)


def pieces(axes: tuple[int, ...], sizes: tuple[int, ...]) -> list[int]:
    """The piece of each device along a dimension that these axes cut, major first."""
    place = np.zeros(12, dtype=int)
    for axis in axes:
        place = place * sizes[axis] + coordinates(sizes)[:, axis]
    return place.tolist()


def runs_of(axes: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    strides = [int(np.prod(sizes[axis + 1 :])) for axis in range(len(sizes))]
    return joined((sizes[axis], strides[axis]) for axis in axes)


def choices(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    numbers = range(len(sizes))
    return [axes for count in range(len(sizes) + 1) for axes in itertools.permutations(numbers, count)]


@pytest.mark.parametrize("sizes", SIZES)
def test_axes_place_a_dimension_so_if_every_device_has_its_piece(sizes: tuple[int, ...]):
    mesh = mesh_of(sizes)
    for theirs in SIZES:
        for axes in choices(theirs):
            placement = DevicePlacement(devices=12, dims=(runs_of(axes, theirs),))
            equal = [ours for ours in choices(sizes) if pieces(ours, sizes) == pieces(axes, theirs)]
            for ours in choices(sizes):
                assert is_placed([tuple(mesh.axes[a] for a in ours)], placement, mesh) == (ours in equal)
            spec = spec_on(placement, mesh)
            assert (spec is None) == (not equal)
            assert spec is None or spec.dims[0] in [tuple(mesh.axes[a] for a in ours) for ours in equal]
            assert bool(equal) == (placement.boundaries <= boundaries(mesh))


def test_an_open_dimension_may_lie_anyhow_and_what_is_whole_on_any_mesh():
    mesh = mesh_of((3, 4))
    placement = DevicePlacement(devices=12, dims=(None, ((4, 1),)))
    assert is_placed([("x",), ("y",)], placement, mesh)
    assert not is_placed([("y",), ()], placement, mesh)
    assert spec_on(placement, mesh) == ShardingSpec(dims=((), ("y",)))
    assert is_placed([(), ()], DevicePlacement(devices=5, dims=((), ())), mesh)
    assert not is_placed([("y",)], DevicePlacement(devices=4, dims=(((4, 1),),)), mesh)
    assert str(placement) == "[any, 4@1] of 12 devices"


def test_an_axis_of_one_device_between_two_dimensions_cuts_neither():
    """A `shard_map` may name such an axis, and a spec may name no axis twice."""
    spec = spec_on(DevicePlacement(devices=12, dims=(((2, 6),), ((6, 1),))), mesh_of((2, 1, 6)))
    assert spec == ShardingSpec(dims=(("x",), ("z",)))


def test_runs_are_joined_where_devices_follow_each_other():
    dice = random.Random(0)
    for _ in range(50):
        runs = [(dice.choice([1, 2, 3]), dice.choice([1, 2, 3, 6])) for _ in range(3)]

        def number(k: int, runs: tuple[tuple[int, int], ...]) -> int:
            place = 0
            for count, stride in runs:
                place = place * count + k // stride % count
            return place

        short = joined(runs)
        assert [number(k, tuple(runs)) for k in range(36)] == [number(k, short) for k in range(36)]
        assert all(a[1] != b[0] * b[1] for a, b in itertools.pairwise(short))
