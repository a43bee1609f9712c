"""Elementwise operations come before the reshape of their operands where they alone read what is reshaped."""

from passes.memory.kernel_graph import Graph
from passes.memory.operations import Operation
from passes.memory.reshapes import axes_before, computed_before, moved_down

FLAT, DEEP = (2048, 32), (32, 64, 32)


def operation(kind, operands=(), shape=DEEP, tag=None) -> Operation:
    return Operation(kind, tuple(operands), shape, "float32", -1, tag=tag)


def moved(*operations: Operation) -> set[int]:
    readers = [[i for i, o in enumerate(operations) if at in o.operands] or [-1] for at in range(len(operations))]
    return set(computed_before(operations, readers))


PRODUCT, RESHAPED = operation("dot", shape=FLAT), operation("bitcast", (0,))
OTHER, OTHER_RESHAPED = operation("dot", shape=FLAT), operation("bitcast", (2,))


def test_a_sum_of_two_reshaped_products_is_moved_and_what_reads_it_alone():
    total, squared = operation("elementwise", (1, 3), tag="add"), operation("elementwise", (4, 4), tag="multiply")
    assert moved(PRODUCT, RESHAPED, OTHER, OTHER_RESHAPED, total, squared) == {4, 5}


def test_numbers_in_every_element_move_along_and_arrays_do_not():
    two, twos = operation("literal", shape=()), operation("broadcast", (2,))
    assert moved(PRODUCT, RESHAPED, two, twos, operation("elementwise", (1, 3))) == {4}
    assert not moved(PRODUCT, RESHAPED, operation("input"), operation("elementwise", (1, 2)))


def test_none_is_moved_where_another_operation_reads_what_is_reshaped():
    root = operation("expensive", (1,), tag="sqrt")
    assert moved(PRODUCT, RESHAPED, root) == {2}
    assert not moved(PRODUCT, RESHAPED, root, operation("reduce", (1,), (32, 32)))
    assert not moved(
        PRODUCT, RESHAPED, root, operation("elementwise", (2, 1)), operation("input"), root._replace(operands=(4, 1))
    )


def test_a_product_that_is_reshaped_in_two_ways_is_not_moved():
    flat = operation("bitcast", (2,), (32, 64, 32))
    other = operation("dot", shape=(64, 1024))
    assert not moved(PRODUCT, RESHAPED, other, flat, operation("elementwise", (1, 3)))


def test_a_sum_is_written_under_the_shape_before_and_reshaped_for_others():
    total, read = operation("elementwise", (1, 3), tag="add"), operation("transpose", (4,), (64, 32, 32), (1, 0, 2))
    changed, place = moved_down([PRODUCT, RESHAPED, OTHER, OTHER_RESHAPED, total, read], [5])
    reshaped = changed[place[4]]
    assert (reshaped.kind, reshaped.shape) == ("bitcast", DEEP)
    made = changed[reshaped.operands[0]]
    assert (made.name, made.shape, [changed[o].kind for o in made.operands]) == ("add", FLAT, ["dot", "dot"])
    assert changed[place[5]].operands == (place[4],)


def test_a_sum_of_everything_reads_what_was_not_reshaped():
    squared = operation("elementwise", (1, 1), tag="multiply")
    reduced = operation("reduce", (2,), (), ("reduce-sum", (0, 1, 2)))
    changed, place = moved_down([PRODUCT, RESHAPED, squared, reduced], [3])
    assert changed[place[3]].tag == ("reduce-sum", (0, 1))
    assert changed[changed[place[3]].operands[0]].shape == FLAT


def test_a_reshape_back_is_none():
    root, flat = operation("expensive", (1,), tag="sqrt"), operation("bitcast", (2,), FLAT)
    changed, place = moved_down([PRODUCT, RESHAPED, root, flat], [3])
    assert changed[place[3]].kind == "expensive"


def test_dimensions_are_reduced_as_they_were_joined():
    assert axes_before((2048, 32), (32, 64, 32), (2,)) is None
    assert axes_before((32, 64, 8), (2048, 8), (0,)) == [0, 1]
    assert axes_before((32, 64, 8), (2048, 8), (1,)) is None
    assert axes_before((32, 64, 8), (32, 512), (0, 1)) == [0, 1, 2]


def test_the_last_reader_that_was_moved_takes_the_place_of_the_reshape():
    """As the logarithm in a softmax's does that comes after the quotient in its transpose."""
    first, second = operation("expensive", (1,), tag="sqrt"), operation("expensive", (1,), tag="log")
    joined = operation("rearrange", (2, 3), (64, 64, 32), ("concatenate", 0))
    changed, place = moved_down([PRODUCT, RESHAPED, first, second, joined], [4])
    readers = Graph(changed, (place[4],)).readers[place[0]]
    assert [changed[reader].name for reader in readers] == ["log", "sqrt"]


def test_a_reader_that_no_output_needs_does_not_keep_a_reshape_where_it_is():
    root, unneeded = operation("expensive", (1,), tag="sqrt"), operation("reduce", (1,), (32, 32), ("reduce-sum", (1,)))
    changed, place = moved_down([PRODUCT, RESHAPED, root, unneeded], [2])
    assert changed[changed[place[2]].operands[0]].is_moved
