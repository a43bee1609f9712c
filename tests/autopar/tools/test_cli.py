"""The command line on saved plans and on a tiny step: what it prints, what it exits with, how it complains."""

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import autopar
from autopar.tools import doctor_command, pareto_front
from autopar.tools.cli import main, parser
from autopar.tools.parsing import commands_of
from passes.errors import ClusterError
from passes.plan import Plan
from passes.plan.json import version
from tests.autopar.tools.train_module import OTHER, PLAN, TRAIN


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_show_prints_the_plan(capsys):
    assert main(["show", PLAN]) == 0
    out = capsys.readouterr().out
    for word in (
        "data=4 x tensor=2, 8 devices",
        "1.69 ms",
        "515 MiB",
        "all_reduce",
        "params['h_*']['up']",
        "[-, tensor]",
    ):
        assert word in out
    assert "dot_general" not in out


def test_show_operators_prints_every_operator(capsys):
    assert main(["show", PLAN, "--operators"]) == 0
    assert capsys.readouterr().out.count("dot_general") == 4


@pytest.mark.parametrize("command", [["show", PLAN], ["show", PLAN, "--operators"], ["diff", PLAN, OTHER]])
def test_tables_fit_80_columns(capsys, command):
    main(command)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_show_json_is_the_plan(capsys):
    assert main(["show", PLAN, "--json"]) == 0
    assert Plan.from_json(json.loads(capsys.readouterr().out)) == Plan.load(PLAN)


def test_report_writes_a_page(capsys, tmp_path):
    page = tmp_path / "plan.html"
    assert main(["report", PLAN, "-o", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    assert page.read_text() == autopar.Plan.load(PLAN).to_html()


def test_report_names_its_page_after_the_plan_and_says_what_cannot_be_written(capsys, tmp_path):
    (tmp_path / "p.json").write_text(Path(PLAN).read_text())
    assert main(["report", str(tmp_path / "p.json")]) == 0
    assert (tmp_path / "p.html").is_file()
    assert main(["report", PLAN, "-o", str(tmp_path / "none" / "p.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_diff_exits_with_1_for_plans_that_differ(capsys):
    assert main(["diff", PLAN, OTHER]) == 1
    out = capsys.readouterr().out
    for word in (
        "megatron 4x2",
        "data parallel",
        "+45.7 %",
        "inputs placed otherwise: 4",
        "operators placed otherwise: 4",
    ):
        assert word in out


def test_diff_exits_with_0_for_plans_that_are_alike(capsys):
    assert main(["diff", PLAN, PLAN]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_diff_json_has_numbers(capsys):
    assert main(["diff", PLAN, OTHER, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert {"name": "all_reduce", "before": 0.000456, "after": 0} in data["seconds"]


@pytest.mark.parametrize(
    "command",
    [["show", "absent.json"], ["diff", PLAN, "absent.json"], ["diff", "absent.json", PLAN]],
)
def test_an_absent_plan_exits_with_2(capsys, command):
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"autopar {command[0]}: absent.json: the plan cannot be read: No such file")


def test_a_file_that_is_no_plan_exits_with_2(capsys, tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    assert main(["show", str(tmp_path / "plan.json")]) == 2
    assert "this is not a plan" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["paint"], ["show"], ["plan", "train:example"]])
def test_an_incomplete_command_exits_with_2(command):
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2


COMMANDS = commands_of(parser())
SCREEN = 48
"""Lines of a terminal that is as high as a screen."""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_has_an_exit_status_and_an_example_that_is_read(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "exit status: 0" in out or command == "launch"
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) <= SCREEN
    examples = out.partition("example:\n")[2].partition("\n\n")[0].replace("\\\n", " ")
    written = [line.strip() for line in examples.splitlines() if line.strip().startswith("autopar ")]
    assert any(line.startswith(f"autopar {command}") for line in written)
    for line in written:
        parser().parse_args(shlex.split(line.partition(" > ")[0])[1:])


def test_without_a_command_the_commands_are_listed(capsys):
    assert main([]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert "make a plan" in shown.err
    assert "autopar explain plan.json" in shown.err


def test_the_first_help_fits_a_screen_and_the_version_is_told(capsys):
    for option in ("--help", "--version"):
        with pytest.raises(SystemExit):
            main([option])
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= SCREEN
    assert out.splitlines()[-1] == f"autopar {version()}"


def test_doctor_tells_versions_devices_and_what_is_in_the_way(capsys, monkeypatch):
    main(["doctor"])
    out = capsys.readouterr().out
    assert version() in out
    assert "8 devices: cpu" in out
    monkeypatch.setattr(doctor_command, "local_cluster", _unknown)
    assert main(["doctor"]) == 1
    assert "no data of 'cpu'" in capsys.readouterr().out


def test_doctor_names_every_part_that_is_optional():
    extras = tomllib.loads((Path(autopar.__file__).parents[1] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ].keys()
    remedies = " ".join(doctor_command.OPTIONAL.values())
    assert [extra for extra in extras - {"dev", "docs"} if f"autopar[{extra}]" not in remedies] == []


@pytest.mark.usefixtures("train")
def test_a_module_that_ends_the_program_is_told_of(capsys):
    Path("script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['--lr', '1'])\n")
    assert main(["plan", "script:example", "--cluster", "8:h100"]) == 2
    assert "script:example: the module or the function ends the program" in capsys.readouterr().err


def _unknown(*args, **kwargs):
    raise ClusterError("made up")


def test_the_command_line_runs_as_a_program():
    ran = subprocess.run(
        [sys.executable, "-m", "autopar.tools.cli", "diff", PLAN, OTHER], capture_output=True, text=True
    )
    # XLA's compiler for GPUs, where it is installed, writes lines of its own when JAX is imported.
    written = [line for line in ran.stderr.splitlines() if "absl::" not in line and "cudart_stub" not in line]
    assert (ran.returncode, written) == (1, [])


# Planning


@pytest.mark.parametrize("function", ["example", "example_with_keywords", "parallel_example"])
def test_plan_shows_and_saves(capsys, train, function):
    assert main(["plan", f"train:{function}", "--cluster", "1x4:a100-80g", "--out", "plan.json"]) == 0
    assert "predicted step time" in capsys.readouterr().out
    assert Plan.load("plan.json").cluster.n_devices == 4


@pytest.mark.parametrize("planner", ["dp", "zero3", "megatron:2x2"])
def test_plan_takes_every_planner(capsys, train, planner):
    assert main(["plan", "train:example", "--cluster", "1x4:a100-80g", "--planner", planner, "--json"]) == 0
    assert Plan.from_json(json.loads(capsys.readouterr().out)).mesh.size == 4


def test_plan_does_without_what_is_forbidden(capsys, train):
    command = ["plan", "train:example", "--cluster", "1x4:a100-80g", "--forbid", "all_reduce, all_to_all", "--json"]
    assert main(command) == 0
    plan = Plan.from_json(json.loads(capsys.readouterr().out))
    assert plan.mesh.forbidden == ("all_reduce", "all_to_all")
    assert not {"all_reduce", "all_to_all"} & {collective.kind for collective in plan.collectives}


def test_a_saved_plan_is_a_planner(capsys, train):
    command = ["plan", "train:example", "--cluster", "1x4:a100-80g"]
    assert main([*command, "--out", "plan.json"]) == 0
    assert main([*command, "--planner", "manual:plan.json", "--out", "again.json"]) == 0
    assert Plan.load("plan.json").diff(Plan.load("again.json")).is_empty
    capsys.readouterr()
    (train / "train.py").write_text(TRAIN.replace("128, 64", "256, 64"))
    sys.modules.pop("train")
    assert main([*command, "--planner", "manual:plan.json"]) == 2
    assert "a plan belongs to one function" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("train", [], "is not MODULE:FUNCTION"),
        ("absent:example", [], "no module 'absent'"),
        ("../train:example", [], "'../train:example' is not MODULE:FUNCTION"),
        ("train.py:example", [], "write train:example"),
        ("src/train.py", [], "write src.train:FUNCTION"),
        ("train:absent", [], "has no function 'absent'\n  it has step, example"),
        ("train:exampel", [], "did you mean 'example'"),
        ("train:constant", [], "has no function 'constant'"),
        ("train:not_an_example", [], "returned int, not a step and its arguments"),
        ("train:lone_example", [], "it returned a step and ShapeDtypeStruct, and the step's arguments are a tuple"),
        ("train:flat_example", [], "return (step, (state, batch))"),
        ("train:unpacked_example", [], "it returned 4 arguments for a step that takes params, batch: too many"),
        ("train:example", ["--planner", "magic"], "'magic' is not a planner"),
        ("train:example", ["--forbid", "gather"], "'gather' is no kind of collective"),
        ("train:example", ["--planner", "dp", "--forbid", "all_reduce"], "are of --planner auto"),
        ("train:example", ["--forbid", ""], "'' is no kind of collective"),
        ("train:example", ["--mesh", ""], "--mesh '': write, say, --mesh data=4,model=2"),
        ("train:example", ["--mesh", "a=2,a=4"], "--mesh 'a' is both '2' and '4': choose one"),
        ("train:example", ["--pin", "up=[x, -]", "--pin", "up=[-, x]"], "--pin 'up' is both '[x, -]' and '[-, x]'"),
        ("train:example", ["--planner", "megatron:4"], "'megatron:4' is not a planner"),
        ("train:example", ["--planner", "manual:"], "'manual:' is not a planner"),
        ("train:example", ["--planner", "manual:absent.json"], r"absent.json: the plan cannot be read"),
        ("train:example", ["--cluster", "1x4:abacus"], "abacus"),
        ("train:example", ["--planner", "pipeline:2x0"], "'pipeline:2x0': both are whole numbers from 1"),
        ("train:example", ["--planner", "gpipe:2x0"], "write, say, --planner gpipe:4x2"),
        ("train:example", ["--planner", "pipeline:3x4"], "choose a number of stages that divides them"),
        ("train:example", ["--planner", "pipeline:8x4"], "use fewer stages"),
        ("train:example", ["--microbatches", "7", "--no-cache"], "7 microbatches: "),
        ("train:example", ["--planner", "megatron:2x1"], "--planner megatron:2x1: this makes 2 devices"),
        ("absent:example", ["--out", "absent/plan.json"], "the plan cannot be written: there is no folder absent"),
        ("absent:example", ["--out", "train.py/plan.json"], "the plan cannot be written: there is no folder train.py"),
        ("absent:example", ["--out", "."], "the plan cannot be written: it is a folder"),
        ("absent:example", ["--plot", "absent/plot.png"], "the plot cannot be written: there is no folder absent"),
    ],
)
def test_a_wrong_command_exits_with_2_and_says_why(capsys, train, target, options, message):
    cluster = [] if "--cluster" in options else ["--cluster", "1x4:a100-80g"]
    assert main(["plan", target, *cluster, *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import a_module_that_nobody_has", "ModuleNotFoundError: No module named 'a_module_that_nobody_has'"),
        ("def example(): return 1 / 0", "ZeroDivisionError: division by zero"),
        ("def example(:", "SyntaxError: invalid syntax"),
        ("def example(): return (lambda x: undefined(x)), (1.0,)", "NameError: name 'undefined' is not defined"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "fit"])
def test_errors_of_the_users_module_are_theirs_to_see(capsys, train, command, text, error):
    """With 2: 1 is the answer that nothing fits."""
    (train / "broken.py").write_text(f"{text}\n")
    sys.modules.pop("broken", None)
    assert main([command, "broken:example", "--cluster", "1x4:a100-80g"]) == 2
    written = capsys.readouterr().err
    assert error in written
    assert "broken.py" in written
    assert "importlib" not in written
    assert "targets.py" not in written
    assert "cli.py" not in written
    assert "tracing.py" not in written


def test_an_error_of_autopar_itself_is_shown_whole(capsys, train, monkeypatch):
    monkeypatch.setattr(pareto_front, "front", None)
    assert main(["plan", "train:example", "--cluster", "1x4:a100-80g"]) == 2
    written = capsys.readouterr().err
    assert "cli.py" in written
    assert "TypeError: 'NoneType' object is not callable" in written


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["plan", "train:example", "--alternatives", "0"], "'0' should be a whole number from 1"),
        (["plan", "train:example", "--microbatches", "-2"], "'-2' should be a whole number from 1"),
        (["fit", "train:example", "--seconds", "-3"], "'-3' should be a number from 0"),
        (["fit", "train:example", "--seconds", "nan"], "'nan' should be a number from 0"),
        (["simulate", "train:example", "--tokens", "0"], "'0' should be a number above 0"),
        (["simulate", "train:example", "--price-per-device-hour", "inf"], "'inf' should be a number above 0"),
        (["measure", "--devices", "0", "--out", "here.json"], "'0' should be a whole number from 1"),
        (["measure", "--devices", "two", "--out", "here.json"], "'two' should be a whole number from 1"),
        (["launch", "--processes", "two", "train.py"], "'two' should be a whole number from 1"),
        (["run", "--restarts", "-1", "--resume", "x", "--processes", "2", "train.py"], "a whole number from 0"),
        (["run", "--lost-seconds", "nan", "--resume", "x", "--processes", "2", "train.py"], "a number above 0"),
        (["run", "--lost-seconds", "0", "--resume", "x", "--processes", "2", "train.py"], "a number above 0"),
    ],
)
def test_a_number_that_cannot_be_is_refused_with_its_option(capsys, train, command, message):
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 2
    written = capsys.readouterr().err
    assert f"argument {next(each for each in command if each.startswith('--'))}:" in written
    assert message in written


def test_measure_is_refused_before_it_begins_if_its_file_cannot_be_written(capsys, train):
    assert main(["measure", "--devices", "1", "--out", "absent/here.json"]) == 2
    assert "the cluster cannot be written: there is no folder absent" in capsys.readouterr().err


def test_a_file_is_no_folder_of_checkpoints(capsys, train):
    assert main(["run", "--resume", "broken.py", "--processes", "1", "train.py"]) == 2
    assert "--resume broken.py: it is a file" in capsys.readouterr().err
