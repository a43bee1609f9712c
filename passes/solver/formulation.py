r"""A sharding problem as an integer program, in columns and rows.

With $x_{n,s} \in \{0,1\}$ for strategy s of node n, $e_{k,i,j} \in [0,1]$ for placements i before and j after edge k:

    minimise    sum_n sum_s c_{n,s} x_{n,s}  +  sum_g sum_{i,j} m_g R_{g,i,j} w_{g,i,j}            (`_cost`)
    subject to  sum_s x_{n,s} = 1                                   for every node n              (`_one_strategy`)
                sum_j e_{k,i,j} = sum_{s: before_k(s) = i} x_{u,s}  for every edge k = (u, v), i             (`flows`)
                sum_i e_{k,i,j} = sum_{t: after_k(t) = j} x_{v,t}   for every edge k = (u, v), j             (`flows`)
                w_{g,i,j} >= e_{k,i,j}                              for every edge k of group g    (`_share`)
                sum_n sum_s M_{p,n,s} x_{n,s} + sum_{g,j} K_{p,g,j} z_{g,j} <= 1   for every budget p  (`BudgetRows`)
                z_{g,j} >= sum_{t: after_k(t) = j} x_{v,t} - sum_{s: before_k(s) = j} x_{u,s}, k in g   (`BudgetRows`)

c are the seconds of a node, R those of a resharding, m how often a merged group occurs. M and K are the bytes that a
strategy and a copy hold at point p of the program, as shares of what may be held there. Edges of a group read one
value: a resharding that several of them want is paid once. A group of one edge needs no w. Edge variables stand on
distinct *placements*, not on strategies, and only x is integral: with x fixed, e is a product of marginals that are 0
or 1. One of the rows of an edge follows from the others, and is left out.

A group pays the mean of its readers' e until `_share` makes it pay the maximum. There w is stated as what it has beyond
the mean, which leaves the costs of e as they were: where the relaxation ended before is where it goes on. It begins at
prices near its optimum (passes/solver/starting_prices.py), or, where other budgets of the same strategies were asked
for before, where that relaxation ended (`Bases`).

Reshardings are shortest paths, so a pair (i, j) that a third placement lies between needs no variable: the first two
rows of a placement become one balance, what is made or arrives there equals what is read or goes on (transshipment).
That leaves a third of the variables and the same optimum. Readers then share legs of a way, which costs no more than
sharing whole reshardings as `evaluate` does, if all go the same ways: only through placements that every reader of the
group may want. So it is a bound still, exact where readers agree; branching puts the pairs back.

A sum that several readers want is reduced once (`problem.Sums`). The relaxation knows that only as far as legs of ways
are shared; its optimum is no bound then, but its prices lead to one (passes/solver/lower_bound.py). A program of whole
strategies has the reductions as columns (`add_sum`), and is a bound.

Reference: Zheng et al., Alpa (OSDI 2022), section 4.2: its equation 1 made linear, here with equality marginals over
placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passes.solver import pulp_solver
from passes.solver.budget_rows import BudgetRows
from passes.solver.edge_flows import Flow, Shapes, flows
from passes.solver.factors import Prices
from passes.solver.linear_program import Bases, Basis, LinearProgram, Outcome
from passes.solver.problem import Floats, Indices, ShardingProblem
from passes.solver.starting_prices import StartingPrices, starting_prices
from passes.solver.sum_rows import add_sum

_TOLERANCE = 1e-6
"""Readers that differ by less agree: ten times what HiGHS keeps rows to by default."""

_LARGE = 10_000
"""Columns from which finding prices to start at takes less time than it saves."""

_BEYOND = 1.05
"""Bounds that end a relaxation are found a little beyond what is enough, where they may be so for other problems."""

UNUSED = 1e9
"""The price of a placement that no allowed strategy reads; of one that none makes, less than nothing."""

_MICROSECONDS = 1e6
"""The program is stated in microseconds: solver tolerances are absolute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cells:
    """The reshardings of a group's readers that have a cost, each once.

    `columns` are the edge variables, `seconds` their full price, `cell` their cells, `readers` [cells] how many want
    each.
    """

    columns: Indices
    seconds: Floats
    cell: Indices
    readers: Indices

    @classmethod
    def of(cls, flows: Sequence[Flow], *, whole: bool) -> _Cells:
        """The cells of a group; of a `whole` program without those of sums, whose reductions are columns."""
        count = max(flow.edge.seconds.shape[0] for flow in flows)
        numbers = [flow.shape.before + count * flow.shape.names[flow.shape.after] for flow in flows]
        seconds = np.concatenate([flow.seconds for flow in flows])
        costly = seconds > 0
        if whole and (sums := flows[0].edge.sums) is not None:
            costly &= ~np.concatenate([sums.rows[flow.shape.before] for flow in flows])
        cell_numbers = np.concatenate(numbers)[costly]
        _, cell, readers = np.unique(cell_numbers, return_inverse=True, return_counts=True)
        columns = np.concatenate([flow.columns for flow in flows])
        return cls(columns=columns[costly], seconds=seconds[costly], cell=cell, readers=readers)

    def wanted_by(self, readers: int) -> tuple[Indices, Floats]:
        """The edge variables [cells, readers] of the cells that so many readers need, and their prices [cells]."""
        order = np.argsort(self.cell, kind="stable")
        order = order[self.readers[self.cell[order]] == readers].reshape(-1, readers)
        return self.columns[order], self.seconds[order[:, 0]]

    def disagree(self, values: Floats) -> bool:
        """Whether the readers of some cell need it to different degrees."""
        amounts, largest = values[self.columns], np.zeros(self.readers.size)
        np.maximum.at(largest, self.cell, amounts)
        mean = np.bincount(self.cell, weights=amounts, minlength=largest.size) / self.readers
        return bool(np.any(largest - mean > _TOLERANCE))


class StrategyProgram:
    """The program of one problem; each method adds the rows that the module's text names.

    A `whole` one asks for whole strategies and whole reshardings: groups share pairs of placements, not legs of a way.
    A `least_memory` one seeks the fewest bytes beyond its budgets, or furthest below them, whatever that costs.

    A relaxation begins at the prices of its `start`, if there are any, and ends where it cannot take less than `cutoff`
    seconds. What no answer goes below is `bound` once a whole program was solved, however far that came.
    """

    def __init__(
        self, problem: ShardingProblem, *, whole: bool = False, least_memory: bool = False, cutoff: float = np.inf
    ) -> None:
        self.problem = problem
        self.cutoff = cutoff
        self.whole = whole
        self.arrays = LinearProgram()
        finite = [np.isfinite(seconds) for seconds in problem.seconds]
        self.allowed = [np.flatnonzero(is_finite) for is_finite in finite]
        self.strategies = self._one_strategy()
        self.groups = flows(problem, finite, self.strategies, self.arrays, whole=whole)
        self.cells = {group: _Cells.of(flows, whole=whole) for group, flows in self.groups.items() if len(flows) > 1}
        self.shared: dict[int, list[tuple[Indices, Floats]]] = {}
        for group in self.cells if whole else ():
            self._share(group)
            self._reduce(group)
        self.most = self.arrays.add_columns(1, np.inf) if least_memory else None
        costs = tuple(seconds[allowed] for seconds, allowed in zip(problem.seconds, self.allowed, strict=True))
        self.start = StartingPrices(of_rows=np.zeros(0), costs=costs)
        if self.arrays.columns > _LARGE and not whole and not least_memory:
            groups = list(self.groups.values())
            self.start = starting_prices(costs, groups, self.one_rows, self.arrays.rows, cutoff)
        if problem.budgets and not whole and not least_memory:
            self.arrays.begins(problem.cache.kept(Bases), np.concatenate(finite).tobytes())
        self.budgets = BudgetRows(problem, self.arrays, self.allowed, self.strategies, self.most)
        self.objective, self.bound = np.inf, -np.inf
        self.values: Floats = np.zeros(0)
        self.duals: Floats = np.zeros(0)
        self.iterations = 0

    def _one_strategy(self) -> list[Indices]:
        """The columns of every node's allowed strategies, of which one is chosen."""
        nodes = [self.arrays.add_columns(node_allowed.size) for node_allowed in self.allowed]
        self.one_rows = self.arrays.add_rows(len(nodes), 1.0, 1.0)
        for row, columns in zip(self.one_rows, nodes, strict=True):
            self.arrays.enter(np.full(columns.size, row), columns, 1.0)
        return nodes

    def _share(self, group: int) -> None:
        """Gives w to every resharding that several readers of a group may want, as what it has beyond their mean."""
        cells, terms = self.cells[group], list[tuple[Indices, Floats]]()
        for readers in (count for count in np.unique(cells.readers).tolist() if count > 1):
            asking, price = cells.wanted_by(readers)
            beyond = self.arrays.add_columns(price.size)
            terms.append((beyond, price))
            mean = self.arrays.add_columns(price.size)
            rows = self.arrays.add_rows(price.size, 0.0, 0.0)
            self.arrays.enter(rows, mean, -1.0)
            self.arrays.enter(np.repeat(rows, readers), asking.ravel(), 1.0 / readers)
            for variables in asking.T:
                rows = self.arrays.add_rows(price.size, 0.0, np.inf)
                for columns, sign in ((beyond, 1.0), (mean, 1.0), (variables, -1.0)):
                    self.arrays.enter(rows, columns, sign)
        self.shared[group] = terms

    def _reduce(self, group: int) -> None:
        """Gives a sum that several readers want its reductions."""
        readers, edge = self.groups[group], self.groups[group][0].edge
        if edge.sums is not None:
            made, columns = edge.before[self.allowed[edge.source]], self.strategies[edge.source]
            self.shared[group] += add_sum(readers, edge.sums, made, columns, self.arrays)

    def share_where_readers_disagree(self) -> bool:
        """Whether some groups paid less than the maximum of their readers; these are then given w."""
        groups = [g for g, cells in self.cells.items() if g not in self.shared and cells.disagree(self.values)]
        for group in groups:
            self._share(group)
        return bool(groups)

    def _cost(self) -> Floats:
        cost = np.zeros(self.arrays.columns)
        if self.most is not None:
            cost[self.most] = 1.0
            return cost
        for node_seconds, allowed, columns in zip(self.problem.seconds, self.allowed, self.strategies, strict=True):
            cost[columns] = node_seconds[allowed]
        for flow in (readers[0] for readers in self.groups.values() if len(readers) == 1):
            cost[flow.columns] = flow.seconds
        for cells in self.cells.values():
            cost[cells.columns] = cells.seconds / cells.readers[cells.cell]
        for columns, seconds in (term for terms in self.shared.values() for term in terms):
            cost[columns] = seconds
        return cost * _MICROSECONDS

    def run(self, *, gap: float, seconds: float | None = None) -> str:
        """The status of a solve, `optimal` or the solver's own word; `objective` is in seconds, or budgets."""
        cutoff = _BEYOND * self.cutoff * _MICROSECONDS if self.most is None else np.inf
        prices = self.start.of_rows * _MICROSECONDS
        outcome = self.arrays.minimise(
            self._cost(), self._integral(), gap=gap, seconds=seconds, prices=prices, cutoff=cutoff
        )
        return self._ended(outcome)

    def run_with(self, solver: object) -> str:
        """The status of `run`, by a solver of PuLP."""
        return self._ended(pulp_solver.minimise(self.arrays, self._cost(), self._integral(), solver))

    def _integral(self) -> Indices:
        return np.concatenate(self.strategies) if self.whole and self.strategies else np.zeros(0, dtype=np.intp)

    def _ended(self, outcome: Outcome) -> str:
        self.values, self.duals = outcome.values, outcome.duals
        self.iterations += outcome.iterations
        unit = _MICROSECONDS if self.most is None else 1.0
        self.objective, self.bound = outcome.objective / unit, outcome.bound / unit
        return outcome.status

    def allow(self, seconds: Sequence[Floats], basis: Basis | None = None) -> None:
        """Has the next relaxation choose among strategies of finite `seconds` [nodes][strategies], from a basis on."""
        finite = [
            np.isfinite(node_seconds[allowed]) for node_seconds, allowed in zip(seconds, self.allowed, strict=True)
        ]
        self.arrays.limit(np.concatenate(finite).astype(np.float64), basis)

    def edge_prices(self) -> list[Prices]:
        """Seconds that each edge's rows and columns are worth by the last relaxation, in the order of the problem."""
        duals = self._row_prices()
        taken, shapes = self.budgets.of_copies(duals), self.problem.cache.kept(Shapes)
        prices_of: dict[int, Prices] = {}
        for flow in (flow for group_flows in self.groups.values() for flow in group_flows):
            edge, shape = flow.edge, flow.shape
            prices = np.full(edge.seconds.shape[0], -UNUSED), np.full(edge.seconds.shape[1], UNUSED)
            prices[0][shape.sources], prices[1][shape.targets] = flow.worth(duals)
            for price, names in zip(prices, (edge.origins, edge.labels), strict=True):
                for label, dual in taken.get(id(edge), ()) if names else ():
                    price -= np.where(shapes.numbers(names) == shapes.number(label), dual, 0.0)
            prices_of[id(edge)] = prices
        return [prices_of[id(edge)] for edge in self.problem.edges]

    def budget_prices(self) -> list[float]:
        """Seconds that the whole of each budget is worth by the last relaxation."""
        duals = self._row_prices()
        return [max(0.0, -float(duals[row])) for row in self.budgets.rows]

    def _row_prices(self) -> Floats:
        """Seconds that rows are worth [rows] by the last relaxation, or at its start if it was not solved."""
        duals = self.duals
        if not duals.size:
            start = self.start.of_rows * _MICROSECONDS
            duals = np.concatenate([start, np.zeros(self.arrays.rows - start.size)])
        return duals / _MICROSECONDS

    def has_values(self) -> bool:
        """Whether the last solve gave each column a value."""
        return self.values.size > 0

    def choice(self) -> tuple[int, ...]:
        """The strategy with the largest value at every node."""
        chosen = zip(self.allowed, self.strategies, strict=True)
        return tuple(int(allowed[np.argmax(self.values[columns])]) for allowed, columns in chosen)

    def open_nodes(self) -> dict[int, Floats]:
        """The nodes that the values do not decide, with those of their strategies."""
        values = {
            node: np.bincount(allowed, weights=self.values[columns], minlength=self.problem.seconds[node].size)
            for node, (allowed, columns) in enumerate(zip(self.allowed, self.strategies, strict=True))
            if columns.size and self.values[columns].max() < 1 - _TOLERANCE
        }
        return {node: np.where(node_values > _TOLERANCE, node_values, 0.0) for node, node_values in values.items()}

    def guess(self) -> tuple[int, ...]:
        """The strategy with the least cost at every node, at prices if there are any."""
        return tuple(
            int(allowed[np.argmin(node_costs)])
            for allowed, node_costs in zip(self.allowed, self.start.costs, strict=True)
        )

    @property
    def is_priced(self) -> bool:
        """Whether its relaxation has prices to start at."""
        return self.start.of_rows.size > 0
