"""The blocks and layers of a step, for each number of microbatches of which there is a sample.

Layers, of which stages are made, are runs of the blocks in which a model repeats itself; where it does not, a layer is
one block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from passes.errors import InternalError
from passes.ir import Graph, StatePairs
from passes.layers import Cuts, Weigh, forward, in_blocks, part_flops
from passes.pipeline.assemble import body_of, sent_nbytes
from passes.pipeline.blocks import Block, alike
from passes.transforms import stages

Counted = tuple[Block, int]

Kinds = tuple[tuple[str, int], ...]
"""Kinds of blocks with how many there are of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A step in microbatches to be priced; `left_out` are the blocks that are missing after the second of each stretch
    of equal ones.
    """

    graph: Graph
    state_pairs: StatePairs
    left_out: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class StepBlocks:
    """The blocks and layers of a step, given a sample for each number of microbatches.

    `also` are numbers of even stages into which it can be cut, whatever the layers; parts are even as `weigh` has it.
    """

    samples: Mapping[int, Sample]
    n_layers: int
    also: Sequence[int] = ()
    weigh: Weigh = part_flops
    _cuts: dict[int, Cuts] = field(default_factory=dict[int, Cuts])
    _blocks: dict[int, tuple[Block, ...]] = field(default_factory=dict[int, tuple[Block, ...]])
    _counts: dict[tuple[int, int, int], tuple[Counted, ...]] = field(
        default_factory=dict[tuple[int, int, int], "tuple[Counted, ...]"]
    )
    _kinds: dict[tuple[int, int, int], Kinds] = field(default_factory=dict[tuple[int, int, int], Kinds])
    _sent: dict[str, int] = field(default_factory=dict[str, int])

    def cuts(self, microbatches: int) -> Cuts:
        """The step in that many microbatches, cut into blocks and layers."""
        if microbatches not in self._cuts:
            sample = self.samples[microbatches]
            body = body_of(sample.graph)
            self._cuts[microbatches] = in_blocks(body, self.n_layers, sample.left_out, self.also, self._weigh)
        return self._cuts[microbatches]

    def _weigh(self, body: Graph, firsts: Sequence[int]) -> NDArray[np.float64]:
        """The work of each part as it is in the first sample, so that cuts are the same in every number of
        microbatches.
        """
        first = body_of(next(iter(self.samples.values())).graph)
        return self.weigh(first if forward.forward_nodes(first) == forward.forward_nodes(body) else body, firsts)

    def span(self, first: int, last: int, microbatches: int) -> tuple[int, int]:
        """The first of the blocks of some layers, and the one after their last."""
        cuts = self.cuts(microbatches)
        ends = (*cuts.layers, len(cuts.blocks))
        return ends[first], ends[last]

    def blocks(self, microbatches: int) -> tuple[Block, ...]:
        """The blocks of a step in order."""
        cuts, sample = self.cuts(microbatches), self.samples[microbatches]
        if microbatches not in self._blocks:
            parts = stages.cut(sample.graph, cuts.firsts, sample.state_pairs).parts
            unique_blocks = alike(
                parts, [stages.state_pairs_of(part, sample.graph, sample.state_pairs) for part in parts]
            )
            stage_blocks = [
                replace(block, fewer=fewer)
                for block, fewer in zip(unique_blocks, self._fewer(microbatches), strict=True)
            ]
            self._blocks[microbatches] = tuple(stage_blocks[part] for part in cuts.blocks)
        return self._blocks[microbatches]

    def _fewer(self, microbatches: int) -> list[tuple[str, ...]]:
        """The kinds of every part in fewer microbatches, where the step is cut in the same way."""
        cuts = self.cuts(microbatches)
        others = [count for count in sorted(self.samples) if count < microbatches and self.cuts(count) == cuts]
        kinds = [dict(zip(cuts.blocks, self.blocks(count), strict=True)) for count in others]
        return [tuple(each[part].kind for each in kinds) for part in range(len(cuts.firsts))]

    def firsts(self, graph: Graph, begins: Sequence[int], microbatches: int) -> tuple[int, ...]:
        """The nodes of the whole step's loop body with which these blocks begin."""
        is_sampled = any(self.samples[microbatches].left_out)  # then blocks alone are asked for, whatever their work
        weigh, cuts = part_flops if is_sampled else self._weigh, self.cuts(microbatches)
        whole = in_blocks(body_of(graph), self.n_layers, also=self.also, weigh=weigh)
        if len(whole.blocks) != len(cuts.blocks):
            raise InternalError(f"a step of {len(whole.blocks)} blocks was searched as {len(cuts.blocks)}")
        return tuple(whole.firsts[whole.blocks[block]] for block in begins)

    def in_layers(self, first: int, last: int, microbatches: int) -> tuple[Counted, ...]:
        return self.counted(*self.span(first, last, microbatches), microbatches)

    def counted(self, begin: int, end: int, microbatches: int) -> tuple[Counted, ...]:
        """(block, number of them) for each kind of block in a run."""
        key = (begin, end, microbatches)
        if key not in self._counts:
            chosen = self.blocks(microbatches)[begin:end]
            counts = Counter(block.kind for block in chosen)
            self._counts[key] = tuple((block, counts[kind]) for kind, block in {b.kind: b for b in chosen}.items())
        return self._counts[key]

    def kinds(self, begin: int, end: int, microbatches: int) -> Kinds:
        """The kinds of a run, by which equal runs of blocks are found."""
        key = (begin, end, microbatches)
        if key not in self._kinds:
            self._kinds[key] = tuple((block.kind, n) for block, n in self.counted(*key))
        return self._kinds[key]

    def boundary_nbytes(self, cut: int, microbatches: int) -> int:
        """Bytes of one microbatch from layer cut - 1 to layer cut."""
        return self.edge_nbytes(self.span(cut, self.n_layers, microbatches)[0], microbatches)

    def edge_nbytes(self, block: int, microbatches: int) -> int:
        """Bytes of one microbatch that a block is sent by the one before it."""
        sender = self.blocks(microbatches)[block - 1]
        if sender.kind not in self._sent:
            self._sent[sender.kind], _ = sent_nbytes(sender.part)
        return self._sent[sender.kind]
