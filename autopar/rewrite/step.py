"""A traced step and its variants: in microbatches, with recomputation, with chunked scans, as short samples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax

from autopar.errors import ArgumentError, explain
from autopar.frontend import Traced
from autopar.rewrite.chunked_scans import in_pieces
from autopar.rewrite.microbatch import microbatched
from autopar.rewrite.remat import recomputed
from autopar.rewrite.rows_first import rows_by_input, with_rows_first
from autopar.runtime import Pieces
from passes.errors import PlanningError
from passes.ir import LOOP, scan_of
from passes.layers import sampling
from passes.pipeline import body_of
from passes.step import Step, Variant
from passes.transforms import Coupling, Kept, Layering, in_turn, kept_of, layering

Structs = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedStep(Step):
    """A step with its JAX program `traced`, whose flat arguments are the caller's, some in chunks (`pieces`)."""

    traced: Traced
    pieces: Pieces | None
    family: _Family

    @property
    def counts(self) -> tuple[int, ...]:
        return self.family.counts

    @property
    def layers(self) -> int:
        return self.family.layers

    @property
    def has_stacks(self) -> bool:
        return self.family.layers > 0 and self.family.layering.are_loops

    @property
    def written(self) -> Traced:
        """The step as the user wrote it, with what its layers were asked to keep."""
        return self.family.traced

    @property
    def structs(self) -> Structs:
        """The types of the flat arguments of the step as it was written."""
        return self.family.structs

    def keeping(self, kept: Kept) -> TracedStep:
        family = self.family
        if not family.layers:
            return self
        structs, coupling, microbatches = family.structs, family.coupling, family.microbatches
        return step_of(family.traced, structs, coupling=coupling, microbatches=microbatches, remat=kept)

    def variant(self, variant: Variant) -> TracedStep:
        return self.family.made(variant)


def step_of(
    traced: Traced,
    structs: Sequence[jax.ShapeDtypeStruct],
    *,
    coupling: Coupling = "exact",
    microbatches: int | None = None,
    remat: Kept | Sequence[Kept] | None = None,
) -> TracedStep:
    """The step of a traced function of flat arguments `structs`, in `microbatches` and with `remat` if the user asks
    for them.

    Raises PlanningError where the step has no such variant.
    """
    kept: tuple[Kept, ...] = ()
    if remat is not None:
        kept = kept_of((remat,) * layering(traced.graph).count if isinstance(remat, str) else remat)
        if not kept and isinstance(remat, str) and remat != "everything":
            rule = "nothing is computed again: no layers are found that go forward and backward, or several loops do"
            warnings.warn(explain(f"remat={remat!r}", rule, "", "leave it out, or write jax.checkpoint"), stacklevel=6)
    traced = recomputed(traced, kept) if kept else traced
    family = _Family(traced=traced, structs=tuple(structs), coupling=coupling, microbatches=microbatches, kept=kept)
    return family.made(Variant())


@dataclass(kw_only=True)
class _Family:
    """The variants of a step, made on demand from the program as it was written and the options that all share."""

    traced: Traced
    structs: Structs
    coupling: Coupling
    microbatches: int | None
    kept: tuple[Kept, ...]
    known: dict[Variant, TracedStep] = field(default_factory=dict[Variant, TracedStep])
    in_microbatches: dict[object, Traced] = field(default_factory=dict[object, Traced])
    chunked: dict[tuple[tuple[Kept, ...], int], tuple[Traced, Pieces | None]] = field(default_factory=dict)
    shorter: dict[tuple[tuple[Kept, ...], int], tuple[Traced, Structs, tuple[int, ...]] | None] = field(
        default_factory=dict
    )

    def made(self, variant: Variant) -> TracedStep:
        """A variant of the step. Raises PlanningError where the step has no such variant."""
        count = self._count(variant.microbatches)
        kept = () if self.kept else variant.kept
        traced, pieces = self._chunked(kept, variant.stages)
        chosen = replace(variant, microbatches=count, kept=self.kept or kept, offload=False)
        structs = tuple(pieces.structs(self.structs)) if pieces else self.structs
        if variant.sample and (short := self._sample(traced, structs, kept, chosen)) is not None:
            return short
        chosen = replace(chosen, sample=False)
        if chosen not in self.known:
            if count > 1 or variant.stages:
                key = kept, pieces, count  # numbers of stages with as many chunks are one program
                if key not in self.in_microbatches:
                    self.in_microbatches[key] = microbatched(traced, structs, count, self.coupling)
                traced = self.in_microbatches[key]
                if variant.stages and not _runs_in_stages(traced):
                    self._refuse_stages(count)
            self.known[chosen] = self._step(traced, chosen, pieces)
        return self.known[chosen]

    def _count(self, count: int | None) -> int:
        """The number of microbatches of a variant. Raises ArgumentError if the user gave another one."""
        if count and self.microbatches and count != self.microbatches:
            rule = f"the planner, or the saved plan, says {count}"
            remedy = "leave microbatches= out, or give the planner the same number"
            raise ArgumentError(explain(f"microbatches={self.microbatches}", rule, "", remedy))
        return count or self.microbatches or 1

    def _chunked(self, kept: tuple[Kept, ...], stages: int) -> tuple[Traced, Pieces | None]:
        """The step with layers that keep that, and its loops over layers in chunks for `stages` stages."""
        if (kept, stages) not in self.chunked:
            traced = recomputed(self.traced, kept) if kept else self.traced
            self.chunked[kept, stages] = in_pieces(traced, stages)
        return self.chunked[kept, stages]

    def _sample(self, traced: Traced, structs: Structs, kept: tuple[Kept, ...], chosen: Variant) -> TracedStep | None:
        """The step with fewer blocks; None if stages are smaller than blocks, or if these microbatches make it another
        step.
        """
        key = kept, chosen.stages
        if key not in self.shorter:
            self.shorter[key] = _shortened(traced, structs, chosen.stages)
        if (shortened := self.shorter[key]) is None:
            return None
        short, sample_structs, left_out = shortened
        short = microbatched(short, sample_structs, chosen.microbatches or 1, self.coupling)
        if not _runs_in_stages(short) or not sampling.are_blocks_of(body_of(short.graph), left_out):
            return None
        return self._step(short, chosen, None, left_out)

    def _step(
        self, traced: Traced, chosen: Variant, pieces: Pieces | None, left_out: tuple[int, ...] = ()
    ) -> TracedStep:
        return TracedStep(
            graph=traced.graph,
            state_pairs=traced.state_pairs,
            donated=traced.donated,
            named=traced.named,
            chosen=chosen,
            left_out=left_out,
            traced=traced,
            pieces=pieces,
            family=self,
        )

    def _refuse_stages(self, count: int) -> None:
        """Raises the PlanningError of a step that no single loop over rows of its arguments computes."""
        traced = self.traced
        if swapped := with_rows_first(traced):
            names = (traced.graph.input_names[i] for i in swapped[1])
            rule = "stages take microbatches along an argument's first dimension, and the step runs over that in order"
            remedy = "put the batch first in what the step takes, write microbatches=1, or plan without stages"
            raise PlanningError(explain(f"a pipeline in {count} microbatches of {', '.join(names)}", rule, "", remedy))
        in_turn(
            traced.graph,
            count,
            state_pairs=traced.state_pairs,
            named=traced.named,
            coupling=self.coupling,
            in_stages=True,
        )

    @cached_property
    def layering(self) -> Layering:
        """The layers of the step as it was written."""
        return layering(self.traced.graph)

    @property
    def layers(self) -> int:
        """The number of layers for which it may be chosen what they keep."""
        is_open = not self.kept and (self.layering.count > 1 or self.layering.are_loops)
        return self.layering.count if is_open else 0

    @property
    def counts(self) -> tuple[int, ...]:
        """The possible numbers of microbatches: the one that the user gave, else the divisors of the batch."""
        return self._divisors if self.microbatches is None else (self.microbatches,)

    @cached_property
    def _divisors(self) -> tuple[int, ...]:
        graph = self.traced.graph
        try:
            batch = in_turn(
                graph, 1, state_pairs=self.traced.state_pairs, named=self.traced.named, coupling=self.coupling
            )[0].stacked
        except PlanningError:
            return ()
        dims = rows_by_input(self.traced) or dict.fromkeys(batch, 0)
        rows = math.gcd(*(graph.types[graph.inputs[i]].shape[dim] for i, dim in dims.items()))
        small = [count for count in range(1, math.isqrt(rows) + 1) if rows % count == 0]
        return tuple(sorted({*small, *(rows // count for count in small)}))


def _runs_in_stages(traced: Traced) -> bool:
    """Whether a program has one loop over microbatches, which reads slices of arguments: those of rows behind time are
    made of them.
    """
    graph = traced.graph
    loops = [node for node in graph.nodes if node.scope == LOOP and node.subgraphs]
    if len(loops) != 1 or (scan := scan_of(loops[0])) is None:
        return not loops
    made = (v for v in loops[0].inputs[scan.fixed :] if v not in graph.inputs)
    return all(v not in graph.producers or not graph.nodes[graph.producers[v]].inputs for v in made)


def _shortened(traced: Traced, structs: Structs, stages: int) -> tuple[Traced, Structs, tuple[int, ...]] | None:
    """(a step without some of its blocks, its arguments, how many are left out of each stretch); None if it has more
    stages than blocks.
    """
    sample = sampling.sample_graph(traced.graph, traced.state_pairs)
    if sample is None or sum(missing + sampling.SAMPLE_BLOCKS for missing in sample.left_out if missing) < stages:
        return None
    short = replace(
        traced,
        graph=sample.graph,
        equations=tuple(traced.equations[i] for i in sample.nodes),
        donated=tuple(traced.donated[i] for i in sample.inputs),
        read=tuple(traced.read[i] for i in sample.inputs),
        named=tuple(traced.named[i] for i in sample.inputs) if traced.named else (),
        weak=tuple(traced.weak[o] for o in sample.outputs),
        state_pairs=sample.state_pairs,
    )
    return short, tuple(structs[i] for i in sample.inputs), sample.left_out
