"""The command `autopar compile`: a step compiled by an accelerator's own compiler, without the accelerator."""

from __future__ import annotations

import argparse
import json
from typing import Any

import jax
from rich.console import Console

from autopar.tools import compiled, targets
from autopar.tools.command import DIFFERENT, DONE, Command, Output, kept_plans
from autopar.tools.command_options import limit_of, planner_of, whole_number
from passes.cluster import parse_cluster

_HELP = """\
Compile a train step with an accelerator's own compiler, which runs on the CPU:
does it compile there, and fit? Shows predicted beside compiled memory, bytes
that devices send each other, and flops. Nothing is run.

MODULE:FUNCTION returns a step and its arguments: autopar help targets."""

_MORE = """\
Who plans, and for what: autopar help planners, autopar help clusters.

The compilers are extras: pip install 'autopar[gpu-compiler]' for NVIDIA's GPUs,
'autopar[tpu-compiler]' for TPUs. A TPU's takes a minute for a few layers.

example:
  autopar compile train:example --cluster 8:h100 --planner zero3

exit status: 0 it fits, 1 it does not, 2 it could not be planned or compiled."""


def _add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", metavar="MODULE:FUNCTION", help="what to compile")
    command.add_argument("--cluster", required=True, help="hosts x devices of each, and their kind")
    command.add_argument("--planner", default="auto", help="who plans (default: auto)")
    command.add_argument("--microbatches", type=whole_number(), metavar="N", help="compute the batch in N parts")
    command.add_argument("--memory-limit", metavar="SIZE", help="of one device, as '40 GiB' (default: all of it)")
    command.add_argument("--json", action="store_true", help="print JSON; bytes are numbers")


def _run(arguments: argparse.Namespace) -> tuple[Output, int]:
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
    output = json.dumps(judgement.to_json(), indent=1) if arguments.json else judgement.tables()
    return output, DONE if judgement.fits else DIFFERENT


COMMAND = Command(
    name="compile",
    summary="compile for an accelerator that is not here",
    description=_HELP,
    more=_MORE,
    add_arguments=_add_arguments,
    run=_run,
)
