"""A step in several numbers of microbatches, each traced when it is asked for: whole, or with fewer of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax

from autopar.microbatch import microbatched
from autopar.trace import Traced
from passes.abridge import KEPT, abridge
from passes.errors import PlanningError
from passes.ir import Graph
from passes.microbatch import Coupling
from passes.pipelines import body_of
from passes.repeats import blocks
from passes.stage_table import Sample


@dataclass(kw_only=True)
class Family:
    """The step `traced` of flat arguments `structs` in microbatches, to be cut into `layers` layers."""

    traced: Traced
    structs: Sequence[jax.ShapeDtypeStruct]
    coupling: Coupling
    layers: int
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
                return Sample(graph=found.graph, tied=found.tied, left_out=left_out)
        return Sample(graph=self.graph(count), tied=self.traced.tied)

    def samples(self, counts: Sequence[int]) -> dict[int, Sample]:
        """The samples that can be had; one of 1 too if that is cheap. Raises PlanningError if there are none."""
        found: dict[int, Sample] = {}
        refused: list[PlanningError] = []
        for count in counts:
            try:
                found[count] = self.sample(count)
            except PlanningError as error:
                refused.append(error)
        if not found:
            raise refused[0]
        if self._short is not None and len(counts) > 1:
            found[1] = self.sample(1)
        return found

    @cached_property
    def _short(self) -> tuple[Traced, tuple[jax.ShapeDtypeStruct, ...], int] | None:
        """The step with fewer blocks, its arguments, and how many were left out; None if layers are parts of blocks."""
        traced, structs = self.traced, self.structs
        found = abridge(traced.graph, traced.tied)
        if found is None or found.left_out + KEPT < self.layers:
            return None
        short = replace(
            traced,
            graph=found.graph,
            equations=tuple(traced.equations[i] for i in found.nodes),
            donated=tuple(traced.donated[i] for i in found.inputs),
            weak=tuple(traced.weak[o] for o in found.outputs),
            tied=found.tied,
        )
        return short, tuple(structs[i] for i in found.inputs), found.left_out
