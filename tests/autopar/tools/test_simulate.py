"""`autopar simulate`: figures by their closed forms, sweeps, saved plans, the command line and its plot."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import ArgumentError
from autopar.tools import simulate_command, simulation, simulation_plot
from autopar.tools.cli import main
from passes.cluster import parse_cluster
from passes.errors import ClusterError, PlanningError
from passes.plan import Estimate, Plan
from passes.planners import Auto, DataParallel, Manual, Megatron, Pipeline, Zero, named
from tests.sample import slow

GOLDEN = Path(__file__).parents[2] / "golden"
ROWS, WIDTH, INNER = 64, 128, 512


def layer(x: jax.Array, p: Any) -> jax.Array:
    return jnp.tanh(x @ p["up"]) @ p["down"]


def loss_of(apply: Any) -> Any:
    return lambda params, x: jnp.mean(apply(apply(x, params[0]), params[1]) ** 2)


def step(params: Any, batch: jax.Array, apply: Any = layer) -> Any:
    loss, grads = jax.value_and_grad(loss_of(apply))(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def token_step(params: Any, tokens: jax.Array) -> Any:
    return step(params, jax.nn.one_hot(tokens, WIDTH).mean(axis=1))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


PARAMS = [{"up": f32(WIDTH, INNER), "down": f32(INNER, WIDTH)} for _ in range(2)]
ARGS = (PARAMS, f32(ROWS, WIDTH))
PRODUCT = 2.0 * ROWS * WIDTH * INNER
MODEL_FLOPS = (3 * 4 - 1) * PRODUCT
"""Four products, each with two gradients, but the batch has none."""


def without_latency(name: str) -> Any:
    """A cluster whose links and kernels begin at no cost, and which hides nothing of what it sends."""
    cluster = parse_cluster(name)
    group = cluster.group()
    intra, inter = (replace(link, alpha_seconds=0.0, low_latency=False) for link in (group.intra, group.inter))
    device = replace(group.device, launch_seconds=0.0, send_seconds=0.0, collective_overlap=0.0)
    return replace(cluster, groups=(replace(group, intra=intra, inter=inter, device=device),))


def estimates(simulated: autopar.Simulation) -> list[Estimate]:
    assert all(row.estimate for row in simulated.rows), [row.refusal for row in simulated.rows]
    return [row.estimate for row in simulated.rows if row.estimate]


@pytest.mark.parametrize("devices", [1, 4, 16])
def test_data_parallel_is_its_closed_form(devices: int):
    """The same flops on however many devices; without latency, exposed is a part of a ring over all gradients."""
    cluster = without_latency("2x8:a100-80g" if devices > 8 else f"{devices}:a100-80g")
    (estimate,) = estimates(autopar.simulate(step, ARGS, cluster=cluster, planner=DataParallel()))
    assert estimate.flops == MODEL_FLOPS
    peak = cluster.group().device.flops_per_second["float32"]
    assert estimate.mfu == pytest.approx(MODEL_FLOPS / devices / peak / estimate.step_seconds)
    gradients = 4 * (4 * WIDTH * INNER)
    assert estimate.exposed_seconds is not None
    if devices == 1:
        assert estimate.exposed_seconds == 0.0
    if devices == 4:
        ring = 2 * 3 / 4 * gradients / cluster.group().intra.bytes_per_second
        loss = 8.0 / cluster.group().intra.bytes_per_second
        assert estimate.exposed_seconds == pytest.approx(ring, abs=4 * loss)


def test_half_the_bandwidth_doubles_exposed_communication():
    cluster = without_latency("2x4:h100")
    both = autopar.simulate(step, ARGS, cluster=cluster, planner=DataParallel(), bandwidth=[1, 0.5])
    fast, slow = estimates(both)
    assert slow.exposed_seconds == pytest.approx(2 * fast.exposed_seconds)  # pyright: ignore
    assert slow.step_seconds - slow.exposed_seconds == pytest.approx(fast.step_seconds - fast.exposed_seconds)  # pyright: ignore


def test_the_bubble_of_a_planned_pipeline_is_the_timelines():
    planner = Pipeline(stages=2, microbatches=2)
    simulated = autopar.simulate(step, ARGS, cluster="2:h100", planner=planner, microbatches=[2, 8])
    for row, m in zip(simulated.rows, (2, 8), strict=True):
        plan = autopar.parallelize(step, cluster="2:h100", planner=replace(planner, microbatches=m)).plan(*ARGS)
        assert isinstance(plan, autopar.PipelinePlan)
        assert row.estimate is not None
        assert row.estimate == Estimate.of(plan)
        assert row.estimate.bubble == plan.bubble > 0
        assert row.estimate.flops == MODEL_FLOPS


@pytest.mark.parametrize(
    "remat", [lambda: (jax.checkpoint(layer), {}), lambda: (layer, {"remat": "inputs"})], ids=["checkpoint", "remat="]
)
def test_recomputed_flops_count_once(remat: Any):
    apply, options = remat()
    recomputed = autopar.parallelize(lambda p, x: step(p, x, apply), **options)
    (plain,) = estimates(autopar.simulate(step, ARGS, cluster="1:h100"))
    (estimate,) = estimates(autopar.simulate(recomputed, ARGS, cluster="1:h100"))
    assert estimate.flops == plain.flops == MODEL_FLOPS
    assert estimate.step_seconds > plain.step_seconds


def test_microbatches_and_loops_ask_for_the_same_flops():
    def scanned(params: Any, batch: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            out, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), batch, params)
            return jnp.mean(out**2)

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    stacked = {"up": f32(2, WIDTH, INNER), "down": f32(2, INNER, WIDTH)}
    simulated = autopar.simulate(scanned, (stacked, ARGS[1]), cluster="1:h100", microbatches=[1, 4])
    # A scan computes the gradient of what it was given, too: of the batch.
    assert [estimate.flops for estimate in estimates(simulated)] == [MODEL_FLOPS + PRODUCT] * 2


def test_every_combination_is_a_row_and_says_what_it_is():
    simulated = autopar.simulate(
        step,
        ARGS,
        cluster=["8:h100", "8:a100-80g"],
        planner=[DataParallel(), Megatron(data=4, tensor=2)],
        devices=[np.int64(4), 8],
        batch=[64, 128],
        tokens=1e9,
        tokens_per_step=1000,
        price_per_device_hour=2.0,
    )
    assert len(simulated.rows) == 16
    refused = [row for row in simulated.rows if row.estimate is None]
    assert {row.scenario.planner_name for row in refused if row.scenario} == {"Megatron(data=4, tensor=2)"}
    assert {row.scenario.cluster.n_devices for row in refused if row.scenario} == {4}
    assert all("has 4" in row.refusal for row in refused)
    data = simulated.to_json()
    assert [entry["cluster"] for entry in data[:8:2]] == ["4:h100", "8:h100", "4:a100-80g", "8:a100-80g"]
    first: dict[str, Any] = data[0]
    assert first["tokens_per_step"] == 1000.0
    assert data[8]["tokens_per_step"] == 2000.0
    assert first["days"] == pytest.approx(1e9 / 1000 * first["step_seconds"] / 86400)
    assert first["cost"] == pytest.approx(first["days"] * 24 * 4 * 2.0)
    text = str(simulated)
    assert "predicted, not measured" in text
    assert "1,000,000,000 tokens, at 2 for a device's hour" in text
    assert "what does not fit, or cannot be planned" in text
    assert max(map(len, text.splitlines())) <= 80


def test_twice_the_batch_is_twice_the_flops_and_tokens():
    simulated = autopar.simulate(
        token_step,
        (PARAMS, jax.ShapeDtypeStruct((64, 16), "int32")),
        cluster="8:h100",
        planner=DataParallel(),
        batch=[64, 128],
    )
    small, large = estimates(simulated)
    assert large.flops == 2 * small.flops
    assert [row.tokens_per_step for row in simulated.rows] == [64 * 16, 128 * 16]
    assert simulated.rows[1].tokens_per_second == pytest.approx(2048 / large.step_seconds)


def test_a_step_without_integers_has_an_unknown_number_of_tokens():
    simulated = autopar.simulate(step, ARGS, cluster="1:h100", tokens=1e9)
    assert simulated.rows[0].tokens_per_step is None
    assert "days" not in simulated.to_json()[0]
    assert "no array of integers says" in str(simulated)
    assert "a step sees: --tokens-per-step" in str(simulated)


@pytest.mark.slow
def test_a_row_that_fits_nowhere_has_the_plan_of_least_memory_and_the_reason():
    simulated = autopar.simulate(step, ARGS, cluster="8:h100", planner=[DataParallel(), Auto()], memory_limit="1 KiB")
    for row in simulated.rows:
        assert row.estimate is not None
        assert not row.fits
        assert "1,024 bytes" in row.refusal or "1.00 KiB" in row.refusal
    assert "over" in str(simulated)


def test_a_saved_plan_is_what_was_planned(tmp_path: Path):
    parallel = autopar.parallelize(step, cluster="2x4:h100", planner=Zero(3))
    plan = parallel.plan(*ARGS)
    plan.save(tmp_path / "plan.json")
    (row,) = autopar.simulate(Plan.load(tmp_path / "plan.json"), tokens_per_step=10.0).rows
    (same,) = autopar.simulate(step, ARGS, cluster="2x4:h100", planner=Zero(3)).rows
    assert row.estimate == same.estimate
    with pytest.raises(ArgumentError, match="nothing to vary"):
        autopar.simulate(plan, bandwidth=2)


@pytest.mark.parametrize("planner", [Zero(3), Pipeline(stages=2, microbatches=4)], ids=["mesh", "pipeline"])
def test_a_saved_plan_elsewhere_keeps_its_placements_and_is_counted_anew(planner: Any):
    """ZeRO and a pipeline of one device a stage leave no choice: planned there, all is placed as in the plan."""
    there, here = without_latency("2:h100"), without_latency("2:a100-80g")
    plan = autopar.parallelize(step, cluster=there, planner=planner).plan(*ARGS)
    moved = estimates(autopar.simulate(step, ARGS, cluster=here, planner=Manual(plan), bandwidth=[1, 0.5]))
    anew = estimates(autopar.simulate(step, ARGS, cluster=here, planner=planner, bandwidth=[1, 0.5]))
    for kept, other in zip(moved, anew, strict=True):
        assert kept.step_seconds == pytest.approx(other.step_seconds)
        assert kept.exposed_seconds == pytest.approx(other.exposed_seconds)
    longer = moved[1].exposed_seconds / moved[0].exposed_seconds  # pyright: ignore
    assert longer == pytest.approx(2.0) if isinstance(plan, Plan) else longer > 1  # stages hide transfers in part
    (row,) = autopar.simulate(step, ARGS, cluster="1:h100", planner=Manual(plan)).rows
    assert "made for 2 devices" in row.refusal


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ArgumentError, "for which cluster"),
        ({"cluster": "8:h100", "devices": 0}, ArgumentError, "devices=0: each should be a whole number from 1"),
        ({"cluster": "8:h100", "devices": 12}, ClusterError, "hosts of 8 are taken whole"),
        ({"cluster": "8:h100", "bandwidth": -1}, ArgumentError, "bandwidth=-1: each should be a number above 0"),
        ({"cluster": "8:abacus"}, ClusterError, "abacus"),
        ({"cluster": "8:h100", "tokens": -1}, ArgumentError, "tokens=-1: each should be a number above 0"),
        ({"cluster": "8:h100", "args": ARGS[1]}, ArgumentError, r"write simulate\(train_step, \(state, batch\)\)"),
        ({"cluster": "8:h100", "planner": Zero}, ArgumentError, "a planner is a value"),
    ],
)
def test_a_wrong_option_is_refused(options: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        autopar.simulate(step, options.pop("args", ARGS), **options)


def test_a_planner_is_named_as_it_would_be_written():
    assert named(Megatron(data=4, tensor=2)) == "Megatron(data=4, tensor=2)"
    assert named(Zero(2)) == "Zero(stage=2)"
    assert named(Auto()) == "Auto()"


# The command line

TRAIN = """\
import jax
import jax.numpy as jnp

def step(params, tokens):
    x = jax.nn.one_hot(tokens, 64).mean(axis=1)
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(x @ p["up"]) @ p["down"]))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

def example():
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    return step, ({"up": f32(64, 256), "down": f32(256, 64)}, jax.ShapeDtypeStruct((128, 16), "int32"))
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder with train.py, as the current one."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    sys.modules.pop("train", None)


def example_of_help() -> list[str]:
    """The command of the example, as a shell would split it."""
    text = simulate_command.COMMAND.more.partition("example:\n")[2].partition("\n\n")[0].replace("\\\n", " ")
    return text.split()[1:]


def test_the_example_of_help_runs_and_fits_a_screen(capsys, train: Path):
    assert main(example_of_help()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert sum("x8:h100" in line or " 8:h100" in line or line.startswith("8:h100") for line in lines) == 6
    assert "300,000,000,000 tokens, at 2.5 for a device's hour" in lines
    assert list((train / "cache").rglob("*.json"))


def test_help_fits_80_columns(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    out = capsys.readouterr().out
    assert "exit status: 0" in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_has_a_row_for_each_combination(capsys, train: Path):
    command = ["simulate", "train:example", "--cluster", "4:a100-80g", "--planner", "dp", "--planner", "pipeline:2x2"]
    assert main([*command, "--microbatches", "2,4", "--json", "--no-cache"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(row["planner"], row["microbatches"]) for row in data] == [
        ("dp", 2),
        ("pipeline:2x2", 2),
        ("dp", 4),
        ("pipeline:2x2", 4),
    ]
    assert all(row["model_flops"] == data[0]["model_flops"] for row in data)
    assert data[1]["bubble"] > data[3]["bubble"] > data[0]["bubble"] == 0
    assert not (train / "cache").exists()


def test_a_saved_plan_is_a_target(capsys, train: Path):
    assert main(["plan", "train:example", "--cluster", "4:a100-80g", "--planner", "dp", "--out", "plan.json"]) == 0
    capsys.readouterr()
    assert main(["simulate", "plan.json", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["step_seconds"] == Plan.load("plan.json").step_seconds
    assert main(["simulate", "plan.json", "--batch", "64"]) == 2
    assert "manual:plan.json" in capsys.readouterr().err
    assert main(["simulate", "plan.json", "--memory-limit", "1 KiB", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert not row["fits"]


def test_an_option_given_twice_is_swept(capsys, train: Path):
    command = ["simulate", "train:example", "--cluster", "8:h100", "--planner", "dp", "--json"]
    assert main([*command, "--devices", "2", "--devices", "4,8"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--cluster: a step is simulated on one"),
        (["--cluster", "8:h100", "--batch", "x"], "these are not whole numbers from 1"),
        (["--cluster", "8:h100", "--batch", "1.5"], "these are not all whole numbers from 1"),
        (["--cluster", "8:h100", "--bandwidth", "0"], "these are not all numbers above 0"),
        (["--cluster", "8:h100", "--price-per-device-hour", "2"], "it is the price of a training of --tokens"),
        (["--cluster", "8:h100", "--plot", "plot.txt"], "a plot is a file that ends in"),
        (["--cluster", "8:h100", "--planner", "megatron:3x3"], "this makes 9 devices"),
    ],
)
def test_a_wrong_command_exits_with_2_and_says_why(capsys, train: Path, options: list[str], message: str):
    assert main(["simulate", "train:example", *options]) == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_prints_the_rows_until_then(capsys, train: Path, monkeypatch: pytest.MonkeyPatch):
    planned = simulation._row

    def interrupted(compilation: Any, scenario: Any, *rest: Any) -> Any:
        if scenario.cluster.n_devices == 4:
            raise KeyboardInterrupt
        return planned(compilation, scenario, *rest)

    monkeypatch.setattr(simulation, "_row", interrupted)
    command = ["simulate", "train:example", "--cluster", "8:h100", "--planner", "dp", "--devices"]
    assert main([*command, "2,4,8"]) == 130
    out = capsys.readouterr().out
    assert [word in out for word in ("Ended by Ctrl-C", "2:h100", "8:h100")] == [True, True, False]
    assert main([*command, "4"]) == 130
    assert "interrupted before there was anything to show" in capsys.readouterr().err


# The plot


def swept(**options: Any) -> tuple[simulation.Row, ...]:
    return autopar.simulate(step, ARGS, cluster="8:h100", planner=[DataParallel(), Zero(3)], **options).rows


def test_the_axis_is_the_first_number_that_varies():
    rows = swept(batch=[64, 128], bandwidth=[1, 2])
    assert simulation_plot.axis_of(rows) == "batch"
    lines = simulation_plot.series(rows, "batch")
    assert set(lines) == {f"bandwidth {b}, {p}" for b in (1, 2) for p in ("DataParallel()", "Zero()")}
    assert all([x for x, _ in points] == [64, 128] for points in lines.values())
    assert simulation_plot.axis_of(swept()) is None
    assert [x for x, _ in simulation_plot.series(swept(), None)[""]] == ["DataParallel()", "Zero()"]


@pytest.mark.parametrize("suffix", [slow("png"), "svg"])
def test_a_plot_is_written(tmp_path: Path, suffix: str):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"sweep.{suffix}"
    autopar.Simulation(rows=swept(devices=[2, 8])).plot(path)
    assert path.stat().st_size > 1000
    with pytest.raises(PlanningError, match="a plot is a file that ends in"):
        autopar.Simulation(rows=()).plot(tmp_path / "sweep.txt")
