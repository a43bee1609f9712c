"""A schedule of given times through the library's simulator, as pipelines are simulated in a search."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.published.rows import Answer
from passes.inter_op import StageCost, Timeline, Transfer, build, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A schedule of `pipeline` groups with `chunks` equal stages each.

    Seconds of a group: forward, gradient of inputs, gradient of weights, all for one microbatch; a transfer. With
    `blocking`, who sends waits. With `longest`, the step is the longest time of any group from its start to its end,
    as the authors of Zero Bubble count; else it is from the first start to the last end.
    """

    schedule: str
    pipeline: int
    microbatches: int
    forward_seconds: float
    input_seconds: float
    weight_seconds: float
    transfer_seconds: float
    chunks: int = 1
    blocking: bool = False
    longest: bool = False

    def timeline(self) -> Timeline:
        """The timeline. Raises PlanningError for a schedule that there is not."""
        stages, n = self.pipeline * self.chunks, self.chunks
        cost = StageCost.split(self.forward_seconds / n, self.input_seconds / n, self.weight_seconds / n)
        hop = Transfer(forward_seconds=self.transfer_seconds, backward_seconds=self.transfer_seconds)
        schedule = build(self.schedule, stages, self.microbatches, self.chunks)
        return simulate(schedule, [cost] * stages, [hop] * (stages - 1), blocking=self.blocking)

    def answer(self) -> Answer:
        """Seconds of the step. Raises PlanningError for a schedule that there is not."""
        found = self.timeline()
        if not self.longest:
            return Answer(seconds=found.seconds)
        spans = zip(found.start_seconds, found.end_seconds, strict=True)
        return Answer(seconds=max(end - start for start, end in spans))
