r"""One strategy per node of a sharding problem, at the least total seconds: an integer program in PuLP.

With $x_{n,s} \in \{0,1\}$ for strategy s of node n and $e_{k,i,j} \in [0,1]$ for placements i before and j after edge k:

    minimise    sum_n sum_s c_{n,s} x_{n,s}  +  sum_g sum_{i,j} m_g R_{g,i,j} w_{g,i,j}            (`_objective`)
    subject to  sum_s x_{n,s} = 1                                   for every node n              (`_one_strategy`)
                sum_j e_{k,i,j} = sum_{s: before_k(s) = i} x_{u,s}  for every edge k = (u, v), i   (`_marginals`)
                sum_i e_{k,i,j} = sum_{t: after_k(t) = j} x_{v,t}   for every edge k = (u, v), j   (`_marginals`)
                w_{g,i,j} >= e_{k,i,j}                              for every edge k of group g    (`_shared`)

c are the seconds of a node, R those of a resharding, m how often a tied group occurs. Edges of a group read one value:
a resharding that several of them want is paid once. A group of one edge needs no w. Edge variables stand on distinct
*placements*, not on strategies, and only x is integral: with x fixed, e is a product of marginals that are 0 or 1.
The relaxation is solved first; only if some x comes out fractional does the solver branch.

Reference: the edge formulation of Alpa (Zheng et al., OSDI 2022, eq. 1-4) with equality marginals over placements;
design/intra_op.md 3.1-3.4.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pulp
from numpy.typing import NDArray

from passes.errors import InternalError, PlanningError

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

_MICROSECONDS = 1e6
"""The program is stated in microseconds: solver tolerances are absolute."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edge:
    """A value that `source` makes and `target` reads.

    `before` [strategies of source] and `after` [strategies of target] index the rows and columns of `seconds`
    [placements before, placements after]; `labels` names the columns, so that edges of one `group` can share a
    resharding; `weight` is how often the group occurs.
    """

    source: int
    target: int
    before: Indices
    after: Indices
    seconds: Floats
    labels: tuple[object, ...]
    group: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardingProblem:
    """Nodes with the seconds of their strategies (infinite: not allowed) and the edges between them."""

    seconds: tuple[Floats, ...]
    edges: tuple[Edge, ...]

    def evaluate(self, choice: Sequence[int]) -> float:
        """Total seconds when node n takes strategy `choice[n]`; independent of the program that found it."""
        total = sum(float(seconds[c]) for seconds, c in zip(self.seconds, choice, strict=True))
        paid: dict[tuple[int, int, object], float] = {}
        for edge in self.edges:
            i, j = edge.before[choice[edge.source]], edge.after[choice[edge.target]]
            paid[(edge.group, int(i), edge.labels[j])] = edge.weight * float(edge.seconds[i, j])
        return total + sum(paid.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One strategy per node; `objective` and `bound` in seconds; `status` in words; `branched` if the LP was fractional."""

    choice: tuple[int, ...]
    objective: float
    bound: float
    status: Literal["optimal", "time limit"]
    branched: bool
    build_seconds: float
    solve_seconds: float
    variables: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverOptions:
    """`time_limit` in seconds for one solve; `tie_radius` rounds of colour refinement, None to solve every node apart."""

    solver: Literal["highs", "cbc"] = "highs"
    time_limit: float = 60.0
    tie_radius: int | None = 2


def solve(problem: ShardingProblem, options: SolverOptions | None = None) -> Answer:
    """The best strategy of every node. Raises PlanningError if no combination of strategies is legal."""
    options = options or SolverOptions()
    if options.tie_radius is None:
        return _solve(problem, options)
    tied, classes = tie(problem, options.tie_radius)
    answer = _solve(tied, options)
    choice = tuple(answer.choice[cls] for cls in classes)
    return replace(answer, choice=choice, objective=problem.evaluate(choice))


def tie(problem: ShardingProblem, radius: int) -> tuple[ShardingProblem, tuple[int, ...]]:
    """The problem with structurally equal nodes made one, and the class of every node.

    Nodes are equal if their costs and their neighbourhoods up to `radius` edges are (Weisfeiler-Lehman colours). The
    answer is a feasible answer of the whole problem; that it is also optimal is measured, not proven.

    Reference: design/intra_op.md 3.3.
    """
    colours = _colours(problem, radius)
    first: dict[str, int] = {}
    classes = tuple(first.setdefault(colour, len(first)) for colour in colours)
    seconds: list[Floats] = [np.zeros(0)] * len(first)
    for cls, own in zip(classes, problem.seconds, strict=True):
        seconds[cls] = own.copy() if not seconds[cls].size else seconds[cls] + own
    groups: dict[int, list[Edge]] = defaultdict(list)
    for edge in problem.edges:
        groups[edge.group].append(edge)
    merged: dict[tuple[object, ...], tuple[list[Edge], float]] = {}
    for edges in groups.values():
        unique: dict[tuple[object, ...], Edge] = {}
        for edge in edges:
            key = (classes[edge.source], classes[edge.target], _edge_key(edge))
            unique.setdefault(key, replace(edge, source=key[0], target=key[1]))
        signature = tuple(sorted(unique, key=repr))
        members, weight = merged.get(signature, (list(unique.values()), 0.0))
        merged[signature] = (members, weight + edges[0].weight)
    tied: list[Edge] = []
    for group, (edges, weight) in enumerate(merged.values()):
        tied.extend(replace(edge, group=group, weight=weight) for edge in edges)
    return ShardingProblem(seconds=tuple(seconds), edges=tuple(tied)), classes


def _colours(problem: ShardingProblem, radius: int) -> list[str]:
    colours = [_digest(own.tobytes()) for own in problem.seconds]
    around: list[list[tuple[str, int]]] = [[] for _ in colours]
    for edge in problem.edges:
        key = _edge_key(edge)
        around[edge.source].append((f"to {key}", edge.target))
        around[edge.target].append((f"from {key}", edge.source))
    for _ in range(radius):
        colours = [
            _digest((colour + "".join(sorted(key + colours[other] for key, other in near))).encode())
            for colour, near in zip(colours, around, strict=True)
        ]
    return colours


def _edge_key(edge: Edge) -> str:
    parts = (edge.before.tobytes(), edge.after.tobytes(), edge.seconds.tobytes(), repr(edge.labels).encode())
    return _digest(b"|".join(parts))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _solve(problem: ShardingProblem, options: SolverOptions) -> Answer:
    start = time.perf_counter()
    program = _Program(problem)
    built = time.perf_counter()
    relaxed = program.run(options, options.time_limit)
    branched = relaxed == "optimal" and program.is_fractional()
    if relaxed != "optimal":
        raise PlanningError(
            f"the solver ended with '{relaxed}' on the linear relaxation of {program.size[0]} variables after "
            f"{options.time_limit:.0f} s: no placement satisfies the planner's restrictions, or the time limit is too "
            "short. Use planner=Auto(), a mesh whose axes divide the arrays, or a longer time_limit"
        )
    bound = program.objective
    status: Literal["optimal", "time limit"] = "optimal"
    if branched:
        program.make_integral()
        left = max(1.0, options.time_limit - (time.perf_counter() - built))
        if program.run(options, left) != "optimal":
            status = "time limit"
    choice = program.choice()
    objective = problem.evaluate(choice)
    if not np.isfinite(objective):
        raise PlanningError(f"no legal plan was found within {options.time_limit:.0f} s; give the solver a longer time_limit")
    return Answer(
        choice=choice,
        objective=objective,
        bound=objective if status == "optimal" and branched else min(bound, objective),
        status=status,
        branched=branched,
        build_seconds=built - start,
        solve_seconds=time.perf_counter() - built,
        variables=program.size[0],
        rows=program.size[1],
    )


class _Program:
    """The integer program of one problem; each method adds the constraints that the module's text names."""

    def __init__(self, problem: ShardingProblem) -> None:
        self.problem = problem
        self.lp = pulp.LpProblem("intra_op", pulp.LpMinimize)
        self.terms: list[tuple[Any, float]] = []
        self.constant = 0.0
        self.count = 0
        self.rows: list[Any] = []
        self.strategies = self._one_strategy()
        edges: dict[int, list[Edge]] = defaultdict(list)
        for edge in problem.edges:
            edges[edge.group].append(edge)
        for group in edges.values():
            self._shared([(edge, self._marginals(edge)) for edge in group])
        self._objective()
        self.size = (self.count, len(self.rows))

    @property
    def objective(self) -> float:
        """Seconds of the last solution."""
        return float(pulp.value(self.lp.objective)) / _MICROSECONDS

    def _variable(self, kind: str) -> Any:
        self.count += 1
        return self.lp.add_variable(f"{kind}{self.count}", 0.0, 1.0)

    def _one_strategy(self) -> list[dict[int, Any]]:
        nodes: list[dict[int, Any]] = []
        for node, seconds in enumerate(self.problem.seconds):
            allowed = np.flatnonzero(np.isfinite(seconds))
            if not allowed.size:
                raise PlanningError(f"node {node} of the program has no legal strategy under this planner")
            chosen = {int(s): self._variable("x") for s in allowed}
            self.terms.extend((variable, float(seconds[s])) for s, variable in chosen.items())
            self._equal([(variable, 1.0) for variable in chosen.values()], 1.0)
            nodes.append(chosen)
        return nodes

    def _marginals(self, edge: Edge) -> dict[tuple[int, int], Any]:
        rows: dict[int, list[Any]] = defaultdict(list)
        columns: dict[int, list[Any]] = defaultdict(list)
        for s, variable in self.strategies[edge.source].items():
            rows[int(edge.before[s])].append(variable)
        for t, variable in self.strategies[edge.target].items():
            columns[int(edge.after[t])].append(variable)
        cells = {(i, j): self._variable("e") for i in rows for j in columns if np.isfinite(edge.seconds[i, j])}
        for i, sources in rows.items():
            row = [(e, 1.0) for (a, _), e in cells.items() if a == i]
            self._equal(row + [(x, -1.0) for x in sources], 0.0)
        for j, targets in columns.items():
            column = [(e, 1.0) for (_, b), e in cells.items() if b == j]
            self._equal(column + [(x, -1.0) for x in targets], 0.0)
        return cells

    def _shared(self, group: list[tuple[Edge, dict[tuple[int, int], Any]]]) -> None:
        wanted: dict[tuple[int, object], list[tuple[Any, float]]] = defaultdict(list)
        for edge, cells in group:
            for (i, j), variable in cells.items():
                if edge.seconds[i, j] > 0:
                    wanted[(i, edge.labels[j])].append((variable, edge.weight * float(edge.seconds[i, j])))
        for cells in wanted.values():
            if len(cells) == 1:
                self.terms.append(cells[0])
                continue
            paid = self._variable("w")
            self.terms.append((paid, cells[0][1]))
            for variable, _ in cells:
                self.rows.append(pulp.LpAffineExpression([(paid, 1.0), (variable, -1.0)]) >= 0)

    def _equal(self, terms: list[tuple[Any, float]], right: float) -> None:
        self.rows.append(pulp.LpAffineExpression(terms) == right)

    def _objective(self) -> None:
        self.lp.setObjective(pulp.LpAffineExpression([(v, c * _MICROSECONDS) for v, c in self.terms]))
        for row in self.rows:
            self.lp.addConstraint(row)

    def run(self, options: SolverOptions, seconds: float) -> str:
        """Solves and says how it ended, `optimal` or the solver's own word."""
        highs = options.solver == "highs" and pulp.HiGHS(msg=False).available()
        chosen: Any = pulp.HiGHS if highs else pulp.PULP_CBC_CMD
        solver = chosen(msg=False, timeLimit=seconds, threads=1, gapRel=1e-6)
        self.lp.solve(solver)
        return "optimal" if self.lp.status == pulp.LpStatusOptimal else pulp.LpStatus[self.lp.status].lower()

    def is_fractional(self) -> bool:
        return any(1e-5 < (v.value() or 0.0) < 1 - 1e-5 for node in self.strategies for v in node.values())

    def make_integral(self) -> None:
        for node in self.strategies:
            for variable in node.values():
                variable.cat = pulp.LpInteger

    def choice(self) -> tuple[int, ...]:
        """The strategy with the largest value at every node."""
        chosen: list[int] = []
        for node in self.strategies:
            values = {s: v.value() for s, v in node.items()}
            if any(value is None for value in values.values()):
                raise InternalError("the solver returned no values")
            chosen.append(max(values, key=lambda s: values[s]))
        return tuple(chosen)
