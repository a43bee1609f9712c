"""Primitives that move, join or cut an array, and those that make one."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.autopar.lowering.rule_cases.case import Case, floats, ints


def cases() -> list[Case]:
    x = floats(4, 8, 12)
    reshapes = [
        ((32, 12), "merges"), ((4, 96), "merges minor dimensions"), ((4, 2, 4, 12), "splits"), ((384,), "flattens"),
        ((4, 8, 3, 4), "splits off a minor dimension"), ((1, 4, 8, 1, 12), "adds dimensions of 1"),
        ((16, 24), "merges and splits at once"), ((12, 8, 4), "shuffles"), ((2, 192), "splits and merges"),
    ]  # fmt: skip
    pads = [
        (((0, 0, 0), (1, 2, 0)), "of one dimension"), (((0, 0, 0), (-1, 1, 0)), "that shifts a dimension"),
        (((0, 0, 1), (0, 0, 0)), "between elements"), (((0, 0, 0), (-2, -2, 0)), "that crops"),
    ]  # fmt: skip
    return [
        *(Case("reshape", partial(jnp.reshape, shape=to), (x,), label) for to, label in reshapes),
        Case("reshape", lambda x: lax.reshape(x, (32,), dimensions=(1, 0)), (floats(4, 8),), "after a transpose"),
        *(Case("pad", partial(_pad, config=config), (floats(4, 8),), label) for config, label in pads),
        Case("transpose", lambda x: lax.transpose(x, (2, 0, 1)), (x,)),
        Case("squeeze", lambda x: lax.squeeze(x, (1, 3)), (floats(4, 1, 8, 1),)),
        Case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 12, 8), (0, 2)), (floats(4, 8),)),
        Case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 8), (0, 1)), (floats(4, 1),), "of a 1"),
        Case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 8), ()), (np.float64(3),), "of a scalar"),
        Case("iota", lambda: lax.broadcasted_iota(np.int32, (8, 12), 1), (), "of integers"),
        Case("iota", lambda: lax.broadcasted_iota(np.float64, (8, 12), 0), (), "of floats"),
        Case("iota", lambda: lax.iota(jnp.bfloat16, 1024), (), "beyond what bfloat16 counts exactly"),
        Case("iota", lambda: lax.iota(np.uint8, 64), (), "of bytes"),
        Case("slice", lambda x: lax.slice(x, (0, 2, 0), (4, 6, 12)), (x,)),
        Case("slice", lambda x: lax.slice(x, (0, 1, 0), (4, 8, 12), (1, 2, 1)), (x,), "with strides"),
        Case("slice", lambda x: lax.slice(x, (0, 1, 0), (4, 8, 12), (1, 2, 3)), (x,), "with strides to a multiple"),
        Case("slice", lambda x: lax.slice(x, (2, 5, 0), (3, 6, 12)), (x,), "of one element of two dimensions"),
        Case("slice", lambda x: lax.slice(x, (1, 3, 0), (4, 4, 12), (3, 1, 1)), (x,), "of one element by a stride"),
        Case("rev", lambda x: lax.rev(x, (1,)), (x,)),
        Case("concatenate", lambda x, y: lax.concatenate([x, y, x], 1), (x, floats(4, 4, 12))),
        Case("split", lambda x: lax.split(x, (3, 5), 1), (x,)),
        Case("stack", lambda x, y: lax.stack((x, y), 1), (x, x + 1)),
        Case("unstack", lambda x: lax.unstack(x, 1), (floats(4, 2, 8),)),
        Case("tile", lambda x: lax.tile(x, (1, 2, 1)), (x,)),
        Case("device_put", lambda x, y: jax.device_put((x, y)), (x, ints(8))),
    ]


def _pad(x: jax.Array, config: tuple[tuple[int, int, int], ...]) -> jax.Array:
    return lax.pad(x, np.float64(7), config)
