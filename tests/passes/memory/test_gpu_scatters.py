"""Scatters on GPUs: not into padding that is cut off, onto zeros that are there already, once where both are read."""

from __future__ import annotations

from passes.memory.gpu_costs import microseconds
from passes.memory.gpu_fusion import kernels_of
from passes.memory.gpu_scatters import added, unpadded, with_copies
from passes.memory.operations import Operation, Shape
from passes.memory.windows import HEAD
from tests.passes.memory.device_programs import operation, program

IMAGES, PADDED, WINDOWS = (2, 8, 8, 4), (2, 9, 9, 4), (2, 4, 4, 4)


def pooled(zeros: Shape, *marks: str) -> list[Operation]:
    """A rectifier, which compares with zeros of a shape, and a scatter into padded zeros, of which a part is kept."""
    return [
        operation("input", shape=IMAGES, tag=0),
        operation("literal", tag=("float", 0.0)),
        operation("broadcast", 1, shape=zeros, tag=()),
        operation("elementwise", 0, 2, shape=IMAGES, name="maximum"),
        operation("input", shape=WINDOWS, tag=1),
        operation("broadcast", 1, shape=PADDED, tag=()),
        operation("update", 5, 4, 4, shape=PADDED, tag=("scatter", 0)),
        operation("rearrange", 6, shape=IMAGES, tag=("slice", 0, *marks)),
    ]


def test_a_scatter_cut_off_at_its_end_has_the_cut_shape_and_shares_zeros() -> None:
    changed = unpadded(pooled(IMAGES, HEAD))
    assert (changed[6].shape, changed[6].operands[0]) == (IMAGES, 2)
    assert (changed[7].kind, changed[7].operands) == ("bitcast", (6,))


def test_without_zeros_of_that_shape_the_scatter_has_its_own() -> None:
    changed = unpadded(pooled(PADDED, HEAD))
    assert (changed[6].operands[0], changed[5].shape, changed[2].shape) == (5, IMAGES, PADDED)


def test_a_scatter_cut_off_in_front_stays_as_it_is() -> None:
    every = pooled(IMAGES)
    assert unpadded(every) == every


def test_padded_zeros_that_something_else_reads_stay() -> None:
    every = [*pooled(PADDED, HEAD), operation("elementwise", 5, shape=PADDED, name="negate")]
    assert unpadded(every) == every


def scattered(*readers: Operation) -> list[Operation]:
    """What is scattered onto zeros, and the same onto another array in place of a sum; readers of the former."""
    return [
        operation("input", shape=IMAGES, tag=0),
        operation("input", shape=WINDOWS, tag=1),
        operation("literal", tag=("float", 0.0)),
        operation("broadcast", 2, shape=IMAGES, tag=()),
        operation("update", 3, 1, 1, shape=IMAGES, tag=("scatter-add", 0)),
        operation("update", 0, 1, 1, shape=IMAGES, tag=("scatter-add", 0)),
        *readers,
    ]


def test_a_scatter_with_another_reader_is_added_by_a_kernel_of_its_own() -> None:
    changed = added(scattered(operation("elementwise", 4, shape=IMAGES, name="negate")), (5, 6))
    assert (changed[5].kind, changed[5].name, changed[5].operands) == ("elementwise", "add", (0, 4))


def test_a_scatter_for_a_sum_alone_is_scattered_onto_the_other_summand() -> None:
    every = scattered(operation("elementwise", 4, shape=IMAGES, name="negate"))
    assert added(every, (5,)) == every


def onto_zeros(reader: int) -> list[Operation]:
    """A scatter onto zeros, which something chooses or else, behind the scatter or before it."""
    return [
        operation("input", shape=IMAGES, tag=0),
        operation("literal", tag=("float", 0.0)),
        operation("broadcast", 1, shape=IMAGES, tag=()),
        operation("elementwise", 0, 2, shape=IMAGES, name="maximum"),
        operation("reduce", 2, 3, 3, shape=IMAGES, tag=("scatter", 0)),
        operation("elementwise", reader, 0, shape=IMAGES, name="add"),
        operation("elementwise", 4, 5, shape=IMAGES, name="select"),
    ]


def test_zeros_that_are_chosen_behind_a_scatter_are_copied_for_it() -> None:
    every = onto_zeros(4)
    every[6] = operation("elementwise", 2, 5, shape=IMAGES, name="select")
    described = program(every, (6,))
    changed, kernels = with_copies(described, kernels_of(every, [o.kind != "literal" for o in every], as_listed=True))
    copy, scatter = changed.operations[7], changed.operations[4]
    assert (copy.kind, copy.operands, scatter.operands) == ("opaque", (2,), (7, 3, 3))
    (made,) = (kernel for kernel in kernels if kernel.operation == 4)
    assert 7 in made.reads
    assert 2 not in made.reads
    (first,) = (kernel for kernel in kernels if kernel.operation == 7)
    assert microseconds([first], changed.operations) == 0.01


def test_zeros_that_are_read_before_a_scatter_are_written_over() -> None:
    every = onto_zeros(0)
    described = program(every, (6,))
    kernels = kernels_of(every, [o.kind != "literal" for o in every], as_listed=True)
    assert with_copies(described, kernels) == (described, kernels)
