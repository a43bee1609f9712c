"""A number that steers planning says what it is: its unit, why it is that large, and what shows it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def is_number(value: ast.expr) -> bool:
    """Whether a value is written with digits alone: a number, or several."""
    inner = [node for node in ast.walk(value) if isinstance(node, ast.Constant)]
    written = (ast.Constant, ast.Tuple, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop, ast.expr_context)
    return (
        bool(inner)
        and all(isinstance(node, written) for node in ast.walk(value))
        and all(type(node.value) in (int, float) for node in inner)
    )


def is_prose(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def unexplained(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every numeric constant of a module without words below it, above it or beside it.

    Constants in a row share the words below the last one.
    """
    lines, body = source.splitlines(), ast.parse(source).body
    for at, node in enumerate(body):
        match node:
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
                pass
            case _:
                continue
        row = [ahead for ahead in body[at:] if ahead.lineno - node.lineno <= body.index(ahead) - at]
        after = next((ahead for ahead in row if not isinstance(ahead, ast.Assign | ast.AnnAssign)), None)
        beside = "  # " in lines[node.lineno - 1] or lines[node.lineno - 2].startswith("# ")
        if is_number(value) and not is_prose(after) and not beside:
            yield node.lineno, ast.unparse(target)


def test_every_number_is_explained() -> None:
    complaints = [
        f"{file.relative_to(ROOT)}:{line} {name}: say below it what it counts, why so many, and what shows it"
        for folder in ("passes", "autopar")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, name in unexplained(file.read_text())
    ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    "source", ["\nMOST = 3\n", "\nA, B = 1, 2.5\n\n\ndef f(): ...", '\nMOST = 3\n\n"""Not of it."""\n']
)
def test_bare_numbers_are_found(source: str) -> None:
    assert list(unexplained(source))


@pytest.mark.parametrize(
    "source",
    ['\nMOST = 3\n"""So many."""', '\nA = 3\nB = 4\n"""Both."""', "\nMOST = 3  # so many\n", '\nNAME = "three"\n'],
)
def test_explained_numbers_are_not(source: str) -> None:
    assert not list(unexplained(source))
