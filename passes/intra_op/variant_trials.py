"""The variants of a step that were planned: which plan is the best so far, which may fit, and what is worth trying."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from passes.errors import OverBudgetError
from passes.intra_op.by_hand import SURELY
from passes.intra_op.forms import computes_more
from passes.intra_op.mesh_search import MeshSearch
from passes.intra_op.offloading import idle_state
from passes.plan import Alternative, Plan
from passes.progress import SearchContext
from passes.step import Step, Variant
from passes.text import quantities

_GOOD_ENOUGH = 1.02
"""A plan this close, as a factor of its seconds, to the step without a limit is good enough: variants of less memory
take longer, as they compute more (`python -m benchmarks.memory_limit` shows what a limit costs).
"""

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """A variant that was planned: its search over meshes, and the seconds of its plan that fits, if it has one."""

    variant: Variant
    search: MeshSearch
    seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class ExpectedBytes:
    """The bytes of a device that variants are expected to need at least, by those in other numbers of microbatches.

    In fewer microbatches at least as much is needed, in twice as many half as much.
    """

    _by_count: dict[Variant, dict[int, float]] = field(default_factory=dict[Variant, "dict[int, float]"])

    def note(self, variant: Variant, nbytes: float) -> None:
        """Notes the least bytes that plans of a variant are expected to need."""
        self._by_count.setdefault(replace(variant, microbatches=1), {})[variant.count] = nbytes

    def least(self, variant: Variant) -> float:
        """The least bytes that plans of a variant are expected to need; 0 where nothing is known."""
        known = self._by_count.get(replace(variant, microbatches=1), {})
        return max((nbytes * min(1.0, count / variant.count) for count, nbytes in known.items()), default=0.0)


@dataclass(slots=True, kw_only=True)
class VariantTrials:
    """The variants of a step that were planned for at most `limit` bytes, and what they have shown.

    What is known without a search within the limit, the plan without one and those by hand, may need what is `allowed`.
    So may the plan of least memory where nothing else is found: a limit whose margin cannot be kept is kept without.

    `search` plans a step, its state offloaded or not, on every mesh on which plans beneath so many bytes may be. Once a
    variant fits, others are tried while all that were `planned`, on all meshes, have fewer than `most` operators, and
    until the deadline of the `context`.

    `fitted` are those that fit, the fastest first; `low_memory` those of least memory that do not, `refused` those of
    which plans by hand were left out, and those `waiting` are put off until one fits as it is. `dear` ones take longer
    than the best whatever memory they need. A plan `by_offloading` that takes much longer than the one without a limit
    waits until the end. All of it is written by methods, and read by whoever chooses what is tried.
    """

    step: Step
    limit: float
    allowed: float = -math.inf
    search: Callable[[Step, bool, float, SearchContext], MeshSearch]
    most: int = MOST_OPERATORS
    context: SearchContext = field(default_factory=SearchContext)
    best: Plan | None = field(default=None, init=False)
    by_offloading: Plan | None = field(default=None, init=False)
    least_seconds: float = field(default=0.0, init=False)
    offloads: bool = field(default=True, init=False)
    operators: int = field(default=0, init=False)
    planned: set[Variant] = field(default_factory=set[Variant], init=False)
    dear: list[Variant] = field(default_factory=list[Variant], init=False)
    fitted: list[Trial] = field(default_factory=list[Trial], init=False)
    low_memory: list[Trial] = field(default_factory=list[Trial], init=False)
    refused: list[Trial] = field(default_factory=list[Trial], init=False)
    waiting: list[Trial] = field(default_factory=list[Trial], init=False)
    alternatives: list[Alternative] = field(default_factory=list[Alternative], init=False)
    _expected: ExpectedBytes = field(default_factory=ExpectedBytes, init=False)
    _free: dict[Variant, Trial] = field(default_factory=dict[Variant, Trial], init=False)
    _last: Trial | None = field(default=None, init=False)

    @property
    def most_nbytes(self) -> float:
        """The bytes that a plan may need that takes no search within the limit."""
        return max(self.limit, self.allowed)

    @property
    def fastest(self) -> Plan | None:
        """The fastest plan that fits so far, if any does, one that was put off as well."""
        return min(filter(None, (self.best, self.by_offloading)), key=lambda plan: plan.step_seconds, default=None)

    def goes_on(self) -> bool:
        """Whether another variant is tried, now that one fits."""
        return self.operators < self.most and not self.context.deadline.is_over()

    @property
    def wants_better(self) -> bool:
        """Whether no plan fits yet, or one that may be bettered in the work that is left."""
        return self.best is None or (self.best.step_seconds > _GOOD_ENOUGH * self.least_seconds and self.goes_on())

    def is_dear(self, variant: Variant) -> bool:
        """Whether a variant computes more than one that takes longer than the best whatever memory it needs."""
        of_stacks = self.step.has_stacks
        return any(computes_more(variant, dear) for dear in self.dear if not of_stacks or dear.kept == variant.kept)

    def may_fit(self, variant: Variant) -> bool:
        """Whether a variant may keep the limit, by what is known of others."""
        return self._expected.least(variant) <= SURELY * self.limit

    def put_off(self) -> None:
        """Keeps the plan for the end if it takes much longer than without a limit; not where a deadline is set."""
        is_slow = self.best is not None and self.best.step_seconds > _BY_OFFLOADING * self.least_seconds
        if is_slow and self.context.deadline.seconds is None:
            self.by_offloading, self.best = self.best, None

    def without_limit(self, variants: Sequence[Variant]) -> Plan | None:
        """The cheapest plan of these variants, the step as it is written first, if it fits: then no limit is felt."""
        plans = list[Plan]()
        for variant in variants:
            if plans and self.context.deadline.is_over():
                break
            trial = self._planned(variant, self.step.variant(variant), math.inf)
            plans.append(plan := trial.search.cheapest.of_variant(variant))
            self._free[variant] = trial
            if fits := plan.peak_nbytes <= self.most_nbytes:
                self.best = min(self.best or plan, plan, key=lambda plan: plan.step_seconds)
            over = f"over the memory limit of {quantities.nbytes(self.limit)}"
            self._tell_of(plan, variant, "takes longer" if fits else over)
            self.context.raise_if_interrupted()
        self.least_seconds = min(trial.search.least_seconds for trial in self._free.values())
        best, self.best = self.best, None
        if best is not None and best.step_seconds <= min(plan.step_seconds for plan in plans):
            return best.beside([other for other in self.alternatives if other.seconds != best.step_seconds])
        has_way = plans[0].cluster.group().device.host_bytes_per_second > 0
        self.offloads = has_way and bool(idle_state(self.step.graph, self.step.state_pairs))
        return None

    def planned_freely(self, variant: Variant, step: Step) -> Trial:
        """A variant, which is the `step`, planned without a limit."""
        if trial := self._free.get(variant):
            self._last = trial
            return trial
        return self._planned(variant, step, self.limit)

    def _planned(self, variant: Variant, step: Step, most_nbytes: float) -> Trial:
        """A variant planned on every mesh on which plans of at most so many bytes may be."""
        cutoff = self.best.step_seconds if self.best else float("inf")
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
        """Seconds of the best plan so far; `unlimited` is that of a variant that may not fit."""
        return self.best.step_seconds if self.best else None if self._free else unlimited

    def note(self, trial: Trial) -> None:
        """Notes that a variant was planned, and whether any plan of it may be worth its memory."""
        self.planned.add(trial.variant)
        if self.best and not trial.search.infeasible and trial.search.least_seconds >= self.best.step_seconds:
            self.dear.append(trial.variant)

    def put_in_line(self, trial: Trial) -> bool:
        """Whether a variant waits, since its cheapest plan does not fit."""
        if waits := not trial.search.fits(self.limit) and not self.context.is_interrupted:
            self._expected.note(trial.variant, trial.search.expected_nbytes)
            self.waiting.append(trial)
        return waits

    def take(self, trial: Trial) -> bool:
        """Whether the plan of a variant fits and takes less time than the best so far, which it becomes then.

        Raises the interruption if that ended the variant's own search.
        """
        plan, is_best = self._fitting(trial), False
        if plan is not None:
            self._tell_of(plan, trial.variant, "keeps the memory limit, and takes longer")
            timed = replace(trial, seconds=plan.step_seconds)
            self.fitted = sorted([*self.fitted, timed], key=lambda fitted: fitted.seconds)
            is_best = self.offer(plan.of_variant(trial.variant))
        self.context.raise_if_interrupted()
        return is_best

    def offer(self, plan: Plan) -> bool:
        """Whether a plan that fits takes less time than the best so far, which it becomes then."""
        if is_best := self.best is None or plan.step_seconds < self.best.step_seconds:
            self.best = plan
        return is_best

    def take_waiting(self, trial: Trial) -> bool:
        """Whether a variant that waited fits and is the best so far, as `take` has it; it stays in line."""
        cutoff = self.best.step_seconds if self.best else math.inf
        trial.search.context = replace(trial.search.context, cutoff=cutoff)
        return self.take(trial)

    def end_waiting(self) -> None:
        """Takes all that wait out of line."""
        self.waiting.clear()

    def bring_nearer(self, trial: Trial, enough: float, *, is_best: bool) -> None:
        """Brings the plan of a variant that fits nearer to the optimum, where it is the best or may become it.

        That it takes no less than `enough` seconds is all that is proven of it.
        """
        cutoff = math.inf if is_best or self.best is None else self.best.step_seconds
        plan = trial.search.closer(self.limit, cutoff, enough)
        if plan is not None and plan.step_seconds < cutoff:
            self.best = plan.of_variant(trial.variant)

    def _fitting(self, trial: Trial) -> Plan | None:
        """The cheapest plan of a variant that fits, None if it has none or takes more time than the best so far."""
        search = trial.search
        if self.context.is_interrupted:
            plan = search.cheapest
            return plan if plan.peak_nbytes <= self.limit else None
        try:
            return search.cheapest_within(self.limit, worth=self._worth)
        except OverBudgetError:
            others = sorted([*self.low_memory, trial], key=lambda other: other.search.problems.lowest_nbytes)
            self.low_memory = others[:_LOW_MEMORY]
            if search.by_hand.left_out:
                self.refused.append(trial)
            self._expected.note(trial.variant, trial.search.expected_nbytes)
            return None

    @property
    def _worth(self) -> float:
        """The factor that a mesh must be able to gain for budgets to be stated there, while some variants wait."""
        if not self.waiting or (self.best is None and self.goes_on()):
            return 1.0
        return _GOOD_ENOUGH if self.best is None or self.goes_on() else math.inf

    def _tell_of(self, plan: Plan, variant: Variant, why: str) -> None:
        """Adds the plan of a variant to the alternatives, as one that may not be taken."""
        name = f"{str(variant) or 'as written'}, mesh {plan.mesh}"
        alternative = Alternative(name=name, seconds=plan.step_seconds, why=why, peak_nbytes=plan.peak_nbytes)
        self.alternatives.append(alternative)
