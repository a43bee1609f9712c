"""Reductions, cumulative sums, sorts, and windows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar import jax_compat
from tests.autopar.lowering.rule_cases.case import Case, floats, ints


def _reductions() -> list[Case]:
    x, flags = floats(4, 8, 12), floats(4, 8, 12) > 0
    along = {"cumsum": lax.cumsum, "cumprod": lax.cumprod, "cummax": lax.cummax, "cummin": lax.cummin,
             "cumlogsumexp": lax.cumlogsumexp}  # fmt: skip
    return [
        *(Case("reduce_sum", partial(jnp.sum, axis=axis), (x,), f"over {axis}") for axis in ((1,), (0, 2), None)),
        *(Case("reduce_max", partial(jnp.max, axis=axis), (x,), f"over {axis}") for axis in ((1,), (0, 2))),
        *(Case("reduce_min", partial(jnp.min, axis=axis), (x,), f"over {axis}") for axis in ((1,), (0, 2))),
        Case("reduce_sum", partial(jnp.sum, axis=1), (ints(4, 8),), "of integers"),
        Case("reduce_prod", partial(jnp.prod, axis=1), (x,)),
        Case("reduce_or", partial(jnp.any, axis=1), (flags,)),
        Case("reduce_and", partial(jnp.all, axis=1), (flags,)),
        Case("any_row", jax.vmap(lambda x: lax.while_loop(lambda x: x > 1, lambda x: x / 2, x)), (x[:, 0, 0],)),
        Case("argmax", partial(jnp.argmax, axis=1), (x,)),
        Case("argmin", partial(jnp.argmin, axis=2), (x,)),
        Case("argmax", partial(jnp.argmax, axis=1), (jnp.where(x > 1, jnp.nan, x),), "beside no numbers"),
        Case("argmin", partial(jnp.argmin, axis=1), (jnp.where(flags, -jnp.inf, jnp.nan),), "of infinities"),
        Case("argmax", lambda x: lax.argmax(x, 1, jnp.uint8), (jnp.round(x).astype(jnp.bfloat16),), "of equals"),
        Case("argmin", lambda x: lax.argmin(x, 2, jnp.int8), (ints(4, 8, 12).astype(np.uint8),), "of integers"),
        Case("argmax", partial(jnp.argmax, axis=1), (flags,), "of booleans"),
        *(Case(name, partial(function, axis=1), (x,)) for name, function in along.items()),
        Case("sort", lambda x: lax.sort(x, dimension=1), (x,)),
        Case("sort", lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), (x, ints(4, 8, 12)), "with a companion"),
        Case("top_k", lambda x: lax.top_k(x, 4), (x,)),
        Case("approx_top_k", lambda x: lax.approx_max_k(x, 4, reduction_dimension=1), (x,)),
        Case("reduce", lambda x: lax.reduce(x, 0.5, lambda a, b: a + b + a * b, (1,)), (x,), "by a function"),
        Case("reduce", lambda x: lax.reduce((x, x + 1), (0.0, 1.0), _both, (0,)), (x,), "of two"),
        Case("reduce_xor", lambda x: lax.reduce(x, 0, lax.bitwise_xor, (1,)), (ints(4, 8).astype(np.int64),)),
    ]


def _both(a: Any, b: Any) -> Any:
    return a[0] + b[0], a[1] * b[1]


def _windows() -> list[Case]:
    x = floats(4, 8, 6, 4)
    pool: dict[str, Any] = {
        "window_dimensions": (1, 2, 3, 1), "window_strides": (1, 2, 1, 1), "padding": ((0, 0), (0, 0), (1, 1), (0, 0)),
    }  # fmt: skip
    skewed: dict[str, Any] = {
        "window_dimensions": (1, 1, 1, 2), "window_strides": (1, 2, 1, 1), "padding": ((0, 0), (0, 0), (2, 2), (0, 0)),
        "base_dilation": (2, 1, 1, 1), "window_dilation": (1, 1, 1, 2),
    }  # fmt: skip

    def pooled(combine: Callable[..., Any], start: float, options: dict[str, Any] = pool) -> Callable[..., Any]:
        return lambda x: lax.reduce_window(x, start, combine, **options)

    highest = pooled(lax.max, -np.inf)
    return [
        Case("reduce_window_sum", pooled(lax.add, 0.0), (x,)),
        Case("reduce_window_sum", pooled(lax.add, 0.0, skewed), (floats(4, 8, 4, 6),), "that moves every dimension"),
        Case("reduce_window_max", highest, (x,)),
        Case("reduce_window_min", pooled(lax.min, np.inf), (x,)),
        Case("reduce_window", pooled(lax.mul, 1.0), (x,), "by a product"),
        Case("reduce_window", lambda x: lax.reduce_window((x, x + 1), (0.0, 1.0), _both, **pool), (x,), "of two"),
        Case("select_and_scatter_add", jax.grad(lambda x: jnp.sum(highest(x) ** 2)), (x,)),
        Case("select_and_gather_add", lambda x, t: jax.jvp(highest, (x,), (t,)), (x, x - 1)),
        Case("select_and_scatter", _spread, (x, floats(4, 4, 6, 4))),
    ]


def _spread(x: jax.Array, updates: jax.Array) -> jax.Array:
    """`lax` has a primitive and no function for this."""
    (select, _), (scatter, _) = (jax_compat.open_jaxpr(jax.make_jaxpr(f)(0.0, 0.0)) for f in (lax.ge, lax.mul))
    return lax.select_and_scatter_p.bind(
        x, updates, jnp.asarray(2.0),
        select_jaxpr=select, select_consts=(), scatter_jaxpr=scatter, scatter_consts=(),
        window_dimensions=(1, 2, 1, 1), window_strides=(1, 2, 1, 1), padding=((0, 0),) * 4,
    )  # fmt: skip


def cases() -> list[Case]:
    """Every case of this module."""
    return [*_reductions(), *_windows()]
