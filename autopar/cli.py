"""The command line: make a plan without the devices it is for, look at one, compare two, measure what is here."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from autopar.api import ParallelFunction, parallelize
from autopar.measure import measure
from passes import plan_json, quantities
from passes.by_hand import DataParallel, Manual, Megatron, Pipeline, Zero
from passes.cluster import Cluster
from passes.devices import known
from passes.errors import PlanningError
from passes.pipeline import PipelinePlan, load_plan
from passes.plan import Plan
from passes.planner import Auto, Planner
from passes.tables import Column, Table

DONE, DIFFERENT, TROUBLE = 0, 1, 2

_TARGET = """\
FUNCTION takes no arguments and returns (step, args) or (step, args, kwargs):
step is the train step, plain or under @autopar.parallelize; args are what it
is called with, arrays or jax.ShapeDtypeStructs: only shapes and dtypes count.

  # train.py
  def example():
      state = jax.eval_shape(make_state)
      batch = jax.ShapeDtypeStruct((64, 1024), "int32")
      return train_step, (state, batch)

MODULE is imported from the current folder, on the CPU."""

_PLANNERS = """\
planners:
  auto                  the cheapest placements that the solver finds (default)
  stages                the same, in stages of a pipeline where that is cheaper
  dp                    data parallel: the batch over all devices
  zero3                 ZeRO stage 3: cuts parameters and optimizer state too;
                        zero1 and zero2 cut the optimizer state alone
  megatron:DATAxTENSOR  the batch over DATA devices, weights over TENSOR
  pipeline:STAGESxN     STAGES on submeshes, N microbatches one forward, one
                        backward (1F1B); gpipe:STAGESxN all forwards first
  manual:PATH           the saved plan in PATH, checked against the function"""

_PLAN_HELP = f"""\
Plan a train step for a cluster that need not be here, and show the plan.

{_TARGET}"""

_CLUSTERS = f"""\
clusters:
  8:h100                one host of 8 devices
  2x8:a100-80g          two hosts of 8
  PATH                  a JSON file
  kinds: {textwrap.fill(", ".join(known()), 70, subsequent_indent=" " * 9)}"""

_PLAN_MORE = f"""\
{_CLUSTERS}

{_PLANNERS}

example:
  autopar plan train:example --cluster 2x8:a100-80g --out plan.json

exit status: 0 planned, 2 no plan (the reason is on stderr)."""

_SHOW_MORE = """\
example:
  autopar show plan.json --operators

exit status: 0 shown, 2 the plan cannot be read."""

_DIFF_MORE = """\
example:
  autopar diff before.json after.json

exit status: 0 the plans are alike, 1 they differ, 2 one cannot be read."""


_MEASURE_MORE = """\
example:
  autopar measure --devices 8 --out here.json
  autopar plan train:example --cluster here.json

exit status: 0 measured, 2 not measured or not saved."""


class UsageError(Exception):
    """A command that cannot be carried out as written; the message says what to write."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of a command line: 0 done, 1 the plans differ, 2 trouble, told on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (PlanningError, UsageError) as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(Text(f"autopar {arguments.command}: {error}"))
        return TROUBLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autopar", description="Plan an ordinary JAX train step for many devices.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], help: str, description: str, epilog: str):
        raw = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=help, description=description, epilog=epilog, formatter_class=raw)
        command.set_defaults(run=run)
        return command

    plan = add("plan", _plan, "make a plan", _PLAN_HELP, _PLAN_MORE)
    plan.add_argument("target", metavar="MODULE:FUNCTION", help="what to plan; see above")
    plan.add_argument("--cluster", required=True, help="hosts x devices of each, and their kind; see below")
    plan.add_argument("--planner", default="auto", help="who plans; see below")
    plan.add_argument("--out", type=Path, metavar="PATH", help="save the plan here")
    plan.add_argument("--microbatches", type=int, metavar="N", help="compute the batch in N parts")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON, as --out saves it")
    show = add("show", _show, "show a saved plan", "Show a saved plan.", _SHOW_MORE)
    show.add_argument("plan", type=Path, metavar="PLAN", help="a file that `autopar plan --out` wrote")
    show.add_argument("--operators", action="store_true", help="every operator, and every line that communicates")
    show.add_argument("--json", action="store_true", help="print the plan as JSON")
    show.add_argument("--trace", type=Path, metavar="PATH", help="save a pipeline's timeline for Perfetto here")
    diff = add("diff", _diff, "compare two plans", "Show what changes from plan A to plan B.", _DIFF_MORE)
    diff.add_argument("before", type=Path, metavar="A", help="a saved plan")
    diff.add_argument("after", type=Path, metavar="B", help="another")
    diff.add_argument(
        "--json", action="store_true", help="print the differences as JSON; seconds and bytes are numbers"
    )
    measured = add(
        "measure",
        _measure,
        "measure the devices here",
        "Time products, copies and collectives on the devices that are here, and save them as a cluster to plan for.",
        _MEASURE_MORE,
    )
    measured.add_argument("--devices", type=int, metavar="N", help="this many virtual CPU devices (default: JAX's own)")
    measured.add_argument("--out", type=Path, required=True, metavar="PATH", help="save the cluster here, as JSON")
    return parser


def _measure(arguments: argparse.Namespace) -> int:
    if arguments.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.devices)
    console = Console(stderr=True, highlight=False)
    with console.status("measuring") as status:
        cluster = measure(said=lambda what: status.update(f"measuring {what}"))
    try:
        arguments.out.write_text(json.dumps(cluster.to_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{arguments.out}: the cluster cannot be written: {error.strerror}") from error
    _print([cluster_table(cluster)])
    return DONE


def cluster_table(cluster: Cluster) -> Table:
    """What was measured, one row a number."""
    group = cluster.group()
    rates = (
        (f"{dtype} products", f"{rate / 1e9:,.3g} Gflop/s") for dtype, rate in group.device.flops_per_second.items()
    )
    rows = [*rates, ("memory", f"{group.device.memory_bytes_per_second / 1e9:,.3g} GB/s")]
    rows.append(("one operator at least", quantities.seconds(group.device.launch_seconds)))
    rows += [
        (f"{m.kind} among {m.ranks}", f"{quantities.seconds(m.alpha_seconds)} + {m.bytes_per_second / 1e9:,.3g} GB/s")
        for m in group.measured
    ]
    return Table(
        title=f"{cluster.name}: each of {quantities.count(cluster.n_devices, 'device')}, all at work",
        columns=(Column(heading=""), Column(heading="", right=True)),
        rows=tuple(rows),
    )


def _plan(arguments: argparse.Namespace) -> int:
    planner = _planner(arguments.planner)
    jax.config.update("jax_platforms", "cpu")
    step, args, kwargs = _example(arguments.target)
    if isinstance(step, ParallelFunction):
        step = step.replan(cluster=arguments.cluster, planner=planner, microbatches=arguments.microbatches)
    else:
        step = parallelize(step, cluster=arguments.cluster, planner=planner, microbatches=arguments.microbatches)
    plan = step.plan(*args, **kwargs)
    if arguments.out:
        plan.save(arguments.out)
    _print(plan_json.text(plan.to_json()) if arguments.json else plan.tables())
    return DONE


def _show(arguments: argparse.Namespace) -> int:
    plan = load_plan(arguments.plan)
    if arguments.trace:
        _save_trace(plan, arguments.trace)
    _print(plan_json.text(plan.to_json()) if arguments.json else plan.tables(operators=arguments.operators))
    return DONE


def _save_trace(plan: Plan | PipelinePlan, path: Path) -> None:
    """Writes a pipeline's predicted timeline as a Chrome trace. Raises UsageError where there is none."""
    if not isinstance(plan, PipelinePlan):
        raise UsageError("--trace: only a pipeline has a timeline; plan one with --planner pipeline:4x8")
    try:
        path.write_text(json.dumps(plan.timeline.to_trace()) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: the trace cannot be written: {error.strerror}") from error


def _diff(arguments: argparse.Namespace) -> int:
    found = Plan.load(arguments.before).diff(Plan.load(arguments.after))
    _print(json.dumps(found.to_json(), indent=2) if arguments.json else found.tables() or str(found))
    return DONE if found.is_empty else DIFFERENT


def _planner(written: str) -> Planner:
    """The planner that `--planner` names. Raises UsageError for a name that is none."""
    name, _, option = written.partition(":")
    match name, option:
        case "auto", "":
            return Auto()
        case "stages", "":
            return Auto(pipeline=True)
        case "dp", "":
            return DataParallel()
        case "zero1" | "zero2" | "zero3", "":
            return Zero(int(name[-1]))
        case "megatron", sizes:
            data, _, tensor = sizes.partition("x")
            if data.isdecimal() and tensor.isdecimal():
                return Megatron(data=int(data), tensor=int(tensor))
        case "pipeline" | "gpipe", sizes:
            stages, _, microbatches = sizes.partition("x")
            if stages.isdecimal() and microbatches.isdecimal():
                schedule = "gpipe" if name == "gpipe" else "1f1b"
                return Pipeline(stages=int(stages), microbatches=int(microbatches), schedule=schedule)
        case "manual", path if path:
            return Manual(path)
    raise UsageError(f"--planner {written!r} is not a planner\n{_PLANNERS}")


def _example(target: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The step and its arguments that `MODULE:FUNCTION` returns. Raises UsageError where it does not."""
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise UsageError(f"{target!r} is not MODULE:FUNCTION\n{_TARGET}")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A missing module inside the user's own module is theirs to see, with its traceback.
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"there is no module {error.name!r} here ({os.getcwd()}) or among those installed") from error
    if not callable(function := getattr(module, name, None)):
        raise UsageError(f"{module_name} ({module.__file__}) has no function {name!r}")
    match function():
        case (step, tuple() | list() as args) if callable(step):
            return step, tuple(args), {}
        case (step, tuple() | list() as args, dict(kwargs)) if callable(step):
            return step, tuple(args), kwargs
        case other:
            raise UsageError(f"{target} returned {type(other).__name__}, not a step and its arguments\n{_TARGET}")


def _print(found: str | Sequence[Table]) -> None:
    """Prints text as it is and tables as rich tables."""
    if isinstance(found, str):
        print(found.rstrip())
        return
    console = Console(highlight=False)
    for table in found:
        console.print(Text(table.title, style="bold"))
        if table.rows:
            console.print(_rich(table.fitted(console.width)))
        console.print(Text(f"{table.note}\n" if table.note else ""))


def _rich(table: Table) -> RichTable:
    drawn = RichTable(box=box.SIMPLE_HEAD, show_header=table.is_headed, show_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns:
        drawn.add_column(Text(column.heading), justify="right" if column.right else "left", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn


if __name__ == "__main__":
    sys.exit(main())
