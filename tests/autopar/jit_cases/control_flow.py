"""Loops and branches: under a gradient, batched, decoding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.autopar.jit_cases.table import Table, ints, x

case = Table()


@case(slow=("searched",), seed=1)  # of seed 0 XLA leaves out a sum of the zeros that stand for another branch's results
def control_flow_under_gradient():
    def f(w, a, which):
        @jax.jit
        def loss(w):
            hidden = lax.switch(which, [lambda h: h, jnp.tanh, lambda h: h**2], a @ w)
            hidden = lax.cond(hidden.sum() > 0, lambda h: h * 2, lambda h: h - 1, hidden)
            hidden, sums = lax.scan(lambda h, r: (h * 0.5 + jnp.sin(r @ w), h.sum()), hidden[0], a)
            bounded = lax.fori_loop(0, 3, lambda i, h: jnp.cos(h) * (i + 1), hidden)
            return (bounded**2).sum() + sums.mean()

        return jax.jit(jax.value_and_grad(loss))(w)

    return f, (x(16, 4), x(8, 16), jnp.asarray(1))


@case(slow=("searched",))
def while_with_jvp():
    def f(a, v):
        def run(a):
            return lax.while_loop(lambda s: jnp.abs(s).max() > 0.1, lambda s: s * 0.5 + jnp.sin(s) * 0.1, a)

        return jax.jvp(run, (a,), (v,))

    return f, (x(8, 4), x(8, 4, seed=1))


@case(slow=("searched", "random"))
def associative_scan():
    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lambda a, b: lax.associative_scan(combine, (a, b)), (x(16, 8), x(16, 8, seed=1))


@case(slow=("searched",))
def mapped_loops():
    return lambda a: (lax.map(lambda r: jnp.tanh(r).sum(), a), lax.map(jnp.cumsum, a, batch_size=4)), (x(8, 4),)


@case
def batched_loop():
    """Each row stops after its own number of rounds."""

    def f(a, n):
        return jax.vmap(lambda r, k: lax.fori_loop(0, k, lambda i, s: s + r[i % 4], r[0]))(a, n)

    return f, (x(8, 4), ints(8))


@case(slow=("searched",))
def greedy_decoding():
    def f(table, prompt):
        def step(i, tokens):
            hidden = table[lax.dynamic_index_in_dim(tokens, i, 1, keepdims=False)]
            best = jnp.argmax(hidden @ table.T, -1).astype(tokens.dtype)
            return lax.dynamic_update_index_in_dim(tokens, best, i + 1, 1)

        tokens = jnp.concatenate([prompt, jnp.zeros((prompt.shape[0], 5), prompt.dtype)], 1)
        return lax.fori_loop(prompt.shape[1] - 1, tokens.shape[1] - 1, step, tokens)

    return f, (x(32, 8), ints(4, 3, below=32))


@case(slow=("searched",))
def key_value_cache():
    def f(cache, q, k, v, position):
        begin = jnp.zeros(4, position.dtype).at[1].set(position)
        keys = lax.dynamic_update_slice(cache["k"], k, tuple(begin))
        values = lax.dynamic_update_slice_in_dim(cache["v"], v, position, 1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys)
        scores = jnp.where(jnp.arange(keys.shape[1]) <= position, scores, -jnp.inf)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), values)
        return {"k": keys, "v": values}, out, position + 1

    cache = {"k": x(4, 16, 2, 4), "v": x(4, 16, 2, 4, seed=1)}
    one = [x(4, 1, 2, 4, seed=s) for s in (2, 3, 4)]
    return f, (cache, *one, jnp.asarray(5, jnp.int32)), {"donate_argnums": 0}


@case(slow=("searched", "random"))
def sampling_until_done():
    def f(table, tokens, key):
        def step(state):
            tokens, key, i = state
            key, use = jax.random.split(key)
            last = jnp.take_along_axis(tokens, jnp.full((4, 1), i), 1)[:, 0]
            drawn = jax.random.categorical(use, table[last] @ table.T).astype(tokens.dtype)
            return tokens.at[:, i + 1].set(drawn), key, i + 1

        return lax.while_loop(lambda s: (s[2] < 5) & ~(s[0] == 31).all(), step, (tokens, key, 0))

    return f, (x(32, 8), ints(4, 8, below=31), jax.random.key(7))
