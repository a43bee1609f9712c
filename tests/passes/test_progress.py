"""The context of a search: how Ctrl-C ends it, and the progress that its parts report."""

import math

import pytest

from passes.errors import InternalError
from passes.progress import Deadline, Progress, SearchContext


def interrupted(context: SearchContext) -> KeyboardInterrupt:
    """Ctrl-C as it is pressed in a block of the search."""
    pressed = KeyboardInterrupt()
    with context.ending_early():
        raise pressed
    return pressed


def test_ctrl_c_ends_an_interruptible_search_with_what_it_has() -> None:
    context = SearchContext(interruptible=True)
    part = context.part("inner", best=lambda seconds: seconds)
    context.raise_if_interrupted()
    pressed = interrupted(part)
    assert part.is_interrupted
    assert context.is_interrupted
    assert context.kept("plan") == "plan"
    with pytest.raises(KeyboardInterrupt) as raised:
        context.kept(None)
    assert raised.value is pressed
    with pytest.raises(KeyboardInterrupt):
        context.raise_if_interrupted()


def test_ctrl_c_passes_through_other_searches() -> None:
    context = SearchContext()
    with pytest.raises(KeyboardInterrupt):
        interrupted(context)
    assert not context.is_interrupted
    with pytest.raises(InternalError):
        context.kept(None)


def test_errors_pass_through_every_search() -> None:
    context = SearchContext(interruptible=True)
    with pytest.raises(ValueError, match="an error"), context.ending_early():
        raise ValueError("an error")
    assert not context.is_interrupted


def test_parts_tell_the_whole_and_have_a_cutoff_of_their_own() -> None:
    heard: list[Progress] = []
    context = SearchContext(report=heard.append, deadline=Deadline(60.0), cutoff=2.0)
    outer = context.part("outer", best=lambda seconds: seconds and seconds / 2, cutoff=1.0)
    outer.part("", best=lambda _: 0.5).report(Progress(phase="solve", done=1, total=3, best_seconds=9.0))
    (told,) = heard
    assert (told.phase, told.done, told.total, told.best_seconds) == ("outer: solve", 1, 3, 0.25)
    assert told.seconds_left is not None
    assert 0 < told.seconds_left <= 60
    assert (context.cutoff, outer.cutoff, outer.part("", best=lambda _: None).cutoff) == (2.0, 1.0, math.inf)


def test_a_deadline_says_whether_anything_was_left_out() -> None:
    never, past = Deadline(), Deadline(0.0)
    assert (never.seconds_left, never.is_over(), never.was_met) == (None, False, False)
    assert (past.seconds_left, past.was_met) == (0.0, False)
    assert past.is_over()
    assert past.was_met
