"""Data-parallel training steps that are measured: collectives that take as long as the trainings say."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.tools import parallel_steps, whole_steps
from autopar.tools.device_sweep import single_plan
from autopar.tools.whole_steps import ConvolutionalNet, WholeStep
from passes.cluster import Measured, Mesh, parse_cluster
from tests.sample import slow

NETS = (ConvolutionalNet(image=8, channels=(4, 8), batch=2), ConvolutionalNet(image=8, channels=(8,), batch=2))


def with_measured(alpha: float):
    """Two virtual CPU devices whose collectives of no bytes take so many seconds."""
    plain = parse_cluster("2:cpu")
    lines = (
        Measured(kind="all_reduce", ranks=2, alpha_seconds=alpha, bytes_per_second=1e10),
        Measured(kind="all_reduce", ranks=2, alpha_seconds=0.0, bytes_per_second=1e9),
    )
    return replace(plain, groups=(replace(plain.group(), measured=lines),))


def mesh_of(cluster):
    return Mesh(axes=("d",), sizes=(2,), cluster=cluster)


@pytest.mark.parametrize(("factor", "expected"), [(1.7, 1.7), slow(3.0, 3.0), (0.5, 1.0)])
def test_short_collectives_take_as_long_as_the_trainings_say_and_no_less_than_by_themselves(
    monkeypatch: pytest.MonkeyPatch, factor: float, expected: float
):
    cluster = with_measured(1e-3)
    truth = parallel_steps.lengthened(cluster, factor)

    def seconds(training: WholeStep, mesh: Mesh, devices: object) -> tuple[float, float]:
        return single_plan(training.traced(), truth).step_seconds, parallel_steps.predicted_seconds(training, truth)

    monkeypatch.setattr(WholeStep, "traced", functools.cache(WholeStep.traced))
    monkeypatch.setattr(parallel_steps, "seconds", seconds)
    monkeypatch.setattr(whole_steps, "convolutional_nets", lambda platform: NETS)
    result, samples = parallel_steps.with_waits(cluster, mesh_of(cluster), jax.devices()[:2])
    short, long = result.group().measured
    assert short.alpha_seconds == pytest.approx(expected * 1e-3, rel=1e-6)
    assert (long.alpha_seconds, long.bytes_per_second) == (0.0, 1e9)
    assert [sample.size for sample in samples] == [net.size for net in NETS]
    if factor == expected:
        assert [sample.predicted for sample in samples] == pytest.approx([sample.measured for sample in samples])


def test_collectives_that_only_their_bytes_bound_stay_as_they_are(monkeypatch: pytest.MonkeyPatch):
    cluster = with_measured(0.0)
    monkeypatch.setattr(parallel_steps, "seconds", lambda *_: (1e-3, 9e-3))
    monkeypatch.setattr(whole_steps, "convolutional_nets", lambda platform: NETS[1:])
    result, samples = parallel_steps.with_waits(cluster, mesh_of(cluster), jax.devices()[:2])
    assert result == cluster
    assert [sample.measured for sample in samples] == [9e-3]


def test_accelerators_have_cores_of_their_own():
    cluster = parse_cluster("2:h100")
    assert parallel_steps.with_waits(cluster, mesh_of(cluster), jax.devices()[:2]) == (cluster, ())


def test_a_data_parallel_step_is_that_of_every_device_by_itself_on_equal_batches():
    devices, cluster = jax.devices()[:2], with_measured(1e-3)
    training = NETS[0]
    apart, joined = parallel_steps.seconds(training, mesh_of(cluster), devices)
    assert 0 < apart < 1
    assert 0 < joined < 1
    weights, moments, batch = training.drawn()
    both = replace(training, batch=2 * training.batch)
    twice = jnp.concatenate([batch, batch])
    for _ in range(2):
        once, joint = training.step(weights, moments, batch), both.step(weights, moments, twice)
        for mine, theirs in zip(jax.tree.leaves(once), jax.tree.leaves(joint), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        weights, moments, _ = once


def test_the_median_step_counts(monkeypatch: pytest.MonkeyPatch):
    ticks = iter(float(n) for n in range(10_000))
    monkeypatch.setattr(parallel_steps.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(whole_steps, "alone", lambda *_: lambda: None)
    monkeypatch.setattr(parallel_steps, "together", lambda *_: lambda: [next(ticks) for _ in range(3)])
    cluster = with_measured(1e-3)
    assert parallel_steps.seconds(NETS[0], mesh_of(cluster), jax.devices()[:2]) == (1.0, 4.0)
