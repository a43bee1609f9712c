"""A script that is started again from its last checkpoint when processes fail."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TextIO

from autopar.tools.launch import Launch

HELP = """\
Run a script as `autopar launch` does, and again when a process dies, hangs or
is cut off. The script saves to autopar.Checkpoints(), which is the folder of
--resume, and goes on from what it restores from there."""

MORE = """\
example:
  autopar run --processes 4 --resume run1 --elastic train.py --steps 1000

SIGTERM and Ctrl-C are passed on and end the run:
autopar.Checkpoints().preempted() tells the script to save first.

exit status: 0 the script has succeeded, else as of `autopar launch`, of its
last run."""

RESTARTS = 3
"""Starts after the first one, chosen: enough for hosts that fail, and few for an error that comes each time."""

REPORT_SECONDS = 10.0
"""Seconds to report which process is gone, after it has been noticed."""

GRACE_SECONDS = 60.0
"""Seconds to save a checkpoint for a process that is asked to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A launch that is repeated at most `restarts` times; with `is_elastic` with only as many processes as have not
    failed.

    If each of them has failed, all are started again: an error that they share is no host's.
    """

    launch: Launch
    restarts: int = RESTARTS
    is_elastic: bool = False

    def run(self, out: TextIO, err: TextIO) -> int:
        """The exit status of the last launch."""
        launch = self.launch
        for remaining in range(self.restarts, -1, -1):
            ending = launch.run(out, err)
            if not ending.status or ending.is_asked_for or not remaining:
                return ending.status
            if self.is_elastic:
                healthy = launch.processes - len(ending.gone)  # none where all have failed alike, as of a batch's rows
                launch = replace(launch, processes=healthy or launch.processes)
            many = f"{launch.processes} process{'es' if launch.processes > 1 else ''}"
            err.write(f"autopar run: starts again with {many}, and may {remaining - 1} more times\n")
            err.flush()
        raise AssertionError
