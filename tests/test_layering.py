"""The imports that modules may have and the names that they may use, read from the source: nothing needs to run.

A check is a function from sources (module name -> text) to complaints. A package's own file is named
`package.__init__`, which makes the parent of every module its name less the last part.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.source_tree import ROOT, Check, Sources, face, imports, is_within, owner, read_tree, tree

# The rooms of each package and the files beside them, each of which may import only what stands before it.
ORDER = {
    "passes": (
        *("errors", "files", "gc_pause", "limits", "progress", "text", "cluster", "solver", "inter_op"),
        *("device_placement", "ir", "sharding", "rules"),
        *("placement", "layers", "transforms", "step", "memory", "plan", "page", "intra_op", "pipeline"),
        "planners",
        "__init__",
    ),
    "autopar": (
        *("errors", "phases", "extensions", "jax_compat", "jax_cudnn", "distributed", "plan", "frontend"),
        *("lowering", "checks"),
        *("runtime", "checkpoint", "profiling"),
        *(
            "rewrite",
            "cache",
            "options",
            "following",
            "module_stages",
            "planning",
            "programs",
            "recurring",
            "unplanned",
            "compilation",
            "training",
            "reporting",
            "api",
            "comparing",
            "tools",
            "__main__",
        ),
        "__init__",
    ),
}
MOST_NAMES = 20
"""So many names a room may hand out."""

# What could be published alone: all that it may import of passes.
ALONE = {
    "passes.solver": ("passes.solver", "passes.errors", "passes.gc_pause"),
    "passes.inter_op": ("passes.inter_op", "passes.errors", "passes.progress", "passes.text", "passes.cluster"),
}
LIBRARIES = {"highspy", "numpy", "pulp", "scipy"}
CLOSED_WORLD = sys.stdlib_module_names | LIBRARIES | {"passes"}
BARRED = {"autopar": {"benchmarks", "models", "tests"}, "models": {"autopar", "passes"}}
TALKERS = {f"autopar.tools.{module}" for module in ("command", "launch_command", "printing", "topologies")}
"""The command line; and libtpu off a TPU takes what it must know from the environment alone."""
PLANS, PLANS_ARE_READ = {"AnyPlan", "Plan", "PipelinePlan"}, "passes.plan.pipeline"
INTERRUPTED, INTERRUPTION = "passes.progress", "KeyboardInterrupt"


def mentions(module: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, read or called (a call keeps its opening bracket)."""
    yield from imports(module, source)
    for node in ast.walk(tree(source)):
        match node:
            case ast.Attribute():
                yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Name(id=name)):
                yield node.lineno, f"{name}("


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
        if (package := module.split(".")[0]) in ORDER and room(module) not in ORDER[package]
    ]


def importing_out_of_order(sources: Sources) -> list[str]:
    """Complaints about imports of a later room; a package's own file comes after every room."""
    return [
        f"{module}:{line} imports {name}; {target} comes later in ORDER"
        for module, source in sources.items()
        if (package := module.split(".")[0]) in ORDER
        for line, name in imports(module, source)
        if (target := owner(name, sources)) and is_within(target, package)
        if room(module) in ORDER[package] and room(target) in ORDER[package]
        if ORDER[package].index(room(target)) > ORDER[package].index(room(module))
    ]


def entering_by_the_back(sources: Sources) -> list[str]:
    """Complaints about what is imported of another room and is not on its face."""
    return [
        f"{module}:{line} imports {name}; {rooms[target]} names it not in __all__, which is all that it hands out"
        for rooms in [{name.removesuffix(".__init__"): name for name in sources if is_room(name)}]
        for module, source in sources.items()
        if module.split(".")[0] in ORDER
        for line, name in imports(module, source)
        if (target := ".".join(name.split(".")[:2])) in rooms and not is_within(module, target) and name != target
        if name.removeprefix(f"{target}.") not in face(sources[rooms[target]])
    ]


def handing_out_too_much(sources: Sources) -> list[str]:
    return [
        f"{module} hands out {len(names)} names; {MOST_NAMES} are the most: divide it, or move names"
        for module, source in sources.items()
        if is_room(module) and len(names := face(source)) > MOST_NAMES
    ]


def knowing_too_much(sources: Sources) -> list[str]:
    return [
        f"{module}:{line} imports {name}; {alone} could be published alone, with {sorted(allowed)}"
        for alone, allowed in ALONE.items()
        for module, source in sources.items()
        if is_within(module, alone)
        for line, name in imports(module, source)
        if is_within(name, "passes") and not any(is_within(name, package) for package in allowed)
    ]


def is_room(module: str) -> bool:
    """Whether a module is a room's face."""
    package, *rest = module.split(".")
    return package in ORDER and len(rest) == 2 and rest[1] == "__init__"


def room(module: str) -> str:
    """The entry of ORDER that a module of a package belongs to."""
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
        if module != "autopar.jax_compat" and "_src" in source
        for line, name in mentions(module, source)
        if is_within(name, "jax._src")
    ]


def ambient_state(sources: Sources) -> list[str]:
    return [
        f"{module}:{line} uses {name}; only {sorted(TALKERS)} may"
        for module, source in sources.items()
        if (is_within(module, "passes") or is_within(module, "autopar")) and module not in TALKERS
        if any(word in source for word in ("print", "environ", "getenv"))
        for line, name in mentions(module, source)
        if name in ("print(", "os.environ", "os.getenv")
    ]


def handling_interruptions(sources: Sources) -> list[str]:
    """Complaints about planning modules that catch or raise Ctrl-C themselves."""
    return [
        f"{module}:{line} names {INTERRUPTION}; {INTERRUPTED} does that for every search: use its SearchContext"
        for module, source in sources.items()
        if is_within(module, "passes") and module != INTERRUPTED and INTERRUPTION in source
        for line, name in names_read(source)
        if name == INTERRUPTION
    ]


def asking_for_the_kind_of_plan(sources: Sources) -> list[str]:
    """Complaints about code that tells plans of one mesh from those of pipelines by their classes.

    Only what reads a file knows the classes; everything else asks a plan for what it needs.
    """
    return [
        f"{module}:{line} asks whether a plan is a {kind}; both kinds have the face of AnyPlan: use or extend it"
        for module, source in sources.items()
        if module.partition(".")[0] in ("passes", "autopar", "benchmarks") and module != PLANS_ARE_READ
        for line, kind in kinds_asked_for(source)
        if kind in PLANS
    ]


def kinds_asked_for(source: str) -> Iterator[tuple[int, str]]:
    """Line and name, without its module, of every class that a value is compared with."""
    for node in ast.walk(tree(source)):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                names = (each for each in ast.walk(kinds) if isinstance(each, ast.Name | ast.Attribute))
                yield from ((node.lineno, ast.unparse(name).rpartition(".")[2]) for name in names)
            case ast.MatchClass(cls=kind):
                yield node.lineno, ast.unparse(kind).rpartition(".")[2]
            case ast.Compare(left=ast.Call(func=ast.Name(id="type")), comparators=kinds):
                yield from ((node.lineno, ast.unparse(kind).rpartition(".")[2]) for kind in kinds)
            case _:
                pass


def names_read(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every plain name."""
    for node in ast.walk(tree(source)):
        match node:
            case ast.Name(id=name):
                yield node.lineno, name
            case _:
                pass


def loaded_after_importing(modules: list[str]) -> set[str]:
    """The top-level modules of a fresh interpreter that has imported `modules`."""
    script = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


# What each check must catch: the offending sources and the words of the complaint.
CAUGHT: list[tuple[Check, Sources, str]] = [
    (
        leaving_the_closed_world,
        {"passes.ir.graph": "def f():\n    from jax import numpy"},
        "passes.ir.graph:2 imports jax.numpy",
    ),
    (leaving_the_closed_world, {"passes.ir.graph": "if TYPE_CHECKING:\n    import autopar.api"}, "imports autopar.api"),
    (importing_upwards, {"autopar.api": "from models import gpt"}, "autopar.api:1 imports models.gpt"),
    (importing_upwards, {"models.gpt": "import passes.ir as ir"}, "models.gpt:1 imports passes.ir"),
    (missing_from_order, {"passes.helpers.graph": ""}, "passes.helpers.graph has no place"),
    (importing_out_of_order, {"passes.ir.a": "from passes import plan", "passes.plan.__init__": ""}, "comes later"),
    (importing_out_of_order, {"passes.ir.a": "from passes.plan import f", "passes.plan.__init__": ""}, "comes later"),
    (importing_out_of_order, {"passes.ir.a": "from ..plan import f", "passes.plan.__init__": ""}, "comes later"),
    (importing_out_of_order, {"passes.errors": "from passes import ir", "passes.ir.__init__": ""}, "comes later"),
    (importing_out_of_order, {"passes.ir.a": "import passes", "passes.__init__": ""}, "passes.__init__ comes later"),
    (importing_out_of_order, {"autopar.plan": "from autopar import api", "autopar.api": ""}, "autopar.api comes later"),
    (
        entering_by_the_back,
        {"passes.plan.a": "from passes.ir.b import f", "passes.ir.b": "", "passes.ir.__init__": "__all__ = ['f']"},
        "passes.plan.a:1 imports passes.ir.b.f; passes.ir.__init__ names it not",
    ),
    (
        entering_by_the_back,
        {"autopar.api": "def g():\n    import passes.ir.b", "passes.ir.b": "", "passes.ir.__init__": "__all__ = ['f']"},
        "autopar.api:2 imports passes.ir.b; passes.ir.__init__ names it not",
    ),
    (entering_by_the_back, {"passes.plan.a": "from passes.ir import f", "passes.ir.__init__": ""}, "names it not"),
    (handing_out_too_much, {"passes.ir.__init__": f"__all__ = {[*map(str, range(21))]}"}, "hands out 21 names"),
    (knowing_too_much, {"passes.solver.a": "from passes.ir import Graph"}, "passes.solver.a:1 imports passes.ir.Graph"),
    (knowing_too_much, {"passes.inter_op.a": "import passes.sharding"}, "passes.inter_op could be published alone"),
    (
        going_round_in_circles,
        {"passes.rules.a": "from . import b", "passes.rules.b": "from passes.rules.a import f"},
        "import cycle: passes.rules.",
    ),
    (private_jax, {"autopar.frontend.a": "from jax import _src"}, "autopar.frontend.a:1 uses jax._src"),
    (private_jax, {"tests.test_it": "import jax\njax._src.core.Jaxpr"}, "tests.test_it:2 uses jax._src.core"),
    (ambient_state, {"passes.ir.a": "import os\nos.environ['A']"}, "passes.ir.a:2 uses os.environ"),
    (ambient_state, {"autopar.api": "from os import environ"}, "autopar.api:1 uses os.environ"),
    (ambient_state, {"autopar.api": "print('hello')"}, "autopar.api:1 uses print("),
    (
        handling_interruptions,
        {"passes.ir.a": "try:\n    f()\nexcept KeyboardInterrupt:\n    g()"},
        "passes.ir.a:3 names KeyboardInterrupt",
    ),
    (
        asking_for_the_kind_of_plan,
        {"autopar.api": "if isinstance(p, str | plan.PipelinePlan): f()"},
        "autopar.api:1 asks whether a plan is a PipelinePlan",
    ),
    (
        asking_for_the_kind_of_plan,
        {"passes.planners.a": "match p:\n  case Plan(): f()"},
        "passes.planners.a:2 asks whether a plan is a Plan",
    ),
    (asking_for_the_kind_of_plan, {"benchmarks.a": "type(p) is Plan"}, "benchmarks.a:1 asks whether a plan is a Plan"),
    (handling_interruptions, {"passes.ir.a": "raise KeyboardInterrupt"}, "passes.ir.a:1 names KeyboardInterrupt"),
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


def test_modules_that_an_import_loads_are_seen() -> None:
    assert "colorsys" in loaded_after_importing(["colorsys"])
