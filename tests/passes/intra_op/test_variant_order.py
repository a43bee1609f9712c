"""The variants of a step in one number of microbatches, from what costs least to what needs least memory."""

from __future__ import annotations

from dataclasses import replace

from passes.intra_op.variant_order import computes_more, variants_in
from passes.transforms import KEPT


def test_layers_keep_less_and_less_alike():
    kinds = variants_in(2, 4)
    assert [variant.kept for variant in kinds] == [(), *((kind, kind) for kind in KEPT[1:])]
    assert {variant.count for variant in kinds} == {4}


def test_without_layers_all_is_kept():
    assert [variant.kept for variant in variants_in(0, 1)] == [()]


def test_a_variant_that_keeps_less_in_no_fewer_microbatches_computes_more():
    (everything, *_, least), more = variants_in(2, 2), variants_in(2, 4)
    assert computes_more(least, everything)
    assert not computes_more(everything, least)
    assert computes_more(more[0], everything)
    assert not computes_more(everything, more[0])
    assert not computes_more(more[0], least)
    mixed = replace(least, kept=(KEPT[0], KEPT[-1]))
    assert computes_more(least, mixed)
    assert computes_more(mixed, everything)
    assert not computes_more(mixed, least)
    assert all(computes_more(replace(least, offload=offload), everything) for offload in (False, True))
