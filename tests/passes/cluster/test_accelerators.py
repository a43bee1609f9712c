"""The table of accelerators: what a host says of itself, and that no number is without a source."""

from itertools import chain

import pytest

from passes.cluster import parse_cluster
from passes.cluster.accelerators import TABLE
from passes.cluster.hosts import HostSpec, virtual_cpu


@pytest.mark.parametrize("host", TABLE, ids=lambda host: host.device.name)
def test_every_host_can_be_asked_for_by_name(host: HostSpec) -> None:
    assert host.device.source
    assert 0 < host.device.matmul_efficiency <= 1
    made = host.cluster(2)
    assert made.name == f"2x{host.devices_per_host}:{host.device.name}"
    assert parse_cluster(made.name) == made
    assert host.cluster(1, 1).n_devices == 1


def test_no_two_hosts_share_a_name() -> None:
    for names in ([host.device.name for host in TABLE], list(chain(*(host.kinds for host in TABLE)))):
        assert len(set(names)) == len(names)


def test_virtual_devices_share_their_machine() -> None:
    one, eight = (virtual_cpu(cores=4, memory_nbytes=2**30, devices=n) for n in (1, 8))
    assert 8 * eight.memory_nbytes == one.memory_nbytes
    assert 8 * eight.memory_bytes_per_second == pytest.approx(one.memory_bytes_per_second)
    assert {k: 8 * v for k, v in eight.flops_per_second.items()} == pytest.approx(dict(one.flops_per_second))
