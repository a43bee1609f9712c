"""The trials of a step's variants: the best plan so far, what may fit the memory limit, and what is worth trying."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from passes.errors import OverBudgetError
from passes.intra_op.hand_made import SURELY
from passes.intra_op.incumbent import GOOD_ENOUGH, Incumbent
from passes.intra_op.mesh_search import MeshSearch
from passes.intra_op.offloading import idle_state
from passes.intra_op.unfit_trials import Trial, UnfitTrials
from passes.intra_op.variant_order import computes_more
from passes.limits import Limits
from passes.plan import Alternative, Plan
from passes.progress import SearchContext
from passes.step import Step, Variant
from passes.text import quantities

MOST_OPERATORS = 50_000
"""Once a variant fits, others are planned while all of them on all meshes have fewer operators than this.

That is all variants of a small step and a few of a GPT of 24 layers: about a minute of either.
"""


@dataclass(slots=True, kw_only=True)
class VariantTrials:
    """The variants of a step that were planned for a device of so many bytes, and what they have shown.

    Plans that take no search within the limit count as hand-made to the `limits`: those, the one without a limit, and
    the plan of least memory where nothing else is found.

    `search(step, offload, most_nbytes, context)` plans a step on every mesh that may have a plan of that many bytes.
    Once a variant fits, others are tried until all that were `planned` have `most` operators on all meshes, or until
    the deadline of the `context`.

    `fitted` are the trials that fit, fastest first, and `unfit` the others. Variants that are `too_slow` take longer
    than the best whatever memory they need. All of these are written by methods, and read by
    `passes.intra_op.variants`, which chooses what is tried.
    """

    step: Step
    limits: Limits
    search: Callable[[Step, bool, float, SearchContext], MeshSearch]
    most: int = MOST_OPERATORS
    context: SearchContext = field(default_factory=SearchContext)
    incumbent: Incumbent = field(default_factory=Incumbent, init=False)
    offloads: bool = field(default=True, init=False)
    operators: int = field(default=0, init=False)
    planned: set[Variant] = field(default_factory=set[Variant], init=False)
    too_slow: list[Variant] = field(default_factory=list[Variant], init=False)
    fitted: list[Trial] = field(default_factory=list[Trial], init=False)
    unfit: UnfitTrials = field(default_factory=UnfitTrials, init=False)
    alternatives: list[Alternative] = field(default_factory=list[Alternative], init=False)
    _free: dict[Variant, Trial] = field(default_factory=dict[Variant, Trial], init=False)
    _last: Trial | None = field(default=None, init=False)

    @property
    def best(self) -> Plan | None:
        """The fastest plan so far that fits, unless it is put off."""
        return self.incumbent.best

    def goes_on(self) -> bool:
        """Whether there is time to try another variant, now that one fits."""
        return self.operators < self.most and not self.context.deadline.is_over()

    @property
    def wants_better(self) -> bool:
        """Whether no plan fits yet, or the best may be improved on and there is time."""
        return self.best is None or (not self.incumbent.is_good_enough and self.goes_on())

    def is_too_slow(self, variant: Variant) -> bool:
        """Whether a variant computes more than one that takes longer than the best whatever memory it needs."""
        of_stacks = self.step.has_stacks
        return any(computes_more(variant, slow) for slow in self.too_slow if not of_stacks or slow.kept == variant.kept)

    def may_fit(self, variant: Variant) -> bool:
        """Whether a variant may keep the limit, by the bytes that others were expected to need."""
        return self.unfit.expected_nbytes(variant) <= SURELY * self.limits.searched

    def put_off(self) -> None:
        """Puts the best plan off to the end if it takes much longer than without a limit, unless a deadline is set."""
        if self.context.deadline.seconds is None:
            self.incumbent.put_off()

    def without_limit(self, variants: Sequence[Variant]) -> Plan | None:
        """The cheapest plan of these variants if it fits, so that the limit does not matter; None if it does not.

        The first of the variants is the step as it is written.
        """
        plans = list[Plan]()
        for variant in variants:
            if plans and self.context.deadline.is_over():
                break
            trial = self._planned(variant, self.step.variant(variant), math.inf)
            plans.append(plan := trial.search.cheapest.of_variant(variant))
            self._free[variant] = trial
            if fits := plan.peak_nbytes <= self.limits.hand_made:
                self.incumbent.offer(plan)
            over = f"over the memory limit of {quantities.nbytes(self.limits.searched)}"
            self._add_alternative(plan, variant, "takes longer" if fits else over)
            self.context.raise_if_interrupted()
        best = self.best
        self.incumbent = Incumbent(least_seconds=min(trial.search.least_seconds for trial in self._free.values()))
        if best is not None and best.step_seconds <= min(plan.step_seconds for plan in plans):
            return best.beside([other for other in self.alternatives if other.seconds != best.step_seconds])
        has_way = plans[0].cluster.group().device.host_bytes_per_second > 0
        self.offloads = has_way and bool(idle_state(self.step.graph, self.step.state_pairs))
        return None

    def planned_freely(self, variant: Variant, step: Step) -> Trial:
        """The trial of a variant, which is the `step`: the one without a limit if there is one, else a new one."""
        if trial := self._free.get(variant):
            self._last = trial
            return trial
        return self._planned(variant, step, self.limits.searched)

    def _planned(self, variant: Variant, step: Step, most_nbytes: float) -> Trial:
        """The trial of a variant on every mesh that may have a plan of at most `most_nbytes`."""
        cutoff = self.incumbent.seconds
        context = self.context.part(str(variant), best=self._best_seconds, cutoff=cutoff)
        other = replace(variant, offload=not variant.offload)
        # What does not fit on a mesh may do so with state offloaded.
        if self._last is not None and self._last.variant == other and not self._last.search.infeasible:
            trial = Trial(variant=variant, search=self._last.search.again(context, offload=variant.offload))
        else:
            trial = Trial(variant=variant, search=self.search(step, variant.offload, most_nbytes, context))
            self._last = trial
        self.operators += trial.search.operators
        return trial

    def _best_seconds(self, unlimited: float | None) -> float | None:
        """Seconds of the best plan so far, to be reported; `unlimited` are those of a variant that may not fit."""
        return self.best.step_seconds if self.best else None if self._free else unlimited

    def note(self, trial: Trial) -> None:
        """Notes that a variant was planned, and whether it takes longer than the best whatever memory it needs."""
        self.planned.add(trial.variant)
        if not trial.search.infeasible and trial.search.least_seconds >= self.incumbent.seconds:
            self.too_slow.append(trial.variant)

    def put_in_line(self, trial: Trial) -> bool:
        """Whether a variant is put off, since its cheapest plan does not fit; if so, it is waiting now."""
        if waits := not trial.search.fits(self.limits.searched) and not self.context.is_interrupted:
            self.unfit.put_off(trial)
        return waits

    def take(self, trial: Trial) -> bool:
        """Whether the plan of a variant fits and is faster than the best so far; if so, it is the best now.

        Raises the interruption if that ended the variant's own search.
        """
        plan, is_best = self._fitting(trial), False
        if plan is not None:
            self._add_alternative(plan, trial.variant, "keeps the memory limit, and takes longer")
            timed = replace(trial, seconds=plan.step_seconds)
            self.fitted = sorted([*self.fitted, timed], key=lambda fitted: fitted.seconds)
            is_best = self.incumbent.offer(plan.of_variant(trial.variant))
        self.context.raise_if_interrupted()
        return is_best

    def take_waiting(self, trial: Trial) -> bool:
        """Whether a variant that waited fits and is the best now, as `take` decides; it stays among the waiting."""
        cutoff = self.incumbent.seconds
        trial.search.context = replace(trial.search.context, cutoff=cutoff)
        return self.take(trial)

    def end_waiting(self) -> None:
        """Forgets all trials that wait."""
        self.unfit.waiting.clear()

    def bring_nearer(self, trial: Trial, enough: float, *, is_best: bool) -> None:
        """Improves the plan of a variant that fits, where it is the best (`is_best`) or may become it.

        The lower bound on its seconds need not exceed `enough`.
        """
        cutoff = math.inf if is_best else self.incumbent.seconds
        plan = trial.search.closer(self.limits, cutoff, enough)
        if plan is not None and plan.step_seconds < cutoff:
            self.incumbent.best = plan.of_variant(trial.variant)

    def _fitting(self, trial: Trial) -> Plan | None:
        """The cheapest plan of a variant that fits; None if there is none or it takes longer than the best so far."""
        search = trial.search
        if self.context.is_interrupted:
            plan = search.cheapest
            return plan if plan.peak_nbytes <= self.limits.searched else None
        try:
            return search.cheapest_within(self.limits, worth=self._worth)
        except OverBudgetError:
            self.unfit.add(trial)
            return None

    @property
    def _worth(self) -> float:
        """The factor by which a mesh must be able to gain for rows to be stated there, while some variants wait."""
        if not self.unfit.waiting or (self.best is None and self.goes_on()):
            return 1.0
        return GOOD_ENOUGH if self.best is None or self.goes_on() else math.inf

    def _add_alternative(self, plan: Plan, variant: Variant, why: str) -> None:
        """Adds the plan of a variant to the alternatives of the plan that is taken, with the reason `why` it is not."""
        name = f"{str(variant) or 'as written'}, mesh {plan.mesh}"
        alternative = Alternative(name=name, seconds=plan.step_seconds, why=why, peak_nbytes=plan.peak_nbytes)
        self.alternatives.append(alternative)
