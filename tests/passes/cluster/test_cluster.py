"""Clusters from text, files and devices, and back; every error says what was written, the rule, and what to change."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from passes.cluster import (
    Cluster,
    DeviceSpec,
    HostGroup,
    Mesh,
    devices,
    known,
    local_cluster,
    parse_cluster,
    register_device,
)
from passes.cluster.cluster import WIRINGS, Link
from passes.cluster.devices import host_spec
from passes.cluster.mesh import Group
from passes.errors import ClusterError


@dataclass(frozen=True)
class Device:
    """What `jax.devices()` returns, as far as it is read."""

    device_kind: str
    process_index: int = 0
    limit: int | None = None

    def memory_stats(self) -> dict[str, int] | None:
        return None if self.limit is None else {"bytes_limit": self.limit}


def refusal(text: str | Path) -> str:
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts", "each"), [("8:a100-80g", 1, 8), ("2x8:a100-80g", 2, 8), ("16x4:tpu-v4", 16, 4), ("1:H100", 1, 1)]
)
def test_text_counts_hosts_and_devices(text: str, hosts: int, each: int) -> None:
    cluster = parse_cluster(text)
    group = cluster.group()
    assert (group.hosts, group.devices_per_host, cluster.n_devices) == (hosts, each, hosts * each)
    assert group.device == host_spec(text.partition(":")[2]).device
    assert cluster.name == text == str(cluster)


@pytest.mark.parametrize("name", known())
def test_every_device_is_whole_and_sourced(name: str) -> None:
    spec = host_spec(name)
    assert Cluster.from_json(spec.cluster(2).to_json()) == spec.cluster(2)
    assert spec.device.source
    assert 0 < spec.device.matmul_efficiency <= 1
    assert spec.kinds


def test_links_are_ordered_as_their_generations() -> None:
    nvlinks = [host_spec(name).intra.bytes_per_second for name in ("l4", "v100-16g", "a100-80g", "h100", "b200")]
    assert nvlinks == sorted(nvlinks)
    for name in ("v100-16g", "v100-32g", "a100-40g", "a100-80g", "h100", "h200", "b200"):
        assert host_spec(name).inter.bytes_per_second < 8 * host_spec(name).intra.bytes_per_second


def test_every_kind_of_device_is_named_once() -> None:
    kinds = [kind.lower() for name in known() for kind in host_spec(name).kinds]
    assert len(kinds) == len(set(kinds))


numbers = st.floats(min_value=1e-9, max_value=1e18)
links = st.builds(
    Link,
    alpha_seconds=st.floats(min_value=0, max_value=1),
    bytes_per_second=numbers,
    reduces=st.booleans(),
    low_latency=st.booleans(),
    congestion=st.floats(min_value=0, max_value=1),
    sent=st.floats(min_value=1e-3, max_value=1),
)
device_specs = st.builds(
    DeviceSpec,
    name=st.text(),
    flops_per_second=st.dictionaries(st.sampled_from(("bfloat16", "float32", "int8")), numbers, min_size=1),
    matmul_efficiency=numbers,
    memory_nbytes=st.integers(min_value=1),
    memory_bytes_per_second=numbers,
    launch_seconds=st.floats(min_value=0, max_value=1),
    source=st.text(),
    half_extent=st.floats(min_value=0, max_value=512),
    cores=st.integers(min_value=0, max_value=1024),
    half_inner=st.floats(min_value=0, max_value=512),
    product_seconds=st.floats(min_value=0, max_value=1),
    convolution_efficiency=numbers,
    pixel_seconds=st.floats(min_value=0, max_value=1),
    memory_efficiency=numbers,
    fuses_attention=st.booleans(),
    unrolls=st.booleans(),
    host_bytes_per_second=st.floats(min_value=0, max_value=1e12),
    dispatch_seconds=st.floats(min_value=0, max_value=1),
    send_seconds=st.floats(min_value=0, max_value=1),
    send_overlap=st.floats(min_value=0, max_value=1),
)
counts = st.integers(min_value=1, max_value=512)
host_groups = st.builds(
    HostGroup,
    hosts=counts,
    devices_per_host=counts,
    device=device_specs,
    intra=links,
    inter=links,
    adapters=counts,
    wiring=st.sampled_from(WIRINGS),
)
clusters = st.builds(Cluster, name=st.text(), groups=st.lists(host_groups, min_size=1, max_size=3).map(tuple))


@given(clusters)
def test_json_gives_an_equal_cluster_back(cluster: Cluster) -> None:
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    cluster = parse_cluster("4x8:h100")
    file.write_text(json.dumps(cluster.to_json()))
    assert parse_cluster(file) == parse_cluster(str(file)) == cluster


def test_a_file_may_name_a_device_and_change_some_of_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    slow = {"alpha_seconds": 5e-5, "bytes_per_second": 1e9}
    file.write_text(json.dumps({"name": "mine", "groups": [{"device": "a100-40g", "hosts": 3, "inter": slow}]}))
    spec = host_spec("a100-40g")
    inter = Link(alpha_seconds=5e-5, bytes_per_second=1e9)
    assert parse_cluster(file) == replace(spec, inter=inter).cluster(3, name="mine")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("8:a100-80", ("'8:a100-80'", "no device is called 'a100-80'", "known: v100-16g", "did you mean 'a100-80g'")),
        ("8:a100", ("no device is called 'a100'", "did you mean 'a100-40g' or 'a100-80g'?")),
        ("8:abacus", ("no device is called 'abacus'", "known: v100-16g", "register_device")),
        ("a100-80g", ("'a100-80g'", "hosts x devices : device", "known devices", "write, say, '8:a100-80g'")),
        ("eight h100s", ("'eight h100s'", "hosts x devices : device", "write, say, '2x8:a100-80g'")),
        ("0x8:h100", ("'0x8:h100'", "should have a device", "it is 0 x 8", "count both from 1")),
        ("nowhere.json", ("'nowhere.json'", "cannot be read", "looked for", "No such file")),
    ],
)
def test_text_that_is_no_cluster_is_explained(text: str, parts: tuple[str, ...]) -> None:
    message = refusal(text)
    assert [part for part in parts if part not in message] == []


BROKEN = [
    ("not json", ("is not JSON", "to_json")),
    ("[1]", ("the cluster: should be an object", "its fields are name, groups")),
    ('{"name": "x"}', ("the cluster: has no field 'groups'", "add it")),
    ('{"name": "x", "groups": []}', ("the cluster.groups: should be a list of at least one group", "[{...}]")),
    ('{"name": "x", "groups": [{"device": "h10"}]}', ("no device is called 'h10'", "did you mean 'h100'")),
    ('{"name": "x", "groups": [{"device": "h100", "host": 2}]}', ("has a field 'host'", "did you mean 'hosts'")),
    (
        '{"name": "x", "groups": [{"device": "h100", "hosts": 0}]}',
        ("groups[0].hosts", "whole number from 1", "it is 0"),
    ),
    (
        '{"name": "x", "groups": [{"device": "h100", "wiring": "hybrid cube mash"}]}',
        ("groups[0].wiring", "should be one of: switch, hybrid cube mesh", "'hybrid cube mesh'"),
    ),
    (
        '{"name": "", "groups": [{"device": "h100", "inter": {"alpha_seconds": 0, "bytes_per_second": 9, "sent": 2}}]}',
        ("groups[0].inter.sent", "should be above 0 and at most 1", "it is 2"),
    ),
    (
        '{"name": "x", "groups": [{"device": "h100", "intra": {"alpha_seconds": 0, "bytes_per_second": "fast"}}]}',
        ("groups[0].intra.bytes_per_second", "should be a finite number", "it is 'fast'"),
    ),
]


@pytest.mark.parametrize(("content", "parts"), BROKEN)
def test_a_file_that_is_no_cluster_is_explained(tmp_path: Path, content: str, parts: tuple[str, ...]) -> None:
    file = tmp_path / "broken.json"
    file.write_text(content)
    message = refusal(file)
    assert [part for part in (str(file), *parts) if part not in message] == []


def test_a_mixed_cluster_has_no_one_group() -> None:
    two = Cluster(name="two", groups=parse_cluster("8:h100").groups + parse_cluster("8:h200").groups)
    assert two.n_devices == 16
    with pytest.raises(ClusterError, match="has 2 kinds of hosts"):
        two.group()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-80g"), ("TPU v4", "tpu-v4"), ("TPU v5 lite", "tpu-v5e")],
)
def test_devices_are_known_by_kind(kind: str, name: str) -> None:
    cluster = local_cluster([Device(kind, process_index=i // 4) for i in range(8)])
    assert cluster == host_spec(name).cluster(2, 4)


def test_one_process_plans_with_the_memory_that_its_devices_report() -> None:
    cluster = local_cluster([Device("NVIDIA H200", limit=limit) for limit in (10**11, 9 * 10**10)])
    assert cluster.group().device.memory_nbytes == 9 * 10**10
    # Processes that read different limits would plan differently, so with several the table decides.
    two = local_cluster([Device("NVIDIA H200", process_index=i, limit=10**10 + i) for i in range(2)])
    assert two.group().device == host_spec("h200").device


def test_virtual_cpu_devices_share_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.os, "cpu_count", lambda: 2)
    eight, two = (local_cluster([Device("cpu")] * n) for n in (8, 2))
    assert (eight.name, two.name) == ("8:cpu", "2:cpu")
    small, large = eight.group().device, two.group().device
    assert small.flops_per_second == host_spec("cpu").device.flops_per_second
    assert large.flops_per_second["float32"] == 4 * small.flops_per_second["float32"]
    assert large.memory_nbytes // 4 == small.memory_nbytes


@pytest.mark.parametrize(
    ("present", "parts"),
    [
        ([], ("there are none", "pass cluster=")),
        ([Device("Abacus 3000")], ("device kind 'Abacus 3000'", "known kinds: ", "NVIDIA H200", "pass cluster=")),
        ([Device("cpu"), Device("NVIDIA H200")], ("must be of one kind", "cpu, NVIDIA H200", "pass cluster=")),
        ([Device("cpu", i) for i in (0, 0, 1)], ("not spread evenly", "2, 1", "as many of each")),
    ],
)
def test_devices_that_are_no_cluster_are_explained(present: list[Device], parts: tuple[str, ...]) -> None:
    with pytest.raises(ClusterError) as caught:
        local_cluster(present)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_users_add_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_HOSTS", dict(devices._HOSTS))
    h100 = host_spec("h100")
    mine = replace(h100, device=replace(h100.device, name="Mine", memory_nbytes=96 * 2**30), kinds=("My Device",))
    register_device(mine)
    register_device(mine)
    assert parse_cluster("4:mine").group().device == mine.device
    assert local_cluster([Device("My Device")]).group().device == mine.device
    with pytest.raises(ClusterError, match="in the table with other numbers"):
        register_device(replace(h100, devices_per_host=4))
    with pytest.raises(ClusterError, match=r"pass HostSpec\(device=DeviceSpec"):
        register_device(mine.device)  # pyright: ignore[reportArgumentType]


def group_of(text: str, sizes: tuple[int, ...], *axes: str) -> Group:
    mesh = Mesh(axes=("x", "y")[: len(sizes)], sizes=sizes, cluster=parse_cluster(text))
    return mesh.group(axes)


def test_a_group_knows_its_hosts_and_its_share_of_their_link() -> None:
    whole = host_spec("a100-80g").inter.bytes_per_second
    inside, across = (group_of("4x8:a100-80g", (4, 8), axis) for axis in "yx")
    assert (inside.ranks, inside.hosts) == (8, 1)
    assert (across.ranks, across.hosts, across.inter.bytes_per_second) == (4, 4, whole / 8)
    everybody = group_of("4x8:a100-80g", (4, 8), "x", "y")
    assert (everybody.ranks, everybody.hosts, everybody.inter.bytes_per_second) == (32, 4, whole)


def test_a_mesh_waits_for_the_group_that_spans_most_hosts() -> None:
    # Groups of 3 on hosts of 8: the first lies within a host, the third does not.
    assert group_of("3x8:a100-80g", (8, 3), "y").hosts == 2


def test_a_group_keeps_what_else_the_network_is() -> None:
    cluster = parse_cluster("4x8:h100")
    group = replace(cluster.group(), inter=replace(cluster.group().inter, congestion=0.5))
    mesh = Mesh(axes=("x", "y"), sizes=(4, 8), cluster=replace(cluster, groups=(group,)))
    assert mesh.group(("x",)).inter.congestion == 0.5


def test_no_device_of_the_table_is_congested() -> None:
    """That is a property of one cluster, on one day."""
    assert all(host_spec(name).inter.congestion == host_spec(name).intra.congestion == 0 for name in known())


def test_a_measured_kind_that_is_none_is_named() -> None:
    data = parse_cluster("8:a100-80g").to_json()
    rate = {"ranks": 8, "alpha_seconds": 1e-3, "bytes_per_second": 1e6}
    data["groups"][0]["measured"] = [{"kind": "allreduce", **rate}]  # pyright: ignore
    with pytest.raises(ClusterError, match="did you mean 'all_reduce'"):
        Cluster.from_json(data)


@pytest.mark.parametrize("hosts", [10**10, 10**30, 10**400])
def test_more_devices_than_can_be_listed_are_refused(hosts: int) -> None:
    rule = "has at most 1,048,576 devices, and this has"
    assert rule in refusal(f"{hosts}x8:h100")
    data = host_spec("h100").cluster(2).to_json()
    with pytest.raises(ClusterError, match=rule):
        Cluster.from_json({"name": "mine", "groups": [{**data["groups"][0], "hosts": hosts}]})  # type: ignore[index]


def test_a_text_too_long_for_a_file_is_no_cluster() -> None:
    assert "should be hosts x devices : device" in refusal("h100" * 2000)
