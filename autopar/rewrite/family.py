"""A step in several numbers of microbatches, each traced when it is asked for: whole, or with fewer of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax

from autopar.frontend import Traced
from autopar.rewrite.microbatch import microbatched
from passes.errors import PlanningError
from passes.ir import Graph, StatePairs
from passes.layers import KEPT, abridge, blocks
from passes.pipeline import Sample, body_of
from passes.transforms import Coupling, split


@dataclass(kw_only=True)
class Family:
    """The step `traced` of flat arguments `structs` in microbatches, to be cut into `layers` layers.

    There are `count` of them if that is given, else any divisor of the batch.
    """

    traced: Traced
    structs: Sequence[jax.ShapeDtypeStruct]
    coupling: Coupling
    layers: int
    count: int | None = None
    _whole: dict[int, Traced] = field(default_factory=dict[int, Traced])

    def member(self, count: int) -> Traced:
        """The whole step in so many microbatches. Raises PlanningError where it has no such form."""
        if count not in self._whole:
            self._whole[count] = microbatched(self.traced, self.structs, count, self.coupling)
        return self._whole[count]

    def graph(self, count: int) -> Graph:
        return self.member(count).graph

    def sample(self, count: int) -> Sample:
        """What the step's blocks in so many microbatches are priced on. Raises PlanningError as `member` does."""
        if self._short is not None:
            short, structs, left_out = self._short
            found = microbatched(short, structs, count, self.coupling)
            if len(blocks(body_of(found.graph), covered=0.0)) == KEPT + 1:
                return Sample(graph=found.graph, state_pairs=found.state_pairs, left_out=left_out)
        return Sample(graph=self.graph(count), state_pairs=self.traced.state_pairs)

    @property
    def state_pairs(self) -> StatePairs:
        return self.traced.state_pairs

    @property
    def donated(self) -> tuple[bool, ...]:
        return self.traced.donated

    @property
    def counts(self) -> Sequence[int]:
        """How many microbatches there may be, fewest first; none where the step has no batch that can be cut."""
        return (self.count,) if self.count is not None else self._divisors

    @cached_property
    def _divisors(self) -> tuple[int, ...]:
        graph = self.traced.graph
        try:
            batch = split(graph, 1, state_pairs=self.traced.state_pairs, coupling=self.coupling).batch
        except PlanningError:
            return ()
        rows = graph.types[graph.inputs[batch[0]]].shape[0]
        return tuple(count for count in range(1, rows + 1) if rows % count == 0)

    @cached_property
    def _short(self) -> tuple[Traced, tuple[jax.ShapeDtypeStruct, ...], int] | None:
        """The step with fewer blocks, its arguments, and how many were left out; None if layers are parts of blocks."""
        traced, structs = self.traced, self.structs
        found = abridge(traced.graph, traced.state_pairs)
        if found is None or found.left_out + KEPT < self.layers:
            return None
        short = replace(
            traced,
            graph=found.graph,
            equations=tuple(traced.equations[i] for i in found.nodes),
            donated=tuple(traced.donated[i] for i in found.inputs),
            weak=tuple(traced.weak[o] for o in found.outputs),
            state_pairs=found.state_pairs,
        )
        return short, tuple(structs[i] for i in found.inputs), found.left_out
