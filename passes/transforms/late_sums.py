"""Sums over microbatches that are added up as they are made, so that what is made of them is made once, after the loop.

Gradients are such sums. What only goes on with them, as the backward pass of a weight that is computed before the loop,
is linear, and the same after the loop as in each microbatch. It waits where no more bytes are then added up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from passes.placement import is_free
from passes.transforms.batch_axis import BatchWalk


def made_of_sums(walk: BatchWalk) -> frozenset[int]:
    """The nodes that read nothing of a microbatch but sums, and do with them what was done to make a weight.

    Such as the backward pass of a norm of weights, or of a network that makes filters of its parameters alone. Each
    group of such nodes waits if the sums that enter it are together no larger than those that leave it, and it computes
    with what no microbatch changes. What widens a sum stays inside: sums of microbatches are added up in the wider
    dtype.
    """
    return frozenset(
        index for group in _connected(walk, _reading_sums(walk)) if _may_wait(walk, group) for index in group
    )


def _reading_sums(walk: BatchWalk) -> list[int]:
    """The nodes that read no piece of a microbatch, and are read by such nodes and by those after the loop alone; in
    reverse order.
    """
    graph, waiting = walk.graph, dict[int, None]()
    for index in sorted(walk.placements.keys() - walk.loops.keys(), reverse=True):
        node, rule = graph.nodes[index], walk.rules[index]
        varying = [v for v in node.inputs if v in walk.varying]
        readers = {reader for value in node.outputs for reader in graph.consumers.get(value, ())}
        if not varying or not all(map(walk.is_sum, varying)) or not readers <= waiting.keys() | walk.later:
            continue
        widens = rule.casts and graph.types[node.inputs[0]].item_nbytes < graph.types[node.outputs[0]].item_nbytes
        if not (rule.alias or widens):
            waiting[index] = None
    return list(waiting)


def _connected(walk: BatchWalk, nodes: Collection[int]) -> Iterator[set[int]]:
    """The nodes in groups: those that read or make one sum are of one group."""
    groups: dict[int, set[int]] = {}  # by sum
    for index in sorted(nodes):
        node = walk.graph.nodes[index]
        sums = [v for v in (*node.inputs, *node.outputs) if v in walk.varying]
        known = list({id(groups[v]): groups[v] for v in sums if v in groups}.values())
        group = {index}.union(*known)
        groups.update({v: group for v, other in groups.items() if any(other is each for each in known)})
        groups.update(dict.fromkeys(sums, group))
    yield from {id(group): group for group in groups.values()}.values()


def _may_wait(walk: BatchWalk, group: Collection[int]) -> bool:
    """Whether a group computes with arrays that do not vary, and sums that enter it are no larger than its results."""
    graph, types = walk.graph, walk.graph.types
    read = {v for index in group for v in graph.nodes[index].inputs}
    made = {v for index in group for v in graph.nodes[index].outputs}
    leaving = [v for v in made if v in graph.returned or not set(graph.consumers.get(v, ())) <= set(group)]
    unchanged = [v for v in read - walk.varying if types[v].rank and v in graph.producers]
    computes = not all(is_free(graph, graph.producers[v]) for v in unchanged)
    entering = sum(types[v].nbytes for v in read - made if v in walk.varying)
    return computes and entering <= sum(types[v].nbytes for v in leaving)


def smallest(walk: BatchWalk) -> dict[int, set[int]]:
    """The sums that each sum over microbatches is made of, if that puts them side by side or among zeros, so that they
    are no larger together; those that are made otherwise are left out.
    """
    types, consumers, smallest = walk.graph.types, walk.graph.consumers, dict[int, set[int]]()
    for index, node in enumerate(walk.graph.nodes):
        rule, varying = walk.rules[index], [v for v in node.inputs if v in walk.varying]
        if index not in walk.placements or index in walk.loops or rule.is_product or rule.alias or rule.casts:
            continue
        if not all(walk.is_sum(v) and len(consumers[v]) == 1 for v in varying):
            continue
        made_of = set[int]().union(*(smallest.get(v, {v}) for v in varying))
        nbytes = sum(types[v].nbytes for v in made_of)
        for value in filter(walk.is_sum, node.outputs):
            if nbytes < types[value].nbytes or (nbytes == types[value].nbytes and len(made_of) > 1):
                smallest[value] = made_of
    return smallest
