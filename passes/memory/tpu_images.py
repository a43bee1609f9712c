"""The images that XLA's TPU compiler keeps in tiles of batch and features, and what is made of them.

Convolutions read and write such tiles, whatever that pads. Nothing that is computed of one element by element, or of
windows of it, joined to another, or padded, lies otherwise: there would be a copy.

Reference: layouts in the HLO that libtpu 0.0.42 makes of Wide-ResNet, U-Nets and a DenseNet, whose 96 to 192 features
of 32 images of 96 x 96 all take 128 or 256 columns though 96 x 96 would leave less unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from passes.memory.operations import ELEMENTWISE, Operation, Shape
from passes.memory.windows import REDUCED

VIEWS = frozenset({"transpose", "bitcast"})
"""Kinds that a convolution reads through."""

SAME = frozenset({*ELEMENTWISE, "rearrange", "update", "broadcast"})
"""Kinds whose results lie as images do that they are made of or computed with."""


def images(operations: Sequence[Operation], _outputs: Sequence[int]) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with images in their tiles, each where it was."""
    readers: list[list[int]] = [[] for _ in operations]
    for index, operation in enumerate(operations):
        for o in operation.operands:
            readers[o].append(index)
    pending = [image for index in range(len(operations)) for image in _convolved(operations, index)]
    marked = set(pending)
    while pending:
        index = pending.pop()
        keeps = _keeps(operations[index])
        near = [r for r in readers[index] if _keeps(operations[r])]
        near += [o for o in operations[index].operands if keeps and _keeps(operations[o])]
        for other in near:
            if other not in marked and len(operations[other].shape) == len(operations[index].shape):
                marked.add(other)
                pending.append(other)
    changed = [o._replace(is_image=True) if i in marked else o for i, o in enumerate(operations)]
    return tuple(changed), tuple(range(len(operations)))


def _convolved(operations: Sequence[Operation], index: int) -> list[int]:
    """A convolution and the image that it reads, if an operation is one."""
    operation = operations[index]
    if operation.kind != "opaque" or operation.name != "convolution":
        return []
    source = read = operation.operands[0]
    if operations[read].kind in VIEWS:
        (source,) = operations[read].operands
    if operations[read].kind == "transpose":
        order = cast("Shape", operations[read].tag)
        if {order[0], order[-1]} != {0, len(order) - 1}:
            return [index]
    is_image = operations[source].kind != "input" and len(operations[source].shape) == len(operation.shape)
    return [index, source] if is_image else [index]


def _keeps(operation: Operation) -> bool:
    """Whether an operation leaves images in their tiles."""
    return operation.kind in SAME or operation.name.startswith((REDUCED, "concatenate"))
