"""Arrays with zeros around them and joined arrays, as XLA's operations."""

from __future__ import annotations

import pytest

from passes.ir import Node, TensorType
from passes.memory.operations import Operation, Operations
from passes.memory.pads_and_joins import FUSED_JOINS, ROW_ELEMENTS, joined_by_copies, padded, parts_of_joined

SHAPE = (8, 1, 4)


def grown(config: tuple[tuple[int, int, int], ...]) -> tuple[Operation, ...]:
    """The operations that zeros so (before, after, between) along each dimension add."""
    operations = Operations()
    array, zero = operations.add("input", (), SHAPE, "float32"), operations.literal(0.0, "float32")
    shape = tuple(n + low + high + (n - 1) * between for n, (low, high, between) in zip(SHAPE, config, strict=True))
    node = Node(primitive="pad", inputs=(0, 1), outputs=(2,), params={"padding_config": config})
    (result,) = padded(operations, node, (array, zero), [TensorType(shape=shape, dtype="float32")])
    assert operations[result].shape == shape
    return tuple(operations.every[2:])


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (((0, 0, 0), (0, 0, 0), (0, 0, 0)), []),
        (((1, 2, 0), (0, 0, 0), (0, 0, 0)), ["pad"]),
        (((0, 0, 1), (0, 0, 0), (0, 0, 0)), ["loop pad"]),
        (((0, 0, 0), (0, 3, 0), (0, 0, 0)), ["loop pad"]),
        (((-1, -2, 0), (0, 0, 0), (0, 0, 0)), ["slice"]),
        (((-1, 2, 0), (0, 0, 0), (0, 1, 0)), ["pad", "slice"]),
    ],
)
def test_zeros_are_padded_and_less_than_none_is_a_slice(config: tuple[tuple[int, int, int], ...], names: list[str]):
    assert [added.name for added in grown(config)] == names


@pytest.mark.parametrize(
    ("count", "row", "dimension", "kind"),
    [
        (2, ROW_ELEMENTS - 2, 1, "rearrange"),
        (2, ROW_ELEMENTS, 1, "opaque"),
        (2, ROW_ELEMENTS, 0, "rearrange"),
        (FUSED_JOINS, 8, 0, "rearrange"),
        (FUSED_JOINS + 1, 9, 0, "opaque"),
    ],
)
def test_many_arrays_and_long_rows_are_copied(count: int, row: int, dimension: int, kind: str):
    for compiler, expected in (("cpu", kind), ("gpu", "rearrange")):
        operations = Operations(compiler=compiler)
        parts = [operations.add("input", (), (4, row), "float32", number) for number in range(count)]
        assert operations[joined_by_copies(operations, parts, (4, row), "float32", dimension, count)].kind == expected


@pytest.mark.parametrize(
    ("params", "widths", "taken"),
    [
        ({"sizes": (3, 5), "axis": 1}, (3, 5), {0: 0, 1: 1}),
        ({"sizes": (5, 3), "axis": 1}, (5, 3), {}),
        ({"sizes": (4, 4), "axis": 0}, (8, 8), {}),
        ({"start_indices": (0, 3), "limit_indices": (4, 8), "strides": None}, (5,), {0: 1}),
        ({"start_indices": (0, 3), "limit_indices": (4, 7), "strides": None}, (4,), {}),
        ({"start_indices": (0, 3), "limit_indices": (4, 8), "strides": (1, 2)}, (3,), {}),
    ],
)
def test_a_slice_of_joined_arrays_that_is_one_of_them_is_that(
    params: dict[str, object], widths: tuple[int, ...], taken: dict[int, int]
):
    operations = Operations()
    halves = [operations.add("input", (), (4, width), "float32", width) for width in (3, 5)]
    joined = joined_by_copies(operations, halves, (4, 8), "float32", 1, 2)
    results = [TensorType(shape=(4, width), dtype="float32") for width in widths]
    node = Node(primitive="slice", inputs=(0,), outputs=tuple(range(1, 1 + len(widths))), params=params)
    assert parts_of_joined(operations, node, joined, results) == {i: halves[part] for i, part in taken.items()}
