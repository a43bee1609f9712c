"""HiGHS prints nothing on stdout, where what others print is kept, and ends where a signal's handler raises."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import highspy
import numpy as np
import pytest

from passes.solver.linear_program import LinearProgram

WRITER = """
import os, threading
from passes.solver.linear_program import hush

count, is_over = 0, threading.Event()

def write():
    global count
    while not is_over.is_set():
        os.write(1, b"line\\n")
        count += 1

thread = threading.Thread(target=write)
thread.start()
while not count:
    pass
for _ in range(3):
    hush()
is_over.set()
thread.join()
import highspy
model = highspy.Highs()
model.setOptionValue("output_flag", False)
model.run()
print(count)
"""


def test_no_banner_is_printed_and_nothing_else_is_lost() -> None:
    ran = subprocess.run([sys.executable, "-c", WRITER], capture_output=True, text=True, check=True)
    *lines, count = ran.stdout.splitlines()
    assert set(lines) == {"line"}
    assert len(lines) == int(count)
    assert not ran.stderr


@pytest.mark.parametrize("trouble", ["os.close(1)", "tempfile.tempdir = '/nowhere'"], ids=["closed", "no folder"])
def test_nothing_is_raised_where_stdout_cannot_be_kept(trouble: str) -> None:
    code = f"import os, tempfile; {trouble}\nfrom passes.solver.linear_program import hush\nhush()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not ran.stderr


class _RangError(Exception):
    """What a signal's handler raises."""


def _hard(size: int) -> tuple[LinearProgram, np.ndarray]:
    """A program of whole numbers that HiGHS branches on for longer than anybody waits here."""
    draw, program = np.random.default_rng(0), LinearProgram()
    columns, rows = program.add_columns(size), program.add_rows(size // 2, -np.inf, 10.0 * size)
    at = np.repeat(rows, size), np.tile(columns, rows.size)
    program.enter(*at, draw.integers(5, 60, at[0].size).astype(float))
    return program, -draw.integers(10, 100, size).astype(float)


def test_an_error_of_a_signal_handler_ends_a_search() -> None:
    """HiGHS calls Python while it branches, where it would drop what a handler raises."""

    def ring(number: int, frame: object) -> None:
        raise _RangError

    program, cost = _hard(200)
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(_RangError):
            program.minimise(cost, np.arange(cost.size), gap=0.0, seconds=60.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("integral", [(), (0, 1)])
def test_a_model_of_the_callers_with_more_threads_solves_and_lets_solve(
    is_first: bool, integral: tuple[int, ...]
) -> None:
    """HiGHS keeps the scheduler of the first model of a thread, and refuses another number of threads."""
    seen: list[object] = []

    def callers() -> None:
        model = highspy.Highs()
        model.setOptionValue("output_flag", False)
        model.setOptionValue("threads", 2)
        first, second = (model.addVariable(0, 1, type=highspy.HighsVarType.kInteger) for _ in range(2))
        model.addConstr(first + second <= 1)
        model.maximize(first + 2 * second)
        seen.append(model.getModelStatus())

    def solved() -> None:
        program = LinearProgram()
        columns = program.add_columns(2)
        program.enter(np.repeat(program.add_rows(1, 1.0, 1.0), 2), columns, 1.0)
        outcome = program.minimise(np.array([2.0, 1.0]), np.array(integral, dtype=np.intp), gap=0.0)
        seen.append(outcome.objective)

    def both() -> None:
        for each in (callers, solved, callers) if is_first else (solved, callers, solved):
            each()

    thread = threading.Thread(target=both)  # which keeps a scheduler, as this one would
    thread.start()
    thread.join()
    optimal = highspy.HighsModelStatus.kOptimal
    assert seen == ([optimal, 1.0, optimal] if is_first else [1.0, optimal, 1.0])
