"""`autopar.simulate`: the predicted cost of a train step elsewhere, as a value that can be printed, plotted and
written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.cache import PlanCache
from autopar.errors import ArgumentError, explain
from autopar.options import check_arguments, checked_cluster, checked_limit, checked_planner
from autopar.tools import simulation_text
from autopar.tools.fit import Example
from autopar.tools.simulation import Request, Row, Sweep, rows, saved, several
from autopar.tools.simulation_plot import plot_simulation
from passes.cluster import Cluster
from passes.plan import AnyPlan, load_plan
from passes.planners import Planner, named
from passes.text import Table, plain_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The rows of a sweep; `tokens` are those of a whole training, at `price_per_device_hour`."""

    rows: tuple[Row, ...]
    tokens: float | None = None
    price_per_device_hour: float | None = None

    def tables(self, note: str = "") -> tuple[Table, ...]:
        """One step of each row, then the whole training, then what cannot be planned; `note` under the last."""
        return simulation_text.tables(self.rows, self.tokens, self.price_per_device_hour, note)

    def to_json(self) -> list[dict[str, object]]:
        """The rows as JSON data, in seconds, bytes and flops."""
        return [simulation_text.row_json(row, self.tokens, self.price_per_device_hour) for row in self.rows]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws step, utilization, exposed communication and memory. Raises PlanningError where it cannot."""
        plot_simulation(self.rows, path)

    def __str__(self) -> str:
        return "\n\n".join(table.format() for table in self.tables())


def simulate(
    step: Callable[..., Any] | AnyPlan,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: str | Cluster | Sequence[str | Cluster] | None = None,
    planner: Planner | Sequence[Planner] | None = None,
    devices: int | Sequence[int] = (),
    bandwidth: float | Sequence[float] = (),
    network: float | Sequence[float] = (),
    batch: int | Sequence[int] = (),
    microbatches: int | Sequence[int] = (),
    memory_limit: int | str | None = None,
    cache: str | os.PathLike[str] | PlanCache | None = None,
    tokens: float | None = None,
    tokens_per_step: float | None = None,
    price_per_device_hour: float | None = None,
) -> Simulation:
    """The predicted cost of `step(*args, **kwargs)` under every combination of options; or a saved plan's figures.

    Every option from `cluster` to `microbatches` takes one value or several. `devices` are of the cluster's kind: a
    part of a host or whole hosts. Links have `bandwidth` times their bytes per second, those between hosts `network`
    times that. `batch` is the leading dimension of the arguments that make up the batch. A combination without a plan
    is a row with the reason; if no plan fits in a device's memory, the row has the plan of least memory. A step
    processes `tokens_per_step`, by default the elements of its largest array of integers, in proportion to the batch;
    a training of `tokens` takes days, and costs the price of so many hours of all devices.

    Definitions are those of `passes.plan.Estimate`. Raises ClusterError, ArgumentError or PlanningError for options
    that cannot be read.
    """
    training = {"tokens": tokens, "tokens_per_step": tokens_per_step, "price_per_device_hour": price_per_device_hour}
    for name, value in training.items():
        _check(name, () if value is None else (value,), *_POSITIVE)
    if price_per_device_hour is not None and tokens is None:
        rule, remedy = "it is the price of a training of so many tokens", "add, say, tokens=300e9"
        raise ArgumentError(explain(f"price_per_device_hour={price_per_device_hour:g}", rule, "", remedy))
    if not callable(step):
        plan = load_plan(step, "simulate")
        varied = (cluster, planner, devices, bandwidth, network, batch, microbatches)
        if any(value is not None and value != () for value in varied):
            rule = "a saved plan is of one step on one cluster, and has nothing to vary"
            remedy = "pass the step and its arguments, with planner=autopar.Manual(plan)"
            raise ArgumentError(explain(f"simulate({type(step).__name__}, ...)", rule, "", remedy))
        simulated = (saved(plan, tokens_per_step, checked_limit(memory_limit)),)
    else:
        check_arguments("simulate", args)
        sweep = _sweep(cluster, planner, devices, bandwidth, network, batch, microbatches)
        example = Example.of(step, tuple(args), dict(kwargs or {}))
        request = Request(memory_limit=checked_limit(memory_limit), cache=cache, tokens_per_step=tokens_per_step)
        simulated = tuple(rows(example, sweep, request))
    return Simulation(rows=simulated, tokens=tokens, price_per_device_hour=price_per_device_hour)


_POSITIVE = ("a number above 0", lambda value: isinstance(value, int | float) and value > 0)
"""The rule of a number, in words and as a predicate."""


def _sweep(
    cluster: Any, planner: Any, devices: Any, bandwidth: Any, network: Any, batch: Any, microbatches: Any
) -> Sweep:
    """The dimensions that are varied, each option checked. Raises ClusterError or ArgumentError."""
    clusters = tuple(read for value in several(cluster) if (read := checked_cluster(value)) is not None)
    if not clusters:
        remedy = "write, say, cluster='8x8:h100'"
        raise ArgumentError(explain("simulate(step, args)", "it does not say for which cluster", "", remedy))
    planners = [checked_planner(value) for value in several(planner) or (None,)]
    options = {"devices": devices, "batch": batch, "microbatches": microbatches}
    whole: dict[str, Any] = {name: tuple(map(plain_integer, several(value))) for name, value in options.items()}
    factors = {"bandwidth": several(bandwidth), "network": several(network)}
    for name, values in whole.items():
        _check(name, values, "a whole number from 1", lambda value: type(value) is int and value >= 1)
    for name, values in factors.items():
        _check(name, values, *_POSITIVE)
    return Sweep(clusters=clusters, planners=_by_name(planners), **whole, **factors)


def _by_name(planners: Sequence[Planner]) -> dict[str, Planner]:
    """The planners by their names, in which a number tells apart those that are called alike."""
    by_name: dict[str, Planner] = {}
    for planner in planners:
        name = named(planner)
        alike = sum(named(other) == name for other in by_name.values())
        by_name[f"{name} ({alike + 1})" if alike else name] = planner
    return by_name


def _check(name: str, values: Sequence[Any], rule: str, is_right: Callable[[Any], bool]) -> None:
    for value in values:
        if not is_right(value):
            raise ArgumentError(explain(f"{name}={value!r:.60}", f"each should be {rule}", "", "write, say, 2"))
