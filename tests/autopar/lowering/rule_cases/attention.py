"""Attention by cuDNN, which has a lowering for CPUs in tests alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests.autopar import cudnn_attention
from tests.autopar.lowering.rule_cases.case import Case, floats, ints


def cases() -> list[Case]:
    """Both passes, as they are and behind masks; gradients are those of queries, keys, values and a bias."""
    cudnn_attention.install()
    query, key, bias, by_heads = (
        floats(*shape).astype(ml_dtypes.bfloat16) for shape in ((4, 8, 4, 8), (4, 8, 4, 8), (1, 1, 8, 8), (1, 4, 8, 8))
    )
    mask, lengths = floats(4, 1, 8, 8) + 4 * np.eye(8) > 0, ints(4, low=1, high=8)

    def mixed(*arrays: Any, **options: Any) -> jax.Array:
        with cudnn_attention.HERE():
            return cudnn_attention.attended(*arrays, **options)

    def gradients(**options: Any) -> Callable[..., Any]:
        def loss(query: Any, key: Any, value: Any, *bias: Any) -> jax.Array:
            given = {"bias": bias[0]} if bias else {}
            return jnp.sum(jnp.sin(mixed(query, key, value, **given, **options)).astype(jnp.float32))

        return lambda *arrays: jax.grad(loss, tuple(range(len(arrays))))(*arrays)

    forward, backward = (f"dot_product_attention_{name}_wrapper" for name in ("fwd", "bwd"))
    whole, shared = (query, key, key), (query, key[:, :, :2], key[:, :, 2:])
    return [
        Case(forward, mixed, whole),
        Case(forward, lambda *arrays: mixed(*arrays, is_causal=True), shared, "of shared heads"),
        Case(forward, lambda *arrays: mixed(*arrays[:3], mask=arrays[3]), (*whole, mask), "behind a mask each"),
        Case(
            forward,
            lambda *arrays: mixed(*arrays[:3], query_seq_lengths=arrays[3], key_value_seq_lengths=arrays[3]),
            (*whole, lengths),
            "of lengths",
        ),
        Case(backward, gradients(), (*whole, bias), "with a bias"),
        Case(backward, gradients(is_causal=True), shared, "of shared heads"),
        Case(backward, gradients(), (*whole, by_heads), "with a bias of heads"),
        Case(backward, gradients(mask=mask), whole, "behind a mask each"),
    ]
