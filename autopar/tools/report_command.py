"""`autopar report`: a saved plan as a web page."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.tools.command import DONE, Command, Output, check_writable, write
from passes.page import Measured, html
from passes.plan import load_plan
from passes.text import nbytes

_HELP = """\
Write a saved plan as one web page that needs no network: the model's layers by
stage, every operator with its tiles on the mesh, cost by cause, what was
rejected and what it would have cost, the pipeline's timeline, memory over time,
the dearest collectives with your source lines, and a search over all of it.

In Python it is plan.to_html(), and a notebook shows a plan so by itself. With
the steps that train_step.report(...).write(FILE) wrote, what was measured is
beside what was predicted: the step, its causes, and the timeline's tasks."""

_MORE = """\
example:
  autopar report plan.json -o plan.html
  autopar report plan.json --measured steps.json

exit status: 0 written, 2 the plan cannot be read or the page not written."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a file that `autopar plan --out` wrote")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="measured steps of this plan, to be shown beside")
    parser.add_argument("-o", "--out", type=Path, metavar="PATH", help="the page (default: PLAN's name with .html)")


def _run(arguments: argparse.Namespace) -> tuple[Output, int]:
    path = arguments.out or arguments.plan.with_suffix(".html")
    check_writable(path, "the page", arguments.plan, arguments.measured)
    text = html(load_plan(arguments.plan), Measured.load(arguments.measured) if arguments.measured else None)
    write(path, text, "the page")
    return f"{path}: {nbytes(len(text.encode()))}, open it in any browser", DONE


COMMAND = Command(
    name="report",
    summary="write a plan as a web page",
    description=_HELP,
    more=_MORE,
    add_arguments=_add_arguments,
    run=_run,
)
