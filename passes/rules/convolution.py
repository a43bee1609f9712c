"""Rules of convolutions: batch and output channels pass through, input channels reduce, groups go together.

Gradients are convolutions too, their batches and channels exchanged, so one rule serves all three.

Reference: Dryden et al., "Channel and filter parallelism for large-scale CNN training" (SC 2019); XLA's
Convolution semantics for feature and batch groups, which are contiguous and outermost in their dimensions.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from passes.ir import Node
from passes.rules.registry import build, rule, size_of
from passes.rules.sharding_rule import ShardingRule, Types


@rule("conv_general_dilated")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Each spec lists batch and feature (of the kernel: out and in), then the spatial dimensions, never cut.

    The kernel has the input channels of one feature group. The zeros that dilate the left side cost no flops.
    """
    specs = cast("Mapping[str, tuple[int, ...]]", node.params["dimension_numbers"])
    features = cast("int", node.params["feature_group_count"])
    batches = cast("int", node.params["batch_group_count"])
    match features > 1, batches > 1:
        case True, _:
            lhs, rhs, out = ("batch", "group"), ("group", None), ("batch", "group")
        case _, True:
            lhs, rhs, out = ("group", "in"), ("group", "in"), (None, "group")
        case _:
            lhs, rhs, out = ("batch", "in"), ("out", "in"), ("batch", "out")
    _, kernel_in, *kernel_spatial = specs["rhs_spec"]
    kernel = operands[1].shape
    window = size_of([kernel[d] for d in kernel_spatial]) / size_of(
        cast("tuple[int, ...]", node.params["lhs_dilation"])
    )
    base = build(
        [(operands[0], _placed(specs["lhs_spec"], lhs)), (operands[1], _placed(specs["rhs_spec"], rhs))],
        [(results[0], _placed(specs["out_spec"], out))],
        reduce={"in": "add"},
        sizes={"group": max(features, batches)},
        flops=2.0 * results[0].size * window * kernel[kernel_in],
        light=False,
    )
    return replace(base, localized=True, convolves=True, window=max(1.0, window))


@dataclass(frozen=True, slots=True, kw_only=True)
class Taps:
    """The taps from `first` to `last` of one dimension of a kernel, and the `padding` of the image that they need."""

    first: int
    last: int
    padding: tuple[int, int]


def small_image_taps(
    params: Mapping[str, object], image: Sequence[int], kernel: Sequence[int], result: Sequence[int]
) -> tuple[Taps, ...]:
    """The taps of each spatial dimension that meet a pixel at some place, by the convolution's `params`; all, if none
    does. Extents are those of the image, the kernel and the result.

    Nothing for an image that has as many pixels along each dimension as the kernel has taps: XLA:CPU's library
    convolves that as it is.
    """
    if all(pixels >= count for pixels, count in zip(image, kernel, strict=True)):
        return ()
    paddings = cast("Sequence[tuple[int, int]]", params["padding"])
    strides, apart, between = (
        cast("Sequence[int]", params[name]) for name in ("window_strides", "lhs_dilation", "rhs_dilation")
    )
    met: list[Taps] = []
    for d, (before, after) in enumerate(paddings):
        dilated = (image[d] - 1) * apart[d] + 1
        first = max(0, -(((result[d] - 1) * strides[d] - before) // between[d]))
        last = min(kernel[d] - 1, (dilated - 1 + before) // between[d])
        if first > last:
            first, last = 0, kernel[d] - 1
        cut = (before - first * between[d], after - (kernel[d] - 1 - last) * between[d])
        met.append(Taps(first=first, last=last, padding=cut))
    return tuple(met)


def _placed(spec: tuple[int, ...], labels: tuple[Hashable, Hashable]) -> list[Hashable]:
    """The labels of the first two dimensions of a spec, in the array's order."""
    named = dict(zip(spec, labels, strict=False))
    return [named.get(d) for d in range(len(spec))]
