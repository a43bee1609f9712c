"""A traced step whose layers recompute what they do not keep, by `passes.transforms.remat`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar import jax_compat
from autopar.frontend import Body, Equation, Traced
from passes.transforms import Kept, Recomputed, recompute


def recomputed(traced: Traced, kept: Sequence[Kept]) -> Traced:
    """The same step in which layer k keeps only `kept[k]` for its backward pass.

    Raises PlanningError if there is not one for each layer.
    """
    rewritten = recompute(traced.graph, kept)
    return replace(traced, graph=rewritten.graph, equations=_equations(rewritten, traced.equations))


def _equations(rewritten: Recomputed, written: Sequence[Equation]) -> tuple[Equation, ...]:
    """The equations of a rewritten program, made of those of the program as it was `written`."""
    barrier = Equation(primitive=jax_compat.optimization_barrier_p)
    equations = [barrier if origin is None else written[origin] for origin in rewritten.origins]
    for index in rewritten.bodies:
        equations[index] = _loop(rewritten, written, index)
    for index, inside in rewritten.inside.items():
        (body,) = written[index].bodies
        body = replace(body, graph=inside.graph, equations=_equations(inside, body.equations))
        equations[index] = replace(written[index], bodies=(body,))
    return tuple(equations)


def _loop(rewritten: Recomputed, written: Sequence[Equation], index: int) -> Equation:
    """The equation of a loop whose body is put together from nodes of earlier ones."""
    old, node, origins = written[index], rewritten.graph.nodes[index], rewritten.bodies[index]
    bodies = {i: written[i].bodies[0] for i, _ in (*origins.nodes, *origins.constants)}
    body = Body(
        graph=node.subgraphs[0],
        equations=tuple(bodies[i].equations[place] for i, place in origins.nodes),
        constants=tuple(bodies[i].constants[place] for i, place in origins.constants),
    )
    names = ("length", "reverse", "unroll")
    counts = {name: node.params[name] for name in ("num_consts", "num_carry")}
    return replace(old, params={name: old.params[name] for name in names} | counts, bodies=(body,))
