"""A traced step whose layers recompute what they do not keep, by `passes.transforms.remat`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar import jax_compat
from autopar.frontend import Body, Equation, Traced
from passes.ir import Node
from passes.transforms import BodyOrigins, Kept, recompute


def recomputed(traced: Traced, kept: Sequence[Kept]) -> Traced:
    """The same step where layer k keeps only `kept[k]` for its backward pass.

    Raises PlanningError for a wrong number.
    """
    rewritten = recompute(traced.graph, kept)
    barrier = Equation(primitive=jax_compat.optimization_barrier_p)
    equations = [barrier if origin is None else traced.equations[origin] for origin in rewritten.origins]
    for index, origins in rewritten.bodies.items():
        equations[index] = _loop(traced, rewritten.graph.nodes[index], index, origins)
    return replace(traced, graph=rewritten.graph, equations=tuple(equations))


def _loop(traced: Traced, node: Node, index: int, origins: BodyOrigins) -> Equation:
    """The equation of a loop whose body is put together from nodes of old ones."""
    old = traced.equations[index]
    bodies = {i: traced.equations[i].bodies[0] for i, _ in (*origins.nodes, *origins.constants)}
    body = Body(
        graph=node.subgraphs[0],
        equations=tuple(bodies[i].equations[place] for i, place in origins.nodes),
        constants=tuple(bodies[i].constants[place] for i, place in origins.constants),
    )
    names = ("length", "reverse", "unroll")
    counts = {name: node.params[name] for name in ("num_consts", "num_carry")}
    return replace(old, params={name: old.params[name] for name in names} | counts, bodies=(body,))
