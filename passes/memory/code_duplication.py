"""The code that a kernel of XLA's CPU compiler is written in, by which it is seen when the kernel takes in no more.

An operation is written once for every index at which its elements are read: those of its own shape read it at the index
at which they are read themselves, others at one that they compute. What is written too often is not taken in.

Reference: xla/service/fusion_node_indexing_evaluation.cc, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from passes.memory.operations import Operation

MOST_COPIES = 15
"""The times that an operation is written in one kernel at most (kAllowedCodeDuplication of the reference)."""

BLOCKS = frozenset({"concatenate", "dot", "dynamic-update-slice", "loop pad", "pad", "reduce", "reduce-window"})
"""The opcodes of operations that are written once at most, as control flow is (OpInvalidatesCache of the reference);
sums and maxima are told by their kind."""

_KERNEL = -1
"""What reads the last operation of a kernel: the kernel itself, once."""


class Copies:
    """The copies of each operation in the code of a kernel, that of operation `root`, as it takes others in."""

    def __init__(self, operations: Sequence[Operation], root: int, operands: Iterable[int]) -> None:
        self._operations = operations
        self._counts = {_KERNEL: 1}
        self._indexed_by: dict[int, set[int]] = {root: {_KERNEL}}
        self.add(root, operands)

    def add(self, index: int, operands: Iterable[int]) -> None:
        """Counts an operation that is taken in, and the indices at which it reads its operands."""
        operation, indexed_by = self._operations[index], self._indexed_by.pop(index)
        self._counts[index] = sum(self._counts[reader] for reader in indexed_by)
        for o in operands:
            is_same_index = operation.kind == "transpose" or self._operations[o].shape == operation.shape
            self._indexed_by.setdefault(o, set()).update(indexed_by if is_same_index else (index,))

    def is_too_much(self, index: int, n_readers: int) -> bool:
        """Whether an operand, read `n_readers` times in all kernels, would be written too often."""
        operation = self._operations[index]
        if operation.kind == "broadcast":
            return False
        copies = sum(self._counts[reader] for reader in self._indexed_by[index])
        is_block = operation.kind == "reduce" or operation.name in BLOCKS
        return copies > MOST_COPIES or (is_block and (copies > 1 or n_readers > 1))
