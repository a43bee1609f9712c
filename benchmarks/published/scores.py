"""Scores of predictions: errors and bias, order within sweeps, regret of the predicted best, out-of-memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import kendalltau

from benchmarks.published.rows import Result

SLACK = 1e-9
"""The share by which a rounding may be exceeded, for floating-point arithmetic."""


def mape(ratios: Sequence[float]) -> float:
    """Mean absolute error of predictions, as a share, from ratios of predicted to measured."""
    return statistics.fmean(abs(ratio - 1) for ratio in ratios)


def bias(ratios: Sequence[float]) -> float:
    """Mean error of predictions, as a share: above 0 where more is predicted than was measured."""
    return statistics.fmean(ratio - 1 for ratio in ratios)


def tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau-b of (predicted, measured): 1 for the same order, -1 for the reverse; None where there is none."""
    predicted, measured = zip(*pairs, strict=True) if pairs else ((), ())
    statistic: Any = kendalltau(predicted, measured) if len(pairs) > 1 else None
    return None if statistic is None or math.isnan(statistic.statistic) else float(statistic.statistic)


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    """The share of time lost by running what is predicted to be fastest: its measured seconds / the least ones - 1.

    Pairs are seconds (predicted, measured); of several that are predicted equal, the slowest counts.
    """
    best = min(predicted for predicted, _ in pairs)
    return max(m for p, m in pairs if p == best) / min(measured for _, measured in pairs) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Kendall's tau of the rates of one sweep's rows, and the regret where the sweep is a choice of configuration."""

    source: str
    name: str
    rows: int
    tau: float | None
    regret: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The scores of a set of results; errors are shares, None where nothing was compared.

    Numbers of rows: `answered` have a prediction and `refused` a question without one; `timed` have seconds to compare,
    `weighed` bytes, `judged_memory` whether they ran out of memory. Of these, `positives` ran out, `warned` were
    predicted to, and `caught` are both. `printed` are figures that sources computed, `met` those within their rounding.
    """

    rows: int
    answered: int
    refused: int
    timed: int
    mape: float | None
    bias: float | None
    worst: float | None
    tau: float | None
    regret: float | None
    weighed: int
    memory_mape: float | None
    memory_bias: float | None
    memory_least: float | None
    memory_most: float | None
    judged_memory: int
    positives: int
    warned: int
    caught: int
    printed: int
    met: int

    @property
    def precision(self) -> float | None:
        """The share that ran out of memory, of those predicted to."""
        return self.caught / self.warned if self.judged_memory and self.warned else None

    @property
    def recall(self) -> float | None:
        """The share predicted to run out of memory, of those that did."""
        return self.caught / self.positives if self.judged_memory and self.positives else None


def sweeps(results: Iterable[Result]) -> list[Sweep]:
    """The order within every sweep of two measured rows or more."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.seconds_ratio is not None:
            groups.setdefault((result.row.source, result.row.sweep), []).append(result)
    sweep_list: list[Sweep] = []
    for (source, name), members in groups.items():
        if len(members) < 2:
            continue
        times = [(r.answer.seconds, r.row.seconds) for r in members if r.answer and r.answer.seconds and r.row.seconds]
        work = [r.row.work for r in members]
        rates = [(w / p, w / m) for w, (p, m) in zip(work, times, strict=True)]
        lost = regret(times) if all(r.row.is_choice for r in members) else None
        sweep_list.append(Sweep(source=source, name=name, rows=len(members), tau=tau(rates), regret=lost))
    return sweep_list


def score(results: Sequence[Result]) -> Score:
    """The scores of results; tau and regret are means over their sweeps.

    A row that the others of its sweep are relative to is right by definition, and its error does not count.
    """
    times = [ratio for r in results if r.row.base != r.row.name and (ratio := r.seconds_ratio) is not None]
    nbytes_ratios = [ratio for r in results if (ratio := r.nbytes_ratio) is not None]
    orders = sweeps(results)
    taus = [sweep.tau for sweep in orders if sweep.tau is not None]
    losses = [sweep.regret for sweep in orders if sweep.regret is not None]
    fates = [
        (r.answer.is_out_of_memory, r.row.out_of_memory)
        for r in results
        if r.answer and r.answer.is_out_of_memory is not None and r.row.out_of_memory is not None
    ]
    exact = [r for r in results if r.row.rounding and r.answer]
    return Score(
        rows=len(results),
        answered=sum(r.answer is not None for r in results),
        refused=sum(r.answer is None and r.row.question is not None for r in results),
        timed=len(times),
        mape=mape(times) if times else None,
        bias=bias(times) if times else None,
        worst=max((ratio - 1 for ratio in times), key=abs, default=None),
        tau=statistics.fmean(taus) if taus else None,
        regret=statistics.fmean(losses) if losses else None,
        weighed=len(nbytes_ratios),
        memory_mape=mape(nbytes_ratios) if nbytes_ratios else None,
        memory_bias=bias(nbytes_ratios) if nbytes_ratios else None,
        memory_least=min(nbytes_ratios, default=None),
        memory_most=max(nbytes_ratios, default=None),
        judged_memory=len(fates),
        positives=sum(measured for _, measured in fates if measured),
        warned=sum(bool(predicted) for predicted, _ in fates),
        caught=sum(bool(predicted and measured) for predicted, measured in fates),
        printed=len(exact),
        met=sum(is_met(r) for r in exact),
    )


def is_met(result: Result) -> bool:
    """Whether a printed figure is met within its rounding."""
    ratios = (result.seconds_ratio, result.nbytes_ratio)
    return all(abs(ratio - 1) <= result.row.rounding * (1 + SLACK) for ratio in ratios if ratio is not None)
