"""The batches of matrices that TPUs multiply one by one: none of their dimensions but the last two lie in tiles.

So scores of 64 x 64 of 128 windows and six heads are padded to 64 x 128, though tiles of windows would leave nothing
unused; and so is what is computed of them element by element.

Reference: layouts in the HLO that libtpu 0.0.42 makes of vision transformers, f32[128,2,64,64]{2,3,1,0:T(8,128)}.
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.memory.operations import ELEMENTWISE, Operation
from passes.memory.tpu_layouts import BATCHED


def batches(operations: Sequence[Operation], _outputs: Sequence[int]) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with batches of matrices marked, each where it was."""
    marked = bytearray(len(operations))
    for index, operation in enumerate(operations):
        is_product = operation.kind == "dot" and len(operation.shape) >= BATCHED
        above = [o for o in operation.operands if operations[o].shape == operation.shape]
        marked[index] = is_product or (operation.kind in ELEMENTWISE and any(marked[o] for o in above))
    changed = tuple(o._replace(is_batch=True) if marked[i] else o for i, o in enumerate(operations))
    return changed, tuple(range(len(operations)))
