"""Plans of one step, written and asked for in several ways, agree with each other: seeds draw step and cluster."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import Cluster, Plan
from passes.cluster import parse_cluster
from passes.errors import PlanningError
from tests.sample import some

CLUSTERS = ("8:a100-80g", "4:h100", "2x4:v100-16g", "8:tpu-v5e", "6:a100-80g", "3x2:a100-80g", "7:h100")
BATCHES = (8, 24, 64, 256)
WIDTHS = (64, 100, 256, 384, 1000, 2048)
SLACK = 1 + 1e-6


@dataclass(frozen=True)
class Drawn:
    """A loss of parameters, by name, and a batch; the types of both, and a cluster."""

    loss: Callable[[Any, jax.Array], jax.Array]
    parameters: dict[str, jax.ShapeDtypeStruct]
    batch: jax.ShapeDtypeStruct
    cluster: Cluster

    def plan(self, planner: Any = None, **options: Any) -> Plan:
        def step(parameters: Any, batch: jax.Array) -> Any:
            value, gradients = jax.value_and_grad(self.loss)(parameters, batch)
            return jax.tree.map(lambda w, g: w - 0.1 * g, parameters, gradients), value

        planned = autopar.parallelize(
            step, cluster=self.cluster, planner=planner or autopar.Auto(), donate_argnums=0, **options
        )
        plan = planned.plan(self.parameters, self.batch)
        assert isinstance(plan, Plan)
        return plan


def residual(dice: random.Random, batch: int) -> tuple[Any, dict[str, tuple[int, ...]], tuple[int, ...]]:
    width, inner = dice.choice(WIDTHS), dice.choice(WIDTHS)

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((x + jnp.tanh(x @ weights["up"]) @ weights["down"]) ** 2)

    return loss, {"up": (width, inner), "down": (inner, width)}, (batch, width)


def recurrent(dice: random.Random, batch: int) -> tuple[Any, dict[str, tuple[int, ...]], tuple[int, ...]]:
    width = dice.choice((64, 128, 256))

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        def advance(state: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(one @ weights["into"] + state @ weights["onward"]), None

        state, _ = jax.lax.scan(advance, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
        return jnp.mean(state**2)

    return loss, {"into": (width, width), "onward": (width, width)}, (batch, dice.choice((4, 10)), width)


def experts(dice: random.Random, batch: int) -> tuple[Any, dict[str, tuple[int, ...]], tuple[int, ...]]:
    number, width, inner = dice.choice((4, 8)), dice.choice((64, 256)), dice.choice((128, 512))

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(x @ weights["router"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), number)
        place = jnp.cumsum(chosen, 1) * chosen - 1
        sent = jax.nn.one_hot(place.astype(int), 64 // number) * chosen[..., None]
        hidden = jnp.einsum("gtec,gtm->gecm", sent, x)
        hidden = jax.nn.relu(jnp.einsum("gecm,emh->gech", hidden, weights["up"]))
        made = jnp.einsum("gech,ehm->gecm", hidden, weights["down"])
        weighted = sent * jnp.max(gates, -1)[..., None, None]
        return jnp.mean((x + jnp.einsum("gtec,gecm->gtm", weighted, made)) ** 2)

    sizes = {"router": (width, number), "up": (number, width, inner), "down": (number, inner, width)}
    return loss, sizes, (min(batch, 24), 64, width)


def drawn(seed: int) -> Drawn:
    """A random step on a random cluster."""
    dice = random.Random(seed)
    kind = (residual, experts, recurrent)[seed % 3]
    loss, sizes, batch = kind(dice, dice.choice(BATCHES))
    parameters = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    cluster = parse_cluster(dice.choice(CLUSTERS))
    return Drawn(loss, parameters, jax.ShapeDtypeStruct(batch, jnp.float32), cluster)


def hand_made(one: Drawn) -> list[Plan]:
    """The hand-made plans that the step may have on its cluster."""
    n_devices = one.cluster.n_devices
    tensor = [t for t in (2, 3, 4, 7, 8) if n_devices % t == 0]
    planners = [autopar.DataParallel(), *map(autopar.Zero, (1, 2, 3))]
    planners += [autopar.Megatron(data=n_devices // t, tensor=t) for t in tensor]
    plans = list[Plan]()
    for planner in planners:
        try:
            plans.append(one.plan(planner))
        except PlanningError:  # devices that do not divide a batch
            continue
    return plans


def improved(cluster: Cluster, *, network: float = 1.0, flops: float = 1.0, memory: float = 1.0) -> Cluster:
    """The cluster with links, products or memory so many times as fast."""
    group = cluster.group()
    intra, inter = (
        replace(link, bytes_per_second=network * link.bytes_per_second, alpha_seconds=link.alpha_seconds / network)
        for link in (group.intra, group.inter)
    )
    rates = {dtype: flops * rate for dtype, rate in group.device.flops_per_second.items()}
    bandwidth = memory * group.device.memory_bytes_per_second
    device = replace(group.device, flops_per_second=rates, memory_bytes_per_second=bandwidth)
    return Cluster(name="improved", groups=(replace(group, device=device, intra=intra, inter=inter),))


FIXED = 20
"""The seeds that are the same in every run; those from here on are drawn afresh."""

NUMBERS = some(range(FIXED + 10), quick=1)

BETTER = (({"network": 2.0}, 1.0), ({"memory": 2.0}, 1.0), ({"flops": 2.0}, 1.05))
"""Better clusters, and how much slower a step may be there. What is hidden behind products is no more than they take
at their peak, so that less is hidden behind those that memory bounds where that peak is higher: 3.4 % were met."""


@pytest.fixture
def one(number: int, fresh_seed: int) -> Drawn:
    """The step and cluster of a number: its own, or one that is drawn afresh."""
    return drawn(number if number < FIXED else fresh_seed + number)


@pytest.mark.parametrize("number", NUMBERS)
def test_no_hand_made_plan_is_faster_and_a_saved_one_has_its_numbers(one: Drawn):
    found = one.plan()
    for plan in hand_made(one):
        assert found.step_seconds <= SLACK * plan.step_seconds
        again = one.plan(autopar.Manual(plan))
        assert (again.step_seconds, again.peak_nbytes) == (plan.step_seconds, plan.peak_nbytes)


@pytest.mark.parametrize("number", NUMBERS)
def test_on_a_better_cluster_a_step_is_no_slower(one: Drawn):
    seconds = one.plan().step_seconds
    for better, factor in BETTER:
        plan = replace(one, cluster=improved(one.cluster, **better)).plan()
        assert plan.step_seconds <= SLACK * factor * seconds * (1 + plan.gap), better


@pytest.mark.parametrize("number", NUMBERS)
def test_a_steps_spelling_changes_no_seconds(one: Drawn):
    plan = one.plan()
    names = {name: f"{number}" for number, name in enumerate(sorted(one.parameters, reverse=True))}
    renamed = replace(
        one,
        loss=lambda weights, x: one.loss({name: weights[new] for name, new in names.items()}, x),
        parameters={names[name]: type for name, type in one.parameters.items()},
    )
    jitted = replace(one, loss=jax.jit(one.loss))
    for other in (renamed.plan(), jitted.plan()):
        gap = max(plan.gap, other.gap)
        assert other.step_seconds == pytest.approx(plan.step_seconds, rel=gap + 1e-6)
    assert one.plan().operators == plan.operators
