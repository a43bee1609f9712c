"""The strategies of a bundle as far as they are a matter of form: what each cuts, reads, makes and brings elsewhere.

A walk through the members gives every axis of a mesh to a class of dimensions, to none, or lets values stay partial
over it. What divides what only says which of the ways remain, so bundles of one *pattern* have the same ways on all
meshes with the same axes and at all batch sizes, and `ways_of` remembers them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from passes.intra_op.forms import Pattern, Picks, Walker, Way, picks
from passes.rules import Assignment
from passes.sharding import ShardingSpec

Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """A held value that one operand wants elsewhere: way w takes `pairs[which[w] - 1]` (before, after), 0 none."""

    value: int
    pairs: tuple[tuple[ShardingSpec, ShardingSpec], ...]
    which: Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Every choice that is legal where its axes divide, all arrays parallel to `picks`; `specs` numbers placements.

    `cuts` [members, ways] are the sets of axes that divide a member's work, and `masks` [factors, ways] those that must
    divide each of `factors`, (member, factor) pairs. `reads` are the (member, operand) pairs
    that read from memory and `pieces` [reads, then visible values; ways] the placements in which they do, whose axes in
    order `depths` [specs, axes] gives (-1: none). `border` [ports, then visible and absorbed values; ways] is
    what neighbours see, `kinds` numbers its columns, and `ports` are the values that the bundle reads from elsewhere.
    """

    picks: tuple[Picks, ...]
    assignments: tuple[tuple[Assignment, ...], ...]
    cuts: Indices
    factors: tuple[tuple[int, int], ...]
    masks: Indices
    reads: tuple[tuple[int, int], ...]
    pieces: Indices
    specs: tuple[ShardingSpec, ...]
    depths: Indices
    ports: tuple[int, ...]
    border: Indices
    kinds: tuple[int, ...]
    moves: tuple[Moves, ...]


@lru_cache(maxsize=64)
def subsets(axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Every set of axes, in the order of the numbers whose bits are its axes."""
    return tuple(tuple(a for i, a in enumerate(axes) if mask >> i & 1) for mask in range(1 << len(axes)))


@lru_cache(maxsize=1024)
def ways_of(pattern: Pattern) -> Ways:
    """The ways of a pattern, in the order of `picks`."""
    walker = Walker(pattern)
    found = [way for choice in picks(pattern.options, pattern.axes) for way in walker.ways(choice)]
    return _Columns(pattern, walker.reads).gathered(found)


class _Columns:
    """Gathers ways into arrays, placements numbered as they come."""

    def __init__(self, pattern: Pattern, reads: list[tuple[int, int]]) -> None:
        self.pattern = pattern
        self.reads = reads
        self._codes: dict[ShardingSpec, int] = {}

    def gathered(self, ways: list[Way]) -> Ways:
        pattern = self.pattern
        sparse = [operand in pattern.forms[position].rule.sparse for position, operand in self.reads]
        pieces, border = list[list[int]](), list[list[int]]()
        for way in ways:
            # Of a sparse operand as many elements are read as the result has.
            slots = zip(sparse, self.reads, way.reads, strict=True)
            read = [way.home[pattern.makes[at][0]] if rare else spec for rare, (at, _), spec in slots]
            leaving, absorbed = ([way.at(v) for v in values] for values in (pattern.visible, pattern.absorbed))
            pieces.append(self._numbered([*read, *leaving]))
            border.append(self._numbered([*way.ports, *leaving, *absorbed]))
        kinds: dict[tuple[int, ...], int] = {}
        factors, masks = self._masks(ways)
        return Ways(
            picks=tuple(way.picks for way in ways),
            assignments=tuple(tuple(way.assignments) for way in ways),
            cuts=_columns([way.cuts for way in ways]),
            factors=factors,
            masks=masks,
            reads=tuple(self.reads),
            pieces=_columns(pieces),
            specs=tuple(self._codes),
            depths=self._depths(),
            ports=tuple(where[1] for row in pattern.operands for where in row if where and where[0] == "out"),
            border=_columns(border),
            kinds=tuple(kinds.setdefault(tuple(column), len(kinds)) for column in border),
            moves=tuple(self._moves(ways)),
        )

    def _numbered(self, specs: list[ShardingSpec]) -> list[int]:
        return [self._codes.setdefault(spec, len(self._codes)) for spec in specs]

    def _masks(self, ways: list[Way]) -> tuple[tuple[tuple[int, int], ...], Indices]:
        """The factors with a dimension that some way cuts, and the sets of axes that cut each, one bit an axis."""
        bits = {axis: 1 << i for i, axis in enumerate(self.pattern.axes)}
        rows: dict[tuple[int, int], list[int]] = {}
        for index, way in enumerate(ways):
            for position, assignment in enumerate(way.assignments):
                for axis, factor in assignment:
                    if self.pattern.forms[position].rule.factors[factor].size:
                        rows.setdefault((position, factor), [0] * len(ways))[index] |= bits[axis]
        return tuple(rows), np.array(list(rows.values()), dtype=np.intp).reshape(len(rows), len(ways))

    def _depths(self) -> Indices:
        axes = self.pattern.axes
        found = np.full((len(self._codes), len(axes)), -1, dtype=np.intp)
        for row, spec in zip(found, self._codes, strict=True):
            standing = [axes.index(axis) for names in spec.dims for axis in names]
            row[: len(standing)] = standing
        return found

    def _moves(self, ways: list[Way]) -> Iterator[Moves]:
        for slot in sorted({slot for way in ways for slot in way.moved}):
            value = next(way.moved[slot][0] for way in ways if slot in way.moved)
            pairs: dict[tuple[ShardingSpec, ShardingSpec], int] = {}
            which = [0] * len(ways)
            for index, way in enumerate(ways):
                if slot in way.moved:
                    which[index] = pairs.setdefault((way.home[value], way.moved[slot][1]), len(pairs) + 1)
            yield Moves(value=value, pairs=tuple(pairs), which=np.array(which, dtype=np.intp))


def _columns(rows: list[list[int]]) -> Indices:
    """Lists [ways, ...] as an array [..., ways]."""
    return np.array(rows, dtype=np.intp).T
