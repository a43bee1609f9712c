"""The order of a step's variants in one number of microbatches, by what they keep, and which of two computes more."""

from __future__ import annotations

from collections.abc import Sequence

from passes.step import Variant
from passes.transforms import KEPT, Kept


def variants_in(layers: int, count: int) -> tuple[Variant, ...]:
    """The variants of a step of `layers` in `count` microbatches, from what computes least to what keeps least."""
    kinds: Sequence[Kept] = KEPT if layers else KEPT[:1]
    return tuple(Variant(microbatches=count, kept=() if kind == KEPT[0] else (kind,) * layers) for kind in kinds)


def computes_more(variant: Variant, other: Variant) -> bool:
    """Whether a variant computes all that another does, in as many microbatches or more, and keeps no more of it.

    Whether they offload state makes no difference.
    """
    keeps = [[KEPT.index(kind) for kind in each.kept or (KEPT[0],)] for each in (variant, other)]
    return variant.count >= other.count and min(keeps[0]) >= max(keeps[1])
