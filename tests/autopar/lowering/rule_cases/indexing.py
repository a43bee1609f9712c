"""Gathers and slices at places that are not known before the program runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherDimensionNumbers, GatherScatterMode

from tests.autopar.lowering.rule_cases.case import Case, floats, ints

MODES = (GatherScatterMode.CLIP, GatherScatterMode.FILL_OR_DROP, GatherScatterMode.PROMISE_IN_BOUNDS)


CLIP, FILL, _ = MODES


def _gathers_of_rows() -> list[Case]:
    rows = GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
    table, inside = floats(16, 12), ints(4, 8, low=0, high=16)[..., None]
    outside = ints(4, 8, low=-20, high=36)[..., None]

    def lookup(table: Any, indices: Any, mode: GatherScatterMode, fill: Any = None) -> jax.Array:
        return lax.gather(table, indices, rows, (1, table.shape[1]), mode=mode, fill_value=fill)

    return [
        *(Case("gather", partial(lookup, mode=m), (table, inside), f"of rows, {m.name}") for m in MODES),
        *(Case("gather", partial(lookup, mode=m), (table, outside), f"beyond, {m.name}") for m in (CLIP, FILL)),
        Case("gather", partial(lookup, mode=FILL, fill=5), (table, outside), "beyond, with a fill value"),
        Case("gather", partial(lookup, mode=FILL), (ints(16, 12), outside), "beyond, of integers"),
        Case("gather", partial(lookup, mode=FILL), (ints(16, 12, low=0, dtype=np.uint8), outside), "beyond, of bytes"),
        Case("gather", partial(lookup, mode=FILL), (ints(16, 12) > 0, outside), "beyond, of flags"),
        *(
            Case("gather", partial(lookup, mode=m), (table, outside.astype(dtype)), f"by {dtype.__name__}, {m.name}")
            for dtype in (np.uint8, np.int8, np.uint32, np.int64, np.uint64)
            for m in (CLIP, FILL)
        ),
        Case("gather", lambda x, i: x[i], (table, ints(4, 8, low=-16, high=16)), "written as an index"),
    ]


def _gathers() -> list[Case]:
    batched = GatherDimensionNumbers(
        offset_dims=(), collapsed_slice_dims=(1,), start_index_map=(1,),
        operand_batching_dims=(0,), start_indices_batching_dims=(0,),
    )  # fmt: skip
    columns = GatherDimensionNumbers(offset_dims=(0,), collapsed_slice_dims=(1,), start_index_map=(1,))
    mixed = GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    return [
        Case(
            "gather",
            lambda x, i: lax.gather(x, i, batched, (1, 1), mode=CLIP),
            (floats(4, 8), ints(4, 12, low=-3, high=11)[..., None]),
            "in batches",
        ),
        Case(
            "gather",
            lambda x, i: lax.gather(x, i, columns, (8, 1), mode=FILL),
            (floats(8, 16), ints(12, low=-3, high=20)[..., None]),
            "of columns",
        ),
        Case(
            "gather",
            lambda x, i, j: x[i, j],
            (floats(8, 12), ints(4, low=0, high=8), ints(4, low=0, high=12)),
            "of points",
        ),
        *(
            Case(
                "gather",
                lambda x, i, mode=mode: x.at[i[..., 0], i[..., 1]].get(mode=mode),
                (floats(8, 12), ints(4, 8, 2, low=-20, high=20)),
                f"of points beyond, {mode.name}",
            )
            for mode in (CLIP, FILL)
        ),
        *(
            Case(
                "gather",
                lambda x, i, mode=mode: lax.gather(x, i, mixed, (1, 4), mode=mode),
                (floats(16, 12), ints(8, 2, low=-4, high=18)),
                f"of windows beyond, {mode.name}",
            )
            for mode in (CLIP, FILL)
        ),
        Case("gather", lambda x, i: jnp.take_along_axis(x, i, 1), (floats(4, 8), ints(4, 8, low=0, high=8)), "along"),
        Case(
            "gather",
            jax.vmap(lambda row, at: lax.dynamic_slice(row, (at,), (4,))),
            (floats(4, 8), ints(4, low=0, high=5)),
            "of windows",
        ),
    ]


def _slices() -> list[Case]:
    x, at, zero = floats(4, 8, 12), np.int32(3), np.int32(0)
    return [
        Case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (zero, i, zero), (4, 4, 12)), (x, at)),
        Case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, i, i), (4, 4, 12)), (x, at), "clamped"),
        Case(
            "dynamic_update_slice",
            lambda x, u, i: lax.dynamic_update_slice(x, u, (zero, i, zero)),
            (x, floats(4, 4, 12), at),
        ),
        Case(
            "dynamic_update_slice",
            lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i, i)),
            (x, floats(4, 4, 12), at),
            "clamped",
        ),
    ]


def cases() -> list[Case]:
    """Every case of this module."""
    return [*_gathers_of_rows(), *_gathers(), *_slices()]
