"""The cheapest placements of a program over logical meshes: tabulate, solve, and read the plan off the answer.

With a memory limit, answers that need more are forbidden one by one (passes/intra_op/memory_limit.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from passes.cluster import Mesh
from passes.errors import NoLegalPlanError, OverBudgetError, PlanningError
from passes.intra_op.assembly import Assembly
from passes.intra_op.build_problem import assemble
from passes.intra_op.extract import read_off
from passes.intra_op.memory_limit import (
    LOOSE,
    DearError,
    Fitted,
    HopelessError,
    Point,
    is_hopeless,
    least,
    tightened,
    within,
)
from passes.intra_op.memory_rows import live
from passes.intra_op.meshes import allowed
from passes.intra_op.offloading import away, held_nbytes, resting
from passes.intra_op.peak_node import Path, busiest
from passes.ir import Graph, StatePairs
from passes.memory import peak
from passes.placement import Grouping, group, moves
from passes.plan import INTERRUPTED, Plan
from passes.progress import Deadline, Progress, Report, silent
from passes.sharding import Resharder
from passes.solver import Answer, Search, SolverOptions, solve

_OPEN = 1e-3
"""The gap from which plans by hand are worth a look: each takes a solve of its own."""

_ROUGHLY = 1e-2
"""The gap to which plans by hand are solved: they are where a search starts."""

Restriction = Callable[[Assembly], Assembly]
Textbook = Callable[[Mesh], Iterable[tuple[Restriction, bool]]]
"""What plans by hand forbid on a mesh, and whether they fetch weights once a use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """A mesh with its sharding problem, the answer to it, and the search for that where there was one."""

    assembly: Assembly
    resharder: Resharder
    answer: Answer
    refetch: bool
    search: Search | None = None


def best(
    name: str,
    graph: Graph,
    meshes: Sequence[Mesh],
    state_pairs: StatePairs,
    donated: Sequence[bool],
    options: SolverOptions,
    restrict: Restriction | None = None,
    refetch: bool = False,
    report: Report = silent,
    resharders: dict[Mesh, Resharder] | None = None,
) -> Plan:
    """The cheapest plan over the meshes, whatever memory it needs; `resharders` hold what is known of meshes."""
    return MeshSearch(
        name=name,
        graph=graph,
        state_pairs=state_pairs,
        donated=donated,
        options=options,
        restrict=restrict,
        refetch=refetch,
        report=report,
        resharders={} if resharders is None else resharders,
    ).over(meshes)


@dataclass(slots=True, kw_only=True)
class MeshSearch:
    """A program with the sharding problems that were solved of it, cheapest first.

    If only plans `beneath` so many bytes are wanted, meshes without any are left out as soon as that is seen, and
    others are solved roughly: what fits is brought nearer to the optimum at the end.

    No plan is worse than those by hand that `textbook` knows of: they are looked at where a gap is left, or a limit
    binds.

    If `interruptible`, Ctrl-C ends the search as soon as there is an answer, and it is `interrupted`.
    """

    name: str
    graph: Graph
    state_pairs: StatePairs
    donated: Sequence[bool]
    options: SolverOptions
    restrict: Restriction | None = None
    textbook: Textbook = lambda mesh: ()
    refetch: bool = False
    offload: bool = False
    beneath: float = math.inf
    report: Report = silent
    interruptible: bool = False
    resharders: dict[Mesh, Resharder] = field(default_factory=dict[Mesh, Resharder])
    interrupted: bool = field(default=False, init=False)
    grouping: Grouping = field(init=False)
    offloaded: tuple[int, ...] = field(init=False)
    phases: dict[str, float] = field(init=False)
    solved: list[_Solved] = field(default_factory=list[_Solved])
    hopeless: list[Mesh] = field(default_factory=list[Mesh])
    lowest: tuple[float, _Solved, tuple[int, ...]] | None = None
    seen: list[Path] = field(default_factory=list[Path])
    by_hand: dict[tuple[Mesh, int], Answer | None] = field(default_factory=dict[tuple[Mesh, int], "Answer | None"])
    refetches: bool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        start = time.perf_counter()
        self.grouping = group(self.graph)
        self.offloaded = resting(self.graph, self.state_pairs) if self.offload else ()
        self.phases = {"bundles": time.perf_counter() - start, "tables": 0.0, "build": 0.0, "solve": 0.0}

    def over(self, meshes: Sequence[Mesh]) -> Plan:
        """The cheapest plan over the meshes, whatever memory it needs; not those on which none keeps `beneath`."""
        illegal: list[NoLegalPlanError] = []
        tried = allowed(self.graph, meshes)
        for number, mesh in enumerate(tried):
            try:
                self.solved.append(self._tabulated(mesh, number, len(tried)))
            except NoLegalPlanError as error:
                illegal.append(error)
            except HopelessError:
                self.hopeless.append(mesh)
                continue
            except KeyboardInterrupt:
                if not self.interruptible or not self.solved:
                    raise
                self.interrupted = True
                break
        if not self.solved:
            raise illegal[-1]
        self._close(self.solved)
        self.solved.sort(key=lambda one: one.answer.objective)
        return self.cheapest

    def _close(self, solved: list[_Solved]) -> None:
        """Closes the gaps that relaxations left, on meshes that may yet have the cheapest plan."""
        for place in sorted(range(len(solved)), key=lambda place: solved[place].answer.bound):
            one, least = solved[place], min(other.answer.objective for other in solved)
            if one.answer.status == "optimal" or one.answer.bound >= least or self.interrupted:
                continue
            try:
                self._tell(f"solve {one.assembly.mesh}", place, len(solved), (one, one.answer))
                answer = self._answered(one, least, close=True)
            except KeyboardInterrupt:
                if not self.interruptible:
                    raise
                self.interrupted = True
                break
            solved[place] = replace(one, answer=_better(answer, one.answer))
        for place, one in enumerate(list(solved)):
            if one.answer.bound < (1 - _OPEN) * min(other.answer.objective for other in solved):
                for base, answer in self._by_hand(one):
                    if base.refetch == one.refetch:
                        solved[place] = one = replace(one, answer=_better(answer, one.answer))

    def _by_hand(self, one: _Solved) -> Iterator[tuple[_Solved, Answer]]:
        """The answers by hand on a mesh, and its problem with weights fetched as they do."""
        for number, (restrict, refetch) in enumerate(self.textbook(one.assembly.mesh)):
            base = next((twin for twin in self._twins(one, 0, 1) if twin.refetch == refetch), None)
            if base is None:
                continue
            key = base.assembly.mesh, number
            if key not in self.by_hand:
                self.by_hand[key] = self._restricted(restrict, base.assembly)
            if (answer := self.by_hand[key]) is not None:
                yield base, replace(answer, bound=min(one.answer.bound, answer.objective), status="near optimal")

    def _restricted(self, restrict: Restriction, assembly: Assembly) -> Answer | None:
        """The answer to a mesh's problem as a plan by hand has it; None for one that is not possible there."""
        try:
            return solve(restrict(assembly).problem, replace(self.options, gap=_ROUGHLY), close=False)
        except PlanningError:  # a batch that the axis does not divide, say
            return None

    def _fitting_by_hand(self, limit: float, at_most: float) -> tuple[_Solved, Fitted] | None:
        """The cheapest plan by hand that needs at most `limit` bytes and takes less than `at_most` seconds."""
        best: tuple[_Solved, Fitted] | None = None
        given_up = [self._unsolved(mesh) for mesh in self.hopeless]
        for one in [one for one in (*self.solved, *given_up) if one.refetch == self.refetch]:
            for base, answer in self._by_hand(one):
                if answer.objective < at_most and self._peak(base, answer.choice).nbytes <= limit:
                    best = base, Fitted(problem=base.assembly.problem, answer=answer)
                    at_most = answer.objective
        return best

    def _unsolved(self, mesh: Mesh) -> _Solved:
        """A mesh that was given up, for what is known of it without a solver."""
        resharder = self.resharders.setdefault(mesh, Resharder(mesh))
        assembly = self._assembled(mesh, resharder, self.refetch)
        choice = tuple(int(np.argmin(own)) for own in assembly.problem.seconds)
        nothing = Answer(
            choice=choice, objective=math.inf, bound=0.0, status="near optimal", build_seconds=0.0, solve_seconds=0.0
        )
        return _Solved(assembly=assembly, resharder=resharder, answer=nothing, refetch=self.refetch)

    @property
    def cheapest(self) -> Plan:
        """The cheapest plan, whatever memory it needs."""
        return self._read_off(self.solved[0], self.solved[0].answer)

    @property
    def least_seconds(self) -> float:
        """Seconds of a step that no plan over these meshes goes below."""
        return min(one.answer.bound for one in self.solved if one.refetch == self.refetch)

    @property
    def operators(self) -> int:
        """The operators on all meshes that were solved: a measure of work."""
        return len(self.solved) * count(self.graph)

    def again(self, report: Report, *, offload: bool) -> MeshSearch:
        """A search of the same program, with its solved problems, that offloads or does not."""
        other = copy(self)
        other.report, other.solved, other.lowest, other.seen = report, list(self.solved), None, list(self.seen)
        other.offloaded = resting(self.graph, self.state_pairs) if offload else ()
        return other

    def within(self, limit: float, at_most: float = math.inf, end: Deadline | None = None) -> Plan | None:
        """The cheapest plan that needs at most `limit` bytes on a device, None if it takes `at_most` seconds or more.

        Weights may be fetched once a step or once a use. No further mesh is tried from `end` on once there is a plan.
        Raises OverBudgetError with the leanest plan that was met.
        """
        cheapest = self._fitting_by_hand(limit, at_most)
        dear = False
        meshes = [one for one in self.solved if one.refetch == self.refetch]
        for number, one in enumerate(meshes):
            if one.answer.bound >= (cheapest[1].answer.objective if cheapest else at_most):
                dear = dear or cheapest is None
                continue
            if cheapest is not None and end and end.is_over():
                break
            try:
                best = (cheapest[0], cheapest[1].answer) if cheapest else None
                self._tell(f"fit {one.assembly.mesh} within memory", number, len(meshes), best)
                most = cheapest[1].answer.objective if cheapest else at_most
                if one.answer.status != "optimal":  # it was left when it was dearer than another mesh's
                    one = replace(one, answer=_better(self._answered(one, most, close=False), one.answer))
                cheapest = self._fitted(self._twins(one, number, len(meshes)), limit, most) or cheapest
            except DearError:
                dear = dear or cheapest is None
            except (NoLegalPlanError, HopelessError):
                continue
            except KeyboardInterrupt:
                if not self.interruptible or cheapest is None:
                    raise
                self.interrupted = True
                break
        if cheapest is not None:
            one, found = cheapest
            return self._read_off(one, tightened(found, limit, self.options, partial(self._peak, one)))
        if dear:
            return None
        raise OverBudgetError("no placements keep the memory limit", leanest=self._lowest())

    def _fitted(self, twins: Iterator[_Solved], limit: float, at_most: float) -> tuple[_Solved, Fitted] | None:
        """The cheapest answer on one mesh that fits, None where none was found.

        Raises HopelessError if none can fit, and DearError if those that can take `at_most` seconds or more.
        """
        best: tuple[_Solved, Fitted] | None = None
        dear: DearError | None = None
        for one in twins:
            try:
                point = partial(self._peak, one)
                found = within(one.assembly, one.answer, limit, self.options, point, self.offloaded, self.seen, at_most)
            except HopelessError:
                raise
            except DearError as error:
                dear = error
                continue
            except OverBudgetError:
                continue
            if found.answer.objective < at_most:
                best, at_most = (one, found), found.answer.objective
            if found.answer.objective <= (1 + LOOSE) * one.answer.bound:
                break
        if best is None and dear is not None:
            raise dear
        return best

    def _twins(self, one: _Solved, done: int, total: int) -> Iterator[_Solved]:
        """A mesh's problem as it is, then with weights fetched once a use, which takes no less time."""
        yield one
        if one.refetch or self.refetches is False:
            return
        mesh = one.assembly.mesh
        known = (other for other in self.solved if other.refetch and other.assembly.mesh == mesh)
        if (twin := next(known, None)) is None:
            self._tell(f"tabulate {mesh}", done, total)
            assembly = self._assembled(mesh, one.resharder, refetch=True)
            self.refetches = any(again for _, _, again in assembly.groups)
            if not self.refetches:
                return
            objective = assembly.problem.evaluate(one.answer.choice)
            answer = replace(one.answer, objective=objective)
            twin = _Solved(assembly=assembly, resharder=one.resharder, answer=answer, refetch=True)
            self.solved.append(twin)
        yield twin

    def leanest(self) -> Plan:
        """The plan that needs least memory, of those met on the way to the least on every mesh."""
        for one in self.solved:
            least(one.assembly, one.answer, self.options, partial(self._peak, one), self.offloaded)
        return self._lowest()

    def _lowest(self) -> Plan:
        """The plan that needs least memory, of those met so far."""
        if self.lowest is None:
            return self.cheapest
        _, one, choice = self.lowest
        objective = one.assembly.problem.evaluate(choice)
        return self._read_off(one, replace(one.answer, choice=choice, objective=objective))

    def _tell(self, what: str, done: int, total: int, best: tuple[_Solved, Answer] | None = None) -> None:
        seconds = best[1].objective if best else None
        self.report(Progress(phase=what, done=done, total=total, best_seconds=seconds))

    def _tabulated(self, mesh: Mesh, done: int, total: int) -> _Solved:
        """A mesh's problem and an answer to it; `done` of `total` meshes came before."""
        best = min(((one, one.answer) for one in self.solved), key=lambda pair: pair[1].objective, default=None)
        self._tell(f"tabulate {mesh}", done, total, best)
        resharder = self.resharders.setdefault(mesh, Resharder(mesh))
        assembly = self._assembled(mesh, resharder, self.refetch)
        if self.beneath < math.inf:
            rows = tuple(live(assembly, at, self.beneath, self.offloaded) for at in self.seen)
            if is_hopeless(replace(assembly.problem, budgets=rows), self.beneath):
                raise HopelessError(f"no combination of strategies keeps the memory limit on {mesh}")
        self._tell(f"solve {mesh}", done, total, best)
        search = Search(assembly.problem, replace(self.options, gap=self._gap))
        answer = self._run(search, best[1].objective if best else math.inf, close=total == 1)
        one = _Solved(assembly=assembly, resharder=resharder, answer=answer, refetch=self.refetch, search=search)
        if self.beneath < math.inf and not self.seen:
            point = self._peak(one, answer.choice)
            self.seen.extend([point.at] if point.nbytes > self.beneath else [])
        return one

    def _answered(self, one: _Solved, at_most: float, *, close: bool) -> Answer:
        """The answer to a mesh's problem, its search gone on with; one of `at_most` or more need not be the best."""
        return self._run(
            one.search or Search(one.assembly.problem, replace(self.options, gap=self._gap)), at_most, close=close
        )

    def _run(self, search: Search, at_most: float, *, close: bool) -> Answer:
        """The answer of a search, whose seconds are counted."""
        before = search.clock.build_seconds, search.clock.solve_seconds
        answer = search.run(at_most, close=close)
        self.phases["build"] += answer.build_seconds - before[0]
        self.phases["solve"] += answer.solve_seconds - before[1]
        return answer

    @property
    def _gap(self) -> float:
        """The relative gap to which a mesh is solved."""
        return self.options.gap if self.beneath == math.inf else max(self.options.gap, LOOSE)

    def _assembled(self, mesh: Mesh, resharder: Resharder, refetch: bool) -> Assembly:
        began = time.perf_counter()
        assembly = assemble(self.graph, mesh, self.grouping, resharder, self.state_pairs, refetch=refetch)
        assembly = self.restrict(assembly) if self.restrict else assembly
        self.phases["tables"] += time.perf_counter() - began
        return assembly

    def _read_off(self, one: _Solved, answer: Answer) -> Plan:
        others = [
            other.answer
            for other in self.solved
            if other.refetch == self.refetch and other.assembly is not one.assembly
        ]
        answer = replace(answer, bound=min(answer.bound, *(other.bound for other in others), answer.objective))
        if answer.status == "optimal" and answer.objective - answer.bound > (1 + 1e-9) * self._gap * answer.objective:
            late = any(other.status == "time limit" for other in others)
            answer = replace(answer, status="time limit" if late else "near optimal")
        plan = read_off(
            self.name, one.assembly, answer, one.resharder, self.state_pairs, self.donated, self.phases, one.refetch
        )
        plan = stopped(plan) if self.interrupted else plan
        if not self.offloaded:
            return plan
        held = held_nbytes(self.graph, plan.layout, self.offloaded, plan.mesh)
        rate = plan.cluster.group().device.host_bytes_per_second
        # What rests with the host is state that the apply phase alone reads: its bytes are of no other cause.
        state = plan.nbytes["optimizer state"] - away(held)
        return replace(
            plan,
            offloaded=self.offloaded,
            seconds={**plan.seconds, "offload": 2 * sum(held) / rate},
            nbytes={**plan.nbytes, "optimizer state": state},
            memory=plan.memory and plan.memory.less(away(held)),
        )

    def _peak(self, one: _Solved, choice: Sequence[int]) -> Point:
        """Where the plan of an answer needs most memory."""
        graph, grouping, mesh = self.graph, self.grouping, one.assembly.mesh
        layout = one.assembly.layout(choice)
        schedule = moves(graph, layout, one.resharder, refetch=one.refetch)
        donated = self.donated or (False,) * len(graph.inputs)
        found = peak(graph, grouping, mesh, layout, schedule, self.state_pairs, donated)
        elsewhere = away(held_nbytes(graph, layout, self.offloaded, mesh))
        needed = found.peak_nbytes - elsewhere
        if self.lowest is None or needed < self.lowest[0]:
            self.lowest = needed, one, tuple(choice)
        return Point(at=busiest(graph, grouping, mesh, layout, schedule), nbytes=needed)


def _better(answer: Answer, known: Answer) -> Answer:
    """The cheaper of two answers to one problem, with the better bound."""
    best = min(answer, known, key=lambda one: one.objective)
    return replace(best, bound=min(max(answer.bound, known.bound), best.objective))


def count(graph: Graph) -> int:
    """The operators of a program, those in loops and branches included."""
    return sum(1 + sum(map(count, node.subgraphs)) for node in graph.nodes)


def stopped(plan: Plan) -> Plan:
    """A plan marked as the best of a search that was interrupted."""
    return ended(plan, INTERRUPTED)


def ended(plan: Plan, status: str) -> Plan:
    """A plan with what ended its search, in words."""
    return replace(plan, solution=replace(plan.solution, status=status))
