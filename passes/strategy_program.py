r"""A sharding problem as an integer program, in columns and rows.

With $x_{n,s} \in \{0,1\}$ for strategy s of node n, $e_{k,i,j} \in [0,1]$ for placements i before and j after edge k:

    minimise    sum_n sum_s c_{n,s} x_{n,s}  +  sum_g sum_{i,j} m_g R_{g,i,j} w_{g,i,j}            (`_cost`)
    subject to  sum_s x_{n,s} = 1                                   for every node n              (`_one_strategy`)
                sum_j e_{k,i,j} = sum_{s: before_k(s) = i} x_{u,s}  for every edge k = (u, v), i             (`_flow`)
                sum_i e_{k,i,j} = sum_{t: after_k(t) = j} x_{v,t}   for every edge k = (u, v), j             (`_flow`)
                w_{g,i,j} >= e_{k,i,j}                              for every edge k of group g    (`_share`)
                sum_n sum_s M_{p,n,s} x_{n,s} + sum_{g,j} K_{p,g,j} z_{g,j} <= 1   for every budget p      (`_within`)
                z_{g,j} >= sum_{t: after_k(t) = j} x_{v,t} - sum_{s: before_k(s) = j} x_{u,s}, k in g       (`_copied`)

c are the seconds of a node, R those of a resharding, m how often a tied group occurs. M and K are the bytes that a
strategy and a copy hold at point p of the program, as shares of what may be held there. Edges of a group read one
value: a resharding that several of them want is paid once. A group of one edge needs no w. Edge variables stand on
distinct *placements*, not on strategies, and only x is integral: with x fixed, e is a product of marginals that are 0
or 1.

Reshardings are shortest paths, so a pair (i, j) that a third placement lies between needs no variable: the first two
rows of a placement become one balance, what is made or arrives there equals what is read or goes on (transshipment).
That leaves a third of the variables and the same optimum. Readers then share legs of a way, which costs no more than
sharing whole reshardings as `evaluate` does: a bound still, exact where readers agree; branching puts the pairs back.

Reference: the edge formulation of Alpa (Zheng et al., OSDI 2022, eq. 1-4) with equality marginals over placements;
design/intra_op.md 3.1-3.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passes.linear_program import Floats, Indices, LinearProgram, Solver
from passes.sharding_problem import Edge, ShardingProblem

_TOLERANCE = 1e-6
_LEG = 1e-6

_MICROSECONDS = 1e6
"""The program is stated in microseconds: solver tolerances are absolute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """The edge variables of an edge: `columns[v]` goes from placement `before[v]` to `after[v]` at `seconds[v]`."""

    edge: Edge
    columns: Indices
    before: Indices
    after: Indices
    seconds: Floats


class StrategyProgram:
    """The program of one problem; each method adds the rows that the module's text names.

    A `whole` one asks for whole strategies and whole reshardings: groups share pairs of placements, not legs of a way.
    A `lean` one seeks the fewest bytes beyond its budgets, or furthest below them, whatever that costs.
    """

    def __init__(self, problem: ShardingProblem, *, whole: bool = False, lean: bool = False) -> None:
        self.problem = problem
        self.whole = whole
        self.arrays = LinearProgram()
        self.allowed = [np.flatnonzero(np.isfinite(seconds)) for seconds in problem.seconds]
        self.strategies = self._one_strategy()
        self._pairs: dict[tuple[object, ...], tuple[Indices, Indices]] = {}
        self.groups = {
            group: [self._flow(edge, through=not whole or len(edges) == 1) for edge in edges]
            for group, edges in problem.groups.items()
        }
        self.shared: dict[int, list[tuple[Indices, Floats]]] = {}
        for group in [group for group, flows in self.groups.items() if whole and len(flows) > 1]:
            self._share(group)
        self.most = self.arrays.add_columns(1, np.inf) if lean else None
        self._within()
        self.objective = np.inf
        self.values: Floats = np.zeros(0)

    def _one_strategy(self) -> list[Indices]:
        """The columns of every node's allowed strategies, of which one is chosen."""
        nodes = [self.arrays.add_columns(own.size) for own in self.allowed]
        rows = self.arrays.add_rows(len(nodes), 1.0, 1.0)
        for row, columns in zip(rows, nodes, strict=True):
            self.arrays.enter(np.full(columns.size, row), columns, 1.0)
        return nodes

    def _flow(self, edge: Edge, through: bool) -> _Flow:
        """The edge variables of an edge and the rows that tie them to the strategies at both ends.

        With `through`, what arrives at a placement may go on from there, and only pairs that no third placement lies
        between get a variable: the cheapest flow is the same, with a fraction of the variables.
        """
        made, read = edge.before[self.allowed[edge.source]], edge.after[self.allowed[edge.target]]
        rows: Indices = np.unique(made)
        columns: Indices = np.unique(read)
        apart: Sequence[object] = [("before", i) for i in range(len(edge.seconds))]
        names: Sequence[object] = edge.origins if through and edge.origins else apart
        known: dict[object, int] = {}
        row_of, column_of = np.zeros(edge.seconds.shape[0], np.intp), np.zeros(edge.seconds.shape[1], np.intp)
        for i in map(int, rows):
            row_of[i] = known.setdefault(names[i], len(known))
        for j in map(int, columns):
            column_of[j] = known.setdefault(edge.labels[j], len(known))
        before, after = self._direct(edge, through, rows, columns, row_of[rows], column_of[columns])
        own = self.arrays.add_columns(before.size)
        balance = self.arrays.add_rows(len(known), 0.0, 0.0)
        self.arrays.enter(balance[row_of[made]], self.strategies[edge.source], -1.0)
        self.arrays.enter(balance[column_of[read]], self.strategies[edge.target], 1.0)
        self.arrays.enter(balance[row_of[before]], own, 1.0)
        self.arrays.enter(balance[column_of[after]], own, -1.0)
        seconds = edge.weight * edge.seconds[before, after]
        return _Flow(edge=edge, columns=own, before=before, after=after, seconds=seconds)

    def _direct(
        self, edge: Edge, through: bool, rows: Indices, columns: Indices, first: Indices, last: Indices
    ) -> tuple[Indices, Indices]:
        """The pairs of an edge that need a variable; edges mostly share their matrix, which is then looked at once."""
        key = (id(edge.seconds), id(edge.origins), id(edge.labels), through, rows.tobytes(), columns.tobytes())
        if key not in self._pairs:
            before, after = direct(edge.seconds[np.ix_(rows, columns)], first, last)
            self._pairs[key] = (rows[before], columns[after])
        return self._pairs[key]

    def _share(self, group: int) -> None:
        """Gives w to every resharding that several readers of a group may want."""
        columns, seconds, wanted = _wanted(self.groups[group])
        _, at, counts = np.unique(wanted, return_inverse=True, return_counts=True)
        several = counts[at] > 1
        terms = [(columns[~several], seconds[~several])]
        if several.any():
            asking = columns[several]
            cells, first, which = np.unique(wanted[several], return_index=True, return_inverse=True)
            paid = self.arrays.add_columns(cells.size)
            terms.append((paid, seconds[several][first]))
            rows = self.arrays.add_rows(asking.size, 0.0, np.inf)
            self.arrays.enter(rows, paid[which], 1.0)
            self.arrays.enter(rows, asking, -1.0)
        self.shared[group] = terms

    def share_where_readers_disagree(self) -> bool:
        """Gives w to the groups that pay less than the maximum of their readers; says whether there were any."""
        found = False
        for group, flows in self.groups.items():
            if group in self.shared or len(flows) == 1:
                continue
            columns, _, wanted = _wanted(flows)
            if not columns.size:
                continue
            values, at = self.values[columns], np.unique(wanted, return_inverse=True)[1]
            most = np.zeros(at.max() + 1)
            np.maximum.at(most, at, values)
            if np.any(most - np.bincount(at, weights=values) / len(flows) > _TOLERANCE):
                self._share(group)
                found = True
        return found

    def _within(self) -> None:
        """Holds every budget, or lets all be exceeded as little as can be."""
        copies: dict[tuple[int, object], int | None] = {}
        for budget in self.problem.budgets:
            row = self.arrays.add_rows(1, -np.inf, 1.0 if self.most is None else 0.0)
            if self.most is not None:
                self.arrays.enter(row, self.most, -1.0)
            for node, nbytes in budget.nbytes.items():
                own = self.strategies[node]
                self.arrays.enter(np.repeat(row, own.size), own, nbytes[self.allowed[node]] / budget.limit)
            for group, sizes in budget.copies.items():
                for label, size in sizes.items():
                    if (group, label) not in copies:
                        copies[group, label] = self._copied(group, label)
                    if (column := copies[group, label]) is not None:
                        self.arrays.enter(row, np.array([column]), size / budget.limit)

    def _copied(self, group: int, label: object) -> int | None:
        """Whether some reader of a group has the value copied to a placement; None where no reader may want it."""
        wanted: list[tuple[Indices, Indices]] = []
        for edge in self.problem.groups.get(group, ()):
            asking = self._placed(edge.target, edge.after, edge.labels, label)
            if asking.size:
                wanted.append((asking, self._placed(edge.source, edge.before, edge.origins, label)))
        if not wanted:
            return None
        copied = self.arrays.add_columns(1)
        for row, (asking, held) in zip(self.arrays.add_rows(len(wanted), 0.0, np.inf), wanted, strict=True):
            for columns, value in ((copied, 1.0), (asking, -1.0), (held, 1.0)):
                self.arrays.enter(np.full(columns.size, row), columns, value)
        return int(copied[0])

    def _placed(self, node: int, places: Indices, names: Sequence[object], name: object) -> Indices:
        """The columns of a node's strategies under which a value is at a named placement."""
        named = [i for i, other in enumerate(names) if other == name]
        return self.strategies[node][np.isin(places[self.allowed[node]], named)]

    def _cost(self) -> Floats:
        cost = np.zeros(self.arrays.columns)
        if self.most is not None:
            cost[self.most] = 1.0
            return cost
        for own, allowed, columns in zip(self.problem.seconds, self.allowed, self.strategies, strict=True):
            cost[columns] = own[allowed]
        for group, flows in self.groups.items():
            means = [(flow.columns, flow.seconds / len(flows)) for flow in flows]
            for columns, seconds in self.shared.get(group, means):
                cost[columns] = seconds
        return cost * _MICROSECONDS

    def run(self, solver: Solver, seconds: float, gap: float) -> str:
        """Solves and says how it ended, `optimal` or the solver's own word; `objective` is in seconds, or budgets."""
        chosen = np.concatenate(self.strategies) if self.whole and self.strategies else np.zeros(0, dtype=np.intp)
        outcome = self.arrays.minimise(self._cost(), chosen, solver, seconds, gap)
        self.values = outcome.values
        self.objective = outcome.objective / (_MICROSECONDS if self.most is None else 1.0)
        return outcome.status

    def has_values(self) -> bool:
        return self.values.size > 0

    def choice(self) -> tuple[int, ...]:
        """The strategy with the largest value at every node."""
        chosen = zip(self.allowed, self.strategies, strict=True)
        return tuple(int(allowed[np.argmax(self.values[columns])]) for allowed, columns in chosen)


def _wanted(flows: Sequence[_Flow]) -> tuple[Indices, Floats, Indices]:
    """The columns of a group's reshardings that cost anything, their seconds, and one number for equal reshardings."""
    known: dict[object, int] = {}
    count = max(flow.edge.seconds.shape[0] for flow in flows)
    numbers: list[Indices] = []
    for flow in flows:
        labels = np.array([known.setdefault(name, len(known)) for name in flow.edge.labels], dtype=np.intp)
        numbers.append(flow.before + count * labels[flow.after])
    columns, wanted = np.concatenate([flow.columns for flow in flows]), np.concatenate(numbers)
    seconds = np.concatenate([flow.seconds for flow in flows])
    costly = seconds > 0
    return columns[costly], seconds[costly], wanted[costly]


def direct(cost: Floats, rows: Indices, columns: Indices) -> tuple[Indices, Indices]:
    """The pairs of different names that no third placement lies between, by the names of `rows` and `columns`.

    Both legs of a way around must cost something, and so less than the pair itself: what is left out is always made up
    of pairs that are kept.
    """
    kept = np.isfinite(cost)
    at, via = np.nonzero(rows[:, None] == columns[None, :])
    kept[at, via] = False
    with np.errstate(invalid="ignore"):
        first, second, whole = cost[:, via, None], cost[None, at, :], cost[:, None, :]
        longer = (first > _LEG * whole) & (second > _LEG * whole) & (first + second <= whole * (1 + 1e-9))
    kept &= ~longer.any(axis=1)
    before, after = np.nonzero(kept)
    return before, after
