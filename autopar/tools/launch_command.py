"""`autopar launch` and `autopar run`: a script in several processes of this machine."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from autopar.distributed import LOST_SECONDS
from autopar.errors import check_folder
from autopar.tools import launch, supervision
from autopar.tools.command import Command, Output
from autopar.tools.command_options import real_number, whole_number


def _add_launch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=whole_number(), required=True, metavar="N", help="so many processes")
    devices = "virtual CPU devices of each (default: an accelerator each, or JAX's own devices)"
    parser.add_argument("--devices-per-process", type=whole_number(), metavar="K", help=devices)
    parser.add_argument("--bind-cores", action="store_true", help="give each process cores of its own")
    parser.add_argument("script", type=Path, help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what the script is called with")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", type=Path, required=True, metavar="DIR", help="the folder of the checkpoints")
    parser.add_argument("--elastic", action="store_true", help="go on with the processes that have not failed")
    times = f"start again N times at most (default: {supervision.RESTARTS})"
    parser.add_argument("--restarts", type=whole_number(0), default=supervision.RESTARTS, metavar="N", help=times)
    lost = f"a process without a sign of life for S seconds is gone (default: {LOST_SECONDS:.0f})"
    parser.add_argument("--lost-seconds", type=real_number(), default=LOST_SECONDS, metavar="S", help=lost)
    _add_launch(parser)


def _launched(arguments: argparse.Namespace) -> launch.Launch:
    return launch.Launch(
        processes=arguments.processes,
        script=arguments.script,
        arguments=arguments.arguments,
        environment=os.environ,
        devices=arguments.devices_per_process,
        bind_cores=arguments.bind_cores,
    )


def _launch(arguments: argparse.Namespace) -> tuple[Output, int]:
    return "", _launched(arguments).run(sys.stdout, sys.stderr).status


def _run(arguments: argparse.Namespace) -> tuple[Output, int]:
    check_folder(f"--resume {arguments.resume}", arguments.resume, "checkpoints are in a folder")
    launched = replace(
        _launched(arguments),
        resume=arguments.resume.absolute(),
        lost_seconds=arguments.lost_seconds,
        report_seconds=arguments.lost_seconds + supervision.REPORT_SECONDS,
        grace_seconds=supervision.GRACE_SECONDS,
    )
    run = supervision.Run(launch=launched, restarts=arguments.restarts, is_elastic=arguments.elastic)
    return "", run.run(sys.stdout, sys.stderr)


LAUNCH = Command(
    name="launch",
    summary="run a script in several processes",
    description=launch.HELP,
    more=launch.MORE,
    add_arguments=_add_launch,
    run=_launch,
)
RUN = Command(
    name="run",
    summary="run a script, and again when processes fail",
    description=supervision.HELP,
    more=supervision.MORE,
    add_arguments=_add_run,
    run=_run,
)
