"""Warnings of hand-made plans that leave whole on every device what they are meant to cut: state, or the
batch's work.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence

from passes.errors import explain
from passes.intra_op import restrictions
from passes.ir import Graph, control_of
from passes.layers import OTHERWISE, taken_for
from passes.placement import Layout
from passes.plan import Plan
from passes.rules import rules_of
from passes.step import Step
from passes.text import nbytes, quantities

LARGE = 0.1
"""The share of the state that may stay whole without a warning, chosen."""

MOST = 0.5
"""The share of the work of products that may be whole on every device without a warning, chosen."""

Work = tuple[float, bool, str, str]
"""An operator's flops, whether it is cut, its source line, and that of the loop that it is in."""


def warn_of_whole_state(plan: Plan, graph: Graph, state: Sequence[int]) -> None:
    """Warns where more than the share `LARGE` of the state that ZeRO should cut is whole on every device, as no axis
    divides it.

    Keys and counts have nothing to cut, and are left out.
    """
    at = dict(zip(graph.inputs, plan.inputs, strict=True))
    arrays = [v for v in state if graph.types[v].rank]
    whole = [v for v in arrays if at[v].is_replicated and plan.mesh.axes]
    whole_nbytes, total = (sum(graph.types[v].nbytes for v in values) for values in (whole, arrays))
    if whole_nbytes > LARGE * total:
        largest = max(whole, key=lambda v: graph.types[v].nbytes)
        name = dict(zip(graph.inputs, graph.input_names, strict=False)).get(largest, f"input {largest}")
        warnings.warn(
            explain(
                f"{plan.solution.planner} on {plan.mesh.size} devices",
                f"{nbytes(whole_nbytes)} of {nbytes(total)} of state stay whole on every device: no axis of the mesh "
                f"{plan.mesh} divides a dimension of {name} {graph.types[largest]}",
                "",
                "use a number of devices that divides it, pad it, or planner=Auto()",
            ),
            stacklevel=2,
        )


def warn_of_whole_work(plan: Plan, step: Step) -> None:
    """Warns where every device does most of the work of products, and names the line with most of it."""
    if plan.mesh.size == 1:
        return
    works = list(_works(step.graph, plan.layout))
    whole, total = sum(flops for flops, is_cut, _, _ in works if not is_cut), sum(flops for flops, _, _, _ in works)
    if whole <= MOST * total:
        return
    by_line = defaultdict[tuple[str, str], float](float)
    for flops, is_cut, source, loop in works:
        by_line[source, loop] += 0.0 if is_cut else flops
    source, loop = max(by_line, key=lambda line: by_line[line])
    where = f"most of it at {source}" + (f", in the loop at {loop}" if loop else "")
    rule = f"{quantities.share(whole, total)} of the work of products is computed whole on every device, {where}"
    remedy = f"{restrictions.BATCH_FIRST if loop else ''}use planner=Auto(), or {OTHERWISE}"
    what = f"{plan.solution.planner} on {plan.mesh.size} devices"
    warnings.warn(explain(what, rule, taken_for(step.graph, step.batch), remedy), stacklevel=2)


def _works(graph: Graph, layout: Layout, times: float = 1.0, loop: str = "") -> Iterator[Work]:
    """The work of each product of a graph that runs `times` a step, those in loops and branches included."""
    for node, rule, placement in zip(graph.nodes, rules_of(graph), layout.placements, strict=True):
        control = control_of(node, graph)
        if control is not None:
            for body, inside in zip(control.bodies, placement.bodies, strict=True):
                is_loop = body.trips > 1
                yield from _works(body.graph, inside, times * body.runs, node.source if is_loop else loop)
        elif rule.multiplies:
            is_cut = any(any(spec.dims) or spec.partial for spec in (*placement.operands, *placement.results))
            yield times * rule.flops, is_cut, node.source, loop
