"""The rows from which their maximum or mean is taken away, which XLA's GPU compiler writes by a Triton kernel.

A softmax and a normalisation begin so: the kernel reads a row once, finds its maximum and subtracts it. It does not add
up the parts of a product: their sum is written for it. Kernels of the same kind may compute the rows again, and find
the maximum again, as long as they do what Triton does: work on elements, and sums and maxima along rows, which are made
where they are read if that takes no longer. So a softmax is one kernel, and its gradient another; the sum that both
need is written. Where another kernel needs the rows, they are written: one that picks the label of each row, as cross-
entropy does, scatters or adds up all rows at once. Logits are then in memory in the dtype of the loss, from the forward
pass to their gradient.

Reference: SoftmaxRewriterTriton (xla/service/gpu/transforms/softmax_rewriter_triton.cc), which found no row faster to
compute without it in any program tried; PriorityFusion's CanFuseTriton; jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from passes.memory.gpu_blocks import ADDED
from passes.memory.operations import ELEMENTWISE, Operation, Shape

VIEWS = frozenset({"bitcast", "transpose"})


def apart(
    operations: Sequence[Operation], readers: Sequence[Sequence[int]], begun: Collection[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """The operations that end a kernel of Triton's, since some reader of theirs is no part of one; and the sums and
    maxima of rows that such kernels make, which those that read them may make as well.

    `readers` are those of every operation that some output needs, `begun` begin a kernel.
    """
    if not begun:
        return frozenset(), frozenset()
    picked = _picked(operations, readers)
    ends, sums, rows = set[int](), set[int](), set(begun)
    for index in range(min(begun), len(operations)):
        if index not in rows:
            continue
        behind, kind = readers[index], operations[index].kind
        if kind in VIEWS or all(_is_triton(operations, readers, picked, o) for o in behind):
            sums.update(o for o in behind if operations[o].kind == "reduce")
            rows.update(o for o in behind if operations[o].kind in ELEMENTWISE | VIEWS)
        else:
            ends.add(index)
    fused = (s for s in sums if all(_is_triton(operations, readers, picked, o) for o in (s, *readers[s])))
    return frozenset(ends), frozenset(fused)


def begun_by(operations: Sequence[Operation], readers: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """The operations that take the maximum or the mean of rows from them -> what that is made by, from the last to the
    first.
    """
    roots = (i for i, o in enumerate(operations) if o.name == "subtract")
    begun = {root: _made_by(operations, readers, root) for root in roots}
    return {root: inside for root, inside in begun.items() if inside}


def _made_by(operations: Sequence[Operation], readers: Sequence[Sequence[int]], root: int) -> tuple[int, ...]:
    """The operations that make the maximum or the mean of rows that one takes from each, for this alone; else ()."""
    if len(operations[root].operands) != 2:
        return ()
    minuend, subtrahend = operations[root].operands
    spreading = _before(operations, readers, subtrahend, "broadcast")
    if not spreading or len(readers[spreading[-1]]) > 1:
        return ()
    spread = operations[spreading[-1]]
    if len(spread.shape) - 1 in cast("Shape", spread.tag):
        return ()
    reducing = _before(operations, readers, spread.operands[0], "reduce")
    if not reducing:
        return ()
    reduce = operations[reducing[-1]]
    if len(readers[reducing[-1]]) > 1 or reduce.name not in ("reduce-max", "reduce-sum"):
        return ()
    (rows,) = reduce.operands
    _, reduced = cast("tuple[str, Shape]", reduce.tag)
    if tuple(reduced) != (len(operations[rows].shape) - 1,):
        return ()
    while minuend != rows and _is_view(operations[minuend]):
        (minuend,) = operations[minuend].operands
    while minuend != rows and _is_view(operations[rows]):
        (rows,) = operations[rows].operands
    return (*spreading, *reducing) if minuend == rows else ()


def _is_view(operation: Operation) -> bool:
    """Whether an operation is another one's elements in another shape or dtype."""
    return operation.kind == "bitcast" or operation.is_conversion


def _before(
    operations: Sequence[Operation], readers: Sequence[Sequence[int]], index: int, kind: str
) -> tuple[int, ...]:
    """An operation and what it follows from alone, by others that nothing else reads, up to the first of a kind; () if
    there is none.
    """
    met = [index]
    while operations[index].kind != kind:
        operation = operations[index]
        read = [o for o in operation.operands if not _is_number(operations, o)]
        if operation.kind not in (*ELEMENTWISE, "bitcast") or len(read) != 1 or len(readers[index]) > 1:
            return ()
        (index,) = read
        met.append(index)
    return tuple(met)


def _is_number(operations: Sequence[Operation], index: int) -> bool:
    """Whether an operation is the same number everywhere."""
    operation = operations[index]
    source = operations[operation.operands[0]] if operation.kind == "broadcast" else operation
    return source.kind == "literal"


def _picked(operations: Sequence[Operation], readers: Sequence[Sequence[int]]) -> set[int]:
    """The operations of which only some elements are computed: those that a gather picks."""
    picked: set[int] = set()
    for index in reversed(range(len(operations))):
        operation = operations[index]
        takes_in = operation.kind in (*ELEMENTWISE, *VIEWS) and readers[index]
        if operation.kind == "gather" or (takes_in and picked.issuperset(readers[index])):
            picked.add(index)
    return picked


def _is_triton(operations: Sequence[Operation], readers: Sequence[Sequence[int]], picked: set[int], index: int) -> bool:
    """Whether an operation may be part of a kernel of Triton's, or reads what is in memory."""
    operation = operations[index]
    if index in picked or operation.kind in ("gather", "update"):
        return False
    if operation.kind != "reduce":
        return True
    if operation.name not in ADDED:
        return False
    name, reduced = cast("tuple[str, Shape]", operation.tag)
    rows = tuple(reduced) == (len(operations[operation.operands[0]].shape) - 1,)
    return rows and not any(operations[o].name == name for o in readers[index])  # those are one sum of all rows
