"""`python -m benchmarks.kills`: processes of a training killed, stopped or cut off at random, and what becomes of it.

Every run has to finish with the parameters of an undisturbed one, bit for bit, and the loss has to be reported by rank
and host. Exit status 0 if all have.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("resumed.py")
HOWS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "cut off": signal.SIGUSR1}
LINE = re.compile(r"\[(\d+)\] (pid|step|from|parameters) (.*)")
REPORT = re.compile(r"\[(\d+)\] autopar: process (\d+) on host \S+ (is lost|has failed|hangs)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run: what was done to which process at which step, and what came of it."""

    how: str
    rank: int
    at: int
    status: int
    seconds: float
    report_seconds: float | None
    went_on_from: tuple[int, ...]
    parameters: frozenset[str]


def run(options: argparse.Namespace, how: str, rank: int, at: int, folder: str) -> Outcome:
    """The outcome of a training of which one process is disturbed at a step; of none if `how` is empty."""
    sizes = ["--processes", str(options.processes), "--devices-per-process", "1", "--resume", folder]
    sizes += ["--lost-seconds", str(options.lost_seconds), "--restarts", "3"]
    command = [sys.executable, "-m", "autopar", "run", *sizes, str(SCRIPT), options.planner, str(options.steps)]
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[1])}
    start = time.monotonic()
    process = subprocess.Popen(
        [*command, str(options.every)],
        env={**os.environ, **quick},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watchdog = threading.Timer(options.timeout, process.kill)
    watchdog.start()
    pids: dict[int, int] = {}
    froms: list[int] = []
    parameters: set[str] = set()
    disturbed: float | None = None
    reported: float | None = None
    assert process.stdout is not None
    for line in process.stdout:
        if options.verbose:
            print(line, end="")
        if (match := REPORT.match(line)) and disturbed and reported is None:
            reported = time.monotonic() - disturbed
        if not (match := LINE.match(line)):
            continue
        sender, kind, rest = int(match[1]), match[2], match[3]
        if kind == "pid":
            pids[sender] = int(rest)
        elif kind == "from" and sender == 0:
            froms.append(int(rest))
        elif kind == "parameters":
            parameters.add(f"{sender if options.planner.startswith('Pipeline') else 0}: {rest}")
        elif kind == "step" and how and disturbed is None and sender == rank and int(rest.split()[0]) >= at:
            disturbed = time.monotonic()
            os.kill(pids[rank], HOWS[how])
    status = process.wait()
    watchdog.cancel()
    return Outcome(
        how=how,
        rank=rank,
        at=at,
        status=status,
        seconds=time.monotonic() - start,
        report_seconds=reported,
        went_on_from=tuple(froms),
        parameters=frozenset(parameters),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--planner", default="Pipeline(stages=2, microbatches=2)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=5, help="steps from checkpoint to checkpoint")
    parser.add_argument("--lost-seconds", type=float, default=8)
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a run counts as a hang")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    draw, good = random.Random(options.seed), True
    with tempfile.TemporaryDirectory() as folder:
        expected = run(options, "", 0, 0, folder)
    print(f"undisturbed: status {expected.status}, {expected.seconds:.0f} s, {sorted(expected.parameters)}", flush=True)
    print(f"{'how':8} {'rank':>4} {'step':>4} {'status':>6} {'report s':>8} {'went on from':>14} {'bit-equal':>9}")
    for _ in range(options.runs):
        how, rank = draw.choice(sorted(HOWS)), draw.randrange(options.processes)
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(options, how, rank, draw.randrange(options.steps - 3), folder)
        same = outcome.parameters == expected.parameters and bool(outcome.parameters)
        good &= same and outcome.status == 0 and outcome.report_seconds is not None
        report = "none" if outcome.report_seconds is None else f"{outcome.report_seconds:.1f}"
        froms = ", ".join(map(str, outcome.went_on_from[1:]))
        print(f"{how:8} {rank:4} {outcome.at:4} {outcome.status:6} {report:>8} {froms:>14} {same!s:>9}", flush=True)
    print("all have finished, with the same parameters" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
