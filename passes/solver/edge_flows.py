"""The edge variables of a strategy program and the rows that they stand in, found once for all edges that are alike.

Edges of one problem, and of the problems on one mesh, share their matrices and mostly the strategies that are allowed
at their ends. What the program says of such an edge is a `Shape`; a `Flow` is a shape at its place in a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from passes.solver.linear_program import Floats, Indices, LinearProgram
from passes.solver.problem import Edge, ShardingProblem

_LEG = 1e-6
"""A leg of a way around costs something where it is more than this share of the whole: sums round."""

_SIGNS = np.array([-1.0, 1.0, 1.0, -1.0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The variables and rows of an edge, numbered from 0.

    Variable v goes from placement `before[v]` to `after[v]` at `seconds[v]`. `made` and `read` [allowed strategies of
    source, of target] index the rows and columns of `matrix`, the seconds between the placements that these make and
    read; `making` and `reading` are the program's rows of those, -1 for the one that is left out.

    `rows`, `columns` and `signs` are the entries of all `count` rows: `sizes` of them stand in columns of the source,
    of the target, and twice in the edge's own. `names` numbers the placements after, for all problems on a mesh.
    """

    before: Indices
    after: Indices
    seconds: Floats
    made: Indices
    read: Indices
    matrix: Floats
    making: Indices
    reading: Indices
    count: int
    rows: Indices
    columns: Indices
    signs: Floats
    sizes: Indices
    names: Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """An edge in a program: its shape, with its first column and row."""

    edge: Edge
    shape: Shape
    column: int
    row: int

    @property
    def seconds(self) -> Floats:
        """What each variable costs."""
        return self.edge.weight * self.shape.seconds

    @property
    def columns(self) -> Indices:
        """The edge's variables."""
        return np.arange(self.column, self.column + self.shape.before.size)

    @property
    def rows(self) -> tuple[Indices, Indices]:
        """The rows of the placements that are made and read, -1 for the one that is left out."""
        making, reading = self.shape.making, self.shape.reading
        return np.where(making < 0, -1, making + self.row), np.where(reading < 0, -1, reading + self.row)


class _Ends(NamedTuple):
    """The placements that the allowed strategies at one end of an edge have: sorted, and which each strategy has."""

    places: Indices
    at: Indices

    @classmethod
    def of(cls, placed: Indices) -> _Ends:
        asked = np.zeros(int(placed.max(initial=-1)) + 1, dtype=np.bool_)
        asked[placed] = True
        return cls(np.flatnonzero(asked), (np.cumsum(asked) - 1)[placed])


class Shapes:
    """All shapes that problems with one memory have met; what is known by its id stays referenced."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._named: dict[int, tuple[Sequence[object], Indices]] = {}
        self._shapes: dict[tuple[object, ...], tuple[Edge, Shape]] = {}

    def numbers(self, names: Sequence[object]) -> Indices:
        """The numbers of named placements; edges mostly share their names."""
        if id(names) not in self._named:
            found = [self._numbers.setdefault(name, len(self._numbers)) for name in names]
            self._named[id(names)] = (names, np.array(found, dtype=np.intp))
        return self._named[id(names)][1]

    def shape(self, edge: Edge, source: NDArray[np.bool_], target: NDArray[np.bool_], through: Indices | None) -> Shape:
        """The shape of an edge between nodes with these strategies allowed.

        What arrives at a placement in `through` (by number; None: at any) may go on from there, and only pairs that no
        such placement lies between get a variable: the cheapest flow is the same, with a fraction of the variables.
        """
        arrays = (edge.before, edge.after, edge.seconds, edge.origins, edge.labels)
        at = None if through is None else through.tobytes()
        key = (*map(id, arrays), source.tobytes(), target.tobytes(), at)
        if key not in self._shapes:
            self._shapes[key] = (edge, self._made(edge, edge.before[source], edge.after[target], through))
        return self._shapes[key][1]

    def _made(self, edge: Edge, made: Indices, read: Indices, through: Indices | None) -> Shape:
        (rows, at_source), (columns, at_target) = _Ends.of(made), _Ends.of(read)
        names = self.numbers(edge.labels)
        arriving = names[columns]
        named = edge.origins and (through is None or through.size)
        leaving = self.numbers(edge.origins)[rows] if named else -1 - np.arange(rows.size)
        known: dict[int, int] = {}
        both = [known.setdefault(name, len(known)) for name in (*leaving.tolist(), *arriving.tolist())]
        first, last = np.split(np.array(both, dtype=np.intp), [rows.size])
        inner = np.ones(columns.size, dtype=np.bool_) if through is None else np.isin(arriving, through)
        matrix = edge.seconds[rows[:, None], columns]
        before, after = direct(matrix, first, last, inner)
        at = np.concatenate([first[at_source], last[at_target], first[before], last[after]])
        fullest = int(np.bincount(at, minlength=len(known)).argmax())
        row = np.arange(len(known)) - (np.arange(len(known)) > fullest)
        row[fullest] = -1  # one row follows from the others
        parts, variables = (made.size, read.size, before.size, before.size), np.arange(before.size)
        entries, kept = (np.arange(made.size), np.arange(read.size), variables, variables), at != fullest
        part = np.repeat(np.arange(4), parts)[kept]
        return Shape(
            before=rows[before],
            after=columns[after],
            seconds=matrix[before, after],
            made=at_source,
            read=at_target,
            matrix=matrix,
            making=row[first],
            reading=row[last],
            count=len(known) - 1,
            rows=row[at[kept]],
            columns=np.concatenate(entries)[kept],
            signs=_SIGNS[part],
            sizes=np.bincount(part, minlength=4),
            names=names,
        )


def flows(
    problem: ShardingProblem,
    allowed: Sequence[NDArray[np.bool_]],
    columns: Sequence[Indices],
    program: LinearProgram,
    *,
    whole: bool,
) -> dict[int, list[Flow]]:
    """Adds the variables and rows of all edges of a problem, and returns them by group.

    `columns` are those of the nodes' `allowed` strategies. The readers of a group go through the same placements.
    """
    shapes = problem.memory.kept(Shapes)
    placed = {
        group: [(edge, shapes.shape(edge, allowed[edge.source], allowed[edge.target], through)) for edge in edges]
        for group, edges in problem.groups.items()
        for through in [_common(shapes, edges, allowed, whole)]
    }
    found: dict[int, list[Flow]] = {}
    column, row = program.columns, program.rows
    for group, edges in placed.items():
        own = found.setdefault(group, [])
        for edge, shape in edges:
            own.append(Flow(edge=edge, shape=shape, column=column, row=row))
            column, row = column + shape.before.size, row + shape.count
    program.add_columns(column - program.columns)
    program.add_rows(row - program.rows, 0.0, 0.0)
    _enter([flow for own in found.values() for flow in own], columns, program)
    return found


def _enter(flows: Sequence[Flow], columns: Sequence[Indices], program: LinearProgram) -> None:
    """The entries of all flows, at once."""
    if not flows:
        return
    first = [int(own[0]) if own.size else 0 for own in columns]
    bases = [[first[flow.edge.source], first[flow.edge.target], flow.column, flow.column] for flow in flows]
    shapes = [flow.shape for flow in flows]
    sizes = np.array([shape.sizes for shape in shapes])
    program.enter(
        np.concatenate([shape.rows for shape in shapes]) + np.repeat([flow.row for flow in flows], sizes.sum(axis=1)),
        np.concatenate([shape.columns for shape in shapes]) + np.repeat(np.ravel(bases), sizes.ravel()),
        np.concatenate([shape.signs for shape in shapes]),
    )


def _common(shapes: Shapes, edges: Sequence[Edge], allowed: Sequence[NDArray[np.bool_]], whole: bool) -> Indices | None:
    """The placements that every reader of a group may want, by number; None for all of a single reader's."""
    if len(edges) == 1:
        return None
    if whole:
        return np.zeros(0, dtype=np.intp)
    wanted = [set(shapes.numbers(edge.labels)[edge.after[allowed[edge.target]]].tolist()) for edge in edges]
    return np.array(sorted(wanted[0].intersection(*wanted)), dtype=np.intp)


def direct(cost: Floats, rows: Indices, columns: Indices, inner: NDArray[np.bool_]) -> tuple[Indices, Indices]:
    """The pairs of different names that no third placement lies between, by the names of `rows` and `columns`.

    `inner` columns may lie between others. Both legs of a way around must cost something, and so less than the pair
    itself: what is left out is always made up of pairs that are kept.
    """
    kept = np.isfinite(cost)
    at, via = np.nonzero(rows[:, None] == columns[None, :])
    kept[at, via] = False
    at, via = at[inner[via]], via[inner[via]]
    if at.size:
        with np.errstate(invalid="ignore"):
            first, second, whole = cost[:, via, None], cost[None, at, :], cost[:, None, :]
            longer = first + second <= whole * (1 + 1e-9)
            longer &= first > _LEG * whole
            longer &= second > _LEG * whole
        kept &= ~longer.any(axis=1)
    before, after = np.nonzero(kept)
    return before, after
