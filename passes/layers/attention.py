"""Attention that a device fuses: its scores, softmax(Q K^T), exist inside one kernel and nowhere else.

It is recognised by its operators, not by a name: scores are made by a batched product, normalised by a maximum and a
sum, and read by another batched product. Arrays of as many elements that belong to them (weights, masks, the gradients
of both) stay in the kernel with them; Q, K, V, the result and the sums of the softmax are in memory. Loops may hand
scores on to the loops of the backward pass. Where any other operator reads the scores nothing is fused.

Reference: Dao et al., "FlashAttention" (2022): the backward pass computes the scores again, one product more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cached_property

from passes.ir import Control, Graph, control_of, phase
from passes.rules import rules_of

FUSED, MADE_AGAIN = 1, 2
"""Values of `TensorType.fused`: for all that stays in the kernel, and for gradients of scores, for which the scores are
computed once more.
"""


def fused_attention(graph: Graph) -> Graph:
    """The same program, whose types say which values a fused kernel keeps to itself; the program as it is without
    attention.
    """
    kernel = _Kernel(graph, frozenset(), whole=True)
    return kernel.marked() if kernel.is_closed else graph


class _Kernel:
    """The values of a program, or of the body of a loop, that fused kernels keep to themselves.

    `given` are inputs that are scores outside of the body. A `whole` program must not return any.
    """

    def __init__(self, graph: Graph, given: Collection[int], *, whole: bool) -> None:
        self.graph, self.given, self.whole = graph, frozenset(given), whole
        self.rules = rules_of(graph)
        self.controls = {i: c for i, node in enumerate(graph.nodes) if (c := control_of(node, graph))}
        self.values = {v for group in self._groups() if self._is_kernel(group) for v in group} | self.given
        self.bodies = {index: self._inside(index, control) for index, control in self.controls.items()}

    def _groups(self) -> Iterable[frozenset[int]]:
        """The groups of values that light operators compute from each other, element by element."""
        parents: dict[int, int] = {}

        def find(value: int) -> int:
            while parents.setdefault(value, value) != value:
                value = parents[value]
            return value

        types = self.graph.types
        for node, rule in zip(self.graph.nodes, self.rules, strict=True):
            if rule.light and not rule.alias and len(node.outputs) == 1:
                (result,) = node.outputs
                for value in node.inputs:
                    if types[value].size == types[result].size > 1:
                        parents[find(value)] = find(result)
        groups: dict[int, set[int]] = defaultdict(set)
        for value in parents:
            groups[find(value)].add(value)
        return [frozenset(group) for group in groups.values()]

    def _is_kernel(self, group: frozenset[int]) -> bool:
        """Whether a group of values is all that a fused kernel computes of its scores."""
        made_by = {self.graph.producers[v] for v in group if v in self.graph.producers}
        read_by = {reader for v in group for reader in self.graph.consumers.get(v, ())}
        reductions = {kind for reader in read_by for kind in self._reduced(reader)}
        makes, reads = any(map(self._is_batched, made_by)), any(map(self._is_batched, read_by))
        is_softmax = makes and reads and {"max", "add"} <= reductions
        if not (is_softmax or not self.given.isdisjoint(group)) or not all(self._keeps(r, group) for r in read_by):
            return False
        return not (self.whole and group.intersection((*self.graph.inputs, *self.graph.outputs)))

    def _keeps(self, reader: int, group: frozenset[int]) -> bool:
        """Whether a reader of scores is part of the kernel, or a loop that may hold another part."""
        outputs = self.graph.nodes[reader].outputs
        return (
            reader in self.controls
            or self._is_batched(reader)
            or bool(self._reduced(reader))
            or group.issuperset(outputs)
        )

    def _is_batched(self, node: int) -> bool:
        return self.rules[node].is_product and self.rules[node].is_batched

    def _reduced(self, node: int) -> set[str]:
        """The kinds of reductions that a light operator applies to its operand."""
        factors = self.rules[node].factors if self.rules[node].light else ()
        return {factor.reduction for factor in factors if factor.size and factor.reduction}

    def _inside(self, index: int, control: Control) -> tuple[_Kernel, ...]:
        """The kernels in the bodies of a loop or branch; the scores that these hand on join the values of this one."""
        node = self.graph.nodes[index]
        entering = {w.port for v, w in zip(node.inputs, control.operands, strict=True) if v in self.values}
        bodies: list[_Kernel] = []
        ports: set[int] = set()
        for body in control.bodies:
            given = [v for v, port in zip(body.graph.inputs, body.inputs, strict=True) if port in entering]
            inner = _Kernel(body.graph, given, whole=False)
            bodies.append(inner)
            ports.update(s for v, s in zip(body.graph.outputs, body.outputs, strict=True) if v in inner.values)
            ports.update(s for v, s in zip(body.graph.inputs, body.inputs, strict=True) if v in inner.values)
        results = zip(node.outputs, control.results, strict=True)
        self.values |= {value for value, port_use in results if port_use.port in ports}
        operands = zip(node.inputs, control.operands, strict=True)
        self.values |= {value for value, port_use in operands if port_use.port in ports and self._is_spread(value)}
        return tuple(bodies)

    def _is_spread(self, value: int) -> bool:
        """Whether a value is broadcast for loops alone, as a mask may be."""
        graph, producer = self.graph, self.graph.producers.get(value)
        if producer is None or not self.rules[producer].light:
            return False
        if not all(reader in self.controls for reader in graph.consumers[value]):
            return False
        return all(graph.types[v].size < graph.types[value].size for v in graph.nodes[producer].inputs)

    @property
    def is_closed(self) -> bool:
        """Whether the scores are read by parts of the kernel alone, through all loops."""
        outside = set(self.graph.outputs) if self.whole else set[int]()
        readers = ((v, reader) for v in self.values for reader in self.graph.consumers.get(v, ()))
        return (
            outside.isdisjoint(self.values)
            and all(self._keeps(reader, frozenset(self.values)) for _, reader in readers)
            and all(inner.is_closed for bodies in self.bodies.values() for inner in bodies)
        )

    @cached_property
    def made_again(self) -> frozenset[int]:
        """The gradients of scores: values that the backward pass makes by a product, and of which no maximum
        is taken.
        """
        graph = self.graph
        return frozenset(
            value
            for index, node in enumerate(graph.nodes)
            if phase(node) == "backward" and self._is_batched(index)
            for value in node.outputs
            if value in self.values and not self._is_normalised(value)
        )

    def _is_normalised(self, value: int) -> bool:
        pending, seen = [value], {value}
        while pending:
            for reader in self.graph.consumers.get(pending.pop(), ()):
                if "max" in self._reduced(reader):
                    return True
                more = self.values.intersection(self.graph.nodes[reader].outputs) - seen
                if self.rules[reader].light:
                    seen |= more
                    pending += more
        return False

    def marked(self) -> Graph:
        """The program with the types that say what kernels keep."""
        if not self.values and not self.bodies:
            return self.graph
        again = self.made_again
        types = list(self.graph.types)
        for value in self.values:
            types[value] = replace(types[value], fused=MADE_AGAIN if value in again else FUSED)
        nodes = list(self.graph.nodes)
        for index, bodies in self.bodies.items():
            nodes[index] = replace(nodes[index], subgraphs=tuple(inner.marked() for inner in bodies))
        return replace(self.graph, types=tuple(types), nodes=tuple(nodes))
