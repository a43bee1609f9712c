"""The search over stages of a step as it is written, then with less kept for the backward pass.

Stages keep activations of several microbatches in flight. Where memory is short, recomputing some of them allows fewer
stages, or larger microbatches. Where layers are loops it may be faster in any case, since loops write what they keep
into stacked arrays.

Reference: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from passes.ir import Graph
from passes.layers import Weigh, part_flops
from passes.pipeline.samples import layers_of, samples_of
from passes.pipeline.search import StagedSearch
from passes.pipeline.step_blocks import Sample
from passes.plan import Alternative, PipelinePlan
from passes.progress import SearchContext
from passes.step import Step
from passes.transforms import Kept

LESS_KEPT: tuple[Kept, ...] = ("matmuls", "inputs")
"""What layers keep in the variants that are searched after the step as it is written.

The second is searched only where nothing fits in the first: recomputing all of the forward pass is a quarter more work,
which larger microbatches hardly make up for (GPT 1.3B, batch 256, 4x8:v100-16g: 2.93 s a step as it is written, 2.66
with `matmuls` kept, 2.82 with `inputs`).
"""

WORTH = 0.75
"""The share of the best plan's seconds below which the drafts refused for their bytes must be, by their bounds, for
less kept to be searched; chosen.

Bounds leave out waiting and most of what is sent, and recomputation takes time. For GPT 1.3B, as above, the share is
0.62, and less kept gains 9 %; for Wide-ResNet 13B (batch 1,536, 8x8:v100-16g) it is 0.81, and 3.5 times the planning
found nothing.
"""

Samples = dict[int, Sample]


@dataclass(slots=True, kw_only=True)
class StagedVariants:
    """The searches over stages of a `step` and its variants with less kept; `samples` are those for `stages` stages.

    `begin(step=, samples=, layers=, context=)` makes the search of one variant in at most `layers` layers, even as
    `weigh` has it, whose plans must stay below the cutoff of the `context`.
    """

    step: Step
    samples: Samples
    stages: int
    layers: int
    begin: Callable[..., StagedSearch]
    context: SearchContext
    weigh: Weigh = part_flops
    searches: list[StagedSearch] = field(default_factory=list[StagedSearch])

    def run(self, cutoff: float) -> PipelinePlan | None:
        """The cheapest plan in stages that takes less than `cutoff` seconds and keeps the limit; None if there is none.

        A step with recomputation of its own, by the user's `jax.checkpoint`, is searched as it is.
        """
        best: PipelinePlan | None = None
        for step, samples, layers in self._variants():
            name = "" if step is self.step else f"layers keep {step.chosen.kept[0]}"
            context = self.context.part(
                name, best=lambda seconds: seconds, cutoff=best.step_seconds if best else cutoff
            )
            search = self.begin(step=step, samples=samples, layers=layers, context=context)
            self.searches.append(search)
            plan: PipelinePlan | None = None
            with self.context.ending_early():  # what the searches before have found is kept
                plan = search.run()
            best = min((p for p in (best, plan) if p is not None), key=lambda p: p.step_seconds, default=None)
            is_over = self.context.is_interrupted or (best is not None and self.context.deadline.is_over())
            is_bound = search.least_refused < WORTH * (best.step_seconds if best else cutoff)
            is_enough = not is_bound or (plan is not None and step is not self.step)
            if is_over or (is_enough and not step.has_stacks):
                break
        return best

    def _variants(self) -> Iterator[tuple[Step, Samples, int]]:
        """The step as it is written, then each variant with less kept, with their samples."""
        yield self.step, self.samples, self.layers
        for kept in LESS_KEPT if self.step.layers and not _recomputes(self.step.graph) else ():
            step = self.step.keeping(kept)
            samples = samples_of(step, self.stages)
            layers = layers_of(samples, self.layers, self.layers, self.weigh)  # it may have fewer places to be cut
            if layers > 1:
                yield step, samples, layers

    @property
    def met(self) -> list[Alternative]:
        """The drafts and plans that were not taken, with their seconds and bytes."""
        return [alternative for search in self.searches for alternative in search.met]

    @property
    def least_memory_plan(self) -> PipelinePlan | None:
        """The plan of least memory of those that do not fit; None if there is none."""
        plans = [search.least_memory_plan for search in self.searches if search.least_memory_plan is not None]
        return min(plans, key=lambda plan: plan.peak_nbytes, default=None)

    def rivals(self, seconds: float) -> bool:
        """Whether the step without stages, by its price, may take hardly longer than these seconds."""
        return self.searches[0].drafting.rivals(seconds)


def _recomputes(graph: Graph) -> bool:
    """Whether a program recomputes what its forward pass did not keep."""
    return any(node.is_recomputed or any(map(_recomputes, node.subgraphs)) for node in graph.nodes)
