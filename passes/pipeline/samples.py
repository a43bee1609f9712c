"""What a search over stages has of a step: samples in few numbers of microbatches at first, in others when it asks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from passes.errors import PlanningError
from passes.ir import Graph, StatePairs
from passes.layers import KEPT, most_layers
from passes.pipeline.assemble import body_of
from passes.pipeline.step_blocks import Sample

FINEST = 32
"""The most layers that a deep model is cut into: prices are of blocks, so more layers cost no more of them."""

ANCHORS = (4, 16, 64)
"""The first numbers of microbatches are those nearest to these."""

REACH, MOST_COUNTS = 4, 10
"""Others are up to this factor more or fewer than the best of them, and no more than so many."""


class Step(Protocol):
    """A step that can be had in microbatches; `state_pairs` are the (output, input) positions of its state.

    `donated` says of each input whether its room may be taken.
    """

    @property
    def counts(self) -> Sequence[int]:
        """How many microbatches there may be; none if there is no batch."""
        ...

    @property
    def state_pairs(self) -> StatePairs: ...

    @property
    def donated(self) -> tuple[bool, ...]: ...

    def sample(self, count: int) -> Sample:
        """What the step in so many microbatches is priced on. Raises PlanningError where it has no such form."""
        ...

    def graph(self, count: int) -> Graph:
        """All of the step in so many microbatches."""
        ...


def samples_of(step: Step) -> dict[int, Sample]:
    """The samples that a search begins with; one microbatch is among them where blocks were left out."""
    found = {count: one for count in anchors(step.counts) if (one := sampled(step, count)) is not None}
    if 1 in step.counts and any(one.left_out for one in found.values()):
        found[1] = step.sample(1)
    return found


def sampled(step: Step, count: int) -> Sample | None:
    """A sample; None where the step has no such form."""
    try:
        return step.sample(count)
    except PlanningError:
        return None


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
