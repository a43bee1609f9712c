"""Results that follow from a graph and the rules of its nodes, computed once and cached on the graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

from passes.ir import Graph
from passes.rules.registry import rules_of

P = ParamSpec("P")
R = TypeVar("R")


def remembered(function: Callable[Concatenate[Graph, P], R]) -> Callable[Concatenate[Graph, P], R]:
    """The function of a graph and hashable arguments, with its results cached on the graph until a user adds a rule.

    Results must not be changed by whoever gets them.
    """

    @wraps(function)
    def cached(graph: Graph, *args: P.args, **kwargs: P.kwargs) -> R:
        key, rules = (cached, args, tuple(kwargs.items())), rules_of(graph)
        known = cast("tuple[object, R] | None", graph.memo.get(key))
        if known is None or known[0] is not rules:
            graph.memo[key] = known = rules, function(graph, *args, **kwargs)
        return known[1]

    return cached
