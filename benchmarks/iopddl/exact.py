r"""A GraphProblem as an integer program, for what is small enough.

With $x_{n,s} \in \{0,1\}$ for strategy s of node n and $y_{e,s,t} \in [0,1]$ for the pairs of edge e = (u, v):

    minimise    sum_n sum_s c_{n,s} x_{n,s} + sum_e sum_{s,t} C_{e,s,t} y_{e,s,t}
    subject to  sum_s x_{n,s} = 1                               for every node n
                sum_t y_{e,s,t} = x_{u,s}                       for every edge e = (u, v) and s
                sum_s y_{e,s,t} = x_{v,t}                       for every edge e = (u, v) and t
                sum_{i live at t} sum_s g_{i,s} x_{n(i),s} <= limit_t    for every time t

Reference: the local polytope of pairwise models (Schlesinger 1976; Wainwright and Jordan 2008) with capacities.
"""

from __future__ import annotations

import numpy as np

from benchmarks.iopddl.graph_problem import Floats, GraphProblem, Indices
from benchmarks.iopddl.integer_program import Rows, minimise

_GAP = 1e-9
_LARGEST_COST = 1e6


def size(problem: GraphProblem) -> int:
    """The non-zeros of the program."""
    pairs = sum(edge.costs.size for edge in problem.edges)
    return 3 * pairs + sum((usage.end - usage.start) * usage.nbytes.size for usage in problem.usages)


def solve_exactly(problem: GraphProblem, seconds: float) -> tuple[Indices | None, float]:
    """The best choice found, or None, and a bound (infinite: nothing is legal); optimal unless out of time."""
    program = _Program(problem)
    costs = np.concatenate(program.costs)
    allowed = np.isfinite(costs)
    costs = np.where(allowed, costs, 0.0)
    scale = max(float(np.abs(costs).max(initial=0.0)), 1.0) / _LARGEST_COST
    count = int(program.first[-1])
    values, bound = minimise(
        costs / scale, allowed.astype(np.float64), count, program.table(), seconds=seconds, gap=_GAP
    )
    if values is None:
        return None, bound
    ends = zip(program.first[:-1].tolist(), program.first[1:].tolist(), strict=True)
    return np.array([values[a:b].argmax() for a, b in ends], dtype=np.intp), bound * scale


class _Program:
    """Columns and rows; one method for each line of the module's text."""

    def __init__(self, problem: GraphProblem) -> None:
        self.problem = problem
        self.costs: list[Floats] = [np.zeros(0), *problem.costs]
        self.first = np.concatenate([[0], np.cumsum([node_costs.size for node_costs in problem.costs])]).astype(np.intp)
        self.columns: list[Indices] = []
        self.values: list[Floats] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self._one_strategy()
        self._marginals()
        self._limits()

    def table(self) -> Rows:
        """The rows as arrays."""
        sizes = np.array([columns.size for columns in self.columns], dtype=np.intp)
        return Rows(
            start=(np.cumsum(sizes) - sizes).astype(np.intp),
            columns=np.concatenate(self.columns),
            values=np.concatenate(self.values),
            lower=np.array(self.lower),
            upper=np.array(self.upper),
        )

    def _one_strategy(self) -> None:
        for node, node_costs in enumerate(self.problem.costs):
            self._row(self.first[node] + np.arange(node_costs.size), np.ones(node_costs.size), 1.0, 1.0)

    def _marginals(self) -> None:
        count = int(self.first[-1])
        for edge in self.problem.edges:
            self.costs.append(edge.costs.ravel())
            pairs: Indices = count + np.arange(edge.costs.size).reshape(edge.costs.shape)
            for node, lines in ((edge.source, pairs), (edge.target, pairs.T)):
                signs = np.append(np.ones(lines.shape[1]), -1.0)
                for strategy in range(lines.shape[0]):
                    self._row(np.append(lines[strategy], self.first[node] + strategy), signs, 0.0, 0.0)
            count += edge.costs.size

    def _limits(self) -> None:
        live: list[list[int]] = [[] for _ in range(self.problem.limits.size)]
        for number, usage in enumerate(self.problem.usages):
            for moment in range(usage.start, usage.end):
                live[moment].append(number)
        for limit, numbers in zip(self.problem.limits.tolist(), live, strict=True):
            if not numbers or not np.isfinite(limit):
                continue
            nbytes = np.zeros(self.first[-1])
            for usage in (self.problem.usages[n] for n in numbers):
                nbytes[self.first[usage.node] : self.first[usage.node + 1]] += usage.nbytes
            used, unit = np.flatnonzero(nbytes), max(limit, 1.0)
            self._row(used, nbytes[used] / unit, -np.inf, limit / unit)

    def _row(self, columns: Indices, values: Floats, lower: float, upper: float) -> None:
        self.columns.append(columns)
        self.values.append(values)
        self.lower.append(lower)
        self.upper.append(upper)
