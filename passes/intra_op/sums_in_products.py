"""Products and transforms that take a partial sum over devices as it is, so that their own result is reduced.

The gradient of a weight that is made of others, such as `W + A @ B` of an adapter or a filter of its spectrum, is
summed over the batch, and goes through a product or transform to what is updated. That is linear, and its result is
smaller: if each device applies it to its own summand, fewer bytes are reduced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from passes.ir import Graph, Node, phase
from passes.placement import Grouping
from passes.rules import Factor, ShardingRule


def summed_operand(graph: Graph, grouping: Grouping, index: int) -> int | None:
    """The operand of a heavy operator that may come in partial; None if there is none, or if nothing is gained by it.

    The operator is linear in the operand and its result is smaller. The operand comes from a sum over more elements
    than it has, such as one over a batch, by linear operators alone. All that reads it on the way has a smaller result,
    too: a reader that needs it reduced would reduce it for all.
    """
    return _sums_of(graph, grouping).operand(index)


def _sums_of(graph: Graph, grouping: Grouping) -> _Sums:
    """The sums of a graph, cached on it."""
    key = summed_operand, id(grouping)
    known = cast("tuple[Grouping, _Sums] | None", graph.memo.get(key))
    if known is None:
        graph.memo[key] = known = grouping, _Sums(graph, grouping)
    return known[1]


def factors_of_sums(graph: Graph, grouping: Grouping, members: Sequence[int]) -> frozenset[tuple[int, int]]:
    """The (member, operand) pairs of light operators, by positions, that are linear in each of several operands alone,
    and of which the operand is a sum, and the first is none: `scale * gradient`, and not `gradient * scale`.

    There are some in bodies of loops and branches alone, where what is reduced may be reduced many times a step.
    """
    pairs: set[tuple[int, int]] = set()
    for position, index in enumerate(members if grouping.inside else ()):
        node, rule = graph.nodes[index], grouping.rules[index]
        operands = _linear_alone(node, rule) if rule.light else []
        if len(operands) > 1:
            are_sums = [_sums_of(graph, grouping).is_sum(node.inputs[operand]) for operand in operands]
            if any(are_sums) and not are_sums[0]:
                pairs.add((position, operands[are_sums.index(True)]))
    return frozenset(pairs)


def _linear_alone(node: Node, rule: ShardingRule) -> list[int]:
    """The operands in each of which alone an operator is linear, none twice."""
    alone = [f.partial[0] for f in rule.factors if not f.size and len(f.partial) == 1]
    return alone if len({node.inputs[operand] for operand in alone}) == len(alone) else []


class _Sums:
    """The values of a graph that are sums, or linear in one, and those whose readers all have smaller results."""

    def __init__(self, graph: Graph, grouping: Grouping) -> None:
        self.graph, self.grouping, self.rules = graph, grouping, grouping.rules
        self._made_anywhere = grouping.free.union(graph.literals)
        self._sums: dict[int, bool] = {}
        self._shrinking: dict[int, bool] = {}
        self._summed: dict[int, float] = {}

    def operand(self, index: int) -> int | None:
        """The operand of an operator that may come in partial; None if the operator is light, or if there is none."""
        node, rule = self.graph.nodes[index], self.rules[index]
        for factor in rule.factors if not rule.light else ():
            summands = [] if factor.size else self._summands(node, factor)
            if len(summands) == 1:
                (operand,) = summands
                value = node.inputs[operand]
                if self.shrinks(index, value) and self.is_sum(value) and self.only_shrinks(value):
                    return operand
        return None

    def shrinks(self, index: int, value: int) -> bool:
        """Whether a heavy operator is linear in a value and has a smaller result: fewer bytes, or as many real numbers
        as the value has complex ones; or whether light operators sum what it makes up to fewer bytes, or add it to what
        is reduced anyway.
        """
        node, rule, types = self.graph.nodes[index], self.rules[index], self.graph.types
        if rule.light or node.inputs.count(value) != 1 or len(node.outputs) != 1:
            return False
        operand = node.inputs.index(value)
        before, after = types[value], types[node.outputs[0]]
        smaller = after.nbytes < before.nbytes or (not rule.is_product and after.nbytes <= before.nbytes)
        smaller = smaller or self._summed_nbytes(node.outputs[0]) < before.nbytes or self._joins(node.outputs[0])
        return smaller and any(not f.size and self._summands(node, f) == [operand] for f in rule.factors)

    def _summands(self, node: Node, factor: Factor) -> list[int]:
        """The operands that come in as summands by a factor, but for zeros and the like, of which a device has all."""
        return [operand for operand in factor.partial if node.inputs[operand] not in self._made_anywhere]

    def is_sum(self, value: int) -> bool:
        """Whether the backward pass makes a value by a sum over more elements than it has, or from such a sum by
        operators that take partial sums.

        Those are light linear operators with results that are no larger, and heavy ones.
        """
        if value not in self._sums:
            self._sums[value] = False  # until it is known
            producer = self.graph.producers.get(value)
            makes = self._adds_up_in if producer in self.grouping.controls else self._makes_sum
            self._sums[value] = producer is not None and makes(producer, value)
        return self._sums[value]

    def _adds_up_in(self, index: int, value: int) -> bool:
        """Whether the bodies of a loop or branch make such a sum of a result, which they do not stack."""
        control, groupings = self.grouping.controls[index], self.grouping.bodies[index]
        port_use = control.results[self.graph.nodes[index].outputs.index(value)]
        makers = [pair for pair in zip(control.bodies, groupings, strict=True) if port_use.port in pair[0].outputs]
        return not port_use.stacked and all(
            _Sums(body.graph, grouping).is_sum(body.graph.outputs[body.outputs.index(port_use.port)])
            for body, grouping in makers
        )

    def _makes_sum(self, index: int, value: int) -> bool:
        node, rule, types = self.graph.nodes[index], self.rules[index], self.graph.types
        if phase(node) != "backward":
            return False
        kept = {factor for factors in rule.results for factor in factors} - {-1}
        summed = [f for n, f in enumerate(rule.factors) if f.size and n not in kept and f.reduction == "add"]
        if summed:
            sides = [math.prod(rule.factors[f].size for f in set(of) & kept) for of in rule.operands[:2]]
            return rule.light or math.prod(f.size for f in summed) >= min(sides)
        if not rule.light:
            return self.operand(index) is not None
        if len(node.outputs) != 1:
            return False
        size = types[node.outputs[0]].size
        operands = (v for v in dict.fromkeys(node.inputs) if v in self.graph.producers and types[v].size >= size)
        return any(self._is_linear(index, v) and self.is_sum(v) for v in operands)

    def _is_linear(self, index: int, value: int) -> bool:
        """Whether an operator is linear in a value, which a product of the value with itself is not."""
        reads = {operand for operand, read in enumerate(self.graph.nodes[index].inputs) if read == value}
        return any(not f.size and reads.issubset(f.partial) for f in self.rules[index].factors)

    def only_shrinks(self, value: int) -> bool:
        """Whether all readers of a value, behind light linear operators, have smaller results, and it is no output."""
        if value not in self._shrinking:
            self._shrinking[value] = False  # until it is known
            readers = self.graph.consumers.get(value, ())
            is_result = value in self.graph.returned
            self._shrinking[value] = not is_result and all(self._goes_on(reader, value) for reader in readers)
        return self._shrinking[value]

    def _goes_on(self, index: int, value: int) -> bool:
        node, rule = self.graph.nodes[index], self.rules[index]
        if not rule.light:
            return self.shrinks(index, value)
        if not self._is_linear(index, value) or not node.outputs:
            return False
        return self._adds_up(index) or all(map(self.only_shrinks, node.outputs))

    def _joins(self, value: int) -> bool:
        """Whether a value is only added to sums over the batch, as one use's gradient of a table to another's."""
        nodes, readers = self.graph.nodes, self.graph.consumers.get(value, ())
        sums = [[v for v in nodes[r].inputs if v != value and self.is_sum(v)] for r in readers]
        adds = all(self.rules[reader].accumulates for reader in readers)
        return bool(readers) and value not in self.graph.returned and adds and all(sums)

    def _summed_nbytes(self, value: int) -> float:
        """Bytes of the sums that light linear operators make of a value along its dimensions; infinite where a reader
        needs the value otherwise.
        """
        if value not in self._summed:
            self._summed[value] = math.inf  # until it is known
            readers = self.graph.consumers.get(value, ()) if value not in self.graph.returned else ()
            nbytes = [self._nbytes_behind(reader, value) for reader in readers]
            self._summed[value] = sum(nbytes) if nbytes else math.inf
        return self._summed[value]

    def _nbytes_behind(self, index: int, value: int) -> float:
        """Bytes of the sums that an operator, and the light ones behind it, make of a value."""
        node, types = self.graph.nodes[index], self.graph.types
        if not self.rules[index].light or not self._is_linear(index, value) or len(node.outputs) != 1:
            return math.inf
        (result,) = node.outputs
        if self._adds_up(index):
            return types[result].nbytes
        return self._summed_nbytes(result) if types[result].nbytes <= types[value].nbytes else math.inf

    def _adds_up(self, index: int) -> bool:
        """Whether a light operator sums its operand along a dimension, so that fewer bytes need reducing."""
        node, rule, types = self.graph.nodes[index], self.rules[index], self.graph.types
        kept = {factor for factors in rule.results for factor in factors}
        summed = any(f.size > 1 and n not in kept and f.reduction == "add" for n, f in enumerate(rule.factors))
        return summed and types[node.outputs[0]].nbytes < types[node.inputs[0]].nbytes
