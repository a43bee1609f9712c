"""The samples of a step that a search over stages prices: in few numbers of microbatches first, in others on
request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from passes.errors import PlanningError
from passes.layers import Weigh, most_layers, part_flops, sampling
from passes.pipeline.assemble import body_of
from passes.pipeline.step_blocks import Sample
from passes.step import Step, Variant

FINEST = 32
"""The most layers that a deep model is cut into: blocks are priced, so more layers do not cost more prices."""

ANCHORS = (4, 16, 64)
"""The first numbers of microbatches are those nearest to these. Half of each finds the same in 0.91 of the work, double
of each a step 9.5 % slower, as the best may then lie below them (`python -m benchmarks.settings`)."""

REACH, MOST_COUNTS = 4, 10
"""The factor up to which other numbers of microbatches may differ from the best, and how many of them are tried. Half
and double of the factor find the same in 0.89 and 1.11 of the work (`python -m benchmarks.settings`).
"""


def samples_of(step: Step, stages: int) -> dict[int, Sample]:
    """The samples that a search for at most that many stages begins with, by number of microbatches.

    If blocks are left out, one microbatch is among them.
    """
    samples = {count: sample for count in anchors(step.counts) if (sample := sampled(step, stages, count)) is not None}
    if 1 in step.counts and any(any(sample.left_out) for sample in samples.values()):
        samples |= {1: sample} if (sample := sampled(step, stages, 1)) else {}
    return samples


def sampled(step: Step, stages: int, count: int) -> Sample | None:
    """The sample by which a step is priced in `count` microbatches; None where it has no such variant."""
    try:
        variant = step.variant(Variant(microbatches=count, stages=stages, sample=True))
    except PlanningError:
        return None
    return Sample(graph=variant.graph, state_pairs=variant.state_pairs, left_out=variant.left_out)


def layers_of(samples: Mapping[int, Sample], layers: int | None, most: int, weigh: Weigh = part_flops) -> int:
    """The number of layers into which every sample can be cut; at most `layers`, by default `most` or as many as pay.

    1 if the step cannot be cut, or if there are no samples.
    """
    limit = layers or max((finest(sample, most) for sample in samples.values()), default=1)
    counts = (most_layers(body_of(sample.graph), limit, sample.left_out, weigh) for sample in samples.values())
    return min(counts, default=1)


def finest(sample: Sample, layers: int) -> int:
    """The number of layers worth having: for a sample that leaves blocks out, up to `FINEST` of equally many blocks;
    else `layers`.
    """
    if not any(sample.left_out):
        return layers
    n_blocks = sum(missing + sampling.SAMPLE_BLOCKS for missing in sample.left_out if missing)
    return max(layers, math.ceil(n_blocks / math.ceil(n_blocks / FINEST)))


def anchors(counts: Sequence[int]) -> tuple[int, ...]:
    """The numbers of microbatches, of the possible `counts`, that a search begins with."""
    several = [count for count in counts if count > 1] or list(counts)
    return tuple(sorted({min(several, key=lambda c: (abs(math.log(c / at)), c)) for at in ANCHORS})) if several else ()


def near(counts: Sequence[int], best: int) -> tuple[int, ...]:
    """The numbers of microbatches near the best, nearest first."""
    reached = [count for count in counts if best <= REACH * count and count <= REACH * best]
    return tuple(sorted(reached, key=lambda c: (abs(math.log(c / best)), c))[:MOST_COUNTS])
