"""Blocks: parts of a step that may be a stage by themselves. Blocks that are equal but for names are of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from passes.inter_op import StageCost
from passes.ir import StatePairs, TensorType
from passes.pipeline.assemble import saved_values
from passes.pipeline.structural_hash import structural_hash
from passes.placement import Grouping, group
from passes.transforms import Part, microbatch_stacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a step with its state.

    `chain` pairs the (output, input) positions of values that a block hands on and takes in, if its neighbours are of
    its kind: with equal placements of these, such blocks follow each other without a resharding. `fewer` are the kinds
    of the same block in fewer microbatches.
    """

    part: Part
    state_pairs: StatePairs
    chain: StatePairs
    kind: str
    fewer: tuple[str, ...] = ()

    @classmethod
    def of(cls, part: Part, state_pairs: StatePairs, chain: StatePairs = ()) -> Self:
        return cls(part=part, state_pairs=state_pairs, chain=chain, kind=structural_hash(part, (*state_pairs, *chain)))

    @property
    def all_pairs(self) -> StatePairs:
        """The (output, input) positions that must be laid out alike: of its state, and of its chain."""
        return (*self.state_pairs, *self.chain)

    def period(self, cost: StageCost) -> float:
        """Seconds of a microbatch by a cost, with its share of the end of the step."""
        return cost.period(self.part.scan.length)


def alike(parts: Sequence[Part], state_pairs: Sequence[StatePairs]) -> tuple[Block, ...]:
    """The consecutive parts of a step as blocks, chained to neighbours of their kind."""
    kinds = [structural_hash(part, pairs) for part, pairs in zip(parts, state_pairs, strict=True)]
    blocks: list[Block] = []
    for at, (part, pairs) in enumerate(zip(parts, state_pairs, strict=True)):
        inner = 0 < at < len(parts) - 1 and kinds[at] in (kinds[at - 1], kinds[at + 1])
        blocks.append(Block.of(part, pairs, _chain(parts[at - 1], part, parts[at + 1]) if inner else ()))
    return tuple(blocks)


def _chain(before: Part, part: Part, after: Part) -> StatePairs:
    """(output, input) positions of the values that a part hands on and takes in, forward and backward."""
    return (*_handed(before, part, after), *_handed(after, part, before))


def _handed(source: Part, part: Part, target: Part) -> StatePairs:
    """(output, input) positions of what a part gets from one neighbour and gives to the other; empty unless the types
    match.

    Values without a counterpart, such as statistics that a neighbour collects, are not handed on.
    """
    types = part.graph.types
    inputs, outputs = ({v: i for i, v in enumerate(values)} for values in (part.graph.inputs, part.graph.outputs))
    taken = [v for v in part.boundary_values if v in inputs and v in source.graph.outputs]
    given = [v for v in part.boundary_values if v in outputs and v in target.graph.inputs]
    both = {types[v] for v in taken} & {types[v] for v in given}
    taken, given = ([v for v in values if types[v] in both] for values in (taken, given))
    if [types[v] for v in given] != [types[v] for v in taken]:
        return ()
    return tuple((outputs[theirs], inputs[ours]) for theirs, ours in zip(given, taken, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class KindOfBlock:
    """The facts about blocks of one kind that hold on any mesh, by the first `block` of it.

    `nbytes` are what stays between microbatches, on all devices together; `state` has the types of all inputs but the
    batch's. `kept_nbytes` are what the forward of a microbatch keeps for its backward.
    """

    block: Block
    grouping: Grouping
    nbytes: int
    state: tuple[TensorType, ...]
    kept_nbytes: int
    _cut_nbytes: dict[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def of(cls, block: Block) -> Self:
        """The facts about the kind of a block."""
        part, graph = block.part, block.part.graph
        inputs = [value for value in graph.inputs if value not in part.boundary_values]
        rows = microbatch_stacks(graph)
        summed = [value for value in graph.nodes[part.loop].outputs if value not in part.boundary_values]
        return cls(
            block=block,
            grouping=group(graph),
            nbytes=sum(graph.types[value].nbytes for value in (*inputs, *summed)),
            state=tuple(graph.types[value] for value in inputs if value not in rows),
            kept_nbytes=sum(part.body.types[value].nbytes for value in saved_values(part)),
        )

    def state_nbytes(self, parts: int) -> int:
        """Bytes of the state on one device, each array cut into `parts` where that divides one of its dimensions."""
        if parts not in self._cut_nbytes:
            self._cut_nbytes[parts] = sum(
                array.nbytes // (parts if any(size % parts == 0 for size in array.shape) else 1) for array in self.state
            )
        return self._cut_nbytes[parts]
