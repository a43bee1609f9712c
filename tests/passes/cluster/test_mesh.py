"""Groups of devices against a count over every device of the mesh; pieces of values; shapes of meshes."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from passes.cluster import Mesh, parse_cluster, shapes
from passes.errors import InternalError
from passes.ir import TensorType
from passes.sharding import Resharder, ShardingSpec, parse_spec

MESHES = [
    (("x",), (8,), "2x4:a100-80g"),
    (("x", "y"), (4, 2), "2x4:a100-80g"),
    (("x", "y"), (2, 4), "4x2:a100-80g"),
    (("x", "y"), (2, 3), "3x2:v100-16g"),
    (("x", "y"), (3, 2), "2x3:v100-16g"),
    (("x", "y", "z"), (2, 3, 2), "3x4:v100-16g"),
    (("x", "y", "z"), (2, 2, 2), "8:h100"),
    (("x",), (6,), "2x4:a100-80g"),
]


@pytest.mark.parametrize(("axes", "sizes", "text"), MESHES)
def test_groups_are_counted_device_by_device(axes: tuple[str, ...], sizes: tuple[int, ...], text: str) -> None:
    mesh = Mesh(axes=axes, sizes=sizes, cluster=parse_cluster(text))
    hosts = mesh.cluster.group()
    places = list(itertools.product(*map(range, sizes)))
    host_of = {place: i // hosts.devices_per_host for i, place in enumerate(places)}
    for n in range(1, len(axes) + 1):
        for along in itertools.permutations(axes, n):
            fixed = [i for i, axis in enumerate(axes) if axis not in along]
            groups: dict[tuple[int, ...], set[int]] = {}
            for place in places:
                groups.setdefault(tuple(place[i] for i in fixed), set()).add(host_of[place])
            crossing = Counter(host for spanned in groups.values() if len(spanned) > 1 for host in spanned)
            group = mesh.group(along)
            assert group.ranks == math.prod(mesh.axis_size(axis) for axis in along)
            assert group.hosts == max(map(len, groups.values()))
            share = max(crossing.values(), default=1)
            assert group.inter.bytes_per_second == pytest.approx(hosts.inter.bytes_per_second / share)
            assert group.intra == hosts.intra


def test_shapes_are_all_ordered_factorisations() -> None:
    for n, most in itertools.product(range(1, 25), (1, 2, 3)):
        every = [()] if n == 1 else []
        for axes in range(1, most + 1):
            every += [s for s in itertools.product(range(2, n + 1), repeat=axes) if math.prod(s) == n]
        assert list(shapes(n, max_axes=most)) == every


MESH = Mesh(axes=("x", "y"), sizes=(2, 3), cluster=parse_cluster("6:a100-80g"))


@pytest.mark.parametrize("reduction", ["add", "max"])
def test_specs_survive_their_text(reduction: str) -> None:
    for rank in range(4):
        for spec in Resharder(MESH).placements(rank, reduction):
            assert parse_spec(str(spec)) == spec


def test_pieces_have_the_shape_that_is_cut() -> None:
    whole = np.zeros((12, 6))
    for spec in Resharder(MESH).placements(2):
        piece = whole
        for d, axes in enumerate(spec.dims):
            for axis in axes:
                piece = np.split(piece, MESH.axis_size(axis), d)[0]
        assert spec.local_shape(whole.shape, MESH) == piece.shape
        assert spec.local_nbytes(TensorType(shape=whole.shape, dtype="bfloat16"), MESH) == 2 * piece.size


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ShardingSpec(dims=(("x",),)), "has 1 dimensions, the value"),
        (ShardingSpec(dims=(("x",), ("x",))), "uses an axis twice"),
        (ShardingSpec(dims=(("x",), ()), partial=("x",)), "uses an axis twice"),
        (ShardingSpec(dims=(("z",), ())), "or one that mesh"),
        (ShardingSpec(dims=((), ("y",))), "3 devices do not divide a dimension of 8"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(spec: ShardingSpec, words: str) -> None:
    type = TensorType(shape=(12, 8), dtype="float32")
    ShardingSpec(dims=(("x", "y"), ())).verify(type, MESH)
    with pytest.raises(InternalError, match=words):
        spec.verify(type, MESH)
