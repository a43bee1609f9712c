"""The command `autopar show`: a saved plan as tables, a timeline or a picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from autopar.tools.command import DONE, Command, Output, check_writable, write
from autopar.tools.plot import plot_memory
from autopar.tools.targets import UsageError
from passes.plan import AnyPlan, load_plan
from passes.plan import json as plan_json
from passes.planners import Auto

_MORE = """\
example:
  autopar show plan.json --operators

exit status: 0 shown, 2 the plan cannot be read."""


def _add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("plan", type=Path, metavar="PLAN", help="a file that `autopar plan --out` wrote")
    command.add_argument("--operators", action="store_true", help="every operator, and every line that communicates")
    command.add_argument("--json", action="store_true", help="print the plan as JSON")
    command.add_argument("--trace", type=Path, metavar="PATH", help="save a pipeline's timeline for Perfetto here")
    command.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw one device's memory over the step (png, svg, pdf)"
    )


def _run(arguments: argparse.Namespace) -> tuple[Output, int]:
    plan = load_plan(arguments.plan)
    if arguments.trace:
        check_writable(arguments.trace, "the trace", arguments.plan)
        _save_trace(plan, arguments.trace)
    if arguments.plot:
        _plot(plan, arguments.plot)
    return plan_json.text(plan.to_json()) if arguments.json else plan.tables(operators=arguments.operators), DONE


def _plot(plan: AnyPlan, path: Path) -> None:
    """Draws a plan's memory; of a pipeline, that of each stage for one microbatch."""
    plot_memory({program.planner: program for program in plan.programs}, path, Auto().limit(plan.cluster))


def _save_trace(plan: AnyPlan, path: Path) -> None:
    """Writes a pipeline's predicted timeline as a Chrome trace. Raises UsageError where there is none."""
    if plan.timeline is None:
        raise UsageError("--trace: only a pipeline has a timeline; plan one with --planner pipeline:4x8")
    write(path, json.dumps(plan.timeline.to_trace()) + "\n", "the trace")


COMMAND = Command(
    name="show",
    summary="show a saved plan",
    description="Show a saved plan.",
    more=_MORE,
    add_arguments=_add_arguments,
    run=_run,
)
