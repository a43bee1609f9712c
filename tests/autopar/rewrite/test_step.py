"""Variants of a step: each says which it is, and what several have in common is written once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar.rewrite import step_of
from passes.step import Variant
from tests.autopar.rewrite.traced_steps import traced_step


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def test_a_variant_says_which_it_is_where_another_is_the_same_program() -> None:
    weights, x = [f(8, 8)] * 4, f(8, 8)
    optimizer = optax.sgd(0.1)
    traced = traced_step(loss, weights, x, optimizer)
    structs = jax.tree.leaves(((weights, jax.eval_shape(optimizer.init, weights)), x))
    step = step_of(traced, structs)
    variants = [Variant(microbatches=2, stages=n) for n in (2, 3, 0)]
    made = [step.variant(variant) for variant in variants]
    assert [one.chosen for one in made] == variants
    assert made[0].graph is made[1].graph is made[2].variant(variants[0]).graph
    assert step.variant(variants[1]) is made[1]
    assert step.variant(Variant()).chosen == Variant(microbatches=1)


@pytest.mark.parametrize("rows", [2, 12, 36, 97])
def test_numbers_of_microbatches_are_the_divisors_of_the_batch(rows: int) -> None:
    assert counts_of(rows) == tuple(n for n in range(1, rows + 1) if rows % n == 0)


def test_numbers_of_microbatches_of_a_batch_too_long_to_count_through() -> None:
    assert counts_of(2**40) == tuple(2**n for n in range(41))


def counts_of(rows: int) -> tuple[int, ...]:
    """The numbers of microbatches of a batch of so many rows."""
    weight, x = f(), f(rows)
    optimizer = optax.sgd(0.1)
    traced = traced_step(lambda w, x: ((w * x) ** 2).mean(), weight, x, optimizer)
    return step_of(traced, jax.tree.leaves(((weight, jax.eval_shape(optimizer.init, weight)), x))).counts
