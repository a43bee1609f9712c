"""The pipelines that a search may draft of a step, in every number of microbatches in which it can be written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from passes.cluster import Mesh
from passes.errors import PlanningError
from passes.intra_op import pins, restrictions
from passes.ir import Graph
from passes.pipeline.assemble import body_of
from passes.pipeline.samples import sampled
from passes.pipeline.stage_table import LEAST_GAIN, StageCostTable
from passes.pipeline.step_blocks import Sample
from passes.step import Step

NEAR_BEST = 1.1
"""Drafts are planned whose price is within this factor of the best price, as long as no plan is better than the price.
A large step is drafted again for less memory where its best plan takes more than this factor of the fastest draft. What
was measured is at `passes.pipeline.drafting.RIVAL`.
"""

MOST_PLANNED_NODES = 6_000
"""Drafts are planned, after the first that fits, while they have no more operators than this in all: a bound on
the time of planning (`python -m benchmarks.planning cases`). What was measured is
at `passes.pipeline.drafting.RIVAL`."""

LARGE_NODES = MOST_PLANNED_NODES // 2
"""The operators of a step above which it is large: one draft of it is planned, as two would have more than
`MOST_PLANNED_NODES`."""


@dataclass(slots=True, kw_only=True)
class DraftSpace:
    """The pipelines of a `step` that may be drafted: its `samples`, the `schedules`, and the prices of a `table`.

    There is a sample for each number of microbatches in which the step was written so far, as its variant for `stages`
    stages, whose loops over layers are chunked. `has` adds others.
    """

    step: Step
    stages: int
    samples: dict[int, Sample]
    schedules: Sequence[str]
    table: StageCostTable
    _megatron_tables: dict[tuple[int, int], StageCostTable] = field(
        default_factory=dict[tuple[int, int], StageCostTable]
    )
    _refused_counts: set[int] = field(default_factory=set[int])

    @property
    def is_large(self) -> bool:
        """Whether a step is so large that few drafts are planned, and each number of microbatches takes its time."""
        sample = next(iter(self.samples.values()))
        return any(sample.left_out) or size(sample.graph) > LARGE_NODES

    @property
    def reach(self) -> float:
        """The multiple of the best draft's seconds up to which others are worth planning."""
        return 1.0 if self.is_large else NEAR_BEST

    @property
    def least_gain(self) -> float:
        """The share of the best draft's seconds that another must be able to save to be priced."""
        return LEAST_GAIN if self.is_large else 0.0

    def megatron_table(self, size: int, tensor: int) -> StageCostTable:
        """The prices of blocks on `size` devices laid out as by Megatron: weights are cut over `tensor` of them."""
        if (size, tensor) not in self._megatron_tables:
            meshes, data = self.table.bounds.meshes_of(size), size // tensor
            sizes = tuple(n for n in (data, tensor) if n > 1)
            mine = Mesh(axes=("x", "y")[: len(sizes)], sizes=sizes, cluster=self.table.cluster)
            mesh = next((mesh for mesh in meshes if mesh.sizes == sizes), pins.without(mine, meshes[0].forbidden))
            along = restrictions.Along(mesh.axes[0] if data > 1 else "", mesh.axes[-1] if tensor > 1 else "")
            block_costs = self.table.block_costs.restricted(along)
            self._megatron_tables[size, tensor] = self.table.restricted(block_costs, lambda _: [mesh])
        return self._megatron_tables[size, tensor]

    def has(self, count: int) -> bool:
        """Whether the step can be written in `count` microbatches, and has as many blocks then as in others."""
        if count in self.samples or count in self._refused_counts:
            return count in self.samples
        sample = sampled(self.step, self.stages, count)
        if sample is None or not self._is_cut_alike(count, sample):
            self._refused_counts.add(count)
        return count in self.samples

    def _is_cut_alike(self, count: int, sample: Sample) -> bool:
        """Whether a sample has as many blocks as others; if so, it is the one of `count` microbatches now."""
        n_blocks = len(self.table.step.cuts(next(iter(self.samples))).blocks)
        self.samples[count] = sample
        with suppress(PlanningError):
            if len(self.table.step.cuts(count).blocks) == n_blocks:
                return True
        del self.samples[count]
        return False


def size(graph: Graph) -> int:
    """The number of operators of a step in microbatches: those outside its loop, and those of the loop's body."""
    return len(graph.nodes) + len(body_of(graph).nodes)
