"""The sources of the checkout, parsed, with what each module imports, for tests of the code itself."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]

FOLDERS = ("autopar", "benchmarks", "models", "passes", "tests")

Sources = Mapping[str, str]

Check = Callable[[Sources], list[str]]


@functools.cache
def read_tree() -> Sources:
    """The source of every module of the checkout."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text() for path in paths}


@functools.cache
def tree(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def imports(module: str, source: str) -> list[tuple[int, str]]:
    """Line and absolute name of everything imported, wherever the statement stands."""
    found = list[tuple[int, str]]()
    for node in ast.walk(tree(source)):
        match node:
            case ast.Import(names=names):
                found += [(node.lineno, alias.name) for alias in names]
            case ast.ImportFrom(module=base, names=names, level=level):
                parents = module.split(".")[:-level] if level else []
                stem = [*parents, *([base] if base else [])]
                found += [(node.lineno, ".".join([*stem, alias.name])) for alias in names]
    return found


def is_within(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def owner(name: str, known: Sources) -> str | None:
    """The module of `known` that holds `name`: itself, or the nearest parent that is a file."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((file for prefix in prefixes for file in (prefix, f"{prefix}.__init__") if file in known), None)


def face(source: str) -> tuple[str, ...]:
    """The names of `__all__`; none where it is not written out."""
    for node in tree(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return tuple(ast.literal_eval(value))
            case _:
                pass
    return ()
