"""The operations of the steps of a resharding on one device: collectives, and the layout of what they send."""

from __future__ import annotations

from passes.memory.operations import Operations, Shape
from passes.memory.pads_and_joins import joined_by_copies
from passes.sharding import Step

PIECES = 8
"""The pieces into which the model cuts an all-to-all at most: XLA cuts one for each device, which many devices would
make slow to follow, and beyond eight the peak hardly changes."""


def stepped(
    operations: Operations, made: int, step: Step, shape: Shape, reduction: str, *, summed: bool = False
) -> int:
    """The operation that holds the result of a step of a resharding of `made`, of this local shape.

    The dimension that a collective joins or cuts comes first in memory. A reduce-scatter that is `summed` is an
    all-reduce, of which the device's part is cut out.
    """
    dtype = operations[made].dtype
    if summed:
        tag = ("all_reduce", step.axes, reduction, -1, -1)
        made = operations.add("collective", (made,), operations[made].shape, dtype, tag)
    if step.kind == "slice" or summed:
        return operations.add("rearrange", (made,), shape, dtype, ("dynamic-slice", str(step)))
    if step.kind == "keep":
        return operations.add("elementwise", (made,), shape, dtype, str(step))
    tag = (step.kind, step.axes, reduction, step.dim, step.to_dim)
    if step.kind == "all_to_all":
        return _exchanged(operations, made, step, shape, tag)
    along = {"all_gather": step.dim, "reduce_scatter": step.to_dim}.get(step.kind, -1)
    if along < 0:
        return operations.add("collective", (made,), shape, dtype, tag)
    order = (along, *(d for d in range(len(shape)) if d != along))
    moved = tuple(shape[d] for d in order)
    made = operations.add("collective", (operations.transpose(made, order),), moved, dtype, tag)
    return operations.transpose(made, sorted(range(len(shape)), key=order.__getitem__))


def _exchanged(operations: Operations, made: int, step: Step, shape: Shape, tag: tuple[object, ...]) -> int:
    """The operation of an all-to-all: pieces are cut out one by one, sent, joined where they were cut, and put in
    place.

    Reference: XLA's AllToAllDecomposer, and what XlaBuilder makes of an all-to-all of arrays.
    """
    cut, full_shape, dtype = step.to_dim, operations[made].shape, operations[made].dtype
    count = full_shape[cut] // shape[cut]
    few = min(count, PIECES)
    sizes = [full_shape[cut] * (i + 1) // few - full_shape[cut] * i // few for i in range(few)]
    parts = [(*full_shape[:cut], size, *full_shape[cut + 1 :]) for size in sizes]
    pieces = [operations.add("rearrange", (made,), p, dtype, ("slice", tag, i)) for i, p in enumerate(parts)]
    addresses = (few,)  # of what is received, which is in memory as well
    sent = operations.add("collective", pieces, addresses, "uint64", (*tag, pieces[0]))
    received = [operations.add("result", (sent,), p, dtype, i) for i, p in enumerate(parts)]
    joined = joined_by_copies(operations, received, full_shape, dtype, cut, count)
    grid = operations.reshape(joined, (*full_shape[:cut], count, shape[cut], *full_shape[cut + 1 :]))
    order = [d for d in range(len(full_shape) + 1) if d != cut]
    order.insert(step.dim, cut)
    moved = [d for d in order if operations[grid].shape[d] > 1]
    if moved != sorted(moved):  # a change of layout, which the library of kernels does not take in
        between = tuple(operations[grid].shape[d] for d in order)
        grid = operations.add("rearrange", (grid,), between, dtype, ("transpose", tuple(order)))
    return operations.reshape(grid, shape)
