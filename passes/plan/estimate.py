"""The figures by which training runs are compared, as a plan predicts them: utilization, throughput, days and cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Self, get_args

from passes.cluster import Kind
from passes.errors import InternalError
from passes.inter_op import StageCost
from passes.plan.pipeline import PipelinePlan
from passes.plan.plan import AnyPlan, Plan

DAY_SECONDS, DAY_HOURS = 86400.0, 24.0
"""One day, in seconds and in hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The figures that a plan predicts for one step on all its `devices`.

    `flops` are the model's on all devices: its matrix products and convolutions without recomputation, most of them in
    `dtype`, of which one device computes at most `peak_flops_per_second` by its data sheet. `bubble` is the share of
    all device seconds in which a stage waits for another; of p equal stages and m microbatches under GPipe or 1F1B it
    is (p - 1) / (m + p - 1). `exposed_seconds` are those by which the step would be shorter if collectives and
    transfers took no time: the part that is not hidden behind computing. It is None, and `flops` are 0, for a plan of
    an earlier autopar that does not have them.

    Reference: Chowdhery et al., "PaLM" (2022), appendix B: model flops utilization (MFU). Huang et al., "GPipe"
    (NeurIPS 2019), section 2.3: the bubble as a share of the step; Narayanan et al., "Efficient Large-Scale Language
    Model Training on GPU Clusters" (SC 2021), section 2.2, divide it by the rest instead: (p - 1) / m.
    """

    step_seconds: float
    devices: int
    flops: float
    dtype: str
    peak_flops_per_second: float
    bubble: float
    exposed_seconds: float | None
    peak_nbytes: int

    @classmethod
    def of(cls, plan: AnyPlan) -> Self:
        """The figures that `plan` predicts."""
        flops = _flops(plan)
        dtype = max(flops, key=flops.__getitem__, default="")
        device = plan.cluster.group().device
        peaks = device.flops_per_second
        return cls(
            step_seconds=plan.step_seconds,
            devices=plan.n_devices,
            flops=sum(flops.values()),
            dtype=dtype,
            peak_flops_per_second=peaks.get(device.widened.get(dtype, dtype), min(peaks.values())),
            bubble=plan.timeline.bubble if plan.timeline else 0.0,
            exposed_seconds=_exposed_seconds(plan),
            peak_nbytes=plan.peak_nbytes,
        )

    @property
    def flops_per_second_per_device(self) -> float | None:
        """Model flops that each device computes in a second; None where they are unknown."""
        return self.flops / self.step_seconds / self.devices if self.flops and self.step_seconds else None

    @property
    def mfu(self) -> float | None:
        """Model flops utilization: model flops over what the devices' data sheets promise in the time of the step.

        None where the flops are unknown.
        """
        rate = self.flops_per_second_per_device
        return None if rate is None else rate / self.peak_flops_per_second

    @property
    def exposed_share(self) -> float | None:
        """The share of the step that is exposed communication."""
        if self.exposed_seconds is None or not self.step_seconds:
            return None
        return self.exposed_seconds / self.step_seconds

    def days(self, tokens: float, tokens_per_step: float) -> float:
        """Days of steps, one after another, until that many tokens are processed.

        Reference: Narayanan et al. (SC 2021), section 5.1, with the predicted seconds of a step.
        """
        return tokens / tokens_per_step * self.step_seconds / DAY_SECONDS

    def cost(self, tokens: float, tokens_per_step: float, price_per_device_hour: float) -> float:
        """The cost of those days, in the unit of the price."""
        return self.days(tokens, tokens_per_step) * DAY_HOURS * self.devices * price_per_device_hour


def _flops(plan: AnyPlan) -> dict[str, float]:
    """The model's flops of one step on all devices together, by dtype."""
    flops: dict[str, float] = {}
    for part in plan.programs:
        for dtype, several in part.flops.items():
            flops[dtype] = flops.get(dtype, 0.0) + several
    return flops


@singledispatch
def _exposed_seconds(plan: AnyPlan) -> float | None:
    """Seconds by which a step would be shorter if nothing had to be sent; None for stages that do not have them."""
    raise InternalError(f"a {type(plan).__name__} has no estimate")


@_exposed_seconds.register
def _(plan: Plan) -> float | None:
    return sum(plan.seconds.get(kind, 0.0) for kind in get_args(Kind))


@_exposed_seconds.register
def _(plan: PipelinePlan) -> float | None:
    if not all(stage.computing for stage in plan.stages):
        return None
    silent = [_without_collectives(*both) for both in zip(plan.stages, plan.costs, strict=True)]
    return max(0.0, plan.step_seconds - plan.simulated(silent, ()).seconds)


def _without_collectives(stage: Plan, cost: StageCost) -> StageCost:
    """The cost of a stage if its collectives took no time; copies on one device stay."""
    moving = sum(stage.phases.values()) - sum(stage.computing.values())
    share = min(1.0, (_exposed_seconds(stage) or 0.0) / moving) if moving > 0 else 0.0

    def kept(phase: str) -> float:
        """The share of a phase that is not spent on collectives."""
        spent = stage.phases.get(phase, 0.0)
        return 1 - share * (spent - stage.computing.get(phase, 0.0)) / spent if spent else 1.0

    backward = kept("backward")
    halves = (cost.input_gradient_seconds, cost.weight_gradient_seconds)
    input_gradient, weight_gradient = (None if half is None else backward * half for half in halves)
    return replace(
        cost,
        forward_seconds=kept("forward") * cost.forward_seconds,
        backward_seconds=backward * cost.backward_seconds,
        input_gradient_seconds=input_gradient,
        weight_gradient_seconds=weight_gradient,
        finish_seconds=kept("apply") * cost.finish_seconds,
    )
