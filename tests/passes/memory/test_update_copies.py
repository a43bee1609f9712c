"""Updates write over copies where what they change may be read by a kernel that comes later."""

import pytest

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import fuse
from passes.memory.operations import Operation
from passes.memory.update_copies import with_copies

ROWS, COLUMNS = 8, 4


def operation(kind, operands=(), shape=(ROWS, COLUMNS), tag=None) -> Operation:
    return Operation(kind, tuple(operands), shape, "float32", -1, tag=tag)


def program(*operations: Operation, outputs: tuple[int, ...]) -> DeviceProgram:
    return DeviceProgram(operations=operations, inputs=(0,), constants=(), outputs=outputs)


def copies(before: DeviceProgram) -> list[Operation]:
    after, kernels = with_copies(before, fuse(before.operations, before.outputs))
    added = after.operations[len(before.operations) :]
    assert {kernel.operation for kernel in kernels} >= set(range(len(before.operations), len(after.operations)))
    return list(added)


@pytest.mark.parametrize("scatters", [1, 2, 3])
def test_each_scatter_onto_shared_zeros_has_a_copy(scatters: int) -> None:
    rows, zero, zeros = (
        operation("input"),
        operation("literal", shape=(), tag=("float", 0.0)),
        operation("opaque", (0,)),
    )
    updates = [operation("update", (2, 0), tag=("scatter-add", n)) for n in range(scatters)]
    sum_of = operation("opaque", range(3, 3 + scatters))
    made = copies(program(rows, zero, zeros, *updates, sum_of, outputs=(3 + scatters,)))
    assert [copy.operands for copy in made] == [(2,)] * (scatters if scatters > 1 else 0)


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_reader_that_the_update_needs_comes_before_it(is_needed: bool) -> None:
    reader = operation("opaque", (1,), tag="reads")
    update = operation("update", (1, 2 if is_needed else 0), tag=("scatter-add", 0))
    made = copies(program(operation("input"), operation("opaque", (0,)), reader, update, outputs=(2, 3)))
    assert len(made) == (0 if is_needed else 1)
