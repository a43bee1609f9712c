"""Products of one array on GPUs: queries, keys and values are slices of one."""

from __future__ import annotations

import pytest

from passes.memory.gpu_joint_products import joint
from passes.memory.operations import Operation
from tests.passes.memory.device_programs import operation

MERGED = ("merged",)
ROWS, INNER = 64, 96


def projections(columns: int, count: int = 3, rows: int = ROWS) -> list[Operation]:
    """Products of one array with weights of so many columns."""
    rows_of_one = operation("input", shape=(rows, INNER), tag=0)
    weights = [operation("input", shape=(INNER, columns), tag=tag) for tag in range(1, count + 1)]
    dots = [operation("dot", 0, at, shape=(rows, columns), tag=MERGED) for at in range(1, count + 1)]
    return [rows_of_one, *weights, *dots]


@pytest.mark.parametrize(("columns", "is_joined_first"), [(64, False), (48, True)])
def test_products_of_one_array_are_slices_of_one(columns: int, is_joined_first: bool) -> None:
    operations, place = joint(projections(columns))
    slices = [operations[place[index]] for index in (4, 5, 6)]
    assert [(s.kind, s.name, s.shape) for s in slices] == [("rearrange", "slice", (ROWS, columns))] * 3
    ((product,),) = {s.operands for s in slices}
    assert operations[product].shape == (ROWS, 3 * columns)
    common, *others = operations[product].operands
    assert common == place[0]
    if is_joined_first:
        (joined,) = others
        assert operations[joined].shape == (INNER, 3 * columns)
        others = list(operations[joined].operands)
    assert others == [place[1], place[2], place[3]]


def test_gradients_of_weights_share_what_is_on_the_other_side() -> None:
    columns = (((0,), (0,)), ((), ()))
    every = [
        *(operation("input", shape=(ROWS, INNER), tag=tag) for tag in range(3)),
        operation("dot", 1, 0, shape=(INNER, INNER), tag=columns),
        operation("dot", 2, 0, shape=(INNER, INNER), tag=columns),
    ]
    operations, place = joint(every)
    (product,) = operations[place[3]].operands
    assert operations[product].shape == (2 * INNER, INNER)
    assert operations[place[4]].operands == (product,)


def test_a_product_that_waits_for_another_is_not_one_with_it() -> None:
    every = projections(INNER, 1, INNER)
    every = [*every, operation("dot", 0, 2, shape=(INNER, INNER), tag=MERGED)]
    assert joint(every) == (tuple(every), (0, 1, 2, 3))


@pytest.mark.parametrize(("columns", "is_joined"), [(3 * 2**10, True), (2**12, False)])
def test_large_products_are_left_alone(columns: int, is_joined: bool) -> None:
    """Products of 51 and 67 MiB, beside what they read."""
    every = projections(columns, rows=2**12)
    assert (joint(every) != (tuple(every), tuple(range(7)))) == is_joined
