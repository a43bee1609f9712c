"""The command line: make a plan without the devices it is for, show one, compare two, measure a cluster."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

from autopar.api import ParallelFunction, parallelize
from autopar.cache import PlanCache
from autopar.errors import DeviceError
from autopar.phases import shown
from autopar.tools import (
    compiled,
    completion_command,
    doctor_command,
    explain_command,
    export_command,
    fit,
    fit_text,
    help_command,
    launch_command,
    measure_command,
    pareto_front,
    report_command,
    simulate_command,
    targets,
)
from autopar.tools.command import Command, check_writable, write
from autopar.tools.command_options import limit_of, planner_of, real_number, whole_number, with_choices
from autopar.tools.largest import Largest
from autopar.tools.largest import largest as find_largest
from autopar.tools.parsing import Once, Parser
from autopar.tools.plot import blank, plot_memory
from autopar.tools.printing import printed
from autopar.tools.targets import UsageError
from passes.cluster import parse_cluster
from passes.errors import PlanningError
from passes.plan import AnyPlan, load_plan
from passes.plan import json as plan_json
from passes.planners import Auto

DONE, DIFFERENT, TROUBLE, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses; 130 is what shells give a program that Ctrl-C ends."""

COMMANDS = (
    *(report_command.COMMAND, explain_command.COMMAND, export_command.COMMAND, measure_command.COMMAND),
    *(launch_command.LAUNCH, launch_command.RUN),
    *(doctor_command.COMMAND, completion_command.COMMAND, help_command.COMMAND),
)
"""The commands that are told by a `Command` each; `parser` adds plan, show, diff, fit, compile and simulate itself."""

_PLAN_HELP = """\
Plan a train step for a cluster that need not be here, and show the plan.

MODULE:FUNCTION returns a step and its arguments: autopar help targets."""

_PLAN_MORE = """\
Who plans, and for what: autopar help planners, autopar help clusters.

example:
  autopar plan train:example --cluster 2x8:a100-80g --out plan.json

Plans are kept in ~/.cache/autopar/plans and found there when the same step is
planned again. Ctrl-C ends the search with the best plan until then, marked so.

exit status: 0 planned, 2 no plan (the reason is on stderr), 130 ended by Ctrl-C
before there was one."""

_SHOW_MORE = """\
example:
  autopar show plan.json --operators

exit status: 0 shown, 2 the plan cannot be read."""

_DIFF_MORE = """\
example:
  autopar diff before.json after.json

exit status: 0 the plans are alike, 1 they differ, 2 one cannot be read."""


_FIT_HELP = """\
Show what fits in the memory of a cluster that need not be here: plain jit on
one device, data parallel, ZeRO, Megatron and the searched plan, each with the
predicted peak of one device by cause; then the largest batch, and of presets
the largest. ZeRO-1 and 2 are one plan: gradients are scattered when summed.

MODULE:FUNCTION returns a step and its arguments: autopar help targets

The batch is tried in multiples of the devices: FUNCTION's step must take any.
With --presets, or where MODULE has a function `presets`, that returns
{name: example}, smallest first, of what FUNCTION returns or functions of it."""

_FIT_MORE = """\
Clusters: autopar help clusters.

example:
  autopar fit train:example --cluster 8:a100-80g --memory-limit "40 GiB"

exit status: 0 a plan fits, 1 none does, 2 nothing could be planned,
130 ended by Ctrl-C, after what was found by then is printed."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of a command line: 0 done, 1 the plans differ, 2 an error, printed on stderr, 130 interrupted.

    An error that nobody expected is 2 as well, with its traceback: 1 is an answer. Where it comes from the user's code,
    as from the step while it is traced, the traceback begins there.
    """
    arguments = parser().parse_args(argv)
    if arguments.command is None:
        parser().print_help(sys.stderr)
        return TROUBLE
    try:
        return arguments.run(arguments)
    except (PlanningError, DeviceError, UsageError) as error:
        _tell("\n".join([f"autopar {arguments.command}: {error}", *getattr(error, "__notes__", ())]))
        return TROUBLE
    except KeyboardInterrupt:
        _tell(f"autopar {arguments.command}: interrupted before there was anything to show")
        return INTERRUPTED
    except Exception as error:
        module = getattr(arguments, "target", None) or ""
        frames = targets.users_frames(error, module.partition(":")[0]) or error.__traceback__
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return TROUBLE


def kept_plans() -> PlanCache:
    """The plans that commands keep, in the user's cache, where there can be one."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return PlanCache(os.path.join(root, "autopar", "plans"))


def _tell(message: str) -> None:
    """Prints a message on stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(message))


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = Parser(
        prog="autopar",
        description="Plan an ordinary JAX train step for many devices.",
        epilog="example:\n  autopar plan train:example --cluster 8:h100 --out plan.json\n"
        "  autopar explain plan.json 'params/*/kernel'\n  autopar report plan.json -o plan.html",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"autopar {plan_json.version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], help: str, description: str, epilog: str):
        raw = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=help, description=description, epilog=epilog, formatter_class=raw)
        command.set_defaults(run=run, parser=parser)
        command.register("action", None, Once)  # of an option without an action of its own
        return command

    plan = add("plan", _plan, "make a plan", _PLAN_HELP, _PLAN_MORE)
    plan.add_argument("target", metavar="MODULE:FUNCTION", help="what to plan")
    plan.add_argument("--cluster", required=True, help="hosts x devices of each, and their kind")
    plan.add_argument("--planner", default="auto", help="who plans (default: auto)")
    plan.add_argument("--out", type=Path, metavar="PATH", help="save the plan here")
    plan.add_argument("--microbatches", type=whole_number(), metavar="N", help="compute the batch in N parts")
    plan.add_argument("--memory-limit", metavar="SIZE", help='of a device, as "12 GiB" (default: its own, less 6 %%)')
    plan.add_argument("--calibration", type=Path, metavar="PATH", help="where reports of measured steps were kept")
    plan.add_argument(
        "--pin", action="append", default=[], metavar="NAME=CUT", help="an array lies so: 'params/*/kernel=[-, x]'"
    )
    plan.add_argument("--mesh", metavar="AXES", help="no other mesh than this: data=4,model=2")
    plan.add_argument("--forbid", metavar="KINDS", help="move nothing by these: all_to_all,all_reduce")
    plan.add_argument(
        "--alternatives", type=whole_number(), default=1, metavar="N", help="and N-1 that need less memory"
    )
    plan.add_argument("--plot", type=Path, metavar="FILE", help="draw time against memory of those (png, svg)")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON, as --out saves it")
    plan.add_argument("--no-cache", action="store_true", help="plan anew, and keep nothing")
    show = add("show", _show, "show a saved plan", "Show a saved plan.", _SHOW_MORE)
    show.add_argument("plan", type=Path, metavar="PLAN", help="a file that `autopar plan --out` wrote")
    show.add_argument("--operators", action="store_true", help="every operator, and every line that communicates")
    show.add_argument("--json", action="store_true", help="print the plan as JSON")
    show.add_argument("--trace", type=Path, metavar="PATH", help="save a pipeline's timeline for Perfetto here")
    show.add_argument("--plot", type=Path, metavar="FILE", help="draw one device's memory over the step (png, svg)")
    diff = add("diff", _diff, "compare two plans", "Show what changes from plan A to plan B.", _DIFF_MORE)
    diff.add_argument("before", type=Path, metavar="A", help="a saved plan")
    diff.add_argument("after", type=Path, metavar="B", help="another")
    diff.add_argument(
        "--json", action="store_true", help="print the differences as JSON; seconds and bytes are numbers"
    )
    _add_fit(add)
    for command in COMMANDS:
        command.add_arguments(
            add(command.name, partial(_carry_out, command), command.summary, command.description, command.more)
        )
    _add_compile(add)
    simulated = add("simulate", _simulate, "show what if", simulate_command.HELP, simulate_command.MORE)
    simulate_command.add_arguments(simulated)
    return parser


def _carry_out(command: Command, arguments: argparse.Namespace) -> int:
    output, status = command.run(arguments)
    printed(output)
    return status


def _add_fit(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the arguments of `fit`."""
    fits = add("fit", _fit, "show what fits in memory", _FIT_HELP, _FIT_MORE)
    fits.add_argument("target", metavar="MODULE:FUNCTION", help="what should fit")
    fits.add_argument("--cluster", required=True, help="hosts x devices of each, and their kind")
    fits.add_argument("--memory-limit", metavar="SIZE", help="of one device, as '40 GiB' (default: its own less 6 %%)")
    fits.add_argument("--presets", metavar="MODULE:FUNCTION", help="sizes of the model to choose from")
    fits.add_argument(
        "--seconds",
        type=real_number(may_be_zero=True),
        metavar="S",
        help="that the search may take, and again the largest batch and preset; 0: look for none (default: so much "
        "work, whatever time that takes)",
    )
    fits.add_argument("--plot", type=Path, metavar="FILE", help="draw memory over the step (png, svg)")
    fits.add_argument("--json", action="store_true", help="print JSON; seconds and bytes are numbers")


def _add_compile(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the arguments of `compile`."""
    command = add("compile", _compile, "compile for an accelerator that is not here", compiled.HELP, compiled.MORE)
    command.add_argument("target", metavar="MODULE:FUNCTION", help="what to compile")
    command.add_argument("--cluster", required=True, help="hosts x devices of each, and their kind")
    command.add_argument("--planner", default="auto", help="who plans (default: auto)")
    command.add_argument("--microbatches", type=whole_number(), metavar="N", help="compute the batch in N parts")
    command.add_argument("--memory-limit", metavar="SIZE", help="of one device, as '40 GiB' (default: all of it)")
    command.add_argument("--json", action="store_true", help="print JSON; bytes are numbers")


def _compile(arguments: argparse.Namespace) -> int:
    cluster = parse_cluster(arguments.cluster)
    planner = planner_of(arguments.planner)
    jax.config.update("jax_platforms", "cpu")
    options: dict[str, Any] = {
        "planner": planner,
        "microbatches": arguments.microbatches,
        "memory_limit": limit_of(arguments.memory_limit),
        "cache": kept_plans(),
        "progress": False,  # there is a status
    }
    with Console(stderr=True, highlight=False).status("tracing") as status:
        judgement = compiled.judge(*targets.example(arguments.target), cluster, options, status.update)
    printed(json.dumps(judgement.to_json(), indent=1) if arguments.json else judgement.tables())
    return DONE if judgement.fits else DIFFERENT


def _plan(arguments: argparse.Namespace) -> int:
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
        _tell(f"autopar {arguments.command}: interrupted; this is the best plan until then")
    for number, each in enumerate(plans if arguments.out else (), 1):
        out = arguments.out if number == 1 else arguments.out.with_stem(f"{arguments.out.stem}-{number}")
        plan_json.write(out, each.to_json() | {"target": arguments.target})
    if arguments.plot:
        pareto_front.plot(plans, arguments.plot)
    more = (pareto_front.table(plans),) if arguments.alternatives > 1 else ()
    printed(plan_json.text(plan.to_json()) if arguments.json else (*plan.tables(), *more))
    return DONE


def _simulate(arguments: argparse.Namespace) -> int:
    with Console(stderr=True, highlight=False).status("tracing") as status:
        output, is_partial = simulate_command.run(arguments, kept_plans(), status.update)
    printed(output)
    return INTERRUPTED if is_partial else DONE


def _show(arguments: argparse.Namespace) -> int:
    plan = load_plan(arguments.plan)
    if arguments.trace:
        check_writable(arguments.trace, "the trace", arguments.plan)
        _save_trace(plan, arguments.trace)
    if arguments.plot:
        _plot(plan, arguments.plot)
    printed(plan_json.text(plan.to_json()) if arguments.json else plan.tables(operators=arguments.operators))
    return DONE


def _plot(plan: AnyPlan, path: Path) -> None:
    """Draws a plan's memory; of a pipeline, that of each stage for one microbatch."""
    plot_memory({program.planner: program for program in plan.programs}, path, Auto().limit(plan.cluster))


def _fit(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        blank(arguments.plot)  # what is wrong with it is better known before than after all the planning
    jax.config.update("jax_platforms", "cpu")
    cluster = parse_cluster(arguments.cluster)
    limit = limit_of(arguments.memory_limit)
    setting = fit.Room(cluster=cluster, memory_limit=limit, seconds=arguments.seconds or None)
    rows: list[fit.Row] = []
    largest: list[Largest] = []
    note = ""
    with Console(stderr=True, highlight=False).status("tracing") as status:
        try:
            example = fit.Example.of(*targets.example(arguments.target))
            presets = targets.presets(arguments.target, arguments.presets)
            step = fit.traced_step(example, cluster=cluster)
            rows.extend(fit.plans(step, setting, status.update))
            if arguments.seconds != 0:
                largest.extend(find_largest(example, step, setting, rows, presets, status.update))
        except KeyboardInterrupt:
            note = "Ended by Ctrl-C: rows are missing."
    if arguments.plot:
        plot_memory({row.name: row.plan for row in rows if row.plan}, arguments.plot, setting.limit_nbytes)
    printed(
        fit_text.json_text(setting, rows, largest, note)
        if arguments.json
        else fit_text.tables(setting, rows, largest, note)
    )
    return INTERRUPTED if note else DONE if any(row.fits for row in rows) else DIFFERENT


def _save_trace(plan: AnyPlan, path: Path) -> None:
    """Writes a pipeline's predicted timeline as a Chrome trace. Raises UsageError where there is none."""
    if plan.timeline is None:
        raise UsageError("--trace: only a pipeline has a timeline; plan one with --planner pipeline:4x8")
    write(path, json.dumps(plan.timeline.to_trace()) + "\n", "the trace")


def _diff(arguments: argparse.Namespace) -> int:
    difference = load_plan(arguments.before).diff(load_plan(arguments.after))
    printed(json.dumps(difference.to_json(), indent=2) if arguments.json else difference.tables() or str(difference))
    return DONE if difference.is_empty else DIFFERENT


if __name__ == "__main__":
    sys.exit(main())
