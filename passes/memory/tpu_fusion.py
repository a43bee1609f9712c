"""The kernels that XLA's TPU compiler fuses operations into, and hence the arrays that are written to memory.

A product or a convolution takes in whatever lies before it elementwise, and so does every sum: normalisation, softmax
and activations are computed again wherever they are read, forward and backward. It also goes on with what alone follows
from its result, up to the first array whose readers do not come together again: that one is written, in place of the
product, but what only widens it is computed by each of them. So does a gather up to where that is rounded. What has
zeros between its elements is written, and so are images that are joined. What is scattered into an array of one number
is written with that number by one kernel. Where two cores share kernels, what narrows an
array for several of them is written, and so is what narrows what is computed of two products, as in a gated unit.
All-reduces add up in place. What several kernels would read more for than for its result is written as well
(passes/memory/tpu_rereads.py).

Reference: convolution fusions in the HLO that libtpu 0.0.42 makes of transformers; TPU fusion is not published.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

from passes.ir import item_nbytes
from passes.memory import windows
from passes.memory.conversions import narrows, sliced_first, widens
from passes.memory.fusion import Kernel
from passes.memory.gpu_fusion import FUSIBLE, kernels_of
from passes.memory.operations import ELEMENTWISE, Operation
from passes.memory.tpu_rereads import Rereads

GOES_ON = frozenset({*ELEMENTWISE, "bitcast"})
"""Kinds that a product goes on with."""

SEARCHED = 64
"""The operations after a product that are looked at for the one in which they come together again, which bounds the
time of a deep program."""

TAKES_IN = frozenset({*FUSIBLE, "reduce", "dot"}) - {"gather"}
"""Kinds whose kernels compute what they read."""

PLACED_FIRST = frozenset({"update", "gather"})
"""Kinds whose first operand has to be there, and whose others are computed as they are read."""


def fuse(operations: Sequence[Operation], outputs: Iterable[int], *, narrowed: bool = False) -> tuple[Kernel, ...]:
    """The kernels of a program, in the order of its operations, without those that no output needs.

    What several kernels read of an array that is in memory in a wider dtype is written if it shall be `narrowed`.
    """
    returned = frozenset(outputs)
    changed = _rewritten(sliced_first(operations, returned))
    return tuple(_in_place(changed, kernels_of(changed, _Fusion(changed, returned, narrowed=narrowed).written)))


def _in_place(operations: Sequence[Operation], kernels: Iterable[Kernel]) -> Iterator[Kernel]:
    """The kernels, of which all-reduces write their sums over what they read."""
    results: Counter[int] = Counter()
    for kernel in kernels:
        operation = operations[kernel.operation]
        if operation.name != "all_reduce":
            yield kernel
        elif operation.kind == "result":
            (joint,) = operation.operands
            yield replace(kernel, over=operations[joint].operands[results[joint] :][:1])
            results[joint] += 1
        else:
            yield replace(kernel, over=operation.operands)


def _rewritten(operations: Sequence[Operation]) -> list[Operation]:
    """The operations as TPUs have them: the scatter to the choice of each window is one, one that scatters a single
    number into every row compares and selects, what is widened for a gather is so for nothing else, and what is joined
    is read where it was.
    """
    changed = list(operations)
    choices = {rows: choice for choice, rows in windows.sources(operations).items()}
    gathered = {o.operands[0] for o in operations if o.kind == "gather"}
    for index, operation in enumerate(operations):
        operands = operation.operands
        if operation.kind == "update" and operands[-1] in choices:
            image, source = operations[choices[operands[-1]]].operands[0], operations[operands[-1]].operands[0]
            read = (_before(operations, image, "pad"), _before(operations, source, "bitcast"))
            changed[index] = operation._replace(kind="opaque", operands=read)
        elif operation.name == "loop pad" and _spreads(operation):
            changed[index] = operation._replace(kind="opaque")
        elif operation.kind == "opaque" and operation.name == "concatenate":
            changed[index] = operation._replace(kind="rearrange")
        elif operation.kind == "update" and _scatters_numbers(operations, operation):
            changed[index] = operation._replace(kind="elementwise")
        elif operation.kind in ELEMENTWISE and not gathered.isdisjoint(operands):
            narrow = (operations[o].operands[0] if o in gathered and widens(operations, o) else o for o in operands)
            changed[index] = operation._replace(operands=tuple(narrow))
    return changed


def _before(operations: Sequence[Operation], index: int, kind: str) -> int:
    """The operand of an operation if that is of a kind or has its name, else the operation itself."""
    operation = operations[index]
    return operation.operands[0] if kind in (operation.kind, operation.name) else index


def _spreads(operation: Operation) -> bool:
    """Whether a pad puts zeros between elements."""
    _, added = cast("tuple[str, Sequence[tuple[int, int, int]]]", operation.tag)
    return any(between for _, _, between in added)


def _scatters_numbers(operations: Sequence[Operation], operation: Operation) -> bool:
    """Whether a scatter has one number for every row of what it changes."""
    if not operation.name.startswith("scatter") or len(operation.operands) < 3:
        return False
    rows = operations[operation.operands[2]].shape
    sizes = [(row, size) for row, size in zip(rows, operation.shape, strict=False) if row != size]
    return len(rows) == len(operation.shape) and len(sizes) == 1 and sizes[0][0] == 1


def _joins_images(operation: Operation) -> bool:
    """Whether an operation joins images, which convolutions do not take in."""
    return operation.is_image and operation.name == "concatenate"


def is_product(operation: Operation) -> bool:
    """Whether an operation is a matrix product or a convolution."""
    return operation.kind == "dot" or (operation.kind == "opaque" and operation.name == "convolution")


class _Fusion:
    """The readers of each operation and the product that it ends, -1 for none; `written` have a place in memory."""

    def __init__(self, operations: Sequence[Operation], outputs: frozenset[int], *, narrowed: bool) -> None:
        self.operations, self.outputs = operations, outputs
        self.readers: list[list[int]] = [[] for _ in operations]
        needed = bytearray(len(operations))
        for index in reversed(range(len(operations))):
            operation = operations[index]
            if index in outputs or operation.kind == "input" or self.readers[index]:
                needed[index] = True
                for o in dict.fromkeys(operation.operands):
                    self.readers[o].append(index)
        self.products = self._products()
        self.written, self.relaid = bytearray(len(operations)), bytearray(len(operations))
        for i in range(len(operations)):
            self.relaid[i] = self._is_relaid(i)
            self.written[i] = needed[i] and (not self._is_fused(i) or (narrowed and self._is_narrowed(i)))
        Rereads(operations, self.readers, self.written, self.products).settle()

    def _products(self) -> list[int]:
        """The product that each operation goes on with, whose result it alone follows, after any number of steps; or
        the gather, where that ends in a narrower dtype.
        """
        products = [-1] * len(self.operations)
        for index, operation in enumerate(self.operations):
            if not is_product(operation) and operation.kind != "gather":
                continue
            members, end = [index], index
            while (steps := self._next(end)) and all(products[step] < 0 for step in steps):
                members.extend(steps)
                end = steps[-1]
            if is_product(operation) or item_nbytes(self.operations[end].dtype) < item_nbytes(operation.dtype):
                for member in members:
                    products[member] = index
        return products

    def _next(self, index: int) -> list[int]:
        """The operations that a product goes on with after one of its own: the next one that alone follows from it, and
        those between; none where there is no such.
        """
        size, waiting, steps = self.operations[index].size, set(self.readers[index]), list[int]()
        is_flat = not self.operations[index].is_image
        if index in self.outputs:
            return []
        while waiting and len(steps) < SEARCHED:
            step = min(waiting)
            waiting.remove(step)
            operation = self.operations[step]
            if operation.kind not in GOES_ON or operation.size != size or (is_flat and operation.is_image):
                return []
            steps.append(step)
            if not waiting:
                several = len(self.readers[step]) > 1 and widens(self.operations, step)
                return [] if several and not self._next(step) else steps
            if step in self.outputs or not self.readers[step]:
                return []
            waiting.update(self.readers[step])
        return []

    def _is_fused(self, index: int) -> bool:
        operation = self.operations[index]
        if operation.kind == "literal":
            return True
        if index in self.outputs or not self.readers[index] or _joins_images(operation):
            return False
        product = self.products[index]
        if product >= 0:
            readers = self.readers[index]
            if len(readers) == 1 and self.operations[readers[0]].kind == "reduce":
                return True
            return all(self.products[reader] == product for reader in readers)
        return operation.kind in FUSIBLE - {"gather"} and all(self._takes_in(r, index) for r in self.readers[index])

    def _is_relaid(self, index: int) -> bool:
        """Whether an operation computes images with what is in memory in other tiles, as a product has it."""
        operation = self.operations[index]
        if not operation.is_image or operation.kind not in ELEMENTWISE:
            return False
        above = [o for o in operation.operands if self.operations[o].shape == operation.shape]
        others = [o for o in above if not self.operations[o].is_image and self.operations[o].kind != "literal"]
        return bool(others) or any(self.relaid[o] and not self.written[o] for o in above)

    def _is_narrowed(self, index: int) -> bool:
        """Whether several kernels read an operation that alone narrows what another wrote, or what follows from two
        products.
        """
        operation = self.operations[index]
        if not narrows(self.operations, index) or len(self.readers[index]) < 2:
            return False
        wide = self.operations[operation.operands[0]].dtype
        above, seen, products = [operation.operands[0]], set[int](), 0
        while above:
            source = above.pop()
            made = self.operations[source]
            if source in seen or made.size != operation.size:
                continue
            seen.add(source)
            if not self.written[source]:
                above.extend(made.operands if made.kind in FUSIBLE else ())
            elif made.kind != "input" and made.dtype == wide:
                return True
            else:
                products += self.products[source] >= 0
        return products > 1

    def _takes_in(self, reader: int, index: int) -> bool:
        operation = self.operations[reader]
        if operation.kind in PLACED_FIRST:
            return operation.operands[0] != index or self._is_filled_in(reader, index)
        if operation.kind in ("dot", "bitcast") and self.operations[index].is_image:
            return False
        if self.relaid[index] and is_product(operation):
            return False
        return operation.kind in TAKES_IN or is_product(operation)

    def _is_filled_in(self, reader: int, index: int) -> bool:
        """Whether an operation scatters into an array of one number, which its kernel writes as well."""
        blank = self.operations[index]
        if not self.operations[reader].name.startswith("scatter") or blank.kind != "broadcast":
            return False
        return all(self.operations[o].kind == "literal" for o in blank.operands)
