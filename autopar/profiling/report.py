"""Reports of measured steps beside predicted ones: by cause and, for a pipeline, by submesh."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import get_args

from autopar.profiling import calibration
from autopar.profiling.calibration import NONE, Factors
from autopar.profiling.events import CAUSES, COMPUTE, TRANSFERS
from autopar.profiling.steps import Steps
from passes.cluster import Kind
from passes.errors import PlanningError
from passes.files import write_whole
from passes.page import Measured, MeasuredSpan, html
from passes.plan import AnyPlan
from passes.text import Column, Table, quantities

DISPATCH, WAITING = "dispatch", "waiting"
ROWS = (*CAUSES, "offload", DISPATCH, WAITING)
"""Causes in the order in which they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Seconds of a step by cause, the same for each of `devices` devices."""

    devices: int
    seconds: Mapping[str, float]

    @property
    def busy(self) -> float:
        """Seconds in which a device does not wait."""
        return sum(spent for cause, spent in self.seconds.items() if cause not in (WAITING, DISPATCH, TRANSFERS))


def predicted_shares(plan: AnyPlan) -> tuple[Share, ...]:
    """The seconds that a plan predicts for each of its submeshes, by cause.

    `waiting` is the rest of the step: a pipeline's bubble, and transfers that are not hidden.
    """
    dispatch = plan.cluster.group().device.dispatch_seconds
    shares: list[Share] = []
    for group, programs in enumerate(plan.submeshes):
        seconds: dict[str, float] = {}
        for program in programs:
            for cause, spent in _by_cause(program.seconds).items():
                seconds[cause] = seconds.get(cause, 0.0) + spent
        if plan.timeline is not None:
            seconds[DISPATCH] = dispatch * len(plan.timeline.schedule.groups[group])
            seconds[WAITING] = max(0.0, plan.step_seconds - sum(seconds.values()))
        shares.append(Share(devices=programs[0].n_devices, seconds=seconds))
    return tuple(shares)


def _by_cause(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by cause as profiles count them: copies within one device are computing."""
    apart = (*get_args(Kind), "offload")
    computing = sum(spent for cause, spent in seconds.items() if cause not in apart)
    return {COMPUTE: computing, **{cause: spent for cause, spent in seconds.items() if cause in apart}}


def measured_shares(plan: AnyPlan, by_device: Sequence[Mapping[str, float]], step_seconds: float) -> tuple[Share, ...]:
    """The seconds by cause of each submesh, as profiled, averaged over its devices [devices of the plan].

    The rest of the step is `waiting`.
    """
    ends = accumulate((programs[0].n_devices for programs in plan.submeshes), initial=0)
    shares: list[Share] = []
    for start, end in pairwise(ends):
        members = by_device[start:end]
        seconds = {cause: sum(each.get(cause, 0.0) for each in members) / len(members) for cause in CAUSES}
        seconds[WAITING] = max(0.0, step_seconds - sum(seconds.values()))
        shares.append(Share(devices=end - start, seconds=seconds))
    return tuple(shares)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Steps of a plan, predicted and measured.

    `steps` were each waited for. `profiled_seconds` is the median of the profiled ones, in which devices were seen to
    do what `measured` says, by submesh; without a profile both are None. `transfers` are the seconds that a pipeline's
    transfers of one step take one by one, (predicted, measured); `spans` are its tasks as one step ran them. `applied`
    are the factors that the plan's cluster was calibrated by already; `kept_in` is the file in which the new ones are
    kept.
    """

    plan: AnyPlan
    steps: Steps
    profiled_seconds: float | None = None
    measured: tuple[Share, ...] | None = None
    transfers: tuple[float, float] | None = None
    spans: tuple[MeasuredSpan, ...] = ()
    applied: Factors = NONE
    kept_in: str = ""

    @cached_property
    def predicted(self) -> tuple[Share, ...]:
        """The predicted seconds by cause of each submesh."""
        return predicted_shares(self.plan)

    @property
    def ratio(self) -> float:
        """Measured by predicted seconds of a step."""
        return self.steps.median / self.plan.step_seconds if self.plan.step_seconds else float("inf")

    @property
    def on_page(self) -> Measured:
        """The measured steps, as the plan's page shows them."""
        return Measured(
            program=self.plan.fingerprint,
            shape=self.plan.shape,
            step_seconds=self.steps.median,
            shares=tuple(share.seconds for share in self.measured or ()),
            spans=self.spans,
        )

    def to_html(self) -> str:
        """The plan's page with measured and predicted seconds, by cause, by submesh and by task."""
        return html(self.plan, self.on_page)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as JSON, which `autopar report PLAN --measured PATH` shows beside the plan.

        Raises PlanningError where it cannot.
        """
        try:
            write_whole(path, f"{json.dumps(self.to_json())}\n".encode())
        except OSError as error:
            raise PlanningError(f"{os.fspath(path)}: the report cannot be written: {error.strerror}") from error

    def causes(self) -> dict[str, tuple[float | None, float | None]]:
        """(predicted, measured) seconds of a device by cause, on average; None for what is not known."""
        rows: dict[str, tuple[float | None, float | None]] = {}
        for cause in ROWS:
            predicted = _mean(self.predicted, cause)
            measured = _mean(self.measured, cause) if self.measured else None
            if cause == DISPATCH and self.measured:  # in a profile it is a part of the waiting
                measured = None
            if predicted or measured:
                rows[cause] = (predicted, measured)
        return rows

    def factors(self) -> Factors:
        """Measured over predicted seconds, of computing and of communication, relative to the uncalibrated cluster.

        Without a profile both are the ratio of the whole step.
        """
        computing = communication = self.ratio
        if self.measured:
            sums = [[_mean(shares, cause) for cause in get_args(Kind)] for shares in (self.predicted, self.measured)]
            computing = _ratio(_mean(self.measured, COMPUTE), _mean(self.predicted, COMPUTE), self.ratio)
            communication = _ratio(sum(sums[1]), sum(sums[0]), 1.0)
        return Factors(
            compute=self.applied.compute * computing, communication=self.applied.communication * communication
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Adds the factors to a file for `parallelize(calibration=)`. Raises PlanningError where it cannot."""
        calibration.keep(path, self.plan, self.factors(), self.steps.median)

    def tables(self) -> tuple[Table, ...]:
        """The step by cause and, of a pipeline, by submesh; how it was measured; where the factors are kept."""
        return (self._causes(), *([self._submeshes()] if len(self.predicted) > 1 else []), self._how())

    def _causes(self) -> Table:
        rows = [
            (cause, _text(predicted), _text(measured), _times(measured, predicted))
            for cause, (predicted, measured) in self.causes().items()
        ]
        step = self.plan.step_seconds
        rows.append(("step", _text(step), _text(self.steps.median), _times(self.steps.median, step)))
        return Table(
            title="a device, on average, in one step",
            columns=(Column(heading="cause"), *_columns("predicted", "measured", "measured / predicted")),
            rows=tuple(rows),
        )

    def _submeshes(self) -> Table:
        rows = tuple(
            (
                str(number),
                str(predicted.devices),
                _text(predicted.busy),
                _text(self.measured[number].busy if self.measured else None),
                _text(predicted.seconds.get(WAITING, 0.0)),
                _text(self.measured[number].seconds[WAITING] if self.measured else None),
            )
            for number, predicted in enumerate(self.predicted)
        )
        headings = ("submesh", "devices", "busy, predicted", "measured", "waiting, predicted", "measured")
        return Table(title="by submesh", columns=_columns(*headings), rows=rows)

    def _how(self) -> Table:
        low, high = self.steps.spread
        lines = [
            f"median of {quantities.count(len(self.steps.seconds), 'step')}, each waited for; quartiles "
            f"{quantities.seconds(low)} and {quantities.seconds(high)}; a call returned after "
            f"{quantities.seconds(self.steps.host_median)}"
        ]
        if self.profiled_seconds is None:
            lines.append("causes are not measured: the profiler saw no operators")
        else:
            lines.append(
                f"causes by JAX's profiler, under which a step took {quantities.seconds(self.profiled_seconds)}; a "
                "collective counts where the device computes nothing meanwhile, and includes waiting for others"
            )
        if self.transfers:
            predicted, measured = self.transfers
            lines.append(
                f"a pipeline's transfers, one by one: {quantities.seconds(measured)} a step, "
                f"{quantities.seconds(predicted)} predicted"
            )
        if self.kept_in:
            lines.append(f"kept in {self.kept_in}: parallelize(..., calibration={self.kept_in!r}) plans by it")
        return Table(title="how", columns=(Column(heading="", flexible=True),), rows=tuple((line,) for line in lines))

    def to_json(self) -> dict[str, object]:
        """The report as JSON data, in seconds."""
        factors = self.factors()
        return {
            "program": self.plan.fingerprint,
            "shape": self.plan.shape,
            "step_seconds": self.steps.median,
            "predicted_seconds": self.plan.step_seconds,
            "measured_seconds": list(self.steps.seconds),
            "host_seconds": list(self.steps.host_seconds),
            "profiled_seconds": self.profiled_seconds,
            "causes": {cause: list(pair) for cause, pair in self.causes().items()},
            "predicted": [{"devices": share.devices, **share.seconds} for share in self.predicted],
            "measured": [{"devices": share.devices, **share.seconds} for share in self.measured or ()],
            "spans": [span.to_json() for span in self.spans],
            "transfers": list(self.transfers) if self.transfers else None,
            "factors": {"compute": factors.compute, "communication": factors.communication},
        }

    def __str__(self) -> str:
        return "\n\n".join(table.format() for table in self.tables())


def _columns(*headings: str) -> tuple[Column, ...]:
    return tuple(Column(heading=heading, right=True) for heading in headings)


def _text(seconds: float | None) -> str:
    return "-" if seconds is None else quantities.seconds(seconds)


def _times(measured: float | None, predicted: float | None) -> str:
    return f"{measured / predicted:.2f}" if measured is not None and predicted else "-"


def _mean(shares: Sequence[Share], cause: str) -> float:
    """Seconds of a device on average."""
    total = sum(share.devices for share in shares)
    return sum(share.devices * share.seconds.get(cause, 0.0) for share in shares) / total


def _ratio(measured: float, predicted: float, otherwise: float) -> float:
    """Measured by predicted; `otherwise` where either is nothing."""
    return measured / predicted if measured > 0 and predicted > 0 else otherwise
