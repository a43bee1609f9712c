"""Every test shows what it asserts: by itself, or by a helper that is called `assert_...`; and none goes by a clock."""

from __future__ import annotations

import ast
import re

import pytest

from tests.source_tree import Sources, is_within, read_tree, tree

ASSERTING = re.compile(r"\bassert_\w+|^pytest\.(raises|warns|fail)$|\.(check|verify)$")
"""Calls that fail where something does not hold; what is checked or verified raises an error of ours."""

CLOCKS = {f"time.{name}" for name in ("time", "monotonic", "perf_counter", "process_time")}


def asserts(test: ast.AST) -> bool:
    """Whether a test says what must hold: a statement, a call, or a function that asserts handed on to another."""
    for node in ast.walk(test):
        match node:
            case ast.Assert():
                return True
            case ast.Call(func=function, args=arguments):
                if any(ASSERTING.search(ast.unparse(each)) for each in (function, *arguments)):
                    return True
            case _:
                pass
    return False


def hollow(sources: Sources) -> list[str]:
    return [
        f"{module}:{node.lineno} {node.name} asserts nothing that can be seen"
        for module, source in sources.items()
        if module.split(".")[-1].startswith("test_")
        for node in ast.walk(tree(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not asserts(node)
    ]


def by_the_clock(sources: Sources) -> list[str]:
    return [
        f"{module}:{node.lineno} reads a clock: count what is done, which a busy machine does not change"
        for module, source in sources.items()
        if is_within(module, "tests")
        for node in ast.walk(tree(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func).removesuffix("_ns") in CLOCKS
    ]


def test_no_test_is_hollow() -> None:
    assert hollow(read_tree()) == []


def test_no_test_reads_a_clock() -> None:
    assert by_the_clock(read_tree()) == []
    assert len(by_the_clock({"tests.test_it": "import time\nstart = time.perf_counter()\ntime.sleep(1)"})) == 1


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("compute()", 1),
        ("for x in range(3): check(x)", 1),
        ("assert compute()", 0),
        ("assert_equal(1, 1)", 0),
        ("np.testing.assert_allclose(1, 1)", 0),
        ("jax.tree.map(np.testing.assert_array_equal, a, b)", 0),
        ("with pytest.raises(ValueError): compute()", 0),
        ("plan.verify(graph)", 0),
    ],
)
def test_a_hollow_test_is_found(body: str, count: int) -> None:
    assert len(hollow({"tests.test_it": f"def test_it():\n    {body}"})) == count
