"""The command `autopar fit`: which plans of a step fit in a cluster's memory, and the largest that do."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import jax
from rich.console import Console

from autopar.tools import fit, fit_text, targets
from autopar.tools.command import DIFFERENT, DONE, INTERRUPTED, Command, Output
from autopar.tools.command_options import limit_of, real_number
from autopar.tools.largest import Largest
from autopar.tools.largest import largest as find_largest
from autopar.tools.plot import blank, plot_memory
from autopar.tools.wording import on_command_line
from passes.cluster import parse_cluster

_HELP = """\
Show what fits in the memory of a cluster that need not be here: plain jit on
one device, data parallel, ZeRO, Megatron and the searched plan, each with the
predicted peak of one device by cause; then the largest batch, and of presets
the largest. ZeRO-1 and 2 are one plan: gradients are scattered when summed.

MODULE:FUNCTION returns a step and its arguments: autopar help targets

The batch is tried in multiples of the devices: FUNCTION's step must take any.
With --presets, or where MODULE has a function `presets`, that returns
{name: example}, smallest first, of what FUNCTION returns or functions of it."""

_MORE = """\
Clusters: autopar help clusters.

example:
  autopar fit train:example --cluster 8:a100-80g --memory-limit "40 GiB"

exit status: 0 a plan fits, 1 none does, 2 nothing could be planned,
130 ended by Ctrl-C, after what was found by then is printed."""


def _add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", metavar="MODULE:FUNCTION", help="what should fit")
    command.add_argument("--cluster", required=True, help="hosts x devices of each, and their kind")
    command.add_argument("--memory-limit", metavar="SIZE", help="of one device, as '40 GiB' (default: most of its own)")
    command.add_argument("--presets", metavar="MODULE:FUNCTION", help="sizes of the model to choose from")
    command.add_argument(
        "--seconds",
        type=real_number(may_be_zero=True),
        metavar="S",
        help="that the search may take, and again the largest batch and preset; 0: look for none (default: so much "
        "work, whatever time that takes)",
    )
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw memory over the step (png, svg, pdf)")
    command.add_argument("--json", action="store_true", help="print JSON; seconds and bytes are numbers")


def _run(arguments: argparse.Namespace) -> tuple[Output, int]:
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
            for row in fit.plans(step, setting, status.update):
                rows.append(replace(row, refusal=on_command_line(row.refusal)))
            if arguments.seconds != 0:
                for entry in find_largest(example, step, setting, rows, presets, status.update):
                    largest.append(replace(entry, refusal=on_command_line(entry.refusal)))
        except KeyboardInterrupt:
            note = "Ended by Ctrl-C: rows are missing."
    if arguments.plot and (drawn := {row.name: row.plan for row in rows if row.plan}):
        plot_memory(drawn, arguments.plot, setting.limit_nbytes)
    in_words = fit_text.json_text if arguments.json else fit_text.tables
    answer = DONE if any(row.fits for row in rows) else DIFFERENT
    return in_words(setting, rows, largest, note), INTERRUPTED if note else answer


COMMAND = Command(
    name="fit",
    summary="show what fits in memory",
    description=_HELP,
    more=_MORE,
    add_arguments=_add_arguments,
    run=_run,
)
