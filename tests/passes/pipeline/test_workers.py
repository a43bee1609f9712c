"""Work that is shared with other processes: the same answers, whoever finds them, and nobody left behind."""

import errno
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from passes.pipeline.workers import WorkerPool

TASKS = [(letter,) for letter in "tensor"]


def whose():
    """An object that says, after a while, in which process it is called."""
    return partial(subprocess.getoutput, "sleep 0.1; echo $PPID")


def shared_by(pool, tasks=6):
    """Who did the tasks, once the other process is there; at most 60 s of them."""
    for _ in range(100):
        found = pool.call("__call__", [()] * tasks)
        if len(set(found)) > 1:
            return found
    raise AssertionError("the other process never did anything")


@pytest.mark.parametrize("count", [1, 3])
def test_answers_come_in_the_order_of_the_tasks(count):
    with WorkerPool("tensors", count) as pool:
        assert pool.call("index", TASKS) == [0, 1, 2, 3, 4, 5]
        assert pool.call("index", []) == []


def test_two_processes_share_and_one_is_left_with_no_stream_open():
    with WorkerPool(whose(), 2) as pool:
        assert str(os.getpid()) in shared_by(pool)
        (worker,) = pool.workers
    assert worker.process.poll() is not None
    assert worker.process.stdin.closed
    assert worker.process.stdout.closed
    assert not worker.thread.is_alive()
    assert not pool.workers


def test_one_task_or_one_processor_needs_no_process():
    with WorkerPool("tensors", 2) as pool, WorkerPool("tensors", 1) as alone:
        assert pool.call("index", TASKS[:1]) == alone.call("index", TASKS[:1])
        assert alone.call("index", TASKS) == [0, 1, 2, 3, 4, 5]
        assert not pool.workers
        assert not alone.workers


def test_an_error_of_a_task_is_raised():
    with WorkerPool("tensors", 2) as pool, pytest.raises(ValueError, match="substring not found"):
        pool.call("index", [*TASKS, ("z",)])


def test_tasks_that_cannot_be_pickled_are_done_by_the_caller():
    with WorkerPool(partial(callable), 2) as pool:
        for _ in range(20):
            assert pool.call("__call__", [(lambda: None,), (len,), (0,)]) == [True, True, False]


def test_a_process_that_dies_loses_nothing():
    dying = partial(subprocess.getoutput, f"sleep 0.1; [ $PPID = {os.getpid()} ] || kill -9 $PPID; echo here")
    with WorkerPool(dying, 2) as pool:
        for _ in range(100):
            assert pool.call("__call__", [()] * 6) == ["here"] * 6
            if pool.workers[0].process.poll() is not None:
                break
        assert pool.workers[0].process.poll() == -9
        assert pool.call("__call__", [()] * 2) == ["here"] * 2


@pytest.mark.parametrize("allowed", [0, 1])
def test_there_are_as_many_processes_as_the_system_allows(allowed, monkeypatch):
    started, start = [], subprocess.Popen

    def limited(*args, **options):
        if len(started) == allowed:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(start(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", limited)
    with WorkerPool("tensors", 4) as pool:
        for _ in range(2):
            assert pool.call("index", TASKS) == [0, 1, 2, 3, 4, 5]
        assert [worker.process for worker in pool.workers] == started
    assert all(process.poll() is not None for process in started)


def test_a_process_without_a_thread_that_talks_to_it_is_ended(monkeypatch):
    def refused(self):
        raise RuntimeError("can't start new thread")

    started, start = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **options: started.append(start(*args, **options)) or started[-1]
    )
    monkeypatch.setattr("threading.Thread.start", refused)
    with WorkerPool("tensors", 4) as pool:
        assert pool.call("index", TASKS) == [0, 1, 2, 3, 4, 5]
    assert [process.poll() is not None for process in started] == [True]


def test_a_script_needs_no_guard(tmp_path):
    """The other process knows nothing of the script, and what is printed there is no answer."""
    script = tmp_path / "train.py"
    script.write_text(
        "from passes.pipeline.workers import WorkerPool\n"
        "print('once')\n"
        "with WorkerPool('tensors', 2) as pool:\n"
        "    print(sum(pool.call('index', [('s',)] * 100)))\n"
    )
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, script], env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "once\n300\n"
