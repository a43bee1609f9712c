"""The search for the cheapest placements of a program over meshes: build each problem, solve it, extract the plan.

With a memory limit, answers that exceed it are forbidden one by one (`passes.intra_op.memory_limit`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import InitVar, dataclass, field, replace

from passes.cluster import Mesh
from passes.errors import NoLegalPlanError, OverBudgetError
from passes.intra_op.hand_made import HandMadeAnswers, HandMadePlans
from passes.intra_op.memory_limit import (
    LOOSE,
    Fitted,
    InfeasibleRowError,
    fit,
    is_out_of_reach,
    look_for_least,
)
from passes.intra_op.mesh_memory import MeshMemory
from passes.intra_op.mesh_problems import MeshProblems, Solved
from passes.intra_op.meshes import allowed
from passes.intra_op.proving import Goal, better, proven, run
from passes.ir import Graph
from passes.limits import Limits
from passes.plan import INTERRUPTED, LATE, Alternative, Plan
from passes.progress import Progress, SearchContext
from passes.solver import Answer, NotCheaperError, Search, SolverOptions
from passes.text import quantities

_ROUGH = 0.1
"""The relative gap to which a mesh is solved where only plans within a limit are wanted: the answer is a start, and its
bound rules out slower meshes. At 0.02 nine residual layers within .95 of their memory took 173 s of processor time in
place of 162, one run each.
"""

_WORTH_A_LOOK = 1e-3
"""The relative gap from which hand-made plans are looked at, each of which takes a solve of its own: the cheapest plan
may be above a hand-made one by no more. What half and double of it find was not measured (`python -m
benchmarks.settings --only intra_op.mesh_search`).
"""


def cheapest_plan(
    planner: str,
    problems: MeshProblems,
    meshes: Sequence[Mesh],
    options: SolverOptions,
    *,
    regather: bool = False,
    most_nbytes: float = math.inf,
) -> Plan:
    """The cheapest plan of a step over the meshes that needs at most `most_nbytes` on a device, as one of this planner.

    With `regather`, weights are gathered at every use. Raises OverBudgetError where no plan is found.
    """
    search = MeshSearch(planner=planner, problems=problems, options=options, regather=regather, most_nbytes=most_nbytes)
    search.over(meshes)
    if math.isinf(most_nbytes):
        return search.cheapest
    limits = Limits.equal(most_nbytes)
    search.cheapest_within(limits)
    return search.closer(limits) or search.lowest()


@dataclass(slots=True, kw_only=True)
class MeshSearch:
    """The search over meshes for a program: the sharding problems that were `solved`, cheapest first.

    Where plans of at most `most_nbytes` are wanted, meshes seen to have none are `infeasible`, and others are solved
    roughly until the best plan, `within`, is brought nearer to the optimum. `regather` says whether weights are
    gathered at every use; None leaves the choice to the search. No plan is worse than `hand_made_plans`.
    """

    planner: str
    problems: MeshProblems
    options: SolverOptions
    hand_made_plans: InitVar[HandMadePlans] = lambda mesh: ()
    regather: bool | None = None
    most_nbytes: float = math.inf
    context: SearchContext = field(default_factory=SearchContext)
    solved: list[Solved] = field(default_factory=list[Solved])
    infeasible: list[Solved] = field(default_factory=list[Solved])
    within: Fitted | None = None
    hand_made: HandMadeAnswers = field(init=False)

    def __post_init__(self, hand_made_plans: HandMadePlans) -> None:
        self.hand_made = HandMadeAnswers(plans=hand_made_plans, options=self.options)

    def over(self, meshes: Sequence[Mesh]) -> None:
        """Solves the program on each mesh, whatever memory that needs, but for meshes without a plan of
        `most_nbytes`.
        """
        illegal: list[NoLegalPlanError] = []
        tried = allowed(self.problems.step.graph, meshes)
        with self.context.ending_early():
            for number, mesh in enumerate(tried):
                try:
                    self.solved.append(self._tabulated(mesh, number, len(tried)))
                except NoLegalPlanError as error:
                    illegal.append(error)
                except InfeasibleRowError:
                    continue
        if not self.solved:
            self.context.raise_if_interrupted()
            raise illegal[-1]
        self._close(self.solved)
        self.solved.sort(key=lambda solved: solved.answer.objective)

    def _close(self, all_solved: list[Solved]) -> None:
        """Improves the answers of relaxations to the gap of the options, on meshes that may have the cheapest plan."""
        for place in sorted(range(len(all_solved)), key=lambda place: all_solved[place].answer.bound):
            solved, least = all_solved[place], min(other.answer.objective for other in all_solved)
            if solved.answer.status == "optimal" or solved.answer.bound >= least or self.context.is_interrupted:
                continue
            with self.context.ending_early():
                self.report(f"solve {solved.assembly.mesh}", place, len(all_solved), solved.answer)
                answer = run(self.problems, solved, self._rough, least, close=True)
                all_solved[place] = replace(solved, answer=better(answer, solved.answer))
        for place, solved in enumerate(list(all_solved)):
            least = min(other.answer.objective for other in all_solved)
            if solved.answer.bound < (1 - max(_WORTH_A_LOOK, self._rough.gap)) * least:
                for base, answer in self.hand_made.answers(self.problems, solved):
                    if base.key == solved.key:
                        all_solved[place] = solved = replace(solved, answer=better(answer, solved.answer))

    @property
    def cheapest(self) -> Plan:
        """The cheapest plan, whatever memory it needs."""
        return self._extract_plan(self.solved[0], self.solved[0].answer)

    @property
    def least_seconds(self) -> float:
        """Seconds of a step below which no plan over these meshes can go."""
        return min(solved.answer.bound for solved in self.solved)

    @property
    def operators(self) -> int:
        """The number of operators, summed over all meshes that were solved: a measure of work."""
        return (len(self.solved) + len(self.problems.twins)) * count(self.problems.step.graph)

    @property
    def expected_nbytes(self) -> float:
        """The least bytes that plans over these meshes are expected to need, by live bytes and the peaks seen."""
        return min(map(self.problems.expected_nbytes, (*self.solved, *self.infeasible)))

    def again(self, context: SearchContext, *, offload: bool) -> MeshSearch:
        """The same search with its solved problems, for plans that offload state or do not. No mesh was infeasible."""
        other = copy(self)
        other.context, other.problems, other.within = context, self.problems.offloading(offload=offload), None
        other.solved = list(map(other.problems.as_offloading, self.solved))
        other.hand_made = replace(self.hand_made, left_out=False)  # its answers offload nothing
        return other

    def cheapest_within(self, limits: Limits, worth: float = 1.0) -> Plan | None:
        """The cheapest plan that keeps the limits; None if it takes the cutoff or more.

        It is near the optimum; `closer` brings it nearer. Once there is a plan, meshes are tried until the deadline, if
        they may be faster by the factor `worth`; hand-made plans are tried anyway. Raises OverBudgetError where no plan
        is found.
        """
        context, limit = self.context, limits.searched
        self.problems.look(self.solved[0], limit)
        cheapest: Fitted | None = None
        if _is_open(self.solved[0].answer, self._rough.gap) or not self.fits(limit):
            cheapest = self.hand_made.fitting(self.problems, [*self.solved, *self.infeasible], limits, context.cutoff)
        exists_dearer = False
        with context.ending_early():
            for number, solved in enumerate(self.solved):
                if solved.answer.bound >= (cheapest.answer.objective if cheapest else context.cutoff) / worth:
                    exists_dearer = exists_dearer or cheapest is None
                    continue
                if cheapest is not None and context.deadline.is_over():
                    break
                try:
                    cheapest = self._fitted(solved, number, cheapest, limit) or cheapest
                except NotCheaperError:
                    exists_dearer = exists_dearer or cheapest is None
                except (NoLegalPlanError, InfeasibleRowError):
                    continue
        if cheapest is None:
            context.raise_if_interrupted()
            if exists_dearer:
                return None
            raise OverBudgetError("no placements keep the memory limit")
        self.within, solved = cheapest, cheapest.solved
        bound = min(solved.answer.bound, cheapest.answer.objective)
        return self._extract_plan(solved, replace(cheapest.answer, bound=bound, status="near optimal"))

    def closer(self, limits: Limits, cutoff: float = math.inf, enough: float = math.inf) -> Plan | None:
        """The plan of `cheapest_within` brought nearer to the optimum, with a proven bound; None if there was none."""
        if self.within is None:
            return None
        goal = Goal(limits=limits, cutoff=cutoff, enough=enough)
        return self._extract_plan(*proven(self.problems, self.solved, self.within, goal, self.options))

    def fits(self, limit: float) -> bool:
        """Whether the cheapest plan of all needs at most `limit` bytes on a device."""
        return self.problems.peak(self.solved[0], self.solved[0].answer.choice).nbytes <= limit

    def cheapest_left_out(self, limits: Limits) -> Plan | None:
        """The cheapest plan that fits of the hand-made ones that were not expected to; None if none does."""
        meshes = [*self.solved, *self.infeasible] if self.hand_made.left_out else []
        self.within = self.hand_made.fitting(self.problems, meshes, limits, self.context.cutoff, surely=math.inf)
        return self.closer(limits)

    def _fitted(self, solved: Solved, number: int, cheapest: Fitted | None, limit: float) -> Fitted | None:
        """The cheapest answer on mesh number `number` that fits and is better than the `cheapest`; None if there is
        none.
        """
        best = cheapest.answer if cheapest else None
        self.report(f"fit {solved.assembly.mesh} within memory", number, len(self.solved), best)
        most = best.objective if best else self.context.cutoff
        twins = _twins(self, _begun(self.problems, solved, self._rough, limit, most), number)
        return _fitted(self.problems, twins, limit, self.options, most)

    def least_memory(self) -> Plan:
        """The plan of least memory that is met while memory is minimised on every mesh."""
        for solved in (*self.solved, *self.problems.twins):  # a limit of 0 offloads all that may be
            look_for_least(MeshMemory(problems=self.problems, solved=solved, limit=0.0), self.options)
        return self.lowest()

    def lowest(self) -> Plan:
        """The plan of least memory met so far."""
        answer = self.problems.least_memory()
        return self._extract_plan(*answer) if answer else self.cheapest

    def report(self, phase: str, done: int, total: int, best: Answer | None = None) -> None:
        """Reports how far the search is."""
        self.context.report(Progress(phase=phase, done=done, total=total, best_seconds=best and best.objective))

    def _tabulated(self, mesh: Mesh, done: int, total: int) -> Solved:
        """The problem of a mesh and an answer to it; `done` of `total` meshes came before."""
        best = min((solved.answer for solved in self.solved), key=lambda answer: answer.objective, default=None)
        self.report(f"tabulate {mesh}", done, total, best)
        assembly = self.problems.assembled(mesh, regather=bool(self.regather))
        solved = Solved.unsolved(assembly)
        if self.most_nbytes < math.inf and self.problems.least_nbytes(solved) > self.most_nbytes:
            self.infeasible.append(solved)
            raise InfeasibleRowError(f"no combination of strategies keeps the memory limit on {mesh}")
        self.report(f"solve {mesh}", done, total, best)
        solved = replace(solved, search=Search(assembly.problem, self._rough))
        cutoff = min(self.context.cutoff, best.objective if best else math.inf)
        solved = replace(solved, answer=run(self.problems, solved, self._rough, cutoff, close=total == 1))
        if self.most_nbytes < math.inf:
            self.problems.look(solved, self.most_nbytes)
        return solved

    @property
    def _rough(self) -> SolverOptions:
        """The options with the relative gap to which a mesh is solved."""
        return replace(self.options, gap=max(self.options.gap, 0.0 if self.most_nbytes == math.inf else _ROUGH))

    def _extract_plan(self, solved: Solved, answer: Answer, least: float | None = None) -> Plan:
        """The plan of an answer, with a bound over all problems: others take at least `least` seconds.

        By default, that is what is known of them without a limit.
        """
        others = [other.answer for other in self.solved if other.assembly is not solved.assembly]
        answer = _beside(answer, others, least)
        answer = _ended(answer, [solved.answer, *others], self._rough.gap)
        plan = self.problems.plan(self.planner, solved, answer)
        plan = plan.beside([_met(other) for other in self.solved if other.assembly.mesh != solved.assembly.mesh])
        return plan.ended(INTERRUPTED) if self.context.is_interrupted else plan


def _begun(problems: MeshProblems, solved: Solved, options: SolverOptions, limit: float, cutoff: float) -> Solved:
    """The mesh with its search continued, which had stopped as another mesh was cheaper. Raises InfeasibleRowError
    where none can fit.
    """
    memory = MeshMemory(problems=problems, solved=solved, limit=limit)
    if is_out_of_reach(memory):
        raise InfeasibleRowError("no combination of strategies keeps the memory limit")
    if solved.answer.status == "optimal":
        return solved
    answer = run(problems, solved, options, cutoff, close=False)
    return replace(solved, answer=better(answer, solved.answer))


def _beside(answer: Answer, others: Sequence[Answer], least: float | None) -> Answer:
    """The answer with a bound that holds over all problems, of which the others take at least `least` seconds.

    Without `least`, their bounds without a limit count.
    """
    least = min((other.bound for other in others), default=math.inf) if least is None else least
    return replace(answer, bound=min(answer.bound, least, answer.objective))


def _ended(answer: Answer, searches: Sequence[Answer], gap: float) -> Answer:
    """The answer with what ended the search, where more than the gap is left: the time limit of any of these, or
    work.
    """
    if answer.is_within(gap):
        return answer
    late = any(search.status == LATE for search in (answer, *searches))
    return replace(answer, status=LATE if late else "near optimal")


def _fitted(
    problems: MeshProblems, twins: Iterator[Solved], limit: float, options: SolverOptions, cutoff: float
) -> Fitted | None:
    """The cheapest answer on one mesh that fits; None where none was found.

    Raises InfeasibleRowError if no answer can fit, and NotCheaperError if those that fit take `cutoff` seconds or more.
    """
    best: Fitted | None = None
    not_cheaper: NotCheaperError | None = None
    for solved in twins:
        memory = MeshMemory(problems=problems, solved=solved, limit=limit)
        try:
            fitted = fit(memory, options, cutoff)
        except InfeasibleRowError:
            raise
        except NotCheaperError as error:
            not_cheaper = error
            continue
        except OverBudgetError:
            continue
        if fitted.answer.objective < cutoff:
            best, cutoff = fitted, fitted.answer.objective
        if fitted.answer.objective <= (1 + LOOSE) * solved.answer.bound:
            break
    if best is None and not_cheaper is not None:
        raise not_cheaper
    return best


def _twins(search: MeshSearch, solved: Solved, number: int) -> Iterator[Solved]:
    """A mesh's problem, then its twin with weights gathered at every use, which takes no less time."""
    yield solved
    if search.regather is None and not solved.assembly.regather:
        search.report(f"tabulate {solved.assembly.mesh}", number, len(search.solved))
        if (twin := search.problems.twin(solved)) is not None:
            yield twin


def _met(solved: Solved) -> Alternative:
    """The best answer of another mesh, as an alternative to the plan, with its bound in words if that is lower."""
    bound = solved.answer.bound
    is_known = 0 < bound < solved.answer.objective
    why = f"none on this mesh takes less than {quantities.seconds(bound)}" if is_known else "the best on this mesh"
    return Alternative(name=f"mesh {solved.assembly.mesh}", seconds=solved.answer.objective, why=why)


def _is_open(cheapest: Answer, gap: float) -> bool:
    """Whether a hand-made plan may be better than the cheapest answer by more than the gap of its solve."""
    return cheapest.bound < (1 - max(_WORTH_A_LOOK, gap)) * cheapest.objective


def count(graph: Graph) -> int:
    """The number of operators of a program, those in loops and branches included."""
    return sum(1 + sum(map(count, node.subgraphs)) for node in graph.nodes)
