"""Random bits on GPUs: computed element by element, and what is drawn with them written for more than one reader."""

from __future__ import annotations

from passes.ir import Node, TensorType
from passes.memory.lowering_rules import to_xla
from passes.memory.operations import DRAWN, Compiler, Operation, Operations
from tests.passes.memory.device_programs import ROWS, TABLE, operation
from tests.passes.memory.gpu_kernels import written


def lowered(compiler: Compiler) -> list[Operation]:
    operations = Operations(compiler=compiler)
    key = operations.add("input", (), (2,), "uint32", "key")
    node = Node(primitive="random_bits", inputs=(0,), outputs=(1,), params={})
    to_xla(operations, node, (key,), [TensorType(shape=TABLE, dtype="uint32")])
    return operations.every[1:]


def test_bits_are_one_operation_on_gpus_and_go_round_a_loop_elsewhere() -> None:
    (drawn,) = lowered("gpu")
    assert (drawn.kind, drawn.name, drawn.shape) == ("expensive", DRAWN, TABLE)
    assert "fresh" in {made.kind for made in lowered("cpu")}


def dropped(readers: int) -> list[Operation]:
    """A mask of what is kept, and what some kernels make with it: each of a table of its own."""
    mask = [
        operation("input", shape=ROWS, tag="key"),
        operation("literal", shape=(), tag=("float", 0.1)),
        operation("broadcast", 1, shape=TABLE, tag=()),
        operation("expensive", 0, shape=TABLE, name=DRAWN),
        operation("elementwise", 2, 3, shape=TABLE, name="compare"),
    ]
    tables = [operation("input", shape=TABLE, tag=i) for i in range(readers)]
    first = len(mask)
    selects = [operation("elementwise", 4, first + i, shape=TABLE, name=f"select {i}") for i in range(readers)]
    return [*mask, *tables, *selects]


def in_memory(readers: int) -> set[int]:
    every = dropped(readers)
    return written(every, *range(len(every) - readers, len(every)))


def test_a_mask_is_in_memory_from_the_kernel_that_draws_it_to_the_one_that_reads_it_again() -> None:
    assert 4 in in_memory(readers=2)
    assert 3 not in in_memory(readers=2)


def test_a_mask_for_one_kernel_is_nowhere() -> None:
    assert in_memory(readers=1).isdisjoint({3, 4})
