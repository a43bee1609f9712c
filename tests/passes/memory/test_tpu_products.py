"""Products on TPUs: float32 is rounded to bfloat16, unless the program asks for more."""

from __future__ import annotations

import pytest

from passes.ir import Node, TensorType
from passes.memory.operations import Compiler, Operation, Operations
from passes.memory.products import contraction, convolution
from passes.memory.tpu_fusion import fuse
from passes.memory.tpu_products import passed_rounded, sent_rounded
from tests.passes.memory.device_programs import operation

SHAPE = (64, 64)
FLOAT32 = TensorType(shape=SHAPE, dtype="float32")
SENT = ("all_gather", ("x",), "add", 0, -1)


def product(compiler: Compiler, precision: object, dtype: str = "float32") -> list[str]:
    """The dtypes of the sides of a product."""
    operations = Operations(compiler=compiler)
    sides = [operations.add("input", (), SHAPE, dtype, i) for i in range(2)]
    params = {"dimension_numbers": (((1,), (0,)), ((), ())), "precision": precision}
    node = Node(primitive="dot_general", inputs=(0, 1), outputs=(2,), params=params)
    (made,) = contraction(operations, node, sides, (FLOAT32,))
    assert operations[made].dtype == "float32"
    return [operations[o].dtype for o in operations[made].operands]


@pytest.mark.parametrize("precision", [None, ("DEFAULT", "DEFAULT")])
def test_products_round_their_sides(precision: object) -> None:
    """As every product of a vision transformer in float32: what it alone reads takes half the bytes."""
    assert product("tpu", precision) == ["bfloat16"] * 2
    assert product("gpu", precision) == ["float32"] * 2


@pytest.mark.parametrize("precision", [("HIGHEST", "HIGHEST"), ("HIGH", "DEFAULT"), "TF32_TF32_F32"])
def test_products_of_a_higher_precision_round_nothing(precision: object) -> None:
    assert product("tpu", precision) == ["float32"] * 2
    assert product("tpu", precision, "bfloat16") == ["bfloat16"] * 2


def test_products_read_widened_operands_as_they_were_and_round_before_transposing() -> None:
    operations = Operations(compiler="tpu")
    narrow = operations.add("input", (), SHAPE, "bfloat16", 0)
    wide = operations.converted(narrow, "float32")
    turned = operations.transpose(operations.add("input", (), (64, 2, 32), "float32", 1), (1, 2, 0))
    params = {"dimension_numbers": (((1,), (2,)), ((), ())), "precision": None}
    node = Node(primitive="dot_general", inputs=(0, 1), outputs=(2,), params=params)
    contraction(operations, node, (wide, turned), (TensorType(shape=(64, 2, 32), dtype="float32"),))
    (dot,) = [made for made in operations.every if made.kind == "dot"]
    assert narrow in dot.operands
    assert not any(operations[o].dtype == "float32" for o in dot.operands)
    assert not any(made.kind == "transpose" and made.is_conversion for made in operations.every)


def test_convolutions_round_images_and_kernels() -> None:
    operations = Operations(compiler="tpu")
    sides = [operations.add("input", (), shape, "float32", i) for i, shape in enumerate(((8, 16, 16, 4), (3, 3, 4, 8)))]
    numbers = {"lhs_spec": (0, 3, 1, 2), "rhs_spec": (3, 2, 0, 1), "out_spec": (0, 3, 1, 2)}
    params = {"dimension_numbers": numbers, "batch_group_count": 1, "precision": None}
    node = Node(primitive="conv_general_dilated", inputs=(0, 1), outputs=(2,), params=params)
    (made,) = convolution(operations, node, sides, (TensorType(shape=(8, 16, 16, 8), dtype="float32"),))
    assert [operations[o].dtype for o in operations[made].operands] == ["bfloat16"] * 2


def test_a_gather_for_products_alone_is_rounded_before_it_is_sent() -> None:
    """As weights under ZeRO-3 in float32: half the bytes are sent and kept."""
    every = (
        operation("input", shape=(8, 64), tag=0),
        operation("collective", 0, shape=SHAPE, tag=SENT),
        operation("expensive", 1, shape=SHAPE, name="convert float32")._replace(dtype="bfloat16"),
        operation("dot", 2, 2, shape=SHAPE),
    )
    made, place = sent_rounded(every, (3,))
    gathered = made[place[1]]
    assert gathered.dtype == "bfloat16"
    assert made[gathered.operands[0]].dtype == "bfloat16"
    assert made[gathered.operands[0]].shape == every[0].shape
    assert {made[k.operation].dtype for k in fuse(made, (place[3],)) if k.reads} == {"bfloat16", "float32"}
    added = (*every, operation("elementwise", 1, 3, shape=SHAPE, name="add"))
    assert sent_rounded(added, (4,))[0] == added
    assert sent_rounded(every, (1, 3))[0] == every


def behind_barrier(*others: Operation) -> tuple[Operation, ...]:
    """A gradient in float32 that a product reads, and one more behind a barrier, with `others` after these."""
    rounding = operation("expensive", 0, shape=SHAPE, name="convert float32")._replace(dtype="bfloat16")
    return (
        operation("elementwise", shape=SHAPE, name="negate"),
        rounding,
        operation("opaque", 0, shape=(0,), name="barrier"),
        operation("opaque", 2, shape=(0,), name="barrier"),
        operation("part", 0, 3, shape=SHAPE, name="barrier"),
        rounding._replace(operands=(4,)),
        operation("dot", 1, 5, shape=SHAPE),
        *others,
    )


def test_operands_of_products_alone_pass_a_barrier_rounded() -> None:
    """As gradients of a vision transformer in float32, of which weights under ZeRO-3 are gathered again behind them."""
    made, place = passed_rounded(behind_barrier(), (6,))
    passed = made[place[4]]
    assert passed.dtype == made[passed.operands[0]].dtype == "bfloat16"
    assert made[place[2]].operands == passed.operands[:1] == made[place[1]].operands
    assert [made[place[o]].kind for o in (1, 5)] == ["bitcast", "bitcast"]


def test_operands_of_a_sum_as_well_pass_a_barrier_as_they_are() -> None:
    every = behind_barrier(operation("reduce", 0, name="reduce-sum"))
    assert passed_rounded(every, (6, 7)) == (every, tuple(range(len(every))))
