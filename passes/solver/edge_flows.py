"""The edge variables of a strategy program and their rows, built once for all edges that are equal.

Edges of one problem, and of the problems on one mesh, share their matrices and mostly the strategies that are allowed
at their ends. What the program says of such an edge is a `Shape`; a `Flow` is a shape at its place in a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from passes.solver.linear_program import LinearProgram
from passes.solver.problem import ROUNDING, Edge, Floats, Indices, ShardingProblem

_LEG = 1e-6
"""A leg of a way around costs something where it is more than this share of the whole: sums round."""

_SIGNS = np.array([-1.0, 1.0, 1.0, -1.0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The variables and rows of an edge, numbered from 0.

    Variable v goes from placement `before[v]` to `after[v]` at `seconds[v]`. `made` and `read` [allowed strategies of
    source, of target] index the rows and columns of `matrix`, the seconds between the placements that these make and
    read; `sources` and `targets` number these among all of the edge, and `placed` has the program's rows of them, one
    after the other, -1 for the row that is left out.

    `rows`, `columns` and `signs` are the entries of all `count` rows: `sizes` of them stand in columns of the source,
    of the target, and twice in the edge's own. `names` numbers the placements after, for all problems on a mesh.
    """

    before: Indices
    after: Indices
    seconds: Floats
    made: Indices
    read: Indices
    matrix: Floats
    sources: Indices
    targets: Indices
    placed: Indices
    count: int
    rows: Indices
    columns: Indices
    signs: Floats
    sizes: Indices
    names: Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """An edge in a program: its shape, its first column and its first row."""

    edge: Edge
    shape: Shape
    column: int
    row: int

    @property
    def seconds(self) -> Floats:
        """The cost of each variable."""
        return self.edge.weight * self.shape.seconds

    @property
    def columns(self) -> Indices:
        """The edge's variables."""
        return np.arange(self.column, self.column + self.shape.before.size)

    def worth(self, values: Floats) -> tuple[Floats, Floats]:
        """The values of the rows of the placements written and read, of all `values` [rows]; 0 for the one left out."""
        shape = self.shape
        local = np.zeros(shape.count + 1)  # the row that is left out, -1, is the last
        local[: shape.count] = values[self.row : self.row + shape.count]
        both = local[shape.placed]
        return both[: shape.sources.size], both[shape.sources.size :]


class _Ends(NamedTuple):
    """The placements of the allowed strategies at one end of an edge, sorted, and the one of each strategy."""

    places: Indices
    at: Indices

    @classmethod
    def of(cls, placed: Indices) -> _Ends:
        used = np.zeros(int(placed.max(initial=-1)) + 1, dtype=np.bool_)
        used[placed] = True
        return cls(np.flatnonzero(used), (np.cumsum(used) - 1)[placed])


class Shapes:
    """All shapes in problems that share one memory; arrays known by their id stay referenced."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._named: dict[int, tuple[Sequence[object], Indices]] = {}
        self._shapes: dict[tuple[object, ...], tuple[Edge, Shape]] = {}

    def numbers(self, names: Sequence[object]) -> Indices:
        """The numbers of named placements; edges mostly share their names."""
        if id(names) not in self._named:
            self._named[id(names)] = (names, np.array([self.number(name) for name in names], dtype=np.intp))
        return self._named[id(names)][1]

    def number(self, name: object) -> int:
        """The number of a named placement."""
        return self._numbers.setdefault(name, len(self._numbers))

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
        numbers: dict[int, int] = {}
        joint_numbers = [numbers.setdefault(name, len(numbers)) for name in (*leaving.tolist(), *arriving.tolist())]
        joint = np.array(joint_numbers, dtype=np.intp)
        first, last = joint[: rows.size], joint[rows.size :]
        inner = np.ones(columns.size, dtype=np.bool_) if through is None else (arriving[:, None] == through).any(axis=1)
        matrix = edge.seconds[rows[:, None], columns]
        before, after = direct(matrix, first, last, inner)
        at = np.concatenate([first[at_source], last[at_target], first[before], last[after]])
        fullest = int(np.bincount(at, minlength=len(numbers)).argmax())
        row = np.arange(len(numbers)) - (np.arange(len(numbers)) > fullest)
        row[fullest] = -1  # one row follows from the others
        parts, variables = (made.size, read.size, before.size, before.size), np.arange(before.size)
        entries, entry_kept = (np.arange(made.size), np.arange(read.size), variables, variables), at != fullest
        part = np.repeat(np.arange(4), parts)[entry_kept]
        return Shape(
            before=rows[before],
            after=columns[after],
            seconds=matrix[before, after],
            made=at_source,
            read=at_target,
            matrix=matrix,
            sources=rows,
            targets=columns,
            placed=row[np.concatenate([first, last])],
            count=len(numbers) - 1,
            rows=row[at[entry_kept]],
            columns=np.concatenate(entries)[entry_kept],
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
    """The flows of all edges of a problem by group, whose variables and rows are added to the program.

    `columns` are those of the nodes' `allowed` strategies. The readers of a group go through the same placements.
    """
    shapes = problem.cache.kept(Shapes)
    placed = {
        group: [(edge, shapes.shape(edge, allowed[edge.source], allowed[edge.target], through)) for edge in edges]
        for group, edges in problem.groups.items()
        for through in [_common(shapes, edges, allowed, whole=whole)]
    }
    by_group: dict[int, list[Flow]] = {}
    column, row = program.columns, program.rows
    for group, edges in placed.items():
        flows_of_group = by_group.setdefault(group, [])
        for edge, shape in edges:
            flows_of_group.append(Flow(edge=edge, shape=shape, column=column, row=row))
            column, row = column + shape.before.size, row + shape.count
    program.add_columns(column - program.columns)
    program.add_rows(row - program.rows, 0.0, 0.0)
    _enter([flow for flows_of_group in by_group.values() for flow in flows_of_group], columns, program)
    return by_group


def _enter(flows: Sequence[Flow], columns: Sequence[Indices], program: LinearProgram) -> None:
    """Adds the entries of all flows at once."""
    if not flows:
        return
    first = [int(node_columns[0]) if node_columns.size else 0 for node_columns in columns]
    bases = [[first[flow.edge.source], first[flow.edge.target], flow.column, flow.column] for flow in flows]
    shapes = [flow.shape for flow in flows]
    sizes = np.array([shape.sizes for shape in shapes])
    program.enter(
        np.concatenate([shape.rows for shape in shapes]) + np.repeat([flow.row for flow in flows], sizes.sum(axis=1)),
        np.concatenate([shape.columns for shape in shapes]) + np.repeat(np.ravel(bases), sizes.ravel()),
        np.concatenate([shape.signs for shape in shapes]),
    )


def _common(
    shapes: Shapes, edges: Sequence[Edge], allowed: Sequence[NDArray[np.bool_]], *, whole: bool
) -> Indices | None:
    """The placements that every reader of a group may need, by number; None for all of a single reader's."""
    if len(edges) == 1:
        return None
    if whole:
        return np.zeros(0, dtype=np.intp)
    placements = [set(shapes.numbers(edge.labels)[edge.after[allowed[edge.target]]].tolist()) for edge in edges]
    return np.array(sorted(placements[0].intersection(*placements)), dtype=np.intp)


def direct(cost: Floats, rows: Indices, columns: Indices, inner: NDArray[np.bool_]) -> tuple[Indices, Indices]:
    """The pairs of different names that no third placement lies between, by the names of `rows` and `columns`.

    `inner` columns may lie between others. Both legs of a way around must cost something, and so less than the pair
    itself: what is left out is always made up of pairs that are kept.
    """
    is_direct = np.isfinite(cost)
    at, via = np.nonzero(rows[:, None] == columns[None, :])
    is_direct[at, via] = False
    at, via = at[inner[via]], via[inner[via]]
    if at.size:
        with np.errstate(invalid="ignore"):
            first, second, direct_cost = cost[:, via, None], cost[None, at, :], cost[:, None, :]
            longer = first + second <= direct_cost * (1 + ROUNDING)
            longer &= first > _LEG * direct_cost
            longer &= second > _LEG * direct_cost
        is_direct &= ~longer.any(axis=1)
    before, after = np.nonzero(is_direct)
    return before, after
