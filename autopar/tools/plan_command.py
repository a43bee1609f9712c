"""The command `autopar plan`: a plan of a step for a cluster that need not be here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from autopar.api import ParallelFunction, parallelize
from autopar.phases import shown
from autopar.tools import pareto_front, targets
from autopar.tools.command import DONE, Command, Output, check_writable, kept_plans
from autopar.tools.command_options import limit_of, planner_of, whole_number, with_choices
from autopar.tools.plot import blank
from autopar.tools.printing import tell
from passes.cluster import parse_cluster
from passes.plan import json as plan_json

_HELP = """\
Plan a train step for a cluster that need not be here, and show the plan.

MODULE:FUNCTION returns a step and its arguments: autopar help targets."""

_MORE = """\
Who plans, and for what: autopar help planners, autopar help clusters.

example:
  autopar plan train:example --cluster 2x8:a100-80g --out plan.json

Plans are kept in ~/.cache/autopar/plans and found there when the same step is
planned again. Ctrl-C ends the search with the best plan until then, marked so.

exit status: 0 planned, 2 no plan (the reason is on stderr), 130 ended by Ctrl-C
before there was one."""


def _add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", metavar="MODULE:FUNCTION", help="what to plan")
    command.add_argument("--cluster", required=True, help="hosts x devices of each, and their kind")
    command.add_argument("--planner", default="auto", help="who plans (default: auto)")
    command.add_argument("--out", type=Path, metavar="PATH", help="save the plan here")
    command.add_argument("--microbatches", type=whole_number(), metavar="N", help="compute the batch in N parts")
    command.add_argument("--memory-limit", metavar="SIZE", help='of a device, as "12 GiB" (default: most of its own)')
    command.add_argument("--calibration", type=Path, metavar="PATH", help="where reports of measured steps were kept")
    command.add_argument(
        "--pin", action="append", default=[], metavar="NAME=CUT", help="an array lies so: 'params/*/kernel=[-, x]'"
    )
    command.add_argument("--mesh", metavar="AXES", help="no other mesh than this: data=4,model=2")
    command.add_argument("--forbid", metavar="KINDS", help="move nothing by these: all_to_all,all_reduce")
    command.add_argument(
        "--alternatives", type=whole_number(), default=1, metavar="N", help="and N-1 that need less memory"
    )
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw time against memory of those (png, svg, pdf)")
    command.add_argument("--json", action="store_true", help="print the plan as JSON, as --out saves it")
    command.add_argument("--no-cache", action="store_true", help="plan anew, and keep nothing")


def _run(arguments: argparse.Namespace) -> tuple[Output, int]:
    planner = with_choices(planner_of(arguments.planner), arguments.pin, arguments.mesh, arguments.forbid)
    cluster = parse_cluster(arguments.cluster)
    if arguments.plot:
        blank(arguments.plot)
    if arguments.out:
        check_writable(arguments.out, "the plan", arguments.cluster, arguments.calibration)
    jax.config.update("jax_platforms", "cpu")
    step, args, kwargs = targets.example(arguments.target)
    with shown(Console(stderr=True, quiet=arguments.json)) as bar:
        options: dict[str, Any] = {
            "cluster": cluster,
            "planner": planner,
            "microbatches": arguments.microbatches,
            "memory_limit": limit_of(arguments.memory_limit),
            "cache": False if arguments.no_cache else kept_plans(),
            "calibration": arguments.calibration,
            "progress": bar.report,
        }
        step = step.replan(**options) if isinstance(step, ParallelFunction) else parallelize(step, **options)
        plans = pareto_front.front(step, args, kwargs, arguments.alternatives)
    plan = plans[0]
    if any(each.is_interrupted for each in plans):
        tell(f"autopar {arguments.command}: interrupted; this is the best plan until then")
    for number, each in enumerate(plans if arguments.out else (), 1):
        out = arguments.out if number == 1 else arguments.out.with_stem(f"{arguments.out.stem}-{number}")
        plan_json.write(out, each.to_json() | {"target": arguments.target})
    if arguments.plot:
        pareto_front.plot(plans, arguments.plot)
    more = (pareto_front.table(plans),) if arguments.alternatives > 1 else ()
    return plan_json.text(plan.to_json()) if arguments.json else (*plan.tables(), *more), DONE


COMMAND = Command(
    name="plan", summary="make a plan", description=_HELP, more=_MORE, add_arguments=_add_arguments, run=_run
)
