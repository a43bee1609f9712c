"""The step time of a pipeline schedule, simulated with the times of tasks and transfers that a source gives."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.published.rows import Answer
from passes.inter_op import StageCost, Timeline, Transfer, build, simulate
from passes.inter_op.schedules import Task, play

NEVER_WAITED_FOR = -1e9
"""Seconds of a transfer whose result is there before any step starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A schedule of `pipeline` groups of devices with `chunks` stages each.

    For one microbatch a group takes so many seconds for the forward pass, the gradient of inputs and the gradient of
    weights, and a transfer to the next group so many. These are means: `work` [stages] is the time of each stage
    relative to them, `ways` [stages - 1] that of each transfer, by default all 1. A sender computes during the share
    `overlap` of a transfer. Each group takes `finish_seconds` at the end of the step.
    """

    schedule: str
    pipeline: int
    microbatches: int
    forward_seconds: float
    input_seconds: float
    weight_seconds: float
    transfer_seconds: float
    chunks: int = 1
    overlap: float = 1.0
    work: tuple[float, ...] = ()
    ways: tuple[float, ...] = ()
    finish_seconds: float = 0.0

    @property
    def costs(self) -> list[StageCost]:
        """The cost of each stage."""
        n = self.chunks
        each = self.forward_seconds / n, self.input_seconds / n, self.weight_seconds / n
        shares = self.work or (1.0,) * (self.pipeline * n)
        costs = (StageCost.split(*(share * seconds for seconds in each)) for share in shares)
        return [replace(cost, finish_seconds=self.finish_seconds / n) for cost in costs]

    def timeline(self) -> Timeline:
        """The timeline. Raises PlanningError for a schedule that there is not."""
        stages = self.pipeline * self.chunks
        times = [self.transfer_seconds * share for share in self.ways or (1.0,) * (stages - 1)]
        hops = [Transfer(forward_seconds=spent, backward_seconds=spent) for spent in times]
        schedule = build(self.schedule, stages, self.microbatches, self.chunks)
        return simulate(schedule, self.costs, hops, overlap=self.overlap)

    def answer(self) -> Answer:
        """Seconds of the step. Raises PlanningError for a schedule that there is not."""
        return Answer(seconds=self.timeline().seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsAuthors:
    """The step that the simulator of Zero Bubble's authors predicts for a schedule of equal stages.

    The step is the longest time of any group from its start to its end. Where a microbatch goes round from the last
    group to the first, or back, only the first of each round of `pipeline` microbatches is waited for.

    Reference: sail-sg/zero-bubble-pipeline-parallelism, megatron/core/pipeline_parallel/efficiency.py.
    """

    simulated: Simulated

    def answer(self) -> Answer:
        """Seconds of the step. Raises PlanningError for a schedule that there is not."""
        simulated, costs = self.simulated, self.simulated.costs
        groups = simulated.pipeline
        schedule = build(simulated.schedule, groups * simulated.chunks, simulated.microbatches, simulated.chunks)

        def hop(task: Task) -> float:
            last = groups - 1 if task.kind == "forward" else 0
            goes_round = schedule.group_of(task.stage) == last
            return NEVER_WAITED_FOR if goes_round and task.microbatch % groups else simulated.transfer_seconds

        spans = play(schedule, lambda task: costs[task.stage].seconds(task.kind), hop)
        starts, ends = dict[int, float](), dict[int, float]()
        for span in spans:
            group = schedule.group_of(span.task.stage)
            starts.setdefault(group, span.start_seconds)
            ends[group] = span.end_seconds
        return Answer(seconds=max(ends[group] - start for group, start in starts.items()))
