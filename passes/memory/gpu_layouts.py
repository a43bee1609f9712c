"""The transposes that XLA's GPU compiler leaves to products, whose kernels read a matrix by rows or by columns.

Reference: XLA's layout assignment for dots and Triton's fusions of products, as of jaxlib 0.10.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from passes.memory.operations import Operation, Shape


def viewed(operations: Sequence[Operation]) -> list[Operation]:
    """The operations, with transposes of matrices that only products read as other views of what they transpose."""
    readers: dict[int, list[int]] = {}
    for index, operation in enumerate(operations):
        for o in operation.operands:
            readers.setdefault(o, []).append(index)
    changed = list(operations)
    laid: dict[tuple[int, Shape], int] = {}
    images: dict[int, int] = {}
    for index, operation in enumerate(operations):
        if operation.kind != "transpose":
            continue
        source, order = operation.operands[0], cast("Shape", operation.tag)
        if operations[source].name == "convolution" or _is_convolved(index, operations, readers):
            changed[index] = _of_images(index, operations, readers, images)
            continue
        if _is_made_so(index, operations, readers):
            changed[index] = operation._replace(kind="bitcast")
            continue
        matrices = _matrices(index, operations, readers)
        if matrices and all(_swaps(operations[source].shape, order, *matrix) for matrix in matrices):
            changed[index] = operation._replace(kind="bitcast")
            continue
        swapped = _swapped(operation.shape, order, matrices) if matrices else ()
        other = laid.get((source, swapped))
        if other is not None:
            changed[index] = operation._replace(kind="bitcast", operands=(other,))
            continue
        laid[source, order] = index
    return changed


def _ends(index: int, operations: Sequence[Operation], readers: dict[int, list[int]]) -> list[int]:
    """The readers of an operation behind its other views."""
    pending, ends = [index], list[int]()
    while pending:
        for reader in readers.get(pending.pop(), ()):
            (pending if operations[reader].kind == "bitcast" else ends).append(reader)
    return ends


def _is_made_so(index: int, operations: Sequence[Operation], readers: dict[int, list[int]]) -> bool:
    """Whether a transpose is of a product or a scatter, for collectives, and nothing else reads that: the product's
    kernel makes it so, and what is scattered is added to zeros that lie so.
    """
    (source,) = operations[index].operands
    while len(readers[source]) == 1 and operations[source].kind == "bitcast":
        (source,) = operations[source].operands
    scatters = operations[source].kind in ("reduce", "update") and operations[source].name.startswith("scatter")
    if not (operations[source].kind == "dot" or scatters) or len(readers[source]) > 1:
        return False
    ends = _ends(index, operations, readers)
    return bool(ends) and all(operations[end].kind == "collective" for end in ends)


def _is_convolved(index: int, operations: Sequence[Operation], readers: dict[int, list[int]]) -> bool:
    ends = _ends(index, operations, readers)
    return bool(ends) and all(operations[end].name == "convolution" for end in ends)


def _of_images(
    index: int, operations: Sequence[Operation], readers: dict[int, list[int]], images: dict[int, int]
) -> Operation:
    """A transpose beside a convolution, which takes any order; what a collective moves is brought into one, once."""
    transpose = operations[index]
    (source,) = transpose.operands
    if operations[source].kind == "collective":
        first = images.setdefault(source, index)
        return transpose if first == index else transpose._replace(kind="bitcast", operands=(first,))
    if any(operations[end].kind == "collective" for end in _ends(index, operations, readers)):
        return transpose
    return transpose._replace(kind="bitcast")


def _swapped(shape: Shape, order: Shape, matrices: Sequence[tuple[int, int, int]]) -> Shape:
    """The order with rows and columns swapped behind the batch; empty where products do not agree about these."""
    if len(set(matrices)) > 1:
        return ()
    batch, rows, columns = matrices[0]
    sizes, leads, leading = list(shape), 0, 1
    while leading < batch and leads < len(sizes):
        leading, leads = leading * sizes[leads], leads + 1
    cut, sized = leads, 1
    while sized < rows and cut < len(sizes):
        sized, cut = sized * sizes[cut], cut + 1
    if leading != batch or sized != rows or math.prod(sizes[cut:]) != columns:
        return ()
    return (*order[:leads], *order[cut:], *order[leads:cut])


def _matrices(index: int, operations: Sequence[Operation], readers: dict[int, list[int]]) -> list[tuple[int, int, int]]:
    """The batch, rows and columns as which products read an operation; none if something else reads it."""
    pending, matrices = [index], list[tuple[int, int, int]]()
    while pending:
        read = pending.pop()
        for reader in readers.get(read, ()):
            if operations[reader].kind == "bitcast":
                pending.append(reader)
            elif operations[reader].kind == "dot":
                matrices.append(_matrix(operations[read].shape, operations[reader], read))
            else:
                return []
    return matrices


def _matrix(shape: Shape, dot: Operation, read: int) -> tuple[int, int, int]:
    """The batch, rows and columns of a side of a product."""
    tag = cast("tuple[object, ...]", dot.tag)
    if tag and tag[0] == "merged":
        leads = len(shape) - 2
        return math.prod(shape[:leads]), shape[leads], shape[leads + 1]
    _, batched = cast("tuple[tuple[Shape, Shape], tuple[Shape, Shape]]", tag)
    side = 0 if dot.operands[0] == read else 1
    leads = len(batched[side])
    if tuple(batched[side]) != tuple(range(leads)) or len(shape) != leads + 2:
        return 0, 0, 0
    return math.prod(shape[:leads]), shape[leads], shape[leads + 1]


def _swaps(shape: Shape, order: Shape, batch: int, rows: int, columns: int) -> bool:
    """Whether an order keeps the batch in front and swaps what is behind it, rows and columns."""
    wide = [d for d in range(len(shape)) if shape[d] > 1]
    moved = [wide.index(d) for d in order if shape[d] > 1]
    sizes, leads, leading = [shape[d] for d in wide], 0, 1
    while leading < batch and leads < len(sizes) and moved[leads] == leads:
        leading, leads = leading * sizes[leads], leads + 1
    rest = moved[leads:]
    if leading != batch or not rest:
        return False
    cut = rest.index(leads) if leads in rest else 0
    first, second = rest[:cut], rest[cut:]
    swapped = [*second, *first] == list(range(leads, len(sizes)))
    return swapped and math.prod(sizes[d] for d in first) == rows and math.prod(sizes[d] for d in second) == columns
