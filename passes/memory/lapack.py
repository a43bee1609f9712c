"""The operations of factorisations as XLA's CPU compiler has LAPACK compute them.

LAPACK takes matrices column after column, and most of its kernels write over what they are given: that is copied into
such an order, and what comes out is copied back. What a kernel writes beside the results that are asked for is there
for as long as it runs. Results are checked: a matrix that has no factorisation gives NaN everywhere.

Reference: jaxlib/cpu/lapack_kernels.cc and jax/_src/lax/linalg.py, as of jax 0.10.
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.ir import Node, TensorType
from passes.memory.operations import Operations, Shape


def solved(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operation of a triangular solve, in the place of the right-hand side."""
    matrix, right = (_by_columns(operations, operand) for operand in operands)
    return [_by_columns(operations, _in_place(operations, right, "trsm", matrix))]


def orthogonal(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operations of a QR factorisation: reflectors replace a copy; R is cut out of it, Q takes another copy."""
    columns, triangle = results
    packed = _in_place(operations, _by_columns(operations, operands[0]), "geqrf")
    room = operations.add("opaque", (packed,), _turned(columns.shape), columns.dtype, ("reflectors", operations.at))
    factored = _by_columns(operations, _in_place(operations, room, "orgqr"))
    tag = ("triangle", operations.at)
    return [factored, operations.add("rearrange", (packed,), triangle.shape, triangle.dtype, tag)]


def cholesky(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operations of a Cholesky factorisation in a copy."""
    return [_checked(operations, _in_place(operations, _by_columns(operations, operands[0]), "potrf"))]


def triangles(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operations of an LU factorisation in a copy: the matrix of both triangles, pivots, and their permutation."""
    _, pivots, permutation = results
    packed, swaps = _called(operations, operands[0], "getrf", [pivots])
    order = operations.add("opaque", (swaps,), permutation.shape, permutation.dtype, ("swapped", operations.at))
    return [_checked(operations, packed), swaps, order]


def singular(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operations of a singular value decomposition: values, and vectors if they are asked for.

    Room for vectors is there also where they are not.
    """
    *batch, rows, columns = operations[operands[0]].shape
    least = min(rows, columns)
    is_full = bool(node.params["full_matrices"])
    dtype = operations[operands[0]].dtype
    of_rows = TensorType(shape=(*batch, rows if is_full else least, rows), dtype=dtype)
    of_columns = TensorType(shape=(*batch, columns, columns if is_full else least), dtype=dtype)
    _, values, *vectors = _called(operations, operands[0], "gesdd", [results[0], of_rows, of_columns])
    checked = [_mask(operations, values)]
    return checked + [_checked(operations, each) for each in vectors] if node.params["compute_uv"] else checked


def symmetric(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operations of the eigenvectors and eigenvalues of symmetric matrices; the vectors replace a copy."""
    vectors, values = _called(operations, operands[0], "syevd", results[1:])
    return [_checked(operations, vectors), _mask(operations, values)]


def general(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operations of eigenvalues and, if they are asked for, of left and right eigenvectors.

    Room for vectors is there also where they are not.
    """
    vectors = TensorType(shape=operations[operands[0]].shape, dtype=results[0].dtype)
    _, values, *both = _called(operations, operands[0], "geev", [results[0], vectors, vectors])
    names = ("compute_left_eigenvectors", "compute_right_eigenvectors")
    kept = [each for each, name in zip(both, names, strict=True) if node.params[name]]
    return [_mask(operations, values), *(_checked(operations, each) for each in kept)]


def schur(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operations of a Schur form in a copy, and of its vectors."""
    made = _called(operations, operands[0], "gees", [TensorType(shape=results[0].shape, dtype=results[0].dtype)])
    return [_checked(operations, each) for each in made[: len(results)]]


def _called(operations: Operations, operand: int, name: str, beside: Sequence[TensorType]) -> list[int]:
    """The operations of a kernel that writes over a copy of matrices and into rooms `beside` it, which are all there
    until it ends; matrices come column after column.
    """
    packed = _in_place(operations, _by_columns(operations, operand), name)
    rooms = [
        operations.add("opaque", (packed,), type.shape, type.dtype, (name, operations.at, number))
        for number, type in enumerate(beside)
    ]
    return [
        operations.add(
            "part", (room, *rooms), operations[room].shape, operations[room].dtype, (name, operations.at, number)
        )
        for number, room in enumerate((packed, *rooms))
    ]


def _turned(shape: Shape) -> Shape:
    """The shape of matrices that are written column after column."""
    return (*shape[:-2], shape[-1], shape[-2])


def _by_columns(operations: Operations, operand: int) -> int:
    """The operation of matrices in LAPACK's order, column after column, or of such matrices row after row."""
    rank = len(operations[operand].shape)
    return operations.transpose(operand, (*range(rank - 2), rank - 1, rank - 2))


def _mask(operations: Operations, factored: int) -> int:
    """The operation that gives NaN where there is no factorisation."""
    made = operations[factored]
    return operations.elementwise("checked", (factored,), TensorType(shape=made.shape, dtype=made.dtype))


def _checked(operations: Operations, factored: int) -> int:
    """The operation of what LAPACK wrote column after column, checked, row after row."""
    return _by_columns(operations, _mask(operations, factored))


def _in_place(operations: Operations, room: int, name: str, *operands: int) -> int:
    """The operation that a kernel writes over `room`, or over a copy of an argument under another name."""
    target = operations[room]
    source = target.operands[0] if target.kind == "bitcast" else room
    if operations[source].kind == "input":
        room = operations.add("opaque", (room,), target.shape, target.dtype, ("copy", operations.at))
    return operations.add("update", (room, *operands), target.shape, target.dtype, (name, operations.at))
