"""Values that no microbatch changes and all want in pieces, made in pieces: a mask over the batch, or random bits.

A second walk over placements in time, from the last node to the first, once the first walk has placed what microbatches
do change.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from passes.placement import Layout, Placement, is_free
from passes.sharding import ShardingSpec
from passes.transforms.batch_axis import BatchWalk, LoopInTime
from passes.transforms.time_axis import AXIS, whole


def sink(walk: BatchWalk) -> None:
    """Computes in pieces what is wanted in pieces only: random bits are drawn a microbatch at a time."""
    demanded = walk.read_specs

    def want(values: Sequence[int], specs: Sequence[ShardingSpec]) -> None:
        for value, spec in zip(values, specs, strict=True):
            if value not in walk.varying and value not in walk.free and value not in walk.graph.literals:
                demanded.setdefault(value, set()).add(spec)

    want(walk.graph.outputs if walk.inside else (), walk.outputs)
    for index in reversed(range(len(walk.graph.nodes))):
        node = walk.graph.nodes[index]
        if index in walk.later or is_free(walk.graph, index):
            continue
        if index in walk.loops:
            walk.placements[index] = _finished(walk, index, demanded)
        if index in walk.loops or any(v in walk.varying for v in node.outputs):
            want(node.inputs, walk.placements[index].operands)
        elif index not in walk.up_front and (placement := _in_pieces(walk, index, demanded)):
            walk.placements[index] = placement
            want(node.inputs, placement.operands)
        elif index in walk.placements:
            want(node.inputs, walk.placements[index].operands)


def _finished(walk: BatchWalk, index: int, demanded: Mapping[int, set[ShardingSpec]]) -> Placement:
    """A loop or branch with its bodies; results that microbatches do not change are cut as all want them."""
    node, loop = walk.graph.nodes[index], walk.loops[index]
    entering = {port for body in loop.control.bodies for port in body.inputs}
    for value, port_use in zip(node.outputs, loop.control.results, strict=True):
        specs = demanded.get(value, set[ShardingSpec]())
        if len(specs) != 1 or port_use.port in loop.varying or port_use.port in entering:
            continue
        (spec,) = specs
        if not spec.partial and not (port_use.stacked and spec.dims[0]):
            loop.ports[port_use.port] = ShardingSpec(dims=spec.dims[1:]) if port_use.stacked else spec
            walk.home[value] = spec
    for body, inside in zip(loop.control.bodies, loop.walks, strict=True):
        inside.outputs = tuple(loop.ports[s] for s in body.outputs)
        sink(inside)
    _narrow(loop)
    bodies = zip(loop.control.bodies, loop.walks, strict=True)
    return loop.placement(tuple(_layout(inside, [loop.ports[s] for s in body.inputs]) for body, inside in bodies))


def _layout(walk: BatchWalk, inputs: Sequence[ShardingSpec]) -> Layout:
    placements = [walk.placements.get(i) or whole(node, walk.graph) for i, node in enumerate(walk.graph.nodes)]
    return Layout(inputs=tuple(inputs), placements=tuple(placements), outputs=walk.outputs)


def _in_pieces(walk: BatchWalk, index: int, demanded: Mapping[int, set[ShardingSpec]]) -> Placement | None:
    """A node that no microbatch changes, cut as everyone wants its result."""
    node, rule = walk.graph.nodes[index], walk.rules[index]
    specs = set(itertools.chain.from_iterable(demanded.get(v, ()) for v in node.outputs))
    if len(node.outputs) != 1 or len(specs) != 1 or node.subgraphs or rule.alias:
        return None
    (spec,) = specs
    if spec.partial or spec.is_replicated:
        return None
    for factor in range(len(rule.factors)):
        assignment = ((AXIS, factor),)
        if rule.factors[factor].size % walk.time.count == 0 and rule.result_spec(0, assignment) == spec:
            placement = Placement.of(rule, assignment)
            if not any(operand.partial for operand in placement.operands):
                walk.home[node.outputs[0]] = spec
                return placement
    return None


def _narrow(loop: LoopInTime) -> None:
    """Takes in pieces what no microbatch changes and every body reads in pieces: a mask broadcast over the batch.

    Whole, it would be as large as that of all microbatches, and each iteration would take its piece of it.
    """
    written = {port for body in loop.control.bodies for port in body.outputs}
    demanded: dict[int, set[ShardingSpec]] = {}
    for body, inside in zip(loop.control.bodies, loop.walks, strict=True):
        for value, port in zip(body.graph.inputs, body.inputs, strict=True):
            demanded.setdefault(port, set()).update(inside.read_specs.get(value, ()))
    for port, specs in demanded.items():
        fixed = port not in loop.varying and port not in written and not loop.control.ports[port].whole
        if fixed and len(specs) == 1 and not any(spec.partial for spec in specs):
            (loop.ports[port],) = specs
