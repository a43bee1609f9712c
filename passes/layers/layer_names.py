"""The layers of a model by name: the modules that JAX's name stack says an operator belongs to.

Operators are told apart by their scope, such as `jvp(GPT)/Block_3/mlp/up`: the numbered module counts, else the first
one. In a function without named modules they are told apart by the functions in which their source lines are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from passes.ir import Graph

UPDATE = "update"
"""The layer of all that belongs to no module: the optimizer, mostly."""

_NOT_MODULES = re.compile(
    r"^(?:checkpoint|rematted_computation|while|body|cond|branch_\d+_fun|closed_call|microbatches|accumulate|scan|pjit"
    r"|stages|custom_jvp_call|custom_vjp_call|vmap\(.*\)|jit\(.*\)|.*,.*->.*|)$"
)
_NUMBERED = re.compile(r"[A-Za-z_.]*?[_.]?\d+$")
_DIFFERENTIATED = re.compile(r"^(?:transpose\()?(?:jvp\()")


def modules(scope: str) -> list[str]:
    """The names of modules in a name stack, outermost first, without what JAX puts around them."""
    parts = scope.split("/")
    if parts and _DIFFERENTIATED.match(parts[0]):
        parts = parts[1:]
    return [part for part in parts if not _NOT_MODULES.match(part) and "(" not in part]


@lru_cache(maxsize=2**16)
def layer_of(scope: str, source: str) -> str:
    """The name of the layer that an operator of this scope and source line belongs to."""
    names = modules(scope)
    numbered = next((name for name in names if _NUMBERED.match(name)), None)
    if numbered or names:
        return numbered or names[0]
    if not any(mark in scope for mark in ("jvp(", "transpose(", "rematted_computation")):
        return UPDATE
    model = re.search(r"jvp\(([^()]+)\)", scope)
    return model[1] if model else _function(source) or "step"


def of_operators(graph: Graph) -> Iterator[str]:
    """The layer of each operator, in order; those in the bodies of a loop or branch come after it."""
    for node in graph.nodes:
        yield layer_of(node.scope, node.source)
        for body in node.subgraphs:
            yield from of_operators(body)


def renamed(before: Graph, after: Graph) -> dict[str, str] | None:
    """The names of a program's layers in another program that is equal but for names; None where layers do not
    correspond.

    They do not where operators of one layer belong to several layers in the other.
    """
    pairs = dict.fromkeys([(UPDATE, UPDATE), *zip(of_operators(before), of_operators(after), strict=True)])
    names = dict(pairs.keys())
    return names if len(pairs) == len(names) == len(set(names.values())) else None


def _function(source: str) -> str:
    """The name of the function that a source line is in: `attend` of `layers.py:158 (attend)`."""
    match = re.search(r"\(([^()]*)\)$", source)
    return match[1].replace(".<locals>", "") if match else ""
