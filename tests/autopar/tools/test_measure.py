"""Measured clusters: what they say, how they are written, and that plans are priced by them."""

import json

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.tools.cli import main
from passes.cluster import Cluster, Measured, Mesh, collectives, parse_cluster


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


def test_what_was_measured_counts_and_the_nearest_number_of_ranks():
    cluster = measured(("all_reduce", 2, 1e-3, 1e9), ("all_reduce", 8, 4e-3, 1e8))
    mesh = Mesh(axes=("a", "b", "c"), sizes=(2, 2, 2), cluster=cluster)
    assert collectives.seconds("all_reduce", 1e6, mesh.group(("a",))) == pytest.approx(1e-3 + 1e-3)
    assert collectives.seconds("all_reduce", 1e6, mesh.group(("a", "b"))) == pytest.approx(1e-3 + 1e-3)
    assert collectives.seconds("all_reduce", 1e6, mesh.group(("a", "b", "c"))) == pytest.approx(4e-3 + 1e-2)
    plain = Mesh(axes=("a", "b", "c"), sizes=(2, 2, 2), cluster=parse_cluster("8:h100"))
    gather = [collectives.seconds("all_gather", 1e6, m.group(("a",))) for m in (mesh, plain)]
    assert gather[0] == gather[1]


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


def test_what_was_seen_of_a_device_is_written_and_read_and_a_data_sheet_has_none_of_it():
    plain = parse_cluster("8:h100").to_json()
    assert plain["groups"][0]["device"].keys().isdisjoint({"half_extent", "strided_bytes_per_second"})
    cluster = with_device(half_extent=8.0, strided_bytes_per_second=1e9)
    assert cluster.group().device.half_extent == 8.0
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


@pytest.mark.slow
def test_the_devices_here_are_measured_and_planned_for(tmp_path, capsys):
    path = tmp_path / "here.json"
    assert main(["measure", "--out", str(path)]) == 0
    assert "all_reduce among 8" in capsys.readouterr().out
    cluster = parse_cluster(path)
    group = cluster.group()
    assert {m.ranks for m in group.measured} == {2, 4, 8}
    assert len(group.measured) == 15
    assert all(m.bytes_per_second > 1e6 for m in group.measured)
    assert 1e8 < group.device.flops_per_second["float32"] < 1e14
    plan = autopar.parallelize(lambda x: x @ x, cluster=path).plan(jax.ShapeDtypeStruct((256, 256), "float32"))
    assert plan.cluster == cluster
