"""Reductions over windows and scatters to their choices, as the operations that XLA makes of them."""

from __future__ import annotations

from passes.ir import Node, TensorType
from passes.memory.operations import Operations
from passes.memory.windows import CHOICE, is_choice, selected, sources, windowed


def read(operations: Operations, shape: tuple[int, ...]) -> int:
    """An array that is computed on, in float32."""
    return operations.add("input", (), shape, "float32", len(operations.every))


def padded(operations: Operations, array: int, number: float, shape: tuple[int, ...]) -> int:
    literal = operations.literal(number, "float32")
    return operations.add("rearrange", (array, literal), shape, "float32", ("pad", 0))


def test_a_reduction_pads_what_it_reads_itself_if_that_is_padded_with_what_it_begins_with():
    operations = Operations()
    array = read(operations, (8, 8))
    result = TensorType(shape=(4, 4), dtype="float32")
    folded = windowed(operations, "reduce-window-sum", 0.0, padded(operations, array, 0.0, (9, 9)), result)
    assert operations[folded].operands == (array,)
    other = padded(operations, array, 1.0, (9, 9))
    assert operations[windowed(operations, "reduce-window-sum", 0.0, other, result)].operands == (other,)


def scattered(padding: tuple[tuple[int, int], ...], windows: tuple[int, ...]) -> tuple[Operations, int]:
    """A scatter to the choices of windows of [8, 8] with this padding, and its result."""
    operations = Operations()
    source, operand = read(operations, windows), read(operations, (8, 8))
    node = Node(primitive="select_and_scatter_add", inputs=(0, 1), outputs=(2,), params={"padding": padding})
    (result,) = selected(operations, node, (source, operand), [TensorType(shape=(8, 8), dtype="float32")])
    return operations, result


def test_a_scatter_to_choices_updates_zeros_at_places_that_one_kernel_finds():
    operations, result = scattered(((0, 0), (0, 0)), (4, 4))
    update = operations[result]
    assert (update.kind, update.shape) == ("update", (8, 8))
    (choice,) = [i for i, o in enumerate(operations.every) if o.name == CHOICE]
    assert operations[choice].operands[0] == 1  # of what is read, without a copy
    places, rows = update.operands[1:]
    assert operations[places].shape == (16, 2)
    assert all(is_choice(operations.every, index) for index in operations[places].operands)
    assert not is_choice(operations.every, rows)
    assert sources(operations.every) == {choice: rows}


def test_a_scatter_with_padding_finds_choices_in_a_padded_copy_and_cuts_the_padding_off():
    operations, result = scattered(((1, 0), (1, 0)), (4, 4))
    assert (operations[result].name, operations[result].shape) == ("slice", (8, 8))
    assert operations[operations[result].operands[0]].shape == (9, 9)
    (choice,) = [o for o in operations.every if o.name == CHOICE]
    assert operations[choice.operands[0]].shape == (9, 9)
