"""The batches of matrices that TPUs multiply one by one: none of their dimensions but the last two lie in tiles.

So scores of 64 x 64 of 128 windows and six heads are padded to 64 x 128, though tiles of windows would leave nothing
unused; and so is what is computed of them element by element. Rows of a table that are looked up take whole tiles each:
196,608 of 16 numbers 100 MB.

Reference: layouts in the HLO that libtpu 0.0.42 makes of vision transformers, f32[128,2,64,64]{2,3,1,0:T(8,128)}, and
of a wide and deep model, f32[196608,16]{1,0:T(8,128)}.
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.memory.operations import ELEMENTWISE, Operation, Shape
from passes.memory.tpu_layouts import BATCHED, in_tiles


def batches(operations: Sequence[Operation], _outputs: Sequence[int]) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with batches of matrices and rows of tables marked, each where it was."""
    marked = bytearray(len(operations))
    for index, operation in enumerate(operations):
        is_product = operation.kind == "dot" and len(operation.shape) >= BATCHED
        above = [o for o in operation.operands if operations[o].shape == operation.shape]
        marked[index] = is_product or (operation.kind in ELEMENTWISE and any(marked[o] for o in above))
    changed = [o._replace(is_batch=True) if marked[i] else o for i, o in enumerate(operations)]
    for index, operation in enumerate(operations):
        if operation.kind == "gather" and _is_row(operations[operation.operands[0]].shape, operation.shape):
            changed[index] = changed[index]._replace(is_rows=True)
    return tuple(changed), tuple(range(len(operations)))


def _is_row(table: Shape, made: Shape) -> bool:
    """Whether whole rows are looked up in a table, which may lie in whole tiles itself."""
    return len(table) == len(made[-1:]) + 1 and table[-1] in (made[-1], in_tiles(1, made[-1])[1])
