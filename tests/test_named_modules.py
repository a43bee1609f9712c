"""Every module of `passes` is named by a test: it, or what it defines, is imported there, be it by way of its room."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_tree import ROOT, Sources, face, imports, is_within, owner, read_tree, tree
from tests.test_layering import is_room

RULE = re.compile(r"^@rule\(", re.MULTILINE)
"""What marks a module of sharding rules: every primitive of theirs has a case in tests/autopar/lowering/rule_cases."""


def named(sources: Sources) -> set[str]:
    """The modules that tests import, or of which they import something through a room's face."""
    handed = {
        f"{module.removesuffix('.__init__')}.{name}": target
        for module, source in sources.items()
        if is_room(module)
        for name, target in brought(module, source)
        if name in face(source)
    }
    members: set[str] = set()
    for module, source in sources.items():
        if is_within(module, "tests"):
            for _, name in imports(module, source):
                target = owner(handed.get(name, name), sources)
                members |= {target} if target else set()
    return members


def brought(module: str, source: str) -> Iterator[tuple[str, str]]:
    """The names that a module has of others, each with what it stands for."""
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def unnamed(sources: Sources) -> list[str]:
    known = named(sources)
    return [
        f"{module} is imported by no test, nor is anything that it defines: write one"
        for module, source in sources.items()
        if is_within(module, "passes") and not module.endswith("__init__")
        if module not in known and not (is_within(module, "passes.rules") and RULE.search(source))
    ]


def test_every_module_of_passes_is_named_by_a_test() -> None:
    assert unnamed(read_tree()) == []


ROOM = {"passes.ir.__init__": "from passes.ir.graph import Graph\n__all__ = ['Graph']", "passes.ir.graph": ""}


@pytest.mark.parametrize(
    ("test", "count"),
    [
        ("", 1),
        ("import passes.ir", 1),
        ("from passes.ir import Other", 1),
        ("from passes.ir import Graph", 0),
        ("from passes.ir.graph import Node", 0),
        ("import passes.ir.graph", 0),
    ],
)
def test_a_module_is_named_by_itself_or_by_what_its_room_hands_out(test: str, count: int) -> None:
    assert len(unnamed({**ROOM, "tests.passes.ir.test_graph": test})) == count


def test_rules_are_named_by_their_cases() -> None:
    assert unnamed({"passes.rules.shape": '@rule("reshape")\ndef reshape(): ...'}) == []
    assert len(unnamed({"passes.rules.shape": "def helper(): ..."})) == 1


def test_tests_mirror_the_rooms() -> None:
    rooms = [folder for package in ("passes", "autopar") for folder in (ROOT / package).iterdir() if is_of_code(folder)]
    assert rooms
    assert [room.name for room in rooms if not is_of_code(ROOT / "tests" / room.relative_to(ROOT))] == []


def is_of_code(folder: Path) -> bool:
    return any(folder.glob("*.py"))
