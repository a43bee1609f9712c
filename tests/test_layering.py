"""Which module may import which, and what no module may touch: read from the source, so nothing needs to run.

A check is a function from sources (module name -> text) to complaints. A package's own file is named
`package.__init__`, which makes the parent of every module its name less the last part.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("autopar", "benchmarks", "models", "passes", "tests")

# The rooms of passes, each of which may import only rooms above it.
ORDER = (
    "errors",
    "collector",
    "quantities",
    "progress",
    "tables",
    "ir",
    "effects",
    "cluster",
    "devices",
    "mesh",
    "sharding",
    "collectives",
    "boundaries",
    "resharding",
    "rules",
    "phases",
    "control",
    "moves",
    "forward",
    "microbatch",
    "cost",
    "bundles",
    "flops",
    "strategies",
    "sharding_problem",
    "linear_program",
    "pulp_solver",
    "prices",
    "flows",
    "factors",
    "strategy_program",
    "tying",
    "polish",
    "dominance",
    "lower_bound",
    "elimination",
    "intra_op",
    "assembly",
    "problem",
    "computing",
    "busiest",
    "budgets",
    "fitting",
    "restrictions",
    "operations",
    "spelling",
    "widening",
    "combining",
    "device_program",
    "fusion",
    "liveness",
    "packing",
    "memory",
    "schedules",
    "simulate",
    "stage_choices",
    "stage_costs",
    "stage_program",
    "stage_search",
    "inter_op",
    "plan_parts",
    "plan_text",
    "plan_diff",
    "plan_json",
    "legality",
    "plan",
    "read_off",
    "mesh_search",
    "stages",
    "segments",
    "likeness",
    "layers",
    "repeats",
    "abridge",
    "remat_parts",
    "loop_remat",
    "remat",
    "variants",
    "pipeline",
    "pipeline_diff",
    "pipelines",
    "crew",
    "pricing",
    "stage_floors",
    "stage_table",
    "drafts",
    "samples",
    "staged",
    "shortage",
    "planner",
    "by_hand",
)
LIBRARIES = {"highspy", "numpy", "pulp", "scipy"}
CLOSED_WORLD = sys.stdlib_module_names | LIBRARIES | {"passes"}
BARRED = {"autopar": {"benchmarks", "models", "tests"}, "models": {"autopar", "passes"}}
TALKERS = {"autopar.cli", "autopar.report"}

Sources = Mapping[str, str]
Check = Callable[[Sources], list[str]]


@functools.cache
def read_tree() -> Sources:
    """The source of every module of the checkout."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text() for path in paths}


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """Everything in a source, parsed once for all checks."""
    return list(ast.walk(ast.parse(source)))


def imports(module: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported, wherever the statement stands."""
    for node in nodes(source):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                parents = module.split(".")[:-level] if level else []
                stem = [*parents, *([base] if base else [])]
                yield from ((node.lineno, ".".join([*stem, alias.name])) for alias in names)


def mentions(module: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, read or called (a call keeps its opening bracket)."""
    yield from imports(module, source)
    for node in nodes(source):
        match node:
            case ast.Attribute():
                if name := dotted(node):
                    yield node.lineno, name
            case ast.Call(func=ast.Name(id=name)):
                yield node.lineno, f"{name}("


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` where that is all there is; no package is reached through a call or a subscript."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{stem}.{attr}" if (stem := dotted(value)) else None
    return None


def is_within(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def owner(name: str, known: Sources) -> str | None:
    """The module of `known` that holds `name`: itself, or the nearest parent that is a file."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((file for prefix in prefixes for file in (prefix, f"{prefix}.__init__") if file in known), None)


def leaving_the_closed_world(sources: Sources) -> list[str]:
    return [
        f"{module}:{line} imports {name}; passes may import the standard library and {sorted(LIBRARIES)}"
        for module, source in sources.items()
        if is_within(module, "passes")
        for line, name in imports(module, source)
        if name.partition(".")[0] not in CLOSED_WORLD
    ]


def importing_upwards(sources: Sources) -> list[str]:
    return [
        f"{module}:{line} imports {name}; {folder} must not import {sorted(barred)}"
        for folder, barred in BARRED.items()
        for module, source in sources.items()
        if is_within(module, folder)
        for line, name in imports(module, source)
        if name.partition(".")[0] in barred
    ]


def missing_from_order(sources: Sources) -> list[str]:
    return [
        f"{module} has no place in ORDER of tests/test_layering.py; give it one"
        for module in sources
        if is_within(module, "passes") and room(module) not in (*ORDER, "__init__")
    ]


def importing_out_of_order(sources: Sources) -> list[str]:
    """Complaints about imports of a later room; the package's own file comes after every room."""
    rank = {name: place for place, name in enumerate((*ORDER, "__init__"))}
    return [
        f"{module}:{line} imports {name}; {target} comes later in ORDER"
        for module, source in sources.items()
        if is_within(module, "passes")
        for line, name in imports(module, source)
        if (target := owner(name, sources)) and is_within(target, "passes")
        if rank.get(room(target), -1) > rank.get(room(module), len(rank))
    ]


def room(module: str) -> str:
    """The entry of ORDER that a module of passes belongs to; all of `passes.rules` is one."""
    return module.split(".")[1]


def going_round_in_circles(sources: Sources) -> list[str]:
    graph = {
        module: {target for _, name in imports(module, source) if (target := owner(name, sources))}
        for module, source in sources.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"import cycle: {' <- '.join(error.args[1])}"]
    return []


def private_jax(sources: Sources) -> list[str]:
    return [
        f"{module}:{line} uses {name}; only autopar/jax_compat.py may"
        for module, source in sources.items()
        if module != "autopar.jax_compat"
        for line, name in mentions(module, source)
        if is_within(name, "jax._src")
    ]


def ambient_state(sources: Sources) -> list[str]:
    return [
        f"{module}:{line} uses {name}; only {sorted(TALKERS)} may"
        for module, source in sources.items()
        if (is_within(module, "passes") or is_within(module, "autopar")) and module not in TALKERS
        for line, name in mentions(module, source)
        if name in ("print(", "os.environ", "os.getenv")
    ]


def loaded_after_importing(modules: list[str]) -> set[str]:
    """The top-level modules of a fresh interpreter that has imported `modules`."""
    script = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


# What each check must catch: the offending sources and the words of the complaint.
CAUGHT: list[tuple[Check, Sources, str]] = [
    (leaving_the_closed_world, {"passes.ir": "def f():\n    from jax import numpy"}, "passes.ir:2 imports jax.numpy"),
    (leaving_the_closed_world, {"passes.ir": "if TYPE_CHECKING:\n    import autopar.api"}, "imports autopar.api"),
    (importing_upwards, {"autopar.api": "from models import gpt"}, "autopar.api:1 imports models.gpt"),
    (importing_upwards, {"models.gpt": "import passes.ir as ir"}, "models.gpt:1 imports passes.ir"),
    (missing_from_order, {"passes.helpers": ""}, "passes.helpers has no place"),
    (importing_out_of_order, {"passes.ir": "from passes import cost", "passes.cost": ""}, "passes.cost comes later"),
    (importing_out_of_order, {"passes.ir": "from .cost import f", "passes.cost": ""}, "passes.cost comes later"),
    (importing_out_of_order, {"passes.ir": "import passes", "passes.__init__": ""}, "passes.__init__ comes later"),
    (
        going_round_in_circles,
        {"passes.rules.a": "from . import b", "passes.rules.b": "from passes.rules.a import f"},
        "import cycle: passes.rules.",
    ),
    (private_jax, {"autopar.trace": "from jax import _src"}, "autopar.trace:1 uses jax._src"),
    (private_jax, {"tests.test_it": "import jax\njax._src.core.Jaxpr"}, "tests.test_it:2 uses jax._src.core"),
    (ambient_state, {"passes.cost": "import os\nos.environ['A']"}, "passes.cost:2 uses os.environ"),
    (ambient_state, {"autopar.api": "from os import environ"}, "autopar.api:1 uses os.environ"),
    (ambient_state, {"autopar.api": "print('hello')"}, "autopar.api:1 uses print("),
]
CHECKS = list(dict.fromkeys(check for check, _, _ in CAUGHT))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_tree_is_clean_of(check: Check) -> None:
    complaints = check(read_tree())
    assert complaints == []


@pytest.mark.parametrize(("check", "sources", "complaint"), CAUGHT)
def test_a_check_catches_its_offender(check: Check, sources: Sources, complaint: str) -> None:
    assert any(complaint in line for line in check(sources))


def test_importing_every_pass_leaves_jax_unloaded() -> None:
    modules = [module.removesuffix(".__init__") for module in read_tree() if is_within(module, "passes")]
    loaded = loaded_after_importing(modules)
    assert "passes" in loaded
    assert not loaded & {"autopar", "flax", "jax", "jaxlib", "optax"}


def test_what_a_module_loads_is_seen() -> None:
    assert "colorsys" in loaded_after_importing(["colorsys"])
