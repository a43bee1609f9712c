"""Measured figures of a device, beyond its data sheet, and what they add to the seconds of operators."""

import dataclasses

import pytest

from passes.cluster import Cluster, Mesh, parse_cluster
from passes.intra_op.roofline import extents, local_flops, times_made
from passes.ir import TensorType
from passes.rules import Factor, ShardingRule
from passes.sharding import Resharder, ShardingSpec

PRODUCT = ShardingRule(
    factors=(Factor(size=4), Factor(size=64), Factor(size=32), Factor(size=16, reduction="add")),
    operands=((0, 1, 3), (0, 3, 2)),
    results=((0, 1, 2),),
    flops=2.0 * 4 * 64 * 32 * 16,
    light=False,
)
"""[4, 64, 16] by [4, 16, 32], four products in a batch."""


def mesh(**seen):
    """Eight devices on one axis."""
    cluster = parse_cluster("8:h100")
    group = cluster.group()
    device = dataclasses.replace(group.device, **{"cores": 0, **seen})
    named = Cluster(name="seen", groups=(dataclasses.replace(group, device=device),))
    return Mesh(axes=("x",), sizes=(8,), cluster=named)


def test_extents_are_those_of_one_device_and_of_one_product_of_a_batch():
    assert extents(PRODUCT, {}) == (64, 32, 16)
    assert extents(PRODUCT, {2: 8}) == (64, 4, 16)


def test_positions_and_window_of_a_convolution_are_rows():
    conv = dataclasses.replace(PRODUCT, flops=9 * PRODUCT.flops)
    assert extents(conv, {}) == (9 * 64, 32, 16)


def test_small_extents_slow_a_product_down_where_that_was_seen():
    assert local_flops(PRODUCT, (("x", 2),), mesh()) == PRODUCT.flops / 8
    slowed = local_flops(PRODUCT, (("x", 2),), mesh(half_extent=4.0))
    assert slowed == pytest.approx(PRODUCT.flops / 8 * (1 + 4 / 64) * (1 + 4 / 4) * (1 + 4 / 16))
    light = dataclasses.replace(PRODUCT, light=True)
    assert local_flops(light, (("x", 2),), mesh(half_extent=4.0)) == PRODUCT.flops / 8


def product(rows, columns, inner, batch=1):
    """The rule of so many products of these extents."""
    sizes = zip((batch, rows, columns, inner), ("", "", "", "add"), strict=True)
    factors = tuple(Factor(size=size, reduction=reduction) for size, reduction in sizes)
    return dataclasses.replace(PRODUCT, factors=factors, flops=2.0 * batch * rows * columns * inner)


def share(*extents, **seen):
    """The share of the best rate that a product reaches on a device of 100 cores."""
    rule = product(*extents)
    return rule.flops / local_flops(rule, (), mesh(**{"cores": 100, "half_inner": 64.0, **seen}))


def test_a_product_is_as_fast_as_its_tiles_and_waves_are_full():
    full = share(256 * 10, 128 * 10, 1 << 20)
    assert full == pytest.approx(1.0, rel=1e-3)
    assert share(256 * 10, 128 * 10 + 1, 1 << 20) < 0.8 * full  # ten tiles more, in a wave of their own or smaller ones
    assert share(16, 128 * 10, 1 << 20) < 0.2 * full  # a tile has more rows


def test_every_tile_begins_and_ends():
    assert share(2560, 1280, 64) == pytest.approx(0.5 * share(2560, 1280, 1 << 20), rel=1e-3)
    assert share(2560, 1280, 64, half_inner=0.0) == pytest.approx(share(2560, 1280, 4096, half_inner=0.0))


def test_small_products_side_by_side_fill_a_device():
    one, many = share(128, 128, 64), share(128, 128, 64, 100)
    assert one < 0.2 * many


@pytest.mark.parametrize("batch", [1, 64])
def test_a_product_of_vectors_is_a_sum_of_what_is_read(batch):
    """As one element of a tile it took two hundred times as long as reading 2^24 numbers does on an A100."""
    rule = product(1, 1, 1 << 24, batch)
    assert local_flops(rule, (), mesh(cores=100, half_inner=64.0)) == rule.flops
    assert share(1, 2, 1 << 24) < 0.1


def test_scores_behind_whose_gradients_they_are_made_again_cost_two_products():
    fused = TensorType(shape=(4,), dtype="float32", fused=2)
    assert times_made([fused]) == 2
    assert times_made([dataclasses.replace(fused, fused=0)]) == 1


@pytest.mark.parametrize(("shape", "extra"), [((1024, 64), 1 / 8), ((1, 64), 0.0)])
def test_gathering_behind_a_dimension_rearranges_one_device_s_piece_first(shape, extra):
    """By an all-to-all to the leading dimension, which is gathered as it is."""
    type = TensorType(shape=shape, dtype="float32")
    before, after = ShardingSpec(dims=((), ("x",))), ShardingSpec(dims=((), ()))
    plain, strided = (Resharder(on).cost(type, before, after) for on in (mesh(), mesh(strided_bytes_per_second=1e3)))
    assert strided - plain == pytest.approx(extra * type.nbytes / 1e3, rel=1e-3, abs=1e-3)


def test_gathering_the_leading_dimension_costs_nothing_more():
    type = TensorType(shape=(1024, 64), dtype="float32")
    before, after = ShardingSpec(dims=(("x",), ())), ShardingSpec(dims=((), ()))
    plain, strided = (Resharder(on).cost(type, before, after) for on in (mesh(), mesh(strided_bytes_per_second=1e3)))
    assert strided == plain
