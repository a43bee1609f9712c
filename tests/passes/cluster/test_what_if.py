"""Clusters that differ in one respect from one that is there."""

from dataclasses import replace

import pytest

from passes.cluster import Cluster, Mesh, collectives, parse_cluster, what_if
from passes.errors import ClusterError


@pytest.mark.parametrize(
    ("devices", "hosts", "per_host"), [(1, 1, 1), (3, 1, 3), (8, 1, 8), (16, 2, 8), (64, 8, 8), (128, 16, 8)]
)
def test_so_many_devices_are_a_part_of_a_host_or_whole_hosts(devices: int, hosts: int, per_host: int) -> None:
    given = parse_cluster("2x8:h100")
    cluster = what_if.resized(given, devices)
    group = cluster.group()
    assert (group.hosts, group.devices_per_host, cluster.n_devices) == (hosts, per_host, devices)
    assert (group.device, group.intra) == (given.group().device, given.group().intra)
    whole = given.group().inter
    assert group.inter == replace(whole, bytes_per_second=whole.bytes_per_second * per_host / 8)
    if devices <= 64:
        assert cluster == parse_cluster(cluster.name)


@pytest.mark.parametrize("devices", [0, -8, 9, 12, 20])
def test_parts_of_several_hosts_are_refused(devices: int) -> None:
    with pytest.raises(ClusterError, match=f"{devices} devices of cluster '2x8:h100'"):
        what_if.resized(parse_cluster("2x8:h100"), devices)


def without_latency() -> Cluster:
    data = parse_cluster("2x4:h100").to_json()
    group = data["groups"][0]  # pyright: ignore
    for name in ("intra", "inter"):
        group[name] |= {"alpha_seconds": 0.0, "low_latency": False}  # pyright: ignore
    group["measured"] = [{"kind": "all_gather", "ranks": 4, "alpha_seconds": 0.0, "bytes_per_second": 1e9}]  # pyright: ignore
    return Cluster.from_json(data)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b")])
def test_half_the_bandwidth_doubles_what_bandwidth_bounds(kind: collectives.Kind, axes: tuple[str, ...]) -> None:
    cluster = without_latency()
    seconds = [
        collectives.seconds(kind, 2.0**26, Mesh(axes=("a", "b"), sizes=(2, 4), cluster=scaled).group(axes))
        for scaled in (cluster, what_if.with_bandwidth(cluster, 0.5))
    ]
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=1e-12)


def test_the_network_is_what_lies_between_hosts() -> None:
    cluster = without_latency()
    slower = what_if.with_bandwidth(cluster, network_factor=0.25)
    mesh, slow = (Mesh(axes=("a", "b"), sizes=(2, 4), cluster=c) for c in (cluster, slower))
    inside, across = ("b",), ("a",)
    assert collectives.seconds("all_reduce", 1e8, slow.group(inside)) == collectives.seconds(
        "all_reduce", 1e8, mesh.group(inside)
    )
    assert collectives.seconds("all_reduce", 1e8, slow.group(across)) == pytest.approx(
        4 * collectives.seconds("all_reduce", 1e8, mesh.group(across))
    )
    assert slower.name == "2x4:h100, network x 0.25"


def test_factors_of_one_change_nothing_and_none_is_below_0() -> None:
    cluster = parse_cluster("2x8:h100")
    assert what_if.with_bandwidth(cluster) == cluster
    with pytest.raises(ClusterError, match="bandwidth times -1"):
        what_if.with_bandwidth(cluster, -1.0)
    with pytest.raises(ClusterError, match="bandwidth times 0"):
        what_if.with_bandwidth(cluster, 1.0, 0.0)


def test_a_network_that_there_cannot_be_is_refused_before_its_times_are_no_numbers() -> None:
    cluster = parse_cluster("2x8:h100")
    for times in (1e-300, 1e300, float("nan"), float("inf")):
        with pytest.raises(ClusterError, match="multiplied by 1e-09 to 1e"):
            what_if.with_bandwidth(cluster, network_factor=times)
