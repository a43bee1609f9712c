"""Collectives cost what their algorithms say, and what was measured."""

import math
import statistics
from dataclasses import replace
from typing import get_args

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from benchmarks.collectives import Measurement, System, fit, published
from benchmarks.published.machines import machine
from passes.cluster import Collective, Kind, Mesh, collectives, parse_cluster
from passes.cluster.cluster import Link
from passes.cluster.collectives import seconds
from passes.cluster.mesh import Group

KINDS: tuple[Kind, ...] = get_args(Kind)
INTRA = Link(alpha_seconds=2e-6, bytes_per_second=200e9)
INTER = Link(alpha_seconds=10e-6, bytes_per_second=50e9)


def group(ranks: int, hosts: int = 1, intra: Link = INTRA, inter: Link = INTER) -> Group:
    return Group.of(ranks, hosts, intra, inter)


def at(cost: collectives.Cost | None, nbytes: float) -> float:
    assert cost is not None
    return cost.latency_seconds + cost.seconds_per_byte * nbytes


links = st.builds(
    Link,
    alpha_seconds=st.floats(min_value=0, max_value=1e-3),
    bytes_per_second=st.floats(min_value=1e6, max_value=1e12),
    reduces=st.booleans(),
    low_latency=st.booleans(),
    congestion=st.floats(min_value=0, max_value=1),
)
groups = st.builds(
    lambda hosts, each, intra, inter: group(hosts * each, hosts, intra, inter),
    st.integers(1, 64),
    st.integers(1, 16),
    links,
    links,
)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_one_host_has_the_closed_forms(n: int) -> None:
    a, w, nbytes = INTRA.alpha_seconds, INTRA.bytes_per_second, 1e6
    g = group(n)
    assert at(collectives.ring(g), nbytes) == pytest.approx((n - 1) * a + (n - 1) / n * nbytes / w)
    assert at(collectives.tree(g), nbytes) == pytest.approx(2 * (n - 1) * a + 2 * nbytes / (0.75 * w))
    assert at(collectives.one_shot(g), nbytes) == pytest.approx(a + (n - 1) * nbytes / w)
    assert at(collectives.pairwise(g), nbytes) == pytest.approx((n - 1) * a + (n - 1) / n * nbytes / w)
    assert at(collectives.direct(g), nbytes) == pytest.approx(a + nbytes / w)
    assert collectives.switched(g) is None
    assert collectives.switched_hosts(g) is None
    assert collectives.doubling(g) is None


def test_several_hosts_have_the_closed_forms() -> None:
    g = group(32, hosts=4)
    inside, across = INTRA.alpha_seconds, INTER.alpha_seconds
    w, nbytes = INTER.bytes_per_second, 1e6
    assert at(collectives.ring(g), nbytes) == pytest.approx(28 * inside + 3 * across + 31 / 32 * nbytes / w)
    assert at(collectives.tree(g), nbytes) == pytest.approx(2 * (7 * inside + 2 * across) + 2 * nbytes / (0.75 * w))
    assert at(collectives.pairwise(g), nbytes) == pytest.approx(7 * inside + 3 * across + 8 * 24 / 32 * nbytes / w)
    assert collectives.doubling(g) is None
    one_each = at(collectives.doubling(group(4, hosts=4)), nbytes)
    assert one_each == pytest.approx(2 * across + 3 / 4 * nbytes / w)
    switched = at(collectives.switched_hosts(group(32, hosts=4, intra=replace(INTRA, reduces=True))), nbytes)
    assert switched == pytest.approx(2 * inside + 4 * across + 2 * 3 / 4 * nbytes / w)
    assert collectives.one_shot(g) is None


def test_a_switch_that_adds_takes_bytes_once() -> None:
    g = group(8, intra=replace(INTRA, reduces=True))
    assert at(collectives.switched(g), 1e9) < 2 * at(collectives.ring(g), 1e9)
    assert seconds("all_reduce", 1e9, g) == pytest.approx(at(collectives.switched(g), 1e9))
    assert seconds("all_gather", 1e9, g) == seconds("all_gather", 1e9, group(8))


def test_congestion_slows_many_hosts_more_than_few() -> None:
    congested = replace(INTER, congestion=0.5)
    for hosts in (4, 16):
        slowdown = seconds("all_gather", 1e12, group(8 * hosts, hosts, inter=congested)) / seconds(
            "all_gather", 1e12, group(8 * hosts, hosts)
        )
        assert slowdown == pytest.approx(math.sqrt(hosts), rel=1e-3)


@given(st.sampled_from(KINDS), groups, st.floats(min_value=0, max_value=1e12), st.floats(min_value=0, max_value=1e12))
def test_more_bytes_never_take_less_time(kind: Kind, g: Group, one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert 0 <= seconds(kind, less, g) <= seconds(kind, more, g)


NBYTES = st.integers(min_value=0, max_value=10**12)


@given(groups, NBYTES)
def test_an_all_reduce_is_between_its_dearer_half_and_both(g: Group, nbytes: int) -> None:
    scatter, gather, whole = (seconds(kind, nbytes, g) for kind in ("reduce_scatter", "all_gather", "all_reduce"))
    assert max(scatter, gather) <= whole * (1 + 1e-12)
    assert whole <= (scatter + gather) * (1 + 1e-12)


@given(st.sampled_from(KINDS), groups, NBYTES, NBYTES)
def test_two_messages_never_take_less_than_one_of_both(kind: Kind, g: Group, one: float, other: float) -> None:
    assert seconds(kind, one + other, g) <= (seconds(kind, one, g) + seconds(kind, other, g)) * (1 + 1e-9)


@given(st.sampled_from(KINDS), groups, NBYTES, st.floats(min_value=1, max_value=100), st.booleans())
def test_more_bandwidth_is_never_slower(kind: Kind, g: Group, nbytes: float, faster: float, inside: bool) -> None:
    link = g.intra if inside else g.inter
    link = replace(link, bytes_per_second=link.bytes_per_second * faster)
    better = replace(g, intra=link) if inside else replace(g, inter=link)
    assert seconds(kind, nbytes, better) <= seconds(kind, nbytes, g) * (1 + 1e-12)


@given(st.sampled_from(KINDS), groups, NBYTES)
def test_protocols_of_low_latency_never_take_much_longer(kind: Kind, g: Group, nbytes: float) -> None:
    """The first of them is the plain one, with the time that NCCL takes to start."""
    plain = replace(g, intra=replace(g.intra, low_latency=False), inter=replace(g.inter, low_latency=False))
    quick = replace(g, intra=replace(g.intra, low_latency=True), inter=replace(g.inter, low_latency=True))
    start = collectives.PROTOCOLS[0].start_seconds
    assert seconds(kind, nbytes, quick) <= (seconds(kind, nbytes, plain) + start) * (1 + 1e-12)


@given(st.sampled_from(KINDS), groups, NBYTES)
def test_the_least_of_all_algorithms_and_protocols_counts(kind: Kind, g: Group, nbytes: float) -> None:
    """A link of low latency has a latency and a bandwidth of each protocol; others have their own."""

    def under(protocol: collectives.Protocol, link: Link) -> Link:
        latency, bandwidth = (protocol.latency, protocol.bandwidth) if link.low_latency else (1, 1)
        alpha, rate = link.alpha_seconds * latency, link.bytes_per_second * bandwidth
        return replace(link, alpha_seconds=alpha, bytes_per_second=rate)

    ways = [
        (p.start_seconds, replace(g, intra=under(p, g.intra), inter=under(p, g.inter))) for p in collectives.PROTOCOLS
    ]
    if not any(link.low_latency for link in (g.intra, g.inter)[: min(g.hosts, 2)]):
        ways = [(0.0, g)]
    every = [start + at(cost, nbytes) for start, way in ways for cost in collectives.ALGORITHMS[kind](way)]
    assert seconds(kind, nbytes, g) == pytest.approx(min(every) if g.ranks > 1 else 0.0)


def test_zero_scatters_its_gradients_on_many_hosts() -> None:
    """4 MB on 64 hosts of 8 H100: a scatter that cost more than the whole all-reduce made ZeRO all-reduce."""
    mesh = Mesh(axes=("x",), sizes=(512,), cluster=parse_cluster("64x8:h100"))
    scatter, whole = (seconds(kind, 4e6, mesh.group(("x",))) for kind in ("reduce_scatter", "all_reduce"))
    assert scatter <= whole < 1e-3


def test_tensors_over_four_hosts_take_what_was_measured() -> None:
    """15.7 MB over 4 DGX A100 took 0.54 ms (Megatron-LM SC 2021, Fig. 15, tensors over 32 devices)."""
    mesh = Mesh(axes=("x",), sizes=(32,), cluster=machine("DGX A100", 32))
    assert seconds("all_reduce", 15.7e6, mesh.group(("x",))) == pytest.approx(0.54e-3, rel=0.1)


@given(st.sampled_from(KINDS), groups, st.lists(st.floats(min_value=0, max_value=1e12), min_size=1))
def test_an_array_costs_what_its_numbers_cost(kind: Kind, g: Group, sizes: list[float]) -> None:
    together = seconds(kind, np.array(sizes), g)
    assert together.tolist() == [seconds(kind, nbytes, g) for nbytes in sizes]


@pytest.mark.parametrize("kind", KINDS)
def test_alone_costs_nothing(kind: Kind) -> None:
    assert seconds(kind, 1e9, group(1)) == 0.0
    assert seconds(kind, np.array([1.0, 1e9]), group(1)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_small_messages_are_bound_by_latency_and_large_ones_by_bandwidth(kind: Kind) -> None:
    g = group(32, hosts=4)
    assert seconds(kind, 64, g) == pytest.approx(seconds(kind, 0, g), rel=1e-3)
    assert seconds(kind, 2e12, g) == pytest.approx(2 * seconds(kind, 1e12, g), rel=1e-3)


def test_all_reduce_is_at_least_the_work_of_its_halves_under_the_ring() -> None:
    halves = seconds("reduce_scatter", 1e9, group(8)) + seconds("all_gather", 1e9, group(8))
    assert seconds("all_reduce", 1e9, group(8)) == pytest.approx(halves)


def test_a_collective_reads_as_text_and_knows_its_payload() -> None:
    c = Collective(
        kind="reduce_scatter", axes=("x", "y"), dtype="bfloat16", nbytes=2**20, count=12, where="mlp.py:7 (loss)"
    )
    assert str(c) == "12 x reduce_scatter@x+y bfloat16 1.00 MiB  # mlp.py:7 (loss)"
    assert str(replace(c, count=1, where="")) == "reduce_scatter@x+y bfloat16 1.00 MiB"
    assert c.payload_nbytes(8) == 8 * 2**20
    assert {replace(c, kind=kind).payload_nbytes(8) for kind in KINDS if kind != "reduce_scatter"} == {2**20}


def test_a_collective_costs_as_often_as_it_runs() -> None:
    mesh = Mesh(axes=("x", "y"), sizes=(4, 2), cluster=parse_cluster("8:a100-80g"))
    once = Collective(kind="all_gather", axes=("x",), dtype="float32", nbytes=2**20, count=1, where="")
    assert once.seconds(mesh) == seconds("all_gather", 2**20, mesh.group(("x",)))
    assert replace(once, count=3).seconds(mesh) == 3 * once.seconds(mesh)


# The median error that the device table reaches on each published set, with some room.
EXPECTED = {
    "nanotron, H100, AWS p5": 0.12,
    "stas00, 4 nodes of 8": 0.10,
    "Galvatron, 8 NVLink GPUs": 0.10,
    "stas00, H200, SHARP on": 0.05,
    "stas00, H200, SHARP off": 0.02,
    "stas00, B200, SHARP on": 0.10,
    "stas00, B200, SHARP off": 0.02,
}


def test_published_measurements_are_predicted() -> None:
    systems = {system.name: system for system in published()}
    assert systems.keys() == EXPECTED.keys()
    errors = {name: statistics.median(system.errors()) for name, system in systems.items()}
    assert {name: error for name, error in errors.items() if error > EXPECTED[name]} == {}


def test_large_messages_on_one_host_are_predicted_closely() -> None:
    errors = [
        error
        for system in published()
        for m, error in zip(system.measurements, system.errors(), strict=True)
        if m.kind == "all_reduce" and m.hosts == 1 and m.nbytes >= 2**26
    ]
    assert len(errors) > 20
    assert statistics.median(errors) < 0.06


def test_a_fit_finds_the_link_that_made_the_data() -> None:
    made = System(name="made", intra=INTRA, inter=INTER, call_seconds=0.0, measurements=(), fitted=())
    truth = [
        Measurement(
            kind="all_reduce", ranks=n, hosts=1, nbytes=2**power, seconds=seconds("all_reduce", 2**power, group(n))
        )
        for n in (2, 8)
        for power in (10, 16, 20, 24, 28)
    ]
    names = ("intra.alpha_seconds", "intra.bytes_per_second")
    start = replace(INTRA, alpha_seconds=20e-6, bytes_per_second=30e9)
    found = fit(replace(made, intra=start, measurements=tuple(truth), fitted=names)).intra
    assert found.alpha_seconds == pytest.approx(INTRA.alpha_seconds, rel=0.05)
    assert found.bytes_per_second == pytest.approx(INTRA.bytes_per_second, rel=0.05)
