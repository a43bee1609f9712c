"""Train steps, and JAX's transformations inside of a function."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.autopar.jit_cases.table import Table, x

case = Table()


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


@case(
    slow=("searched", "random"),
    random="XLA folds an array of ones that this plan gathers: two gathers are planned, and none is compiled",
)
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
