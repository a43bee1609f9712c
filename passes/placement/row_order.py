"""Programs for which the order of a batch's rows does not matter: each row is computed by itself, or reduced with all.

A batch in microbatches has the rows of each device apart: its own of the first microbatch, then its own of the second.
To put all rows in order, devices would send every row to each other. Where the order does not matter, each device goes
through its rows as they are: a line search on the whole batch does, and so do statistics of predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from passes.ir import Body, Control, Graph, Node, control_of, has_effect
from passes.rules import ShardingRule, rules_of

Rows = dict[int, int]
"""The dimension that the rows are on, by value or port."""


class _OrderMattersError(Exception):
    """Some result depends on the order of the rows in another way than by having them in that order."""


def rows_in_any_order(graph: Graph, rows: Mapping[int, int], size: int) -> Rows | None:
    """The dimension of each output along which it has the rows; None if their order matters.

    `rows` are the inputs that have them, `size` of them, each along its dimension. In another order, the same for all
    inputs, the outputs that have rows have them in that order, and the others are the same but for rounding.
    """
    walk = _Walk(graph=graph, size=size, rows=dict(rows))
    try:
        walk.run()
    except _OrderMattersError:
        return None
    return {value: walk.rows[value] for value in graph.outputs if value in walk.rows}


@dataclass(slots=True, kw_only=True)
class _Walk:
    """A walk through a graph in order: the values that have `rows`, and the dimensions along which values are
    `repeated`, so that they are the same in any order.
    """

    graph: Graph
    size: int
    rows: Rows
    repeated: dict[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])

    def run(self) -> None:
        """Places the rows of every value. Raises _OrderMattersError where an operator needs their order."""
        for node, rule in zip(self.graph.nodes, rules_of(self.graph), strict=True):
            if self.rows.keys().isdisjoint(node.inputs):
                if rule.shape_parameter:
                    (value,) = node.outputs
                    self.repeated[value] = frozenset(filter(rule.repeats, range(self.graph.types[value].rank)))
            elif control := control_of(node, self.graph):
                self._loop(node, control)
            elif rule.alias:
                pairs = zip(node.inputs, node.outputs, strict=True)
                self.rows.update((b, self.rows[a]) for a, b in pairs if a in self.rows)
            else:
                self._operator(node, rule)

    def _operator(self, node: Node, rule: ShardingRule) -> None:
        sides = list(zip(node.inputs, rule.operands, strict=True))
        factors = {factors[self.rows[value]] for value, factors in sides if value in self.rows}
        if rule.once or has_effect(node) or len(factors) > 1 or -1 in factors:
            raise _OrderMattersError
        (factor,) = factors
        properties = rule.factors[factor]
        if properties.size != self.size or not all(self._meets(v, dims, factor) for v, dims in sides):
            raise _OrderMattersError
        if rule.localized and self._picks(node, rule, factor):
            raise _OrderMattersError
        for value, dims in zip(node.outputs, rule.results, strict=True):
            if factor in dims:
                self.rows[value] = dims.index(factor)
            elif not properties.reduction:
                raise _OrderMattersError

    def _meets(self, value: int, factors: tuple[int, ...], factor: int) -> bool:
        """Whether an operand has rows where the others have them, or is the same for all of them."""
        dims = [d for d, each in enumerate(factors) if each == factor]
        known = {self.rows[value]} if value in self.rows else self.repeated.get(value, frozenset[int]())
        return known.issuperset(dims)

    def _picks(self, node: Node, rule: ShardingRule, factor: int) -> bool:
        """Whether a node reads or writes some rows by their positions: one of them, a part, or those of indices."""
        types = self.graph.types
        others = [(v, factors) for v, factors in zip(node.inputs[1:], rule.operands[1:], strict=True) if types[v].rank]
        indices = [factors for v, factors in others if types[v].is_integer]
        if factor not in rule.operands[0]:
            return not indices
        return any(factor not in factors for _, factors in others) or factor not in rule.results[0]

    def _loop(self, node: Node, control: Control) -> None:
        """Places the rows of a loop's or branch's results: carries have them in each iteration, or never."""
        rows, repeated = Rows(), dict[int, frozenset[int]]()
        for value, use in zip(node.inputs, control.operands, strict=True):
            if value in self.rows:
                rows[use.port] = _without_stack(self.rows[value], use.stacked)
            elif not use.stacked:
                repeated[use.port] = self.repeated.get(value, frozenset[int]())
        before = None
        while (rows, repeated) != before:
            before = dict(rows), dict(repeated)
            for body in control.bodies:
                _pass_through(body, self.size, rows, repeated)
        is_chosen = control.choice in rows or any(control.ports[port].whole for port in rows)
        if is_chosen:
            raise _OrderMattersError
        for value, use in zip(node.outputs, control.results, strict=True):
            if use.port in rows:
                self.rows[value] = rows[use.port] + use.stacked


def _without_stack(dim: int, stacked: bool) -> int:
    """The dimension of rows in a slice of what is stacked. Raises _OrderMattersError for a loop over the rows."""
    if stacked and not dim:
        raise _OrderMattersError
    return dim - stacked


def _pass_through(body: Body, size: int, rows: Rows, repeated: dict[int, frozenset[int]]) -> None:
    """Adds the ports that the results of a body put rows in to `rows`; those that are no longer `repeated` leave that.

    Raises _OrderMattersError where a port has rows in one iteration and not in another.
    """
    entering = list(zip(body.graph.inputs, body.inputs, strict=True))
    inner = _Walk(
        graph=body.graph,
        size=size,
        rows={value: rows[port] for value, port in entering if port in rows},
        repeated={v: repeated[port] for v, port in entering if port in repeated and port not in rows},
    )
    inner.run()
    entered = {port for _, port in entering}
    for value, port in zip(body.graph.outputs, body.outputs, strict=True):
        dim = inner.rows.get(value)
        begins_alike = port not in entered or dim in repeated.get(port, ())
        if dim is not None and (rows.get(port, dim) != dim or not (port in rows or begins_alike)):
            raise _OrderMattersError
        if dim is not None:
            rows[port] = dim
        elif port in rows and rows[port] not in inner.repeated.get(value, ()):
            raise _OrderMattersError
        elif port in repeated and port not in rows:
            repeated[port] &= inner.repeated.get(value, frozenset[int]())
