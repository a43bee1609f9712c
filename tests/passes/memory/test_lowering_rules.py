"""Primitives are named in one module of the memory model, and what they are lowered to bears XLA's names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import passes.memory
from passes.ir import Node, TensorType
from passes.memory.lowering_rules import NARROW, OPCODES, opcode, spell
from passes.memory.operations import Operations
from passes.memory.widening import spell_widened
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
    (made,) = spell(operations, node(primitive), given, [WIDE])
    assert (operations[made].kind, operations[made].name) == (kind, name)
    assert operations[made].operands == tuple(given)


def test_what_only_looks_at_an_array_otherwise_stays_narrow() -> None:
    half = TensorType(shape=WIDE.shape, dtype="bfloat16")
    widened = {"bfloat16": "float32"}
    for primitive, dtypes in (("reshape", ["bfloat16"]), ("tanh", ["bfloat16", "float32", "float32", "bfloat16"])):
        operations = Operations()
        given = operations.add("input", (), half.shape, half.dtype, 0)
        shape = (4, 8) if primitive == "reshape" else half.shape
        spell_widened(operations, node(primitive), [given], [TensorType(shape=shape, dtype=half.dtype)], widened)
        made = [held.dtype for held in operations.every]
        assert made == (["bfloat16"] * 2 if primitive == "reshape" else dtypes)
