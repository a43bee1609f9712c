"""Operators are data: what planning and lowering know of a primitive stands in its sharding rule, in `passes/rules`.

Outside, primitives are named only where they are read from JAX, where loops and branches are taken apart and put
together, where the imitation of XLA's compiler says what each becomes, and where a piece is run by a function of JAX.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from jax.extend.core import Primitive, primitives

from passes.rules import WITHOUT_RULE, known_primitives

ROOT = Path(__file__).parents[1]
FOLDERS = ("passes", "autopar")

ALLOWED = {
    "passes/rules": "the rules",
    "passes/ir/control.py": "control flow as planning sees it",
    "passes/ir/effects.py": "callbacks, which keep program order",
    "passes/memory/lowering_rules.py": "the imitation of XLA's lowering",
    "autopar/frontend/by_row.py": "what indexes rows, read from JAX",
    "autopar/frontend/constraints.py": "a primitive of our own",
    "autopar/frontend/late_casts.py": "loops, calls, sums and casts, read from JAX",
    "autopar/frontend/known_numbers.py": "what is one number throughout, read from JAX",
    "autopar/frontend/places.py": "joins, parts and positions, read from JAX",
    "autopar/frontend/primitives.py": "calls and bodies, read from JAX",
    "autopar/frontend/regrouping.py": "joins, parts and random numbers bound again",
    "autopar/frontend/row_tests.py": "a primitive of our own, and the loop that it is for",
    "autopar/frontend/sums_of_parts.py": "sums and parts of derivatives, read from JAX",
    "autopar/checks/hlo_kinds.py": "opcodes of HLO, which has loops and calls of its own",
    "autopar/lowering/control.py": "control flow bound again",
    "autopar/lowering/localizers.py": "functions of JAX that run a piece",
}

PRIMITIVES = (
    {p.name for p in vars(primitives).values() if isinstance(p, Primitive)} | known_primitives() | WITHOUT_RULE.keys()
)

OURS = {
    "reductions": {"add", "max", "min", "or", "and"},
    "steps of a resharding, and collectives": {"slice", "all_gather", "all_to_all", "ragged_all_to_all"},
    "words": {"name", "stage", "log", "pad", "copy", "complex", "jit", "split", "threefry2x32"},
}
"""Words that we use for something else too; compared with a node's primitive they name a primitive all the same."""


XLA = "passes/memory/"
"""Where kinds of XLA's operations are named, some as primitives are: what nodes are compared with is a primitive's."""


def is_allowed(path: str) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in ALLOWED)


def prose_in(tree: ast.Module) -> set[int]:
    """The constants that are statements by themselves, and the words between the values of a formatted text."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return alone | {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}


def asks_for_primitive(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "primitive") or (
        isinstance(node, ast.Name) and node.id == "primitive"
    )


def texts(node: ast.AST) -> Iterator[ast.Constant]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.Constant) and isinstance(inner.value, str))


def named(source: str, *, compared: bool = False) -> Iterator[tuple[int, str]]:
    """Line and text of every primitive that a source names; only of those that it compares or makes nodes of."""
    tree = ast.parse(source)
    prose, ours = prose_in(tree), set[str]().union(*OURS.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(map(asks_for_primitive, (node.left, *node.comparators))):
            yield from ((text.lineno, str(text.value)) for text in texts(node))
        elif isinstance(node, ast.keyword) and node.arg == "primitive":
            yield from ((text.lineno, str(text.value)) for text in texts(node.value))
        elif not compared and isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            words = node.value.split()
            if words and PRIMITIVES.issuperset(words) and not ours.issuperset(words):
                yield node.lineno, node.value


def test_primitives_are_named_in_their_rules() -> None:
    complaints = [
        f"{path}:{line} names the primitive {name!r}; what is known of it belongs in its sharding rule"
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not is_allowed(path := file.relative_to(ROOT).as_posix())
        for line, name in named(file.read_text(), compared=path.startswith(XLA))
    ]
    assert not complaints, "\n".join(complaints)


def test_every_place_that_may_name_primitives_does() -> None:
    for place in ALLOWED:
        found = (ROOT / place).rglob("*.py") if (ROOT / place).is_dir() else [ROOT / place]
        assert any(True for file in found for _ in named(file.read_text())), f"{place} names none, and need not"


@pytest.mark.parametrize(
    "source",
    [
        'if node.primitive == "slice": pass',
        'if node.primitive in ("add", "copy"): pass',
        'Node(primitive="add", inputs=())',
        'FREE = frozenset({"broadcast_in_dim"})',
        'SHAPED = "reshape gather".split()',
    ],
)
def test_names_are_found(source: str) -> None:
    assert list(named(source))


@pytest.mark.parametrize("source", ['"""gather"""', 'step.kind == "slice"', 'raise ValueError("a scan of nothing")'])
def test_other_words_are_not(source: str) -> None:
    assert not list(named(source))
