"""Simplifications change no number: random operations, evaluated as they were asked for and as they are kept."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from passes.ir import Node, TensorType
from passes.memory.dtype_widening import round_to, to_xla_widened
from passes.memory.operations import BY_COLUMNS, Compiler, Operations
from passes.memory.products import contraction

SHAPES = [(), (1,), (4,), (3, 4), (3, 1), (2, 3, 4), (4, 3), (12,), (2, 1, 4)]
APPLY: dict[str, Any] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "negate": np.negative,
    "exponential": lambda x: np.exp(np.minimum(x, 2)),
    "select": lambda p, a, b: np.where(p != 0, b, a),
}
COUNTS = {"negate": 1, "exponential": 1, "select": 3}
SEEDS = range(120)


def number(value: Any) -> float:
    """A literal, or what an operation of literals comes to."""
    return float(APPLY[value[0]](*map(number, value[1:]))) if isinstance(value, tuple) else float(value)


def kept(operations: Operations, given: dict[int, np.ndarray]) -> list[np.ndarray]:
    """Every operation's result, as they are kept."""
    found: list[np.ndarray] = []
    for index, held in enumerate(operations.every):
        operands = [found[o] for o in held.operands]
        match held.kind:
            case "input":
                value = given[index]
            case "literal":
                value = np.asarray(number(held.tag[1]))  # pyright: ignore[reportIndexIssue]
            case "bitcast":
                value = operands[0].reshape(held.shape)
            case "transpose":
                value = operands[0].transpose(held.tag)  # pyright: ignore[reportArgumentType]
            case "broadcast":
                dims = held.tag
                sizes = [held.shape[d] if d in dims else 1 for d in range(len(held.shape))]  # pyright: ignore[reportOperatorIssue]
                value = np.broadcast_to(operands[0].reshape(sizes), held.shape)
            case _:
                value = APPLY[held.name](*operands)
        assert value.shape == held.shape, held
        found.append(value)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_simplified_operations_compute_the_same(seed: int) -> None:
    r, rng, operations = random.Random(seed), np.random.default_rng(seed), Operations()
    given: dict[int, np.ndarray] = {}
    wanted: dict[int, np.ndarray] = {}
    for tag, shape in enumerate(SHAPES):
        made = operations.add("input", (), shape, "float32", tag)
        given[made] = wanted[made] = rng.normal(size=shape)
    for value in (0.0, 1.0, 2.5):
        wanted[operations.literal(value, "float32")] = np.asarray(value)

    def pick(*shapes: tuple[int, ...]) -> int:
        return r.choice([o for o, x in wanted.items() if not shapes or x.shape in shapes])

    for _ in range(40):
        match r.choice(("elementwise", "elementwise", "elementwise", "broadcast", "transpose", "reshape")):
            case "broadcast":
                shape = r.choice([s for s in SHAPES if s])
                source = pick()
                inner = wanted[source].shape
                places = range(len(shape))
                dims = sorted(r.sample(places, min(len(inner), len(shape))))
                if len(inner) > len(shape) or any(n not in (1, shape[d]) for n, d in zip(inner, dims, strict=True)):
                    continue
                sizes = [1] * len(shape)
                for n, d in zip(inner, dims, strict=True):
                    sizes[d] = n
                value = np.broadcast_to(wanted[source].reshape(sizes), shape)
                made = operations.broadcast(source, shape, dims)
            case "transpose":
                source = pick(*[s for s in SHAPES if s])
                order = r.sample(range(wanted[source].ndim), wanted[source].ndim)
                value, made = wanted[source].transpose(order), operations.transpose(source, order)
            case "reshape":
                source = pick(*[s for s in SHAPES if s])
                shape = r.choice([s for s in SHAPES if math.prod(s) == wanted[source].size])
                value, made = wanted[source].reshape(shape), operations.reshape(source, shape)
            case _:
                name = r.choice(list(APPLY))
                shape = r.choice(SHAPES)
                operands = [pick(shape, ()) for _ in range(COUNTS.get(name, 2))]
                value = np.broadcast_to(APPLY[name](*(wanted[o] for o in operands)), shape)
                type = TensorType(shape=shape, dtype="float32")
                made = operations.elementwise(name, operands, type, expensive=name == "exponential")
        assert operations[made].shape == value.shape or operations[made].kind == "literal"
        if made in wanted:
            np.testing.assert_allclose(wanted[made], value, rtol=1e-9)
        elif operations[made].shape == value.shape:
            wanted[made] = value
    values = kept(operations, given)
    for made, value in wanted.items():
        np.testing.assert_allclose(values[made], value, rtol=1e-9, err_msg=str(operations[made]))


def test_two_transposes_are_one() -> None:
    whole = np.arange(24.0).reshape(2, 3, 4)
    for first, second in itertools.product(itertools.permutations(range(3)), repeat=2):
        operations = Operations()
        given = {operations.add("input", (), whole.shape, "float32", 0): whole}
        made = operations.transpose(operations.transpose(0, first), second)
        np.testing.assert_array_equal(kept(operations, given)[made], whole.transpose(first).transpose(second))


def test_two_broadcasts_are_one() -> None:
    row = np.arange(4.0)
    for inner, outer in itertools.product(((0,), (1,)), itertools.combinations(range(3), 2)):
        operations = Operations()
        given = {operations.add("input", (), row.shape, "float32", 0): row}
        sizes = {inner[0]: 4, 1 - inner[0]: 3}
        square = operations.broadcast(0, (sizes[0], sizes[1]), inner)
        shape = [2, 2, 2]
        shape[outer[0]], shape[outer[1]] = sizes[0], sizes[1]
        made = operations.broadcast(square, tuple(shape), outer)
        place = [1, 1, 1]
        place[outer[inner[0]]] = 4
        np.testing.assert_array_equal(kept(operations, given)[made], np.broadcast_to(row.reshape(place), shape))
        assert operations[made].operands == (0,)


def test_equal_operations_are_one() -> None:
    operations = Operations()
    x = operations.add("input", (), (4,), "float32", 0)
    type = TensorType(shape=(4,), dtype="float32")
    assert operations.elementwise("exponential", [x], type) == operations.elementwise("exponential", [x], type)
    assert operations.elementwise("exponential", [x], type) != operations.elementwise("negate", [x], type)


@pytest.mark.parametrize(
    ("name", "value", "first", "second"),
    [
        ("add", 0.0, True, True),
        ("subtract", 0.0, False, True),
        ("multiply", 1.0, True, True),
        ("divide", 1.0, False, True),
    ],
)
def test_operations_that_change_nothing_are_left_out(name: str, value: float, first: bool, second: bool) -> None:
    """`first` and `second` say on which side a number may be left out."""
    operations = Operations()
    type = TensorType(shape=(4,), dtype="float32")
    x = operations.add("input", (), (4,), "float32", 0)
    number = operations.literal(value, "float32")
    assert (operations.elementwise(name, [number, x], type) == x) == first
    assert (operations.elementwise(name, [x, number], type) == x) == second
    other = operations.literal(7.0, "float32")
    assert operations.elementwise(name, [x, other], type) != x


def test_operations_alike_along_a_dimension_are_computed_once() -> None:
    operations = Operations()
    row = operations.add("input", (), (4,), "float32", 0)
    wide = operations.broadcast(row, (3, 4), (1,))
    made = operations.elementwise("exponential", [wide], TensorType(shape=(3, 4), dtype="float32"), expensive=True)
    assert operations[made].kind == "broadcast"
    assert operations[operations[made].operands[0]].shape == (4,)


@pytest.mark.parametrize("group", [1, 4])
def test_a_batch_of_products_that_sums_over_two_dimensions_is_transposed_even_if_one_has_size_1(group: int) -> None:
    """As the gradient of experts over groups of tokens is: XLA looks at how many there are, not at how long."""
    operations = Operations()
    numbers = (((1, 2), (1, 2)), ((0,), (0,)))
    left = operations.add("input", (), (8, group, 32, 64), "float32", 0)
    right = operations.add("input", (), (8, group, 32, 16), "float32", 1)
    node = Node(primitive="dot_general", inputs=(), outputs=(), params={"dimension_numbers": numbers})
    (made,) = contraction(operations, node, (left, right), [TensorType(shape=(8, 64, 16), dtype="float32")])
    product = next(held for held in operations.every if held.kind == "dot")
    assert operations[made].shape == (8, 64, 16)
    assert [operations[o].shape for o in product.operands] == [(8, 64, 32 * group), (8, 32 * group, 16)]
    assert any(held.kind == "transpose" for held in operations.every)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scatter_that_is_added_is_scattered_onto_the_sum_unless_it_was_rounded(dtype: str) -> None:
    """As the gradient of a table of embeddings in microbatches is: in bfloat16 the zeros stay."""
    operations, wide = Operations({"bfloat16": "float32"}), TensorType(shape=(8, 4), dtype="float32")
    total = operations.add("input", (), wide.shape, wide.dtype, 0)
    zeros = operations.converted(operations.broadcast(operations.literal(0.0, dtype), wide.shape, ()), "float32")
    assert operations.number(zeros) == 0.0
    rows = operations.add("input", (), (2, 4), "float32", 1)
    made = operations.add("update", (zeros, rows), wide.shape, wide.dtype, ("scatter-add", 0))
    rounded = round_to(operations, made, dtype)
    conversion = Node(primitive="convert_element_type", inputs=(), outputs=())
    (again,) = to_xla_widened(operations, conversion, [rounded], [wide])
    assert again == made
    summed = operations[operations.elementwise("add", (total, made), wide)]
    assert summed.kind == ("update" if dtype == "float32" else "elementwise")
    assert summed.operands[0] == total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_of_columns_is_written_as_its_reader_wants_it_rounded_or_not(dtype: str) -> None:
    """As the gradient of a weight is that ZeRO scatters along its second dimension: no copy is made."""
    operations = Operations()
    left, right = (operations.add("input", (), shape, "float32", shape) for shape in ((16, 8), (16, 4)))
    made = operations.add("dot", (left, right), (8, 4), "float32", BY_COLUMNS)
    turned = operations.transpose(operations.converted(operations.converted(made, dtype), "float32"), (1, 0))
    assert operations[turned].shape == (4, 8)
    assert all(held.kind != "transpose" for held in operations.every)
    below = operations[turned]
    while below.kind != "dot":
        below = operations[below.operands[0]]
    assert (below.operands, below.tag) == ((right, left), BY_COLUMNS)


def test_a_scatter_that_another_operation_reads_stays_and_is_added() -> None:
    """As the gradient of the logarithms of a softmax is that are picked: it is summed along each row, too."""
    operations, type = Operations(), TensorType(shape=(8, 4), dtype="float32")
    total, rows = (operations.add("input", (), shape, "float32", 0) for shape in ((8, 4), (2, 4)))
    zeros = operations.broadcast(operations.literal(0.0, "float32"), type.shape, ())
    made = operations.add("update", (zeros, rows), type.shape, type.dtype, ("scatter-add", 0))
    operations.add("reduce", (made,), (8,), "float32", ("reduce-sum", (1,)))
    assert operations[operations.elementwise("add", (total, made), type)].kind == "elementwise"


def test_sums_and_products_are_equal_in_either_order() -> None:
    operations, type = Operations(), TensorType(shape=(8, 4), dtype="float32")
    both = [operations.add("input", (), type.shape, type.dtype, number) for number in range(2)]
    for name in ("add", "multiply", "subtract"):
        made = {operations.elementwise(name, order, type) for order in (both, both[::-1])}
        assert len(made) == (2 if name == "subtract" else 1)


@pytest.mark.parametrize(("values", "is_condition"), [((False, True), True), ((True, False), False)])
def test_a_selection_of_true_by_a_condition_is_the_condition(values: tuple[bool, bool], is_condition: bool) -> None:
    operations, type = Operations(), TensorType(shape=(4, 4), dtype="bool")
    condition = operations.add("input", (), type.shape, "bool", 0)
    made = operations.elementwise("select", [condition, *(operations.literal(v, "bool") for v in values)], type)
    assert (made == condition) == is_condition


def test_a_whole_number_and_zero_are_that_number() -> None:
    operations, type = Operations(), TensorType(shape=(4, 4), dtype="int32")
    counted = operations.add("iota", (), type.shape, "int32", 0)
    assert operations.elementwise("add", [counted, operations.literal(0, "int32")], type) == counted


@pytest.mark.parametrize("compiler", ["cpu", "gpu"])
def test_squares_of_what_a_collective_made_are_computed_as_that_lies_on_gpus(compiler: Compiler):
    """As the sums of squares of a batch normalisation are, of images whose channels were sent first."""
    operations = Operations(compiler=compiler)
    sent = operations.add("collective", (), (4, 8), "bfloat16", "reduce_scatter")
    images = operations.converted(operations.transpose(sent, (1, 0)), "float32")
    square = operations.elementwise("square", (images,), TensorType(shape=(8, 4), dtype="float32"))
    assert (operations[square].kind == "transpose") == (compiler == "gpu")
