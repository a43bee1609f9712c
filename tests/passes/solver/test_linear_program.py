"""HiGHS prints nothing on stdout, and what others print there is kept."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
