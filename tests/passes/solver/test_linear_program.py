"""HiGHS as a solver that keeps to itself."""

from __future__ import annotations

import subprocess
import sys

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


def test_a_closed_stdout_is_none_of_its_business() -> None:
    closed = "import os; os.close(1)\nfrom passes.solver.linear_program import hush\nhush()"
    ran = subprocess.run([sys.executable, "-c", closed], capture_output=True, text=True, check=True)
    assert not ran.stderr
