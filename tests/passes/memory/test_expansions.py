"""Functions of elements that XLA computes by simpler ones."""

import pytest

from passes.ir import Node, TensorType
from passes.memory.expansions import divided, error_inverse, logistic, power
from passes.memory.operations import Operation, Operations

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
def test_what_is_computed_once_is_what_xla_computes_once(lowering, params, expensive: list[str]):
    assert [operation.name for operation in written(lowering, *params) if operation.kind == "expensive"] == expensive


def test_a_fifth_power_takes_three_products():
    assert sum(operation.name == "multiply" for operation in written(power, ("y", 5))) == 3


def test_a_quotient_by_a_number_is_a_product():
    operations = Operations()
    array, four = operations.add("input", (), TYPE.shape, TYPE.dtype), operations.literal(4.0, TYPE.dtype)
    node = Node(primitive="f", inputs=(0, 1), outputs=(2,), params={})
    (result,) = divided(operations, node, [array, four], [TYPE])
    assert (operations[result].kind, operations[result].name) == ("elementwise", "multiply")
