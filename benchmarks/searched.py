"""The collectives of a searched plan beyond what all textbooks have in common, and beyond the best one's time."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from benchmarks.batch_sums import batch_sums
from benchmarks.causes import Program, Sent
from benchmarks.textbook import EARLY, before_sums, casting_seconds
from benchmarks.verdicts import ROUNDING, Finding, Verdict, on_wire, payload, seconds_of, sent_on_wire
from passes.ir import TensorType, item_nbytes
from passes.text import quantities


def judge_any(program: Program) -> Verdict:
    """The verdict on a searched plan by what holds of data parallelism, ZeRO and Megatron alike."""
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
        type = program.graph.types[program.graph.inputs[position]]
        once = max(on_wire(s.kind, payload(s, program.mesh.group(s.axes).ranks)) // item_nbytes(s.dtype) for s in same)
        if sent_on_wire(program, same) <= max(once * type.item_nbytes, *(sent_on_wire(program, [s]) for s in same)):
            continue
        excess = sum(s.seconds * s.waited_share for s in same) - _once(program, same, type)
        for first, second in itertools.combinations(sorted(same, key=lambda s: -s.seconds), 2):
            surplus = min(second.seconds - _instead(program, first, second), excess / second.waited_share)
            if surplus > (ROUNDING - 1) * second.seconds:
                why = f"{len(same)} times in one phase, the textbook once"
                verdict.findings.append(Finding(sent=second, surplus_seconds=surplus, why=why))
                break
    return verdict


def _once(program: Program, same: Sequence[Sent], type: TensorType) -> float:
    """Seconds that a step waits for one collective in place of all of these: the largest, in the parameter's dtype.

    It can only begin when the last summand is known, so it overlaps with compute no more than the least overlapped one.
    """
    largest = max(same, key=lambda s: payload(s, program.mesh.group(s.axes).ranks) // item_nbytes(s.dtype))
    nbytes = payload(largest, program.mesh.group(largest.axes).ranks) * type.item_nbytes // item_nbytes(largest.dtype)
    each = seconds_of(program, largest.kind, largest.axes, nbytes / largest.count)
    waited = largest.count * each * max(s.waited_share for s in same)
    return waited + casting_seconds(program, same, type.dtype)


def _instead(program: Program, first: Sent, second: Sent) -> float:
    """Seconds of the resharding that would save the second collective.

    A copy that the first has gathered is resharded to where the second's is wanted; a summand of the second to where
    the first's lies, to be reduced with it. Where they are sharded differently that may take as long.
    """
    if first.type.shape != second.type.shape:
        return 0.0
    reduced = second.kind in ("all_reduce", "reduce_scatter")
    ends = (second.before, first.before) if reduced else (first.after, second.after)
    return second.count * program.resharder.cost(second.type, *ends)


def best_of(program: Program, rivals: Mapping[str, float], verdict: Verdict) -> None:
    """Adds findings for the seconds that a searched plan takes beyond the best of the textbook plans `rivals`.

    They are laid on its collectives of activations, the longest first, then on the others. Without rivals, as where no
    hand-made plan keeps the memory limit, there is none to take longer than.
    """
    if not rivals:
        return
    name = min(rivals, key=rivals.__getitem__)
    rest = program.plan.step_seconds - rivals[name] * ROUNDING - verdict.waited_seconds
    sends = sorted(
        (s for s in program.sent() if s.waited_share), key=lambda s: (not s.role.startswith("activation"), -s.seconds)
    )
    for sent in sends:
        if rest <= 0:
            return
        surplus = min(rest / sent.waited_share, sent.seconds)
        why = f"{name} would take {quantities.seconds(rivals[name])} in all"
        verdict.findings.append(Finding(sent=sent, surplus_seconds=surplus, why=why))
        rest -= surplus * sent.waited_share
