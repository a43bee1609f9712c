"""A step to be planned, and its variants: other programs that compute the same.

`Step` is what planners take. `autopar` makes the variants of a traced step; a step that is a graph alone has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from passes.cluster import Cluster
from passes.errors import PlanningError, explain
from passes.ir import Graph, StatePairs
from passes.layers import batch_inputs, fused_attention
from passes.text import count
from passes.transforms import Kept, Stages, microbatch_stacks, stages

MOST_CHUNKS = 64
"""The most chunks that a loop is cut into so that each stage gets one, where its trips do not divide evenly: as many
as the deepest published pipeline has stages (Narayanan et al. 2021, table 1: 1T). Each is compiled by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to compute a step: in so many microbatches (None: as was asked, else one), and what each layer keeps.

    Nothing `kept` is the step as it was written. A variant for `stages` (none: 0) has a loop over microbatches, be it
    one, and its loops over layers are cut into chunks, so that each stage can have its own. A `sample` of that has few
    of the blocks that repeat, if they are no fewer than the stages. Planned with `offload`, the optimizer's state stays
    in the host's memory between steps.
    """

    microbatches: int | None = None
    kept: tuple[Kept, ...] = ()
    stages: int = 0
    sample: bool = False
    offload: bool = False

    @property
    def count(self) -> int:
        """The number of microbatches, one where nothing is said."""
        return self.microbatches or 1

    def __str__(self) -> str:
        """The variant in words, empty for the step as it was written."""
        kinds = tuple(dict.fromkeys(self.kept))
        words = [count(self.count, "microbatch", "microbatches")] if self.count > 1 else []
        words += [f"layers keep {kinds[0]}" if len(kinds) == 1 else "layers keep different things"] if kinds else []
        return ", ".join([*words, *(["state offloaded"] if self.offload else [])])


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A step that can be planned: a program, its state, and whether each input's room may be taken (`donated`).

    `named` says of each input whether the user calls it a part of the batch; it is empty where nothing is said.
    `chosen` is the variant that it is, and `left_out` the blocks that a sample lacks. Of what a stage takes from others
    in microbatches, `rows` has the dimension along which each has its rows, by value.
    """

    graph: Graph
    state_pairs: StatePairs = ()
    donated: tuple[bool, ...] = ()
    named: tuple[bool, ...] = ()
    chosen: Variant = Variant(microbatches=1)
    left_out: int = 0
    rows: Mapping[int, int] = field(default_factory=dict[int, int])

    @cached_property
    def batch(self) -> tuple[int, ...]:
        """The positions of the inputs that are the batch: microbatches, else what the user says or looks like one."""
        if stacks := microbatch_stacks(self.graph):
            return tuple(i for i, value in enumerate(self.graph.inputs) if value in stacks)
        return batch_inputs(self.graph, self.state_pairs, self.named)

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of microbatches that there may be, fewest first; none where there is no batch to be cut."""
        return (self.chosen.microbatches or 1,)

    @property
    def layers(self) -> int:
        """The layers of which it may be chosen what they keep; 0 where that is decided, or nothing to choose."""
        return 0

    @property
    def has_stacks(self) -> bool:
        """Whether these layers are loops, which write what they keep into stacks and read it again."""
        return False

    def parts(self, cut: Stages) -> tuple[Step, ...]:
        """The stages that it was cut into, each a step of its own."""
        return tuple(
            Step(
                graph=part.graph,
                state_pairs=stages.state_pairs_of(part, self.graph, self.state_pairs),
                donated=stages.donations(part, self.graph, self.donated),
                rows=part.rows,
            )
            for part in cut.parts
        )

    def keeping(self, kept: Kept) -> Step:
        """The step of which each layer keeps that for its backward pass, in all variants, where that may be chosen."""
        return self

    def variant(self, variant: Variant) -> Step:
        """The step computed so, whichever variant this is. Raises PlanningError where it has no such variant."""
        count = variant.microbatches or self.chosen.microbatches
        if replace(variant, microbatches=count, offload=False) == replace(self.chosen, offload=False):
            return self
        words = str(variant) or "another variant"
        rule = "a step that is a graph alone is planned as it is"
        raise PlanningError(explain(f"a step in {words}", rule, "", "trace it with autopar.parallelize(...)"))


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedStep(Step):
    """A step as devices see it that fuse attention; `written` is the step itself."""

    written: Step

    @classmethod
    def of(cls, step: Step) -> FusedStep:
        """The step with its attention fused."""
        return cls(
            graph=fused_attention(step.graph),
            state_pairs=step.state_pairs,
            donated=step.donated,
            named=step.named,
            chosen=step.chosen,
            left_out=step.left_out,
            written=step,
        )

    @property
    def counts(self) -> tuple[int, ...]:
        return self.written.counts

    @property
    def layers(self) -> int:
        return self.written.layers

    @property
    def has_stacks(self) -> bool:
        return self.written.has_stacks

    def keeping(self, kept: Kept) -> FusedStep:
        return FusedStep.of(self.written.keeping(kept))

    def variant(self, variant: Variant) -> FusedStep:
        return FusedStep.of(self.written.variant(variant))


def seen_by(step: Step, cluster: Cluster) -> Step:
    """The step as the cluster's devices compute it: they may fuse what it writes out."""
    fuses = all(group.device.fuses_attention for group in cluster.groups)
    return FusedStep.of(step) if fuses and not isinstance(step, FusedStep) else step


def as_written(step: Step) -> Step:
    """The step as it was written, whatever saw it."""
    return step.written if isinstance(step, FusedStep) else step
