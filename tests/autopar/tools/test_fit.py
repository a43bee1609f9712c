"""`autopar fit`: the largest size that fits, the rows of the planners, the tables, the plots, the command line."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.tools import fit, fit_text, largest
from autopar.tools.cli import main
from autopar.tools.plot import plot_memory
from passes.cluster import parse_cluster
from passes.errors import PlanningError
from passes.memory import Holder, margin_of
from passes.plan import MemoryReport, Plan
from passes.plan.parts import busiest_of
from passes.planners import Auto
from passes.progress import Deadline

GOLDEN = Path(__file__).parents[2] / "golden"
CLUSTER = parse_cluster("1x4:a100-80g")
AMPLE = 2**30

TRAIN = """\
import jax
import jax.numpy as jnp

def step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p["up"]) @ p["down"]))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

def example(width=256):
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    return step, ({"up": f32(64, width), "down": f32(width, 64)}, f32(128, 64))

def sizes():
    return {"small": example(64), "large": lambda: example(1024)}

def seventeen():
    return 17
"""


def train_step(params: Any, batch: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p["up"]) @ p["down"]))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def example(width: int = 256, rows: int = 128) -> fit.Example:
    return fit.Example(step=train_step, args=({"up": f32(64, width), "down": f32(width, 64)}, f32(rows, 64)))


def room(limit: float, seconds: float | None = None) -> fit.Room:
    """Room for a prediction of so many bytes."""
    above = 1 + margin_of(CLUSTER.group().device)
    return fit.Room(cluster=CLUSTER, memory_limit=math.ceil(limit * above), seconds=seconds)


REPORT = MemoryReport(
    where="/home/me/models/mlp.py:12 (MLP.__call__)",
    holders=(Holder(name="dot_general at /home/me/models/mlp.py:12 (f)", nbytes=2**20, cause="transients"),),
    over_time=(2**20, 2**21, 2**22, 2**21),
)


def saved(**changes: Any) -> Plan:
    """A small plan with memory to show."""
    plan = Plan.load(GOLDEN / "plan.json")
    nbytes = {"parameters": 2**20, "gradients": 2**20, "saved for backward": 2**20, "transients": 2**20}
    return replace(plan, **{"nbytes": nbytes, "memory": REPORT} | changes)


def found() -> tuple[fit.Room, list[fit.Row], list[largest.Largest]]:
    """One row of each kind."""
    limit = 2.5 * 2**20
    lean = saved(nbytes={"parameters": 3 * 2**18, "outputs": 2**18}, microbatches=4, offloaded=(1,))
    rows = [
        fit.Row(name="jit", limit_nbytes=limit, refusal="no plan: for a reason\n  and a remedy"),
        fit.Row(name="ZeRO-3", limit_nbytes=limit, plan=saved()),
        fit.Row(name="searched", limit_nbytes=limit, plan=replace(lean, remat=("inputs", "inputs", "everything"))),
    ]
    stretched = [
        largest.Largest(name="ZeRO-3", what="batch", certain=True),
        largest.Largest(name="searched", what="batch", size=4096, row=rows[2]),
        largest.Largest(name="searched", what="preset", size="1.3B", certain=True, row=rows[2]),
        largest.Largest(name="ZeRO-3", what="preset", refusal="the step cannot be traced at other sizes"),
    ]
    return room(limit), rows, stretched


def test_the_tables_are_the_golden_text():
    text = "\n\n".join(table.format(80) for table in fit_text.tables(*found(), note="Ended by Ctrl-C."))
    assert max(map(len, text.splitlines())) <= 80
    assert text + "\n" == (GOLDEN / "fit.txt").read_text()


def test_columns_add_up_to_the_peak():
    plan = saved(nbytes={"parameters": 5, "optimizer state": 4, "transients": 11, "a new cause": 13})
    columns = fit_text.by_column(plan)
    assert columns == {"state": 9, "gradients": 0, "saved": 0, "other": 24}
    assert sum(columns.values()) == plan.peak_nbytes


# The largest that fits


def rows_of(nbytes_of_one: int, limit: float, asked: list[int]) -> Any:
    def planned(number: int) -> fit.Row:
        asked.append(number)
        plan = saved(nbytes={"parameters": 1000 + nbytes_of_one * number})
        return fit.Row(name="planner", limit_nbytes=limit, plan=plan)

    return planned


@pytest.mark.parametrize("start", [1, 3, 64, 500])
@pytest.mark.parametrize("number", [0, 1, 2, 7, 8, 100, 333])
def test_the_largest_that_fits_is_reached(start: int, number: int):
    asked: list[int] = []
    reached = largest.reach(rows_of(7, 1000 + 7 * number, asked), start, Deadline(), plans=16)
    assert (reached.number, reached.certain) == (number, True)
    assert reached.row is None if number == 0 else reached.row is not None and reached.row.fits
    assert len(asked) == len(set(asked)) <= 16


def test_no_number_above_the_most_is_tried():
    asked: list[int] = []
    assert largest.reach(rows_of(1, AMPLE, asked), 3, Deadline(), most=5).number == 5
    assert max(asked) == 5


def test_without_time_one_is_tried_and_nothing_is_certain():
    asked: list[int] = []
    reached = largest.reach(rows_of(1, AMPLE, asked), 4, Deadline(0.0))
    assert (reached.number, reached.certain) == (4, False)
    assert asked == [4]


def test_without_seconds_so_many_are_tried_whatever_time_they_take():
    asked: list[int] = []
    reached = largest.reach(rows_of(1, 1000 + 333, asked), 1, Deadline(), plans=3)
    assert (reached.number, reached.certain) == (4, False)
    assert asked == [1, 2, 4]


def test_the_largest_batch_fits_and_the_next_does_not():
    step = fit.traced_step(example())
    limit = fit.row("data parallel", step, room(AMPLE)).plan.peak_nbytes + 100_000
    match = next(largest.largest(example(), step, room(limit), [fit.row("data parallel", step, room(limit))], {}))
    assert match.what == "batch"
    assert match.certain
    assert match.size % CLUSTER.n_devices == 0
    peaks = [
        fit.row("data parallel", fit.traced_step(example(rows=match.size + more)), room(limit)).over_nbytes
        for more in (0, CLUSTER.n_devices)
    ]
    assert peaks[0] <= 0 < peaks[1]


def test_the_largest_preset_is_found(monkeypatch: Any):
    monkeypatch.setattr(largest, "STRETCHED", {"ZeRO-3": fit.PLANNERS["ZeRO-3"]})
    presets = largest.presets_of(
        {str(width): (lambda width=width: width) for width in (64, 256, 1024, 4096)}, lambda width: example(width)
    )
    limit = fit.row("ZeRO-3", fit.traced_step(example(1024)), room(AMPLE)).plan.peak_nbytes
    _, found = largest.largest(example(), fit.traced_step(example()), room(limit), [], presets)
    assert (found.what, found.size, found.certain) == ("preset", "1024", True)


def test_a_step_of_one_size_says_so():
    def rigid(params: Any, batch: jax.Array) -> Any:
        return train_step(params, jnp.reshape(batch, (128, 64)))

    given = replace(example(), step=rigid)
    step = fit.traced_step(given)
    answers = list(largest.largest(given, step, room(AMPLE), [], {}))
    assert all(x.size == 128 and not x.certain and "cannot be traced at other sizes" in x.refusal for x in answers)


def test_a_step_without_a_batch_says_so():
    given = fit.Example(step=lambda x: x * 2, args=(f32(),))
    step = fit.traced_step(given)
    assert not fit.row("ZeRO-3", step, room(AMPLE)).fits
    assert "none" in next(iter(largest.largest(given, step, room(AMPLE), [], {}))).refusal


# The planners


def test_every_planner_has_a_row():
    said: list[str] = []
    rows = list(fit.plans(fit.traced_step(example()), room(AMPLE), said.append))
    assert [row.name for row in rows] == ["jit", "data parallel", "ZeRO-1/2", "ZeRO-3", "Megatron", "searched"]
    assert all(row.fits for row in rows)
    assert {row.plan.mesh.size for row in rows[1:]} == {4}
    assert rows[0].plan.mesh.size == 1
    searched = rows[-1].plan.step_seconds
    assert all(searched <= row.plan.step_seconds * 1.001 for row in rows[1:])
    assert "planning ZeRO-3" in said


def test_megatron_is_the_plan_of_least_memory_where_none_fits_and_the_cheapest_where_all_do():
    step = fit.traced_step(example())
    cheapest, smallest = (fit.row("Megatron", step, room(limit)) for limit in (AMPLE, 1))
    assert cheapest.fits
    assert not smallest.fits
    assert smallest.plan.peak_nbytes <= cheapest.plan.peak_nbytes
    assert cheapest.plan.step_seconds <= smallest.plan.step_seconds
    assert smallest.over_nbytes == smallest.plan.peak_nbytes - smallest.limit_nbytes


def test_a_parallel_step_keeps_its_options():
    parallel = autopar.parallelize(train_step, donate_argnums=0, microbatches=2, memory_limit="1 kB")
    step = fit.traced_step(replace(example(), step=parallel))
    plan = fit.row("data parallel", step, room(AMPLE)).plan
    assert step.traced.donated == (True, True, False)
    assert 0 < plan.nbytes["outputs"] < 64  # the loss: the state is in the place of the old one


# What a plan says of memory


def test_a_plan_keeps_its_memory_in_its_file(tmp_path: Path):
    saved().save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == saved()
    with pytest.raises(PlanningError, match=r"memory.holders\[0\].nbytes should be a whole number"):
        Plan.from_json(json.loads((tmp_path / "plan.json").read_text().replace('"nbytes": 1048576', '"nbytes": "1"')))


def test_a_planned_step_says_where_its_memory_goes():
    plan = autopar.parallelize(train_step, cluster=CLUSTER, donate_argnums=0).plan(*example().args)
    assert plan.memory is not None
    assert max(plan.memory.over_time) == plan.peak_nbytes
    assert "test_fit.py" in plan.memory.where
    assert "over the step" in plan.format()


@pytest.mark.parametrize("size", [0, 1, 59, 60, 61, 1000])
def test_peaks_survive_resampling(size: int):
    values = [(7 * i) % 101 for i in range(size)]
    kept = busiest_of(values)
    assert len(kept) == min(60, size)
    assert not size or max(kept) == max(values)


def test_a_compiled_step_is_held_against_xla():
    params = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
    step = autopar.parallelize(train_step, donate_argnums=0, devices=jax.devices()[:4])
    compiled = step.lower(params, jnp.ones((128, 64))).compile()
    text = compiled.memory_report()
    rows = {line.split()[0]: line.split() for line in text.splitlines()[2:6]}
    assert list(rows) == ["arguments", "outputs", "temporaries", "peak"]
    assert 0.5 < float(rows["peak"][-1]) < 2


# Plots


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("limit", [None, 3 * 2**20, 80 * 2**30])
def test_plots_are_drawn(tmp_path: Path, suffix: str, limit: int | None):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"memory.{suffix}"
    plot_memory({"one": saved()}, path, limit)
    alone = path.stat().st_size
    plot_memory({"one": saved(), "two": saved()}, path, limit)
    assert alone > 1000 < path.stat().st_size


def test_a_plot_names_the_extra_that_is_missing(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    saved().save(tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json"), "--plot", str(tmp_path / "m.png")]) == 2
    assert "pip install 'autopar[plot]'" in capsys.readouterr().err


def test_a_plot_of_nothing_and_of_no_kind_is_refused(tmp_path: Path):
    with pytest.raises(PlanningError, match="does not say how its memory goes"):
        plot_memory({"old": saved(memory=None)}, tmp_path / "m.png")
    with pytest.raises(PlanningError, match=r"ends in \.png"):
        plot_memory({"one": saved()}, tmp_path / "m.jpeg2000")


# The command line


@pytest.fixture
def train(tmp_path: Path, monkeypatch: Any) -> Any:
    """A folder with fit_train.py, as the current one."""
    (tmp_path / "fit_train.py").write_text(TRAIN)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("fit_train", None)


COMMAND = ["fit", "fit_train:example", "--cluster", "1x4:a100-80g"]


def test_fit_prints_tables_of_80_columns(train: Path, capsys: Any):
    assert main([*COMMAND, "--seconds", "0", "--plot", "memory.svg"]) == 0
    out = capsys.readouterr().out
    for words in (
        "1x4:a100-80g, 4 devices: KiB of one device; 74.1 GiB predicted fit in 80.0 GiB",
        "ZeRO-3",
        "fits",
        "searched",
    ):
        assert words in out
    assert "largest" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert (train / "memory.svg").exists()


def test_the_seconds_are_those_of_the_search(train: Path, monkeypatch: Any):
    searches: list[float | None] = []
    choose = Auto.choose

    def counted(auto: Auto, *arguments: Any) -> Any:
        searches.append(auto.seconds)
        return choose(auto, *arguments)

    monkeypatch.setattr(Auto, "choose", counted)
    assert main([*COMMAND, "--seconds", "1", "--json"]) == 0
    assert searches
    assert set(searches) == {1.0}


def test_fit_finds_presets_and_prints_json(train: Path, capsys: Any):
    """The largest, without seconds: with them, the clock says how far each planner comes."""
    assert main([*COMMAND, "--presets", "fit_train:sizes", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["plan"] for row in data["rows"]] == list(fit.PLANNERS)
    assert data["limit_nbytes"] < 80 * 2**30
    presets = {row["plan"]: row["size"] for row in data["largest"] if row["what"] == "preset"}
    assert presets == {"data parallel": "large", "ZeRO-3": "large", "searched": "large"}


def test_nothing_that_fits_exits_with_1(train: Path, capsys: Any, monkeypatch: Any):
    monkeypatch.setattr(fit, "PLANNERS", {name: fit.PLANNERS[name] for name in ("jit", "ZeRO-3")})
    assert main([*COMMAND, "--seconds", "0", "--memory-limit", "1 KiB"]) == 1
    out = capsys.readouterr().out
    assert "; 948 B predicted fit in 1.00 KiB" in out  # a compiler may need that much more
    assert " fits " not in out


def test_ctrl_c_prints_the_rows_so_far(train: Path, capsys: Any, monkeypatch: Any):
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(fit, "PLANNERS", {"jit": fit.PLANNERS["jit"], "searched": interrupted})
    assert main(COMMAND) == 130
    out = capsys.readouterr().out
    assert "jit " in out
    assert "Ended by Ctrl-C: rows are missing." in out
    monkeypatch.setattr(fit, "PLANNERS", {"searched": interrupted})
    assert main([*COMMAND, "--plot", "nothing.svg"]) == 130
    assert "Ended by Ctrl-C: rows are missing." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory-limit", "much"], "--memory-limit 'much': a limit is a number of bytes"),
        (["--presets", "fit_train:seventeen"], "it returned int, and presets are a dict"),
        (["--presets", "fit_train:absent"], "has no function 'absent'"),
        (["--cluster", "1x4:abacus"], "abacus"),
    ],
)
def test_a_wrong_command_exits_with_2_and_says_why(train: Path, capsys: Any, options: list[str], message: str):
    command = COMMAND[: COMMAND.index("--cluster")] if "--cluster" in options else COMMAND
    assert main([*command, "--seconds", "0", *options]) == 2
    assert message in capsys.readouterr().err


def test_help_fits_80_columns(capsys: Any, monkeypatch: Any):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "exit status: 0" in out
