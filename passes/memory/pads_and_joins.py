"""The operations of arrays with zeros around them, and of arrays that are joined, as XLA's CPU compiler fuses them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

from passes.ir import Node, TensorType
from passes.memory.operations import Kind, Operations, Shape

FUSED_JOINS, ROW_ELEMENTS = 8, 128
"""The operands of a concatenation up to which XLA's CPU compiler fuses it, and the elements of a row that is joined
from which it copies rows instead (CpuInstructionFusion::ShouldFuse, as of jaxlib 0.10)."""


def padded(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operation of an array with zeros around it, and the slice of that where the program pads by less than 0."""
    (type,), shape = results, operations[operands[0]].shape
    config = cast("Sequence[tuple[int, int, int]]", node.params["padding_config"])
    added = tuple((max(low, 0), max(high, 0), between) for low, high, between in config)
    grown = tuple(
        size + low + high + max(size - 1, 0) * between for size, (low, high, between) in zip(shape, added, strict=True)
    )
    array = _surrounded(operations, operands, added, grown) if any(map(any, added)) else operands[0]
    if all(low >= 0 and high >= 0 for low, high, _ in config):
        return [array]
    return [operations.add("rearrange", (array,), type.shape, type.dtype, ("slice", tuple(config)))]


def _surrounded(
    operations: Operations, operands: Sequence[int], added: Sequence[tuple[int, int, int]], grown: Shape
) -> int:
    """The operation of an array with zeros around it; repeated along dimensions without any only after that.

    A `loop pad` is one that XLA's CPU library does not take in (IsPadOpSupportedByYnn, as of jaxlib 0.10): there are
    zeros between elements, or beside a single one, which it would repeat.
    """
    source = operations[operands[0]]
    if source.kind == "broadcast":
        repeated = cast("tuple[int, ...]", source.tag)
        kept = [d for d, zeros in enumerate(added) if d in repeated or any(zeros)]
        if len(kept) < len(grown):
            shape = tuple(source.shape[d] for d in kept)
            inner = operations.broadcast(source.operands[0], shape, [kept.index(d) for d in repeated])
            narrow = [added[d] for d in kept], tuple(grown[d] for d in kept)
            return operations.broadcast(_surrounded(operations, (inner, *operands[1:]), *narrow), grown, kept)
    sizes = zip(source.shape, added, strict=True)
    in_loops = any(between or (size == 1 and (low or high)) for size, (low, high, between) in sizes)
    tag = ("loop pad" if in_loops else "pad", tuple(added))
    return operations.add("rearrange", operands, grown, source.dtype, tag)


def concatenated(
    operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]
) -> list[int]:
    """The operation of arrays joined along a dimension, their own or a new one."""
    (type,), dimension = results, cast("int", node.params.get("dimension", node.params.get("axis")))
    return [joined_by_copies(operations, operands, type.shape, type.dtype, dimension, len(operands))]


def joined_by_copies(
    operations: Operations, operands: Sequence[int], shape: Shape, dtype: str, dimension: int, count: int
) -> int:
    """The operation of `count` arrays joined: XLA fuses a concatenation unless it joins many arrays, or long rows; on
    GPUs any.
    """
    has_long_rows = len(shape) > 1 and dimension == len(shape) - 1 and shape[-1] >= ROW_ELEMENTS
    is_copied = operations.compiler != "gpu" and (count > FUSED_JOINS or has_long_rows)
    kind: Kind = "opaque" if is_copied else "rearrange"
    return operations.add(kind, operands, shape, dtype, ("concatenate", dimension))


def parts_of_joined(operations: Operations, node: Node, operand: int, results: Sequence[TensorType]) -> dict[int, int]:
    """The results of a slice or split that are one of the arrays that its operand joins, by position; XLA takes those.

    Reference: XLA's AlgebraicSimplifier::HandleSlice, as of jaxlib 0.10.
    """
    joined = operations[operand]
    if joined.name != "concatenate" or any(len(operations[o].shape) != len(joined.shape) for o in joined.operands):
        return {}
    dimension = cast("tuple[str, int]", joined.tag)[1]
    ends = [0, *accumulate(operations[o].shape[dimension] for o in joined.operands)]
    begins = dict(zip(ends, joined.operands, strict=False))
    starts = _starts(node, dimension)
    parts = ((i, begins.get(start, -1)) for i, start in enumerate(starts))
    return {i: o for i, o in parts if o >= 0 and operations[o].shape == results[i].shape}


def _starts(node: Node, dimension: int) -> Sequence[int]:
    """The place along a dimension where each result of a slice or split begins; none where that is not known."""
    params = node.params
    if "sizes" in params:
        sizes = cast("Sequence[int]", params["sizes"])
        return [0, *accumulate(sizes[:-1])] if params["axis"] == dimension else []
    if "start_indices" in params and set(cast("Sequence[int]", params["strides"] or ())) <= {1}:
        return [cast("Sequence[int]", params["start_indices"])[dimension]]
    return []
