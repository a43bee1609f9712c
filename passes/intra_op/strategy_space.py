"""The strategy space of an operator group: every strategy that is legal on some mesh with these axes, whatever the
sizes.

A walk through the members gives every axis of a mesh to a class of dimensions, to none, or lets values stay partial
over it. Sizes only decide which of these strategies are legal, so operator groups of one *signature* have the same
space on all meshes with the same axes and at all batch sizes, and it is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from passes.intra_op.axis_choices import AxisChoice, axis_choices
from passes.intra_op.group_walks import GroupWalk, GroupWalks, Signature
from passes.rules import Assignment
from passes.sharding import ShardingSpec
from passes.solver import Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """The reshardings of one operand inside an operator group: strategy s takes `pairs[which[s] - 1]`, a (before,
    after) pair; 0 is none.
    """

    value: int
    pairs: tuple[tuple[ShardingSpec, ShardingSpec], ...]
    which: Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySpace:
    """Every strategy that is legal where its axes divide; arrays are parallel to `axis_choices`, and index `specs`.

    `cuts` [members, strategies] are the sets of axes that divide a member's work, and `masks` [factors, strategies]
    those that must divide each of `factors`, which are (member, factor) pairs. `reads` are the (member, operand) pairs
    that read from memory, and `pieces` [reads, then visible values; strategies] the placements of what is read and
    written; `depths` [specs, axes] are the axes of a placement in order (-1: none). `interface` [inputs, then visible
    and absorbed values; strategies] is what neighbours see, and `kinds` numbers its different columns. `inputs` are the
    values that the operator group reads from outside.
    """

    axis_choices: tuple[AxisChoice, ...]
    assignments: tuple[tuple[Assignment, ...], ...]
    cuts: Indices
    factors: tuple[tuple[int, int], ...]
    masks: Indices
    reads: tuple[tuple[int, int], ...]
    pieces: Indices
    specs: tuple[ShardingSpec, ...]
    depths: Indices
    inputs: tuple[int, ...]
    interface: Indices
    kinds: tuple[int, ...]
    moves: tuple[Moves, ...]


@lru_cache(maxsize=64)
def subsets(axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Every set of axes; set number n has the axes at the bits of n."""
    return tuple(tuple(a for i, a in enumerate(axes) if mask >> i & 1) for mask in range(1 << len(axes)))


@lru_cache(maxsize=1024)
def strategy_space(signature: Signature) -> StrategySpace:
    """The strategy space of a signature, in the order of `axis_choices`."""
    group_walks = GroupWalks(signature)
    walks = [walk for choice in axis_choices(signature.options, signature.axes) for walk in group_walks.under(choice)]
    return _Columns(signature, group_walks.reads).gathered(walks)


class _Columns:
    """A collector that turns walks into the arrays of a strategy space, and numbers placements as they come."""

    def __init__(self, signature: Signature, reads: list[tuple[int, int]]) -> None:
        self.signature = signature
        self.reads = reads
        self._codes: dict[ShardingSpec, int] = {}

    def gathered(self, walks: list[GroupWalk]) -> StrategySpace:
        """The strategy space whose strategies are these walks, in order."""
        signature = self.signature
        in_part = [operand in signature.rules[position].rule.read_in_part for position, operand in self.reads]
        pieces, interface = list[list[int]](), list[list[int]]()
        for walk in walks:
            # Of a table or what is sliced as many elements are read as the result has.
            ports = zip(in_part, self.reads, walk.reads, strict=True)
            read = [walk.home[signature.makes[at][0]] if rare else spec for rare, (at, _), spec in ports]
            leaving, absorbed = ([walk.at(v) for v in values] for values in (signature.visible, signature.absorbed))
            pieces.append(self._numbered([*read, *leaving]))
            interface.append(self._numbered([*walk.inputs, *leaving, *absorbed]))
        kinds: dict[tuple[int, ...], int] = {}
        factors, masks = self._masks(walks)
        return StrategySpace(
            axis_choices=tuple(walk.axis_choice for walk in walks),
            assignments=tuple(tuple(walk.assignments) for walk in walks),
            cuts=_columns([walk.cuts for walk in walks]),
            factors=factors,
            masks=masks,
            reads=tuple(self.reads),
            pieces=_columns(pieces),
            specs=tuple(self._codes),
            depths=self._depths(),
            inputs=tuple(where[1] for row in signature.operands for where in row if where and where[0] == "out"),
            interface=_columns(interface),
            kinds=tuple(kinds.setdefault(tuple(column), len(kinds)) for column in interface),
            moves=tuple(self._moves(walks)),
        )

    def _numbered(self, specs: list[ShardingSpec]) -> list[int]:
        return [self._codes.setdefault(spec, len(self._codes)) for spec in specs]

    def _masks(self, walks: list[GroupWalk]) -> tuple[tuple[tuple[int, int], ...], Indices]:
        """The (member, factor) pairs that some walk cuts, and the sets of axes that cut each, one bit an axis."""
        bits = {axis: 1 << i for i, axis in enumerate(self.signature.axes)}
        rows: dict[tuple[int, int], list[int]] = {}
        for index, walk in enumerate(walks):
            for position, assignment in enumerate(walk.assignments):
                for axis, factor in assignment:
                    if self.signature.rules[position].rule.factors[factor].size:
                        rows.setdefault((position, factor), [0] * len(walks))[index] |= bits[axis]
        return tuple(rows), np.array(list(rows.values()), dtype=np.intp).reshape(len(rows), len(walks))

    def _depths(self) -> Indices:
        axes = self.signature.axes
        depths = np.full((len(self._codes), len(axes)), -1, dtype=np.intp)
        for row, spec in zip(depths, self._codes, strict=True):
            standing = [axes.index(axis) for names in spec.dims for axis in names]
            row[: len(standing)] = standing
        return depths

    def _moves(self, walks: list[GroupWalk]) -> Iterator[Moves]:
        for port in sorted({port for walk in walks for port in walk.moved}):
            value = next(walk.moved[port][0] for walk in walks if port in walk.moved)
            pairs: dict[tuple[ShardingSpec, ShardingSpec], int] = {}
            pair_of_walk = [0] * len(walks)
            for index, walk in enumerate(walks):
                if port in walk.moved:
                    pair_of_walk[index] = pairs.setdefault((walk.home[value], walk.moved[port][1]), len(pairs) + 1)
            yield Moves(value=value, pairs=tuple(pairs), which=np.array(pair_of_walk, dtype=np.intp))


def _columns(rows: list[list[int]]) -> Indices:
    """The array [..., rows] of lists [rows, ...]."""
    return np.array(rows, dtype=np.intp).T
