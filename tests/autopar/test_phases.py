"""The phases of a function on its way to devices: a line each, a bar on a terminal where one takes long."""

from __future__ import annotations

import logging
import threading

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import autopar
from autopar import Progress, phases
from autopar.phases import phase, shown, words
from tests.sample import slow


def test_words():
    some = Progress(phase="solve x=8", done=1, total=2, best_seconds=0.00136, seconds_left=39.9)
    assert words(some) == "solve x=8, best 1.36 ms, 40 s left"
    assert words(Progress(phase="solve x=8", done=1, total=None)) == "solve x=8"


def test_a_bar_moves_on_a_terminal(capsys: pytest.CaptureFixture[str]):
    with shown(Console(stderr=True, force_terminal=True, width=100)) as bar:
        bar.report(Progress(phase="solve [x]", done=1, total=4, best_seconds=0.002))
    printed = capsys.readouterr()
    assert "solve [x], best 2.00 ms" in printed.err
    assert "1/4" in printed.err
    assert printed.out == ""


def test_no_bar_elsewhere(capsys: pytest.CaptureFixture[str]):
    for console in (Console(stderr=True), Console(stderr=True, force_terminal=True, quiet=True)):
        with shown(console) as bar:
            bar.report(Progress(phase="solve", done=1, total=4))
    assert capsys.readouterr().err == ""


def test_a_bar_waits_until_it_is_worth_its_place(capsys: pytest.CaptureFixture[str]):
    console = Console(stderr=True, force_terminal=True, width=100)
    with shown(console, "plan step", patience_seconds=600):
        pass
    assert capsys.readouterr().err == ""
    printed, waits = "", threading.Event()
    with shown(console, "plan step", patience_seconds=0.001) as bar:
        bar.report(Progress(phase="solve x=8", done=1, total=4))
        while "plan step: solve x=8" not in printed:
            waits.wait(0.001)
            printed += capsys.readouterr().err
    assert capsys.readouterr().out == ""


def test_each_phase_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="autopar"):
        function = autopar.parallelize(lambda x: (x @ x).sum())
        for _ in range(2):
            function(jnp.ones((8, 8)))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in lines] == ["trace", "plan", "compile"]
    assert "operators" in lines[0]
    assert "a step and" in lines[1]


@pytest.mark.parametrize("planner", [slow(autopar.DataParallel()), autopar.Pipeline(stages=2, microbatches=2)])
def test_phases_of_compiling_ahead_of_time_and_of_a_report_are_told(planner: object, caplog: pytest.LogCaptureFixture):
    """Each phase has a line and its bar; of a pipeline, the bar moves from program to program."""
    heard = list[Progress]()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w)))(w)

    function = autopar.parallelize(step, planner=planner, progress=heard.append)
    arguments = jnp.ones((16, 16)), jnp.ones((32, 16))
    with caplog.at_level(logging.INFO, logger="autopar"):
        compiled = function.lower(*arguments).compile()
        compiled.verify()
        function.report(*arguments)
    verbs = [record.getMessage().split()[0] for record in caplog.records]
    assert verbs == ["trace", "plan", "lower", "compile", "verify", "compile", "measure"]
    segments = [segment.name for segment in compiled.lowered.program.segments] if "Pipeline" in str(planner) else []
    moved = [(progress.phase, progress.done) for progress in heard if progress.phase in segments]
    assert moved == 2 * [(name, number) for number, name in enumerate(segments)]


def test_bars_are_the_defaults_and_not_beside_the_users_own(monkeypatch: pytest.MonkeyPatch):
    quiet = list[bool]()
    monkeypatch.setattr(phases, "Console", lambda **options: quiet.append(options["quiet"]) or Console(quiet=True))
    heard = list[Progress]()
    for progress in (None, heard.append, False):
        autopar.parallelize(lambda x: x + 1, progress=progress).plan(jnp.ones(8))
    assert quiet == [False] * 2 + [True] * 4
    assert heard
    with phase("nothing", heard.append) as current:
        assert current.report == heard.append
