r"""One strategy per node of a sharding problem, at the least total seconds: an integer program in PuLP.

With $x_{n,s} \in \{0,1\}$ for strategy s of node n, $e_{k,i,j} \in [0,1]$ for placements i before and j after edge k:

    minimise    sum_n sum_s c_{n,s} x_{n,s}  +  sum_g sum_{i,j} m_g R_{g,i,j} w_{g,i,j}            (`_objective`)
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

The relaxation is solved first, and at first with the mean of a group's e in the place of w: the mean is below the
maximum, so the bound is valid, and where readers agree it is exact. Groups whose readers disagree get their w and the
relaxation is solved again. Every relaxation is rounded and polished to an answer; the search ends when answer and bound
meet, branches if rows run out first, and always returns the best answer with its bound.

Reshardings are shortest paths, so a pair (i, j) that a third placement lies between needs no variable: the first two
rows of a placement become one balance, what is made or arrives there equals what is read or goes on (transshipment).
That leaves a third of the variables and the same optimum. Readers then share legs of a way, which costs no more than
sharing whole reshardings as `evaluate` does: a bound still, exact where readers agree; branching puts the pairs back.

Reference: the edge formulation of Alpa (Zheng et al., OSDI 2022, eq. 1-4) with equality marginals over placements;
design/intra_op.md 3.1-3.4.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pulp

from passes.errors import NoLegalPlanError, OverBudgetError, PlanningError
from passes.polish import polish
from passes.sharding_problem import Edge, Floats, ShardingProblem
from passes.tying import tie

Flow = dict[tuple[int, int], Any]
"""The edge variables of an edge by (placement before, placement after)."""

_TOLERANCE = 1e-6
_LEG = 1e-6
_BRANCHING = 3.0
"""Times that the last relaxation took: less than that left is too late to branch."""

_PARTS = 4
"""Parts of equal nodes that budgets may treat differently."""

_LUMPY = 1e-3
_LEAN = 1e-2
"""Gaps at which a program with budgets, and one that seeks the least bytes, may end: they take long to close."""

_MICROSECONDS = 1e6
"""The program is stated in microseconds: solver tolerances are absolute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One strategy per node; `objective` and `bound` in seconds; `branched` if the relaxation left a gap."""

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
    """`time_limit` in seconds of one solve, which ends early at a relative `gap` between answer and bound.

    `tie_radius` is the rounds of colour refinement that tie equal nodes; None solves every node apart.
    """

    solver: Literal["highs", "cbc"] = "highs"
    time_limit: float = 12.0
    gap: float = 1e-4
    tie_radius: int | None = 2


def solve(problem: ShardingProblem, options: SolverOptions | None = None) -> Answer:
    """The best strategy of every node. Raises PlanningError if no combination of strategies is legal."""
    options = options or SolverOptions()
    if problem.budgets:
        options = replace(options, gap=max(options.gap, _LUMPY))
    if options.tie_radius is None:
        return _solve(problem, options)
    tied, classes = tie(problem, options.tie_radius, _PARTS if problem.budgets else 1)
    answer = _solve(tied, options)
    choice = tuple(answer.choice[cls] for cls in classes)
    return replace(answer, choice=choice, objective=problem.evaluate(choice))


def leanest(problem: ShardingProblem, options: SolverOptions | None = None) -> tuple[int, ...]:
    """The strategies that come closest to the budgets, or stay furthest below them, whatever they cost."""
    options = options or SolverOptions()
    tied, classes = tie(problem, options.tie_radius or 2, _PARTS)
    program = _Program(tied, lean=True)
    program.make_integral()
    program.run(replace(options, gap=_LEAN), options.time_limit)
    if not program.has_values():
        raise NoLegalPlanError(f"no legal plan was found within {options.time_limit:.0f} s; give the solver longer")
    choice = program.choice()
    return tuple(choice[cls] for cls in classes)


def _solve(problem: ShardingProblem, options: SolverOptions) -> Answer:
    start = time.perf_counter()
    if any(not np.isfinite(own).any() for own in problem.seconds):
        node = next(n for n, own in enumerate(problem.seconds) if not np.isfinite(own).any())
        raise NoLegalPlanError(f"node {node} of the program has no legal strategy under this planner")
    program = _Program(problem)
    built = time.perf_counter()
    best: tuple[int, ...] | None = None
    objective, bound, branched, relaxed = float("inf"), 0.0, False, 0.0

    def closed() -> bool:
        return bool(np.isfinite(objective)) and objective - bound <= options.gap * objective

    def left() -> float:
        return options.time_limit - (time.perf_counter() - built)

    while not closed() and left() > 0 and not branched:
        began = time.perf_counter()
        status = program.run(options, max(1.0, left()))
        relaxed = time.perf_counter() - began
        if status == "infeasible" and problem.budgets:
            raise OverBudgetError("no combination of strategies keeps the memory limit")
        if status == "infeasible":
            raise NoLegalPlanError(
                "no combination of strategies is legal under this planner's restrictions; use planner=Auto(), or a "
                "mesh whose axes divide the arrays"
            )
        if status != "optimal":
            break
        bound = max(bound, program.objective)
        rounded = polish(problem, program.choice())
        if problem.fits(rounded) and problem.evaluate(rounded) < objective:
            best, objective = rounded, problem.evaluate(rounded)
        if not closed() and not program.share_where_readers_disagree():
            branched = True
    # Branching puts all pairs back; a solver that gets it late overruns its limit by more than it could gain.
    if branched and left() > _BRANCHING * relaxed:
        program.make_integral()
        ended = program.run(options, left())
        if ended == "infeasible" and problem.budgets:
            raise OverBudgetError("no combination of strategies keeps the memory limit")
        found = polish(problem, program.choice()) if program.has_values() else None
        if found and problem.fits(found) and problem.evaluate(found) < objective:
            best, objective = found, problem.evaluate(found)
        bound = objective if ended == "optimal" else bound
    if best is None:
        best = polish(problem, [int(np.argmin(own)) for own in problem.seconds])
        objective = problem.evaluate(best) if problem.fits(best) else float("inf")
    if not np.isfinite(objective):
        raise PlanningError(
            f"no legal plan was found within {options.time_limit:.0f} s; give the solver a longer time_limit"
        )
    return Answer(
        choice=best,
        objective=objective,
        bound=min(bound, objective),
        status="optimal" if closed() else "time limit",
        branched=branched,
        build_seconds=built - start,
        solve_seconds=time.perf_counter() - built,
        variables=program.count,
        rows=len(program.lp.constraints),
    )


def _direct(
    seconds: Floats, origins: Sequence[object], labels: Sequence[object], rows: Sequence[int], columns: Sequence[int]
) -> list[tuple[int, int]]:
    """The pairs (row, column) of different names that no third placement lies between.

    Both legs of a way around must cost something, and so less than the pair itself: what is left out is always made up
    of pairs that are kept.
    """
    cost = seconds[np.ix_(rows, columns)]
    kept = np.isfinite(cost)
    column = {labels[j]: at for at, j in enumerate(columns)}
    with np.errstate(invalid="ignore"):
        for row, i in enumerate(rows):
            at = column.get(origins[i])
            if at is None:
                continue
            kept[row, at] = False
            first, second = cost[:, at, None], cost[None, row, :]
            longer = (first > _LEG * cost) & (second > _LEG * cost)
            kept &= ~(longer & (first + second <= cost * (1 + 1e-9)))
    return [(rows[r], columns[c]) for r, c in np.argwhere(kept)]


class _Program:
    """The program of one problem; each method adds the rows that the module's text names."""

    def __init__(self, problem: ShardingProblem, *, lean: bool = False) -> None:
        self.problem = problem
        self.lp = pulp.LpProblem("intra_op", pulp.LpMinimize)
        self.count = 0
        self.strategies = self._one_strategy()
        self.groups: dict[int, list[tuple[Edge, Flow]]] = defaultdict(list)
        for edge in problem.edges:
            self.groups[edge.group].append((edge, self._flow(edge)))
        self.shared: dict[int, list[tuple[Any, float]]] = {}
        self.most = self._variable("m", upper=None) if lean else None
        self._within()

    @property
    def objective(self) -> float:
        """Seconds of the last solution."""
        value: Any = pulp.value(self.lp.objective)
        return float(value) / _MICROSECONDS

    def _variable(self, kind: str, upper: float | None = 1.0) -> Any:
        self.count += 1
        return self.lp.add_variable(f"{kind}{self.count}", 0.0, upper)

    def _one_strategy(self) -> list[dict[int, Any]]:
        nodes: list[dict[int, Any]] = []
        for seconds in self.problem.seconds:
            chosen = {int(s): self._variable("x") for s in np.flatnonzero(np.isfinite(seconds))}
            self._equal([(variable, 1.0) for variable in chosen.values()], 1.0)
            nodes.append(chosen)
        return nodes

    def _flow(self, edge: Edge, through: bool = True) -> Flow:
        """The edge variables of an edge and the rows that tie them to the strategies at both ends.

        With `through`, what arrives at a placement may go on from there, and only pairs that no third placement lies
        between get a variable: the cheapest flow is the same, with a fraction of the variables.
        """
        rows = sorted({int(edge.before[s]) for s in self.strategies[edge.source]})
        columns = sorted({int(edge.after[t]) for t in self.strategies[edge.target]})
        names = edge.origins if through and edge.origins else tuple(("before", i) for i in range(len(edge.seconds)))
        balance: dict[object, list[tuple[Any, float]]] = defaultdict(list)
        for s, variable in self.strategies[edge.source].items():
            balance[names[edge.before[s]]].append((variable, -1.0))
        for t, variable in self.strategies[edge.target].items():
            balance[edge.labels[edge.after[t]]].append((variable, 1.0))
        flow = {pair: self._variable("e") for pair in _direct(edge.seconds, names, edge.labels, rows, columns)}
        for (i, j), variable in flow.items():
            balance[names[i]].append((variable, 1.0))
            balance[edge.labels[j]].append((variable, -1.0))
        for terms in balance.values():
            self._equal(terms, 0.0)
        return flow

    def _equal(self, terms: list[tuple[Any, float]], right: float) -> None:
        self.lp.addConstraint(pulp.LpAffineExpression(terms) == right)

    def _wanted(self, edges: Sequence[tuple[Edge, Flow]]) -> dict[tuple[object, object], list[tuple[Any, float]]]:
        """The edge variables of every resharding (placement before, after) that costs anything, with its seconds."""
        wanted: dict[tuple[object, object], list[tuple[Any, float]]] = defaultdict(list)
        for edge, flow in edges:
            for (i, j), variable in flow.items():
                seconds = edge.weight * float(edge.seconds[i, j])
                if seconds > 0:
                    wanted[(i, edge.labels[j])].append((variable, seconds))
        return wanted

    def _share(self, group: int) -> None:
        """Gives w to every resharding that several readers of a group may want."""
        terms: list[tuple[Any, float]] = []
        for cells in self._wanted(self.groups[group]).values():
            if len(cells) == 1:
                terms.append(cells[0])
                continue
            paid = self._variable("w")
            terms.append((paid, cells[0][1]))
            for variable, _ in cells:
                self.lp.addConstraint(pulp.LpAffineExpression([(paid, 1.0), (variable, -1.0)]) >= 0)
        self.shared[group] = terms

    def share_where_readers_disagree(self) -> bool:
        """Gives w to the groups that pay less than the maximum of their readers; says whether there were any."""
        found = False
        for group, edges in self.groups.items():
            if group in self.shared or len(edges) == 1:
                continue
            for cells in self._wanted(edges).values():
                values = [variable.value() or 0.0 for variable, _ in cells]
                if max(values) - sum(values) / len(edges) > _TOLERANCE:
                    self._share(group)
                    found = True
                    break
        return found

    def _within(self) -> None:
        """Holds every budget, or lets all be exceeded as little as can be."""
        copies: dict[tuple[int, object], Any] = {}
        for budget in self.problem.budgets:
            terms: list[tuple[Any, float]] = []
            for node, nbytes in budget.nbytes.items():
                terms.extend(
                    (variable, float(nbytes[s]) / budget.limit) for s, variable in self.strategies[node].items()
                )
            for group, sizes in budget.copies.items():
                for label, size in sizes.items():
                    if (group, label) not in copies:
                        copies[group, label] = self._copied(group, label)
                    if copies[group, label] is not None:
                        terms.append((copies[group, label], size / budget.limit))
            held = pulp.LpAffineExpression(terms)
            self.lp.addConstraint(held <= 1 if self.most is None else held - self.most <= 0)

    def _copied(self, group: int, label: object) -> Any | None:
        """Whether some reader of a group has the value copied to a placement; None where no reader may want it."""
        wanted: list[tuple[list[Any], list[Any]]] = []
        for edge, _ in self.groups[group]:
            columns = {j for j, name in enumerate(edge.labels) if name == label}
            rows = {i for i, name in enumerate(edge.origins) if name == label}
            asking = [v for t, v in self.strategies[edge.target].items() if int(edge.after[t]) in columns]
            there = [v for s, v in self.strategies[edge.source].items() if int(edge.before[s]) in rows]
            if asking:
                wanted.append((asking, there))
        if not wanted:
            return None
        copied = self._variable("z")
        for asking, there in wanted:
            terms = [(copied, 1.0), *((v, -1.0) for v in asking), *((v, 1.0) for v in there)]
            self.lp.addConstraint(pulp.LpAffineExpression(terms) >= 0)
        return copied

    def _objective(self) -> None:
        if self.most is not None:
            self.lp.setObjective(pulp.LpAffineExpression([(self.most, 1.0)]))
            return
        terms: list[tuple[Any, float]] = []
        for seconds, chosen in zip(self.problem.seconds, self.strategies, strict=True):
            terms.extend((variable, float(seconds[s])) for s, variable in chosen.items())
        for group, edges in self.groups.items():
            if group in self.shared:
                terms.extend(self.shared[group])
            else:
                means = (cell for cells in self._wanted(edges).values() for cell in cells)
                terms.extend((variable, seconds / len(edges)) for variable, seconds in means)
        self.lp.setObjective(pulp.LpAffineExpression([(v, c * _MICROSECONDS) for v, c in terms]))

    def run(self, options: SolverOptions, seconds: float) -> str:
        """Solves and says how it ended, `optimal` or the solver's own word."""
        self._objective()
        highs = options.solver == "highs" and pulp.HiGHS(msg=False).available()
        chosen: Any = pulp.HiGHS if highs else pulp.PULP_CBC_CMD
        self.lp.solve(chosen(msg=False, timeLimit=seconds, threads=1, gapRel=options.gap))
        program: Any = self.lp
        # PuLP calls a program that ran out of time optimal too; only the status of its solution tells them apart.
        if program.status == pulp.LpStatusOptimal and program.sol_status != pulp.LpSolutionOptimal:
            return "time limit"
        return str(pulp.LpStatus[program.status]).lower()

    def make_integral(self) -> None:
        """Asks for whole strategies and whole reshardings: groups share pairs of placements, not legs of a way."""
        for group, edges in self.groups.items():
            if len(edges) > 1:
                self.groups[group] = [(edge, self._flow(edge, through=False)) for edge, _ in edges]
                self._share(group)
        for node in self.strategies:
            for variable in node.values():
                variable.cat = pulp.LpInteger

    def has_values(self) -> bool:
        return all(v.value() is not None for node in self.strategies for v in node.values())

    def choice(self) -> tuple[int, ...]:
        """The strategy with the largest value at every node."""
        return tuple(max(node, key=lambda s: node[s].value()) for node in self.strategies)
