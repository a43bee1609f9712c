"""`autopar explain`, and plans on the front of time against memory, on a tiny step."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.tools import fit, targets
from autopar.tools.cli import main
from autopar.tools.pareto_front import LESS, front
from passes.errors import OverBudgetError
from passes.intra_op import pins
from passes.plan import LayerCost, load_plan
from passes.plan.text import layers_table
from passes.planners import reasons
from passes.planners.placement_reasons import ROUGH
from tests.autopar.tools.train_module import PLAN  # a fixture

ARGUMENTS = ["plan", "train:example", "--cluster", "4:h100", "--no-cache"]


@pytest.fixture
def plan(train):
    sys.path.insert(0, str(train))
    assert main([*ARGUMENTS, "--out", "plan.json"]) == 0
    return train / "plan.json"


def test_explain_says_what_else_there_was(plan, capsys):
    capsys.readouterr()
    assert main(["explain", str(plan), "up"]) == 0
    out = capsys.readouterr().out
    for words in (
        "params['up'], float32[64,256], lies as",
        "A step takes",
        "Solving the rest again around others",
        "%",
    ):
        assert words in out


def test_types_that_an_edit_took_out_of_a_plan_are_those_of_the_step(plan, capsys):
    plan.write_text(plan.read_text().replace('"type": "float32[64,256]"', '"note": ""'))
    assert main(["explain", str(plan), "up"]) == 0
    assert "params['up'], float32[64,256], lies as" in capsys.readouterr().out


def test_a_rival_costs_what_a_plan_that_is_pinned_to_it_costs(plan):
    example = fit.Example.of(*targets.example("train:example"))
    saved = load_plan(plan)
    step = saved.step_of(fit.traced_step(example))
    (program,) = saved.programs
    assert len(program.mesh.axes) == 1
    found = reasons(step, program, "down", 2**40)
    assert len(found.rivals) > 1
    assert found.seconds == pytest.approx(saved.step_seconds)
    for rival in found.rivals[:2]:
        planner = autopar.Auto(pins={"down": str(rival.spec)}, mesh={program.mesh.axes[0]: 4})
        again = autopar.parallelize(example.step, cluster="4:h100", planner=planner).plan(*example.args)
        assert rival.seconds == pytest.approx(again.step_seconds, rel=ROUGH)
        assert rival.seconds >= (1 - ROUGH) * found.seconds


def test_memory_is_named_where_it_binds(plan):
    saved = load_plan(plan)
    step = saved.step_of(fit.traced_step(fit.Example.of(*targets.example("train:example"))))
    (program,) = saved.programs
    found = reasons(step, program, "down", 2**40)
    slower = [rival for rival in found.rivals if rival.seconds > 1.05 * found.seconds]
    slow = replace(found, seconds=slower[-1].seconds * 1.1, limit_nbytes=1)
    assert "What binds is memory" in slow.text()
    assert "over the limit" in slow.text()


@pytest.mark.parametrize(
    ("what", "known"),
    [
        ("nothing", "inputs are "),
        ("nothing.py:3", "name one"),
        ("params/upp", "did you mean 'params/up'"),
        ("updaet", "did you mean 'update'"),
    ],
)
def test_explain_says_what_there_is(plan, capsys, what, known):
    assert main(["explain", str(plan), what]) == 2
    written = capsys.readouterr().err
    assert known in written
    assert "name one" in written


def test_a_step_without_inputs_has_none_to_name():
    assert pins.guesses("x", ()) == "inputs are none"


def test_explain_shows_what_layers_cost_and_one_by_its_name(plan, capsys):
    assert main(["explain", str(plan)]) == 0
    table = capsys.readouterr().out
    assert "cost by layer" in table
    assert "update" in table
    assert main(["explain", str(plan), "update"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("update")]
    assert row.split() in [line.split() for line in table.splitlines()]
    assert main(["explain", str(plan), ""]) == 0
    assert capsys.readouterr().out == table
    assert main(["explain", PLAN]) == 2
    assert "does not say what its layers cost" in capsys.readouterr().err


def test_layers_that_look_alike_are_one_row_of_their_stage():
    def layer(name, seconds):
        return LayerCost(name=name, compute_seconds=seconds, moving_seconds=0.0, state_nbytes=8, live_nbytes=0)

    stages = [[layer("Block_0", 1.0), layer("Block_1", 1.0)], [layer("Block_2", 1.0), layer("head", 2.0)]]
    rows = [(row[0], row[1], row[4]) for row in layers_table(stages).rows]
    assert rows == [("Block_0 to Block_1, each", "0", "20.0 %"), ("Block_2", "1", "20.0 %"), ("head", "1", "40.0 %")]
    assert [row[0] for row in layers_table(stages, "head").rows] == ["head"]


def test_explain_shows_a_line_with_what_it_sends(capsys):
    assert main(["explain", PLAN, "mlp.py:13"]) == 0
    out = capsys.readouterr().out
    assert "dot_general" in out
    assert "sends for" in out


def test_a_line_is_named_as_tables_write_it_and_is_of_no_other_file(plan, capsys):
    (program,) = load_plan(plan).programs
    (line,) = {op.source.split(":")[1].split(" ")[0] for op in program.operators if op.primitive == "tanh"}
    text = plan.read_text()
    folder = str(plan.parent)
    plan.write_text(text.replace(folder, "/home/me/my project"))
    for written in (
        f"train.py:{line}",
        f"my project/train.py:{line} (step.<lambda>)",
        f"/home/me/my project/train.py:{line}",
    ):
        assert main(["explain", str(plan), written]) == 0
        assert "tanh" in capsys.readouterr().out
    assert main(["explain", str(plan), f"rain.py:{line}"]) == 2
    assert "no operator of the plan is of this line" in capsys.readouterr().err


def test_a_plan_without_a_target_tells_what_was_chosen(capsys):
    assert main(["explain", PLAN, "up"]) == 0
    out = capsys.readouterr().out
    assert "as [-, tensor]" in out
    assert "--target" in out


def test_arrays_of_several_types_are_named(plan, capsys):
    assert main(["explain", str(plan), "params/*"]) == 2
    assert "params/up float32[64,256]" in capsys.readouterr().err


@pytest.mark.slow
def test_alternatives_take_longer_and_need_less(train, capsys):
    assert main([*ARGUMENTS, "--alternatives", "3", "--out", "p.json", "--plot", "front.svg"]) == 0
    assert "time against memory" in capsys.readouterr().out
    assert Path("front.svg").stat().st_size > 1000
    plans = [load_plan(path) for path in ("p.json", *map(str, sorted(Path().glob("p-*.json"))))]
    assert len(plans) > 1
    for before, after in itertools.pairwise(plans):
        assert after.peak_nbytes <= LESS * before.peak_nbytes
        assert after.step_seconds >= before.step_seconds


@pytest.mark.slow
def test_a_front_ends_where_nothing_needs_less(train):
    example = fit.Example.of(*targets.example("train:example"))
    step = autopar.parallelize(example.step, cluster="1:h100")
    assert 1 <= len(front(step, example.args, {}, 30)) < 30


def test_each_plan_of_a_front_takes_longer_than_all_before_it():
    """A search with a limit may look longer, and find a plan that is better than the first two."""
    sizes, seconds = (100, 80, 60, 50), (10.0, 12.0, 9.0, 11.0)
    plans = [
        SimpleNamespace(peak_nbytes=size, step_seconds=each, is_interrupted=False)
        for size, each in zip(sizes, seconds, strict=True)
    ]

    def limited(memory_limit: int) -> SimpleNamespace:
        fitting = [plan for plan in plans if plan.peak_nbytes <= memory_limit]
        if not fitting:
            raise OverBudgetError("none")
        return SimpleNamespace(plan=lambda: fitting[0])

    step = SimpleNamespace(plan=lambda: plans[0], replan=limited)
    assert front(step, (), {}, 3) == [plans[2], plans[3]]


def test_a_limit_below_the_plan_is_told_with_what_others_need(plan, capsys):
    assert main(["explain", str(plan), "up", "--memory-limit", "1 KiB"]) == 0
    out = capsys.readouterr().out
    assert "more than the 948 B planned with" in out
    assert "with any other placement a device needs" in out
    assert main(["explain", str(plan), "--memory-limit", "much"]) == 2
    assert "--memory-limit 'much'" in capsys.readouterr().err


def test_the_command_line_pins(train, capsys):
    assert main([*ARGUMENTS, "--pin", "up=[x, -]", "--mesh", "x=4", "--out", "p.json"]) == 0
    plan = load_plan("p.json")
    assert str(dict(zip(plan.input_names, plan.inputs, strict=True))["params['up']"]) == "[x, -]"
    for wrong in (["--pin", "up"], ["--mesh", "x=a"], ["--mesh", "x=4", "--planner", "dp"]):
        assert main([*ARGUMENTS, *wrong]) == 2


def test_three_commands_lead_to_an_explained_plan(train, capsys):
    assert main([*ARGUMENTS, "--out", "plan.json"]) == 0
    assert main(["explain", "plan.json", "params/up"]) == 0
    assert "lies as" in capsys.readouterr().out
    assert main(["report", "plan.json"]) == 0
    assert "What was rejected" in Path("plan.html").read_text()


def test_a_loop_over_the_batch_is_explained_as_it_was_planned() -> None:
    def step(w, x):
        return jnp.tanh(jax.lax.map(lambda row: row @ w, x)).mean()

    args = (jnp.ones((8, 8)), jnp.ones((16, 4, 8)))
    plan = autopar.parallelize(step, cluster="8:a100-80g", planner=autopar.DataParallel()).plan(*args)
    assert fit.planned_step(plan, fit.Example.of(step, args, {})).graph.fingerprint == plan.fingerprint
