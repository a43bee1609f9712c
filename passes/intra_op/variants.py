"""The search over variants of a step: in more microbatches, with less kept for the backward pass.

Each variant is a program of its own, planned by the search over meshes; the cheapest that fits is taken. They are tried
from those that cost least to those that need least memory; one whose bound is above the best plan found is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from passes.errors import OverBudgetError, PlanningError
from passes.intra_op.by_hand import SURELY
from passes.intra_op.mesh_search import MeshSearch
from passes.intra_op.offloading import idle_state
from passes.plan import INTERRUPTED, LATE, Alternative, Plan
from passes.progress import SearchContext
from passes.step import Step, Variant
from passes.text import quantities
from passes.transforms import KEPT, Kept, kept_of

_COUNTS = (1, 2, 4, 8, 16, 32)
"""The numbers of microbatches that are tried where none is asked for."""

_MORE_COUNTS = (64, 128)
"""Others that are tried where none of those fits as it is: what a microbatch needs halves, what stays does not."""

_GOOD_ENOUGH = 1.02
"""A plan this close, as a factor of its seconds, to the step without a limit is good enough: variants of less memory
take longer, as they compute more (`python -m benchmarks.memory_limit` shows what a limit costs).
"""

_LOW_MEMORY = 4
"""The number of variants of least memory that are kept, to be planned for less of it where none fits."""

MOST_OPERATORS = 50_000
"""Once a variant fits, others are planned while all of them on all meshes have fewer operators than this.

That is all variants of a small step and a few of a GPT of 24 layers: about a minute of either.
"""


def tries(layers: int, count: int, offloads: bool) -> Iterator[Variant]:
    """The variants in so many microbatches, from the one that costs least to the one that needs least memory."""
    kinds: Sequence[Kept] = KEPT if layers else KEPT[:1]
    for kind in kinds:
        for offload in (False, True) if offloads else (False,):
            yield Variant(microbatches=count, kept=() if kind == "everything" else (kind,) * layers, offload=offload)


@dataclass(slots=True, kw_only=True)
class VariantSearch:
    """The cheapest plan of any variant of a step, of those that need at most `limit` bytes.

    `search` plans one, its state offloaded or not, on every mesh on which plans beneath so many bytes may be. Of each
    number of microbatches the variant of least memory comes first while none has fitted: if it does not fit, no other
    will. Those whose cheapest plan does not fit wait until one does as it is, or none is left: a limit costs solves.
    Once one fits, others are tried while all that were planned, on all meshes, have fewer than `most` operators, and
    until the deadline of the `context`.
    """

    step: Step
    limit: float
    search: Callable[[Step, bool, float, SearchContext], MeshSearch]
    most: int = MOST_OPERATORS
    context: SearchContext = field(default_factory=SearchContext)
    best: Plan | None = None
    least_memory_plan: Plan | None = None
    low_memory: list[tuple[Variant, MeshSearch]] = field(default_factory=list[tuple[Variant, MeshSearch]])
    expected_nbytes: dict[Variant, float] = field(default_factory=dict[Variant, float])
    tried: int = 0
    operators: int = 0
    least_seconds: float = 0.0
    offloads: bool = True
    last: tuple[Variant, MeshSearch] | None = None
    is_bracketing: bool = False
    waiting: list[tuple[Variant, MeshSearch]] = field(default_factory=list[tuple[Variant, MeshSearch]])
    refused: list[tuple[Variant, MeshSearch]] = field(default_factory=list[tuple[Variant, MeshSearch]])
    met: list[Alternative] = field(default_factory=list[Alternative])

    def run(self) -> Plan:
        """The cheapest plan that fits. Raises OverBudgetError with the plan of least memory that was met."""
        with self.context.ending_early():
            plan = self._run()
            return plan.ended(LATE) if self.context.deadline.was_met else plan
        return self.context.kept(self.best).ended(INTERRUPTED)

    def _run(self) -> Plan:
        refused: PlanningError | None = None
        for variant in self._tries():
            try:
                step = self.step.variant(variant)
            except PlanningError as error:
                refused = refused or error
                continue
            search = self.searched(step, variant)
            if not self.tried:
                if (plan := search.cheapest).peak_nbytes <= self.limit:
                    return plan.of_variant(variant)
                has_way = plan.cluster.group().device.host_bytes_per_second > 0
                self.offloads = has_way and bool(idle_state(step.graph, step.state_pairs))
                why = f"over the memory limit of {quantities.nbytes(self.limit)}"
                self.met.append(_met(plan, variant, why))
            self.least_seconds = self.least_seconds or search.least_seconds
            if self.is_bracketing and not search.fits(self.limit) and not self.context.is_interrupted:
                self.tried += 1
                self._expect(search, variant)
                self.waiting.append((variant, search))
            else:
                self.take(search, variant)
        if not self.tried and refused is not None:
            raise refused
        for variant, search in [] if self.best else self.refused:
            plan = search.left_out(self.limit)
            if plan and (self.best is None or plan.step_seconds < self.best.step_seconds):
                self.best = plan.of_variant(variant)
        if self.best is None:
            self.least_memory_plan = _least(self.low_memory)
            if self.least_memory_plan is None or self.least_memory_plan.peak_nbytes > self.limit:
                raise OverBudgetError(
                    "no variant of the step keeps the memory limit", least_memory_plan=self.least_memory_plan
                )
            self.best = self.least_memory_plan
        return _beside(_mixed(self, self.best), self.met)

    def goes_on(self) -> bool:
        """Whether another variant is tried, now that one fits."""
        return self.operators < self.most and not self.context.deadline.is_over()

    def _tries(self) -> Iterator[Variant]:
        """The variants in the order in which they are tried, as far as is allowed if one fits."""
        first = Variant(microbatches=self.step.chosen.count)
        yield first
        possible = self.step.counts
        counts = possible if len(possible) == 1 else [n for n in _COUNTS if n in possible] or [1]
        more = [n for n in _MORE_COUNTS if n in possible and len(possible) > 1]
        forms = {count: tuple(tries(self.step.layers, count, self.offloads)) for count in (*counts, *more)}
        begun: list[int] = []
        if self.best is None:
            unlikely: list[int] = []
            self.is_bracketing = True
            for count in (count for count in forms if forms[count][-1] != first):
                if self.best is not None:
                    break
                likely = self._may_fit(forms[count][-1])
                (begun if likely else unlikely).append(count)
                if likely:
                    yield forms[count][-1]
            self.is_bracketing = False
            begun = self._waited(begun)
            for count in reversed(unlikely):
                if self.best is None:
                    yield forms[count][-1]
                    begun = [count]
        if self.best is None:
            return
        fewest = min(begun, default=0)
        for count in (n for n in forms if n >= fewest and (n in counts or n in begun)):
            untried = forms[count][-2::-1] if count in begun else forms[count]
            for variant in (variant for variant in untried if variant != first):
                is_near = self.best.step_seconds <= _GOOD_ENOUGH * self.least_seconds
                if is_near or not self.goes_on():
                    return
                yield variant

    def _waited(self, begun: Sequence[int]) -> list[int]:
        """The numbers of microbatches, of those `begun`, in which the variant of least memory fits.

        What waited until one fitted is looked at again, from the most microbatches on. With a plan at hand, what is not
        expected to fit is left, and budgets are for gains that are worth it, as long as others are tried at all.
        """
        fitting = [n for n in begun if n not in [variant.count for variant, _ in self.waiting]]
        for variant, search in sorted(
            self.waiting, key=lambda candidate: (not self._may_fit(candidate[0]), -candidate[0].count)
        ):
            best = self.best
            if best is not None and not self._may_fit(variant):
                break
            search.context = replace(search.context, cutoff=best.step_seconds if best else math.inf)
            self.take(search, variant)
            if self.best is not best:
                fitting.append(variant.count)
        self.waiting.clear()
        return sorted(fitting)

    def searched(self, step: Step, variant: Variant) -> MeshSearch:
        """A variant planned without a limit."""
        cutoff = self.best.step_seconds if self.best else float("inf")
        context = self.context.part(str(variant), best=self._best_seconds, cutoff=cutoff)
        if self.last is not None and self.last[0] == replace(variant, offload=not variant.offload):
            search = self.last[1].again(context, offload=variant.offload)
        else:
            search = self.search(step, variant.offload, self.limit if self.tried else float("inf"), context)
            self.last = variant, search
        self.operators += search.operators
        return search

    def _best_seconds(self, unlimited: float | None) -> float | None:
        """Seconds of the best plan so far; `unlimited` is that of a variant that may not fit."""
        if self.best:
            return self.best.step_seconds
        return None if self.tried else unlimited

    def take(self, search: MeshSearch, variant: Variant) -> bool:
        """Whether the plan of a variant fits and takes less time than the best so far, which it becomes then.

        Raises the interruption if that ended the variant's own search.
        """
        plan, best = self._fitting(search, variant), self.best
        if plan is not None:
            self.met.append(_met(plan, variant, "keeps the memory limit, and takes longer"))
        if plan is not None and (best is None or plan.step_seconds < best.step_seconds):
            self.best = plan.of_variant(variant)
        self.context.raise_if_interrupted()
        return self.best is not best

    def _fitting(self, search: MeshSearch, variant: Variant) -> Plan | None:
        """The cheapest plan of a variant that fits, None if it has none or takes more time than the best so far."""
        self.tried += 1
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
        self.expected_nbytes[replace(variant, microbatches=1)] = search.expected_nbytes * variant.count

    def _may_fit(self, variant: Variant) -> bool:
        """Whether a variant may keep the limit: in twice as many microbatches at least half as much is needed."""
        least = self.expected_nbytes.get(replace(variant, microbatches=1), 0.0) / variant.count
        return least <= SURELY * self.limit


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


def _least(variants: Sequence[tuple[Variant, MeshSearch]]) -> Plan | None:
    """The plan of least memory of these variants, each planned for the least that it can do with."""
    plans = [search.least_memory().of_variant(variant) for variant, search in variants]
    return min(plans, key=lambda plan: plan.peak_nbytes, default=None)


def _met(plan: Plan, variant: Variant, why: str) -> Alternative:
    """The plan of a variant as one that may not be taken."""
    name = f"{str(variant) or 'as written'}, mesh {plan.mesh}"
    return Alternative(name=name, seconds=plan.step_seconds, why=why, peak_nbytes=plan.peak_nbytes)


def _beside(plan: Plan, met: Sequence[Alternative]) -> Plan:
    """The plan with those that were met, itself apart."""
    return plan.beside([alternative for alternative in met if alternative.seconds != plan.step_seconds])
