"""The command `autopar simulate`: its options, and the sweep that they describe."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from autopar.tools import targets
from autopar.tools.command import DONE, INTERRUPTED, Command, Output, kept_plans
from autopar.tools.command_options import limit_of, numbers_of, planner_of, real_number
from autopar.tools.fit import Example
from autopar.tools.plot import blank
from autopar.tools.simulation import Request, Row, Sweep, rows, saved
from autopar.tools.targets import UsageError
from autopar.tools.what_if import Simulation
from autopar.tools.wording import on_command_line
from passes.cluster import parse_cluster
from passes.errors import explain
from passes.plan import load_plan

_HELP = """\
Show what a train step would take on clusters that need not be here: the step,
model flops per second and their share of the peak (MFU), the pipeline's bubble,
exposed communication, memory, days and cost. Options that list several values
with commas, or are given several times, are swept: every combination is a row.

MODULE:FUNCTION returns a step and its arguments: autopar help targets.
It may be a saved plan instead (PATH.json), which is shown as it is."""

_MORE = """\
Who plans, and for what: autopar help planners, autopar help clusters.

example:
  autopar simulate train:example --cluster 8x8:h100 --planner zero3 \\
      --devices 8,16,64 --tokens 300e9 --price-per-device-hour 2.5

exit status: 0 a row has a plan, 2 none has, or an option cannot be read,
130 ended by Ctrl-C, after the rows planned by then are printed."""


def _add_arguments(command: argparse.ArgumentParser) -> None:
    varied = partial(command.add_argument, action="append", default=[])
    command.add_argument("target", metavar="TARGET", help="MODULE:FUNCTION, or a saved plan")
    varied("--cluster", help="hosts x devices of each, and their kind")
    varied("--planner", help="who plans (default: auto)")
    varied("--devices", metavar="N,N", help="so many of the cluster's devices, whole hosts or a part")
    varied("--bandwidth", metavar="X,X", help="every link gives X times its bytes per second")
    varied("--network", metavar="X,X", help="links between hosts give X times theirs, beside that")
    varied("--batch", metavar="N,N", help="rows of the batch")
    varied("--microbatches", metavar="N,N", help="compute the batch in N parts")
    command.add_argument("--memory-limit", metavar="SIZE", help='of a device, as "12 GiB" (default: most of its own)')
    command.add_argument("--tokens", type=real_number(), metavar="N", help="of the whole training: days that it takes")
    command.add_argument("--tokens-per-step", type=real_number(), metavar="N", help="(default: the batch's integers)")
    command.add_argument(
        "--price-per-device-hour", type=real_number(), metavar="P", help="with --tokens: what it costs"
    )
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw the sweep (png, svg, pdf)")
    command.add_argument("--json", action="store_true", help="print JSON: seconds, bytes and flops are numbers")
    command.add_argument("--no-cache", action="store_true", help="plan anew, and keep nothing")


def _run(arguments: argparse.Namespace) -> tuple[Output, int]:
    with Console(stderr=True, highlight=False).status("tracing") as status:
        output, is_partial = _simulated(arguments, status.update)
    return output, INTERRUPTED if is_partial else DONE


def _simulated(arguments: argparse.Namespace, progress: Callable[[str], None]) -> tuple[Output, bool]:
    """(what to print, whether it was ended early). Raises UsageError or PlanningError for what cannot be simulated."""
    if arguments.plot:
        blank(arguments.plot)
    _check_price(arguments)
    simulated: list[Row] = []
    note = ""
    if Path(arguments.target).suffix == ".json":
        simulated.append(_saved(arguments))
    else:
        sweep = _sweep(arguments)
        jax.config.update("jax_platforms", "cpu")
        example = Example.of(*targets.example(arguments.target))
        request = Request(
            memory_limit=limit_of(arguments.memory_limit),
            cache=None if arguments.no_cache else kept_plans(),
            tokens_per_step=arguments.tokens_per_step,
        )
        try:
            for row in rows(example, sweep, request, progress):
                simulated.append(replace(row, refusal=on_command_line(row.refusal)))
        except KeyboardInterrupt:
            note = "Ended by Ctrl-C: rows are missing."
    if simulated and simulated[-1].is_interrupted:
        note = "Ended by Ctrl-C: the last row has the best plan until then, and more are missing."
    if not simulated:
        raise KeyboardInterrupt
    if not any(row.estimate for row in simulated):
        raise UsageError(simulated[0].refusal)
    result = Simulation(
        rows=tuple(simulated), tokens=arguments.tokens, price_per_device_hour=arguments.price_per_device_hour
    )
    if arguments.plot:
        result.plot(arguments.plot)
    return json.dumps(result.to_json(), indent=1) if arguments.json else result.tables(note), bool(note)


def _check_price(arguments: argparse.Namespace) -> None:
    """Raises UsageError for a price without tokens."""
    if arguments.price_per_device_hour is not None and arguments.tokens is None:
        remedy = "add, say, --tokens 300e9"
        raise UsageError(explain("--price-per-device-hour", "it is the price of a training of --tokens", "", remedy))


SWEPT = ("cluster", "planner", "devices", "bandwidth", "network", "batch", "microbatches")


def _saved(arguments: argparse.Namespace) -> Row:
    """The row of a saved plan. Raises UsageError where something is to be varied."""
    for name in SWEPT:
        if getattr(arguments, name):
            rule = "a saved plan is of one step on one cluster, and is shown as it is"
            others = "" if name == "planner" else f" --planner manual:{arguments.target}"
            remedy = f"name the step: autopar simulate MODULE:FUNCTION{others} --{name} ..."
            raise UsageError(explain(f"--{name} with {arguments.target}", rule, "", remedy))
    return saved(load_plan(arguments.target), arguments.tokens_per_step, limit_of(arguments.memory_limit))


def _sweep(arguments: argparse.Namespace) -> Sweep:
    """The sweep that the options describe. Raises UsageError or ClusterError."""
    if not arguments.cluster:
        raise UsageError(explain("--cluster", "a step is simulated on one", "", "write, say, --cluster 8x8:h100"))
    numbers: dict[str, Any] = {
        name: numbers_of(f"--{name}", getattr(arguments, name), whole=name not in ("bandwidth", "network"))
        for name in SWEPT[2:]
    }
    return Sweep(
        clusters=tuple(map(parse_cluster, arguments.cluster)),
        planners={name: planner_of(name) for name in arguments.planner or ["auto"]},
        **numbers,
    )


COMMAND = Command(
    name="simulate",
    summary="show what if",
    description=_HELP,
    more=_MORE,
    add_arguments=_add_arguments,
    run=_run,
)
