"""Scatters: what is written at places that are not known before the program runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode, ScatterDimensionNumbers

from tests.autopar.lowering.rule_cases.case import Case, floats, ints
from tests.autopar.lowering.rule_cases.indexing import CLIP, FILL, MODES

ROWS = ScatterDimensionNumbers(update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
BATCHED = ScatterDimensionNumbers(
    update_window_dims=(), inserted_window_dims=(1,), scatter_dims_to_operand_dims=(1,),
    operand_batching_dims=(0,), scatter_indices_batching_dims=(0,),
)  # fmt: skip
POINTS = ScatterDimensionNumbers(
    update_window_dims=(), inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(1, 0)
)
WINDOWS = ScatterDimensionNumbers(
    update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
)
KINDS = {
    "scatter": lax.scatter, "scatter-add": lax.scatter_add, "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul, "scatter-min": lax.scatter_min, "scatter-max": lax.scatter_max,
}  # fmt: skip


def _sums() -> list[Case]:
    table, updates = floats(16, 12), floats(4, 8, 12)
    inside, outside = ints(4, 8, low=0, high=16)[..., None], ints(4, 8, low=-20, high=36)[..., None]

    def add(table: Any, indices: Any, updates: Any, mode: GatherScatterMode) -> jax.Array:
        return lax.scatter_add(table, indices, updates, ROWS, mode=mode)

    return [
        *(Case("scatter-add", partial(add, mode=m), (table, inside, updates), f"of rows, {m.name}") for m in MODES),
        *(
            Case("scatter-add", partial(add, mode=m), (table, outside, updates), f"beyond, {m.name}")
            for m in (CLIP, FILL)
        ),
        *(
            Case(
                "scatter-add",
                partial(add, mode=mode),
                (table, outside.astype(dtype), updates),
                f"by {dtype.__name__}, {mode.name}",
            )
            for dtype in (np.uint8, np.uint32, np.int64)
            for mode in (CLIP, FILL)
        ),
        Case(
            "scatter-add",
            lambda x, i, u: lax.scatter_add(x, i, u, BATCHED, mode=FILL),
            (floats(4, 8), ints(4, 12, low=-3, high=11)[..., None], floats(4, 12)),
            "in batches",
        ),
        Case("scatter-add", jax.grad(lambda x, i: jnp.sum(x[i] ** 2)), (table, ints(4, 8, low=0, high=16)), "by grad"),
        Case(
            "scatter-add",
            lambda x, i, u: x.at[i].add(u),
            (ints(8), ints(12, low=0, high=8), ints(12)),
            "of integers",
        ),
    ]


def _writes() -> list[Case]:
    table, updates = floats(16, 12), floats(4, 8, 12)
    inside = ints(4, 8, low=0, high=16)[..., None]
    promise = GatherScatterMode.PROMISE_IN_BOUNDS
    once = np.random.default_rng(0).permutation(np.arange(-8, 24)).reshape(4, 8, 1)
    corners = np.stack(np.meshgrid(np.arange(-2, 14), np.arange(-3, 9), indexing="ij"), -1)[::2]
    along = np.stack([np.arange(-2, 6) * 3, np.arange(-2, 6) * 2], -1)
    return [
        *(
            Case(name, partial(scatter, dimension_numbers=ROWS, mode=FILL), (table, once, updates), "of rows, beyond")
            for name, scatter in KINDS.items()
            if name != "scatter-add"
        ),
        Case(
            "scatter", partial(lax.scatter, dimension_numbers=ROWS, mode=promise), (table, inside, updates), "of rows"
        ),
        *(
            Case(
                name, partial(scatter, dimension_numbers=numbers, mode=mode), (to, at, values), f"{label}, {mode.name}"
            )
            for name, scatter in KINDS.items()
            if name in ("scatter", "scatter-add")
            for numbers, to, at, values, label in (
                (POINTS, floats(8, 12), corners, floats(*corners.shape[:-1]), "of points"),
                (WINDOWS, floats(16, 12), along, floats(8, 4), "of windows"),
            )
            for mode in (FILL, CLIP)
        ),
        Case("scatter", lambda x, i, u: x.at[i].set(u), (ints(8), np.arange(-2, 10) % 8, ints(12)), "of integers"),
        Case(
            "scatter",
            lambda x, i: lax.scatter_apply(x, i, jnp.sin, ROWS, update_shape=(4, 8, 12)),
            (table, once),
            "by a function",
        ),
        Case(
            "scatter",
            lambda x, i, u: lax.scatter(x, i, u, BATCHED, mode=FILL),
            (
                floats(4, 8),
                np.random.default_rng(0).permuted(np.full((4, 12), np.arange(-2, 10)), axis=1)[..., None],
                floats(4, 12),
            ),
            "in batches",
        ),
    ]


def cases() -> list[Case]:
    """Every case of this module."""
    return [*_sums(), *_writes()]
