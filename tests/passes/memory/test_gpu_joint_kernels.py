"""Kernels of XLA's GPU compiler that write several arrays: laws on random programs, and small examples."""

from __future__ import annotations

import pytest

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.gpu_fusion import fuse
from passes.memory.gpu_joint_kernels import OPERANDS
from passes.memory.gpu_schedules import arrays_of, live_nbytes, post_order
from passes.memory.gpu_tasks import at_once, reads_of, tasks_of
from passes.memory.gpu_times import COPY
from passes.memory.liveness import lifetimes
from passes.memory.operations import Operation
from passes.memory.overlap import schedule
from tests.passes.memory.device_programs import TABLE, drawn, operation, program
from tests.passes.memory.gpu_kernels import joint

LOGITS = (4096, 2048)
COLUMNS = ("reduce-sum", (0,))
ROWS = ("reduce-sum", (1,))


def update() -> list[Operation]:
    """Weights and their momentum, updated by a gradient that was reduced over devices."""
    return [
        *(operation("input", shape=TABLE, tag=i) for i in range(3)),
        operation("collective", 2, shape=TABLE, tag=("all_reduce", ("x",), "add")),
        operation("elementwise", 1, 3, shape=TABLE, name="add"),
        operation("elementwise", 0, 4, shape=TABLE, name="subtract"),
    ]


def test_a_joint_kernel_has_as_many_operands_as_any() -> None:
    """Sums of columns of one array, each with another one beside it: no more than a kernel may read and write."""
    arrays = [operation("input", shape=LOGITS, tag=i) for i in range(OPERANDS)]
    every = list(arrays)
    for other in range(1, OPERANDS):
        every.append(operation("elementwise", 0, other, shape=LOGITS, name="multiply"))
        every.append(operation("reduce", len(every) - 1, shape=LOGITS[1:], tag=COLUMNS))
    groups = joint(every, *range(OPERANDS + 1, len(every), 2))
    assert len(groups) > 1
    assert max(map(len, groups)) <= OPERANDS // 2


@pytest.mark.parametrize("seed", range(100))
def test_kernels_that_are_one_do_not_wait_for_each_other(seed: int) -> None:
    described = drawn(seed)
    kernels = fuse(described.operations, described.outputs)
    placed: set[int] = set()
    for group in at_once(kernels):
        assert all(kernel.joint in ((), tuple(k.operation for k in group)) for kernel in group)
        assert placed.issuperset(reads_of(group))
        placed.update(kernel.operation for kernel in group)
    assert placed == {kernel.operation for kernel in kernels}


def test_moments_and_weights_are_written_by_one_kernel() -> None:
    assert joint(update(), 4, 5) == {(4, 5)}
    assert not joint(update(), 5), "the moment is not returned: it is computed where it is read"


def test_a_joint_kernel_is_one_task_and_its_arrays_have_names() -> None:
    described = program(update(), (4, 5))
    kernels = list(fuse(described.operations, described.outputs))
    tasks = tasks_of(described, kernels)
    assert tasks.beside == {4: [5]}
    (name,) = tasks.joint
    arrays = arrays_of(described, kernels, tasks)
    assert arrays.names[name] == (name,)
    assert arrays.made_nbytes[tasks.started(tasks.reads[name][0])] == 2 * described.operations[4].nbytes
    assert live_nbytes(tasks, arrays, post_order(tasks)) == described.operations[4].nbytes
    order = schedule(described, kernels)
    assert order.index(5) == order.index(4) + 1


@pytest.mark.parametrize(("tag", "is_joint"), [(COLUMNS, True), (ROWS, False)])
def test_sums_along_the_same_dimensions_are_one_kernel(tag: object, is_joint: bool) -> None:
    every = [
        *(operation("input", shape=LOGITS, tag=i) for i in range(2)),
        operation("elementwise", 0, 1, shape=LOGITS, name="multiply"),
        operation("reduce", 2, shape=LOGITS[1:], tag=COLUMNS),
        operation("elementwise", 0, shape=LOGITS, name="square"),
        operation("reduce", 4, shape=LOGITS[1:] if is_joint else LOGITS[:1], tag=tag),
    ]
    assert bool(joint(every, 3, 5)) == is_joint


def test_a_reader_of_a_kernels_own_reader_is_another_kernel() -> None:
    every = [
        operation("input", shape=TABLE, tag=0),
        operation("elementwise", 0, 0, shape=TABLE, name="multiply"),
        operation("dot", 1, 1, shape=TABLE, tag=("merged", (((1,), (0,)), ((), ())))),
        operation("elementwise", 0, 2, shape=TABLE, name="add"),
    ]
    assert not joint(every, 1, 3)


def test_parts_of_an_array_that_do_not_overlap_are_cut_by_kernels_of_their_own() -> None:
    half = (TABLE[0], TABLE[1] // 2)
    every = [operation("input", shape=TABLE, tag=0)]
    for side in (0, 1):
        every.append(operation("rearrange", 0, shape=half, tag=("slice", side)))
        every.append(operation("elementwise", len(every) - 1, shape=half, name="negate"))
    assert not joint(every, 2, 4)
    whole = [operation("elementwise", 0, shape=TABLE, name="negate"), operation("elementwise", 5, 0, shape=TABLE)]
    assert joint([*every, *whole], 5, 6) == {(5, 6)}


def test_copies_in_another_order_stay_apart_from_what_is_summed() -> None:
    every = [
        operation("input", shape=LOGITS, tag=0),
        operation("elementwise", 0, shape=LOGITS, name="square"),
        operation("rearrange", 1, shape=LOGITS, name=COPY),
        operation("elementwise", 0, shape=LOGITS, name="cube"),
        operation("reduce", 3, shape=LOGITS[1:], tag=COLUMNS),
    ]
    assert not joint(every, 2, 4)


@pytest.mark.parametrize("name", ["negate", COPY])
def test_a_transposing_kernel_is_not_joint_with_a_sum(name: str) -> None:
    """A gradient of scores that is summed, and multiplied: written in the order of the scores, if it lies otherwise."""
    kind = "rearrange" if name == COPY else "elementwise"
    every = [
        Operation("input", (), LOGITS, "bfloat16", -1, tag=0),
        Operation(kind, (0,), LOGITS, "bfloat16", -1, tag=(name, (1, 0))),
        Operation("elementwise", (1,), LOGITS, "float32", -1, tag="convert bfloat16"),
        operation("reduce", 2, shape=LOGITS[:1], tag=ROWS),
        operation("dot", 2, 2, shape=(LOGITS[1], LOGITS[1]), tag=("merged",)),
    ]
    assert ((2, 3) in joint(every, 3, 4)) == (name != COPY)


def test_operands_of_a_joint_kernel_live_until_all_of_it_is_written() -> None:
    every = [
        operation("input", shape=TABLE, tag=0),
        operation("dot", 0, 0, shape=TABLE, tag=("merged", (((1,), (0,)), ((), ())))),
        operation("elementwise", 1, shape=TABLE, name="negate"),
        operation("reduce", 1, shape=TABLE[1:], tag=COLUMNS),
        operation("dot", 2, 3, shape=TABLE, tag=("merged", (((1,), (0,)), ((), ())))),
    ]
    described = DeviceProgram(operations=tuple(every), inputs=(0,), constants=(), outputs=(4,))
    one = {2: (2, 3), 3: (2, 3)}
    reads = {1: (0,), 2: (1,), 3: (1,), 4: (2, 3)}
    over = {2: (1,)}
    kernels = [
        Kernel(operation=o, reads=reads.get(o, ()), over=over.get(o, ()), joint=one.get(o, ())) for o in range(5)
    ]
    alive = lifetimes(described, kernels, {}, [0, 1, 2, 3, 4])
    spans = {buffer.operations: (buffer.first, buffer.last) for buffer in alive.buffers}
    assert spans[1,] == (1, 3), "a sum reads all of it: nothing is written over it"
    assert spans[2,] == (2, 4)
    assert spans[3,] == (2, 4)


@pytest.mark.parametrize(("side", "is_joint"), [(64, False), (8, True)])
def test_kernels_that_transpose_alike_by_tiles_are_joint(side: int, is_joint: bool) -> None:
    """Weights that are rounded and turned for a product, and updated by a gradient that lies in the product's order."""
    shape, turned = (1024, side), (side, 1024)
    every = [
        operation("input", shape=shape, tag=0),
        operation("input", shape=turned, tag=1),
        Operation("elementwise", (0,), shape, "bfloat16", -1, tag="convert float32"),
        Operation("transpose", (2,), turned, "bfloat16", -1, tag=(1, 0)),
        operation("transpose", 1, shape=shape, tag=(1, 0)),
        operation("elementwise", 0, 4, shape=shape, name="add"),
        operation("elementwise", 0, 5, shape=shape, name="multiply"),
        operation("elementwise", 0, 4, shape=shape, name="subtract"),
    ]
    assert ((3, 5, 7) in joint(every, 3, 5, 7)) == is_joint
    assert ((5, 7) in joint(every, 3, 5, 7)) != is_joint
