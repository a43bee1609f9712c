"""Convolutions and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.autopar.lowering.rule_cases.case import Case, floats


def cases() -> list[Case]:
    """Gradients are two more convolutions each, with channels and batches exchanged."""
    layouts = {"channels last": ("NHWC", "HWIO", "NHWC"), "channels first": ("NCHW", "OIHW", "NCHW")}

    def conv(x: Any, kernel: Any, **options: Any) -> jax.Array:
        options = {"window_strides": (1,), "padding": [(1, 1)], "dimension_numbers": ("NWC", "WIO", "NWC")} | options
        return lax.conv_general_dilated(x, kernel, **options)

    def both(**options: Any) -> Callable[..., Any]:
        return jax.grad(lambda x, kernel: jnp.sum(jnp.sin(conv(x, kernel, **options))), (0, 1))

    x, pointed = floats(4, 6, 8), floats(3, 8, 4)
    dilated = {"window_strides": (2,), "lhs_dilation": (2,), "rhs_dilation": (2,), "padding": [(2, 3)]}
    grouped = {"four groups": (4, (3, 2, 12)), "depthwise": (8, (3, 1, 8)), "depthwise, twice": (8, (3, 1, 16))}
    batches = {"four batch groups": (4, (3, 8, 12)), "batch groups of one": (8, (3, 8, 8))}
    forms: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("strided", x, pointed, {"window_strides": (2,)}),
        ("dilated", x, pointed, dilated),
        *((label, x, floats(*k), {"feature_group_count": n}) for label, (n, k) in grouped.items()),
        *((label, floats(8, 6, 8), floats(*k), {"batch_group_count": n}) for label, (n, k) in batches.items()),
    ]
    planes = {"padding": "SAME", "window_strides": (2, 1)}
    return [
        Case("conv_general_dilated", partial(conv, **planes, dimension_numbers=layouts["channels last"]),
             (floats(4, 6, 6, 8), floats(3, 3, 8, 4)), "channels last"),
        Case("conv_general_dilated", partial(conv, **planes, dimension_numbers=layouts["channels first"]),
             (floats(4, 8, 6, 6), floats(4, 8, 3, 3)), "channels first"),
        Case("conv_general_dilated", partial(conv, preferred_element_type=np.float32),
             (x.astype(jnp.bfloat16), pointed.astype(jnp.bfloat16)), "to more bits"),
        *(Case("conv_general_dilated", both(**options), (x, k), f"{label}, by grad") for label, x, k, options in forms),
    ]  # fmt: skip
