"""The kernels of the library that XLA's CPU compiler hands sums and maxima to, with the operations around them.

Every large sum or maximum takes in what it alone reads, products of matrices too, and what alone reads it. Long ones
that the library does not have are cut into windows.

Reference: xla/backends/cpu/transforms/library_rewriter.cc and xla/backends/cpu/ynn_support.cc, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from passes.memory.kernel_graph import Graph, list_reader, unlist_reader
from passes.memory.operations import ELEMENTWISE

ELEMENTS = 4096
"""Elements from which XLA's CPU compiler hands a group of operations to its library of kernels, as of jaxlib 0.10."""

DTYPES = frozenset({"float32", "float64"})
OPCODES = frozenset(
    "abs add ceil cosine divide erf exponential exponential-minus-one floor log log-plus-one maximum minimum multiply "
    "negate power round rsqrt sign sine sqrt square subtract tan tanh".split()
)
SHAPES = frozenset({"bitcast", "broadcast", "iota"})
WINDOW = 32
"""Elements along a dimension beyond which XLA's CPU compiler reduces in windows first, as of jaxlib 0.10."""


class Library:
    """The kernels of XLA's library: sums and maxima with what they alone read, and what alone reads them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def run(self) -> None:
        """Fuses sums and maxima with the operations around them."""
        for index in reversed(range(len(self.graph.operations))):
            may_grow = self.graph.alive[index] and self.graph.flexible[index]
            if self.graph.kinds[index] == "reduce" and may_grow and self._large(index):
                self._grow(index)

    def _grow(self, index: int) -> None:
        members, root, changed = {index}, index, True
        outside = dict[int, None](dict.fromkeys(self.graph.reads[index]))
        while changed:
            changed = False
            for member in sorted(members, reverse=True):
                for o in self.graph.reads[member]:
                    is_inside = members.issuperset(self.graph.readers[o])
                    if o not in members and is_inside and (self._supported(o) or self._is_product(o)):
                        members.add(o)
                        del outside[o]
                        outside |= dict.fromkeys(below for below in self.graph.reads[o] if below not in members)
                        changed = True
            if (
                len(self.graph.readers[root]) == 1
                and (reader := min(self.graph.readers[root])) >= 0
                and self._supported(reader)
            ):
                members.add(reader)
                outside |= dict.fromkeys(o for o in self.graph.reads[reader] if o not in members)
                root, changed = reader, True
        n_reads = {o: sum(o in self.graph.reads[m] for m in members) for o in outside}
        over = self._over(members, root, outside)
        for o in outside:
            list_reader(self.graph.readers[o], root)
        for member in sorted(members - {root}, reverse=True):
            for o in self.graph.reads[member]:
                unlist_reader(self.graph.readers[o], member)
            self.graph.alive[member] = False
        self.graph.reads[root], self.graph.n_reads[root] = over, n_reads
        self.graph.flexible[root] = False

    def _over(self, members: set[int], root: int, outside: Iterable[int]) -> dict[int, bool]:
        """Whether elements of the root are computed from those at the same place, for each operand `outside`."""
        pure = set[int]()
        for member in sorted(members, reverse=True):
            readers = [] if member == root else self.graph.readers[member]
            if self.graph.kinds[member] in ELEMENTWISE and pure.issuperset(readers):
                pure.add(member)
        return {o: all(member in pure for member in members if o in self.graph.reads[member]) for o in outside}

    def _supported(self, index: int) -> bool:
        operation = self.graph.operations[index]
        if not self.graph.flexible[index] or not self.graph.alive[index]:
            return False
        if operation.kind in SHAPES:
            return operation.dtype in DTYPES or operation.dtype == "int32"
        if operation.kind == "rearrange":
            return operation.name == "pad"
        if operation.kind == "reduce":
            return self._large(index)
        is_supported_name = operation.name in OPCODES or operation.name.startswith(("power", "convert"))
        return operation.kind in ELEMENTWISE and is_supported_name and self._large(index)

    def _is_product(self, index: int) -> bool:
        """Whether an operation is a matrix product that the library computes where it is reduced."""
        operation = self.graph.operations[index]
        return self.graph.alive[index] and operation.kind == "dot" and self._large(index)

    def _large(self, index: int) -> bool:
        """Whether the library has the types and is worth its overhead."""
        around = (index, *self.graph.operations[index].operands)
        large = max(self.graph.sizes[o] for o in around) >= ELEMENTS
        return large and all(self.graph.operations[o].dtype in DTYPES for o in around)


def cut_in_windows(graph: Graph) -> None:
    """Leaves every long reduction that the library does not have alone, as it is cut into windows, which are not fused.

    Reference: XLA's TreeReductionRewriter, as of jaxlib 0.10.
    """
    for index, operation in enumerate(graph.operations):
        if graph.kinds[index] == "reduce" and graph.flexible[index] and graph.alive[index]:
            _, axes = cast("tuple[str, tuple[int, ...]]", operation.tag)
            shape = graph.operations[operation.operands[0]].shape
            graph.flexible[index] = all(shape[axis] <= WINDOW for axis in axes)
