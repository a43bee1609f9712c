"""The words of the code: names are nouns of what they hold, docstrings say what is returned, old words stay away."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping

from tests.source_tree import Sources, is_within, read_tree, tree

PACKAGES = ("autopar", "benchmarks", "models", "passes")

VAGUE = {"asked", "found", "held", "left", "one", "own", "said", "told", "wanted"}
"""Names that say nothing of a value."""

QUESTIONS = {
    "As", "By", "For", "How", "In", "Of", "To", "What", "When", "Where", "Whether", "Which", "Who", "Why",
}  # fmt: skip
"""Words that no docstring begins with; a predicate's may begin with `Whether`."""

RENAMED: Mapping[str, str] = {
    "beneath": "cutoff",
    "bundle": "operator group",
    "bundles": "operator groups",
    "by_hand": "hand made",
    "crew": "worker pool",
    "hopeless": "infeasible",
    "leaner": "of less memory",
    "likeness": "structural hash",
    "pace": "period",
    "polish": "coordinate descent",
    "pricer": "block costs",
    "read_off": "extract_plan",
    "recombination": "partition crossover",
    "refetch": "regather",
    "resting": "idle state",
    "rim": "interface",
    "shortage": "infeasible error",
    "spelling": "lowering rules",
    "wire": "port use",
}
"""Private words of old, as identifiers of `passes`, and the words of the field for them."""

FORMER = {"passes.plan.plan": {"refetch"}, "autopar.tools.measurement": {"said"}}
"""Former public names, which warn."""

Complaint = str


def of_packages(sources: Sources) -> Iterator[tuple[str, ast.Module]]:
    for module, source in sources.items():
        if any(is_within(module, package) for package in PACKAGES):
            yield module, tree(source)


@functools.cache
def bound(module: ast.Module) -> list[tuple[int, str]]:
    """The line and name of every variable, argument, attribute, function and class that a module binds."""
    found = list[tuple[int, str]]()
    for node in ast.walk(module):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.append((node.lineno, name))
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.append((node.lineno, name))
            case _:
                pass
    return found


def vague(sources: Sources) -> list[Complaint]:
    return [
        f"{module}:{line} binds {name!r}: name it by what it holds"
        for module, parsed in of_packages(sources)
        for line, name in bound(parsed)
        if name in VAGUE and name not in FORMER.get(module, ())
    ]


def renamed(sources: Sources) -> list[Complaint]:
    return [
        f"{module}:{line} binds {name!r}: say {RENAMED[name.lower().strip('_')]!r}"
        for module, parsed in of_packages(sources)
        for line, name in bound(parsed)
        if is_within(module, "passes") and name.lower().strip("_") in RENAMED and name not in FORMER.get(module, ())
    ]


def questions(sources: Sources) -> list[Complaint]:
    """Docstrings that begin as a question does, those of predicates apart."""
    complaints: list[Complaint] = []
    for module, parsed in of_packages(sources):
        for node in ast.walk(parsed):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = (ast.get_docstring(node) or "").split(maxsplit=1)
                is_predicate = isinstance(node, ast.FunctionDef) and "bool" in ast.unparse(node.returns or node)
                if words and words[0] in QUESTIONS and not (words[0] == "Whether" and is_predicate):
                    name = module if isinstance(node, ast.Module) else f"{module}.{node.name}"
                    complaints.append(f"{name}: its docstring begins {words[0]!r}: say what is returned")
    return complaints


def test_locals_are_named_by_what_they_hold() -> None:
    assert vague(read_tree()) == []


def test_docstrings_say_what_is_returned() -> None:
    assert questions(read_tree()) == []


def test_private_words_stay_away() -> None:
    assert renamed(read_tree()) == []


PLANTED = '''"""Where things are."""

class Wire:
    """A use."""
    held: int
    def is_up(self) -> bool:
        """Whether it is up."""
    def up(self) -> int:
        """Whether it is up."""

def f(own: int, refetch: bool = False) -> list[int]:
    """What is there."""
    return [one for one in range(own)]
'''


def test_planted_words_are_seen() -> None:
    sources = {"passes.planted": PLANTED}
    assert [text.split("'")[1] for text in vague(sources)] == ["held", "own", "one"]
    assert [text.split("'")[1] for text in renamed(sources)] == ["Wire", "refetch"]
    assert [text.partition(":")[0].removeprefix("passes.planted") for text in questions(sources)] == ["", ".f", ".up"]
    assert renamed({"autopar.planted": PLANTED}) == questions({"tests.planted": PLANTED}) == []
