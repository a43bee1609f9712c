"""The search over variants of a step: in more microbatches, with less kept for the backward pass.

Each variant is a program of its own, planned by the search over meshes; the cheapest that fits is taken. They are tried
from those that cost least to those that need least memory; one whose bound is above the best plan found is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from passes.errors import OverBudgetError, PlanningError
from passes.intra_op.by_hand import SURELY
from passes.intra_op.forms import computes_more, forms
from passes.intra_op.mesh_search import MeshSearch
from passes.intra_op.offloading import idle_state
from passes.plan import INTERRUPTED, LATE, Alternative, Plan
from passes.progress import SearchContext
from passes.step import Step, Variant
from passes.text import quantities
from passes.transforms import kept_of

_COUNTS = (1, 2, 4, 8, 16, 32)
"""The numbers of microbatches that are tried where none is asked for."""

_MORE_COUNTS = (64, 128)
"""The numbers that are tried beyond, where none of those fits as it is: what a microbatch needs halves, what stays does
not."""

_GOOD_ENOUGH = 1.02
"""A plan this close, as a factor of its seconds, to the step without a limit is good enough: variants of less memory
take longer, as they compute more (`python -m benchmarks.memory_limit` shows what a limit costs).
"""

_CLOSED, _NEARLY, _AS_WRITTEN = 3, 1.05, 1.25
"""The number of plans that are brought nearer to the optimum, and the factor of the fastest one's seconds that they may
take before, or that of the step as it is written may: what relaxations find is up to a quarter above what is there. Two
residual blocks of 1024 took 1.04 times what a variant does that was 2 % behind, and six feed-forward blocks with four
of them computed again 1.04 times what they take as written, which was 7 % behind."""

_BY_OFFLOADING = 4.0
"""The multiple of its time without a limit that the step as it is written may take, with state offloaded, and be what
others are measured by; beyond that a bisection finds what fits. Nine residual layers within .95 of their memory: 2.6,
then 2.1."""

_LOW_MEMORY = 4
"""The number of variants of least memory that are kept, to be planned for less of it where none fits."""

MOST_OPERATORS = 50_000
"""Once a variant fits, others are planned while all of them on all meshes have fewer operators than this.

That is all variants of a small step and a few of a GPT of 24 layers: about a minute of either.
"""


@dataclass(slots=True, kw_only=True)
class VariantSearch:
    """The cheapest plan of any variant of a step, of those that need at most `limit` bytes.

    What is known without a search within that, the plan without a limit and those by hand, may need what is `allowed`.
    So may the plan of least memory where nothing else is found: a limit whose margin cannot be kept is kept without.

    `search` plans one, its state offloaded or not, on every mesh on which plans beneath so many bytes may be. Of each
    number of microbatches the variant that keeps least comes first while none has fitted: if it does not fit, others
    hardly will. Those whose cheapest plan does not fit wait until one does as it is, or none is left: a limit costs
    solves. State is offloaded from the step as it is written first, which takes no solves; a plan `by_offloading` that
    takes much longer than one without a limit waits until the end.

    Once one fits, others are tried while all that were `planned`, on all meshes, have fewer than `most` operators, and
    until the deadline of the `context`; not those that compute more than a `dear` one, which takes longer than the best
    on every mesh, whatever memory it needs.
    """

    step: Step
    limit: float
    allowed: float = -math.inf
    search: Callable[[Step, bool, float, SearchContext], MeshSearch]
    most: int = MOST_OPERATORS
    context: SearchContext = field(default_factory=SearchContext)
    best: Plan | None = None
    by_offloading: Plan | None = None
    least_memory_plan: Plan | None = None
    low_memory: list[tuple[Variant, MeshSearch]] = field(default_factory=list[tuple[Variant, MeshSearch]])
    expected_nbytes: dict[Variant, dict[int, float]] = field(default_factory=dict[Variant, "dict[int, float]"])
    operators: int = 0
    free: dict[Variant, MeshSearch] = field(default_factory=dict[Variant, MeshSearch])
    planned: set[Variant] = field(default_factory=set[Variant])
    dear: list[Variant] = field(default_factory=list[Variant])
    least_seconds: float = 0.0
    offloads: bool = True
    last: tuple[Variant, MeshSearch] | None = None
    fitted: list[tuple[Variant, MeshSearch, float]] = field(default_factory=list[tuple[Variant, MeshSearch, float]])
    is_bracketing: bool = False
    waiting: list[tuple[Variant, MeshSearch]] = field(default_factory=list[tuple[Variant, MeshSearch]])
    refused: list[tuple[Variant, MeshSearch]] = field(default_factory=list[tuple[Variant, MeshSearch]])
    met: list[Alternative] = field(default_factory=list[Alternative])

    def run(self) -> Plan:
        """The cheapest plan that fits. Raises OverBudgetError with the plan of least memory that was met."""
        with self.context.ending_early():
            plan = self._run()
            return plan.ended(LATE) if self.context.deadline.was_met else plan
        return self.context.kept(self._fastest).ended(INTERRUPTED)

    def _run(self) -> Plan:
        plan = self._without_limit()
        return plan if plan is not None else self._within_limit()

    def _without_limit(self) -> Plan | None:
        """The cheapest plan where no memory is counted; None if it does not fit.

        A loop writes what its iterations keep into stacks, which may take longer than to compute it once more: where
        layers are loops, those that keep less are planned, too.
        """
        count = self.step.chosen.count
        for variant in forms(self.step.layers if self.step.has_stacks else 0, count):
            search = self.free[variant] = self.searched(self.step.variant(variant), variant)
            plan = search.cheapest
            if plan.peak_nbytes <= max(self.limit, self.allowed):
                self.met.append(_met(plan, variant, "takes longer"))
                if self.best is None or plan.step_seconds < self.best.step_seconds:
                    self.best = plan.of_variant(variant)
            else:
                self.met.append(_met(plan, variant, f"over the memory limit of {quantities.nbytes(self.limit)}"))
            self.context.raise_if_interrupted()
        self.least_seconds = min(search.least_seconds for search in self.free.values())
        best, self.best = self.best, None
        if best is None or best.step_seconds > min(alternative.seconds for alternative in self.met):
            return None
        others = [alternative for alternative in self.met if alternative.seconds != best.step_seconds]
        return _with_proven(best, self.least_seconds).beside(others) if others else best

    def _within_limit(self) -> Plan:
        refused: PlanningError | None = None
        for variant in _ordered(self):
            try:
                step = self.step.variant(variant)
            except PlanningError as error:
                refused = refused or error
                continue
            search = self.searched(step, variant)
            if not self.planned:
                has_way = search.cheapest.cluster.group().device.host_bytes_per_second > 0
                self.offloads = has_way and bool(idle_state(step.graph, step.state_pairs))
            self.planned.add(variant)
            if self.best and not search.infeasible and search.least_seconds >= self.best.step_seconds:
                self.dear.append(variant)
            if self.is_bracketing and not search.fits(self.limit) and not self.context.is_interrupted:
                self._expect(search, variant)
                self.waiting.append((variant, search))
            else:
                self.take(search, variant)
        if not self.planned and refused is not None:
            raise refused
        for variant, search in [] if self.best else self.refused:
            plan = search.left_out(self.limit)
            if plan and (self.best is None or plan.step_seconds < self.best.step_seconds):
                self.best = plan.of_variant(variant)
        self.best = self._fastest
        if self.best is None:
            self.least_memory_plan = _least(self.low_memory)
            most = max(self.limit, self.allowed)
            if self.least_memory_plan is None or self.least_memory_plan.peak_nbytes > most:
                raise OverBudgetError(
                    "no variant of the step keeps the memory limit", least_memory_plan=self.least_memory_plan
                )
            self.best = self.least_memory_plan
        self.best = _mixed(self, self.best)
        others = [alternative for alternative in self.met if alternative.seconds != self.best.step_seconds]
        has_forms = self.offloads or self.step.layers > 0 or len(self.step.counts) > 1
        enough = self.least_seconds if has_forms else math.inf
        self._close(enough)
        return _with_proven(self.best, enough).beside(others)

    def _close(self, enough: float) -> None:
        """Brings the plan nearer to the optimum, and those that are nearly as fast as long as there is time.

        That they take no less than `enough` seconds is all that is proven of them: another form may take so few.
        """
        nearest = [each for each in self.fitted[:_CLOSED] if each[2] <= _NEARLY * self.fitted[0][2]]
        as_written = [e for e in self.fitted if not e[0].kept and e[0].count == self.step.chosen.count][:1]
        nearest += [each for each in as_written if each not in nearest and each[2] <= _AS_WRITTEN * self.fitted[0][2]]
        for number, (variant, search, _) in enumerate(nearest):
            if number and self.context.deadline.is_over():
                break
            cutoff = self.best.step_seconds if number and self.best else math.inf
            plan = search.closer(self.limit, cutoff, enough)
            if plan and (not number or self.best is None or plan.step_seconds < self.best.step_seconds):
                self.best = plan.of_variant(variant)

    @property
    def _fastest(self) -> Plan | None:
        """The fastest plan that fits so far, if any does, one that was put off as well."""
        known = [plan for plan in (self.best, self.by_offloading) if plan]
        return min(known, key=lambda plan: plan.step_seconds, default=None)

    def put_off(self) -> None:
        """Keeps the plan for the end if it takes much longer than without a limit; not where a deadline is set."""
        is_slow = self.best is not None and self.best.step_seconds > _BY_OFFLOADING * self.least_seconds
        if is_slow and self.context.deadline.seconds is None:
            self.by_offloading, self.best = self.best, None

    def is_comparable(self, variant: Variant, other: Variant) -> bool:
        """Whether of two variants the one that computes more takes longer: of loops only where both stack the same."""
        return not self.step.has_stacks or variant.kept == other.kept

    def goes_on(self) -> bool:
        """Whether another variant is tried, now that one fits."""
        return self.operators < self.most and not self.context.deadline.is_over()

    @property
    def wants_better(self) -> bool:
        """Whether no plan fits yet, or one that may be bettered in the work that is left."""
        return self.best is None or (self.best.step_seconds > _GOOD_ENOUGH * self.least_seconds and self.goes_on())

    def searched(self, step: Step, variant: Variant) -> MeshSearch:
        """A variant planned on every mesh where plans may keep the limit, or on all of them if it was planned without."""
        if variant in self.free:
            self.last = variant, self.free[variant]
            return self.free[variant]
        cutoff = self.best.step_seconds if self.best else float("inf")
        context = self.context.part(str(variant), best=self._best_seconds, cutoff=cutoff)
        other = replace(variant, offload=not variant.offload)
        # What does not fit on a mesh may do so with state offloaded.
        if self.last is not None and self.last[0] == other and not self.last[1].infeasible:
            search = self.last[1].again(context, offload=variant.offload)
        else:
            search = self.search(step, variant.offload, self.limit if self.least_seconds else float("inf"), context)
            self.last = variant, search
        self.operators += search.operators
        return search

    def _best_seconds(self, unlimited: float | None) -> float | None:
        """Seconds of the best plan so far; `unlimited` is that of a variant that may not fit."""
        if self.best:
            return self.best.step_seconds
        return None if self.least_seconds else unlimited

    def take(self, search: MeshSearch, variant: Variant) -> bool:
        """Whether the plan of a variant fits and takes less time than the best so far, which it becomes then.

        Raises the interruption if that ended the variant's own search.
        """
        plan, best = self._fitting(search, variant), self.best
        if plan is not None:
            self.met.append(_met(plan, variant, "keeps the memory limit, and takes longer"))
            self.fitted = sorted([*self.fitted, (variant, search, plan.step_seconds)], key=lambda fitted: fitted[2])
        if plan is not None and (best is None or plan.step_seconds < best.step_seconds):
            self.best = plan.of_variant(variant)
        self.context.raise_if_interrupted()
        return self.best is not best

    def _fitting(self, search: MeshSearch, variant: Variant) -> Plan | None:
        """The cheapest plan of a variant that fits, None if it has none or takes more time than the best so far."""
        if self.context.is_interrupted:
            plan = search.cheapest
            return plan if plan.peak_nbytes <= self.limit else None
        try:
            return search.cheapest_within(self.limit, worth=self._worth)
        except OverBudgetError:
            self.low_memory = sorted(
                [*self.low_memory, (variant, search)], key=lambda candidate: candidate[1].problems.lowest_nbytes
            )[:_LOW_MEMORY]
            if search.by_hand.left_out:
                self.refused.append((variant, search))
            self._expect(search, variant)
            return None

    @property
    def _worth(self) -> float:
        """The factor that a mesh must be able to gain for budgets to be stated there, while some variants wait."""
        if not self.waiting or (self.best is None and self.goes_on()):
            return 1.0
        return _GOOD_ENOUGH if self.best is None or self.goes_on() else math.inf

    def _expect(self, search: MeshSearch, variant: Variant) -> None:
        """Notes what a variant is expected to need at least, for those in other numbers of microbatches."""
        self.expected_nbytes.setdefault(replace(variant, microbatches=1), {})[variant.count] = search.expected_nbytes

    def may_fit(self, variant: Variant) -> bool:
        """Whether a variant may keep the limit: in fewer microbatches at least as much is needed, in twice as many half
        as much.
        """
        known = self.expected_nbytes.get(replace(variant, microbatches=1), {})
        least = max((nbytes * min(1.0, count / variant.count) for count, nbytes in known.items()), default=0.0)
        return least <= SURELY * self.limit


def _ordered(search: VariantSearch) -> Iterator[Variant]:
    """The variants in the order in which they are tried, as far as is allowed if one fits."""
    step = search.step
    yield (first := Variant(microbatches=step.chosen.count))
    if search.offloads and search.wants_better:
        yield replace(first, offload=True)
        search.put_off()
    counts = [count for count in _COUNTS if count in step.counts] if len(step.counts) > 1 else list(step.counts)
    more = [count for count in _MORE_COUNTS if count in step.counts and len(step.counts) > 1]
    of_count = {count: forms(step.layers, count) for count in (*(counts or [1]), *more)}
    fitting, offloads = list[int](), (False, True) if search.offloads else (False,)
    for offload in offloads:
        if search.best is None:
            least = [replace(kinds[-1], offload=offload) for kinds in of_count.values()]
            fitting = yield from _bracketed(search, [v for v in least if v != first], is_last=offload == offloads[-1])
        if search.best is None:
            fitting = yield from _keeping_more(search, of_count, offload)
    fewest = min(fitting, default=0)
    fewer = max((n for n in of_count if n < fewest), default=fewest)  # that nothing was found there is no proof
    needs_offload = bool(fitting) and search.best is not None and bool(search.best.offloaded)
    for count in sorted((n for n in of_count if n not in more or n in fitting), key=lambda n: (n < fewest, n)):
        kinds = of_count[count][::-1] if count in fitting else of_count[count]
        for variant in (replace(kind, offload=offload) for kind in kinds for offload in offloads):
            if not variant.offload and (needs_offload or count < fewer):
                continue
            if search.best is None or not search.wants_better:
                return
            is_dear = any(computes_more(variant, dear) for dear in search.dear if search.is_comparable(variant, dear))
            if variant not in search.planned and not is_dear and (count >= fewest or search.may_fit(variant)):
                yield variant


def _bracketed(
    search: VariantSearch, least: Sequence[Variant], *, is_last: bool
) -> Generator[Variant, None, list[int]]:
    """The variants of `least` memory in each number of microbatches, until one fits; returns the numbers that do.

    Those that are not expected to fit are tried if no other does and this is the last look.
    """
    begun, unlikely = list[int](), list[Variant]()
    search.is_bracketing = True
    for variant in least:
        if search.best is not None:
            break
        if search.may_fit(variant):
            begun.append(variant.count)
            yield variant
        else:
            unlikely.append(variant)
    search.is_bracketing = False
    fitting = _waited(search, begun)
    for variant in reversed(unlikely) if is_last else ():
        if search.best is None:
            yield variant
            fitting = [variant.count]
    return fitting if search.best else []


def _keeping_more(
    search: VariantSearch, of_count: Mapping[int, Sequence[Variant]], offload: bool
) -> Generator[Variant, None, list[int]]:
    """The variants that keep more, until one fits; returns the numbers of microbatches that do.

    Where weights are larger than activations, computing a layer again may take more room than what it saves. They are
    tried in the fewest microbatches, and in those of the least memory met so far.
    """
    counts = {min(of_count), *(variant.count for variant, _ in search.low_memory[:1])}
    for variant in (replace(kind, offload=offload) for count in sorted(counts) for kind in of_count[count][:-1]):
        if variant not in search.planned and search.best is None:
            yield variant
    return [search.best.microbatches] if search.best else []


def _waited(search: VariantSearch, begun: Sequence[int]) -> list[int]:
    """The numbers of microbatches, of those `begun`, in which the variant of least memory fits, as far as is known.

    The fewest of those that waited are found by bisection: more need less memory and take longer. With a plan at hand,
    what is not expected to fit is left, and budgets are for gains that are worth it, as long as others are tried at
    all.
    """
    waiting = sorted(search.waiting, key=lambda candidate: candidate[0].count)
    fitting = [n for n in begun if n not in [variant.count for variant, _ in waiting]]
    likely = [candidate for candidate in waiting if search.may_fit(candidate[0])]
    unlikely = [candidate for candidate in waiting if not search.may_fit(candidate[0])]

    def fits(variant: Variant, waited: MeshSearch) -> bool:
        """Whether one that waited fits and is the best so far."""
        waited.context = replace(waited.context, cutoff=search.best.step_seconds if search.best else math.inf)
        if is_best := search.take(waited, variant):
            fitting.append(variant.count)
        return is_best

    too_few, enough = -1, len(likely)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fits(*likely[middle]):
            enough = middle
        else:
            too_few = middle
    while search.best is None and unlikely:
        fits(*unlikely.pop())
    search.waiting.clear()
    return fitting


def _mixed(search: VariantSearch, best: Plan) -> Plan:
    """The plan with as many of its last layers as can be keeping everything, by bisection."""
    if not best.remat:
        return best
    fewest, most = 0, len(best.remat)
    while most - fewest > 1 and search.goes_on():
        middle = (fewest + most) // 2
        kept = kept_of((*best.remat[: len(best.remat) - middle], *("everything",) * middle))
        variant = Variant(microbatches=best.microbatches, kept=kept, offload=bool(best.offloaded))
        if search.take(search.searched(search.step.variant(variant), variant), variant):
            fewest = middle
        else:
            most = middle
    return search.best or best


def _with_proven(plan: Plan, least: float) -> Plan:
    """The plan with no more proven than what holds in all variants: none takes less than `least`, without a limit."""
    solution = plan.solution
    status = "near optimal" if solution.status == "optimal" and least < solution.bound else solution.status
    return replace(plan, solution=replace(solution, bound=min(least, solution.bound), status=status))


def _least(variants: Sequence[tuple[Variant, MeshSearch]]) -> Plan | None:
    """The plan of least memory of these variants, each planned for the least that it can do with."""
    plans = [search.least_memory().of_variant(variant) for variant, search in variants]
    return min(plans, key=lambda plan: plan.peak_nbytes, default=None)


def _met(plan: Plan, variant: Variant, why: str) -> Alternative:
    """The plan of a variant as one that may not be taken."""
    name = f"{str(variant) or 'as written'}, mesh {plan.mesh}"
    return Alternative(name=name, seconds=plan.step_seconds, why=why, peak_nbytes=plan.peak_nbytes)
