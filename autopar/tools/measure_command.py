"""`autopar measure`: the devices that are here, timed, as a cluster to plan for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
from rich.console import Console

from autopar.tools import measurement_text
from autopar.tools.command import DONE, Command, Output, check_writable, write
from autopar.tools.command_options import whole_number
from autopar.tools.compiler_measurement import compiler_measurement, target_cluster
from autopar.tools.measurement import measurement
from autopar.tools.plot import blank
from autopar.tools.targets import UsageError

_HELP = """\
Time products of many shapes and dtypes, copies, the start of a task,
collectives by kind, ranks and bytes, how far a collective hides behind
products, and small training steps, on the devices that are here, in one to two
minutes; save them as a cluster to plan for, and show what it predicts beside
what was measured.

With --compiler, products and copies are not run but compiled for devices that
need not be here, and their compiler's estimates taken; links stay the table's."""

_MORE = """\
example:
  autopar measure --devices 8 --out here.json
  autopar plan train:example --cluster here.json
  autopar measure --compiler tpu:v5e:2x4 --out v5e.json

exit status: 0 measured, 2 not measured or not saved."""


_MOST_DEVICES = 4096
"""Virtual devices of one process: each takes memory and threads, and a hundred million end it."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices",
        type=whole_number(1, _MOST_DEVICES),
        metavar="N",
        help="this many virtual CPU devices (default: JAX's own)",
    )
    parser.add_argument("--compiler", metavar="TARGET", help="tpu:v5e:2x4, gpu:h100 or a cluster: nothing is run")
    parser.add_argument("--out", type=Path, required=True, metavar="PATH", help="save the cluster here, as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw predicted over measured (png, svg, pdf)")


def _run(arguments: argparse.Namespace) -> tuple[Output, int]:
    if arguments.plot:
        blank(arguments.plot)
    check_writable(arguments.out, "the cluster")
    if arguments.compiler:
        return _compiled(arguments), DONE
    if arguments.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.devices)
    with Console(stderr=True, highlight=False).status("measuring") as status:
        result = measurement(announce=lambda what: status.update(f"measuring {what}"))
    write(arguments.out, json.dumps(result.cluster.to_json(), indent=1) + "\n", "the cluster")
    if arguments.plot:
        measurement_text.plot_measurement(result.samples, arguments.plot)
    return measurement_text.tables(result), DONE


def _compiled(arguments: argparse.Namespace) -> Output:
    """The tables of what the compiler of a target estimates; the cluster is saved. Raises UsageError with --devices."""
    if arguments.devices:
        raise UsageError("--devices are of this machine, and --compiler needs none: leave one out")
    preset = target_cluster(arguments.compiler)
    jax.config.update("jax_platforms", "cpu")
    with Console(stderr=True, highlight=False).status("compiling") as status:
        result = compiler_measurement(preset, announce=lambda what: status.update(f"compiling {what}"))
    write(arguments.out, json.dumps(result.cluster.to_json(), indent=1) + "\n", "the cluster")
    if arguments.plot:
        measurement_text.plot_measurement(result.samples, arguments.plot, "compiler's")
    return measurement_text.compiler_tables(result)


COMMAND = Command(
    name="measure",
    summary="measure the devices here",
    description=_HELP,
    more=_MORE,
    add_arguments=_add_arguments,
    run=_run,
)
