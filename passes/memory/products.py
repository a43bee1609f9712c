"""The operations of matrix products and convolutions: operands transposed into a kernel's layout, and folded."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, cast

from passes.ir import Node, TensorType
from passes.memory.operations import Operation, Operations, Shape, widen
from passes.memory.tpu_products import rounded
from passes.rules import small_image_taps


def _as_sent(operations: Operations, operand: int) -> int:
    """The operand of a batch of products, read in the layout that a collective leaves it in."""
    described = operations[operand]
    if described.kind == "transpose" and operations[described.operands[0]].kind == "collective":
        return operations.add("bitcast", described.operands, described.shape, described.dtype, described.tag)
    return operand


def contraction(
    operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]
) -> list[int]:
    """The operations of a `dot_general`: sides of several free or contracted dimensions are brought into one order.

    It is (batch, free, contracted) on the left and (batch, contracted, free) on the right, one dimension of each sort.
    Where the device computes in a wider dtype, a side is widened after that, and transposes that only swap rows and
    columns are left for `as_they_lie`.
    """
    numbers = cast("tuple[tuple[Shape, Shape], tuple[Shape, Shape]]", node.params["dimension_numbers"])
    type, narrow = results[0], operands
    operands = [widen(operations, o) for o in operands]
    if numbers[1][0]:
        operands = [_as_sent(operations, o) for o in operands]
    if all(operations[operands[0]].shape[d] == 1 for d in numbers[0][0]):
        return [_outer(operations, operands, type, numbers)]
    operands, numbers = _folded(operations, operands, numbers)
    operands = rounded(operations, node.params, operands)
    product = _product(operations[operands[0]].shape, operations[operands[1]].shape, numbers)
    if product is None:
        return [_dot(operations, operands, type.shape, type.dtype, numbers, narrow, (None, None))]
    reads = list[int]()
    for operand, before, order, matrix, by_columns in zip(
        operands, narrow, product.orders, product.read, product.by_columns, strict=True
    ):
        is_widened = widen(operations, before) == operand != before
        arranged = operations.transpose(before if is_widened else operand, order)
        if operations[arranged].kind == "transpose" and by_columns and not is_widened:
            arranged = operand  # read by columns as well as by rows
            if operations.compiler == "cpu" and len(order) == 2:
                matrix = operations[operand].shape
        reads.append(widen(operations, operations.reshape(arranged, matrix)))
    dot = _dot(operations, reads, product.made, type.dtype, ("merged", numbers), narrow, product.orders)
    return [operations.reshape(dot, type.shape)]


def _outer(
    operations: Operations, operands: Sequence[int], type: TensorType, numbers: tuple[tuple[Shape, Shape], ...]
) -> int:
    """The operation of a product over nothing: each element of one side times each of the other, no dot."""
    contracted, batch = numbers
    sides: list[int] = []
    for operand, sums, shared in zip(operands, contracted, batch, strict=True):
        shape = operations[operand].shape
        free = [d for d in range(len(shape)) if d not in sums and d not in shared]
        arranged = operations.transpose(operand, (*shared, *free, *sums))
        narrow = operations.reshape(arranged, tuple(shape[d] for d in (*shared, *free)))
        first = len(shared) if not sides else len(type.shape) - len(free)
        sides.append(operations.broadcast(narrow, type.shape, (*range(len(shared)), *range(first, first + len(free)))))
    wide = TensorType(shape=type.shape, dtype=operations[sides[0]].dtype)
    return operations.converted(operations.elementwise("multiply", sides, wide), type.dtype)


def _dot(
    operations: Operations,
    reads: Sequence[int],
    shape: Shape,
    dtype: str,
    tag: object,
    narrow: Sequence[int],
    orders: Sequence[Shape | None],
) -> int:
    """The operation of a product, whose sides were `narrow` before they were arranged in these orders and widened."""
    lying = [_lying(operations, *side) for side in zip(reads, narrow, orders, strict=True)]
    dot = operations.add("dot", reads, shape, dtype, tag)
    for side, operation in enumerate(lying):
        if operation is not None:
            operations.lying.setdefault((dot, side), operation)
    return dot


def _lying(operations: Operations, read: int, narrow: int, order: Shape | None) -> int | None:
    """The array, widened, of which a side of a product only has rows and columns swapped; None where more is done."""
    if not operations.widened:  # products of an accelerator are laid out later
        return None
    arranged = operations[read].operands[0] if widen(operations, narrow) != narrow else read
    if operations[arranged].kind != "transpose":
        return None
    if arranged == narrow:  # the program has transposed it
        order, (narrow,) = cast("Shape", operations[arranged].tag), operations[arranged].operands
        if _is_laid_out(operations, narrow):
            return None
    is_swapped = order is not None and _swaps(order)
    if not is_swapped or 1 in operations[narrow].shape[:-2]:  # XLA takes such a dimension off after the transpose
        return None
    return widen(operations, narrow)


def as_they_lie(
    operations: Sequence[Operation], lying: Mapping[tuple[int, int], int], moved: Container[int]
) -> list[Operation]:
    """The operations with each side of a product as it lies where that may be; what was `moved` out of a loop, is not.

    Reference: XLA's TransposeFolding, which the CPU compiler runs after it has moved out of loops what does not change.
    """
    changed = list(operations)
    for (dot, side), operation in lying.items():
        read = changed[dot].operands
        if read[side] not in moved:
            changed[dot] = changed[dot].reading((*read[:side], operation, *read[side + 1 :]))
    return changed


def convolution(
    operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]
) -> list[int]:
    """The operations of a convolution. Where groups of its batch have one element, all pairs are computed, and masked.

    Reference: XLA's ConvolutionGroupConverter, as of jaxlib 0.10.
    """
    (type,), count = results, cast("int", node.params["batch_group_count"])
    numbers = cast("Mapping[str, Shape]", node.params["dimension_numbers"])
    if count == 1 or operations[operands[0]].shape[numbers["lhs_spec"][0]] > count:
        return [_convolved(operations, node.params, operands, type)]
    across = numbers["out_spec"][0]
    pairs = replace(type, shape=(*type.shape[:across], count, *type.shape[across + 1 :]))
    made = _convolved(operations, node.params, operands, pairs)
    masked = operations.elementwise("select", (made,), pairs)
    shape = (*type.shape[:across], *type.shape[across + 1 :])
    reduced = operations.add("reduce", (masked,), shape, type.dtype, ("reduce-sum", (across,)))
    return [operations.reshape(reduced, type.shape)]


def _convolved(operations: Operations, params: Mapping[str, object], operands: Sequence[int], type: TensorType) -> int:
    """The operation of a convolution: batch first and features last, and any other layout is copied.

    That is how XLA's library wants them. Its CPU compiler lays out only those of the entry computation so; in the body
    of a loop the programs of `autopar.lowering.convolutions` do, which put zeros around small images, too.

    Reference: XLA's ConvCanonicalization (xla/service/cpu/conv_canonicalization.cc), as of jaxlib 0.10.
    """
    numbers = cast("Mapping[str, Shape]", params["dimension_numbers"])
    (batch, feature, *spatial), (out, into, *window) = numbers["lhs_spec"], numbers["rhs_spec"]
    first, last, *between = numbers["out_spec"]
    images, kernel = rounded(operations, params, operands)
    if operations.compiler == "gpu":
        images = _padded(operations, params, images, kernel, math.prod(type.shape[d] for d in numbers["out_spec"][2:]))
    lhs = operations.transpose(images, (batch, *spatial, feature))
    rhs = operations.transpose(kernel, (*window, into, out))
    order = (first, *between, last)
    shape = tuple(type.shape[d] for d in order)
    if operations.compiler == "cpu":
        lhs, rhs = _framed(operations, params, lhs, rhs, shape[1:-1])
    convolved = operations.add("opaque", (lhs, rhs), shape, type.dtype, ("convolution", operations.at))
    return operations.transpose(convolved, sorted(range(type.rank), key=order.__getitem__))


def _padded(operations: Operations, params: Mapping[str, object], images: int, kernel: int, made: int) -> int:
    """The operation of images with zeros around them where there are more at one end, as strides of "SAME" padding ask
    for: the library pads both ends alike. The gradient of a kernel leaves to it what is at both, and may have more
    zeros behind, as many as no window of the forward pass has reached. Zeros between pixels are put there, as it knows
    them only of gradients: of images, whose kernel is reversed, or of a kernel, with more taps than pixels are `made`.

    Reference: XLA's ConvPaddingLegalization (xla/service/gpu/transforms/conv_padding_legalization.cc), and
    MatchBackwardFilter and MatchBackwardInput of conv_rewriter.cc beside it, as of jaxlib 0.10.
    """
    paddings = cast("Sequence[tuple[int, int]]", params["padding"])
    apart, strides = (cast("Sequence[int]", params[name]) for name in ("lhs_dilation", "rhs_dilation"))
    numbers = cast("Mapping[str, Shape]", params["dimension_numbers"])
    if max(apart, default=1) > 1:
        taps = math.prod(operations[kernel].shape[d] for d in numbers["rhs_spec"][2:])
        if _is_reversed(operations, kernel) or taps == 1 or taps > made:
            return images
        paddings = [(max(low, 0), max(high, 0)) for low, high in paddings]
    else:
        paddings = [
            (low, max(high, min(low, high + by - 1))) for (low, high), by in zip(paddings, strides, strict=True)
        ]
        if all(low == high for low, high in paddings) or min(map(min, paddings)) < 0:
            return images
        if max(strides) > 1:
            paddings = [(low - min(low, high), high - min(low, high)) for low, high in paddings]
    _, _, *spatial = numbers["lhs_spec"]
    read, between = operations[images], dict(zip(spatial, apart, strict=True))
    added = dict(zip(spatial, map(sum, paddings), strict=True))
    shape = tuple((size - 1) * between.get(d, 1) + 1 + added.get(d, 0) for d, size in enumerate(read.shape))
    zero = operations.literal(0.0, read.dtype)
    return operations.add("rearrange", (images, zero), shape, read.dtype, ("pad", *map(tuple, paddings)))


def _is_reversed(operations: Operations, kernel: int) -> bool:
    """Whether a kernel is reversed, as the transpose of a convolution has it."""
    while operations[kernel].kind in ("transpose", "bitcast"):
        (kernel,) = operations[kernel].operands
    return operations[kernel].name == "reverse"


def _framed(
    operations: Operations, params: Mapping[str, object], images: int, kernel: int, result: Shape
) -> tuple[int, int]:
    """The operations of images and kernel; of a small image with zeros around it, behind a barrier, and of the part of
    the kernel for it.
    """
    read, weights = operations[images], operations[kernel]
    met = small_image_taps(params, read.shape[1:-1], weights.shape[:-2], result)
    if not met:
        return images, kernel
    apart = cast("Shape", params["lhs_dilation"])
    pixels = zip(read.shape[1:-1], met, apart, strict=True)
    extents = [(size - 1) * between + 1 + sum(each.padding) for size, each, between in pixels]
    zero = operations.literal(0.0, read.dtype)
    shape = (read.shape[0], *extents, read.shape[-1])
    padded = operations.add("rearrange", (images, zero), shape, read.dtype, ("pad", operations.at))
    if operations.rounded_to:
        padded = operations.converted(padded, operations.rounded_to)
    (framed,) = operations.barrier((padded,))
    framed = widen(operations, framed)
    kept = (*(each.last - each.first + 1 for each in met), *weights.shape[-2:])
    if kept != weights.shape:
        kernel = operations.add("rearrange", (kernel,), kept, weights.dtype, ("slice", operations.at))
    return framed, kernel


def _folded(
    operations: Operations, operands: Sequence[int], numbers: tuple[tuple[Shape, Shape], tuple[Shape, Shape]]
) -> tuple[Sequence[int], tuple[tuple[Shape, Shape], tuple[Shape, Shape]]]:
    """The operands of a product with those that are transposed matrices as they were before: either way is read."""
    read, contracted = list(operands), list(numbers[0])
    for side, operand in enumerate(operands):
        described, batch = operations[operand], numbers[1][side]
        order = cast("Shape", described.tag) if described.kind == "transpose" else ()
        leads = len(order) - 2
        if not order or _is_laid_out(operations, described.operands[0]):
            continue
        if _swaps(order) and tuple(batch) == tuple(range(leads)):
            read[side] = described.operands[0]
            contracted[side] = tuple(order[d] for d in contracted[side])
    return read, ((contracted[0], contracted[1]), numbers[1])


def _swaps(order: Shape) -> bool:
    """Whether an order swaps the last two dimensions and no others."""
    leads = len(order) - 2
    return leads >= 0 and order == (*range(leads), leads + 1, leads)


def _is_laid_out(operations: Operations, operation: int) -> bool:
    """Whether an operation is a collective along another dimension than the first, now brought to the front, as it was
    made or rounded.
    """
    while operations[operation].is_conversion:
        (operation,) = operations[operation].operands
    described = operations[operation]
    return described.kind == "collective" and max(cast("tuple[int, ...]", described.tag)[3:5]) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """The transposes of both sides of a product, whether its columns may be transposed, and the resulting shape."""

    orders: tuple[Shape, Shape]
    read: tuple[Shape, Shape]
    by_columns: tuple[bool, bool]
    made: Shape


@lru_cache(maxsize=1024)
def _product(
    left_shape: Shape, right_shape: Shape, numbers: tuple[tuple[Shape, Shape], tuple[Shape, Shape]]
) -> _Product | None:
    """The product of two shapes; None where a kernel takes both as they lie."""
    lhs, rhs = (_Side.of(s, c, b) for s, c, b in zip((left_shape, right_shape), *numbers, strict=True))
    if lhs.is_canonical and rhs.is_canonical:
        return None
    rows, columns = (lhs.size("free"), lhs.size("contracted")), (rhs.size("contracted"), rhs.size("free"))
    batches = [tuple(side.shape[d] for d in side.batch) for side in (lhs, rhs)]
    return _Product(
        orders=((*lhs.batch, *lhs.free, *lhs.contracted), (*rhs.batch, *rhs.contracted, *rhs.free)),
        read=((*batches[0], *rows), (*batches[1], *columns)),
        by_columns=(lhs.is_matrix and len(lhs.shape) == 2, rhs.is_matrix),
        made=(*batches[0], lhs.size("free"), rhs.size("free")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One side of a product, its dimensions by sort."""

    shape: Shape
    batch: Shape
    free: Shape
    contracted: Shape

    @classmethod
    def of(cls, shape: Shape, contracted: Shape, batch: Shape) -> _Side:
        free = tuple(d for d in range(len(shape)) if d not in (*contracted, *batch))
        return cls(shape=shape, batch=tuple(batch), free=free, contracted=tuple(contracted))

    def size(self, sort: Literal["free", "contracted"]) -> int:
        return math.prod(self.shape[d] for d in (self.free if sort == "free" else self.contracted))

    @property
    def is_matrix(self) -> bool:
        """Whether a side is one matrix, or a batch of matrices one after the other."""
        other_dims = [d for d in (*self.free, *self.contracted) if self.shape[d] > 1]
        wide = [d for d in self.batch if self.shape[d] > 1]
        return (
            len(other_dims) <= 2
            and bool(wide) == bool(self.batch)
            and all(d < min(other_dims, default=d + 1) for d in wide)
        )

    @property
    def is_canonical(self) -> bool:
        """Whether a kernel takes a side as it lies; dimensions of size 1 count as any other."""
        leads = self.batch == tuple(range(len(self.batch)))
        return len(self.contracted) <= 1 and len(self.free) <= 1 and leads
