"""`autopar help`: what several commands take, at length, and the help of a command."""

from __future__ import annotations

import argparse

from autopar.tools.command import DONE, Command, Output
from autopar.tools.command_options import CLUSTERS, PLANNERS
from autopar.tools.parsing import commands_of
from autopar.tools.targets import TARGET, UsageError
from passes.errors import close, explain

TOPICS = {"targets": TARGET, "clusters": CLUSTERS, "planners": PLANNERS}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    topics = f"{', '.join(TOPICS)}, or a command (default: which commands there are)"
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help=topics)


def _run(arguments: argparse.Namespace) -> tuple[Output, int]:
    topic, commands = arguments.topic, commands_of(arguments.parser)
    if topic in TOPICS:
        return TOPICS[topic], DONE
    if topic and topic not in commands:
        known = [*TOPICS, *commands]
        remedy = close(topic, known) or "name one of these"
        raise UsageError(explain(repr(topic), "there is no such topic", f"there are {', '.join(known)}", remedy))
    return (commands[topic] if topic else arguments.parser).format_help(), DONE


COMMAND = Command(
    name="help",
    summary="say what targets, clusters and planners are",
    description="Say at length what MODULE:FUNCTION, --cluster and --planner take, or what a\ncommand does.",
    more="example:\n  autopar help planners\n\nexit status: 0 said, 2 there is no such topic.",
    add_arguments=_add_arguments,
    run=_run,
)
