"""Whatever `jax.jit` accepts: a table of small functions, each equal to `jax.jit` by a searched and by a random plan.

Equal means the pytree, every dtype, weak types, and values: exact for integers, booleans and keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.checks import verify
from autopar.checks.hlo import UNCOMBINED
from tests.autopar.test_stress import Dice

TOLERANCE = {"float64": 1e-10, "complex128": 1e-10, "float32": 2e-5, "complex64": 2e-5, "float16": 4e-3}
"""Relative to an array's largest entry; bfloat16's is the one that is left."""


@dataclass(frozen=True)
class Case:
    """A function with arguments and options; `make` builds them where 64-bit types are on.

    `sizes` and `seed` make the random plan.
    """

    make: Callable[[], tuple[Any, ...]]
    sizes: tuple[int, ...]
    seed: int

    @property
    def planner(self) -> Dice:
        return Dice(seed=self.seed, sizes=self.sizes)

    def read(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        fun, args, *options = self.make()
        return fun, args, options[0] if options else {}


CASES: dict[str, Case] = {}
MARKS: dict[str, dict[str, Any]] = {"searched": {}, "random": {}}


def case(
    make: Any = None, *, slow: tuple[str, ...] = (), sizes: tuple[int, ...] = (2, 4), seed: int = 0, **fails: str
) -> Any:
    """`make` in the table under its own name, with spaces; `searched` and `random` say why one of the plans fails."""
    if make is None:
        return functools.partial(case, slow=slow, sizes=sizes, seed=seed, **fails)
    name = make.__name__.replace("_", " ")
    assert name not in CASES
    CASES[name] = Case(make, sizes, seed)
    for plan, marks in MARKS.items():
        reasons = [pytest.mark.xfail(strict=True, reason=fails[plan])] if plan in fails else []
        marks[name] = [*reasons, *([pytest.mark.slow] if plan in slow else [])]
    return make


def x(*shape: int, dtype: Any = None, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype or jnp.float64)


def ints(*shape: int, below: int = 8, dtype: Any = jnp.int32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, below, shape), dtype)


# Inputs and outputs.


@case
def identity():
    return lambda a: a, (x(8, 16),)


@case
def constant_output():
    table = np.arange(16.0).reshape(8, 2)
    return lambda a: (jnp.ones((8, 4)), table, 3, 2.5, True, a + 1), (x(8),)


@case
def constants_alone():
    return lambda a: (7, jnp.arange(8)), (x(8),)


@case
def scalars_alone():
    return lambda a, n: (a * 2, n // 3, a < n, jnp.sqrt(a)), (jnp.asarray(3.0), jnp.asarray(7))


@case
def no_arguments():
    return lambda: {"iota": jnp.arange(24).reshape(8, 3), "one": 1}, ()


@case
def nothing_at_all():
    return lambda: None, ()


@case
def one_array_twice():
    a = x(8, 8)
    return lambda a, b: (a, b, a, a @ b), (a, a)


@case
def unused_arguments():
    return lambda a, unused, tree: a.sum(0), (x(8, 16), x(3), {"also": x(8), "key": jax.random.key(0)})


@case
def integers_and_booleans():
    return lambda a, n: (a > 0, n % 3, (a > 0).any(1), (a > 0).all(), (a > 0).sum(0), n << 1, ~n), (
        x(8, 16),
        ints(8, 16, below=99),
    )


@case(slow=("searched",))
def typed_keys():
    def f(key, keys):
        left, right = jax.random.split(key)
        drawn = jax.vmap(lambda k: jax.random.normal(k, (4,), jnp.float32))(keys)
        return left, jax.random.fold_in(right, 3), keys, drawn, jax.random.key_data(right)

    return f, (jax.random.key(1), jax.random.split(jax.random.key(2), 8))


@case(slow=("searched",))
def raw_keys():
    def f(key, keys):
        return jax.random.split(key), keys, jax.random.uniform(key, (8, 4)), jax.random.permutation(keys[0], 16)

    return f, (jax.random.PRNGKey(1), jax.random.split(jax.random.PRNGKey(2), 8))


@case(slow=("searched", "random"))
def random_distributions():
    def f(key):
        one, two, three, four = jax.random.split(key, 4)
        return (
            jax.random.randint(one, (8, 4), 0, 99),
            jax.random.categorical(two, jnp.zeros((8, 5))),
            jax.random.exponential(three, (8, 4)),
            jax.random.choice(four, 32, (8,), replace=False),
            jax.random.truncated_normal(one, -1, 1, (16,), jnp.bfloat16),
        )

    return f, (jax.random.key(5),)


@case(slow=("searched",))
def other_key_types():
    def f(key):
        return jax.random.split(key, 8), jax.random.normal(key, (8, 4))

    return f, (jax.random.key(3, impl="rbg"),)


@case(slow=("searched",))
def types_of_every_width():
    def f(tree):
        moved = jax.tree.map(lambda a: a.T @ a if a.dtype.kind in "fcV" else a.T * a.T, tree)
        return moved, jax.tree.map(lambda a: a.sum(), tree), jax.tree.map(lambda a: a * 2, tree)

    names = "bfloat16 float16 float64 int8 uint8 complex64".split()
    return f, ({name: ints(8, 16, dtype=name) for name in names},)


@case
def complex_numbers():
    def f(a):
        return jnp.abs(a), a.conj().T @ a, jnp.angle(a), a.real, a * (1 + 2j)

    return f, ((x(8, 16) + 1j * x(8, 16, seed=1)).astype(jnp.complex64),)


@case(slow=("searched",))
def mixed_types():
    return lambda a, b, n: (a * b, a + n, n / 2, a.astype(jnp.int32) * n, jnp.where(n > 3, a, 0)), (
        x(8, 16, dtype=jnp.bfloat16),
        x(16, dtype=jnp.float32),
        ints(8, 16),
    )


EMPTY = "XLA's Shardy export loses the operands of a program that takes only empty arrays"


@case(seed=1, random=EMPTY, searched=EMPTY)
def empty_product():
    return lambda a, b: (a @ b, jnp.concatenate([a, a], 0)), (x(8, 0), x(0, 16))


@case(seed=12)
def empty_result():
    return lambda a: a * 2, (x(8, 0),)


@case(seed=1)
def empty_among_others():
    if jax.__version_info__ >= (0, 11):
        pytest.skip("jaxlib 0.11's CPU compiler crashes on these empty arrays, under plain jax.shard_map too")
    return lambda a, b: (a[:, :0], b.sum(0), b * 2, a @ jnp.ones((16, 0)), a.sum(0)), (x(8, 16), x(0, 16))


@case
def dimensions_of_one():
    return lambda a, b: (a * b, a @ b, (a + b).sum(0), a.squeeze(1), jnp.tile(a, (1, 4))), (x(8, 1), x(1, 8))


@case
def nothing_divides():
    return lambda a, b: (a @ b, a.sum(0), jnp.tanh(a).mean(), a.T, jnp.sort(a, 1)), (x(7, 13), x(13, 5))


class State(NamedTuple):
    params: Any
    count: Any
    nothing: Any = None


@jax.tree_util.register_dataclass
@dataclass
class Batch:
    inputs: Any
    extras: dict[str, Any]
    size: int = field(default=0, metadata={"static": True})


@case
def nested_pytrees():
    def f(state, batch, empty):
        total = batch.inputs @ state.params["w"]
        state = State({"w": state.params["w"] + total.sum(0)}, state.count + 1)
        return state, Batch(total, {"squares": total**2, "none": None}), (empty, [], {"deep": ({"er": total[0]},)})

    return f, (State({"w": x(16, 4)}, jnp.asarray(0)), Batch(x(8, 16), {"none": None}), None)


@case
def auxiliary_outputs():
    def f(w, a):
        def loss(w):
            hidden = jnp.tanh(a @ w)
            return (hidden**2).sum(), {"hidden": hidden, "positive": (hidden > 0).sum(), "name": None}

        return jax.value_and_grad(loss, has_aux=True)(w)

    return f, (x(16, 8), x(8, 16))


@case
def numpy_and_python_numbers():
    return lambda a, n, scale, flag: (a * scale, a + n, n * 2, scale * 2, jnp.where(flag, a, -a)), (
        np.arange(16.0).reshape(8, 2),
        3,
        0.5,
        True,
    )


@case
def numpy_scalars():
    return lambda a, n, z: (a * n, n + z, a.sum()), (np.arange(8, dtype=np.int8), np.float32(2), np.complex64(1j))


@case
def static_arguments():
    def f(a, mode, *, power=1):
        return a**power if mode == "up" else -a

    return functools.partial(f, power=3), (x(8, 4), "up"), {"static_argnums": 1}


@case
def donated_arguments():
    return lambda a, b: (a + b, b.sum()), (x(8, 4), x(8, 4, seed=1)), {"donate_argnums": (0,)}


@case
def weak_types():
    return lambda a, n: (a * n, n, n + 1, jnp.sin(n), jnp.where(a > 0, n, 0), jnp.full(8, n)), (x(8), 2)


# Train steps.


@case(slow=("searched",))
def batch_statistics():
    def f(params, stats, batch):
        def loss(params):
            a = batch @ params["w"]
            mean, var = a.mean(0), a.var(0)
            normal = (a - mean) * lax.rsqrt(var + 1e-5) * params["scale"] + params["bias"]
            moved = {"mean": 0.9 * stats["mean"] + 0.1 * mean, "var": 0.9 * stats["var"] + 0.1 * var}
            return (jax.nn.relu(normal) ** 3).mean(), moved

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), lax.stop_gradient(stats), value

    params = {"w": x(6, 8), "scale": x(8), "bias": x(8, seed=1)}
    return f, (params, {"mean": jnp.zeros(8), "var": jnp.ones(8)}, x(16, 6, seed=2))


@case(slow=("searched", "random"))
def two_players():
    """A GAN: each player's gradient goes through the other's parameters, which it leaves as they are."""
    makers = {"generator": optax.adam(1e-3, eps=1e-3), "critic": optax.sgd(1e-2, momentum=0.9)}

    def dense(params, a):
        return jnp.tanh(a @ params["up"]) @ params["down"]

    def f(players, moments, real, key):
        noise = jax.random.normal(key, (8, 4))

        def critic_loss(critic):
            fake = dense(players["generator"], noise)
            return jax.nn.softplus(-dense(critic, real)).mean() + jax.nn.softplus(dense(critic, fake)).mean()

        def generator_loss(generator):
            return jax.nn.softplus(-dense(players["critic"], dense(generator, noise))).mean()

        losses = {}
        updated, moved = {}, {}
        for name, loss in (("critic", critic_loss), ("generator", generator_loss)):
            losses[name], grads = jax.value_and_grad(loss)(players[name])
            updates, moved[name] = makers[name].update(grads, moments[name], players[name])
            updated[name] = optax.apply_updates(players[name], updates)
        return updated, moved, losses

    players = {
        "generator": {"up": x(4, 8), "down": x(8, 6)},
        "critic": {"up": x(6, 8, seed=1), "down": x(8, 1, seed=1)},
    }
    moments = {name: makers[name].init(params) for name, params in players.items()}
    return f, (players, moments, x(8, 6, seed=2), jax.random.key(0))


# Transformations inside.


def energy(w, a):
    return (jnp.tanh(a @ w) ** 3).sum()


@case(slow=("searched",))
def hessian_times_vector():
    def f(w, v, a):
        product = jax.jvp(lambda w: jax.grad(energy)(w, a), (w,), (v,))[1]
        backwards = jax.grad(lambda w: jnp.vdot(jax.grad(energy)(w, a), v))(w)
        return product, backwards

    return f, (x(16, 4), x(16, 4, seed=1), x(8, 16))


@case
def third_derivative():
    return jax.grad(lambda s, a: jax.grad(jax.grad(lambda s: jnp.sin(s * a).sum()))(s)), (jnp.asarray(0.3), x(8, 4))


@case(slow=("searched",))
def jvp_vmap_and_jacobians():
    def f(w, a):
        value, tangent = jax.jvp(lambda w: a @ w, (w,), (jnp.ones_like(w),))
        each = jax.vmap(jax.grad(energy), (None, 0))(w, a)
        forward = jax.jacfwd(lambda r: jnp.tanh(r @ w))(a[0])
        reverse = jax.jacrev(lambda r: jnp.tanh(r @ w))(a[1])
        return value, tangent, each, forward, reverse

    return f, (x(16, 4), x(8, 16))


@case(slow=("searched", "random"))
def hessian():
    return jax.hessian(lambda v, a: (jax.nn.sigmoid(a @ v) ** 2).sum()), (x(8), x(16, 8))


@case(slow=("searched",))
def linearize_and_transpose():
    def f(a, v):
        value, push = jax.linearize(jnp.sin, a)
        (pulled,) = jax.linear_transpose(lambda t: t.sum(0), a)(v)
        return value, push(a), pulled, jax.vjp(jnp.cos, a)[1](a)

    return f, (x(8, 16), x(16))


@case(slow=("searched",))
def nested_jit():
    @jax.jit
    def inner(a, b):
        return a @ b

    @functools.partial(jax.jit, static_argnums=1, inline=True)
    def power(a, n):
        return a**n

    def f(a, b):
        return jax.jit(jax.grad(lambda a: power(inner(a, b), 2).sum()))(a), inner(a, b), inner(b, a)

    return f, (x(8, 8), x(8, 8, seed=1))


@case(slow=("searched",))
def nested_gradient():
    def f(w, a):
        def adapted(w):
            return w - 0.1 * jax.grad(energy)(w, a)

        return jax.value_and_grad(lambda w: energy(adapted(w), a))(w)

    return f, (x(16, 4), x(8, 16))


@case
def custom_jvp():
    @jax.custom_jvp
    def clipped(a):
        return jnp.clip(a, -1, 1)

    @clipped.defjvp
    def _(primals, tangents):
        return clipped(*primals), tangents[0] * 0.5

    return lambda w, a: jax.value_and_grad(lambda w: (clipped(a @ w) ** 2).sum())(w), (x(16, 4), x(8, 16))


@case
def custom_vjp():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def scaled(a, factor):
        return jnp.sin(a) * factor

    def forward(a, factor):
        return scaled(a, factor), (a,)

    def backward(factor, saved, g):
        return (g * jnp.cos(saved[0]) * factor * 2,)

    scaled.defvjp(forward, backward)
    return lambda w, a: jax.value_and_grad(lambda w: (scaled(a @ w, 3.0) ** 2).sum())(w), (x(16, 4), x(8, 16))


@case(slow=("searched",))
def custom_root():
    def f(a):
        def solve(g, guess):
            return lax.fori_loop(0, 30, lambda _, s: s - g(s) / (2 * s), guess)

        def tangent(g, y):
            return y / g(jnp.ones_like(y))

        return jax.grad(lambda a: lax.custom_root(lambda s: s**2 - a, a, solve, tangent).sum())(a)

    return f, (jnp.abs(x(8)) + 1,)


POLICIES = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
}


@case(slow=("searched",))
def checkpoint_policies():
    def f(w, a):
        def block(w, a):
            hidden = checkpoint_name(jnp.tanh(a @ w), "hidden")
            return jnp.sin(hidden @ w.T) + a

        def loss(w, policy):
            return (jax.checkpoint(block, policy=policy)(w, a) ** 2).mean()

        return {name: jax.grad(loss)(w, policy) for name, policy in POLICIES.items()}

    return f, (x(16, 4), x(8, 16))


@case(slow=("searched", "random"))
def checkpoint_in_scan():
    def f(ws, a):
        @functools.partial(jax.checkpoint, prevent_cse=False, policy=POLICIES["dots"])
        def block(a, w):
            return jnp.tanh(a @ w), a.mean()

        return jax.value_and_grad(lambda ws: (lax.scan(block, a, ws)[0] ** 2).sum())(ws)

    return f, (x(3, 16, 16) / 4, x(8, 16))


# Control flow.


@case(slow=("searched",))
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


@case
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


# Libraries of operations.


@case(slow=("searched",))
def linear_algebra():
    def f(a, b):
        spd = a @ a.mT + 8 * jnp.eye(a.shape[-1])
        factor = jnp.linalg.cholesky(spd)
        solved = jnp.linalg.solve(spd, b)
        half = jax.scipy.linalg.solve_triangular(factor, b, lower=True)
        return factor, solved, half, jnp.linalg.slogdet(spd), jnp.linalg.inv(spd), jnp.linalg.norm(a, axis=-1)

    return f, (x(8, 4, 4), x(8, 4, 2))


@case(slow=("searched", "random"))
def linear_algebra_under_gradient():
    def f(a, b):
        def loss(a):
            spd = a @ a.mT + 8 * jnp.eye(a.shape[-1])
            return jnp.log(jnp.diagonal(jnp.linalg.cholesky(spd), axis1=-2, axis2=-1)).sum() + jnp.sum(
                jnp.linalg.solve(spd, b) ** 2
            )

        return jax.value_and_grad(loss)(a)

    return f, (x(8, 4, 4), x(8, 4, 2))


@case(slow=("searched", "random"))
def decompositions():
    def f(a):
        q, r = jnp.linalg.qr(a)
        values = jnp.linalg.eigvalsh(a @ a.mT)
        return q @ r, values, jnp.linalg.svd(a, compute_uv=False), jnp.linalg.det(a), jax.scipy.linalg.expm(a[0] / 4)

    return f, (x(8, 4, 4),)


@case(slow=("searched",))
def fourier_transforms():
    return lambda a: (jnp.fft.rfft(a), jnp.fft.ifft2(a).real, jnp.fft.irfft(jnp.fft.rfft(a, axis=0), axis=0)), (
        x(8, 16),
    )


@case(slow=("searched",))
def sorting():
    def f(a, n):
        top, where = lax.top_k(a, 3)
        return (
            jnp.sort(a, 0),
            jnp.argsort(n, 1, stable=True),
            top,
            where,
            jnp.argmin(a, 0),
            jnp.searchsorted(a[0], a[1]),
            lax.sort((n, a), dimension=1, num_keys=1),
            jnp.median(a, 1),
            jnp.unique(n, size=8, fill_value=-1),
        )

    return f, (x(8, 16), ints(8, 16))


@case(slow=("searched",))
def scans_along_a_dimension():
    return lambda a: (jnp.cumsum(a, 0), jnp.cumprod(a, 1), lax.cummax(a, 0), lax.cumlogsumexp(a, 1), jnp.diff(a)), (
        x(8, 16),
    )


@case(slow=("searched",))
def convolutions():
    def conv(a, k, **options):
        return lax.conv_general_dilated(a, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)

    def f(a, whole, groups, depth):
        def loss(kernels):
            whole, groups, depth = kernels
            h = jax.nn.relu(conv(a, whole))
            h = conv(h, groups, feature_group_count=4)
            h = conv(h, depth, feature_group_count=8, rhs_dilation=(2, 2))
            return (h**2).mean()

        return jax.value_and_grad(loss)((whole, groups, depth))

    return f, (x(4, 8, 8, 4), x(3, 3, 4, 8), x(3, 3, 2, 8), x(3, 3, 1, 8))


@case(slow=("searched",))
def transposed_convolution():
    def f(a, k):
        return lax.conv_transpose(a, k, (2, 2), "SAME"), lax.conv_general_dilated(
            a.transpose(0, 3, 1, 2), k.transpose(3, 2, 0, 1), (2, 2), ((1, 0), (0, 1)), lhs_dilation=(2, 1)
        )

    return f, (x(4, 6, 6, 2), x(3, 3, 2, 8))


@case(slow=("searched",))
def pooling():
    def f(a):
        def pools(a):
            highest = lax.reduce_window(a, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            mean = lax.reduce_window(a, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") / 9
            return highest, mean

        return pools(a), jax.grad(lambda a: sum((p**2).sum() for p in pools(a)))(a)

    return f, (x(4, 8, 8, 2),)


@case(slow=("searched",))
def segments():
    def f(a, ids, weights):
        def loss(a):
            sums = jax.ops.segment_sum(a, ids, num_segments=8)
            return (sums**2).sum(), (sums, jax.ops.segment_max(a, ids, 8), jnp.bincount(ids, weights, length=8))

        return jax.value_and_grad(loss, has_aux=True)(a)

    return f, (x(16, 4), ints(16), x(16))


@case(slow=("searched",))
def one_hot_einsum():
    def f(table, tokens, w):
        def loss(table):
            hidden = jnp.einsum("bsv,vd->bsd", jax.nn.one_hot(tokens, 32, dtype=table.dtype), table)
            mixed = jnp.einsum("bsd,bte,de->bst", hidden, hidden, w)
            return (jax.nn.softmax(mixed) * jnp.einsum("bss->bs", mixed)[..., None]).sum()

        return jax.value_and_grad(loss)(table)

    return f, (x(32, 8), ints(4, 8, below=32), x(8, 8))


@case(slow=("searched",))
def indexing():
    def f(a, n):
        return (
            a[n],
            a[:, ::2],
            a[1:-1],
            a[..., None, 0],
            a.at[n].add(1.0),
            a.at[n, 0].max(2.0, mode="drop"),
            a[a.shape[0] - 1],
            jnp.take(a, n, axis=1, mode="clip"),
            a[-n],
            jnp.roll(a, 3, 0),
            jnp.nonzero(a > 0, size=8, fill_value=-1),
        )

    return f, (x(8, 16), ints(8))


@case(seed=1, sizes=(8,))
def one_column_set():
    """Beside another reader, which keeps the array whole, so that it is cut just before."""
    return lambda a, n: (a.at[:, 3].set(0), a[n]), (x(8, 16), ints(8))


@case(seed=0, sizes=(8,))
def rows_read_out_of_bounds():
    return lambda a, n: a[n + 5], (x(8, 16), ints(8))


@case(sizes=(8,))
def rows_set_out_of_bounds():
    return lambda a, n: (a.at[n + 5].set(0), a.at[n + 5].get(mode="fill"), a.at[n + 5].get(mode="clip")), (
        x(8, 16),
        ints(8),
    )


@case(slow=("searched",))
def shapes():
    def f(a):
        return (
            a.reshape(-1),
            a.reshape(4, 2, 16).swapaxes(0, 2),
            jnp.stack([a, -a], 1),
            jnp.split(a, [3], 1),
            jnp.pad(a, ((0, 0), (2, 1)), "reflect"),
            jnp.repeat(a, 2, 0),
            jnp.tril(a),
            jnp.flip(a, 0),
            jnp.kron(a[:2, :2], a[:4, :2]),
            jnp.meshgrid(a[0], a[1]),
            a.reshape(8, 4, 4).diagonal(axis1=1, axis2=2),
            jnp.broadcast_to(a[:, None], (8, 3, 16)),
        )

    return f, (x(8, 16),)


@case(random="XLA's CPU all-reduce drops NaN from a maximum")
def special_values():
    def f(a):
        return jnp.log(a), 1 / (a * 0), jnp.isnan(a), jnp.nanmean(a), a.max(0), jnp.where(a > 0, a, jnp.nan)

    return f, (x(8, 4).at[2, 1].set(jnp.nan).at[3, 3].set(jnp.inf),)


@case(slow=("searched",))
def special_functions():
    def f(a):
        scipy = jax.scipy.special
        return scipy.erf(a), scipy.gammaln(a**2 + 1), scipy.logsumexp(a, 0), jax.nn.gelu(a), scipy.digamma(a**2 + 1)

    return f, (x(8, 16),)


@case
def bit_casts():
    def f(a, n):
        return lax.bitcast_convert_type(a, jnp.int32), n.view(jnp.uint32), lax.population_count(n), lax.clz(n)

    return f, (x(8, 4, dtype=jnp.float32), ints(8, 4))


@case(slow=("searched",))
def dot_products_of_narrow_types():
    def f(a, b, n):
        wide = lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        whole = lax.dot_general(n, n.T, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
        return wide, whole, jnp.matmul(a, b, precision="highest")

    return f, (x(8, 16, dtype=jnp.bfloat16), x(16, 8, dtype=jnp.bfloat16), ints(8, 16, dtype=jnp.int8))


def mesh_of(*sizes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(sizes, ("a", "b")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


@case(sizes=(8,))
def shard_map_inside():
    def f(w, a):
        mapped = jax.shard_map(
            lambda a: (a * lax.axis_index("a"), lax.psum(a.sum(0), "a")),
            mesh=mesh_of(8),
            in_specs=P("a"),
            out_specs=(P("a"), P()),
        )
        local, total = mapped(a @ w)
        return local, total, (local * 2).sum()

    return f, (x(16, 4), x(8, 16))


@case(sizes=(2, 4))
def shard_map_under_gradient():
    def f(w, a):
        def product(a, w):
            return lax.psum(a @ w, "b")

        mapped = jax.shard_map(product, mesh=mesh_of(2, 4), in_specs=(P("a", "b"), P("b")), out_specs=P("a"))
        return jax.value_and_grad(lambda w: (mapped(a, w) ** 2).sum())(w)

    return f, (x(16, 4), x(8, 16))


def words(leaf: Any) -> Any:
    """What is compared of a leaf: a key's own words."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def assert_equal(ours: Any, expected: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(expected), strict=True):
        where = f"out{jax.tree_util.keystr(path)}"
        assert (a.shape, a.dtype) == (b.shape, b.dtype), where
        a, b = words(a), words(b)
        assert a.weak_type == b.weak_type, where
        a, b = np.asarray(a), np.asarray(b)
        if not jnp.issubdtype(b.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b, where)
            continue
        tolerance = TOLERANCE.get(b.dtype.name, 2e-2)
        wide = np.complex128 if np.iscomplexobj(b) else np.float64
        a, b = a.astype(wide), b.astype(wide)
        finite = np.abs(b[np.isfinite(b)])
        largest = float(finite.max()) if finite.size else 0.0
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest, err_msg=where)


@functools.cache
def expected(name: str) -> Any:
    fun, args, options = CASES[name].read()
    return jax.jit(fun, **options)(*args)


def every(plan: str) -> list[Any]:
    """All functions under a plan: in every run, a random one where the searched one is slow."""
    searched = {name for name, marks in MARKS["searched"].items() if pytest.mark.slow not in marks}
    return [
        pytest.param(name, marks=marks or [pytest.mark.slow] * (plan == "random" and name in searched))
        for name, marks in MARKS[plan].items()
    ]


@pytest.mark.parametrize("name", every("searched"))
def test_searched_plan_equals_jit(name: str):
    with jax.enable_x64(True):
        fun, args, options = CASES[name].read()
        step = autopar.parallelize(fun, **options)
        step.lower(*args).verify().check()
        assert_equal(step(*args), expected(name))


@pytest.mark.parametrize("name", every("random"))
def test_random_plan_equals_jit(name: str):
    with jax.enable_x64(True):
        fun, args, options = CASES[name].read()
        step = autopar.parallelize(fun, planner=CASES[name].planner, **options)
        compiled = step.lower(*args).compile(dict(UNCOMBINED))
        verify(compiled.plan, compiled.as_text()).check()
        assert_equal(compiled(*args), expected(name))


# What the user has placed, and what leaves the program.


@pytest.mark.parametrize("planner", [None, Dice(seed=1, sizes=(2, 4))])
@pytest.mark.parametrize(
    ("spec", "wanted"), [(P("a", "b"), [2, 4]), (P(("a", "b")), [8, 1]), (P(None, "b"), [1, 4]), (P(), [1, 1])]
)
def test_sharding_constraint_is_kept(planner: Any, spec: P, wanted: list[int]):
    mesh = mesh_of(2, 4)

    def f(a, w):
        return lax.with_sharding_constraint(jnp.tanh(a @ w), NamedSharding(mesh, spec)).sum(0)

    args = x(16, 16, dtype=jnp.float32), x(16, 8, dtype=jnp.float32)
    step = autopar.parallelize(f, planner=planner)
    plan = step.plan(*args)
    (operator,) = [o for o in plan.operators if o.primitive == "sharding_constraint"]
    (placed,) = operator.placement.results
    cut = [math.prod(plan.mesh.axis_size(axis) for axis in axes) for axes in placed.dims]
    assert cut == wanted
    assert not placed.partial
    step.lower(*args).verify().check()
    assert_equal(step(*args), jax.jit(f)(*args))


@pytest.mark.parametrize("planner", [None, Dice(seed=1, sizes=(2, 4))])
def test_pure_callback(planner: Any):
    def f(a, w):
        product = a @ w
        sums = jax.pure_callback(lambda a: np.cumsum(a, 0), jax.ShapeDtypeStruct(product.shape, product.dtype), product)
        return jnp.tanh(sums)

    args = x(8, 16, dtype=jnp.float32), x(16, 4, dtype=jnp.float32)
    step = autopar.parallelize(f, planner=planner)
    assert_equal(step(*args), jax.jit(f)(*args))
    step.lower(*args).verify().check()
