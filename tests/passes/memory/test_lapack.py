"""LAPACK's kernels write over copies that lie column after column, with room beside them for all that they make."""

import pytest

from passes.ir import Node, TensorType
from passes.memory import lapack
from passes.memory.operations import Operations


def matrix(*shape: int, dtype: str = "float32") -> TensorType:
    return TensorType(shape=shape, dtype=dtype)


def called(lowering, given: TensorType, results: list[TensorType], **params: object) -> Operations:
    operations = Operations()
    array = operations.add("input", (), given.shape, given.dtype)
    node = Node(primitive="f", inputs=(0,), outputs=tuple(range(1, 1 + len(results))), params=params)
    made = lowering(operations, node, [array], results)
    assert [operations[o].shape for o in made] == [result.shape for result in results]
    return operations


def rooms(operations: Operations) -> list[tuple[int, ...]]:
    return [operation.shape for operation in operations.every if operation.kind == "opaque"]


def test_vectors_have_room_where_values_alone_are_asked_for():
    operations = called(lapack.singular, matrix(6, 4), [matrix(4)], full_matrices=True, compute_uv=False)
    assert rooms(operations) == [(4,), (6, 6), (4, 4)]


def test_vectors_come_column_after_column():
    results = [matrix(4), matrix(6, 4), matrix(4, 4)]
    operations = called(lapack.singular, matrix(6, 4), results, full_matrices=False, compute_uv=True)
    assert rooms(operations) == [(4,), (4, 6), (4, 4)]


@pytest.mark.parametrize(
    ("lowering", "results", "params", "expected"),
    [
        (lapack.symmetric, [matrix(4, 4), matrix(4)], {}, [(4,)]),
        (lapack.triangles, [matrix(4, 4), matrix(4, dtype="int32"), matrix(4, dtype="int32")], {}, [(4,), (4,)]),
        (lapack.schur, [matrix(4, 4), matrix(4, 4)], {}, [(4, 4)]),
        (
            lapack.general,
            [matrix(4, dtype="complex64")],
            {"compute_left_eigenvectors": False, "compute_right_eigenvectors": False},
            [(4,), (4, 4), (4, 4)],
        ),
    ],
)
def test_one_result_replaces_the_copy_and_others_have_rooms(lowering, results, params, expected):
    operations = called(lowering, matrix(4, 4), results, **params)
    assert rooms(operations) == expected
    assert [operation.kind for operation in operations.every].count("update") == 1
