"""Convolutions of pieces as XLA:CPU's library takes them.

XLA:CPU (jaxlib 0.10.2) computes two sorts of convolutions element by element, and takes many times as long for them
(`python -m benchmarks.convolutions`): in the body of a loop those whose operands lie in another order than its
library's, as gradients do, which it brings into order in the entry computation alone; and those of an image that is
smaller than the kernel, as the last ones of a network for small images are.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from autopar.lowering import localize
from autopar.lowering.localize import Arrays, Cut
from autopar.lowering.localizers import group_counts
from passes.rules import Taps, is_small_image, taps

CONVOLUTION = "conv_general_dilated"


def bind_in_order(cut: Cut, operands: Arrays) -> Arrays:
    """The convolution of pieces with batch first and features last, and zeros around an image that is small."""
    numbers, params = cut.params["dimension_numbers"], dict(cut.params)
    (batch, feature, *spatial), (out, into, *window) = numbers.lhs_spec, numbers.rhs_spec
    first, last, *between = numbers.out_spec
    images = lax.transpose(operands[0], (batch, *spatial, feature))
    kernel = lax.transpose(operands[1], (*window, into, out))
    rank, inner = images.ndim, tuple(range(1, images.ndim - 1))
    changed = group_counts(cut, operands)
    if is_small_image(images.shape[1:-1], kernel.shape[:-2]):
        result = [cut.results[0].shape[d] for d in between]
        met = taps(params, images.shape[1:-1], kernel.shape[:-2], result)
        images, kernel = _framed(images, met, params["lhs_dilation"]), _cropped(kernel, met)
        changed |= {"padding": ((0, 0),) * len(met), "lhs_dilation": (1,) * len(met)}
    changed["dimension_numbers"] = type(numbers)(
        (0, rank - 1, *inner), (rank - 1, rank - 2, *range(rank - 2)), (0, rank - 1, *inner)
    )
    (made,) = localize.rebind(cut, (images, kernel), **changed)
    return (lax.transpose(made, tuple(np.argsort((first, *between, last)).tolist())),)


def _framed(images: jax.Array, met: Sequence[Taps], dilation: Sequence[int]) -> jax.Array:
    """Images with zeros around and between their pixels; XLA would take zeros back that no barrier keeps from it."""
    borders = [(*each.padding, apart - 1) for each, apart in zip(met, dilation, strict=True)]
    zeros = np.zeros((), images.dtype)
    return lax.optimization_barrier(lax.pad(images, zeros, [(0, 0, 0), *borders, (0, 0, 0)]))


def _cropped(kernel: jax.Array, met: Sequence[Taps]) -> jax.Array:
    """The kernel without what meets no pixel."""
    return kernel[tuple(slice(each.first, each.last + 1) for each in met)]
