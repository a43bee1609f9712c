"""Trainings whose processes are killed, stopped or cut off at random: `python -m benchmarks.kills --help`.

Each training is disturbed some times, once after each start: at a random step, or at a random moment before its first
step, while the processes plan, compile and restore. It has to finish with the parameters of an undisturbed training,
bit for bit, and every surviving process has to report which process is lost, by rank and host, within 30 seconds.
Prints a line for each disturbance; the exit status is 0 if all trainings and reports are as they should be.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

SCRIPT = Path(__file__).with_name("resumed.py")
HOWS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "cut off": signal.SIGUSR1}
"""The signal of each disturbance; resumed.py answers SIGUSR1 by closing all its connections."""

LINE = re.compile(r"\[(\d+)\] (pid|step|from|parameters) (.*)")
"""A line of resumed.py: the rank that prints, and its pid, a step, the step that it starts from, or parameters."""

REPORT = re.compile(r"\[(\d+)\] autopar: process (\d+) on host \S+ (is lost|has failed|hangs)|.*cannot be reached")
"""A line in which a process names the one that is lost."""

ALONE = re.compile(
    r"autopar launch: process (\d+) (has been stopped, and no other waits|was ended by SIGKILL; no other)"
)
"""The launcher's line on a lost process where no other is left to name it."""

REPORT_SECONDS = 30.0
"""Seconds after which every survivor should have named who is gone."""

STEPS = 8
"""The most steps of a start before it is disturbed: more than lie between two checkpoints."""

START_SECONDS = 3.0
"""Seconds from the start of a script in which it plans, compiles and restores."""


@dataclass(slots=True, kw_only=True)
class Kill:
    """A disturbance of process `rank`, `delay` seconds after it has taken so many `steps`, or has begun if that is 0.

    The `step` and the time `at` which it came, and who has reported it, are filled in as the training runs.
    """

    how: str
    rank: int
    steps: int
    delay: float
    step: int | None = None
    at: float | None = None
    reported: dict[int, float] = field(default_factory=dict[int, float])
    """The seconds after which each process has said who is gone, or the launcher where all others had ended."""

    @classmethod
    def drawn(cls, draw: random.Random, processes: int) -> Kill:
        """A random disturbance; one in five comes before the first step."""
        early = draw.random() < 0.2
        how, rank = draw.choice(sorted(HOWS)), draw.randrange(processes)
        delay = draw.uniform(0, START_SECONDS if early else 0.1)
        return cls(how=how, rank=rank, steps=0 if early else draw.randint(1, STEPS), delay=delay)

    def begin(self, pid: int, step: int | None) -> None:
        """Disturbs the process, after the delay."""
        self.step = step
        threading.Timer(self.delay, self._send, (pid,)).start()

    def _send(self, pid: int) -> None:
        self.at = time.monotonic()
        try:
            os.kill(pid, HOWS[self.how])
        except ProcessLookupError:  # the training has come to its end meanwhile
            self.at = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A training: exit status and seconds, the steps `resumed_at` that its starts went on from, parameters' digests."""

    status: int
    seconds: float
    resumed_at: tuple[int, ...]
    parameters: frozenset[str]


def run(options: argparse.Namespace, kills: Sequence[Kill], folder: str) -> Outcome:
    """The outcome of a training under these disturbances, one after each start; what comes of them is filled in."""
    start = time.monotonic()
    process = _started(options, len(kills), folder)
    watchdog = threading.Timer(options.timeout * (1 + len(kills)), process.kill)
    watchdog.start()
    pids: dict[int, int] = {}
    resumed_at: list[int] = []
    parameters: set[str] = set()
    waiting = list(kills)
    begun: list[Kill] = []
    steps: dict[int, int] = {}
    finished: set[int] = set()
    starts: dict[int, int] = {}
    assert process.stdout is not None
    for line in process.stdout:
        if options.verbose:
            print(line, end="", flush=True)
        if begun and (match := REPORT.match(line)) and begun[-1].at is not None:
            sender = int(match[1] or line[1:].partition("]")[0])
            begun[-1].reported.setdefault(sender, time.monotonic() - begun[-1].at)
        if begun and (match := ALONE.match(line)) and begun[-1].at is not None and int(match[1]) == begun[-1].rank:
            # Processes that have finished cannot report it themselves.
            begun[-1].reported = dict.fromkeys(finished, time.monotonic() - begun[-1].at) | begun[-1].reported
        if not (match := LINE.match(line)):
            continue
        sender, kind, rest = int(match[1]), match[2], match[3]
        if kind == "pid":
            pids[sender], steps[sender], starts[sender] = int(rest), 0, starts.get(sender, 0) + 1
            finished.discard(sender)
        elif kind == "from" and sender == 0:
            resumed_at.append(int(rest))
        elif kind == "parameters":
            finished.add(sender)
            parameters.add(f"{sender if options.planner.startswith('Pipeline') else 0}: {rest}")
        elif kind == "step":
            steps[sender] += 1
        kill = waiting[0] if waiting else None
        is_due = kill and sender == kill.rank and (kind == "step" if kill.steps else kind == "pid")
        if kill and is_due and steps[sender] >= kill.steps and len(begun) < starts[sender]:
            kill.begin(pids[kill.rank], int(rest.split()[0]) if kind == "step" else None)
            begun.append(waiting.pop(0))
    status = process.wait()
    watchdog.cancel()
    seconds = time.monotonic() - start
    return Outcome(status=status, seconds=seconds, resumed_at=tuple(resumed_at), parameters=frozenset(parameters))


def _started(options: argparse.Namespace, kills: int, folder: str) -> subprocess.Popen[str]:
    """The training under `autopar run`, its errors among its output."""
    sizes = ["--processes", str(options.processes), "--devices-per-process", "1", "--resume", folder]
    sizes += ["--lost-seconds", str(options.lost_seconds), "--restarts", str(2 * kills + 1)]
    command = [sys.executable, "-m", "autopar", "run", *sizes, str(SCRIPT), options.planner, str(options.steps)]
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[1])}
    return subprocess.Popen(
        [*command, str(options.every), *(["large"] if options.large else [])],
        env={**os.environ, **quick},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def row(kill: Kill, processes: int) -> tuple[str, bool]:
    """The table's line of a disturbance, and whether every survivor has reported it in time."""
    survivors = set(range(processes)) - {kill.rank}
    is_reported = survivors <= kill.reported.keys()
    last = max((kill.reported[rank] for rank in survivors), default=0.0) if is_reported else float("inf")
    when = f"{kill.delay:.1f} s in" if kill.step is None else f"step {kill.step}"
    return f"{kill.how:8} {kill.rank:4} {when:>9} {last:10.1f}", last <= REPORT_SECONDS


def main() -> int:
    """Prints what becomes of disturbed trainings; 1 where one fails, ends with other parameters or is reported late."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2, help="trainings (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=5, help="disturbances of each (default: %(default)s)")
    shown = "(default: %(default)s)"
    parser.add_argument("--processes", type=int, default=2, help=f"of a training, with a device each {shown}")
    planner = "Pipeline(stages=2, microbatches=2)"
    parser.add_argument("--planner", default=planner, metavar="TEXT", help=f"of autopar, as Python writes it {shown}")
    parser.add_argument("--steps", type=int, default=40, help=f"of a training {shown}")
    parser.add_argument("--every", type=int, default=5, help=f"steps from checkpoint to checkpoint {shown}")
    parser.add_argument("--lost-seconds", type=float, default=8, help=f"of silence, then a process is lost {shown}")
    parser.add_argument("--timeout", type=float, default=240, help=f"seconds of a start, then it hangs {shown}")
    parser.add_argument("--large", action="store_true", help="send all arrays over the connections of large ones")
    parser.add_argument("--seed", type=int, default=0, help=f"of the disturbances {shown}")
    parser.add_argument("--verbose", action="store_true", help="also print what the trainings print")
    options = parser.parse_args()
    draw, good, count = random.Random(options.seed), True, 0
    with tempfile.TemporaryDirectory() as folder:
        expected = run(options, [], folder)
    print(f"undisturbed: status {expected.status}, {expected.seconds:.0f} s, {sorted(expected.parameters)}", flush=True)
    print(f"{'how':8} {'rank':>4} {'when':>9} {'reported s':>10}", flush=True)
    for _ in range(options.runs):
        kills = [Kill.drawn(draw, options.processes) for _ in range(options.kills)]
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(options, kills, folder)
        for kill in kills:
            if kill.at is not None:
                line, in_time = row(kill, options.processes)
                print(line if in_time else f"{line}  NOT IN TIME", flush=True)
                good &= in_time
                count += 1
        same = outcome.parameters == expected.parameters and bool(outcome.parameters)
        good &= same and outcome.status == 0
        resumed_at = ", ".join(map(str, outcome.resumed_at))
        end = f"status {outcome.status}, bit-equal {same}"
        print(f"  {outcome.seconds:.0f} s, started from {resumed_at}: {end}", flush=True)
    print(f"{count} kills: " + ("all have finished, with the same parameters" if good else "FAILED"))
    return 0 if good and count else 1


if __name__ == "__main__":
    sys.exit(main())
