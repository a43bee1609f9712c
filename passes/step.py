"""Steps to be planned, and their variants: other programs that compute the same.

`Step` is the input of planners. `autopar` makes the variants of a traced step; a step that is a graph alone has none.
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
"""The most chunks that a loop is cut into so that each stage gets one, where its trips do not divide evenly: as many as
the deepest published pipeline has stages (Narayanan et al. 2021, table 1: 1T). Each is compiled by itself.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to compute a step: in `microbatches` (None: those of the user, else one), and with what each layer keeps.

    With nothing `kept` it is the step as it was written. A variant for `stages` (0: none) has a loop over microbatches,
    even for one, and its loops over layers are cut into chunks, so that each stage can have its own. A `sample` of that
    has few of the blocks that repeat, if they are no fewer than the stages. Planned with `offload`, the optimizer's
    state is in the host's memory between steps.
    """

    microbatches: int | None = None
    kept: tuple[Kept, ...] = ()
    stages: int = 0
    sample: bool = False
    offload: bool = False

    @property
    def count(self) -> int:
        """The number of microbatches; one by default."""
        return self.microbatches or 1

    def __str__(self) -> str:
        """The variant as text, empty for the step as it was written."""
        kinds = tuple(dict.fromkeys(self.kept))
        words = [count(self.count, "microbatch", "microbatches")] if self.count > 1 else []
        words += [f"layers keep {kinds[0]}" if len(kinds) == 1 else "layers keep different things"] if kinds else []
        return ", ".join([*words, *(["state offloaded"] if self.offload else [])])


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A step that can be planned: a program, its state, and whether each input's memory may be reused (`donated`).

    `named` says of each input whether the user calls it a part of the batch; empty if the user names none. `chosen` is
    the variant that it is, and `left_out` the blocks that a sample lacks of each stretch of equal ones. `rows` maps
    values that a stage receives in microbatches to the dimension along which each microbatch has its rows.
    """

    graph: Graph
    state_pairs: StatePairs = ()
    donated: tuple[bool, ...] = ()
    named: tuple[bool, ...] = ()
    chosen: Variant = Variant(microbatches=1)
    left_out: tuple[int, ...] = ()
    rows: Mapping[int, int] = field(default_factory=dict[int, int])

    @cached_property
    def batch(self) -> tuple[int, ...]:
        """The positions of the inputs that are the batch: microbatches, else those that the user names or that look
        like one.
        """
        if stacks := microbatch_stacks(self.graph):
            return tuple(i for i, value in enumerate(self.graph.inputs) if value in stacks)
        return batch_inputs(self.graph, self.state_pairs, self.named)

    @property
    def counts(self) -> tuple[int, ...]:
        """The possible numbers of microbatches, fewest first; empty where no batch can be cut."""
        return (self.chosen.microbatches or 1,)

    @property
    def layers(self) -> int:
        """The number of layers for which it may be chosen what they keep; 0 if that is decided, or if there
        are none.
        """
        return 0

    @property
    def has_stacks(self) -> bool:
        """Whether these layers are loops, which write what they keep into stacks and read it again."""
        return False

    def parts(self, cut: Stages) -> tuple[Step, ...]:
        """The stages that it was cut into, each as a step of its own."""
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
        """The step whose layers keep that for the backward pass, in all variants, where it may be chosen."""
        return self

    def variant(self, variant: Variant) -> Step:
        """The step as this variant. Raises PlanningError where it has no such variant."""
        count = variant.microbatches or self.chosen.microbatches
        if replace(variant, microbatches=count, offload=False) == replace(self.chosen, offload=False):
            return self
        words = str(variant) or "another variant"
        rule = "a step that is a graph alone is planned as it is"
        raise PlanningError(explain(f"a step in {words}", rule, "", "trace it with autopar.parallelize(...)"))


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedStep(Step):
    """A step as devices compute it that fuse attention; `written` is the step itself."""

    written: Step

    @classmethod
    def of(cls, step: Step) -> FusedStep:
        """The step with its attention fused."""
        return cls(
            graph=fused_attention(step.graph),
            state_pairs=step.state_pairs,
            donated=step.donated,
            rows=step.rows,
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
    """The step as the cluster's devices compute it: with attention fused, if they do that."""
    fuses = all(group.device.fuses_attention for group in cluster.groups)
    return FusedStep.of(step) if fuses and not isinstance(step, FusedStep) else step


def as_written(step: Step) -> Step:
    """The step as it was written, of whatever `seen_by` made of it."""
    return step.written if isinstance(step, FusedStep) else step
