"""`autopar launch`: output with ranks, and one end for all processes."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from autopar.errors import ArgumentError
from autopar.tools.cli import main
from autopar.tools.launch import Ending, Launch
from tests.autopar.distributed.launching import ROOT, SECONDS, command, environment, launch, lines
from tests.sample import slow

TALKING = """
import json, os, sys
import jax
print(json.dumps([jax.process_index(), jax.process_count(), jax.local_device_count(), sys.argv[1:], __name__]))
print(len(os.sched_getaffinity(0)), file=sys.stderr, end="")
"""
FAILING = """
import os, signal, sys, time
import jax
if jax.process_index() == 1:
    sys.exit("no more") if sys.argv[1] == "exit" else os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
STOPPED = """
import os, signal
import jax
if jax.process_index() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
WAITING = """
import os, time
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


@pytest.mark.slow
def test_lines_come_out_with_the_rank_of_their_process(tmp_path: Path):
    options = ["--bind-cores"]
    done = launch(script(tmp_path, TALKING), "--steps", "3", devices=2, options=options)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert lines(done, rank)[-1:] == [json.dumps([rank, 2, 2, ["--steps", "3"], "__main__"])]
        assert f"[{rank}] {max(1, len(os.sched_getaffinity(0)) // 2)}\n" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status", "report"),
    [("exit", 1, "process 1 ended with status 1"), slow("kill", 128 + 9, "process 1 was ended by SIGKILL")],
)
def test_the_first_failure_ends_all_with_its_status(tmp_path: Path, how: str, status: int, report: str):
    done = launch(script(tmp_path, FAILING), how)
    assert done.returncode == status, done.stderr
    assert f"{report}; the other 1 is ended" in done.stderr
    assert how == "kill" or "[1] no more\n" in done.stderr


@pytest.mark.slow
def test_a_process_that_is_stopped_at_its_end_is_named_by_who_waits_for_it(tmp_path: Path):
    done = launch(script(tmp_path, STOPPED))
    assert done.returncode, done.stdout
    assert "autopar: process 1 on host" in done.stderr
    assert "is lost: no sign of life for 15 s" in done.stderr


def test_a_process_that_is_stopped_when_all_others_have_ended_is_ended(tmp_path: Path):
    started = [subprocess.Popen(["sleep", seconds], text=True, start_new_session=True) for seconds in ("600", "0")]
    os.kill(started[0].pid, signal.SIGSTOP)
    err = io.StringIO()
    stopped = Launch(processes=2, script=script(tmp_path, ""), lost_seconds=0.1)
    ending = stopped._watched(started, err, threading.Lock())
    assert ending == Ending(128 + signal.SIGKILL, (0,))
    assert err.getvalue().splitlines()[0] == (
        "autopar launch: process 0 has been stopped, and no other waits; it is ended"
    )


@pytest.mark.parametrize(("number", "status"), [slow(signal.SIGINT, 130), slow(signal.SIGKILL, -9)])
def test_processes_end_with_their_launcher(tmp_path: Path, number: signal.Signals, status: int):
    process = subprocess.Popen(
        command(script(tmp_path, WAITING)),
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        pids = [int(line.split()[-1]) for line in (process.stdout.readline(), process.stdout.readline())]
        ends = [os.pidfd_open(pid) for pid in pids]  # readable once the process has ended
        process.send_signal(number)
        assert process.wait(SECONDS) == status
        assert [bool(select.select([end], [], [], SECONDS)[0]) for end in ends] == [True, True]
    finally:
        process.kill()
        process.stdout.close()


@pytest.mark.parametrize(
    ("processes", "name", "parts"),
    [
        (0, "script.py", ["--processes", "'0'", "from 1"]),
        (2, "nowhere.py", ["nowhere.py", "there is no file", "give the path"]),
    ],
)
def test_a_launch_of_no_processes_or_no_script_is_refused(
    tmp_path: Path, processes: int, name: str, parts: list[str], capsys: pytest.CaptureFixture[str]
):
    script(tmp_path, "")
    try:
        status = main(["launch", "--processes", str(processes), str(tmp_path / name)])
    except SystemExit as ended:  # what no option may be
        status = ended.code
    said = capsys.readouterr().err
    assert status == 2
    assert all(part in said for part in parts), said
    with pytest.raises(ArgumentError):
        Launch(processes=processes, script=tmp_path / name)


def test_cores_are_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2, 7)))
    launches = Launch(processes=2, script=script(tmp_path, ""), bind_cores=True)
    assert [launches.cores(rank) for rank in range(2)] == [{2, 3}, {4, 5, 6}]
    more = Launch(processes=8, script=script(tmp_path, ""), bind_cores=True)
    assert all(len(more.cores(rank)) == 1 for rank in range(8))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ArgumentError, match=f"does not bind.*\n.*{sys.platform}"):
        launches.cores(0)
