"""Ordinary functions under random legal plans: the program equals `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.checks import verify
from autopar.checks.hlo import UNCOMBINED
from tests.autopar.random_plans import Dice
from tests.sample import slow


def x(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def mlp_step(params, batch, key):
    optimizer = optax.sgd(0.1)

    def loss(params):
        hidden = jax.nn.gelu(batch @ params["up"] + params["bias"])
        hidden = jnp.where(jax.random.bernoulli(key, 0.8, hidden.shape), hidden / 0.8, 0)
        return jnp.sum((hidden @ params["down"] - batch) ** 2) / 100

    value, grads = jax.value_and_grad(loss)(params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates), value


def embed_loss(table, tokens, targets):
    def loss(table):
        logits = table[tokens] @ table.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return jax.value_and_grad(loss)(table)


def layers(params, inputs):
    def layer(hidden, weights):
        up, down = weights
        return hidden + jnp.tanh(hidden @ up) @ down, hidden.mean()

    return jax.lax.scan(layer, inputs, params)


def layers_step(params, inputs, remat):
    def loss(params):
        run = jax.checkpoint(layers) if remat else layers
        hidden, means = run(params, inputs)
        return jnp.sum(hidden**2) / 100 + means.sum()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def recurrent(params, inputs):
    def loss(params):
        def cell(hidden, x):
            hidden = jnp.tanh(hidden @ params[0] + x @ params[1])
            return hidden, hidden

        return jnp.sum(jax.lax.scan(cell, jnp.zeros_like(inputs[0]), inputs)[1] ** 2) / 100

    return jax.value_and_grad(loss)(params)


def accumulated(weights, batches):
    def step(total, batch):
        return total + jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w)) / 10)(weights), None

    return weights - jax.lax.scan(step, jnp.zeros_like(weights), batches)[0]


def until_small(a):
    return jax.lax.while_loop(
        lambda s: (jnp.abs(s[0]).max() > 0.5) & (s[1] < 9), lambda s: (s[0] / 2, s[1] + 1), (a, 0)
    )


def branches(a, which):
    halves = [lambda a: a @ a.T, lambda a: a * 2 + a.mean(0), lambda a: jnp.flip(a, 1)]
    picked = jax.lax.switch(which, halves, a)
    return jax.lax.cond(which > 1, lambda a: a.sum(1), lambda a: a.max(0), picked)


def noisy(key, a):
    def add(total, key):
        return total + jax.random.normal(key, a.shape), None

    return jax.lax.scan(add, a, jax.random.split(key, 3))[0]


def nested(a):
    def outer(state, row):
        def inner(state, _):
            return jnp.sin(state @ a / 8), state.sum(0)

        state, sums = jax.lax.scan(inner, state + row, None, length=2)
        return state, sums

    return jax.lax.scan(outer, a, a, reverse=True)


TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 32, (8, 16)), jnp.int32)
CASES = {
    "elementwise and reductions": (
        lambda a, b: (a * b, (a - a.mean(0)).std(1), jnp.max(a, 1), b.min()),
        (x(8, 16), x(16)),
    ),
    "outer sum": (lambda a: a[:, None] + a[None, :], (x(16),)),
    "product with its own transpose": (lambda a: a @ a.T, (x(16, 16),)),
    "reshapes": (lambda a: a.reshape(32, 16).T.reshape(4, 4, 32) * 2, (x(8, 4, 16),)),
    "attention": (attention, (x(4, 8, 8, 4), x(4, 8, 8, 4), x(4, 8, 8, 4))),
    "embedding and its gradient": (embed_loss, (x(32, 8), TOKENS, TOKENS[::-1])),
    "train step": (mlp_step, ({"up": x(16, 32), "down": x(32, 16), "bias": x(32)}, x(8, 16), jax.random.key(3))),
    "concatenate and pad": (lambda a: jnp.pad(jnp.concatenate([a, -a], 1), ((0, 0), (1, 2))), (x(8, 16),)),
    "sort and cumsum": (lambda a: (jnp.sort(a, 1), jnp.cumsum(a, 0), a.argmax(0)), (x(8, 16),)),
    "scan of rows": (lambda a: jax.lax.scan(lambda c, r: (c + r, c.sum()), jnp.zeros(16), a), (x(8, 16),)),
    "scan of layers": (lambda p, a: layers_step(p, a, False), ((x(3, 16, 32) / 8, x(3, 32, 16) / 8), x(8, 16))),
    "scan of layers, remat": (lambda p, a: layers_step(p, a, True), ((x(3, 16, 32) / 8, x(3, 32, 16) / 8), x(8, 16))),
    "recurrent net": (recurrent, ((x(16, 16) / 4, x(16, 16) / 4), x(4, 8, 16))),
    "gradient accumulation": (accumulated, (x(16, 16), x(4, 8, 16))),
    "while": (until_small, (x(8, 16),)),
    "fori": (lambda a: jax.lax.fori_loop(0, 3, lambda i, a: a + jnp.sin(a @ a) * i, a), (x(16, 16),)),
    "branches": (branches, (x(8, 8), jnp.asarray(1))),
    "random bits in a loop": (noisy, (jax.random.key(0), x(8, 16))),
    "nested loops": (nested, (x(8, 8),)),
    "loop of nothing": (lambda a: jax.lax.scan(lambda c, _: (c + 1, c), a, None, length=0), (x(8, 16),)),
    "carries that swap": (
        lambda a, b: jax.lax.scan(lambda c, _: ((c[1], c[0] + c[1]), None), (a, b), None, length=3)[0],
        (x(8, 16), x(8, 16)),
    ),
    "unknown primitive": (lambda a: jnp.fft.fft(a).real + a, (x(8, 16),)),
}


LIKE_OTHERS = {"recurrent net", "nested loops"}
"""Loops, which are long to compile; shorter ones run every time."""


def assert_equals_jit(name, planner):
    fun, args = CASES[name]
    compiled = autopar.parallelize(fun, planner=planner).lower(*args).compile(dict(UNCOMBINED))
    verify(compiled.plan, compiled.as_text()).check()
    got, wanted = compiled(*args), jax.jit(fun)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(
            mine, theirs, rtol=2e-5, atol=2e-5 * (1 + float(jnp.max(jnp.abs(theirs), initial=0)))
        )


@pytest.mark.parametrize("name", [slow(name) if i % 3 or name in LIKE_OTHERS else name for i, name in enumerate(CASES)])
def test_random_plans_equal_jit(name):
    assert_equals_jit(name, Dice(seed=len(name), sizes=(2, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("sizes", [(8,), (4, 2)])
@pytest.mark.parametrize("name", CASES)
def test_many_random_plans_equal_jit(name, sizes, number, fresh_seed):
    print(f"to draw these plans again: --seed={fresh_seed}")
    assert_equals_jit(name, Dice(seed=fresh_seed + number, sizes=sizes))
