"""The command line: plans made without the devices they are for, shown, compared, simulated; clusters measured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from autopar.tools import (
    compile_command,
    completion_command,
    diff_command,
    doctor_command,
    explain_command,
    export_command,
    fit_command,
    help_command,
    launch_command,
    measure_command,
    plan_command,
    report_command,
    show_command,
    simulate_command,
    targets,
)
from autopar.tools.command import INTERRUPTED, TROUBLE, Command
from autopar.tools.parsing import Once, Parser
from autopar.tools.printing import printed, tell, warned
from autopar.tools.targets import UsageError
from autopar.tools.wording import on_command_line
from passes.errors import PlanningError
from passes.plan import json as plan_json

COMMANDS = (
    *(plan_command.COMMAND, show_command.COMMAND, diff_command.COMMAND, fit_command.COMMAND),
    *(report_command.COMMAND, explain_command.COMMAND, export_command.COMMAND, measure_command.COMMAND),
    *(launch_command.LAUNCH, launch_command.RUN),
    *(doctor_command.COMMAND, completion_command.COMMAND, help_command.COMMAND),
    *(compile_command.COMMAND, simulate_command.COMMAND),
)
"""The commands, in the order in which help lists them."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of a command line: 0 done, 1 the plans differ, 2 an error, printed on stderr, 130 interrupted.

    An unexpected error is 2 as well, with its traceback, as 1 is an answer. If it comes from the user's code, such as
    the step while it is traced, the traceback begins there.
    """
    options = parser()
    arguments = options.parse_args(argv)
    if arguments.command is None:
        options.print_help(sys.stderr)
        return TROUBLE
    try:
        with warned(arguments.command):
            return arguments.run(arguments)
    except (PlanningError, UsageError) as error:
        words = str(error) if isinstance(error, UsageError) else on_command_line(str(error))
        tell("\n".join([f"autopar {arguments.command}: {words}", *getattr(error, "__notes__", ())]))
        return TROUBLE
    except KeyboardInterrupt:
        tell(f"autopar {arguments.command}: interrupted before there was anything to show")
        return INTERRUPTED
    except Exception as error:
        module = getattr(arguments, "target", None) or ""
        frames = targets.users_frames(error, module.partition(":")[0]) or error.__traceback__
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return TROUBLE


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="autopar",
        description="Plan an ordinary JAX train step for many devices.",
        epilog="example:\n  autopar plan train:example --cluster 8:h100 --out plan.json\n"
        "  autopar explain plan.json 'params/*/kernel'\n  autopar report plan.json -o plan.html",
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"autopar {plan_json.version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        added = commands.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            epilog=command.more,
            formatter_class=raw,
        )
        added.set_defaults(run=partial(_carry_out, command), parser=parser)
        added.register("action", None, Once)  # of an option without an action of its own
        command.add_arguments(added)
    return parser


def _carry_out(command: Command, arguments: argparse.Namespace) -> int:
    output, status = command.run(arguments)
    printed(output)
    return status


if __name__ == "__main__":
    sys.exit(main())
