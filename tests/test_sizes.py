"""No file, class or function is too long to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.source_tree import Sources, read_tree, tree

MOST_LINES = {"file": 400, "class": 200, "function": 60}


def sizes(module: str, source: str) -> Iterator[tuple[str, str, int]]:
    """Kind, name and lines of a module and of every class and function of it, decorators left out."""
    yield "file", module, len(source.splitlines())
    for node in ast.walk(tree(source)):
        match node:
            case ast.ClassDef(name=name):
                yield "class", f"{module}.{name}", lines(node)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield "function", f"{module}.{name}", lines(node)
            case _:
                pass


def lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def too_long(sources: Sources) -> list[str]:
    """A complaint for each file, class and function that is too long."""
    return [
        f"{name}: a {kind} of {n} lines; {MOST_LINES[kind]} are the most: divide it"
        for module, source in sources.items()
        for kind, name, n in sizes(module, source)
        if n > MOST_LINES[kind]
    ]


def test_nothing_is_too_long() -> None:
    assert too_long(read_tree()) == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = 1\n" * 401, "m: a file of 401 lines"),
        ("class C:\n" + "    x = 1\n" * 200, "m.C: a class of 201 lines"),
        ("def f():\n" + "    x = 1\n" * 60, "m.f: a function of 61 lines"),
        ("class C:\n    async def f():\n" + "        x = 1\n" * 60, "m.f: a function of 61 lines"),
    ],
)
def test_code_that_is_too_long_is_found(source: str, complaint: str) -> None:
    (first,) = too_long({"m": source})
    assert first.startswith(complaint)


def test_code_at_the_limit_is_not_complained_about() -> None:
    assert too_long({"m": "class C:\n" + "    x = 1\n" * 199 + "def f():\n" + "    x = 1\n" * 59}) == []
