"""The copies that XLA's TPU compiler makes of arguments and results where kernels want them in another layout.

An argument lies so that its tiles are padded as little as can be. A convolution reads images in tiles of batch and
features, whatever that pads. What is gathered from or scattered into has its rows in whole tiles, and so has what is
computed of it element by element, unless that pads too much: an argument that this reads is copied into rows, and a
result is copied back.

Reference: layouts and copies in the HLO that libtpu 0.0.42 makes of AlexNet, Wide-ResNet and DLRM.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from passes.memory.all_reduces import in_order
from passes.memory.operations import ELEMENTWISE, Operation, Shape
from passes.memory.tpu_layouts import in_tiles, nbytes

MOVED = frozenset({"transpose", "bitcast"})
"""Kinds that a convolution reads through."""

KEEPING = frozenset({*ELEMENTWISE, "collective"})
"""Kinds that leave an array in the tiles in which they read it."""

FOLLOWING = frozenset({*ELEMENTWISE, "broadcast"})
"""Kinds whose results are made in the tiles in which they are read."""

MOST_PADDED = 16
"""The times its bytes that rows of whole tiles of all that is computed of a scattered array may take together for that
to lie so as well: libtpu 0.0.42 kept up to 16 (SGD with rows of 16 numbers, AdaGrad and sums of moments of 64) and
copied back from 18 on (Adam with rows of 64, momentum of 16)."""


def copied(operations: Sequence[Operation], outputs: Iterable[int]) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with the copies, in a valid order, and the new position of each old one: of an output in rows,
    that of its copy.
    """
    changed = list(operations)
    _copy_images(changed)
    _copy_tables(changed, frozenset(outputs))
    return in_order(operations, changed)


def _copy(changed: list[Operation], source: int, shape: Shape) -> int:
    """Adds a copy of an operation in a layout of which `shape` has the padding."""
    changed.append(changed[source]._replace(kind="opaque", operands=(source,), shape=shape, tag=("copy", source)))
    return len(changed) - 1


def _copy_images(changed: list[Operation]) -> None:
    """Has convolutions read copies of arguments that lie in other tiles."""
    copies: dict[int, int] = {}
    for index, operation in enumerate(tuple(changed)):
        if operation.kind != "opaque" or operation.name != "convolution":
            continue
        read = operation.operands[0]
        source = changed[read].operands[0] if changed[read].kind in MOVED else read
        image = changed[source]
        given = changed[image.operands[0]] if image.is_conversion else image
        if given.kind != "input" or len(image.shape) != len(operation.shape):
            continue
        first, *between, last = changed[read].shape
        shape = min(
            ((*between, *in_tiles(first, last)), (*between, *in_tiles(last, first))),
            key=lambda padded: nbytes(padded, image.dtype),
        )
        if nbytes(shape, image.dtype) > nbytes(image.shape, image.dtype):
            copies[source] = copies[source] if source in copies else _copy(changed, source, shape)
            changed[index] = operation.reading((copies[source], *operation.operands[1:]))


def _copy_tables(changed: list[Operation], outputs: frozenset[int]) -> None:
    """Has gathers and what lies in rows read copies of what lies otherwise, and others copies of what lies in rows."""
    operations = tuple(changed)
    going_on = _going_on(operations)
    rows = _in_rows(operations, going_on)
    copies: dict[int, int] = {}
    for index, operation in enumerate(operations):
        operands = list(operation.operands)
        for position, o in enumerate(operands):
            is_table = operation.kind == "gather" and position == 0 and _is_padded(operations[o])
            is_beside = index in rows and operations[o].shape == operation.shape
            if o not in rows and (is_table or is_beside):
                copies[o] = copies[o] if o in copies else _copy(changed, o, _rows(operations[o].shape))
                operands[position] = copies[o]
        changed[index] = operation.reading(tuple(operands))
    for index in rows:
        changed[index] = changed[index]._replace(shape=_rows(operations[index].shape))
    for index in sorted(rows):
        if index not in going_on and _scatters_rows(operations, operations[index]):
            _copy_back(changed, index, operations[index].shape, rows=frozenset())
        elif index in outputs:
            _copy_back(changed, index, operations[index].shape, rows=rows)


def _copy_back(changed: list[Operation], made: int, shape: Shape, rows: Collection[int]) -> None:
    """Puts a copy of a result in rows in its place; those in `rows` read the result itself, and all others the copy."""
    changed.append(changed[made])
    moved = len(changed) - 1
    for index in rows:
        operation = changed[index]
        if made in operation.operands:
            changed[index] = operation.reading(tuple(moved if o == made else o for o in operation.operands))
    changed[made] = changed[made]._replace(kind="opaque", operands=(moved,), shape=shape, tag=("copy", moved))


def _in_rows(operations: Sequence[Operation], going_on: Collection[int]) -> set[int]:
    """The operations whose rows fill whole tiles though that pads them: scattered arrays, and what goes with them."""
    rows: set[int] = set()
    for index, operation in enumerate(operations):
        above = [o for o in operation.operands if operations[o].shape == operation.shape]
        follows = index in going_on and not rows.isdisjoint(above)
        if not (follows or _scatters_rows(operations, operation)) or not _is_padded(operation):
            continue
        rows.add(index)
        while above:
            o = above.pop()
            if o not in rows and operations[o].kind in FOLLOWING:
                rows.add(o)
                above.extend(p for p in operations[o].operands if operations[p].shape == operation.shape)
    return rows


def _going_on(operations: Sequence[Operation]) -> set[int]:
    """The scattered arrays of which all that is computed lies in rows, and what that is."""
    readers: dict[int, list[int]] = {}
    for index, operation in enumerate(operations):
        for o in dict.fromkeys(operation.operands):
            readers.setdefault(o, []).append(index)
    going_on: set[int] = set()
    for index, operation in enumerate(operations):
        if not _scatters_rows(operations, operation):
            continue
        follow = [index]
        for made in follow:
            near = (r for r in readers.get(made, ()) if operations[r].kind in KEEPING and r not in follow)
            follow.extend(r for r in near if operations[r].shape == operation.shape)
        computed = sum(operations[o].kind in ELEMENTWISE for o in follow)
        if computed * math.prod(_rows(operation.shape)) <= MOST_PADDED * operation.size:
            going_on.update(follow)
    return going_on


def _scatters_rows(operations: Sequence[Operation], operation: Operation) -> bool:
    """Whether an operation scatters whole rows."""
    if operation.kind != "update" or not operation.name.startswith("scatter") or len(operation.operands) < 3:
        return False
    return operations[operation.operands[2]].shape[-1:] == operation.shape[-1:]


def _is_padded(operation: Operation) -> bool:
    """Whether an array takes more bytes with its rows in whole tiles."""
    shape = operation.shape
    return len(shape) > 1 and nbytes(_rows(shape), operation.dtype) > nbytes(shape, operation.dtype)


def _rows(shape: Shape) -> Shape:
    return (*shape[:-1], in_tiles(1, shape[-1])[1])
