"""Work that is shared with other processes: the same answers, whoever finds them, and nobody left behind."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from passes.pipeline.workers import Crew

TASKS = [(letter,) for letter in "tensor"]


def whose():
    """An object that says, after a while, in which process it is called."""
    return partial(subprocess.getoutput, "sleep 0.1; echo $PPID")


def shared_by(crew, tasks=6):
    """Who did the tasks, once the other process is there; at most 60 s of them."""
    for _ in range(100):
        found = crew.call("__call__", [()] * tasks)
        if len(set(found)) > 1:
            return found
    raise AssertionError("the other process never did anything")


@pytest.mark.parametrize("count", [1, 3])
def test_answers_come_in_the_order_of_the_tasks(count):
    with Crew("tensors", count) as crew:
        assert crew.call("index", TASKS) == [0, 1, 2, 3, 4, 5]
        assert crew.call("index", []) == []


def test_two_processes_share_and_one_is_left():
    with Crew(whose(), 2) as crew:
        assert str(os.getpid()) in shared_by(crew)
        (member,) = crew.members
    assert member.process.poll() is not None
    assert not crew.members


def test_one_task_or_one_processor_needs_no_process():
    with Crew("tensors", 2) as crew, Crew("tensors", 1) as alone:
        assert crew.call("index", TASKS[:1]) == alone.call("index", TASKS[:1])
        assert alone.call("index", TASKS) == [0, 1, 2, 3, 4, 5]
        assert not crew.members
        assert not alone.members


def test_what_a_task_raises_is_raised():
    with Crew("tensors", 2) as crew, pytest.raises(ValueError, match="substring not found"):
        crew.call("index", [*TASKS, ("z",)])


def test_what_cannot_be_sent_is_done_here():
    with Crew(partial(callable), 2) as crew:
        for _ in range(20):
            assert crew.call("__call__", [(lambda: None,), (len,), (0,)]) == [True, True, False]


def test_a_process_that_dies_loses_nothing():
    dying = partial(subprocess.getoutput, f"sleep 0.1; [ $PPID = {os.getpid()} ] || kill -9 $PPID; echo here")
    with Crew(dying, 2) as crew:
        for _ in range(100):
            assert crew.call("__call__", [()] * 6) == ["here"] * 6
            if crew.members[0].process.poll() is not None:
                break
        assert crew.members[0].process.poll() == -9
        assert crew.call("__call__", [()] * 2) == ["here"] * 2


def test_a_script_needs_no_guard(tmp_path):
    """The other process knows nothing of the script, and what is printed there is no answer."""
    script = tmp_path / "train.py"
    script.write_text(
        "from passes.pipeline.workers import Crew\n"
        "print('once')\n"
        "with Crew('tensors', 2) as crew:\n"
        "    print(sum(crew.call('index', [('s',)] * 100)))\n"
    )
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, script], env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "once\n300\n"
