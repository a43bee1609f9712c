"""The command line on saved plans and on a tiny step: what it prints, what it exits with, how it complains."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from autopar.tools.cli import main
from passes.plan import Plan

GOLDEN = Path(__file__).parents[2] / "golden"
PLAN, OTHER = str(GOLDEN / "plan.json"), str(GOLDEN / "plan_other.json")

TRAIN = """\
import jax
import jax.numpy as jnp
import autopar

def step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p["up"]) @ p["down"]))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

def example():
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    return step, ({"up": f32(64, 256), "down": f32(256, 64)}, f32(128, 64))

def example_with_keywords():
    step, (params, batch) = example()
    return step, (params,), {"batch": batch}

@autopar.parallelize(static_argnames="rate", donate_argnums=0)
def parallel_step(params, batch, rate):
    return jax.tree.map(lambda p: p - rate, params), step(params, batch)[1]

def parallel_example():
    _, (params, batch) = example()
    return parallel_step, [params, batch], {"rate": 0.5}

def not_an_example():
    return 17

constant = 17
"""


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def train(tmp_path, monkeypatch):
    """A folder with train.py, as the current one."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "broken.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Bytecode is told from its source by size and second: of a file written twice in one, the first would be run.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in ("train", "broken"):
        sys.modules.pop(name, None)


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


@pytest.mark.parametrize("command", [[], ["paint"], ["show"], ["plan", "train:example"]])
def test_an_incomplete_command_exits_with_2(command):
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2


@pytest.mark.parametrize("command", ["plan", "show", "diff"])
def test_help_has_an_example_and_the_exit_status(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0
    assert f"example:\n  autopar {command} " in out
    assert "exit status: 0" in out
    assert max(map(len, out.splitlines())) <= 80


def test_it_runs_as_a_program():
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
        ("train:absent", [], "has no function 'absent'"),
        ("train:constant", [], "has no function 'constant'"),
        ("train:not_an_example", [], "returned int, not a step and its arguments"),
        ("train:example", ["--planner", "magic"], "'magic' is not a planner"),
        ("train:example", ["--planner", "megatron:4"], "'megatron:4' is not a planner"),
        ("train:example", ["--planner", "manual:"], "'manual:' is not a planner"),
        ("train:example", ["--planner", "manual:absent.json"], r"absent.json: the plan cannot be read"),
        ("train:example", ["--cluster", "1x4:abacus"], "abacus"),
    ],
)
def test_a_wrong_command_exits_with_2_and_says_why(capsys, train, target, options, message):
    assert main(["plan", target, "--cluster", "1x4:a100-80g", *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_errors_of_the_users_module_are_theirs_to_see(train):
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        main(["plan", "broken:example", "--cluster", "1x4:a100-80g"])
