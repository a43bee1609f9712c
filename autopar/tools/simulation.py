"""A step planned for other clusters, batches and microbatches than the ones at hand, in comparable figures.

No device is touched. Every point of a sweep is planned as `autopar plan` would, on the path that every plan takes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import jax
import numpy as np

from autopar.api import ParallelFunction
from autopar.cache import PlanCache
from autopar.compilation import Compilation
from autopar.tools.fit import Example, batch_of, quiet, with_rows
from passes.cluster import Cluster, what_if
from passes.errors import OverBudgetError, PlanningError
from passes.plan import AnyPlan, Estimate
from passes.planners import Auto, Planner
from passes.progress import Progress

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One point of a sweep: what is planned for, and by which planner.

    `batch` and `microbatches` are None for those of the step as it is; links have `bandwidth` times their bytes per
    second, those between hosts `network` times that.
    """

    cluster: Cluster
    planner: Planner
    planner_name: str
    batch: int | None = None
    microbatches: int | None = None
    bandwidth: float = 1.0
    network: float = 1.0

    @property
    def values(self) -> dict[str, float | str]:
        """The dimensions that may be swept, by name, as the command line calls it."""
        return {
            "cluster": self.cluster.name,
            "devices": self.cluster.n_devices,
            "bandwidth": self.bandwidth,
            "network": self.network,
            "batch": "as is" if self.batch is None else self.batch,
            "microbatches": "as planned" if self.microbatches is None else self.microbatches,
            "planner": self.planner_name,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The outcome of a scenario: the plan's `estimate`, or of the one of least memory where none fits; else why there
    is none.

    `scenario` is None for a saved plan; a device may need `limit_nbytes`. `tokens_per_step` is None if it is unknown.
    """

    limit_nbytes: float
    scenario: Scenario | None = None
    estimate: Estimate | None = None
    tokens_per_step: float | None = None
    refusal: str = ""
    is_interrupted: bool = False

    @property
    def fits(self) -> bool:
        return self.estimate is not None and self.estimate.peak_nbytes <= self.limit_nbytes

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens of all devices together in a second; None of a step without tokens."""
        if self.estimate is None or self.tokens_per_step is None or not self.estimate.step_seconds:
            return None
        return self.tokens_per_step / self.estimate.step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The dimensions that are varied; every combination is planned. An empty dimension stays as it is."""

    clusters: tuple[Cluster, ...]
    planners: Mapping[str, Planner]
    devices: tuple[int, ...] = ()
    bandwidth: tuple[float, ...] = ()
    network: tuple[float, ...] = ()
    batch: tuple[int, ...] = ()
    microbatches: tuple[int, ...] = ()

    def scenarios(self) -> Iterator[Scenario]:
        """Every combination; those of one batch and number of microbatches in a row."""
        for batch, microbatches in itertools.product(self.batch or (None,), self.microbatches or (None,)):
            every = (self.devices or (None,), self.bandwidth or (1.0,), self.network or (1.0,), self.planners.items())
            for cluster, devices, bandwidth, network, named in itertools.product(self.clusters, *every):
                name, planner = named
                if microbatches and _takes_microbatches(planner):
                    planner = replace(cast("Any", planner), microbatches=microbatches)
                yield Scenario(
                    cluster=what_if.resized(cluster, devices) if devices else cluster,
                    planner=planner,
                    planner_name=name,
                    batch=batch,
                    microbatches=microbatches,
                    bandwidth=bandwidth,
                    network=network,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A limit and a cache as in `autopar.parallelize`, and the tokens of a step where they are known."""

    memory_limit: int | str | None = None
    cache: str | os.PathLike[str] | PlanCache | None = None
    tokens_per_step: float | None = None


def rows(example: Example, sweep: Sweep, request: Request, progress: Callable[[str], None] = quiet) -> Iterator[Row]:
    """A row for each combination; `progress` is told what is planned next. Ends early after a plan that was
    interrupted.
    """
    traced, known = None, None
    step = example.function.replan(cache=False)
    limit = step.compilations.settings.memory_limit if request.memory_limit is None else request.memory_limit
    request = replace(request, memory_limit=limit)
    base = step.step(*example.args, **example.kwargs)
    places = batch_of(base) if sweep.batch else ()
    whole = base.structs[places[0]].shape[0] if places else 1
    tokens = _tokens(base.structs) if request.tokens_per_step is None else request.tokens_per_step
    for scenario in sweep.scenarios():
        key = scenario.batch, scenario.microbatches, scenario.cluster.n_devices
        if traced is None or known != key:
            known = key
            progress("tracing")
            traced = _traced(step, example, places, scenario)
        share = scenario.batch / whole if scenario.batch else 1.0
        row = _row(traced, scenario, request, progress)
        yield replace(row, tokens_per_step=tokens and tokens * share)
        if row.is_interrupted:
            return


def _traced(
    step: ParallelFunction[..., Any], example: Example, places: Sequence[int], scenario: Scenario
) -> Compilation | PlanningError:
    """The step as it is traced for a scenario: its rows in as many parts as there are devices. The reason where it
    takes no batch of that size.
    """
    function = step.replan(cluster=scenario.cluster, microbatches=scenario.microbatches)
    if scenario.batch is None:
        return function.compilations.of(example.args, dict(example.kwargs))
    resized = with_rows(example, dict.fromkeys(places, scenario.batch))
    try:
        return function.compilations.of(resized.args, dict(resized.kwargs))
    except PlanningError as error:
        return error
    except Exception as error:  # of whatever kind: it is the user's own code
        words = " ".join(str(error).split())
        return PlanningError(f"a batch of {scenario.batch:,} cannot be traced: {type(error).__name__}: {words}")


def _row(
    traced: Compilation | PlanningError, scenario: Scenario, request: Request, progress: Callable[[str], None]
) -> Row:
    """The outcome of one scenario."""
    about = ", ".join(f"{name} {value}" for name, value in scenario.values.items() if name in ("planner", "cluster"))
    limit = Auto(memory_limit=request.memory_limit).limit(scenario.cluster)
    plan: AnyPlan | None = None
    refusal = ""

    def report(now: Progress) -> None:
        progress(f"planning {about}: {now.phase}")

    progress(f"planning {about}")
    try:
        if isinstance(traced, PlanningError):
            raise traced
        cluster = what_if.with_bandwidth(scenario.cluster, scenario.bandwidth, scenario.network)
        options = {
            "cluster": cluster,
            "planner": scenario.planner,
            "memory_limit": request.memory_limit,
            "cache": request.cache,
            "progress": report,
        }
        plan = replace(traced, settings=traced.settings.but(options), chosen=None).plan()
    except OverBudgetError as error:
        plan, refusal = cast("AnyPlan | None", error.least_memory_plan), str(error)
    except PlanningError as error:
        refusal = str(error)
    if plan is None:
        return Row(scenario=scenario, limit_nbytes=limit, refusal=refusal)
    return Row(
        scenario=scenario,
        limit_nbytes=limit,
        estimate=Estimate.of(plan),
        refusal=refusal,
        is_interrupted=plan.is_interrupted,
    )


def saved(plan: AnyPlan, tokens_per_step: float | None = None, memory_limit: int | str | None = None) -> Row:
    """The row of a saved plan, on the cluster that it was made for."""
    limit = Auto(memory_limit=memory_limit).limit(plan.cluster)
    return Row(estimate=Estimate.of(plan), limit_nbytes=limit, tokens_per_step=tokens_per_step)


def _tokens(structs: Sequence[jax.ShapeDtypeStruct]) -> float | None:
    """The elements of the largest array of integers, None where there is none of a rank above 0."""
    sizes = [float(np.prod(s.shape)) for s in structs if s.shape and jax.numpy.issubdtype(s.dtype, np.integer)]
    return max(sizes, default=None)


def _takes_microbatches(planner: Planner) -> bool:
    return is_dataclass(planner) and any(field.name == "microbatches" for field in fields(planner))


def several(value: Value | Sequence[Value] | None) -> tuple[Value, ...]:
    """One value, or several, as a tuple in order and without repetitions."""
    if value is None:
        return ()
    if isinstance(value, Sequence) and not isinstance(value, str):
        listed = tuple(cast("Sequence[Value]", value))
        return tuple(each for place, each in enumerate(listed) if each not in listed[:place])  # plans have no hash
    return (cast("Value", value),)
