"""Functions of elements that XLA computes by simpler ones."""

import pytest

from passes.ir import Node, TensorType
from passes.memory.expansions import divided, error_inverse, logistic, multiplied, power
from passes.memory.operations import Compiler, Operation, Operations

TYPE = TensorType(shape=(8, 4), dtype="float32")


def written(lowering, *params: tuple[str, object]) -> list[Operation]:
    """The operations that a function of one array becomes."""
    operations = Operations()
    array = operations.add("input", (), TYPE.shape, TYPE.dtype)
    node = Node(primitive="f", inputs=(0,), outputs=(1,), params=dict(params))
    lowering(operations, node, [array], [TYPE])
    return operations.every


@pytest.mark.parametrize(
    ("lowering", "params", "expensive"),
    [
        (error_inverse, (), ["log-plus-one", "sqrt"]),
        (logistic, (), ["exponential", "divide"]),
        (power, (("y", 5),), []),
        (power, (("y", -2),), ["divide"]),
    ],
)
def test_expensive_operations_are_those_that_xla_computes_once(lowering, params, expensive: list[str]):
    assert [operation.name for operation in written(lowering, *params) if operation.kind == "expensive"] == expensive


def test_a_fifth_power_takes_three_products():
    assert sum(operation.name == "multiply" for operation in written(power, ("y", 5))) == 3


@pytest.mark.parametrize("compiler", ["cpu", "gpu"])
def test_rows_by_a_number_each_are_products_but_on_gpus(compiler: Compiler):
    operations = Operations(compiler=compiler)
    array = operations.add("input", (), TYPE.shape, TYPE.dtype)
    each = operations.add("input", (), TYPE.shape[:1], TYPE.dtype, 1)
    below = operations.broadcast(each, TYPE.shape, (0,))
    node = Node(primitive="f", inputs=(0, 1), outputs=(2,), params={})
    (result,) = divided(operations, node, [array, below], [TYPE])
    assert operations[result].name == ("divide" if compiler == "gpu" else "multiply")


def test_a_quotient_by_a_number_is_a_product():
    operations = Operations()
    array, four = operations.add("input", (), TYPE.shape, TYPE.dtype), operations.literal(4.0, TYPE.dtype)
    node = Node(primitive="f", inputs=(0, 1), outputs=(2,), params={})
    (result,) = divided(operations, node, [array, four], [TYPE])
    assert (operations[result].kind, operations[result].name) == ("elementwise", "multiply")


def product(operations: Operations, *factors: int) -> Operation:
    node = Node(primitive="f", inputs=(0, 1), outputs=(2,), params={})
    return operations[multiplied(operations, node, list(factors), [TYPE])[0]]


def test_a_number_goes_over_to_the_factor_that_is_broadcast():
    operations = Operations()
    array, row = operations.add("input", (), TYPE.shape, TYPE.dtype), operations.add("input", (), (4,), TYPE.dtype)
    scaled = operations.elementwise("multiply", (array, operations.literal(2.0, TYPE.dtype)), TYPE)
    made = product(operations, operations.broadcast(row, TYPE.shape, (1,)), scaled)
    assert made.operands[0] == array
    assert operations[operations[made.operands[1]].operands[0]].shape == (4,)


def test_a_number_goes_over_to_another_number():
    operations = Operations()
    array = operations.add("input", (), TYPE.shape, TYPE.dtype)
    scaled = operations.elementwise("multiply", (array, operations.literal(2.0, TYPE.dtype)), TYPE)
    made = product(operations, scaled, operations.literal(3.0, TYPE.dtype))
    assert made.operands[0] == array
    assert operations.number(made.operands[1]) == ("*", 2.0, 3.0)


def test_a_product_by_what_is_true_or_false_is_a_choice():
    operations = Operations()
    array, mask = (operations.add("input", (), TYPE.shape, dtype) for dtype in (TYPE.dtype, "bool"))
    made = product(operations, operations.converted(mask, TYPE.dtype), array)
    assert (made.name, made.operands[:2]) == ("select", (mask, array))
