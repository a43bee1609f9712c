"""What a search over stages has of a step: samples in few numbers of microbatches at first, in others when it asks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from passes.errors import PlanningError
from passes.layers import KEPT, most_layers
from passes.pipeline.assemble import body_of
from passes.pipeline.step_blocks import Sample
from passes.step import Step, Variant

FINEST = 32
"""The most layers that a deep model is cut into: prices are of blocks, so more layers cost no more of them."""

ANCHORS = (4, 16, 64)
"""The first numbers of microbatches are those nearest to these."""

REACH, MOST_COUNTS = 4, 10
"""Others are up to this factor more or fewer than the best of them, and no more than so many."""


def samples_of(step: Step, stages: int) -> dict[int, Sample]:
    """The samples that a search for that many stages begins with; one microbatch is among them if blocks are left out.

    Stages may turn out to be fewer.
    """
    found = {count: one for count in anchors(step.counts) if (one := sampled(step, stages, count)) is not None}
    if 1 in step.counts and any(one.left_out for one in found.values()):
        found |= {1: one} if (one := sampled(step, stages, 1)) else {}
    return found


def sampled(step: Step, stages: int, count: int) -> Sample | None:
    """What the step in so many microbatches is priced on; None where it has no such variant."""
    try:
        found = step.variant(Variant(microbatches=count, stages=stages, sample=True))
    except PlanningError:
        return None
    return Sample(graph=found.graph, state_pairs=found.state_pairs, left_out=found.left_out)


def layers_of(samples: Mapping[int, Sample], layers: int | None, most: int) -> int:
    """In how many layers every sample can be cut, up to `layers`, by default `most` or as many as are worth it.

    1 if it cannot be cut, or if there are no samples.
    """
    asked = layers or max((finest(one, most) for one in samples.values()), default=1)
    return min((most_layers(body_of(one.graph), asked, one.left_out) for one in samples.values()), default=1)


def finest(sample: Sample, layers: int) -> int:
    """As many layers of equally many blocks as are worth it where blocks were left out of a sample; else `layers`."""
    if not sample.left_out:
        return layers
    n_blocks = sample.left_out + KEPT
    return max(layers, math.ceil(n_blocks / math.ceil(n_blocks / FINEST)))


def anchors(counts: Sequence[int]) -> tuple[int, ...]:
    """The numbers of microbatches, of those that there may be, that a search begins with."""
    several = [count for count in counts if count > 1] or list(counts)
    return tuple(sorted({min(several, key=lambda c: (abs(math.log(c / at)), c)) for at in ANCHORS})) if several else ()


def near(counts: Sequence[int], best: int) -> tuple[int, ...]:
    """The numbers of microbatches that are not far from the best, nearest first."""
    reached = [count for count in counts if best <= REACH * count and count <= REACH * best]
    return tuple(sorted(reached, key=lambda c: (abs(math.log(c / best)), c))[:MOST_COUNTS])
