"""XLA's GPU compiler: products in parts as it splits them, what it combines, what it fuses and when kernels run."""

from __future__ import annotations

import pytest

from passes.cluster import parse_cluster
from passes.memory import xla, xla_cpu, xla_gpu, xla_tpu
from passes.memory.accounting import model_of
from passes.memory.all_reduces import combined
from passes.memory.device_program import DeviceProgram
from passes.memory.gpu_collectives import COMBINED_NBYTES, with_combined
from passes.memory.gpu_fusion import FUSIBLE, fuse
from passes.memory.gpu_joint_kernels import OPERANDS
from passes.memory.liveness import lifetimes
from passes.memory.operations import Operation
from passes.memory.overlap import schedule
from passes.memory.reassociation import reassociated
from passes.memory.split_products import WEIGHTS, split
from passes.memory.xla_cpu import temporaries
from passes.placement import resharding_plan
from tests.passes.intra_op.small_step import GRAPH, GROUPING, MESH, RESHARDER, whole
from tests.passes.memory.device_programs import TABLE, drawn, inside, operation
from tests.passes.memory.gpu_kernels import MATRIX, combined_when_fused, kernels_of

SEEDS = range(100)

SPLITS = {
    "h100": {
        (128, 128, 384): 4,
        (128, 128, 512): 4,
        (128, 512, 128): 16,
        (128, 128, 128): 8,
        (1024, 4096, 1024): 2,
        (1024, 1024, 3072): 1,
        (1024, 1024, 4096): 1,
    }
}
"""Rows, contracted elements and columns of a bfloat16 product -> its parts, as jax-cuda12-pjrt 0.10.2 compiles it."""


@pytest.mark.parametrize("device", SPLITS)
def test_products_are_split_as_the_compiler_splits_them(device: str) -> None:
    for (rows, inner, columns), parts in SPLITS[device].items():
        shapes = (rows, inner), (inner, columns), (rows, columns)
        halves = [Operation("input", (), shape, "bfloat16", -1, tag=i) for i, shape in enumerate(shapes[:2])]
        product = Operation("dot", (0, 1), shapes[2], "bfloat16", -1, tag=MATRIX)
        changed, place = split([*halves, product], WEIGHTS[device])
        whole = (parts, rows, columns) if parts > 1 else (rows, columns)
        assert changed[2].shape == whole
        assert changed[2].dtype == ("float32" if parts > 1 else "bfloat16")
        assert (changed[place[2]].shape, changed[place[2]].dtype) == (shapes[2], "bfloat16")


@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_read_what_is_in_memory_and_run_after_it(seed: int) -> None:
    program = drawn(seed)
    kernels = kernels_of(program)
    assert set(program.outputs) <= kernels.keys()
    for kernel in kernels.values():
        assert set(kernel.reads) <= kernels.keys()
        assert set(kernel.over) <= set(kernel.reads)
    order = schedule(program, list(kernels.values()))
    assert sorted(order) == sorted(kernels)
    at = {operation: position for position, operation in enumerate(order)}
    assert all(at[read] < at[kernel.operation] for kernel in kernels.values() for read in kernel.reads)


@pytest.mark.parametrize("seed", SEEDS)
def test_only_what_can_be_computed_again_is_not_written(seed: int) -> None:
    program = drawn(seed)
    for kernel in kernels_of(program).values():
        computed, met = inside(kernel, program.operations)
        assert met == set(kernel.reads)
        assert {program.operations[one].kind for one in computed - {kernel.operation}} <= FUSIBLE


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_read_after_it_was_written_over(seed: int) -> None:
    program = drawn(seed)
    kernels = kernels_of(program)
    alive = lifetimes(program, list(kernels.values()), {}, schedule(program, list(kernels.values())))
    at = {operation: position for position, operation in enumerate(alive.order)}
    for buffer in alive.buffers:
        written = sorted(at[o] for o in buffer.operations)
        for before, after in zip(buffer.operations, buffer.operations[1:], strict=False):
            readers = [at[reader] for reader in alive.readers.get(before, ())]
            assert all(reader <= at[after] or alive.order[reader] in kernels[after].joint for reader in readers)
        assert buffer.last >= written[-1]


@pytest.mark.parametrize(("readers", "written"), [(OPERANDS, False), (OPERANDS + 1, True)])
def test_a_sum_of_numbers_is_not_computed_again_by_more_kernels_than_one_has_operands(
    readers: int, written: bool
) -> None:
    """As a norm of all gradients is, which every update reads: each would go through the whole sum."""
    numbers = [Operation("input", (), (), "float32", -1, tag=i) for i in range(3)]
    total = [operation("elementwise", 0, 1, shape=()), operation("elementwise", 3, 2, shape=())]
    updates = [operation("elementwise", 4, name=f"scaled {i}") for i in range(readers)]
    kernels = {k.operation: k for k in fuse((*numbers, *total, *updates), range(5, 5 + readers))}
    assert (4 in kernels) == written
    assert 3 not in kernels  # one kernel reads it
    assert set(kernels[5].reads) == ({4} if written else {0, 1, 2})


def test_a_kernel_lists_what_it_reads_for_what_it_takes_in_last() -> None:
    """As XLA lists the operands of a fusion, which the order of kernels follows."""
    arrays = [operation("input", shape=TABLE, tag=i) for i in range(3)]
    taken_in = operation("elementwise", 0, 2, shape=TABLE, name="multiply")
    total = operation("elementwise", 3, 1, shape=TABLE, name="add")
    assert {k.operation: k for k in fuse((*arrays, taken_in, total), (4,))}[4].reads == (1, 0, 2)


def test_summed_values_are_not_written_over_by_readers_of_the_sum() -> None:
    """A softmax: its exponents and their sum are read once more."""
    scores = [operation("input", shape=TABLE, tag=0), operation("dot", 0, 0, shape=TABLE, tag=MATRIX)]
    total = operation("reduce", 1, shape=TABLE[:1], name="reduce-sum")
    spread = operation("broadcast", 2, shape=TABLE, name="broadcast")
    shares = operation("elementwise", 1, 3, shape=TABLE, name="divide")
    twice = operation("elementwise", 1, shape=TABLE, name="negate")
    softmax = {k.operation: k for k in fuse((*scores, total, spread, shares), (4,))}
    assert 1 in softmax[4].reads
    assert 1 not in softmax[4].over
    assert 1 in {k.operation: k for k in fuse((*scores, twice), (2,))}[2].over


def reduced(*operands: int, shape: tuple[int, ...] = TABLE, axes: str = "x") -> Operation:
    return operation("collective", *operands, shape=shape, tag=("all_reduce", (axes,), "add"))


def test_operands_of_a_later_collective_are_computed_behind_an_earlier_one() -> None:
    """The sum that is ready last goes first: the compiler works from the end, and meets the earliest sum there."""
    every = (
        operation("input", shape=TABLE, tag=0),
        operation("dot", 0, 0, shape=TABLE, tag=MATRIX),
        reduced(1, axes="x"),
        operation("dot", 0, 0, shape=TABLE, tag=("merged", MATRIX)),
        reduced(3, axes="y"),
        operation("elementwise", 2, 4, shape=TABLE, name="add"),
    )
    program = DeviceProgram(operations=every, inputs=(0,), constants=(), outputs=(5,))
    assert schedule(program, list(kernels_of(program).values())) == [0, 3, 4, 1, 2, 5]


def test_all_reduces_are_laid_side_by_side_up_to_a_size() -> None:
    large = (COMBINED_NBYTES // 4 // 3,)
    values = [operation("input", shape=large, tag=i) for i in range(5)]
    sent = [reduced(i, shape=large) for i in range(5)]
    operations, place = combined_when_fused([*values, *sent], range(5, 10))
    joined = [o for o in operations if o.kind == "collective"]
    assert sorted(o.size // large[0] for o in joined) == [2, 3]
    assert all(o.nbytes <= COMBINED_NBYTES for o in joined)
    assert [operations[place[5 + i]].shape for i in range(5)] == [large] * 5
    for index, held in enumerate(operations):
        assert all(o < index for o in held.operands)


def test_collectives_are_combined_as_outputs_come_to_them_and_long_sums_backwards() -> None:
    """What is taken in lists its operands last: a, b and c of (a + b) + c are c, a, b, of which two are sent as one."""
    large = (COMBINED_NBYTES // 4 // 2,)
    values = [operation("input", shape=large, tag=i) for i in range(3)]
    sent = [operation("collective", i, shape=large, tag=("reduce_scatter", ("x",), "add")) for i in range(3)]
    numbers = [operation("reduce", 3 + i, shape=(), tag=("reduce-sum", (0,))) for i in range(3)]
    total = [operation("elementwise", 6, 7, shape=(), name="add"), operation("elementwise", 9, 8, shape=(), name="add")]
    operations, place = combined_when_fused([*values, *sent, *numbers, *total], (10,))
    assert [operations[p].kind for p in place[3:6]] == ["result", "collective", "result"]


def test_a_collective_that_waits_for_another_ends_its_group() -> None:
    values = [operation("input", shape=TABLE, tag=i) for i in range(2)]
    behind = operation("elementwise", 2, shape=TABLE, name="negate")
    operations, place = combined_when_fused([*values, reduced(0), behind, reduced(3), reduced(1)], (4, 5))
    assert [operations[place[o]].kind for o in (2, 4, 5)] == ["collective", "opaque", "opaque"]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_two_gradients_of_a_table_are_added_before_they_are_sent(elsewhere: bool) -> None:
    """In the dtype that they are added in; not if something else reads one of them."""
    narrow = [Operation("input", (), TABLE, "bfloat16", -1, tag=i) for i in range(2)]
    sent = [Operation("collective", (i,), TABLE, "bfloat16", -1, tag=("all_reduce", ("x",), "add")) for i in range(2)]
    wide = [operation("elementwise", 2 + i, shape=TABLE, name="convert bfloat16") for i in range(2)]
    total = operation("elementwise", 4, 5, shape=TABLE, name="add")
    operations, place = reassociated([*narrow, *sent, *wide, total], (6, 2) if elsewhere else (6,))
    assert operations[place[6]].name == ("add" if elsewhere else "all_reduce")
    assert operations[place[6]].dtype == "float32"
    for index, held in enumerate(operations):
        assert all(o < index for o in held.operands)


def test_the_loss_of_what_a_collective_sends_is_there_when_the_gradient_is() -> None:
    every = (
        operation("input", shape=TABLE, tag=0),
        reduced(0),
        operation("input", shape=TABLE, tag=2),
        reduced(2),
        operation("elementwise", 1, 3, shape=TABLE, name="subtract"),
        operation("reduce", 4, shape=(), name="reduce-sum"),
        operation("elementwise", 1, shape=TABLE, name="negate"),
        operation("dot", 6, 6, shape=TABLE, tag=MATRIX),
    )
    operations, _ = combined_when_fused(every, (7, 5))
    assert [o.name for o in operations].count("all_reduce") == 1


def test_all_gathers_of_any_dtype_are_sent_together_from_where_they_are() -> None:
    def gathered(operand: int, dtype: str) -> Operation:
        return Operation("collective", (operand,), TABLE, dtype, -1, tag=("all_gather", ("x",), "", 0, -1))

    values = [operation("input", tag=i) for i in range(2)]
    operations, place = combined_when_fused([*values, gathered(0, "float32"), gathered(1, "bfloat16")], (2, 3))
    assert [o.kind for o in operations].count("collective") == 1
    assert [operations[p].kind for p in place[2:]] == ["result", "result"]


def test_kernels_of_what_is_combined_are_those_that_fusing_it_makes() -> None:
    """Two all-reduces, two all-gathers, and what is computed before and behind them."""
    gather = "all_gather", ("x",), "", 0, -1
    values = [operation("input", shape=TABLE, tag=i) for i in range(4)]
    before = [operation("elementwise", i, i, shape=TABLE, name="multiply") for i in range(4)]
    sent = [reduced(4 + i, shape=TABLE) for i in range(2)]
    gathered = [operation("collective", 6 + i, shape=TABLE, tag=gather) for i in range(2)]
    behind = [operation("elementwise", 8 + i, 10 + i, shape=TABLE, name="add") for i in range(2)]
    every = (*values, *before, *sent, *gathered, *behind)
    program = DeviceProgram(operations=every, inputs=(0, 1, 2, 3), constants=(), outputs=(12, 13))
    changed, kernels = with_combined(program, fuse(every, program.outputs))
    assert [o.name for o in changed.operations].count("all_reduce") == 1
    assert [o.kind for o in changed.operations].count("collective") == 2
    assert [changed.operations[o] for o in changed.inputs] == values
    again = fuse(changed.operations, changed.outputs)
    assert [(k.operation, set(k.reads), set(k.over)) for k in kernels] == [
        (k.operation, set(k.reads), set(k.over)) for k in again
    ]


def test_holders_at_the_peak_add_up_to_its_bytes() -> None:
    layout = whole()
    step = GRAPH, GROUPING, MESH, layout, resharding_plan(GRAPH, layout, RESHARDER), {0: 0}
    for compiler in (xla_cpu.COMPILER, xla.Compiler(rewrite=combined, fuse=fuse, schedule=schedule)):
        memory = xla.temporaries(compiler, *step)
        assert sum(holder.nbytes for holder in memory.holders) == max(memory.over_time)
        assert max(memory.over_time) >= GRAPH.types[3].nbytes
    memory = model_of(parse_cluster("8:h100").group().device)(*step)
    assert sum(holder.nbytes for holder in memory.holders) == max(memory.over_time)


def test_devices_have_the_model_of_their_compiler() -> None:
    gpu, tpu, cpu = (parse_cluster(f"8:{kind}").group().device for kind in ("h100", "tpu-v5e", "cpu"))
    assert model_of(gpu) is not temporaries
    assert model_of(gpu) is model_of(gpu) is xla_gpu.model(WEIGHTS["h100"])
    assert model_of(tpu) is model_of(tpu) is xla_tpu.model(tpu)
    assert model_of(cpu) is temporaries


def test_a_scatter_is_written_over_what_it_adds_to() -> None:
    every = (
        operation("input", shape=TABLE, tag=0),
        operation("elementwise", 0, shape=TABLE, name="exponential"),
        operation("literal", shape=(), tag=("float", 0.0)),
        operation("broadcast", 2, shape=TABLE, tag=()),
        operation("reduce", 1, 0, shape=TABLE, name="scatter-add"),
        operation("reduce", 3, 0, shape=TABLE, name="scatter-add"),
    )
    kernels = {kernel.operation: kernel for kernel in fuse(every, (4, 5))}
    assert {o: kernel.reads for o, kernel in kernels.items()} == {0: (), 1: (0,), 3: (), 4: (1, 0), 5: (3, 0)}
    assert (kernels[4].over, kernels[5].over) == ((1,), (3,))


def test_a_tanh_is_written_once_for_two_readers_and_a_root_computed_in_both() -> None:
    wide = (4096, 4096)

    def chain(name: str) -> tuple[Operation, ...]:
        narrow = [Operation("input", (), wide, "bfloat16", -1, tag=0)]
        narrow.append(Operation("expensive", (0,), wide, "bfloat16", -1, tag=(name,)))
        narrow.extend(Operation("dot", (o, o), wide, "bfloat16", -1, tag=MATRIX) for o in (2, 3))
        narrow[2:2] = [Operation("elementwise", (1,), wide, "bfloat16", -1, tag=(t,)) for t in ("add", "negate")]
        return tuple(narrow)

    assert 1 in {kernel.operation for kernel in fuse(chain("tanh"), (4, 5))}
    assert 1 not in {kernel.operation for kernel in fuse(chain("sqrt"), (4, 5))}
    l4 = WEIGHTS["l4"].arithmetic  # whose memory is slow beside its cores
    assert 1 not in {kernel.operation for kernel in fuse(chain("tanh"), (4, 5), arithmetic=l4)}


@pytest.mark.parametrize(("dtype", "device"), [("float32", "h100"), ("bfloat16", "h100"), ("float32", "a100")])
def test_a_tanh_for_two_products_is_computed_by_the_one_kernel_that_reads_it(dtype: str, device: str) -> None:
    """As XLA does of `x * tanh(x)` and `y * (x + tanh(x))` for products, compiled with jaxlib 0.10.2."""
    wide = (8192, 2048)
    every = (
        Operation("input", (), wide, dtype, -1, tag=0),
        Operation("input", (), wide, dtype, -1, tag=1),
        Operation("expensive", (0,), wide, dtype, -1, tag=("tanh",)),
        Operation("elementwise", (0, 2), wide, dtype, -1, tag=("multiply",)),
        Operation("elementwise", (0, 2), wide, dtype, -1, tag=("add",)),
        Operation("elementwise", (1, 4), wide, dtype, -1, tag=("multiply",)),
        *(Operation("dot", (o, o), wide, dtype, -1, tag=MATRIX) for o in (3, 5)),
    )
    kernels = fuse(every, (6, 7), arithmetic=WEIGHTS[device].arithmetic)
    assert {kernel.joint for kernel in kernels} == {(), (3, 5)}
    assert 2 not in {kernel.operation for kernel in kernels}
    first, second = (kernel for kernel in kernels if kernel.joint)
    assert {*first.reads, *second.reads} == {0, 1}
    assert 2 in {kernel.operation for kernel in fuse(every, (2, 6, 7), arithmetic=WEIGHTS[device].arithmetic)}


@pytest.mark.parametrize(("rows", "is_written"), [(16, False), (4096, True)])
def test_a_tanh_is_computed_twice_where_that_is_less_than_a_launch(rows: int, is_written: bool) -> None:
    shape = (rows, 256)
    every = [Operation("input", (), shape, "float32", -1, tag=0)]
    every.append(Operation("expensive", (0,), shape, "float32", -1, tag=("tanh",)))
    every.extend(Operation("elementwise", (1,), shape, "float32", -1, tag=(name,)) for name in ("add", "negate"))
    every.extend(Operation("dot", (o, o), shape, "float32", -1, tag=MATRIX) for o in (2, 3))
    for name in ("a100", "h100"):
        kernels = fuse(every, (4, 5), arithmetic=WEIGHTS[name].arithmetic)
        assert (1 in {kernel.operation for kernel in kernels}) == is_written
