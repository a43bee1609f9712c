"""What is computed before, in and after the loop over microbatches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar


def test_a_constant_that_is_read_before_the_loop_and_after_it_is_made_in_both() -> None:
    """It was made before the loop alone, where it costs nothing and so was not kept: KeyError."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        ones = jnp.ones((w.shape[1], 2))
        scale = jnp.tanh(w @ ones)[:, 0]  # no microbatch changes it
        grad = jax.grad(lambda w: (jnp.tanh(x * scale @ w) ** 2).mean())(w)
        return w - 0.1 * grad, (w - 0.1 * grad) @ ones

    draws = np.random.default_rng(0)
    w, x = (jnp.asarray(draws.normal(size=shape), "float32") for shape in ((8, 4), (16, 8)))
    got = autopar.parallelize(step, planner=autopar.DataParallel(), microbatches=2)(w, x)
    for mine, theirs in zip(got, jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
