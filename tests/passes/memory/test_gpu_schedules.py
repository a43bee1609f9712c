"""Orders of kernels that XLA's GPU compiler starts from and ends with: laws on random programs, and small examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.gpu_costs import collective_microseconds, microseconds
from passes.memory.gpu_fusion import fuse
from passes.memory.gpu_layouts import viewed
from passes.memory.gpu_schedules import arrays_of, depth_first, greedy, live_nbytes, ordered, post_order, spread
from passes.memory.gpu_tasks import Role, Tasks, tasks_of
from passes.memory.gpu_times import COPY
from passes.memory.operations import Operation
from passes.memory.overlap import schedule
from tests.passes.memory.device_programs import TABLE, drawn, operation, program

SEEDS = range(60)
SQUARE = (1024, 1024)
MATRIX = ("merged", (((1,), (0,)), ((), ())))
GATHER = ("all_gather", ("x",), "", 0, -1)


def kernels_of(described: DeviceProgram) -> list[Kernel]:
    return list(fuse(described.operations, described.outputs))


def is_valid(tasks: Tasks, order: Sequence[int]) -> bool:
    at = {task: position for position, task in enumerate(order)}
    return len(at) == len(tasks) and all(at[r] < at[task] for task in at for r in tasks.reads[task])


@pytest.mark.parametrize("seed", SEEDS)
def test_every_order_runs_all_tasks_behind_what_they_read(seed: int) -> None:
    described = drawn(seed)
    kernels = kernels_of(described)
    tasks = tasks_of(described, kernels)
    arrays = arrays_of(described, kernels, tasks)
    orders = [greedy(described, tasks, arrays), depth_first(tasks, arrays), post_order(tasks)]
    for order in orders:
        assert is_valid(tasks, order)
        assert is_valid(tasks, spread(tasks, order))
    least = min(live_nbytes(tasks, arrays, spread(tasks, order)) for order in orders)
    assert live_nbytes(tasks, arrays, ordered(described, kernels, tasks)) == least


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("hides", [True, False])
def test_a_schedule_has_every_kernel_behind_what_it_reads(seed: int, hides: bool) -> None:
    described = drawn(seed)
    kernels = kernels_of(described)
    order = schedule(described, kernels, hides=hides)
    at = {made: position for position, made in enumerate(order)}
    assert at.keys() == {kernel.operation for kernel in kernels}
    assert all(at[r] < at[kernel.operation] for kernel in kernels for r in kernel.reads)


def test_the_greedy_order_frees_before_it_makes() -> None:
    described = program(
        [
            operation("input", tag=0),
            operation("dot", 0, 0, shape=TABLE),
            operation("reduce", 1, name="reduce-sum"),
            operation("dot", 0, 0, shape=TABLE, name="second"),
            operation("reduce", 3, name="reduce-sum"),
            operation("dot", 2, 4),
        ],
        (5,),
    )
    kernels = kernels_of(described)
    tasks = tasks_of(described, kernels)
    arrays = arrays_of(described, kernels, tasks)
    order = [tasks.operations[task] for task in greedy(described, tasks, arrays) if tasks.operations[task] >= 0]
    assert abs(order.index(1) - order.index(3)) == 2
    nbytes = described.operations[1].nbytes
    assert nbytes < live_nbytes(tasks, arrays, greedy(described, tasks, arrays)) < 2 * nbytes


def test_a_collective_starts_once_it_can_and_ends_when_it_is_read() -> None:
    tasks = Tasks()
    source = tasks.add(0, Role.RUN, ())
    start = tasks.add(1, Role.START, (source,))
    end = tasks.add(1, Role.END, (start,))
    beside = tasks.add(2, Role.RUN, (source,))
    tasks.add(-1, Role.NAME, (end, beside))
    assert spread(tasks, [source, beside, start, end, 4]) == [source, start, beside, end, 4]
    assert spread(tasks, [source, start, end, beside, 4]) == [source, start, beside, end, 4]


def test_a_kernel_that_takes_as_long_as_a_collective_fills_its_time() -> None:
    """Of two products that nothing else waits for, that of the right length stands next to the collective's end."""
    gathered = (2048, 4096)
    every = [
        operation("input", shape=SQUARE, tag=0),
        Operation("collective", (0,), gathered, "float32", -1, tag=GATHER),
        Operation("dot", (1, 1), gathered, "bfloat16", -1, tag=MATRIX),
        Operation("dot", (0, 0), (1024, 1024), "bfloat16", -1, tag=MATRIX),
        Operation("dot", (0, 0), (1024, 65536), "bfloat16", -1, tag=MATRIX),
        operation("opaque", 2, 3, 4, name="join"),
    ]
    described = program(every, (5,))
    kernels = kernels_of(described)
    short, long = (microseconds([kernel], every) for kernel in kernels if kernel.operation in (3, 4))
    moved = every[0].nbytes + every[1].nbytes
    assert abs(collective_microseconds(moved) - short) < abs(collective_microseconds(moved) - long)
    order = schedule(described, kernels)
    assert order == [0, 1, 4, 3, 2, 5]


def test_costs_are_times() -> None:
    every = [
        operation("input", shape=SQUARE, tag=0),
        operation("elementwise", 0, shape=SQUARE, name="add"),
        operation("opaque", 0, shape=SQUARE, tag=("convolution", 0)),
        Operation("dot", (0, 0), SQUARE, "bfloat16", -1, tag=MATRIX),
        Operation("input", (), SQUARE, "bfloat16", -1, tag=1),
        Operation("dot", (4, 4), SQUARE, "float32", -1, tag=MATRIX),
        Operation("dot", (0, 0), SQUARE, "float32", -1, tag=MATRIX),
    ]
    kernels = [Kernel(operation=o, reads=(0,), over=()) for o in (1, 2, 3, 5, 6)]
    loop, library, narrow, widened, wide = (microseconds([kernel], every) for kernel in kernels)
    assert loop == pytest.approx(2 * every[0].nbytes / 3.35e6)
    assert library == 10.0
    assert narrow == pytest.approx(2 * 1024**3 / 5e8)
    assert wide == pytest.approx(6 + 2 * 1024**3 / 2.1e8)
    assert widened > 10 * wide


def test_copies_take_no_time_and_parts_are_all_that_is_read() -> None:
    part = (128, 128)
    every = [
        operation("input", shape=SQUARE, tag=0),
        operation("opaque", 0, shape=SQUARE, tag=(COPY, 0)),
        operation("opaque", 0, shape=part, tag=("slice", 0)),
        Operation("input", (), part, "bfloat16", -1, tag=1),
        Operation("dot", (3, 3), part, "bfloat16", -1, tag=MATRIX),
        operation("elementwise", 0, shape=SQUARE, name="exponential"),
        operation("reduce", 5, shape=SQUARE[1:], tag=("reduce-sum", (0,))),
    ]
    kernels = [Kernel(operation=o, reads=every[o].operands[:1], over=()) for o in (1, 2, 4, 5, 6)]
    copy, cut, short, loop, columns = (microseconds([kernel], every) for kernel in kernels)
    assert copy == 0.01
    assert cut == pytest.approx(2 * every[2].nbytes / 3.35e6)
    assert short == pytest.approx(2 * 128**3 / (1.64e5 * 128))
    assert columns > loop, "few blocks read slowly"
    both = microseconds(kernels[3:], every)
    assert both > columns


@pytest.mark.parametrize("sends", [False, True])
def test_nothing_is_under_way_beside_a_loop_that_sends(sends: bool) -> None:
    every = [
        operation("input", shape=SQUARE, tag=0),
        Operation("collective", (0,), (2048, 4096), "float32", -1, tag=GATHER),
        operation("loop", 0, shape=(0,), tag=7),
        operation("opaque", 1, 2, name="join"),
    ]
    described = replace(program(every, (3,)), sending=frozenset({2} if sends else ()))
    order = schedule(described, [Kernel(operation=o, reads=made.operands, over=()) for o, made in enumerate(every)])
    assert order == ([0, 2, 1, 3] if sends else [0, 1, 2, 3])


def test_products_read_transposed_matrices_as_other_views() -> None:
    """Rows and columns swap for nothing behind the batch; an array in between is brought into one order only."""
    heads = (8, 512, 16, 64)
    every = [
        operation("input", shape=(4, 32, 64), tag=0),
        operation("transpose", 0, shape=(4, 64, 32), tag=(0, 2, 1)),
        Operation("dot", (1, 0), (4, 64, 64), "float32", -1, tag=MATRIX),
        operation("input", shape=heads, tag=1),
        operation("transpose", 3, shape=(8, 16, 512, 64), tag=(0, 2, 1, 3)),
        operation("transpose", 3, shape=(8, 16, 64, 512), tag=(0, 2, 3, 1)),
        Operation("dot", (4, 5), (8, 16, 512, 512), "float32", -1, tag=MATRIX),
    ]
    changed = viewed(every)
    assert [changed[o].kind for o in (1, 4, 5)] == ["bitcast", "transpose", "bitcast"]
    assert changed[5].operands == (4,)
    read_by_a_loop = [*every, operation("elementwise", 1, shape=(4, 64, 32), name="negate")]
    assert viewed(read_by_a_loop)[1].kind == "transpose"


def test_a_products_kernel_transposes_what_it_makes_for_a_collective_alone() -> None:
    every = [
        operation("input", shape=(512, 1024), tag=0),
        operation("dot", 0, 0, shape=SQUARE, tag=MATRIX),
        operation("transpose", 1, shape=SQUARE, tag=(1, 0)),
        Operation("collective", (2,), (128, 1024), "float32", -1, tag=("reduce_scatter", ("x",), "add", -1, 1)),
    ]
    assert viewed(every)[2].kind == "bitcast"
    for reader in (1, 2):
        assert viewed([*every, operation("elementwise", reader, shape=SQUARE, name="negate")])[2].kind == "transpose"


def test_a_scatter_for_a_collective_alone_has_zeros_in_the_collectives_order() -> None:
    every = [
        operation("broadcast", shape=(1024, 64)),
        operation("input", shape=(32, 1), tag=0),
        operation("input", shape=(32, 64), tag=1),
        operation("reduce", 0, 1, 2, shape=(1024, 64), name="scatter-add"),
        operation("transpose", 3, shape=(64, 1024), tag=(1, 0)),
        Operation("collective", (4,), (8, 1024), "float32", -1, tag=("reduce_scatter", ("x",), "add", -1, 0)),
    ]
    assert viewed(every)[4].kind == "bitcast"
    for reader in (3, 4):
        assert (
            viewed([*every, operation("elementwise", reader, shape=(1024, 64), name="negate")])[4].kind == "transpose"
        )


def test_columns_for_rows_of_a_product_are_no_task_and_stand_behind_it() -> None:
    every = [
        operation("input", shape=(512, 1024), tag=0),
        operation("dot", 0, 0, shape=(512, 256), tag=MATRIX),
        operation("bitcast", 1, shape=(256, 512), tag="transposed"),
        operation("collective", 2, shape=(256, 64), tag=("reduce_scatter", ("x",), "add", -1, 1)),
        operation("bitcast", 1, shape=(2, 256, 256)),
        operation("dot", 4, 4, shape=(2, 256, 256), tag=("merged", 1)),
    ]
    described = program(every, (3, 5))
    kernels = [Kernel(operation=o, reads=made.operands, over=()) for o, made in enumerate(every)]
    tasks = tasks_of(described, kernels)
    assert tasks.beside == {1: [2]}
    assert 2 not in tasks.operations
    assert 4 in tasks.operations
    order = schedule(described, kernels)
    assert sorted(order) == list(range(len(every)))
    assert order.index(2) == order.index(1) + 1 < order.index(3)


def test_convolutions_take_images_in_any_order_and_what_is_gathered_once() -> None:
    image, moved = (32, 8, 8, 64), (64, 32, 8, 8)
    convolution = ("convolution", 0)
    every = [
        operation("input", shape=image, tag=0),
        operation("transpose", 0, shape=(64, 8, 8, 32), tag=(3, 1, 2, 0)),
        operation("opaque", 1, 1, shape=image, tag=convolution),
        Operation("collective", (0,), moved, "float32", -1, tag=GATHER),
        operation("transpose", 3, shape=image, tag=(1, 2, 3, 0)),
        operation("transpose", 3, shape=(64, 8, 8, 32), tag=(0, 2, 3, 1)),
        operation("opaque", 4, 5, shape=image, tag=convolution),
    ]
    changed = viewed(every)
    assert [changed[o].kind for o in (1, 4, 5)] == ["bitcast", "transpose", "bitcast"]
    assert changed[5].operands == (4,)


@pytest.mark.parametrize(("name", "behind"), [("barrier", 2), ("join", 1)])
def test_what_nothing_waits_for_finds_room_at_a_barrier(name: str, behind: int) -> None:
    """What passes one waits for a moment as behind a kernel, though a barrier takes no time."""
    every = [
        operation("input", shape=SQUARE, tag=0),
        Operation("collective", (0,), SQUARE, "float32", -1, tag=GATHER),
        operation("elementwise", 1, shape=SQUARE, name="exponential"),
        operation("opaque", 2, shape=(0,), name=name),
        operation("part", 1, 3, shape=SQUARE, name="barrier"),
        *(operation("opaque", 0, shape=SQUARE, tag=("alone", n)) for n in range(40)),
        operation("opaque", 4, *range(5, 45), name="join"),
    ]
    described = program(every, (45,))
    order = schedule(described, kernels_of(described))
    assert sum(5 <= o < 45 for o in order[order.index(2) :]) == behind
