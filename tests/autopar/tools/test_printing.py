"""The words of commands about files and terminals that are others than they would like."""

import errno
import io
import os
import sys
import warnings
from pathlib import Path

import pytest

from autopar.tools.cli import main
from autopar.tools.printing import printed
from passes.plan import Plan
from passes.text import Column, Table
from tests.autopar.tools.train_module import PLAN  # a fixture


def test_a_saved_plan_is_counted_for_the_cluster_that_is_named(train):
    command = ["plan", "train:example", "--planner", "dp", "--cluster"]
    assert main([*command, "4:a100-80g", "--out", "a100.json"]) == main([*command, "4:h100", "--out", "h100.json"]) == 0
    assert main([*command[:2], "--planner", "manual:a100.json", "--cluster", "4:h100", "--out", "moved.json"]) == 0
    moved, expected = Plan.load("moved.json"), Plan.load("h100.json")
    assert moved.cluster == expected.cluster
    assert moved.seconds == pytest.approx(expected.seconds)


def warnings_of(command):
    """What a command says on stderr, with its warnings as they are shown."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "showwarning", lambda *of: shown.write(warnings.formatwarning(*of[:4])))
        patch.setattr(warnings, "filters", [("always", None, Warning, None, 0)])
        assert main(command) == 0
    return shown.getvalue()


def test_a_plan_for_fewer_devices_leaves_some_idle_and_is_no_optimum(train):
    command = ["plan", "train:example", "--cluster"]
    assert main([*command, "2:h100", "--out", "two.json"]) == 0
    with pytest.warns(UserWarning, match=r"for 2 devices \(.*\): 6 of 8 devices of '8:h100' stand idle\n  plan again"):
        assert main([*command, "8:h100", "--planner", "manual:two.json", "--out", "eight.json"]) == 0
    assert "autopar plan: the plan was made for 2 devices" in warnings_of(
        [*command, "4:h100", "--planner", "manual:two.json"]
    )
    two, eight = Plan.load("two.json"), Plan.load("eight.json")
    assert (two.solution.status, eight.solution.status) == ("optimal", "edited")
    assert (eight.n_devices, eight.seconds) == (2, two.seconds)
    assert eight.solution.bound == 0


def test_output_that_cannot_be_printed_is_an_error_in_words(capsys, train, monkeypatch):
    assert main(["plan", "train:example", "--cluster", "4:h100", "--planner", "dp", "--out", "plan.json"]) == 0
    for encoding in ("ascii", "latin-1"):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
            assert main(["show", "plan.json"]) == 0

    def full(text):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "write", full)
        assert main(["show", "plan.json"]) == main(["show", "plan.json", "--json"]) == 2
    assert "autopar show: what it says cannot be printed: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_leaves_is_no_answer(form, capsys, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with monkeypatch.context() as patch, os.fdopen(writing, "w") as stdout:
        patch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as end:
            main(["diff", PLAN, PLAN.replace("plan.json", "plan_other.json"), *form])
    assert end.value.code == 141
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["show", PLAN, *form]) == 0
    assert capsys.readouterr().err == ""


def test_a_file_without_measured_steps_says_which_to_name(capsys, tmp_path: Path):
    (tmp_path / "steps.json").write_text("{}")
    assert main(["report", PLAN, "--measured", str(tmp_path / "steps.json"), "-o", str(tmp_path / "p.html")]) == 2
    assert "it has no measured steps\n  name the file that train_step.report" in capsys.readouterr().err


def test_no_column_is_cut_where_nobody_looks_on_a_terminal(capsys):
    columns = tuple(Column(heading=f"heading {i}") for i in range(20))
    printed((Table(title="wide", columns=columns, rows=(tuple(f"cell {i}" for i in range(20)),)),))
    shown = capsys.readouterr().out
    assert all(f"heading {i}" in shown and f"cell {i}" in shown for i in range(20))
    assert "…" not in shown


def test_rows_that_go_to_no_terminal_are_whole_unless_columns_says_how_wide(capsys, monkeypatch):
    columns = (Column(heading="input", flexible=True), Column(heading="type"))
    table = Table(title="inputs", columns=columns, rows=(("state/" + "kernel/" * 20, "float32[8]"),))
    monkeypatch.delenv("COLUMNS", raising=False)
    printed((table,))
    assert "kernel/" * 20 + "  float32[8]\n" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "60")
    printed((table,))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert [line for line in lines if line != line.rstrip()] == []
