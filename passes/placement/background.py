"""The reshardings that a compiler may hide behind computing, since nothing that is computed meanwhile waits for them.

A weight is there before the step begins, so it can be gathered ahead of its use (ZeRO-3), and behind the recomputation
of a layer that waits at a barrier, except for what its first products read. The gradient of a weight is
read by the update alone, so it can be reduced during the backward pass; so can a loss that is only returned.
Activations and their gradients are waited for. Sums of a loop are there when it ends, and after one over microbatches
no computing is left to hide their reduction.

No more is hidden than the products take that are computed meanwhile: on a slow network most of ZeRO-3 is waited for.
Nothing hides what is read before the first product, such as the table of an embedding, or what the last product makes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from passes.ir import LOOP, Control, Graph, Phase, control_of, phase
from passes.rules import remembered, rule_of, rules_of
from passes.sharding import PACKED_NBYTES, Behind


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """The values of a graph that are resharded behind computing: arguments, and values that neither pass waits for.

    `arguments` has inputs and values of equal size made of one alone; values in `unawaited` do not count where a loop
    or branch hands them on. `weight` and `gradient` are the computing that hides each of the two kinds, after the node
    `first` and before the node `last`, which have products.
    """

    graph: Graph
    arguments: frozenset[int]
    unawaited: frozenset[int]
    weight: Behind
    gradient: Behind
    first: int
    last: int

    @staticmethod
    @remembered
    def of(graph: Graph) -> Background:
        """The background of a whole program, cached on its graph."""
        return Background._within(graph, graph.inputs, graph.outputs)

    @classmethod
    def _within(cls, graph: Graph, arguments: Collection[int], leaving: Collection[int]) -> Self:
        floats = [v for v in arguments if graph.types[v].is_inexact]
        unawaited = _unawaited(graph, leaving)
        by_node = _products_by_node(graph)
        working = [i for i, inside in enumerate(by_node) if inside]
        last = max((i for i in working if phase(graph.nodes[i]) == "backward"), default=0)
        gradients = [
            graph.types[v].nbytes
            for v in unawaited
            if _is_for_updates(graph, v) and not _ends_with(graph, graph.producers[v], last)
        ]
        read = sum(graph.types[v].nbytes for v in floats if not _is_for_updates(graph, v))
        flops = tuple(sorted(_total(by_node).items()))
        return cls(
            graph=graph,
            arguments=derived(graph, floats, ("forward", "backward", "apply"), behind_barriers=True),
            unawaited=unawaited,
            weight=Behind(kinds=("all_gather",), combined_nbytes=0, sent_nbytes=read, flops=flops),
            gradient=Behind(
                kinds=("all_reduce", "reduce_scatter"),
                combined_nbytes=sum(gradients),
                small_nbytes=sum(nbytes for nbytes in gradients if nbytes <= PACKED_NBYTES),
                sent_nbytes=sum(gradients),
                flops=flops,
            ),
            first=min(working, default=0),
            last=last,
        )

    def inside(self, index: int, control: Control) -> tuple[Self, ...]:
        """The background of each body of a loop or branch.

        Behind computing are values that do not change from one iteration to the next; slices of arrays that were there
        before, such as weights; and slices of results that nobody waits for, such as gradients of weights.
        """
        node = self.graph.nodes[index]
        ports = {
            use.port
            for value, use in zip(node.inputs, control.operands, strict=True)
            if value in self.arguments
            and not control.ports[use.port].carry
            and not (use.stacked and node.scope == LOOP)
        }
        results = zip(node.outputs, control.results, strict=True)
        slices = {use.port for value, use in results if use.stacked and value in self.unawaited}
        return tuple(
            self._within(
                body.graph,
                [v for v, port in zip(body.graph.inputs, body.inputs, strict=True) if port in ports],
                [v for v, port in zip(body.graph.outputs, body.outputs, strict=True) if port in slices],
            )
            for body in control.bodies
        )

    def behind(self, value: int) -> Behind | None:
        """The computing that hides a value's resharding; None where something waits for the value.

        Gradients are sent together, weights one by one, as they are read at different times.
        """
        if value in self.arguments:
            readers = self.graph.consumers.get(value, ())
            return self.weight if readers and min(readers) > self.first else None
        if value not in self.unawaited or _ends_with(self.graph, self.graph.producers[value], self.last):
            return None
        return self.gradient if self.graph.producers[value] < self.last else replace(self.gradient, flops=())


def _ends_with(graph: Graph, index: int, last: int) -> bool:
    """Whether a node is a loop or branch after which no product comes."""
    return bool(graph.nodes[index].subgraphs) and index >= last


def products(graph: Graph, *, with_recomputed: bool = True) -> dict[str, float]:
    """The flops of a graph's products on all devices, by the dtype of what they multiply; a branch counts with its
    share.
    """
    return _total(_products_by_node(graph, with_recomputed=with_recomputed))


def _total(by_node: Iterable[Mapping[str, float]]) -> dict[str, float]:
    flops: defaultdict[str, float] = defaultdict(float)
    for inside in by_node:
        for dtype, once in inside.items():
            flops[dtype] += once
    return dict(flops)


def _products_by_node(graph: Graph, *, with_recomputed: bool = True) -> list[defaultdict[str, float]]:
    """The flops of each node's products, counted as `products` does."""
    flops = [defaultdict[str, float](float) for _ in graph.nodes]
    for node, rule, inside in zip(graph.nodes, rules_of(graph), flops, strict=True):
        if node.is_recomputed and not with_recomputed:
            continue
        control = control_of(node, graph)
        for body in control.bodies if control else ():
            for dtype, once in products(body.graph, with_recomputed=with_recomputed).items():
                inside[dtype] += body.runs * once
        if not node.subgraphs and rule.multiplies:
            inside[graph.types[node.inputs[0]].dtype] += rule.flops
    return flops


def _is_for_updates(graph: Graph, value: int) -> bool:
    """Whether updates alone read a value: an optimizer's state, or the last of several casts of a gradient."""
    return all(phase(graph.nodes[reader]) == "apply" for reader in graph.consumers.get(value, ()))


def _unawaited(graph: Graph, leaving: Collection[int]) -> frozenset[int]:
    """The values that neither pass waits for: updates alone read them, or they are returned, as a loss is.

    So are values of which only casts and sums of equal size are read that nobody waits for. Values that a loop's body
    makes in the forward pass as well, as a microbatch does, are summed and reduced once after the loop, and count only
    if they are returned.
    """
    unawaited, outgoing = set[int](), frozenset(leaving)
    within = not leaving and any(phase(node) == "forward" for node in graph.nodes)
    for index in reversed(range(0 if within else len(graph.nodes))):
        node = graph.nodes[index]
        if phase(node) == "apply":
            continue
        for value in node.outputs:
            readers = set(graph.consumers.get(value, ()))
            if (value in outgoing or value not in graph.returned) and all(
                phase(graph.nodes[reader]) == "apply" or _hands_on(graph, value, reader, unawaited)
                for reader in readers
            ):
                unawaited.add(value)
    return frozenset(unawaited)


def _hands_on(graph: Graph, value: int, reader: int, unawaited: set[int]) -> bool:
    """Whether a small operator makes of a value, at equal size, one that nobody waits for."""
    node = graph.nodes[reader]
    if node.subgraphs or not unawaited.issuperset(node.outputs):
        return False
    same = all(graph.types[result].size == graph.types[value].size for result in node.outputs)
    return same and rule_of(node, graph).light


def derived(
    graph: Graph,
    values: Collection[int],
    phases: Collection[Phase] = ("forward", "apply"),
    *,
    behind_barriers: bool = False,
) -> frozenset[int]:
    """These values, and values of equal size that nodes of these phases make of one of them alone, such as a cast; as
    asked for, also those that barriers let through.
    """
    known = set(values)
    for node in graph.nodes:
        if behind_barriers and rule_of(node, graph).alias:
            known.update(after for before, after in zip(node.inputs, node.outputs, strict=True) if before in known)
        arrays = [v for v in node.inputs if v not in graph.literals]
        if len(arrays) != 1 or len(node.outputs) != 1 or arrays[0] not in known or phase(node) not in phases:
            continue
        result = node.outputs[0]
        if graph.types[result].size == graph.types[arrays[0]].size and rule_of(node, graph).light:
            known.add(result)
    return frozenset(known)
