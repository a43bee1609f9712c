"""The command `autopar diff`: what changes from one saved plan to another."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from autopar.tools.command import DIFFERENT, DONE, Command, Output
from passes.plan import load_plan

_MORE = """\
example:
  autopar diff before.json after.json

exit status: 0 the plans are alike, 1 they differ, 2 one cannot be read."""


def _add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("before", type=Path, metavar="A", help="a saved plan")
    command.add_argument("after", type=Path, metavar="B", help="another")
    command.add_argument(
        "--json", action="store_true", help="print the differences as JSON; seconds and bytes are numbers"
    )


def _run(arguments: argparse.Namespace) -> tuple[Output, int]:
    difference = load_plan(arguments.before).diff(load_plan(arguments.after))
    output = json.dumps(difference.to_json(), indent=2) if arguments.json else difference.tables() or str(difference)
    return output, DONE if difference.is_empty else DIFFERENT


COMMAND = Command(
    name="diff",
    summary="compare two plans",
    description="Show what changes from plan A to plan B.",
    more=_MORE,
    add_arguments=_add_arguments,
    run=_run,
)
