"""Buffers of random programs, kernel by kernel: nothing is read after it was written over, and every byte counts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel, fuse
from passes.memory.liveness import Buffer, Lifetimes, lifetimes, schedule
from passes.memory.operations import Operation
from tests.passes.memory.device_programs import ROWS, TABLE, drawn, operation, program

SEEDS = range(100)
NBYTES = 64 * 96 * 4


def lived(found: DeviceProgram, carried: Mapping[int, int] | None = None) -> tuple[dict[int, Kernel], Lifetimes]:
    kernels = fuse(found.operations, found.outputs)
    return {kernel.operation: kernel for kernel in kernels}, lifetimes(found, kernels, carried or {})


def named(found: DeviceProgram, kernels: Mapping[int, Kernel], index: int) -> int:
    """The operation that made the bytes that this one is another name of."""
    held = found.operations[index]
    while held.kind == "part" or (held.kind == "bitcast" and kernels[index].reads == held.operands):
        index = held.operands[0]
        held = found.operations[index]
    return index


@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_run_breadth_first(seed: int) -> None:
    """Inputs, then what reads nothing, then each as the last of what it reads has run, in its turn."""
    drawn_program = drawn(seed)
    kernels = fuse(drawn_program.operations, drawn_program.outputs)
    order = schedule(drawn_program, kernels)
    at = {index: position for position, index in enumerate(order)}
    reads = {kernel.operation: kernel.reads for kernel in kernels}
    turn = {kernel.operation: {r: place for place, r in enumerate(kernel.readers)} for kernel in kernels}
    assert sorted(order) == sorted(reads)
    assert all(at[read] < at[index] for index in order for read in reads[index])
    inputs = [i for i in order if drawn_program.operations[i].kind == "input"]
    assert order[: len(inputs)] == sorted(inputs)
    waiting = [i for i in order if reads[i]]
    last = {i: max(reads[i], key=at.__getitem__) for i in waiting}
    assert waiting == sorted(waiting, key=lambda i: (at[last[i]], turn[last[i]][i]))


def order_of(every: list[Operation], outputs: tuple[int, ...]) -> list[int]:
    """The order in which the kernels of a program run."""
    device_program = program(every, outputs)
    return schedule(device_program, fuse(device_program.operations, device_program.outputs))


def test_readers_of_an_array_run_as_the_program_lists_them_though_they_are_fused() -> None:
    """As XLA runs `y = x @ x` and then `-y, sign(abs(y)), round(floor(y)), y @ x`, read off jaxlib 0.10.2."""
    every = [
        operation("input", shape=ROWS, tag=0),
        operation("dot", 0, 0),
        operation("elementwise", 1, name="negate"),
        operation("elementwise", 1, name="abs"),
        operation("elementwise", 3, name="sign"),
        operation("elementwise", 1, name="floor"),
        operation("elementwise", 5, name="round"),
        operation("dot", 1, 0),
    ]
    assert order_of(every, (2, 4, 6, 7)) == [0, 1, 2, 4, 6, 7]


def test_the_last_reader_takes_the_place_of_one_that_is_fused_away() -> None:
    """As XLA runs `t = tanh(x)`, and then `round(t) * (floor(t) + sign(t)), (-round(t)) @ x` of jaxlib 0.10.2."""
    every = [
        operation("input", shape=ROWS, tag=0),
        operation("expensive", 0, name="tanh"),
        operation("elementwise", 1, name="round"),  # both kernels compute it
        operation("elementwise", 1, name="floor"),
        operation("elementwise", 1, name="sign"),
        operation("elementwise", 3, 4, name="add"),
        operation("elementwise", 2, 5, name="multiply"),
        operation("elementwise", 2, name="negate"),
        operation("dot", 7, 0),
    ]
    assert order_of(every, (6, 8)) == [0, 1, 6, 7, 8]


def test_readers_are_listed_as_they_were_before_collectives_were_combined() -> None:
    """A gradient that is returned before the loss is computed before it, though the loss is sent first."""
    every = [
        operation("input", shape=ROWS, tag=0),
        operation("dot", 0, 0),
        operation("elementwise", 1, name="maximum"),
        operation("elementwise", 1, name="sign"),
        operation("dot", 2, 0),
        operation("dot", 3, 0),
        operation("collective", 4, 5, shape=(2,), tag=("combined", 0)),
        operation("result", 6, tag=0),
        operation("result", 6, tag=1),
    ]
    assert order_of(every, (8, 7))[:4] == [0, 1, 3, 2]
    assert order_of(every, (7, 8))[:4] == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_read_after_it_was_written_over(seed: int) -> None:
    drawn_program = drawn(seed)
    kernels, lifetimes = lived(drawn_program)
    at = {index: position for position, index in enumerate(lifetimes.order)}
    home = {index: buffer for buffer in lifetimes.buffers for index in buffer.operations}
    assert len(home) == sum(len(buffer.operations) for buffer in lifetimes.buffers)
    for index in lifetimes.order:
        if index in home:
            assert home[index].first <= at[index] <= home[index].last
        for read in kernels[index].reads:
            name = named(drawn_program, kernels, read)
            if name in home:
                held = [at[i] for i in home[name].operations if at[i] < at[index]]
                assert max(held) == at[name], f"kernel {index} reads {name}, which {home[name]} has lost"
                assert at[index] <= home[name].last


@pytest.mark.parametrize("seed", SEEDS)
def test_exactly_values_that_are_no_argument_result_or_alias_have_a_buffer(seed: int) -> None:
    """Results are written where they belong; so is what they are updates of, if nothing else reads that."""
    drawn_program = drawn(seed)
    kernels, lifetimes = lived(drawn_program)
    readers: dict[int, list[int]] = {}
    for index in lifetimes.order:
        for read in kernels[index].reads:
            readers.setdefault(named(drawn_program, kernels, read), []).append(index)
    placed = {named(drawn_program, kernels, output) for output in drawn_program.outputs}
    pending = sorted(placed)
    while pending:
        held = drawn_program.operations[index := pending.pop()]
        if held.kind == "update" and named(drawn_program, kernels, held.operands[0]) == held.operands[0]:
            target = held.operands[0]
            if readers[target] == [index] and target not in placed:
                placed.add(target)
                pending.append(target)
    wanted = {
        i for i in kernels if named(drawn_program, kernels, i) == i and drawn_program.operations[i].kind != "input"
    } - placed
    assert {index for buffer in lifetimes.buffers for index in buffer.operations} == wanted
    for buffer in lifetimes.buffers:
        sizes = {drawn_program.operations[index].nbytes for index in buffer.operations}
        assert sizes == {buffer.nbytes}  # multiples of the alignment, all of one size


@pytest.mark.parametrize("seed", SEEDS)
def test_a_carry_is_copied_if_it_is_read_once_its_place_is_taken(seed: int) -> None:
    drawn_program = drawn(seed)
    results = [drawn_program.operations[output] for output in drawn_program.outputs]
    carried = {
        o: i for o, i in zip(range(3), range(3), strict=True) if results[o].shape == drawn_program.operations[i].shape
    }
    kernels, lifetimes = lived(drawn_program, carried)

    def before(index: int) -> set[int]:
        """What has run by the time that a kernel has, whatever the order."""
        return {index}.union(*(before(read) for read in kernels[index].reads))

    wanted = dict[int, int]()
    for output, position in carried.items():
        after, entered = named(drawn_program, kernels, drawn_program.outputs[output]), drawn_program.inputs[position]
        readers = {i for i in kernels if entered in {named(drawn_program, kernels, r) for r in kernels[i].reads}}
        late = readers - {after} - before(after)
        over = (
            drawn_program.operations[after].operands[:1]
            if drawn_program.operations[after].kind == "update"
            else kernels[after].over
        )
        if late or (entered in kernels[after].reads and entered not in over):
            wanted[entered] = max(lifetimes.order.index(reader) for reader in readers)
    copies = [buffer for buffer in lifetimes.buffers if drawn_program.operations[buffer.operations[0]].kind == "input"]
    assert {buffer.operations[0]: buffer.last for buffer in copies} == wanted
    assert all(buffer.first == 0 for buffer in copies)
    assert all(lifetimes.read[drawn_program.inputs.index(entered)] == 0 for entered in wanted)


def dots(*reads: tuple[int, int]) -> DeviceProgram:
    """A chain of products that nothing is fused with; the last is the result."""
    every = [operation("input", shape=TABLE, tag=0), *(operation("dot", *pair, shape=TABLE) for pair in reads)]
    return program(every, [len(every) - 1])


def test_of_a_chain_two_are_live() -> None:
    _, lifetimes = lived(dots((0, 0), (1, 0), (2, 0), (3, 0)))
    assert [(buffer.first, buffer.last) for buffer in lifetimes.buffers] == [(1, 2), (2, 3), (3, 4)]
    assert {buffer.nbytes for buffer in lifetimes.buffers} == {NBYTES}
    assert (lifetimes.read, lifetimes.written) == ((4,), (4,))


def test_an_elementwise_kernel_writes_over_what_nothing_reads_later() -> None:
    every = [operation("input", shape=TABLE, tag=0), operation("dot", 0, 0, shape=TABLE)]
    every += [operation("expensive", 1, shape=TABLE, name="exponential"), operation("dot", 2, 0, shape=TABLE)]
    _, lifetimes = lived(program(every, [3]))
    assert lifetimes.buffers == (Buffer(operations=(1, 2), nbytes=NBYTES, first=1, last=3, starts=(1, 2)),)


@pytest.mark.parametrize("between", range(4))
def test_the_last_of_several_readers_writes_over_its_operand(between: int) -> None:
    every = [operation("input", shape=ROWS, tag=0), operation("dot", 0, 0)]
    every.append(operation("dot", 1, 1))  # the other reader
    chain = len(every)
    every += [operation("dot", chain + i - 1, 0) for i in range(between)]
    last = len(every) - 1
    every.append(operation("elementwise", 1, last, name="add"))
    every.append(operation("dot", last + 1, 0))
    _, lifetimes = lived(program(every, [last + 2]))
    assert any(buffer.operations[:2] == (1, last + 1) for buffer in lifetimes.buffers)


def test_nothing_is_written_over_what_has_another_dtype() -> None:
    """As the integers that a sort has ordered are read, and floats of the same size are made of them."""
    ordered = operation("dot", 0, 0, shape=TABLE)._replace(dtype="int32")
    every = [operation("input", shape=TABLE, tag=0), ordered, operation("elementwise", 1, shape=TABLE, name="convert")]
    _, lifetimes = lived(program([*every, operation("dot", 2, 0, shape=TABLE)], [3]))
    assert [buffer.operations for buffer in lifetimes.buffers] == [(1,), (2,)]


def test_loops_over_constants_alone_run_before_what_reads_arguments() -> None:
    every = [
        operation("input", shape=TABLE, tag=0),
        operation("collective", 0, shape=TABLE),
        operation("iota", shape=TABLE, tag=0),
        operation("elementwise", 2, shape=TABLE, name="negate"),  # one kernel with what it counts
        operation("broadcast", shape=TABLE, tag=()),  # reads a constant, which comes first
        operation("dot", 1, 3, shape=TABLE),
        operation("dot", 5, 4, shape=TABLE),
    ]
    device_program = program(every, (6,))
    assert schedule(device_program, fuse(device_program.operations, device_program.outputs)) == [0, 3, 1, 4, 5, 6]


def test_a_collective_of_several_arrays_has_a_table_of_their_addresses_as_long_as_they_live() -> None:
    sent = operation("collective", 0, shape=(2,))._replace(dtype="uint64")
    parts = [operation("result", 1, tag=i) for i in range(2)]
    every = [operation("input", shape=TABLE, tag=0), sent, *parts, operation("dot", 2, 3), operation("dot", 4, 4)]
    _, lifetimes = lived(program(every, [5]))
    assert [(b.operations, b.nbytes, b.first, b.last) for b in lifetimes.buffers] == [
        ((1,), 16, 1, 4),
        ((2,), ROWS[0] * 4, 1, 4),
        ((3,), ROWS[0] * 4, 1, 4),
        ((4,), ROWS[0] * 4, 4, 5),
    ]


def test_an_output_says_what_it_may_be_written_over() -> None:
    every = [operation("input", shape=TABLE, tag=0), operation("dot", 0, 0, shape=TABLE)]
    every += [operation("expensive", 1, shape=TABLE, name="exponential")]
    _, lifetimes = lived(program(every, [2]))
    assert (lifetimes.written, lifetimes.over) == ((2,), {0: [0]})


@pytest.mark.parametrize(
    ("order", "copies_late", "is_copied"),
    [([0, 1, 2, 3], False, True), ([0, 1, 2, 3], True, False), ([0, 1, 3, 2], True, True)],
)
def test_a_weight_that_a_product_reads_beside_its_update_is_copied_unless_the_order_is_known_to_allow_it(
    order: list[int], copies_late: bool, is_copied: bool
) -> None:
    """As a layer's weight in float32, whose input's gradient and update need not wait for each other."""
    every = [
        operation("input", shape=ROWS, tag=0),
        operation("input", shape=ROWS, tag=1),
        operation("dot", 0, 1),
        operation("elementwise", 0, 1, shape=ROWS, name="add"),
    ]
    made = program(every, (2, 3))
    kernels = fuse(made.operations, made.outputs)
    alive = lifetimes(made, kernels, {1: 0}, order, copies_late=copies_late)
    assert (0 in [o for buffer in alive.buffers for o in buffer.operations]) == is_copied
