"""Attention as cuDNN computes it, on CPUs: JAX's kernel has a lowering for GPUs alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from autopar.jax_cudnn import assumed_cudnn
from passes.cluster import parse_cluster

HERE = functools.partial(assumed_cudnn, parse_cluster("8:h100"))
"""A context in which cuDNN's attention is traced without a GPU."""


def attended(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    """What cuDNN's attention mixes: [batch, tokens, heads, features]."""
    return jax.nn.dot_product_attention(query, key, value, implementation="cudnn", **options)


@functools.cache
def install() -> None:
    """Gives the kernels of both passes a lowering for CPUs, in float32."""
    x, bias = jnp.zeros((2, 8, 2, 8), jnp.bfloat16), jnp.zeros((1, 1, 8, 8), jnp.bfloat16)
    with HERE():
        step = jax.make_jaxpr(jax.grad(lambda x, bias: attended(x, x, x, bias=bias).sum().astype("float32"), (0, 1)))
        equations = step(x, bias).eqns
    lowerings = {"dot_product_attention_fwd_wrapper": _forward, "dot_product_attention_bwd_wrapper": _backward}
    for equation in equations:
        if lowering := lowerings.get(equation.primitive.name):
            within: Any = jax.make_jaxpr(functools.partial(equation.primitive.impl, **equation.params))
            called = [inner.primitive for inner in within(*(var.aval for var in equation.invars)).eqns]
            for kernel in (equation.primitive, *(p for p in called if p.name.startswith("dot_product_attention"))):
                rule = mlir.lower_fun(lowering, multiple_results=True)
                mlir.register_lowering(kernel, rule, platform="cpu")


def _mixed(arrays: tuple[jax.Array, ...], lengths: jax.Array, params: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """(what is mixed, the logarithm of each token's sum of exponentials)."""
    rows_first = params["layout"] == 0
    query, key, value, bias = (x.astype(jnp.float32) for x in arrays)
    query, key, value = ((x.swapaxes(1, 2) if rows_first else x) for x in (query, key, value))
    shared = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(x, shared, 1) for x in (key, value))
    scores = jnp.einsum("bntd,bnsd->bnts", query, key) * jnp.float32(params["scale"])
    scores = scores + bias if bias.ndim == 4 else scores
    tokens, places = (jnp.arange(n) for n in scores.shape[2:])
    mask = params["mask_type"].name
    seen = (tokens[:, None] >= places) if "CAUSAL" in mask else jnp.ones((1, 1), bool)
    if "PADDING" in mask:
        seen = seen & (places < lengths[:, None])[:, None, None]
    scores = jnp.where(seen, scores, -1e9)
    sums = jax.nn.logsumexp(scores, -1)
    mixed = jnp.einsum("bnts,bnsd->bntd", jnp.exp(scores - sums[..., None]), value).astype(arrays[0].dtype)
    return (mixed.swapaxes(1, 2) if rows_first else mixed), sums


def _forward(*operands: jax.Array, is_training: bool, **params: Any) -> list[jax.Array]:
    return list(_mixed(operands[:4], operands[5], params))[: 2 if is_training else 1]


def _backward(*operands: jax.Array, variadic_args: tuple[bool, bool], **params: Any) -> list[jax.Array]:
    _, pulled_back = jax.vjp(lambda *arrays: _mixed(arrays, operands[5], params)[0], *operands[:4])
    return list(pulled_back(operands[-1]))[: 4 if variadic_args[1] else 3]
