"""The cost of each layer of a model under a plan: seconds of computing and of moving arrays, and bytes of a device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from passes.gc_pause import without_gc
from passes.intra_op.computing import operator_seconds
from passes.intra_op.extract import moves
from passes.ir import Graph
from passes.layers import layer_names
from passes.placement import group, resharding_plan
from passes.plan import LayerCost, Plan
from passes.sharding import Resharder


@without_gc()
def layer_costs(plan: Plan, graph: Graph, like: tuple[Plan, Graph] | None = None) -> Plan:
    """The plan with the cost of each layer, in the order in which the step comes to them, the update last.

    Seconds of layers add up to the plan's, apart from offloading; their `live_nbytes` add up to the temporaries at the
    peak. If `like` is given, an equal program but for names that is planned alike, its costs are taken.
    """
    names = [name for name in dict.fromkeys(layer_names.of_operators(graph)) if name != layer_names.UPDATE]
    renamed = layer_names.renamed(like[1], graph) if like else None
    if like and renamed:
        seconds = {renamed[c.name]: (c.compute_seconds, c.moving_seconds) for c in like[0].layers}
    else:
        seconds = _seconds(plan, graph, names)
    state = _state_nbytes(plan, names)
    live: Mapping[str, int] = plan.memory.layers if plan.memory else {}
    layers = [
        LayerCost(
            name=name,
            compute_seconds=computing,
            moving_seconds=moving,
            state_nbytes=state.get(name, 0),
            live_nbytes=live.get(name, 0),
        )
        for name, (computing, moving) in seconds.items()
    ]
    return replace(plan, layers=tuple(layers))


def _seconds(plan: Plan, graph: Graph, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """(computing, moving) seconds by layer."""
    layout, resharder = plan.layout, Resharder(plan.mesh)
    computing = dict.fromkeys([*names, layer_names.UPDATE], 0.0)
    for _, node, spent in operator_seconds(graph, group(graph), plan.mesh, layout):
        computing[layer_names.layer_of(node.scope, node.source)] += spent
    moving = dict.fromkeys(computing, 0.0)
    reshardings = resharding_plan(graph, layout, resharder, regather=plan.regather)
    for occurrence, _, spent in moves(graph, reshardings, resharder):
        moving[layer_names.layer_of(occurrence.scope, occurrence.where)] += spent
    return {name: (computing[name], moving[name]) for name in computing}


def _state_nbytes(plan: Plan, names: Iterable[str]) -> Mapping[str, int]:
    """Bytes on one device of the arguments that are named after each layer, the outermost that a path names."""
    alternatives = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    if not alternatives or not plan.input_types:
        return {}
    pattern = re.compile(rf"(?<![\w.])(?:{alternatives})(?!\w)")
    nbytes: dict[str, int] = {}
    for path, type, spec in zip(plan.input_names, plan.input_types, plan.inputs, strict=True):
        if match := pattern.search(path):
            nbytes[match[0]] = nbytes.get(match[0], 0) + spec.local_nbytes(type, plan.mesh)
    return nbytes
