"""Kernels of random programs: what each computes by itself, followed operand by operand, and small cases of XLA's."""

from __future__ import annotations

from collections import Counter

import pytest

from passes.memory.fusion import ONCE, Kernel, fuse
from passes.memory.kernel_graph import PRODUCERS
from passes.memory.operations import ELEMENTWISE, Operation
from tests.passes.memory.device_programs import TABLE, drawn, inside, operation

SEEDS = range(100)


def kernels_of(operations: tuple[Operation, ...], outputs: tuple[int, ...]) -> dict[int, Kernel]:
    return {kernel.operation: kernel for kernel in fuse(operations, outputs)}


def needed(operations: tuple[Operation, ...], outputs: tuple[int, ...]) -> set[int]:
    """What outputs depend on, and the inputs."""
    members: set[int] = set()
    pending = [*outputs, *(i for i, held in enumerate(operations) if held.kind == "input")]
    while pending:
        if (one := pending.pop()) not in members:
            members.add(one)
            pending.extend(operations[one].operands)
    return members


@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_read_what_they_do_not_compute(seed: int) -> None:
    drawn_program = drawn(seed)
    kernels = kernels_of(drawn_program.operations, drawn_program.outputs)
    wanted = needed(drawn_program.operations, drawn_program.outputs)
    written = {i for i in wanted if drawn_program.operations[i].kind not in (*PRODUCERS, "literal", "dot")}
    assert written | set(drawn_program.outputs) <= kernels.keys() <= wanted
    for index, kernel in kernels.items():
        computed, met = inside(kernel, drawn_program.operations)
        assert kernel.reads == tuple(sorted(met))
        assert met <= kernels.keys()
        within = {drawn_program.operations[one].kind for one in computed - {index}}
        reduces = any(drawn_program.operations[one].kind == "reduce" for one in computed)
        assert within <= PRODUCERS | ({"dot"} if reduces else set())
    read = {one for kernel in kernels.values() for one in kernel.reads}
    inputs = {i for i in wanted if drawn_program.operations[i].kind == "input"}
    assert kernels.keys() == read | inputs | set(drawn_program.outputs)


@pytest.mark.parametrize("seed", SEEDS)
def test_expensive_operations_are_computed_once(seed: int) -> None:
    drawn_program = drawn(seed)
    kernels = kernels_of(drawn_program.operations, drawn_program.outputs)
    times = Counter(one for kernel in kernels.values() for one in inside(kernel, drawn_program.operations)[0])
    expensive = {i for i, held in enumerate(drawn_program.operations) if held.kind in ONCE}
    assert {i: n for i, n in times.items() if i in expensive and n > 1} == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_expensive_operations_are_not_computed_for_every_row_that_a_broadcast_makes(seed: int) -> None:
    drawn_program = drawn(seed)

    def below(kernel: Kernel, index: int, spread: bool) -> set[tuple[int, bool]]:
        """What a kernel computes below an operation, with whether a broadcast is on the way."""
        held = drawn_program.operations[index]
        spread |= held.kind == "broadcast"
        inner = [o for o in held.operands if o not in kernel.reads and drawn_program.operations[o].kind != "literal"]
        return {(o, spread) for o in inner}.union(*(below(kernel, o, spread) for o in inner))

    for kernel in fuse(drawn_program.operations, drawn_program.outputs):
        computed = {(kernel.operation, False), *below(kernel, kernel.operation, False)}
        if all(
            drawn_program.operations[index].kind != "reduce" for index, _ in computed
        ):  # the library has rooms of its own
            assert not any(spread and drawn_program.operations[index].kind in ONCE for index, spread in computed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kernel_writes_over_what_it_reads_element_by_element(seed: int) -> None:
    """Every way from the operation to what it may write over is of elementwise operations."""
    drawn_program = drawn(seed)

    def ways(kernel: Kernel, index: int, over: int, straight: bool) -> set[bool]:
        """Whether each way from an operation to `over` is straight."""
        straight &= drawn_program.operations[index].kind in ELEMENTWISE
        ends = {straight for o in drawn_program.operations[index].operands if o == over}
        below = (o for o in drawn_program.operations[index].operands if o not in kernel.reads)
        return ends.union(*(ways(kernel, o, over, straight) for o in below))

    for kernel in fuse(drawn_program.operations, drawn_program.outputs):
        straight = {o for o in kernel.reads if ways(kernel, kernel.operation, o, True) == {True}}
        assert set(kernel.over) <= straight
        computed, _ = inside(kernel, drawn_program.operations)
        if all(
            drawn_program.operations[o].kind != "reduce" for o in computed
        ):  # what the library computes is written anew
            assert set(kernel.over) == straight


def fused(*operations: Operation, outputs: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    return {kernel.operation: kernel.reads for kernel in fuse(operations, outputs)}


A, B = operation("input", tag=0), operation("input", tag=1)


def test_a_chain_of_cheap_operations_is_one_kernel() -> None:
    chain = [operation("elementwise", i, i + 1 if not i else 1, name="add") for i in (0, 2, 3)]
    assert fused(A, B, *chain, outputs=(4,)) == {0: (), 1: (), 4: (0, 1)}


def test_a_cheap_operation_is_computed_for_each_reader_and_an_expensive_one_is_not() -> None:
    for kind, wanted in (("elementwise", {0: (), 2: (0,), 3: (0,)}), ("expensive", {0: (), 1: (0,), 2: (1,), 3: (1,)})):
        shared = operation(kind, 0, name="negate")
        dots = [operation("elementwise", 1, name="a"), operation("elementwise", 1, name="b")]
        assert fused(A, shared, *dots, outputs=(2, 3)) == wanted


def test_an_expensive_operation_is_not_computed_for_every_row_of_a_broadcast() -> None:
    once, spread = operation("expensive", 0, name="exponential"), operation("broadcast", 1, shape=TABLE, tag=(0,))
    last = operation("elementwise", 2, 2, shape=TABLE, name="add")
    assert fused(A, once, spread, last, outputs=(3,)) == {0: (), 1: (0,), 3: (1,)}


def test_an_expensive_operation_before_a_cheap_one_is_not_computed_for_every_row_of_a_broadcast() -> None:
    once, cheap = operation("expensive", 0, name="exponential"), operation("elementwise", 1, name="negate")
    spread = operation("broadcast", 2, shape=TABLE, tag=(0,))
    last = operation("elementwise", 3, 3, shape=TABLE, name="add")
    assert fused(A, once, cheap, spread, last, outputs=(4,)) == {0: (), 1: (0,), 4: (1,)}


def test_operations_that_no_output_needs_are_left_out() -> None:
    assert fused(A, operation("dot", 0, 0), operation("elementwise", 0, name="negate"), outputs=(2,)) == {
        0: (),
        2: (0,),
    }


def test_an_output_is_written_even_where_others_compute_it_again() -> None:
    first, second = operation("elementwise", 0, name="negate"), operation("elementwise", 1, name="sine")
    assert fused(A, first, second, outputs=(1, 2)).keys() == {0, 1, 2}


def test_a_large_sum_takes_in_what_surrounds_it() -> None:
    table = operation("input", shape=TABLE, tag=0)
    squared = operation("elementwise", 0, 0, shape=TABLE, name="multiply")
    total = operation("reduce", 1, name="reduce-sum")
    root = operation("elementwise", 2, name="sqrt")
    kernels = fuse((table, squared, total, root), (3,))
    assert [(k.operation, k.reads, k.over) for k in kernels] == [(0, (), ()), (2, (0,), ()), (3, (2,), (2,))]
    wide = root._replace(shape=TABLE, operands=(0,))
    around = fuse((table, wide, total), (2,))
    assert [(k.operation, k.reads) for k in around] == [(0, ()), (2, (0,))]


def test_several_large_operands_are_written_where_a_reader_cannot_take_them_in() -> None:
    """A sum that a product of matrices reads too is written once, not added up again by its other reader."""
    total = operation("elementwise", 0, 1, name="add")
    product, other = operation("dot", 2, 2), operation("elementwise", 2, name="negate")
    assert fused(A, B, total, product, other, outputs=(3, 4)) == {0: (), 1: (), 2: (0, 1), 3: (2,), 4: (2,)}


def test_a_product_of_which_only_a_large_sum_reads_is_computed_with_it() -> None:
    """As a softmax without a mask takes the maximum of scores: the library has both."""
    scores, total = operation("dot", 0, 0, shape=TABLE), operation("reduce", 1, name="reduce-sum")
    assert fused(operation("input", shape=TABLE, tag=0), scores, total, outputs=(2,)) == {0: (), 2: (0,)}
    read = operation("dot", 1, 1, shape=TABLE)
    every = (operation("input", shape=TABLE, tag=0), scores, total, read)
    assert fused(*every, outputs=(2, 3)) == {0: (), 1: (0,), 2: (1,), 3: (1,)}
