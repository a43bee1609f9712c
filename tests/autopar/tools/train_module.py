"""The text of a user's module with a train step, and saved plans, for tests of commands."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).parents[2] / "golden"

PLAN, OTHER = str(GOLDEN / "plan.json"), str(GOLDEN / "plan_other.json")

TRAIN = """\
import jax
import jax.numpy as jnp
import autopar

def step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p["up"]) @ p["down"]))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

def example():
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    return step, ({"up": f32(64, 256), "down": f32(256, 64)}, f32(128, 64))

def example_with_keywords():
    step, (params, batch) = example()
    return step, (params,), {"batch": batch}

@autopar.parallelize(static_argnames="rate", donate_argnums=0)
def parallel_step(params, batch, rate):
    return jax.tree.map(lambda p: p - rate, params), step(params, batch)[1]

def parallel_example():
    _, (params, batch) = example()
    return parallel_step, [params, batch], {"rate": 0.5}

def lone_example():
    return step, example()[1][1]

def unpacked_example():
    return step, [*example()[1], 1.0, 2.0]

def flat_example():
    return step, *example()[1]

def not_an_example():
    return 17

constant = 17
"""
