"""The search over variants of a step: in more microbatches, with less kept for the backward pass.

Each variant is a program of its own, planned by the search over meshes; the cheapest that fits is taken. They are tried
from those that cost least to those that need least memory; one whose bound is above the best plan found is left out.

    1. The step as it is written, whatever memory it needs; where its layers are loops, with less kept as well: a loop
       writes what its iterations keep into stacks, which may take longer than to compute it once more. The cheapest of
       these is the answer if it fits.
    2. The step as it is written within the limit, then with its state offloaded, which takes no further solves.
    3. Of each number of microbatches the variant of least memory, while none fits: if it does not, others hardly will.
       One whose cheapest plan does not fit waits until one does as it is, or none is left: a limit costs solves. The
       fewest microbatches of those that waited are found by bisection; one microbatch adds up no gradients, and may
       need less than several.
    4. Those that keep more, in the numbers of microbatches that fit, as long as `VariantTrials` finds it worth it.
    5. The plan with as many of its last layers keeping everything as fit, brought nearer to the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from passes.errors import OverBudgetError, PlanningError
from passes.intra_op.unfit_trials import Trial
from passes.intra_op.variant_order import variants_in
from passes.intra_op.variant_trials import VariantTrials
from passes.plan import INTERRUPTED, LATE, Plan
from passes.step import Variant
from passes.transforms import kept_of

_COUNTS = (1, 2, 4, 8, 16, 32)
"""The numbers of microbatches that are tried where the user names none."""

_MORE_COUNTS = (64, 128)
"""The numbers of microbatches tried where none of `_COUNTS` fits: what a microbatch needs halves, while the
rest stays.
"""

_CLOSED, _NEARLY, _AS_WRITTEN = 3, 1.05, 1.25
"""The number of plans that are brought nearer to the optimum, and the factor of the fastest one's seconds that they may
take before, or that of the step as it is written may: what relaxations find is up to a quarter above what is there. Two
residual blocks of 1024 took 1.04 times what a variant does that was 2 % behind, and six feed-forward blocks with four
of them computed again 1.04 times what they take as written, which was 7 % behind."""


def cheapest_variant(trials: VariantTrials) -> Plan:
    """The cheapest plan that fits, over all variants. Raises OverBudgetError with the plan of least memory that was
    met.
    """
    with trials.context.ending_early():
        plan = _cheapest(trials)
        return plan.ended(LATE) if trials.context.deadline.was_met else plan
    return trials.context.kept(trials.incumbent.fastest).ended(INTERRUPTED)


def _cheapest(trials: VariantTrials) -> Plan:
    step = trials.step
    best = trials.without_limit(variants_in(step.layers if step.has_stacks else 0, step.chosen.count))
    return _within_limit(trials) if best is None else _with_proven(best, trials.incumbent.least_seconds)


def _within_limit(trials: VariantTrials) -> Plan:
    """The cheapest plan that fits, where the cheapest plan without a limit does not."""
    for attempt in _ordered(trials):
        try:
            step = trials.step.variant(attempt.variant)
        except PlanningError:  # the step has no such variant
            continue
        trial = trials.planned_freely(attempt.variant, step)
        trials.note(trial)
        if not (attempt.may_wait and trials.put_in_line(trial)):
            trials.take(trial)
    best = _with_more_kept(trials, _fitting(trials))
    others = [alternative for alternative in trials.alternatives if alternative.seconds != best.step_seconds]
    has_variants = trials.offloads or trials.step.layers > 0 or len(trials.step.counts) > 1
    enough = trials.incumbent.least_seconds if has_variants else math.inf
    return _with_proven(_closer(trials, best, enough), enough).beside(others)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """A variant to be tried; if it `may_wait`, it is put off where its cheapest plan does not fit."""

    variant: Variant
    may_wait: bool = False


def _ordered(trials: VariantTrials) -> Iterator[_Attempt]:
    """The variants in the order in which they are tried, given that one fits."""
    step = trials.step
    first = Variant(microbatches=step.chosen.count)
    yield _Attempt(variant=first)
    if trials.offloads and trials.wants_better:
        yield _Attempt(variant=replace(first, offload=True))
        trials.put_off()
    counts, more = _counts(step.counts)
    of_count = {count: variants_in(step.layers, count) for count in (*counts, *more)}
    fitting, offloads = list[int](), (False, True) if trials.offloads else (False,)
    for offload in offloads:
        if trials.best is None:
            least = [replace(kinds[-1], offload=offload) for kinds in of_count.values()]
            others = [variant for variant in least if variant != first]
            fitting = yield from _of_least_memory(trials, others, is_last=offload == offloads[-1])
        if trials.best is None:
            fitting = yield from _keeping_more(trials, of_count, offload=offload)
    fewest = min(fitting, default=0)
    fewer = max((n for n in of_count if n < fewest), default=fewest)  # that nothing was found there is no proof
    needs_offload = bool(fitting) and trials.best is not None and bool(trials.best.offloaded)
    for count in sorted((n for n in of_count if n not in more or n in fitting), key=lambda n: (n < fewest, n)):
        kinds = of_count[count][::-1] if count in fitting else of_count[count]
        for variant in (replace(kind, offload=offload) for kind in kinds for offload in offloads):
            if not variant.offload and (needs_offload or count < fewer):
                continue
            if trials.best is None or not trials.wants_better:
                return
            is_new = variant not in trials.planned and not trials.is_too_slow(variant)
            if is_new and (count >= fewest or trials.may_fit(variant)):
                yield _Attempt(variant=variant)


def _counts(possible: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """(numbers of microbatches that are tried, those that are tried where none of these fits)."""
    if len(possible) <= 1:
        return possible or (1,), ()
    counts, more = ([count for count in table if count in possible] for table in (_COUNTS, _MORE_COUNTS))
    return counts or (1,), more


def _of_least_memory(
    trials: VariantTrials, least: Sequence[Variant], *, is_last: bool
) -> Generator[_Attempt, None, list[int]]:
    """The numbers of microbatches in which the variants of `least` memory fit; they are tried until one does.

    Those that are not expected to fit are tried where no other fits, and only on the last look.
    """
    begun, unlikely = list[int](), list[Variant]()
    for variant in least:
        if trials.best is not None:
            break
        if trials.may_fit(variant):
            begun.append(variant.count)
            yield _Attempt(variant=variant, may_wait=variant.count > 1)
        else:
            unlikely.append(variant)
    fitting = _bisected(trials, begun)
    for variant in reversed(unlikely) if is_last else ():
        if trials.best is None:
            yield _Attempt(variant=variant)
            fitting = [variant.count]
    return fitting if trials.best else []


def _keeping_more(
    trials: VariantTrials, of_count: Mapping[int, Sequence[Variant]], *, offload: bool
) -> Generator[_Attempt, None, list[int]]:
    """The numbers of microbatches in which variants that keep more fit; they are tried until one does.

    Where weights are larger than activations, recomputing a layer may need more memory than it saves. These variants
    are tried in the fewest microbatches, and in those of the least memory met so far.
    """
    counts = {min(of_count), *(trial.variant.count for trial in trials.unfit.low_memory[:1])}
    for variant in (replace(kind, offload=offload) for count in sorted(counts) for kind in of_count[count][:-1]):
        if variant not in trials.planned and trials.best is None:
            yield _Attempt(variant=variant)
    return [trials.best.microbatches] if trials.best else []


def _bisected(trials: VariantTrials, begun: Sequence[int]) -> list[int]:
    """The numbers of microbatches, of those `begun`, in which the variant of least memory is known to fit.

    The fewest of those that waited are found by bisection: more microbatches need less memory and take longer. Where
    there is a plan already, variants that are not expected to fit are left out, and rows are stated only for gains that
    are worth it.
    """
    waiting = sorted(trials.unfit.waiting, key=lambda trial: trial.variant.count)
    fitting = [n for n in begun if n not in [trial.variant.count for trial in waiting]]
    likely = [trial for trial in waiting if trials.may_fit(trial.variant)]
    unlikely = [trial for trial in waiting if not trials.may_fit(trial.variant)]

    def fits(trial: Trial) -> bool:
        """Whether one that waited fits and is the best so far."""
        if is_best := trials.take_waiting(trial):
            fitting.append(trial.variant.count)
        return is_best

    too_few, enough = -1, len(likely)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fits(likely[middle]):
            enough = middle
        else:
            too_few = middle
    while trials.best is None and unlikely:
        fits(unlikely.pop())
    trials.end_waiting()
    return fitting


def _fitting(trials: VariantTrials) -> Plan:
    """The fastest plan that fits. Where none was found, a hand-made one that was not expected to fit, or the plan of
    least memory.

    Raises OverBudgetError where that does not fit either.
    """
    for trial in [] if trials.best else trials.unfit.refused:
        if plan := trial.search.cheapest_left_out(trials.limits):
            trials.incumbent.offer(plan.of_variant(trial.variant))
    if (fastest := trials.incumbent.fastest) is not None:
        return fastest
    least = _of_fewest_nbytes(trials.unfit.low_memory)
    if least is None or least.peak_nbytes > trials.limits.hand_made:
        raise OverBudgetError("no variant of the step keeps the memory limit", least_memory_plan=least)
    return least


def _of_fewest_nbytes(trials: Sequence[Trial]) -> Plan | None:
    """The plan of least memory of these variants, each planned for the least memory that it can have."""
    plans = [trial.search.least_memory().of_variant(trial.variant) for trial in trials]
    return min(plans, key=lambda plan: plan.peak_nbytes, default=None)


def _with_more_kept(trials: VariantTrials, best: Plan) -> Plan:
    """The plan in which as many of the last layers as possible keep everything, found by bisection; what is good enough
    stays as it is.
    """
    trials.incumbent.offer(best)
    fewest, most = 0, 0 if trials.incumbent.is_good_enough else len(best.remat)
    while most - fewest > 1 and trials.goes_on():
        middle = (fewest + most) // 2
        kept = kept_of((*best.remat[: len(best.remat) - middle], *("everything",) * middle))
        variant = Variant(microbatches=best.microbatches, kept=kept, offload=bool(best.offloaded))
        if trials.take(trials.planned_freely(variant, trials.step.variant(variant))):
            fewest = middle
        else:
            most = middle
    return trials.best or best


def _closer(trials: VariantTrials, best: Plan, enough: float) -> Plan:
    """The best plan brought nearer to the optimum, or one that is nearly as fast, as far as there is time.

    Lower bounds need not exceed `enough` seconds, as another variant may take no more than that.
    """
    nearest = [each for each in trials.fitted[:_CLOSED] if each.seconds <= _NEARLY * trials.fitted[0].seconds]
    chosen = trials.step.chosen.count
    as_written = [each for each in trials.fitted if not each.variant.kept and each.variant.count == chosen][:1]
    nearest += [e for e in as_written if e not in nearest and e.seconds <= _AS_WRITTEN * trials.fitted[0].seconds]
    for number, trial in enumerate(nearest):
        if number and trials.context.deadline.is_over():
            break
        trials.bring_nearer(trial, enough, is_best=number == 0)
    return trials.best or best


def _with_proven(plan: Plan, least: float) -> Plan:
    """The plan with a bound that holds for all variants: none takes less than `least` seconds without a limit."""
    solution = plan.solution
    status = "near optimal" if solution.status == "optimal" and least < solution.bound else solution.status
    return replace(plan, solution=replace(solution, bound=min(least, solution.bound), status=status))
