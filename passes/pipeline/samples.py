"""The samples that a search over stages has of a step: of few numbers of microbatches first, of others on request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from passes.errors import PlanningError
from passes.layers import SAMPLE_BLOCKS, most_layers
from passes.pipeline.assemble import body_of
from passes.pipeline.step_blocks import Sample
from passes.step import Step, Variant

FINEST = 32
"""The most layers that a deep model is cut into: prices are of blocks, so more layers cost no more of them."""

ANCHORS = (4, 16, 64)
"""The first numbers of microbatches are those nearest to these. Half of each finds the same in 0.91 of the work, double
of each a step 9.5 % slower, as the best may then lie below them (`python -m benchmarks.settings`)."""

REACH, MOST_COUNTS = 4, 10
"""Others are up to this factor more or fewer than the best of them, and no more than so many. Half and double of the
factor find the same in 0.89 and 1.11 of the work (`python -m benchmarks.settings`)."""


def samples_of(step: Step, stages: int) -> dict[int, Sample]:
    """The samples that a search for that many stages begins with; one microbatch is among them if blocks are left out.

    Stages may turn out to be fewer.
    """
    samples = {count: sample for count in anchors(step.counts) if (sample := sampled(step, stages, count)) is not None}
    if 1 in step.counts and any(sample.left_out for sample in samples.values()):
        samples |= {1: sample} if (sample := sampled(step, stages, 1)) else {}
    return samples


def sampled(step: Step, stages: int, count: int) -> Sample | None:
    """The sample of a step on which it is priced in so many microbatches; None where it has no such variant."""
    try:
        variant = step.variant(Variant(microbatches=count, stages=stages, sample=True))
    except PlanningError:
        return None
    return Sample(graph=variant.graph, state_pairs=variant.state_pairs, left_out=variant.left_out)


def layers_of(samples: Mapping[int, Sample], layers: int | None, most: int) -> int:
    """The number of layers into which every sample can be cut, up to `layers`, by default `most` or as many as pay.

    1 if it cannot be cut, or if there are no samples.
    """
    limit = layers or max((finest(sample, most) for sample in samples.values()), default=1)
    return min((most_layers(body_of(sample.graph), limit, sample.left_out) for sample in samples.values()), default=1)


def finest(sample: Sample, layers: int) -> int:
    """The number of layers, of equally many blocks, that is worth it if a sample leaves blocks out; else `layers`."""
    if not sample.left_out:
        return layers
    n_blocks = sample.left_out + SAMPLE_BLOCKS
    return max(layers, math.ceil(n_blocks / math.ceil(n_blocks / FINEST)))


def anchors(counts: Sequence[int]) -> tuple[int, ...]:
    """The numbers of microbatches, of those that there may be, that a search begins with."""
    several = [count for count in counts if count > 1] or list(counts)
    return tuple(sorted({min(several, key=lambda c: (abs(math.log(c / at)), c)) for at in ANCHORS})) if several else ()


def near(counts: Sequence[int], best: int) -> tuple[int, ...]:
    """The numbers of microbatches that are not far from the best, nearest first."""
    reached = [count for count in counts if best <= REACH * count and count <= REACH * best]
    return tuple(sorted(reached, key=lambda c: (abs(math.log(c / best)), c))[:MOST_COUNTS])
