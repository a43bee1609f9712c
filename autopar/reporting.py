"""Reports of compiled functions: steps taken on copies of their arguments, timed and profiled, beside predictions."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, cast

import jax
import numpy as np

from autopar.checks import hlo_kinds
from autopar.compilation import Compilation
from autopar.distributed import among
from autopar.errors import ArgumentError, explain
from autopar.profiling import (
    CALIBRATION_NAME,
    Clock,
    Event,
    Factors,
    Run,
    Stepper,
    StepReport,
    Steps,
    measured_shares,
    measured_spans,
    profiled,
    seconds_by_cause,
    timed,
    warm_up,
)
from autopar.runtime import Executable, Pipeline, StageStacked
from passes.errors import PlanningError
from passes.page import MeasuredSpan
from passes.plan import AnyPlan, PipelinePlan

PROFILED = 5
"""Steps under the profiler, whose events use memory."""


def report(compilation: Compilation, leaves: list[Any], clock: Clock = time.perf_counter) -> StepReport:
    """A report of predicted and measured steps of a compilation on flat arguments, which stay the caller's.

    The factors are kept beside the plans, if plans are kept; if they cannot be written, that is a warning.
    """
    compilation.signature.check_usable(compilation.traced.graph.input_names, leaves, "report()")
    stepper = stepper_of(compilation, leaves)
    plan = compilation.plan()
    with compilation.phase("measure"):
        warm_up(stepper)
        result = StepReport(plan=plan, steps=timed(stepper, clock), applied=_applied(compilation))
        result = _with_profile(compilation, stepper, result, clock)
        if isinstance(compilation.executable, Pipeline):
            result = replace(result, transfers=_transfers(compilation.executable, stepper, cast("PipelinePlan", plan)))
    if compilation.settings.cache is None:
        return result
    kept_in = os.path.join(os.fspath(compilation.settings.cache.folder), CALIBRATION_NAME)
    try:
        result.save(kept_in)
    except PlanningError as error:  # what was measured is worth more than where it is kept
        warnings.warn(f"the report is not kept: {error}", stacklevel=3)
        return result
    return replace(result, kept_in=kept_in)


def stepper_of(compilation: Compilation, leaves: list[Any]) -> Stepper:
    """The steps of a compilation from flat arguments, which stay the caller's. Raises PlanningError beyond a memory
    limit.
    """
    run, processes = compilation.ready(leaves), among(compilation.present())

    def agreed(seconds: float) -> float:
        """The first process's seconds."""
        return float(processes.broadcast("the seconds of a step", lambda: repr(seconds))) if processes else seconds

    return Stepper(
        run=run,
        leaves=leaves,
        pairs=compilation.traced.state_pairs,
        donated=[i for i, is_donated in enumerate(compilation.traced.donated) if is_donated],
        agreed=agreed,
    )


def _applied(compilation: Compilation) -> Factors:
    """The factors that the plan's cluster was calibrated by."""
    calibration = compilation.settings.calibration
    return Factors() if calibration is None else calibration.of(compilation.plan().cluster)


def _with_profile(compilation: Compilation, stepper: Stepper, result: StepReport, clock: Clock) -> StepReport:
    """The report with the profiled seconds of devices; as it is if the profiler sees none of their operators."""
    devices = compilation.present()
    times: list[Steps] = []

    def run() -> None:
        times.append(timed(stepper, clock, PROFILED))

    seen = profiled(run)
    if not seen or any(device.process_index != jax.process_index() for device in devices):
        return result
    numbers = [device.id if device.local_hardware_id is None else device.local_hardware_id for device in devices]
    (steps,) = times
    opcodes = hlo_kinds.opcodes(_texts(compilation))
    by_device = seconds_by_cause(seen, opcodes, numbers, len(steps.seconds))
    if not any(any(spent.values()) for spent in by_device):
        return result
    measured = measured_shares(result.plan, by_device, steps.median)
    result = replace(result, profiled_seconds=steps.median, measured=measured)
    pipeline = _pipeline(compilation)
    return replace(result, spans=_spans(pipeline, result.plan, seen, numbers, steps)) if pipeline else result


def _spans(
    pipeline: Pipeline, plan: AnyPlan, seen: Sequence[Event], numbers: Sequence[int], steps: Steps
) -> tuple[MeasuredSpan, ...]:
    """The tasks of a typical one of the profiled steps."""
    ends = accumulate((programs[0].n_devices for programs in plan.submeshes), initial=0)
    groups = [numbers[start:end] for start, end in pairwise(ends)]
    codes = {id(executable): hlo_kinds.opcodes([executable.as_text()]) for executable in pipeline.executables}
    runs = [
        Run(
            group=segment.stage % len(groups),
            stage=segment.stage,
            module=next((module for module, _ in codes[id(executable)]), ""),
            instructions=frozenset(name for _, name in codes[id(executable)]),
            task=task,
        )
        for segment, task, executable in pipeline.runs
    ]
    return measured_spans(seen, runs, groups, len(steps.seconds), steps.typical)


def _pipeline(compilation: Compilation) -> Pipeline | None:
    """The pipeline that a compilation runs, None where it runs none."""
    executable = compilation.executable
    executable = executable.pipeline if isinstance(executable, StageStacked) else executable
    return executable if isinstance(executable, Pipeline) else None


def _texts(compilation: Compilation) -> Sequence[str]:
    """The optimized HLO of every program of a step."""
    if pipeline := _pipeline(compilation):
        return [segment.as_text() for segment in pipeline.executables]
    executable = compilation.executable
    if isinstance(executable, Executable) and hasattr(executable.run, "as_text"):
        return [executable.run.as_text()]  # pyright: ignore[reportFunctionMemberAccess]
    return [compilation.program().lower(compilation.structs, (), None, None).compile().as_text()]


def _transfers(pipeline: Pipeline, stepper: Stepper, plan: PipelinePlan) -> tuple[float, float]:
    """(predicted, measured) seconds of a step's transfers, one by one: each instruction waits for the one before."""
    seconds = [0.0]

    def run(leaves: list[Any]) -> Any:
        results, times = pipeline.timed(leaves, wait=True)
        seconds[0] = pipeline.transfer_seconds(times)
        return results

    usual, stepper.run = stepper.run, run
    stepper.step()
    stepper.run = usual
    predicted = sum(transfer.forward_seconds + transfer.backward_seconds for transfer in plan.transfers)
    return plan.microbatches * predicted, seconds[0]


def zeros(compilation: Compilation) -> list[Any]:
    """Flat arguments of a compilation's types, all zero. Raises ArgumentError for types that are not numbers."""
    if any(jax.numpy.issubdtype(struct.dtype, jax.dtypes.extended) for struct in compilation.structs):
        rule = "without arguments, arrays of zeros are stepped, and there are none of its random keys"
        remedy = "pass what the function is called with: report(state, batch)"
        raise ArgumentError(explain("report()", rule, compilation.signature.source, remedy))
    return [np.zeros(struct.shape, struct.dtype) for struct in compilation.structs]
