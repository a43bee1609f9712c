"""The order in memory that XLA's GPU compiler gives to the dimensions of what is computed of a product's elements, or
of what is gathered.

A transpose of a product is only read in another order: what follows element by element lies in memory as the product
does. A product that reads it wants the dimensions that it takes for one beside each other and in order; where they are
not, it reads a copy. Scores of attention whose queries share keys are such: their softmax is made once in the order in
which values are weighted, and once more, for the backward pass, in that in which gradients of values are summed.
Products of a batch of one read a view without it, which is copied once for all of them.

A loop stacks what lies in another order as it lies. Another loop that reads the stack, as that of the backward pass
does, reads a copy that lies in order, which is made before it.

What is gathered along a dimension from devices has that slowest, and what is computed of it, too: a residual stream
that begins with gathered embeddings is added up by columns. A product that is added to it writes columns for rows.

A product's own kernel transposes what it makes. The gradient of weights side by side, as those of experts, that is
converted or reduced over devices first is transposed behind that: the update of such weights is made in the order of
the gradient, of arguments that are read in it, and its results are copied to where they belong once all of them are
there.

Reference: XLA's LayoutAssignment, as of jaxlib 0.10.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import cast

from passes.memory.gpu_blocks import ADDED
from passes.memory.gpu_times import COPY
from passes.memory.hoisting import HOISTED
from passes.memory.operations import ELEMENTWISE, Operation, Operations, Shape

STACK, TURNED = "stack", "turned"
"""The name of what writes a result of a loop's body into a stack, and the end of its tag where the stack lies in
another order than its dimensions."""

LIES = "as it lies"
"""The name of another view of an array, its dimensions in the order in which they are in memory."""


def in_order(operations: Operations, stack: int) -> int:
    """The copy of a stack that lies in another order."""
    made = operations[stack]
    return operations.add("rearrange", (stack,), made.shape, made.dtype, (COPY, "stack"))


def copied(operations: Sequence[Operation], outputs: Collection[int] = ()) -> tuple[list[Operation], list[int]]:
    """The operations with copies of what products cannot read as it lies, and of outputs that do not lie in order, and
    the new position of each old one.
    """
    return _Orders(operations, frozenset(outputs)).run()


class _Orders:
    """The dimensions of operations from the slowest in memory to the fastest, where they are not in that order.

    `begun` has the transpose that an order comes from; `laid` are results of products that are copied into the order of
    what is computed from them and from others, `shared` the new positions of copies that several products read.
    """

    def __init__(self, operations: Sequence[Operation], outputs: frozenset[int]) -> None:
        self.operations, self.outputs = operations, outputs
        self.orders: dict[int, Shape] = {}
        self.begun: dict[int, int] = {}
        self.laid: set[int] = set()
        self.shared: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        for index, operation in enumerate(operations):
            for o in set(operation.operands):
                self.readers.setdefault(o, []).append(index)

    def run(self) -> tuple[list[Operation], list[int]]:
        for index, operation in enumerate(self.operations):
            if operation.kind == "transpose":
                self._begin(index)
            elif operation.kind in ELEMENTWISE:
                self._follow(index)
        changed, place = list[Operation](), list[int]()
        laid: dict[int, int] = {}
        for index, operation in enumerate(self.operations):
            reads_order = index in self.orders and operation.kind in ELEMENTWISE
            operands = [laid.get(o, place[o]) if reads_order else place[o] for o in operation.operands]
            moved = operation.reading(tuple(operands))
            (source, *_) = operation.operands or (-1,)
            if source in self.orders and operation.kind == "transpose":
                moved = self._transposed(index, moved, changed)
            elif source in self.orders and operation.kind in ("bitcast", "dot"):
                moved = moved.reading(tuple([self._read(index, o, place, changed) for o in operation.operands]))
            elif operation.name == STACK and self._is_turned(source):
                moved = moved._replace(tag=(*cast("tuple[object, ...]", operation.tag), TURNED))
            elif source in self.orders and operation.kind == "reduce" and operation.name in ADDED:
                moved = self._added(index, moved, changed)
            place.append(len(changed))
            changed.append(moved)
            if index in self.laid:
                laid[index] = len(changed)
                changed.append(_copy(operation, place[index]))
        for outputs in self._returned():
            made = [place[output] for output in outputs]
            for output, at in zip(outputs, made, strict=True):
                place[output] = len(changed)
                changed.append(self.operations[output]._replace(kind="opaque", operands=(at,), tag=(COPY, at)))
        return changed, place

    def _returned(self) -> list[list[int]]:
        """The outputs that lie in another order, those together of which none is copied before all are there: what
        follows from one product is made by one kernel.
        """
        returned: dict[int, list[int]] = {}
        for output in sorted(self.outputs):
            if output in self.orders and self.operations[output].kind in ELEMENTWISE:
                returned.setdefault(self.begun[output], []).append(output)
        return list(returned.values())

    def _begin(self, index: int) -> None:
        """The order of a transpose of what products or devices make side by side, read element by element."""
        operation = self.operations[index]
        order = cast("Shape", operation.tag)
        inverse = tuple(order.index(d) for d in range(len(order)))
        moved = [d for d in inverse if operation.shape[d] > 1]
        fixed = next((n for n, (d, e) in enumerate(zip(moved, sorted(moved), strict=True)) if d != e), len(moved))
        (source,) = operation.operands
        is_gathered = self.operations[source].name == "all_gather" and len(self.readers[source]) == 1
        is_made_so = fixed > 0 and self._product(self._unchanged(source)) >= 0
        if fixed == len(moved) or not (is_gathered or is_made_so):
            return
        if all(self.operations[reader].kind in ELEMENTWISE for reader in self.readers.get(index, ())):
            self.orders[index], self.begun[index] = inverse, index

    def _is_turned(self, index: int) -> bool:
        """Whether what a loop stacks lies in another order: in that of a product, transposed or not."""
        while self.operations[index].is_conversion and index not in self.orders:
            (index,) = self.operations[index].operands
        operation = self.operations[index]
        if operation.kind != "transpose":
            return index in self.orders
        return self._product(self._unchanged(operation.operands[0])) >= 0

    def _is_changed_first(self, alike: Iterable[int]) -> bool:
        """Whether what lies in another order was converted or reduced before it was transposed: else the product's own
        kernel transposes what it makes.
        """
        begun = (self.begun[o] for o in alike if o in self.begun)
        return any(self._product(self.operations[first].operands[0]) < 0 for first in begun)

    def _unchanged(self, index: int) -> int:
        """The operation that one follows from by conversions and all-reduces alone."""
        while (operation := self.operations[index]).is_conversion or operation.name == "all_reduce":
            (index,) = operation.operands
        return index

    def _product(self, index: int) -> int:
        """The product of which an operation is another view, -1 for anything else."""
        while self.operations[index].kind == "bitcast":
            (index,) = self.operations[index].operands
        return index if self.operations[index].kind == "dot" else -1

    def _follow(self, index: int) -> None:
        """The order of an operation on elements: that of its operands, of which products are copied into it."""
        operation = self.operations[index]
        alike = [o for o in operation.operands if self.operations[o].shape == operation.shape]
        orders = {self.orders[o] for o in alike if o in self.orders}
        if len(orders) != 1:
            return
        (order,) = orders
        pending, behind, products = [o for o in alike if o not in self.orders], set[int](), set[int]()
        while pending:
            other = pending.pop()
            described = self.operations[other]
            is_free = described.kind in ("broadcast", "literal", "iota") or described.name == HOISTED
            if is_free or described.shape != operation.shape:
                continue
            if described.kind in ELEMENTWISE or (described.kind, described.name) == ("collective", "all_reduce"):
                behind.add(other)
                pending.extend(o for o in described.operands if o not in behind and o not in self.orders)
            elif self._product(other) >= 0:
                if not _writes(self.operations[self._product(other)].shape, described.shape, order):
                    products.add(other)
            elif described.kind != "input" or not self._is_changed_first(alike):
                return  # it lies as it lies
        self.orders |= dict.fromkeys((index, *behind), order)
        self.begun |= dict.fromkeys((index, *behind), next(self.begun[o] for o in alike if o in self.begun))
        self.laid |= products

    def _transposed(self, index: int, moved: Operation, changed: list[Operation]) -> Operation:
        """A transpose of what lies in an order: another view of it where its products read that, or of its one copy,
        else a copy of its own.
        """
        order = cast("Shape", moved.tag)
        lies = tuple(order.index(d) for d in self.orders[self.operations[index].operands[0]])
        readers, (source,) = self.readers.get(index, ()), self.operations[index].operands
        if all(self._is_read(reader, index, lies) for reader in readers):
            return moved._replace(kind="bitcast")
        in_order = tuple(order.index(d) for d in range(len(order)))
        if self._is_shared(source) and all(self._is_read(reader, index, in_order) for reader in readers):
            return moved._replace(kind="bitcast", operands=(self._copied(source, moved.operands[0], changed),))
        return moved._replace(kind="rearrange", tag=(COPY, order))

    def _is_shared(self, source: int) -> bool:
        """Whether products read one copy of what does not lie in order: a view of it without its dimensions of size 1,
        of which XLA rids products (RemoveDegenerateDimensionFromDot), and which takes the order of the one that reads
        it as it is.
        """
        if 1 not in self.operations[source].shape:
            return False
        plain = [reader for reader in self.readers[source] if self.operations[reader].kind in ("bitcast", "dot")]
        return any(not self._is_read(reader, source, self.orders[source]) for reader in plain)

    def _copied(self, source: int, at: int, changed: list[Operation]) -> int:
        """The new position of the one copy of an operation in order."""
        if source not in self.shared:
            self.shared[source] = len(changed)
            changed.append(_copy(self.operations[source], at))
        return self.shared[source]

    def _added(self, index: int, moved: Operation, changed: list[Operation]) -> Operation:
        """A reduction of what lies in an order, along dimensions as they lie."""
        (source,) = self.operations[index].operands
        read, order = self.operations[source], self.orders[source]
        name, added = cast("tuple[str, Shape]", moved.tag)
        lies = read._replace(
            kind="bitcast", operands=moved.operands, shape=tuple(read.shape[d] for d in order), tag=LIES
        )
        changed.append(lies)
        return moved._replace(operands=(len(changed) - 1,), tag=(name, tuple(sorted(order.index(d) for d in added))))

    def _read(self, reader: int, operand: int, place: Sequence[int], changed: list[Operation]) -> int:
        """The new position of what a product, or another view, reads: a copy if it cannot read it as it lies."""
        order = self.orders.get(operand)
        if order is None or self._is_read(reader, operand, order):
            return place[operand]
        if self._is_shared(operand):
            return self._copied(operand, place[operand], changed)
        changed.append(_copy(self.operations[operand], place[operand]))
        return len(changed) - 1

    def _is_read(self, reader: int, read: int, lies: Shape) -> bool:
        """Whether all products that read an operation, itself or as another view, take it as it lies."""
        operation, shape = self.operations[reader], self.operations[read].shape
        if operation.kind == "bitcast":
            return all(_merges(self.operations, behind, reader, shape, lies) for behind in self.readers.get(reader, ()))
        return _merges(self.operations, reader, read, shape, lies)


def _merges(operations: Sequence[Operation], reader: int, read: int, shape: Shape, lies: Shape) -> bool:
    """Whether a product takes dimensions of a shape, which lie in an order, for its batch, rows and columns."""
    product = operations[reader]
    if (product.kind, product.name) != ("dot", "merged"):
        return False
    *batch, rows, columns = operations[read].shape
    sizes = math.prod(batch), rows, columns
    # A matrix is read by rows or by columns, so that a view of it may name them the other way round.
    sorts = _sorted_by(shape, sizes) or _sorted_by(shape, (math.prod(batch), columns, rows))
    if sorts is None:
        return False
    first, second, third = sorts
    wide = [d for d in lies if shape[d] > 1]
    return wide in ([*first, *second, *third], [*first, *third, *second])


def _writes(product: Shape, shape: Shape, order: Shape) -> bool:
    """Whether the kernel of a product of this shape writes a view of it in an order: its columns for rows."""
    sorts = _sorted_by(shape, product) if len(product) == 2 else None
    return sorts is not None and [d for d in order if shape[d] > 1] == [*sorts[1], *sorts[0]]


def _sorted_by(shape: Shape, sizes: Sequence[int]) -> list[list[int]] | None:
    """The dimensions of a shape that make up each of the sizes in turn, without those of size 1; None where none do."""
    sorts, dims = list[list[int]](), iter([d for d, size in enumerate(shape) if size > 1])
    for size in sizes:
        sort = list[int]()
        while (made := math.prod(shape[d] for d in sort)) < size:
            dim = next(dims, None)
            if dim is None:
                return None
            sort.append(dim)
        if made != size:
            return None
        sorts.append(sort)
    return sorts


def _copy(operation: Operation, at: int) -> Operation:
    """A copy of the operation at a new position, in another order of its dimensions."""
    return operation._replace(kind="rearrange", operands=(at,), tag=(COPY, operation.kind, operation.tag), value=-1)
