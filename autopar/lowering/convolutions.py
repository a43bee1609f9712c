"""Convolutions of pieces in the form that XLA:CPU's library computes fast.

XLA:CPU (jaxlib 0.10.2) computes two sorts of convolutions element by element, and takes many times as long for them
(`python -m benchmarks.convolutions`): those in the body of a loop whose operands are in another order than its
library's, such as gradients, which it reorders in the entry computation alone; and those of an image that is smaller
than the kernel, such as the last ones of a network for small images.
"""

from __future__ import annotations

import numpy as np
from jax import lax

from autopar.lowering import localize
from autopar.lowering.localize import Arrays, Cut
from autopar.lowering.localizers import group_counts
from passes.rules import small_image_taps


def bind_in_order(cut: Cut, operands: Arrays) -> Arrays:
    """The convolution of pieces with the batch first and features last, and with zeros around a small image."""
    numbers, params = cut.params["dimension_numbers"], cut.params
    (batch, feature, *spatial), (out, into, *window) = numbers.lhs_spec, numbers.rhs_spec
    first, last, *between = numbers.out_spec
    images = lax.transpose(operands[0], (batch, *spatial, feature))
    kernel = lax.transpose(operands[1], (*window, into, out))
    rank, inner = images.ndim, tuple(range(1, images.ndim - 1))
    changed = group_counts(cut, operands)
    result = [cut.results[0].shape[d] for d in between]
    if met := small_image_taps(params, images.shape[1:-1], kernel.shape[:-2], result):
        borders = [(*each.padding, apart - 1) for each, apart in zip(met, params["lhs_dilation"], strict=True)]
        images = lax.pad(images, np.zeros((), images.dtype), [(0, 0, 0), *borders, (0, 0, 0)])
        images = lax.optimization_barrier(images)  # without it XLA takes the zeros back
        kernel = kernel[tuple(slice(each.first, each.last + 1) for each in met)]
        changed |= {"padding": ((0, 0),) * len(met), "lhs_dilation": (1,) * len(met)}
    changed["dimension_numbers"] = type(numbers)(
        (0, rank - 1, *inner), (rank - 1, rank - 2, *range(rank - 2)), (0, rank - 1, *inner)
    )
    (made,) = localize.rebind(cut, (images, kernel), **changed)
    return (lax.transpose(made, tuple(np.argsort((first, *between, last)).tolist())),)
