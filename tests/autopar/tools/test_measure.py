"""Measured clusters: what they say, how they are written, and that plans are priced by them."""

import itertools
import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.tools import device_sweep, measurement, measurement_text
from autopar.tools.cli import main
from autopar.tools.device_sweep import Sample
from autopar.tools.measurement import NBYTES, Measurement, hidden, lines_through, with_overlap
from passes.cluster import Cluster, DeviceSpec, Measured, Mesh, collectives, parse_cluster
from passes.cluster.hosts import virtual_cpu
from tests.sample import slow, some


def measured(*found):
    """Eight H100s whose collectives were measured."""
    data = parse_cluster("8:h100").to_json()
    data["groups"][0]["measured"] = [
        {"kind": kind, "ranks": ranks, "alpha_seconds": alpha, "bytes_per_second": rate}
        for kind, ranks, alpha, rate in found
    ]
    return Cluster.from_json(data)


def with_device(**seen):
    """Eight H100s of which this was seen."""
    data = parse_cluster("8:h100").to_json()
    data["groups"][0]["device"] |= seen
    return Cluster.from_json(data)


def test_collectives_take_the_measured_line_of_the_nearest_ranks():
    cluster = measured(("all_reduce", 2, 1e-3, 1e9), ("all_reduce", 8, 4e-3, 1e8))
    mesh = Mesh(axes=("a", "b", "c"), sizes=(2, 2, 2), cluster=cluster)
    assert collectives.seconds("all_reduce", 1e6, mesh.group(("a",))) == pytest.approx(1e-3 + 1e-3)
    assert collectives.seconds("all_reduce", 1e6, mesh.group(("a", "b"))) == pytest.approx(1e-3 + 1e-3)
    assert collectives.seconds("all_reduce", 1e6, mesh.group(("a", "b", "c"))) == pytest.approx(4e-3 + 1e-2)
    plain = Mesh(axes=("a", "b", "c"), sizes=(2, 2, 2), cluster=parse_cluster("8:h100"))
    gather = [collectives.seconds("all_gather", 1e6, m.group(("a",))) for m in (mesh, plain)]
    assert gather[0] == gather[1]


def test_of_several_measured_lines_the_slowest_counts():
    cluster = measured(("all_reduce", 8, 1e-4, 1e12), ("all_reduce", 8, 0.0, 1e9), ("all_reduce", 4, 1.0, 1.0))
    group = Mesh(axes=("a",), sizes=(8,), cluster=cluster).group(("a",))
    sizes = np.array([1e3, 1e6])
    assert [collectives.seconds("all_reduce", n, group) for n in sizes] == pytest.approx([1e-4, 1e-3], rel=1e-4)
    assert collectives.seconds("all_reduce", sizes, group) == pytest.approx([1e-4, 1e-3], rel=1e-4)


@pytest.mark.parametrize(
    ("seconds", "count", "first"),
    [
        ((1e-4, 1.1e-4, 9e-4, 4e-3), 2, 0),  # long ones at 1 GB/s, short ones at much more
        ((1e-5, 4.2e-5, 2.6e-4, 1.06e-3), 1, 0),  # one line
        ((1e-4, 9e-5, 1e-4, 1.1e-4), 1, 0),  # noise, all of about a length
        ((1e-4, 9e-4, 9.5e-4, 1e-3), 1, 1),  # long ones faster than short ones: the highest of two is no nearer
    ],
    ids=["caches", "line", "latency", "fast at length"],
)
def test_lines_are_as_near_as_one_can_be_and_never_fall(seconds, count, first):
    """They are near to all points from the `first` on."""
    sizes = np.array(NBYTES, float)
    lines = lines_through(sizes, np.array(seconds))
    assert len(lines) == count
    assert all(alpha >= 0 and beta > 0 for alpha, beta in lines)
    highest = np.max([alpha + beta * sizes for alpha, beta in lines], axis=0)
    assert highest[first:] == pytest.approx(seconds[first:], rel=0.12)


@pytest.mark.parametrize("noisy", [1, 2])
def test_one_point_that_is_too_low_does_not_draw_the_line_to_itself(noisy: int):
    """Of a reduce-scatter among 4 threads the second of four points was a third of what it is alone."""
    sizes = np.array(NBYTES, float)
    true = 1e-4 + sizes / 5e8
    seconds = np.where(np.arange(4) == noisy, true / 3.5, true)
    highest = np.max([alpha + beta * sizes for alpha, beta in lines_through(sizes, seconds)], axis=0)
    assert highest == pytest.approx(true, rel=0.05)


def test_a_slow_all_reduce_changes_the_plan():
    """Where sums are dear, the search finds a plan that does without."""

    def step(weights, batch):
        return weights - 1e-3 * jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w) ** 2))(weights)

    shapes = jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((65536, 256), "float32")
    slow = measured(*((kind, 8, 10.0, 1.0) for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")))
    planner = autopar.Auto(max_axes=1)
    free = autopar.parallelize(step, cluster=slow, planner=planner, donate_argnums=0).plan(*shapes)
    assert not free.collectives


def test_a_measured_cluster_is_written_and_read():
    cluster = measured(("all_to_all", 4, 1e-5, 2e9))
    assert cluster.group().measured == (Measured(kind="all_to_all", ranks=4, alpha_seconds=1e-5, bytes_per_second=2e9),)
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_measured_numbers_of_a_device_survive_its_file_and_data_sheets_have_none():
    plain = parse_cluster("8:h100").to_json()
    assert (
        plain["groups"][0]["device"]
        .keys()
        .isdisjoint({"half_extent", "strided_bytes_per_second", "product_seconds", "pixel_seconds"})
    )
    cluster = with_device(half_extent=8.0, strided_bytes_per_second=1e9, product_seconds=1e-6, pixel_seconds=1e-9)
    assert cluster.group().device.half_extent == 8.0
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def on(device: DeviceSpec) -> Cluster:
    """The cluster of one such device."""
    cluster = parse_cluster("1:h100")
    return replace(cluster, groups=(replace(cluster.group(), device=device),))


@pytest.mark.parametrize(
    "shape", [{"half_extent": 16.0}, slow({"cores": 108, "half_inner": 64.0})], ids=["extents", "tiles"]
)
def test_a_device_is_measured_as_what_it_is(shape):
    """Times that follow the cost model of a made-up device give back its rates, and are then predicted exactly."""
    truth = replace(
        virtual_cpu(1, 2**30, 1),
        **shape,
        flops_per_second={"float32": 3e10, "bfloat16": 6e10},
        product_seconds=1e-6,
        pixel_seconds=1e-8,
        convolution_efficiency=2.0,
        widened={},
    )
    group = on(truth).group()
    devices = jax.devices()[:1]
    known = {
        case.kind + case.size: device_sweep.predicted_seconds(case.step(), on(truth))
        for case in device_sweep.cases("cpu")
    }
    device, samples = device_sweep.device_of(
        replace(
            group,
            device=replace(
                truth, memory_efficiency=0.5, flops_per_second={"float32": 1.0}, memory_bytes_per_second=1.0
            ),
        ),
        on(truth),
        devices,
        lambda case: known[case.kind + case.size],
        truth.launch_seconds,
        0.0,
    )
    for name, value in shape.items():
        assert getattr(device, name) == value
    assert device.flops_per_second == pytest.approx(dict(truth.flops_per_second))
    assert device.memory_bytes_per_second == pytest.approx(truth.memory_bytes_per_second)
    assert (device.launch_seconds, device.strided_bytes_per_second) == (truth.launch_seconds, 0.0)
    assert device.product_seconds == pytest.approx(truth.product_seconds)
    assert device.pixel_seconds == pytest.approx(truth.pixel_seconds)
    assert device.convolution_efficiency == pytest.approx(truth.convolution_efficiency)
    assert device.dispatch_seconds > 0
    for sample in samples:
        assert sample.predicted == pytest.approx(sample.measured)
    assert {sample.kind for sample in samples} == {"float32 products", "bfloat16 products", "convolutions", "copies"}


WEIGHTED = [case for case in device_sweep.cases("cpu") if case.weights]


@pytest.mark.parametrize("case", some(WEIGHTED, 3), ids=lambda case: f"{case.dtype}, {case.size}")
def test_weights_of_a_measured_product_are_no_constants(case):
    """A compiler would arrange constants ahead of time, which it cannot do with a model's weights."""
    x = jax.ShapeDtypeStruct(case.shape, case.dtype)
    traced = jax.make_jaxpr(case.weights_like)(x)
    assert [out.aval.shape for out in traced.jaxpr.outvars] == list(case.weights)
    made = jax.vjp(case.weights_like, jnp.full(case.shape, 0.5, case.dtype))[1]
    ones = tuple(jnp.ones(shape, case.dtype) for shape in case.weights)
    assert float(jnp.sum(made(ones)[0].astype(jnp.float32))) > 0  # they depend on the array


@pytest.mark.parametrize(
    ("first", "second", "both", "share"),
    [
        (1.0, 2.0, 3.0, 0.0),
        (1.0, 2.0, 2.0, 1.0),
        (2.0, 1.0, 2.5, 0.5),
        (1.0, 1.0, 0.5, 1.0),
        (1.0, 1.0, 5.0, 0.0),
        (0.0, 1.0, 1.0, 0.0),
    ],
)
def test_the_share_that_is_hidden_is_of_the_shorter(first, second, both, share):
    assert hidden(first, second, both) == share


def test_overlap_is_kept_of_accelerators_and_zero_of_virtual_devices():
    device = parse_cluster("8:h100").group().device
    assert with_overlap(device, 0.25).collective_overlap == 0.25
    assert with_overlap(device, None) == device
    shared = parse_cluster("8:cpu").group().device
    assert with_overlap(shared, 0.25).collective_overlap == 0.0
    assert (cluster := with_device(collective_overlap=0.25, bucket_nbytes=1e6)).group().device.bucket_nbytes == 1e6
    assert Cluster.from_json(cluster.to_json()) == cluster


def made_up():
    cluster = measured(("all_reduce", 8, 1e-5, 1e9))
    sent = tuple(Sample(kind="all_reduce", size=f"{n} B among 8", predicted=2e-5, measured=1e-5) for n in NBYTES)
    local = Sample(kind="float32 products", size="512 x 512 x 512", predicted=1e-3, measured=4e-3)
    return Measurement(cluster=cluster, samples=(local, *sent), overlap=0.25)


def test_tables_show_predicted_beside_measured():
    text = "\n\n".join(table.format(80) for table in measurement_text.tables(made_up()))
    assert max(map(len, text.splitlines())) <= 80
    assert "25 % hidden" in text
    assert re.search(r"float32 products  512 x 512 x 512 +1.00 ms +4.00 ms +0.25", text)
    assert re.search(r"all_reduce among 8 +2.00 +2.00 +2.00 +2.00", text)


def test_a_measurement_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    measurement_text.plot_measurement(made_up().samples, tmp_path / "fit.png")
    assert (tmp_path / "fit.png").stat().st_size > 1000


def test_a_wrong_plot_is_refused_before_anything_is_measured(capsys, tmp_path):
    assert main(["measure", "--out", str(tmp_path / "here.json"), "--plot", "fit.txt"]) == 2
    assert "a plot is a file that ends in" in capsys.readouterr().err


def test_measure_refuses_an_argument_that_is_no_devices():
    with pytest.raises(autopar.ArgumentError, match="devices=3: devices are a sequence"):
        autopar.measure(3)  # pyright: ignore[reportArgumentType]


def test_the_former_name_of_an_argument_is_deprecated(monkeypatch):
    cluster, announced = parse_cluster("2:cpu"), list[str]()

    def measured(devices, announce):
        announce("products")
        return Measurement(cluster=cluster, samples=(), overlap=None)

    monkeypatch.setattr(measurement, "measurement", measured)
    with pytest.warns(DeprecationWarning, match=r"write measure\(announce=\)"):
        assert autopar.measure(said=announced.append) == cluster
    assert announced == ["products"]


@pytest.mark.slow
def test_the_devices_here_are_measured_and_planned_for(tmp_path, capsys):
    path = tmp_path / "here.json"
    assert main(["measure", "--out", str(path)]) == 0
    assert "all_reduce among 8" in capsys.readouterr().out
    cluster = parse_cluster(path)
    group = cluster.group()
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
    assert {(m.kind, m.ranks) for m in group.measured} == set(itertools.product(kinds, (2, 4, 8)))
    assert all(m.bytes_per_second > 1e6 for m in group.measured)
    assert 1e8 < group.device.flops_per_second["float32"] < 1e14
    plan = autopar.parallelize(lambda x: x @ x, cluster=path).plan(jax.ShapeDtypeStruct((256, 256), "float32"))
    assert plan.cluster == cluster
