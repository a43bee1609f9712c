"""Processes that die, hang, fail or are cut off: who is named, and what starts again."""

from __future__ import annotations

import io
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autopar
from autopar.distributed import Processes
from autopar.distributed.watch import LOST, Watch, _Seen
from autopar.tools.launch import Ending, Launch
from autopar.tools.supervision import Run
from benchmarks import kills
from tests.autopar.distributed.launching import SECONDS, environment, launch


def watch_of(**signs: tuple[str, float, float]) -> list[str]:
    """The reasons against each process, of (text, seconds since the last sign, seconds since the last step)."""
    watch = Watch(object(), ("a", "b", "c"), lost_seconds=15, stall_seconds=100)  # pyright: ignore[reportArgumentType]
    seen = {int(name[1:]): _Seen("", 0, 0.0, 0.0) for name in signs}
    for name, (text, sign, step) in signs.items():
        seen[int(name[1:])] = replace(seen[int(name[1:])].after(text, 0.0), sign=1000 - sign, step=1000 - step)
    return [watch._reason(rank, seen, 1000.0) for rank in seen]


def test_a_lost_process_is_named_with_rank_and_host():
    alive = ("7 3", 1.0, 1.0)
    assert watch_of(p0=alive, p1=alive) == ["", ""]
    assert watch_of(p0=alive, p1=("7 3", 16.0, 16.0)) == [
        "",
        "process 1 on host b is lost: no sign of life for 15 s, in step 3 since its start",
    ]
    assert watch_of(p0=alive, p1=("failed: ValueError: no data", 1.0, 1.0))[1] == (
        "process 1 on host b has failed: ValueError: no data"
    )
    assert watch_of(p0=alive, p1=("done 9 3", 1.0, 500.0)) == ["", ""]  # it waits for the other
    assert watch_of(p0=alive, p1=("done 9 4", 1.0, 50.0)) == ["", ""]  # the other is not done with its step
    assert watch_of(p0=alive, p1=("done 9 2", 1.0, 15.0)) == ["", ""]
    assert watch_of(p0=alive, p1=("done 9 2", 1.0, 16.0)) == [
        "",
        "process 1 on host b has ended: in step 2 since its start, others are in step 3",
    ]
    assert watch_of(p0=("done 7 3", 1.0, 1.0), p1=("done 9 3", 16.0, 16.0)) == [
        "",
        "process 1 on host b is lost: no sign of life for 15 s, at its end",
    ]
    # Signs of life, and no steps: of two that do not get on, the one behind is meant.
    assert watch_of(p0=("90 4", 1.0, 200.0), p1=("90 3", 1.0, 101.0), p2=("90 4", 1.0, 1.0)) == [
        "",
        "process 1 on host b hangs: in step 3 since its start for 101 s, others in step 4",
        "",
    ]
    assert watch_of(p0=("90 4", 1.0, 200.0), p1=("90 4", 1.0, 200.0)) == ["", ""]  # they compile, say


def test_a_sign_is_new_when_it_differs():
    first = _Seen("", 0, 0.0, 0.0).after("1 0", 5.0)
    assert (first.sign, first.step) == (5.0, 0.0)
    assert first.after("1 0", 9.0) == first
    later = first.after("2 1", 9.0)
    assert (later.steps, later.sign, later.step) == (1, 9.0, 9.0)
    assert later.after("failed: ValueError: 7", 11.0).steps == 1
    done = later.after("done 3 1", 11.0)
    assert (done.steps, done.step) == (1, 11.0)  # as if it began what it does not end
    assert done.after("done 4 1", 12.0).step == 11.0


@pytest.mark.parametrize(
    ("endings", "is_elastic", "sizes", "status"),
    [
        ([Ending(0)], False, [4], 0),
        ([Ending(137, (2,)), Ending(0)], False, [4, 4], 0),
        ([Ending(137, (2,)), Ending(75, (0, 1)), Ending(0)], True, [4, 3, 1], 0),
        ([Ending(1, (0, 1, 2, 3))] * 3, True, [4, 4, 4], 1),
        ([Ending(130, (), True)], False, [4], 130),
    ],
)
def test_a_run_starts_again_with_who_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    endings: list[Ending],
    is_elastic: bool,
    sizes: list[int],
    status: int,
):
    (tmp_path / "script.py").write_text("")
    given, started = iter(endings), list[int]()

    def run(launch: Launch, *_: Any) -> Ending:
        started.append(launch.processes)
        return next(given)

    monkeypatch.setattr(Launch, "run", run)
    err = io.StringIO()
    repeated = Run(launch=Launch(processes=4, script=tmp_path / "script.py"), restarts=2, is_elastic=is_elastic)
    assert repeated.run(io.StringIO(), err) == status
    assert started == sizes
    assert err.getvalue().count("starts again") == len(sizes) - 1


class Child:
    """A process that ends with a status after so many looks at it; never, for None."""

    def __init__(self, status: int | None, looks: int = 0) -> None:
        self.status, self.looks = status, looks

    def poll(self) -> int | None:
        self.looks -= 1
        return self.status if self.looks < 0 else None


@pytest.mark.parametrize(
    ("children", "seconds"),
    [
        ([Child(LOST), Child(None)], 5),  # who is lost, and stopped, does not report
        ([Child(LOST), Child(LOST, looks=3)], 3),  # cut off, it may have been the first to say so
        ([Child(-9), Child(None)], 25),  # the other has to find out
        ([Child(LOST), Child(None), Child(None)], 25),
        ([Child(-9), Child(LOST, looks=9)], 9),
    ],
)
def test_reports_are_awaited_from_who_can_make_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[Any], seconds: int
):
    (tmp_path / "script.py").write_text("")
    now = [0.0]

    def sleep(_: float) -> None:
        now[0] += 1

    monkeypatch.setattr("autopar.tools.launch.time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    Launch(processes=2, script=tmp_path / "script.py", report_seconds=25)._await_reports(children)
    assert now == [seconds]


@pytest.mark.slow
def test_a_training_that_is_disturbed_ends_with_the_same_parameters(monkeypatch: pytest.MonkeyPatch, fresh_seed: int):
    arguments = ["kills", "--seed", str(fresh_seed), *(["--large"] if fresh_seed % 2 else [])]
    monkeypatch.setattr("sys.argv", arguments)
    assert kills.main() == 0, fresh_seed


@pytest.mark.parametrize("name", ["lost_seconds", "stall_seconds"])
@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_seconds_that_cannot_be_are_refused_before_anything_is_joined(name: str, seconds: Any):
    with pytest.raises(autopar.ArgumentError, match=rf"initialize\({name}={seconds}\): should be a number of seconds"):
        autopar.distributed.initialize(**{name: seconds})


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", ":1234", "127.0.0.1:99999", "127.0.0.1:0", "", 5])
def test_an_address_that_is_none_is_refused_before_anything_waits_there(address: Any):
    with pytest.raises(autopar.ArgumentError, match=r"initialize\(coordinator_address=.*a port from 1 to 65535"):
        autopar.distributed.initialize(address, 2, 0)


class SlowService:
    """A client of a service that takes its time over the first sign of life."""

    def __init__(self) -> None:
        self.signs: list[str] = []
        self.is_asked, self.goes_on = threading.Event(), threading.Event()

    def key_value_set(self, key: str, text: str, allow_overwrite: bool) -> None:
        if not self.is_asked.is_set():
            self.is_asked.set()
            self.goes_on.wait()
        self.signs.append(text)

    def key_value_dir_get(self, key: str) -> list[Any]:
        return []


def test_no_sign_of_life_follows_that_of_a_failure(monkeypatch: pytest.MonkeyPatch):
    service, statuses = SlowService(), list[int]()
    monkeypatch.setattr("autopar.distributed.watch._BEAT_SECONDS", 0.0)
    monkeypatch.setattr("autopar.distributed.watch._leave", statuses.append)
    watch = Watch(Processes((0,), 0, service), ("a",), lost_seconds=15, stall_seconds=100)
    watch.thread = threading.Thread(target=watch._run, daemon=True)
    watch.thread.start()
    service.is_asked.wait()
    threading.Timer(0.2, service.goes_on.set).start()
    watch.fail(ValueError("the loss is no number"))
    assert service.signs == ["0 0", "failed: ValueError: the loss is no number"]
    assert statuses == [1]


BUSY = """
import time
from autopar.distributed import watch

watch._BEAT_SECONDS = 1e-5
time.sleep(1.5)  # the beat that is under way is a long one
"""


LEAVING = """
import sys
import jax
import jax.numpy as jnp
import autopar

autopar.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), lost_seconds=3)
@autopar.parallelize(planner=autopar.DataParallel())
def step(w, x):
    return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

w = jnp.ones((8, 8))
for number in range(50):
    w = step(w, jnp.ones((64, 8)))
    w.block_until_ready()
    if number == 2 and sys.argv[2] == "1":
        sys.exit(3)
"""


@pytest.mark.slow
def test_a_process_that_leaves_a_training_is_named_by_those_that_wait(tmp_path: Path):
    """Without `autopar launch`, which ends a process of another status than 0 at once."""
    (tmp_path / "leaving.py").write_text(LEAVING)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, str(tmp_path / "leaving.py"), address]
    text = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment()}
    both = [subprocess.Popen([*command, str(rank)], **text) for rank in (0, 1)]
    output = [process.communicate(timeout=SECONDS)[0] for process in both]
    assert both[0].returncode == LOST, output[0]
    assert re.search("process 1 on host .* has ended: in step 3 since its start, others are in step 4", output[0])


@pytest.mark.slow
def test_a_watch_that_is_in_a_call_does_not_abort_the_end(tmp_path: Path):
    # The watch's thread in JAX's code while Python ends: seven of eight such launches aborted.
    (tmp_path / "busy.py").write_text(BUSY)
    done = launch(tmp_path / "busy.py", processes=3)
    assert done.returncode == 0, done.stdout + done.stderr
