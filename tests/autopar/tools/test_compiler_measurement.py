"""Clusters with rates of computing by accelerators' own compilers: how estimates are read, fitted and refused."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.tools import compiler_measurement, device_sweep, measurement_text, topologies
from autopar.tools.cli import main
from autopar.tools.compiler_measurement import CompilerMeasurement, fitted, target_cluster
from autopar.tools.device_sweep import Case
from autopar.tools.estimates import CLOCK_HZ, Estimate, cycles, light_seconds, seconds_of
from autopar.tools.topologies import EXTRAS
from passes.cluster import Cluster, parse_cluster
from passes.plan import Plan


def needs(platform: str) -> pytest.MarkDecorator:
    installed = topologies._is_installed(EXTRAS[platform][0])
    return pytest.mark.skipif(not installed, reason=f"needs pip install 'autopar[{EXTRAS[platform][2]}]'")


def test_cycles_of_a_loop_count_as_often_as_it_runs() -> None:
    text = "\n".join(
        (
            "%body (x: f32[]) -> f32[] {",
            '  %y = f32[] add(%x, %x), backend_config={"estimated_cycles":"7"}',
            "}",
            "ENTRY %main (x: f32[]) -> f32[] {",
            '  %z = f32[] while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}',
            '  %w = f32[] add(%z, %z), backend_config={"estimated_cycles":"11"}',
            "}",
        )
    )
    assert cycles(text) == 5 * 7 + 11


def light(microseconds: float) -> str:
    """The estimates of one kernel, as XLA:GPU writes them: those of another model come first."""
    return (
        'backend_config={"reification_cost":[{"end_to_end_cycles":8136.5,"exec_time_us":4109.25,'
        '"compute_time_us":1.5,"memory_access_time_us":2.5,"name":""},{"end_to_end_cycles":0,'
        f'"exec_time_us":{microseconds},"compute_time_us":0,"memory_access_time_us":0,"name":"sol"}}]}}'
    )


def test_a_gpus_estimates_are_those_at_the_speed_of_light() -> None:
    text = "\n".join(
        (
            "%body (x: f32[]) -> f32[] {",
            f"  %y = f32[] add(%x, %x), {light(2.5)}",
            "}",
            "ENTRY %main (x: f32[]) -> f32[] {",
            '  %z = f32[] while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"4"}}',
            f"  %w = f32[] add(%z, %z), {light(1e-3)}",
            "}",
        )
    )
    assert light_seconds(text) == pytest.approx(4 * 2.5e-6 + 1e-9)
    assert seconds_of(text, "h100") == light_seconds(text)


def test_cycles_are_seconds_by_the_clock() -> None:
    text = 'ENTRY %main (x: f32[]) -> f32[] {\n  %y = f32[] add(%x, %x), backend_config={"estimated_cycles":"3000"}\n}'
    assert seconds_of(text, "tpu-v5e") == pytest.approx(2e-6)


@pytest.mark.parametrize(
    ("name", "rule"),
    [("tpu-7x", "no publication of its clock"), ("tpu-v5e", "wrote no estimate"), ("h100", "wrote no")],
)
def test_a_program_without_estimates_is_refused_with_what_to_do(name: str, rule: str) -> None:
    text = 'ENTRY %main (x: f32[]) -> f32[] {\n  %y = f32[] add(%x, %x), backend_config={"reification_cost":[]}\n}'
    with pytest.raises(autopar.DeviceError, match=rf"(?s){rule}.*--cluster 8:{name}.*autopar measure"):
        seconds_of(text, name)


def test_clocks_are_those_of_known_devices() -> None:
    for name, clock in CLOCK_HZ.items():
        peak = parse_cluster(f"8:{name}").group().device.flops_per_second["bfloat16"]
        units = peak / (2 * 128 * 128 * clock)  # of 128 x 128, those of 256 x 256 counted as four
        assert units == pytest.approx(round(units), rel=0.03)


@pytest.mark.parametrize(
    ("target", "cluster"),
    [
        ("tpu:v5e:2x4", "8:tpu-v5e"),
        ("tpu:v5e:4x4", "2x8:tpu-v5e"),
        ("tpu:v5e:2x2", "4:tpu-v5e"),
        ("tpu:v5p:2x2x2", "2x4:tpu-v5p"),
        ("tpu:v3:2x2", "8:tpu-v3"),
        ("tpu:tpu7x:2x2x1", "8:tpu-7x"),
        ("tpu:v6e", "8:tpu-v6e"),
        ("gpu:h100", "8:h100"),
        ("2x8:h100", "2x8:h100"),
    ],
)
def test_a_target_is_a_cluster(target: str, cluster: str) -> None:
    assert target_cluster(target) == parse_cluster(cluster)


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("gpu:h100:8", "write 8:h100"),
        ("tpu:v5e:3x3", "write, say, tpu:v5e:2x4"),
        ("tpu:v9", "known: "),
        ("h100", "8:h100"),
    ],
)
def test_a_target_that_is_none_is_refused(target: str, remedy: str) -> None:
    with pytest.raises(autopar.ClusterError, match=remedy):
        target_cluster(target)


def by_model(cluster: Cluster) -> Any:
    """An estimator that says what the cost model says of a cluster's device."""

    def estimated(case: Case, plan: Plan) -> Estimate:
        return Estimate(seconds=device_sweep.predicted_seconds(case.step(), cluster), nbytes=case.least_nbytes)

    return estimated


def with_device(cluster: Cluster, **numbers: Any) -> Cluster:
    group = cluster.group()
    return replace(cluster, groups=(replace(group, device=replace(group.device, **numbers)),))


@pytest.fixture
def few_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer are tried for the bend of a device's curve, which most of a fit takes."""
    monkeypatch.setattr(device_sweep, "HALVES", (0, 16, 32, 128))


@functools.cache
def as_its_preset() -> CompilerMeasurement:
    """What is fitted to estimates that are the model's own."""
    preset = parse_cluster("8:tpu-v5e")
    return fitted(preset, by_model(preset))


def test_the_device_is_that_of_the_estimates_and_its_links_the_presets() -> None:
    preset = parse_cluster("8:tpu-v5e")
    rates = {"float32": 9e13, "bfloat16": 1.8e14}
    truth = with_device(
        preset,
        matmul_efficiency=1.0,
        flops_per_second=rates,
        memory_bytes_per_second=6e11,
        half_extent=64.0,
        launch_seconds=0.0,
    )
    result = fitted(preset, by_model(truth))
    group = result.cluster.group()
    assert group.device.half_extent == 64.0
    assert result.has_curve
    assert group.device.flops_per_second == pytest.approx(rates, rel=0.01)
    assert group.device.memory_bytes_per_second == pytest.approx(6e11, rel=0.01)
    assert group.device.memory_nbytes == preset.group().device.memory_nbytes
    assert (group.intra, group.inter, group.measured) == (preset.group().intra, preset.group().inter, ())
    assert "XLA's compiler" in group.device.source
    assert Cluster.from_json(json.loads(json.dumps(result.cluster.to_json()))) == result.cluster


@pytest.mark.usefixtures("few_halves")
def test_a_gpus_kernels_begin_in_the_presets_time() -> None:
    preset = parse_cluster("8:h100")
    result = fitted(preset, by_model(with_device(preset, launch_seconds=0.0, half_inner=32.0)))
    assert result.cluster.group().device.launch_seconds == preset.group().device.launch_seconds
    assert result.cluster.group().device.half_inner == 32.0


@pytest.mark.usefixtures("few_halves")
def test_an_estimate_below_its_memorys_time_is_shown_and_not_fitted() -> None:
    """One estimate of a thousandth changes nothing but its own row."""
    preset = parse_cluster("8:tpu-v5e")
    truth = by_model(with_device(preset, half_extent=32.0))

    def spoilt(case: Case, plan: Plan) -> Estimate:
        right = truth(case, plan)
        return replace(right, seconds=right.seconds / 1000) if case.size.startswith("4096 of") else right

    result = fitted(preset, spoilt)
    assert result.cluster == fitted(preset, truth).cluster
    assert {s.size for s in result.samples if not s.is_fitted} == {"4096 of 8 x 8 x 8"}


def test_a_curve_that_the_estimates_do_not_determine_is_the_presets() -> None:
    preset = parse_cluster("8:h100")
    result = fitted(preset, by_model(with_device(preset, launch_seconds=0.0, half_inner=5000.0)))
    assert not result.has_curve
    assert result.cluster.group().device.half_inner == preset.group().device.half_inner
    assert "the preset's" in measurement_text.rates_table(result).format(80)


@pytest.mark.usefixtures("few_halves")
def test_tables_fit_a_terminal_and_say_that_links_are_the_presets() -> None:
    text = "\n\n".join(table.format(80) for table in measurement_text.compiler_tables(as_its_preset()))
    assert max(map(len, text.splitlines())) <= 80
    for words in ("nothing was run", "links and collectives  the preset's", "by memory_analysis()"):
        assert words in text


@pytest.mark.usefixtures("few_halves")
def test_the_command_saves_a_cluster(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    result = as_its_preset()
    measure = "autopar.tools.measure_command.compiler_measurement"
    monkeypatch.setattr(measure, lambda preset, announce: result)
    path = tmp_path / "v5e.json"
    assert main(["measure", "--compiler", "tpu:v5e:2x4", "--out", str(path)]) == 0
    assert parse_cluster(path) == result.cluster
    assert main(["measure", "--compiler", "tpu:v5e", "--devices", "2", "--out", str(path)]) == 2
    assert "leave one out" in capsys.readouterr().err


@pytest.mark.parametrize(("target", "extra"), [("tpu:v5e:2x4", "tpu-compiler"), ("gpu:h100", "gpu-compiler")])
def test_the_command_names_the_extra_of_a_compiler_that_is_not_installed(
    target: str, extra: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(topologies, "_is_installed", lambda module: False)
    assert main(["measure", "--compiler", target, "--out", str(tmp_path / "x.json")]) == 2
    assert f"pip install 'autopar[{extra}]'" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    "target",
    [pytest.param("tpu:v5e:2x4", marks=[needs("tpu"), pytest.mark.slow]), pytest.param("gpu:h100", marks=needs("gpu"))],
)
def test_a_compilers_rates_are_near_the_data_sheets(target: str) -> None:
    preset = target_cluster(target)
    result = compiler_measurement.compiler_measurement(preset)
    ours, sheet = result.cluster.group().device, preset.group().device
    for dtype, rate in ours.flops_per_second.items():
        assert 0.5 < rate / sheet.flops_per_second[dtype] < 1.1
    assert 0.7 < ours.memory_bytes_per_second / sheet.memory_bytes_per_second < 1.05


@needs("gpu")
def test_a_gpu_whose_products_the_compiler_does_not_know_is_refused() -> None:
    with pytest.raises(autopar.DeviceError, match=r"(?s)no estimates for it.*--cluster 8:a100-80g"):
        compiler_measurement.compiler_measurement(parse_cluster("8:a100-80g"))
