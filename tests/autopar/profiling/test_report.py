"""Steps predicted and measured: stand-ins for times and profiles, and a real one of which no time is believed."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import reporting
from autopar.errors import ArgumentError
from autopar.profiling import Calibration, Factors, Stepper, StepReport, Steps, measured_shares, timed
from autopar.profiling import steps as step_times
from autopar.profiling.report import DISPATCH, WAITING, predicted_shares
from passes.cluster import parse_cluster, what_if
from passes.errors import PlanningError
from passes.page import REST
from passes.plan import PipelinePlan, Plan
from tests.sample import slow

ROWS, WIDTH = 32, 64


def step(params: Any, batch: jax.Array) -> Any:
    grads = jax.grad(lambda p: jnp.mean(jnp.tanh(jnp.tanh(batch @ p["up"]) @ p["down"])))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), jnp.sum(batch)


def arguments() -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    up, down = (jax.random.normal(key, (WIDTH, WIDTH)) for key in keys)
    return {"up": up, "down": down}, jnp.ones((ROWS, WIDTH))


def structs() -> Any:
    return jax.eval_shape(arguments)


STAGED = autopar.Megatron(data=2, tensor=1, pipeline=2, microbatches=4)
"""Stages of two devices each, which reduce their gradients."""

STEPS = Steps(seconds=(3.0, 1.0, 2.0), host_seconds=(0.5, 0.25, 0.125))


def plan_of(planner: Any, cluster: str = "2x2:h100") -> Any:
    return autopar.parallelize(step, cluster=cluster, planner=planner).plan(*structs())


# Steps


@pytest.mark.slow
def test_a_step_goes_on_from_the_state_of_the_last_and_the_callers_arrays_stay():
    params, batch = arguments()
    compiled = jax.jit(step, donate_argnums=0)
    leaves, tree = jax.tree.flatten((params, batch))
    stepper = Stepper(
        run=lambda flat: compiled(*jax.tree.unflatten(tree, flat)),
        leaves=leaves,
        pairs=((0, 0), (1, 1)),
        donated=(0, 1),
    )
    for _ in range(3):
        results = stepper.step()
    expected = params
    for _ in range(3):
        expected, _ = jax.jit(step)(expected, batch)
    jax.tree.map(np.testing.assert_allclose, results[0], expected)
    assert not any(leaf.is_deleted() for leaf in leaves)


def test_a_donated_argument_without_a_result_is_copied_for_every_step():
    doubled = jax.jit(lambda x: 2 * x, donate_argnums=0)
    x = jnp.arange(4.0)
    stepper = Stepper(run=lambda flat: doubled(*flat), leaves=[x], pairs=(), donated=(0,))
    for _ in range(2):
        np.testing.assert_array_equal(stepper.step(), 2 * np.arange(4.0))
    np.testing.assert_array_equal(x, np.arange(4.0))


@pytest.mark.parametrize(("seconds", "count"), [(0.125, step_times.MOST), (8.0, step_times.LEAST)])
def test_short_steps_are_timed_more_often(seconds: float, count: int):
    """A clock of which each reading is half of a step after the last."""
    ticks = itertools.count()
    stepper = Stepper(run=lambda flat: flat, leaves=[], pairs=(), donated=())
    measured = timed(stepper, lambda: next(ticks) * seconds / 2)
    assert measured == Steps(seconds=(seconds,) * count, host_seconds=(seconds / 2,) * count)
    assert (measured.median, measured.host_median) == (seconds, seconds / 2)


def test_processes_take_as_many_steps_whatever_each_measures():
    ticks = itertools.count()
    stepper = Stepper(run=lambda flat: flat, leaves=[], pairs=(), donated=(), agreed=lambda seconds: 8.0 * seconds)
    assert len(timed(stepper, lambda: next(ticks) / 2).seconds) == step_times.LEAST
    stepper.agreed = lambda seconds: 0.0
    assert len(timed(stepper, lambda: next(ticks) * 4.0, 5).seconds) == 5


# Reports


@pytest.mark.parametrize(
    "planner",
    [autopar.DataParallel(), autopar.Zero(3), autopar.Pipeline(stages=2, microbatches=4)],
    ids=["dp", "zero", "pipeline"],
)
def test_predicted_shares_of_each_submesh_add_up_to_the_step(planner: Any):
    plan = plan_of(planner)
    shares = predicted_shares(plan)
    assert [share.devices for share in shares] == ([2, 2] if isinstance(plan, PipelinePlan) else [4])
    for share in shares:
        assert sum(share.seconds.values()) == pytest.approx(plan.step_seconds)
    if isinstance(plan, PipelinePlan):
        dispatch = plan.cluster.group().device.dispatch_seconds
        for number, share in enumerate(shares):
            waiting = share.seconds[WAITING] / plan.step_seconds
            assert waiting == pytest.approx(plan.timeline.bubbles[number])
            assert share.seconds[DISPATCH] == pytest.approx(8 * dispatch)


def test_devices_of_a_submesh_count_on_average_and_the_rest_is_waiting():
    plan = plan_of(autopar.Pipeline(stages=2, microbatches=4))
    seen = [{"compute": 1.0}, {"compute": 3.0}, {"compute": 4.0, "all_reduce": 1.0}, {"compute": 4.0}]
    first, second = measured_shares(plan, seen, 10.0)
    assert (first.busy, first.seconds[WAITING]) == (2.0, 8.0)
    assert (second.busy, second.seconds[WAITING], second.seconds["all_reduce"]) == (4.5, 5.5, 0.5)


def reported(planner: Any, compute: float, communication: float) -> StepReport:
    """A report of steps in which computing and communication took so many times what was predicted."""
    plan = plan_of(planner)
    by_device = [
        {cause: spent * (compute if cause == "compute" else communication) for cause, spent in share.seconds.items()}
        for share in predicted_shares(plan)
        for _ in range(share.devices)
    ]
    for spent in by_device:
        spent.pop(DISPATCH, 0.0)
    measured = measured_shares(plan, by_device, 1.0)
    return StepReport(plan=plan, steps=STEPS, profiled_seconds=1.0, measured=measured)


@pytest.mark.parametrize("planner", [autopar.Zero(3), STAGED], ids=["mesh", "stages"])
def test_factors_are_measured_by_predicted(planner: Any):
    factors = reported(planner, 2.0, 4.0).factors()
    assert factors.compute == pytest.approx(2.0)
    assert factors.communication == pytest.approx(4.0)


def test_without_a_profile_the_step_says_all():
    plan = plan_of(autopar.Zero(3))
    report = StepReport(plan=plan, steps=STEPS)
    assert report.ratio == 2.0 / plan.step_seconds
    assert report.factors() == Factors(compute=report.ratio, communication=report.ratio)
    assert "causes are not measured" in str(report)
    assert all(measured is None for _, measured in report.causes().values())
    calibrated = replace(report, applied=Factors(compute=3.0, communication=5.0))
    assert calibrated.factors() == Factors(compute=3 * report.ratio, communication=5 * report.ratio)


@pytest.mark.parametrize("planner", [autopar.Zero(3), autopar.Pipeline(stages=2, microbatches=4)])
def test_a_report_is_a_screen_of_text_and_json(planner: Any):
    report = replace(reported(planner, 2.0, 4.0), transfers=(1.0, 2.0), kept_in="plans/calibration.json")
    text = str(report)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40
    for words in ("compute", "predicted", "median of 3 steps, each waited for", "calibration='plans/calibration.json'"):
        assert words in text
    assert ("by submesh" in text) == (len(report.predicted) > 1)
    data = json.loads(json.dumps(report.to_json()))
    assert data["measured_seconds"] == [3.0, 1.0, 2.0]
    assert data["factors"]["compute"] == pytest.approx(2.0)


# Calibration


def test_a_calibration_is_kept_once_a_plan_and_means_are_geometric(tmp_path: Path):
    path = tmp_path / "folder" / "calibration.json"
    for compute, communication in ((9.0, 9.0), (2.0, 1.0)):  # the second takes the place of the first
        reported(autopar.Zero(3), compute, communication).save(path)
    reported(autopar.DataParallel(), 8.0, 4.0).save(path)
    calibration = Calibration.load(path)
    factors = calibration.of(parse_cluster("8x8:h100"))
    assert factors.compute == pytest.approx(4.0)
    assert factors.communication == pytest.approx(2.0)
    with pytest.raises(PlanningError, match=r"steps were measured on h100, and not on a100-80g"):
        calibration.applied(parse_cluster("8:a100-80g"))


def test_a_calibrated_plan_takes_as_much_longer_as_was_measured(tmp_path: Path):
    planner = autopar.Zero(3)
    plan = plan_of(planner)
    path = tmp_path / "calibration.json"
    reported(planner, 2.0, 3.0).save(path)
    calibrated = autopar.parallelize(step, cluster="2x2:h100", planner=planner, calibration=path).plan(*structs())
    assert isinstance(calibrated, Plan)
    assert "calibrated: compute x 2, communication x 3" in str(calibrated)
    assert calibrated.seconds["compute"] == pytest.approx(2 * plan.seconds["compute"])
    launch = plan.cluster.group().device.launch_seconds
    for kind in ("all_gather", "reduce_scatter"):
        count = sum(c.count for c in plan.collectives if c.kind == kind)
        before, after = (p.seconds[kind] for p in (plan, calibrated))
        assert 2 * count * launch <= after
        assert 2 * before <= after <= 3 * before + 1e-12  # a launch is computing, the rest communication
    plain = autopar.parallelize(step, cluster="2x2:h100", planner=planner, calibration=path).replan(calibration=False)
    assert plain.plan(*structs()).seconds == plan.seconds


def test_slower_devices_keep_their_peaks():
    cluster = parse_cluster("8:h100")
    slow = what_if.slower(cluster, 2.0, 3.0)
    assert slow.group().device.flops_per_second == cluster.group().device.flops_per_second
    assert slow.group().device.matmul_flops_per_second("bfloat16") == pytest.approx(
        cluster.group().device.matmul_flops_per_second("bfloat16") / 2
    )


@pytest.mark.parametrize("text", ["", "[]", '{"calibration": [{"device": "cpu"}]}', '{"calibration": 3}'])
def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=r"calibration .* it is no"):
        autopar.parallelize(step, calibration=path)
    with pytest.raises(ArgumentError, match="cannot be read"):
        autopar.parallelize(step, calibration=tmp_path / "absent.json")
    with pytest.raises(ArgumentError, match="the file that a report was kept in"):
        autopar.parallelize(step, calibration=17)  # pyright: ignore[reportArgumentType]


# On the devices here


@pytest.mark.parametrize("microbatches", [None, slow(4)], ids=["mesh", "stages"])
def test_a_function_reports_on_itself(tmp_path: Path, microbatches: int | None):
    planner = autopar.Pipeline(stages=2, microbatches=4) if microbatches else autopar.DataParallel()
    params, batch = arguments()
    parallel = autopar.parallelize(step, planner=planner, donate_argnums=0, cache=tmp_path)
    with pytest.raises(ArgumentError, match="has not been called yet"):
        parallel.report()
    report = parallel.report(params, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, batch)))
    assert report.plan == parallel.plan(params, batch)
    assert report.measured is not None
    causes = report.causes()
    for cause in ("compute", *([] if microbatches else ["all_reduce"])):
        predicted, measured = causes[cause]
        assert predicted
        assert measured
    assert (report.transfers is not None) == bool(microbatches)
    assert [share.devices for share in report.measured] == ([4, 4] if microbatches else [8])
    ran = [(span.stage, span.kind, span.microbatch) for span in report.spans if span.kind != REST]
    expected = [(s, kind, m) for s in (0, 1) for kind in ("forward", "backward") for m in range(4) if microbatches]
    assert sorted(ran) == sorted(expected)
    assert all(0 <= span.start_seconds < span.end_seconds for span in report.spans)
    report.write(tmp_path / "steps.json")
    assert report.plan.to_html(measured=tmp_path / "steps.json") == report.to_html()
    assert report.kept_in == str(tmp_path / "calibration.json")
    again = parallel.report()
    assert len(json.loads((tmp_path / "calibration.json").read_text())["calibration"]) == 1
    assert again.plan == report.plan
    planned = autopar.parallelize(step, planner=planner, calibration=report.kept_in).plan(params, batch)
    assert "calibrated" in planned.cluster.name


def test_without_a_profile_steps_are_measured_all_the_same(monkeypatch: pytest.MonkeyPatch):
    def quiet(run: Any) -> tuple[()]:
        run()
        return ()

    monkeypatch.setattr(reporting, "profiled", quiet)
    report = autopar.parallelize(step, planner=autopar.DataParallel()).report(*arguments())
    assert report.measured is None
    assert report.steps.median > 0
    assert report.kept_in == ""


def test_a_trace_that_the_user_takes_goes_on(tmp_path: Path):
    with jax.profiler.trace(tmp_path):
        report = autopar.parallelize(step, planner=autopar.DataParallel()).report(*arguments())
    assert report.measured is None
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_calls_are_neither_timed_nor_waited_for_nor_profiled(monkeypatch: pytest.MonkeyPatch):
    params, batch = arguments()
    parallel = autopar.parallelize(step, planner=autopar.DataParallel())
    parallel(params, batch)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError

    for module, name in ((jax, "block_until_ready"), (jax.profiler, "start_trace"), (step_times.time, "perf_counter")):
        monkeypatch.setattr(module, name, never)
    _, total = parallel(params, batch)
    assert total == ROWS * WIDTH


def test_random_keys_have_no_zeros():
    parallel = autopar.parallelize(lambda key, x: x + jax.random.normal(key, x.shape), planner=autopar.DataParallel())
    parallel(jax.random.key(0), jnp.ones((8, 8)))
    with pytest.raises(ArgumentError, match="none of its random keys"):
        parallel.report()
    assert parallel.report(jax.random.key(0), jnp.ones((8, 8))).steps.seconds
