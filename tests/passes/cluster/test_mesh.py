"""Groups of devices against a count over every device of the mesh; pieces of values; shapes of meshes."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from passes.cluster import Mesh, parse_cluster, shapes
from passes.cluster.mesh import Group
from passes.cluster.wiring import torus
from passes.errors import InternalError
from passes.ir import TensorType
from passes.sharding import Resharder, ShardingSpec, parse_spec

MESHES = [
    (("x",), (8,), "2x4:a100-80g"),
    (("x", "y"), (4, 2), "2x4:a100-80g"),
    (("x", "y"), (2, 4), "4x2:a100-80g"),
    (("x", "y"), (2, 3), "3x2:a100-40g"),
    (("x", "y"), (3, 2), "2x3:a100-40g"),
    (("x", "y", "z"), (2, 3, 2), "3x4:a100-40g"),
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
            groups: dict[tuple[int, ...], Counter[int]] = {}
            for place in places:
                groups.setdefault(tuple(place[i] for i in fixed), Counter())[host_of[place]] += 1
            crossing = [spanned for spanned in groups.values() if len(spanned) > 1]
            talkers = Counter(host for spanned in crossing for host in spanned)
            group = mesh.group(along)
            assert group.ranks == math.prod(mesh.axis_size(axis) for axis in along)
            assert group.hosts == max(map(len, groups.values()))
            sharing, adapters = max(talkers.values(), default=1), hosts.adapters / hosts.devices_per_host
            fewest = min((n for spanned in crossing for n in spanned.values()), default=hosts.devices_per_host)
            share = min(1 / sharing, max(1, int(fewest * adapters)) / hosts.adapters)
            assert group.inter.bytes_per_second == pytest.approx(hosts.inter.bytes_per_second * share)
            assert group.intra == hosts.intra


def group_of(text: str, sizes: tuple[int, ...], *axes: int) -> Group:
    mesh = Mesh(axes=tuple("xyz"[: len(sizes)]), sizes=sizes, cluster=parse_cluster(text))
    return mesh.group(tuple("xyz"[axis] for axis in axes))


@pytest.mark.parametrize(
    ("sizes", "axes", "share"),
    [
        ((8,), (0,), 1.0),  # a host alone: all of it
        ((2, 4), (0,), 1 / 4),  # four pairs share it
        ((2, 2), (0,), 1 / 2),  # two pairs share it
        ((2,), (0,), 1.0),  # in one host
    ],
)
def test_groups_share_a_hosts_link(sizes: tuple[int, ...], axes: tuple[int, ...], share: float) -> None:
    name = "2x4:a100-80g" if math.prod(sizes) == 8 else "2x2:a100-80g"
    whole = parse_cluster(name).group().inter.bytes_per_second
    assert group_of(name, sizes, *axes).inter.bytes_per_second == pytest.approx(share * whole)


def test_devices_of_part_of_a_host_reach_their_part_of_its_adapters() -> None:
    """A pair of devices is as fast across hosts of one device each as it is beside seven others."""
    alone, beside = group_of("2x1:h100", (2,), 0), group_of("2x8:h100", (2, 8), 0)
    assert alone.inter.bytes_per_second == pytest.approx(beside.inter.bytes_per_second)
    assert parse_cluster("2x4:h100").group().adapters == 4


@pytest.mark.parametrize(("sizes", "axis", "links"), [((8,), 0, 6), ((2, 4), 1, 4), ((4, 2), 1, 1), ((2, 4), 0, 1)])
def test_pairs_of_a_hybrid_cube_mesh_have_what_links_they_have(sizes: tuple[int, ...], axis: int, links: int) -> None:
    """All 8 devices use 6 links each, a half of the host 4; 0 and 1 share one, as 2 and 6 do."""
    whole = parse_cluster("8:v100-16g").group().intra.bytes_per_second
    assert group_of("8:v100-16g", sizes, axis).intra.bytes_per_second == pytest.approx(whole * links / 6)


@pytest.mark.parametrize(
    ("text", "sizes", "axis", "links"),
    [
        ("8:tpu-v5e", (8,), 0, 2),  # 2 x 4: corners have two of four links
        ("8:tpu-v5e", (2, 4), 1, 1),  # a line, which does not wrap around
        ("32x8:tpu-v5e", (16, 16), 1, 2),  # a ring of the whole pod
        ("32x8:tpu-v5e", (16, 16), 0, 2),
        ("32x8:tpu-v5e", (256,), 0, 4),
        ("32x8:tpu-v5e", (8, 32), 0, 1),  # every other row: one link, shared with the row between, on both sides
        ("16x4:tpu-v5p", (4, 4, 4), 1, 2),
        ("16x4:tpu-v5p", (64,), 0, 6),
    ],
)
def test_axes_of_a_torus_have_the_links_of_their_dimensions(
    text: str, sizes: tuple[int, ...], axis: int, links: int
) -> None:
    cluster = parse_cluster(text).group()
    group = group_of(text, sizes, axis)
    every = 6 if "v5p" in text else 4
    assert group.hosts == 1
    assert group.intra.bytes_per_second == pytest.approx(cluster.intra.bytes_per_second * links / every)


def test_a_grid_is_as_even_as_it_can_be_and_wraps_where_it_is_whole() -> None:
    assert torus("2d torus of 16", 8) == ((2, 4), (False, False))
    assert torus("2d torus of 16", 128) == ((8, 16), (False, True))
    assert torus("2d torus of 16", 256) == ((16, 16), (True, True))
    assert torus("3d torus of 4", 8) == ((2, 2, 2), (False, False, False))
    assert torus("3d torus of 4", 128) == ((4, 4, 8), (True, True, True))


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
