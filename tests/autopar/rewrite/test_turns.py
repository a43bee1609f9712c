"""Steps that compute with the batch again after something needs all of it: loops over microbatches, in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.frontend import trace
from passes.transforms.turns import in_turn
from tests.closeness import assert_close
from tests.sample import each

ROWS, WIDTH = 32, 6
CLUSTER = "8:a100-80g"
Params = dict[str, jax.Array]
DRAWS = np.random.default_rng(0)


def drawn() -> dict[str, np.ndarray]:
    return {"up": DRAWS.normal(size=(WIDTH, 2 * WIDTH)), "down": DRAWS.normal(size=(2 * WIDTH, WIDTH))}


def network(p: Params, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["up"]) @ p["down"]


def moved(p: Any, g: Any, rate: float = 0.1) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, p, g)


def sharpness_aware(p: Params, x: jax.Array) -> tuple[Params, jax.Array]:
    """SAM (Foret et al. 2021): the gradient at weights that another gradient moved."""

    def loss(p: Params) -> jax.Array:
        return jnp.mean(network(p, x) ** 2)

    value, g = jax.value_and_grad(loss)(p)
    norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(g)))
    return moved(p, jax.grad(loss)(moved(p, g, -0.05 / norm))), value


def actor_and_critic(state: tuple[Any, ...], x: jax.Array) -> tuple[Any, ...]:
    """Soft actor-critic (Haarnoja et al. 2018): the actor's loss reads the critic after its update; the temperature's
    reads actions that the actor's loss has, too.
    """
    actor, critic, temperature = state
    critic = moved(critic, jax.grad(lambda c: jnp.mean((network(c, x) - network(actor, x)) ** 2))(critic))

    def judged(actor: Params) -> tuple[jax.Array, jax.Array]:
        action = network(actor, x)
        return jnp.mean(network(critic, action) + temperature * action), action

    (value, action), g = jax.value_and_grad(judged, has_aux=True)(actor)
    return (moved(actor, g), critic, temperature - 0.1 * lax.stop_gradient(action + 1).mean()), value


def in_three(state: tuple[Any, ...], x: jax.Array, y: jax.Array) -> tuple[Any, ...]:
    """Each of three networks learns from the one before, on one of two batches; rows leave as well."""
    first, second, third = state
    first = moved(first, jax.grad(lambda p: jnp.mean(network(p, x) ** 2))(first))
    second = moved(second, jax.grad(lambda p: jnp.mean((network(p, y) - network(first, y)) ** 2))(second))
    learned = network(second, x)
    third = moved(third, jax.grad(lambda p: jnp.mean((network(p, x) * learned) ** 2))(third))
    return (first, second, third), learned.argmax(-1), y


def learned(loss: Callable[[Params, jax.Array], jax.Array]) -> Callable[..., Any]:
    def step(p: Params, x: jax.Array) -> tuple[Params, jax.Array]:
        value, g = jax.value_and_grad(loss)(p, x)
        return moved(p, g), value

    return step


def normalized(h: jax.Array) -> jax.Array:
    return (h - h.mean(0)) / (h.std(0) + 1)


def of_two_factors(p: Params, x: jax.Array) -> jax.Array:
    """The gradient of each factor is multiplied by the other, which the whole batch decides."""
    y = network(p, x)
    return jnp.mean(y**2) * jnp.exp(-jnp.mean(y)) + jnp.maximum(jnp.mean(jnp.abs(y)), 0.1)


def batch_normalized(p: Params, x: jax.Array) -> jax.Array:
    return jnp.mean((normalized(jnp.tanh(x @ p["up"])) @ p["down"]) ** 2)


def contrastive(p: Params, x: jax.Array) -> jax.Array:
    """CLIP (Radford et al. 2021): each row is compared with every other one."""
    z, other = network(p, x), network(p, -x + 1)
    logits = z @ other.T
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)) + jnp.diag(jax.nn.log_softmax(logits.T)))


def redundancy_reduced(p: Params, x: jax.Array) -> jax.Array:
    """Barlow Twins (Zbontar et al. 2021): features of the whole batch are correlated."""
    correlation = normalized(network(p, x)).T @ normalized(network(p, x + 1)) / ROWS
    return jnp.sum((correlation - jnp.eye(WIDTH)) ** 2)


X, Y = DRAWS.normal(size=(ROWS, WIDTH)), DRAWS.normal(size=(ROWS, WIDTH))
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "sharpness aware": (sharpness_aware, (drawn(), X), 2),
    "actor and critic": (actor_and_critic, ((drawn(), drawn(), jnp.float64(0.5)), X), 2),
    "in three": (in_three, ((drawn(), drawn(), drawn()), X, Y), 3),
    "of two factors": (learned(of_two_factors), (drawn(), X), 2),
    "batch normalized": (learned(batch_normalized), (drawn(), X), 2),
    "contrastive": (learned(contrastive), (drawn(), X), 2),
    "redundancy reduced": (learned(redundancy_reduced), (drawn(), X), 2),
}
PLANNERS = [autopar.DataParallel(), autopar.Zero(3), autopar.Auto()]


@pytest.mark.parametrize(("name", "planner"), each(CASES, PLANNERS))
def test_the_step_is_jits(name: str, planner: Any):
    step, args, _ = CASES[name]
    with jax.enable_x64(True):
        parallel = autopar.parallelize(step, planner=planner, microbatches=4)
        assert_close(parallel(*args), jax.jit(step)(*args))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_reduced_once(name: str):
    step, args, turns = CASES[name]
    traced = trace(step, args, {})
    assert len(in_turn(traced.graph, 4, state_pairs=traced.state_pairs)) == turns
    sent = [
        {(c.kind, c.nbytes): c.count for c in autopar.parallelize(step, cluster=CLUSTER, **way).plan(*args).collectives}
        for way in ({"planner": autopar.DataParallel()}, {"planner": autopar.DataParallel(), "microbatches": 4})
    ]
    matrix = ("all_reduce", 2 * WIDTH**2 * 4)
    assert sent[0][matrix] == sent[1][matrix]


def test_a_microbatch_takes_less_memory():
    args = jax.eval_shape(lambda: jax.tree.map(jnp.float32, drawn())), jax.ShapeDtypeStruct((1 << 16, WIDTH), "float32")
    whole, parts = (
        autopar.parallelize(sharpness_aware, planner=autopar.DataParallel(), cluster=CLUSTER, microbatches=n).plan(
            *args
        )
        for n in (None, 8)
    )
    assert parts.peak_nbytes < whole.peak_nbytes / 2


def test_more_turns_than_a_search_has_time_for_are_refused_by_line():
    """A batch normalization in every layer of a deep network needs a turn for each."""

    def step(p: jax.Array, x: jax.Array) -> jax.Array:
        def loss(p: jax.Array) -> jax.Array:
            h = x
            for _ in range(8):
                h = h + normalized(jnp.tanh(h @ p))
            return jnp.mean(h**2)

        return p - jax.grad(loss)(p)

    with pytest.raises(autopar.PlanningError, match=r"(?s)test_turns.py:\d+ \(normalized\).*needs as a whole"):
        autopar.parallelize(step, microbatches=4, cluster=CLUSTER).plan(jnp.ones((WIDTH, WIDTH)), X)


def test_stages_run_one_loop():
    planner = autopar.Pipeline(stages=2, microbatches=4)
    with pytest.raises(autopar.PlanningError, match="in a pipeline write microbatches=1"):
        autopar.parallelize(sharpness_aware, planner=planner, cluster=CLUSTER).plan(drawn(), X)
