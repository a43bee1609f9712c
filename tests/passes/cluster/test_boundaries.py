"""Seconds of transfers from stage to stage, by arithmetic from the links of devices and of hosts."""

from dataclasses import replace

import pytest

from benchmarks.published.machines import machine
from passes.cluster import HostGroup, boundary_seconds, parse_cluster
from passes.cluster.cluster import Link

ALPHA = 1e-6


def hosts(*, per_host: int = 4, congestion: float = 0.0) -> HostGroup:
    """Hosts whose devices have 100 GB/s each among them, and 10 GB/s together to the network."""
    group = parse_cluster(f"4x{per_host}:tpu-v5e").group()
    return HostGroup(
        hosts=4,
        devices_per_host=per_host,
        device=group.device,
        intra=Link(alpha_seconds=ALPHA, bytes_per_second=100e9),
        inter=Link(alpha_seconds=2 * ALPHA, bytes_per_second=10e9, congestion=congestion),
    )


NBYTES = 40_000_000

CASES = {
    "one device to its neighbour": (range(1), range(1, 2), ALPHA + 40e6 / 100e9),
    "two lanes in a host": (range(2), range(2, 4), ALPHA + 20e6 / 100e9),
    "one device to three: it sends everything": (range(1), range(1, 4), ALPHA + 40e6 / 100e9),
    "one device to another host": (range(4), range(4, 5), 2 * ALPHA + 40e6 / 10e9),
    "four lanes to another host share its link": (range(4), range(4, 8), 2 * ALPHA + 40e6 / 10e9),
    "part of a host to part of the next": (range(2, 4), range(4, 6), 2 * ALPHA + 40e6 / 10e9),
    "two hosts to two hosts": (range(8), range(8, 16), 2 * ALPHA + 20e6 / 10e9),
    "two hosts to one, whose link is the narrow one": (range(8), range(8, 12), 2 * ALPHA + 40e6 / 10e9),
    "half of it stays in the host": (range(2), range(3, 5), 2 * ALPHA + 20e6 / 10e9),
    "the other way": (range(4, 8), range(4), 2 * ALPHA + 40e6 / 10e9),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_boundary_takes_as_long_as_its_narrowest_link(case: tuple[range, range, float]) -> None:
    senders, receivers, seconds = case
    assert boundary_seconds(hosts(), senders, receivers, NBYTES) == pytest.approx(seconds, rel=1e-12)


def test_every_host_is_like_every_other() -> None:
    for shift in (4, 8):
        moved = boundary_seconds(hosts(), range(2 + shift, 4 + shift), range(4 + shift, 8 + shift), NBYTES)
        assert moved == boundary_seconds(hosts(), range(2, 4), range(4, 8), NBYTES)


def test_a_slow_device_link_is_the_limit_across_hosts_too() -> None:
    slow = HostGroup(
        hosts=2,
        devices_per_host=4,
        device=hosts().device,
        intra=Link(alpha_seconds=ALPHA, bytes_per_second=1e9),
        inter=Link(alpha_seconds=ALPHA, bytes_per_second=10e9),
    )
    assert boundary_seconds(slow, range(4), range(4, 8), NBYTES) == pytest.approx(ALPHA + 10e6 / 1e9)


def test_a_congested_network_is_slower_the_more_hosts_talk() -> None:
    two = boundary_seconds(hosts(congestion=0.5), range(4), range(4, 8), NBYTES)
    four = boundary_seconds(hosts(congestion=0.5), range(8), range(8, 16), NBYTES)
    assert two == pytest.approx(2 * ALPHA + 40e6 / (10e9 / 2**0.5))
    assert four == pytest.approx(2 * ALPHA + 20e6 / (10e9 / 4**0.5))


def test_nothing_takes_no_time() -> None:
    assert boundary_seconds(hosts(), range(4), range(4, 8), 0) == 0


def test_eight_lanes_do_not_make_a_hosts_link_eight_times_as_fast() -> None:
    """41.9 MB over 25 Gb/s take 13 ms or more."""
    group = parse_cluster("2x8:v100-16g").group()
    seconds = boundary_seconds(group, range(8), range(8, 16), 41_943_040)
    assert seconds >= 41_943_040 / group.inter.bytes_per_second


def test_one_device_reaches_one_adapter_of_its_host() -> None:
    whole = replace(hosts(), adapters=4)
    one, two, four = (boundary_seconds(whole, range(4 - n, 4), range(4, 4 + n), NBYTES) for n in (1, 2, 4))
    assert one == pytest.approx(2 * ALPHA + 4 * 40e6 / 10e9)
    assert two == pytest.approx(2 * ALPHA + 2 * 40e6 / 10e9)
    assert four == boundary_seconds(hosts(), range(4), range(4, 8), NBYTES)


def test_an_array_that_is_sent_has_its_part_of_the_bandwidth_and_its_start() -> None:
    group = hosts()
    device = replace(group.device, send_seconds=1e-4)
    slower = replace(group, device=device, intra=replace(group.intra, sent=0.5), inter=replace(group.inter, sent=0.25))
    assert boundary_seconds(slower, range(1), range(1, 2), NBYTES) == pytest.approx(1e-4 + ALPHA + 2 * 40e6 / 100e9)
    assert boundary_seconds(slower, range(4), range(4, 8), NBYTES) == pytest.approx(1e-4 + 2 * ALPHA + 4 * 40e6 / 10e9)


def test_devices_without_a_link_of_their_own_are_further_apart() -> None:
    """Of a hybrid cube mesh: 0 and 3 share two links, 0 and 1 one, 0 and 5 none."""
    mesh = replace(hosts(per_host=8), wiring="hybrid cube mesh")
    two, one, none = (boundary_seconds(mesh, range(1), range(to, to + 1), NBYTES) for to in (3, 1, 5))
    assert two == pytest.approx(ALPHA + 40e6 / 100e9 * 6 / 2)
    assert one == pytest.approx(ALPHA + 40e6 / 100e9 * 6)
    assert none > 2 * one


def test_transfers_of_a_published_pipeline_take_what_was_measured() -> None:
    """25 to 28 MB between neighbours of 8 A100 took 0.53 to 0.63 ms; 10.5 MB to another host about 1 ms."""
    group = machine("A100-SXM4-80GB, RoCE", 16).group()
    assert boundary_seconds(group, range(1), range(1, 2), 25_165_824) == pytest.approx(0.535e-3, rel=0.1)
    assert boundary_seconds(group, range(1), range(1, 2), 28_311_552) == pytest.approx(0.61e-3, rel=0.1)
    assert boundary_seconds(group, range(7, 8), range(8, 9), 10_485_760) == pytest.approx(1.0e-3, rel=0.4)
