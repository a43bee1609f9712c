"""Measurement of whole training steps, and clusters that are fitted to take as long."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.tools import whole_steps
from autopar.tools.device_sweep import single_plan
from autopar.tools.whole_steps import ConvolutionalNet, Transformer, WholeStep
from passes.cluster import Mesh, parse_cluster, what_if
from tests.sample import half, slow

SEVERAL = (Transformer(hidden=16, sequence=8, head=8), Transformer(hidden=32, sequence=16, head=8))


NETS = (ConvolutionalNet(image=4, channels=(8,), batch=2), ConvolutionalNet(image=8, channels=(4, 8), batch=2))


def drawn(training: WholeStep) -> tuple[dict[str, jax.Array], dict[str, jax.Array], jax.Array]:
    """Random weights, moments, and a random batch."""
    rng = np.random.default_rng(0)
    weights, moments, batch = training.arguments()
    weights = {name: jnp.asarray(rng.normal(scale=0.2, size=w.shape), w.dtype) for name, w in weights.items()}
    moments = {name: jnp.zeros(m.shape, m.dtype) for name, m in moments.items()}
    return weights, moments, jnp.asarray(rng.integers(0, 256, batch.shape), batch.dtype)


def losses_of(training: WholeStep) -> list[float]:
    """Every loss of 300 steps on one batch, after which all weights have changed."""
    weights, moments, batch = drawn(training)
    step, losses = jax.jit(training.step), list[float]()
    before = weights
    for _ in range(300):
        weights, moments, loss = step(weights, moments, batch)
        losses.append(float(loss))
    assert all(float(jnp.abs(weights[name] - before[name]).max()) > 0 for name in weights)
    return losses


@pytest.mark.parametrize(
    "training",
    [
        ConvolutionalNet(image=8, channels=(8, 16), batch=4),
        slow(Transformer(hidden=16, sequence=8, batch=2, head=8)),
    ],
    ids=["images", "transformer"],
)
def test_the_measured_training_lowers_its_loss(training: WholeStep):
    losses = losses_of(training)
    assert losses[-1] < 0.8 * losses[0]


def test_the_measured_loss_depends_on_the_last_token():
    training = Transformer(hidden=16, sequence=8, batch=2, head=8)
    weights, _, batch = drawn(training)
    later = training.loss(weights, batch.at[:, -1].set(0))
    earlier = training.loss(weights, batch.at[:, -1].set(1))
    assert later != earlier


def test_a_token_sees_none_behind_it():
    training = Transformer(hidden=16, sequence=8, head=8)
    weights = {n: jnp.ones(w.shape) * 0.1 for n, w in training.arguments()[0].items() if n.endswith("_0")}
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 8, 16)), jnp.float32)
    of_block = {name.removesuffix("_0"): w for name, w in weights.items()}
    first, second = (training._attention(y, of_block) for y in (x, x.at[:, -1].add(1.0)))
    np.testing.assert_array_equal(first[:, :-1], second[:, :-1])
    assert float(jnp.abs(first[:, -1] - second[:, -1]).max()) > 0


ORDER = {"strided_bytes_per_second": 1e9, "product_seconds": 1e-6, "pixel_seconds": 1e-9}
"""What the order of operands costs."""


@pytest.mark.parametrize(("factor", "starts"), [slow(1.0, 1.0), (1.7, 6.0), slow(0.5, 1.5)])
def test_the_cluster_takes_as_long_as_the_trainings(monkeypatch: pytest.MonkeyPatch, factor: float, starts: float):
    plain = parse_cluster("2:cpu")
    group = plain.group()
    cluster = replace(plain, groups=(replace(group, device=replace(group.device, **ORDER)),))
    device = cluster.group().device
    slower = what_if.slower_device(replace(device, launch_seconds=starts * device.launch_seconds), factor)
    truth = replace(cluster, groups=(replace(group, device=slower),))

    def seconds(several: Sequence[WholeStep], mesh: Mesh, devices: object) -> list[float]:
        return [single_plan(training.traced(), truth).step_seconds for training in several]

    monkeypatch.setattr(WholeStep, "traced", functools.cache(WholeStep.traced))
    monkeypatch.setattr(whole_steps, "seconds", seconds)
    monkeypatch.setattr(whole_steps, "transformers", lambda platform: SEVERAL)
    monkeypatch.setattr(whole_steps, "convolutional_nets", lambda platform: NETS)
    mesh = Mesh(axes=("d",), sizes=(2,), cluster=cluster)
    slowed, samples = whole_steps.slowed(cluster, mesh, jax.devices()[:2])
    device, known = slowed.group().device, truth.group().device
    for name in ("matmul_efficiency", "memory_bytes_per_second", "launch_seconds", *ORDER):
        assert getattr(device, name) == pytest.approx(getattr(known, name), rel=1e-6)
    assert [sample.size for sample in samples] == [training.size for training in (*SEVERAL, *NETS)]
    for sample in samples:
        assert sample.predicted == pytest.approx(sample.measured, rel=1e-6)


@pytest.mark.parametrize(("training", "count"), half([SEVERAL[0], NETS[0]], [1, 2]))
def test_every_device_takes_a_step_of_its_own(count: int, training: WholeStep):
    devices = jax.devices()[:count]
    cluster = parse_cluster(f"{count}:cpu")
    mesh = Mesh(axes=("d",) if count > 1 else (), sizes=(count,) if count > 1 else (), cluster=cluster)
    (spent,) = whole_steps.seconds([training], mesh, devices)
    assert 0 < spent < 1


@pytest.mark.parametrize(("wall", "expected"), [(1.1, 1.1), (1.6, 1.0)], ids=["alone", "beside other programs"])
def test_seconds_are_of_the_wall_clock_where_nothing_else_runs(
    monkeypatch: pytest.MonkeyPatch, wall: float, expected: float
):
    spent = [0.0]  # a step takes 0.2 s of two cores

    def step() -> None:
        spent[0] += 0.2

    monkeypatch.setattr(whole_steps, "alone", lambda training, mesh, devices: step)
    monkeypatch.setattr(whole_steps, "clock_of", lambda devices: (lambda: spent[0], 2))
    monkeypatch.setattr(whole_steps.time, "perf_counter", lambda: spent[0] / 2 * wall)
    mesh = Mesh(axes=("d",), sizes=(2,), cluster=parse_cluster("2:cpu"))
    assert whole_steps.seconds([SEVERAL[0]], mesh, jax.devices()[:2]) == [pytest.approx(0.1 * expected)]


def test_two_trainings_do_not_say_how_long_an_operator_takes_to_start(monkeypatch: pytest.MonkeyPatch):
    cluster = parse_cluster("2:a100-80g")
    mesh = Mesh(axes=("d",), sizes=(2,), cluster=cluster)
    monkeypatch.setattr(whole_steps, "seconds", lambda several, mesh, devices: [1e-3, 3e-3])
    monkeypatch.setattr(whole_steps, "transformers", lambda platform: SEVERAL)
    monkeypatch.setattr(whole_steps, "convolutional_nets", lambda platform: ())
    slowed, samples = whole_steps.slowed(cluster, mesh, jax.devices()[:2])
    factor = cluster.group().device.matmul_efficiency / slowed.group().device.matmul_efficiency
    assert slowed.group().device.launch_seconds == pytest.approx(factor * cluster.group().device.launch_seconds)
    assert len(samples) == len(SEVERAL)


def test_accelerators_take_larger_ones():
    assert not whole_steps.convolutional_nets("gpu")
    for platform in ("cpu", "gpu", "tpu"):
        for training in whole_steps.transformers(platform):
            assert training.hidden % training.head == 0
            weights, _, tokens = jax.eval_shape(training.step, *training.arguments())
            assert tokens.shape == ()
            assert {w.dtype.name for w in weights.values()} == {training.dtype}
