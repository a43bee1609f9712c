"""A searched plan held against what every textbook has in common, and against the best textbook plan."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping

from benchmarks.batch_sums import batch_sums
from benchmarks.causes import Program, Sent
from benchmarks.textbook import EARLY, before_sums
from benchmarks.verdicts import ROUNDING, Finding, Verdict, on_wire, payload, sent_on_wire
from passes.ir import item_nbytes
from passes.text import quantities


def judge_any(program: Program) -> Verdict:
    """A searched plan held against what every textbook has in common."""
    verdict = Verdict()
    everything = list(program.sent())
    early = before_sums(program, everything)
    verdict.findings += [Finding(sent=s, surplus_seconds=s.seconds, why=EARLY) for s in early]
    rest = [s for s in everything if s not in early]
    batch_sums(program, [s for s in rest if s.role == "statistic"], verdict)
    verdict.findings += [
        Finding(sent=s, surplus_seconds=s.seconds, why="the textbook sends none") for s in rest if s.role == "constant"
    ]
    again: dict[tuple[int, str, str, bool, tuple[str, ...]], list[Sent]] = defaultdict(list)
    for s in rest:
        if s.parameter is not None:
            phase = "backward" if s.phase == "recomputed" else s.phase
            again[s.parameter, s.role, phase, s.kind in ("all_reduce", "reduce_scatter"), s.axes].append(s)
    for (position, *_), same in again.items():
        itemsize = program.graph.types[program.graph.inputs[position]].item_nbytes
        once = max(on_wire(s.kind, payload(s, program.mesh.group(s.axes).ranks)) // item_nbytes(s.dtype) for s in same)
        if sent_on_wire(program, same) <= max(once * itemsize, *(sent_on_wire(program, [s]) for s in same)):
            continue
        for first, second in itertools.combinations(sorted(same, key=lambda s: -s.seconds), 2):
            surplus = second.seconds - _instead(program, first, second)
            if surplus > (ROUNDING - 1) * second.seconds:
                why = f"{len(same)} times in one phase, the textbook once"
                verdict.findings.append(Finding(sent=second, surplus_seconds=surplus, why=why))
                break
    return verdict


def _instead(program: Program, first: Sent, second: Sent) -> float:
    """Seconds to do without the second: a gathered copy is brought where the other is wanted, or a summand to where the
    other is before both are reduced. They may lie so differently that this takes as long.
    """
    if first.type.shape != second.type.shape:
        return 0.0
    reduced = second.kind in ("all_reduce", "reduce_scatter")
    ends = (second.before, first.before) if reduced else (first.after, second.after)
    return second.count * program.resharder.cost(second.type, *ends)


def best_of(program: Program, hands: Mapping[str, float], verdict: Verdict) -> None:
    """Adds what makes a searched plan slower than the best textbook plan: the most that it sends of activations."""
    name = min(hands, key=hands.__getitem__)
    rest = program.plan.step_seconds - hands[name] * ROUNDING - verdict.surplus_seconds
    sends = sorted(program.sent(), key=lambda s: (not s.role.startswith("activation"), -s.seconds))
    for sent in sends:
        if rest <= 0:
            return
        why = f"{name} would take {quantities.seconds(hands[name])} in all"
        verdict.findings.append(Finding(sent=sent, surplus_seconds=min(rest, sent.seconds), why=why))
        rest -= sent.seconds
