"""Values that do not vary between microbatches and are only read in pieces, made in pieces: a mask over the batch, or
random bits.

This is a second walk on the axis of time, from the last node to the first, after the first one has placed the values
that vary.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from passes.placement import Layout, Placement, is_free
from passes.sharding import ShardingSpec
from passes.transforms.batch_axis import BatchWalk, LoopInTime
from passes.transforms.time_axis import AXIS, whole

Demand = Mapping[int, set[ShardingSpec]]
"""The placements in which values that no microbatch changes are read, by value."""


def sink(walk: BatchWalk, outputs: Sequence[ShardingSpec] | None = None) -> Demand:
    """The placements in which values that are only read in pieces are made so: random bits are drawn a microbatch at a
    time.

    The outputs of a body are read in these placements; those of a program as they are.
    """
    demanded: dict[int, set[ShardingSpec]] = {}
    free = {v for i, node in enumerate(walk.graph.nodes) if is_free(walk.graph, i) for v in node.outputs}

    def want(values: Sequence[int], specs: Sequence[ShardingSpec]) -> None:
        for value, spec in zip(values, specs, strict=True):
            if value not in walk.varying and value not in free and value not in walk.graph.literals:
                demanded.setdefault(value, set()).add(spec)

    if outputs is not None:
        want(walk.graph.outputs, outputs)
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
    return demanded


def _finished(walk: BatchWalk, index: int, demanded: Demand) -> Placement:
    """A loop or branch with its bodies; results that do not vary are cut as all their readers want them."""
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
    bodies = list(zip(loop.control.bodies, loop.walks, strict=True))
    outputs = [tuple(loop.ports[port] for port in body.outputs) for body, _ in bodies]
    _narrow(loop, [sink(inside, leaving) for (_, inside), leaving in zip(bodies, outputs, strict=True)])
    layouts: list[Layout] = []
    for (body, inside), leaving in zip(bodies, outputs, strict=True):
        placements = (inside.placements.get(i) or whole(each, inside.graph) for i, each in enumerate(body.graph.nodes))
        inputs = tuple(loop.ports[port] for port in body.inputs)
        layouts.append(Layout(inputs=inputs, placements=tuple(placements), outputs=leaving))
    return loop.placement(tuple(layouts))


def _in_pieces(walk: BatchWalk, index: int, demanded: Demand) -> Placement | None:
    """A node that does not vary, cut as all readers want its result."""
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


def _narrow(loop: LoopInTime, demands: Sequence[Demand]) -> None:
    """Passes values that do not vary to bodies in pieces, if every body reads them so by its `demands`, like a mask
    over the batch.

    Whole, such a value would be as large as that of all microbatches, and each iteration would slice it.
    """
    written = {port for body in loop.control.bodies for port in body.outputs}
    demanded: dict[int, set[ShardingSpec]] = {}
    for body, of_body in zip(loop.control.bodies, demands, strict=True):
        for value, port in zip(body.graph.inputs, body.inputs, strict=True):
            demanded.setdefault(port, set()).update(of_body.get(value, ()))
    for port, specs in demanded.items():
        fixed = port not in loop.varying and port not in written and not loop.control.ports[port].whole
        if fixed and len(specs) == 1 and not any(spec.partial for spec in specs):
            (loop.ports[port],) = specs
