"""`autopar help`: what several commands take, at length."""

from __future__ import annotations

import argparse

from autopar.tools.command import DONE, Command
from autopar.tools.command_options import CLUSTERS, PLANNERS
from autopar.tools.targets import TARGET

TOPICS = {"targets": TARGET, "clusters": CLUSTERS, "planners": PLANNERS}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", choices=TOPICS, help="what about")


COMMAND = Command(
    name="help",
    summary="say what targets, clusters and planners are",
    description="Say at length what MODULE:FUNCTION, --cluster and --planner take.",
    more="example:\n  autopar help planners\n\nexit status: 0",
    add_arguments=_add_arguments,
    run=lambda arguments: (TOPICS[arguments.topic], DONE),
)
