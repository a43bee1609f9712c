"""Primitives are named in one module of the memory model, and what they are lowered to bears XLA's names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import passes.memory
from passes.ir import Node, TensorType
from passes.memory.dtype_widening import to_xla_widened
from passes.memory.lowering_rules import NARROW, OPCODES, opcode, to_xla
from passes.memory.operations import Operations
from passes.rules import known_primitives

ROOM = Path(passes.memory.__file__).parent
MOVES = {"all_gather", "all_reduce", "all_to_all", "reduce_scatter"}
"""Steps of a move, which primitives are called after too."""
WIDE = TensorType(shape=(8, 4), dtype="float32")


def node(primitive: str, **params: object) -> Node:
    return Node(primitive=primitive, inputs=(), outputs=(), params=params)


def words(source: str) -> set[str]:
    """Every word of every string, but those of docstrings."""
    tree = ast.parse(source)
    prose = {id(stated.value) for stated in ast.walk(tree) if isinstance(stated, ast.Expr)}
    strings = (c for c in ast.walk(tree) if isinstance(c, ast.Constant) and id(c) not in prose)
    return {word for c in strings if isinstance(c.value, str) for word in c.value.split()}


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.stem)
def test_primitives_are_named_in_one_module(path: Path) -> None:
    """What JAX and XLA call alike is an opcode elsewhere; of all other primitives only the lowering rules speak."""
    foreign = {name for name in known_primitives() | NARROW | OPCODES.keys() if opcode(node(name)) != name} - MOVES
    found = words(path.read_text()) & foreign
    assert bool(found) == (path.stem == "lowering_rules"), found


@pytest.mark.parametrize(
    ("primitive", "kind", "name"),
    [
        ("mul", "elementwise", "multiply"),
        ("add_any", "elementwise", "add"),
        ("is_finite", "elementwise", "is-finite"),
        ("tanh", "expensive", "tanh"),
        ("rev", "rearrange", "reverse"),
        ("made_up", "opaque", "made_up"),
    ],
)
def test_a_primitive_becomes_what_xla_calls_it(primitive: str, kind: str, name: str) -> None:
    operations = Operations()
    given = [operations.add("input", (), WIDE.shape, WIDE.dtype, i) for i in range(2 if kind == "elementwise" else 1)]
    (made,) = to_xla(operations, node(primitive), given, [WIDE])
    assert (operations[made].kind, operations[made].name) == (kind, name)
    assert operations[made].operands == tuple(given)


def test_views_of_an_array_stay_narrow() -> None:
    half = TensorType(shape=WIDE.shape, dtype="bfloat16")
    for primitive, dtypes in (("reshape", ["bfloat16"]), ("tanh", ["bfloat16", "float32", "float32", "bfloat16"])):
        operations = Operations({"bfloat16": "float32"})
        given = operations.add("input", (), half.shape, half.dtype, 0)
        shape = (4, 8) if primitive == "reshape" else half.shape
        to_xla_widened(operations, node(primitive), [given], [TensorType(shape=shape, dtype=half.dtype)])
        made = [held.dtype for held in operations.every]
        assert made == (["bfloat16"] * 2 if primitive == "reshape" else dtypes)


@pytest.mark.parametrize(("exponent", "multiplied"), [(2, 1), (3, 2), (5, 3), (8, 3), (-2, 1)])
def test_powers_are_squares_of_squares_each_rounded(exponent: int, multiplied: int) -> None:
    """In bfloat16 the square that a cube is made of is the one that its derivative reads."""
    operations = Operations({"bfloat16": "float32"})
    half = TensorType(shape=WIDE.shape, dtype="bfloat16")
    given = operations.add("input", (), half.shape, half.dtype, 0)
    (made,) = to_xla_widened(operations, node("integer_pow", y=exponent), [given], [half])
    assert sum(held.name == "multiply" for held in operations.every) == multiplied
    assert operations[made].dtype == half.dtype
    rounded = sum(held.dtype == half.dtype and held.kind == "expensive" for held in operations.every)
    assert rounded == multiplied + (exponent < 0)
    known = len(operations.every)
    to_xla_widened(operations, node("integer_pow", y=2), [given], [half])
    assert len(operations.every) == known


def test_all_that_is_sorted_together_is_there_first() -> None:
    operations = Operations()
    given = [operations.add("input", (), WIDE.shape, dtype, dtype) for dtype in ("float32", "int32")]
    types = [TensorType(shape=WIDE.shape, dtype=dtype) for dtype in ("float32", "int32")]
    to_xla(operations, node("sort"), given, types)
    rooms = [held for held in operations.every if held.kind == "update"]
    assert [held.operands for held in rooms] == [tuple(given), tuple(given[::-1])]


def test_bits_under_another_dtype_are_read_where_they_are_needed() -> None:
    operations = Operations()
    given = operations.add("input", (), WIDE.shape, "uint32", 0)
    (same,) = to_xla(operations, node("bitcast_convert_type"), [given], [WIDE])
    assert operations[same].kind == "elementwise"
    (split,) = to_xla(operations, node("bitcast_convert_type"), [given], [TensorType(shape=(8, 4, 2), dtype="uint16")])
    assert operations[split].kind == "opaque"
