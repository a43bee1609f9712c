"""The bar that shows a search on a terminal."""

from __future__ import annotations

import pytest
from rich.console import Console

from autopar import Progress
from autopar.tools.progress_bar import shown, words


def test_words():
    some = Progress(phase="solve x=8", done=1, total=2, best_seconds=0.00136, seconds_left=39.9)
    assert words(some) == "solve x=8, best 1.36 ms, 40 s left"
    assert words(Progress(phase="solve x=8", done=1, total=None)) == "solve x=8"


def test_a_bar_moves_on_a_terminal(capsys: pytest.CaptureFixture[str]):
    with shown(Console(stderr=True, force_terminal=True, width=100)) as report:
        report(Progress(phase="solve [x]", done=1, total=4, best_seconds=0.002))
    printed = capsys.readouterr()
    assert "solve [x], best 2.00 ms" in printed.err
    assert "1/4" in printed.err
    assert printed.out == ""


def test_no_bar_elsewhere(capsys: pytest.CaptureFixture[str]):
    for console in (Console(stderr=True), Console(stderr=True, force_terminal=True, quiet=True)):
        with shown(console) as report:
            report(Progress(phase="solve", done=1, total=4))
    assert capsys.readouterr().err == ""
