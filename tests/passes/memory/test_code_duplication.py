"""The number of times that a kernel's code has an operation: once for each index at which it is read."""

from __future__ import annotations

from passes.memory.code_duplication import MOST_COPIES, Copies
from tests.passes.memory.device_programs import ROWS, operation

SHORT = (*ROWS[:-1], ROWS[-1] // 2)


def test_an_operation_read_in_its_own_kernel_is_written_once():
    """x, sin(x), sin(x) + sin(x): all of one shape."""
    program = [operation("input"), operation("elementwise", 0), operation("elementwise", 1, 1)]
    copies = Copies(program, 2, [1])
    copies.add(1, [0])
    assert not copies.is_too_much(0, n_readers=100)


def test_slices_read_at_indices_of_their_own():
    """Each is one copy more, and what a copy reads at an index of its own is copied as often."""
    slices = [operation("rearrange", 0, shape=SHORT, name="slice") for _ in range(MOST_COPIES + 1)]
    root = operation("elementwise", *range(1, len(slices) + 1), shape=SHORT)
    program = [operation("input"), *slices, root]
    copies = Copies(program, len(program) - 1, range(1, len(slices) + 1))
    for number in range(1, MOST_COPIES + 1):
        copies.add(number, [0])
    assert not copies.is_too_much(0, n_readers=1)
    copies.add(len(slices), [0])
    assert copies.is_too_much(0, n_readers=1)


def test_a_broadcast_is_never_too_much_and_control_flow_is_written_once():
    slices = [operation("rearrange", 0, shape=SHORT, name="slice") for _ in range(2)]
    for first, is_block in (
        (operation("broadcast"), False),
        (operation("elementwise"), False),
        (operation("rearrange", name="pad"), True),
        (operation("reduce"), True),
    ):
        program = [first, *slices, operation("elementwise", 1, 2, shape=SHORT)]
        copies = Copies(program, 3, [1, 2])
        copies.add(1, [0])
        assert copies.is_too_much(0, n_readers=1) is False
        assert copies.is_too_much(0, n_readers=2) is is_block
        copies.add(2, [0])
        assert copies.is_too_much(0, n_readers=1) is is_block
