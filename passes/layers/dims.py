"""Classes of dimensions of a program's values that operators cut together, through loops and branches.

Dimensions are numbered over all values, and classes are kept as in union-find: `DimClasses.add` numbers a graph and
unites the dimensions that its operators cut together, `DimClasses.root` is the dimension that stands for a class.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from passes.ir import Control, Graph, Node, PortUse, control_of, phase, scan_of
from passes.rules import ShardingRule, remembered, rules_of


@dataclass(frozen=True, slots=True)
class Numbering:
    """The numbers of a graph's dimensions: `firsts[v]` is that of the first dimension of value v; `bodies` has the same
    for bodies, by node.
    """

    firsts: Sequence[int]
    bodies: Mapping[int, tuple[Numbering, ...]]


class Work(NamedTuple):
    """The flops of an operator, the classes of dimensions that it keeps without summing any of them, and those that it
    sums.

    Those that are `mixed` are on both sides: each position is made of all, as in attention.
    """

    flops: float
    kept: frozenset[int]
    summed: frozenset[int]
    mixed: frozenset[int]


class _Operator(NamedTuple):
    """The flops of an operator, and a dimension for each of its factors: those it keeps, and those it sums."""

    flops: float
    is_forward: bool
    kept: Sequence[int]
    summed: Sequence[int]


@dataclass(slots=True)
class DimClasses:
    """The classes of dimensions that are cut together, of all values of a program, those of bodies included.

    Dimensions of a `single` element, which nothing cuts, are united only if that is asked for. With a `multiple`, only
    factors whose size it divides are followed, and elements keep their order along a class: the rows of two batches
    that are concatenated, or of one that is split for a loop to run over, are one class without a multiple, and several
    with one. `loop_dims` are the dimensions that loops of the program run over, by node, where iterations are
    independent.
    """

    single: bool = False
    multiple: int = 1
    loop_dims: dict[int, int] = field(default_factory=dict[int, int], init=False)
    _parents: list[int] = field(default_factory=list[int], init=False)
    _operators: list[_Operator] = field(default_factory=list[_Operator], init=False)

    @property
    def _keeps_order(self) -> bool:
        """Whether elements have the same order along all dimensions of a class."""
        return self.multiple > 1

    def add(self, graph: Graph, times: float = 1.0, around: tuple[int, ...] | None = None) -> Numbering:
        """The numbers of the dimensions of a graph that runs `times` a step, those that it cuts together united.

        It runs for every element along the dimensions of the loops `around` it; the program itself has None.
        """
        firsts = self._numbered([type.rank for type in graph.types])
        bodies: dict[int, tuple[Numbering, ...]] = {}
        for index, (node, rule) in enumerate(zip(graph.nodes, rules_of(graph), strict=True)):
            if (control := control_of(node, graph)) is not None:
                loop_dims, bodies[index] = self._add_control(graph, node, control, firsts, times, around or ())
                if loop_dims and around is None:
                    self.loop_dims[index] = loop_dims[0]
            elif rule.alias:
                for before, after in zip(node.inputs, node.outputs, strict=True):
                    self._unite_port(firsts[before], graph.types[before].rank, firsts, PortUse(port=after))
            else:
                if around is None and not self._keeps_order:
                    self._unite_batches(graph, node, rule, firsts)
                kept, summed = self._add_operator(graph, node, rule, firsts)
                is_forward = phase(node) == "forward"
                self._operators.append(_Operator(times * rule.flops, is_forward, [*kept, *(around or ())], summed))
        return Numbering(firsts, bodies)

    def _add_control(
        self, graph: Graph, node: Node, control: Control, firsts: Sequence[int], times: float, around: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[Numbering, ...]]:
        """(the dimension that a loop runs over, if its iterations are independent; the numbers in all bodies).

        Dimensions of values on either side of a port are united.
        """
        ports = self._numbered([port.type.rank for port in control.ports])
        port_uses = (
            *zip(node.inputs, control.operands, strict=True),
            *zip(node.outputs, control.results, strict=True),
        )
        for value, port_use in port_uses:
            self._unite_port(firsts[value], graph.types[value].rank, ports, port_use)
        loop_dims = self._loop_dims(node, control, firsts)
        bodies: list[Numbering] = []
        for body in control.bodies:
            inside = self.add(body.graph, times * body.trips * body.share, (*around, *loop_dims))
            with_ports = (
                *zip(body.graph.inputs, body.inputs, strict=True),
                *zip(body.graph.outputs, body.outputs, strict=True),
            )
            for value, port in with_ports:
                self._unite_port(inside.firsts[value], body.graph.types[value].rank, ports, PortUse(port=port))
            bodies.append(inside)
        return loop_dims, tuple(bodies)

    def _add_operator(
        self, graph: Graph, node: Node, rule: ShardingRule, firsts: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """(the dimensions that an operator keeps, those that it sums), with dimensions of operands and
        results united.
        """
        read, made = [firsts[v] for v in node.inputs], [firsts[v] for v in node.outputs]
        apart = [] if self._keeps_order else list(split_for_loop(graph, node, rule))
        for before, after in apart:
            self._unite(read[0] + before, made[0] + after)
        for a, before, b, after in [] if self._keeps_order else rule.cut_alike(node, graph):
            self._unite(firsts[a] + before, firsts[b] + after)
        kept, summed = self._unite_factors(rule, read, made, {rule.operands[0][before] for before, _ in apart})
        if self.single and rule.single is not None:
            more = self._unite_factors(rule.single, read, made, ())
            kept, summed = kept + more[0], summed + more[1]
        return kept, summed

    def _unite_batches(self, graph: Graph, node: Node, rule: ShardingRule, firsts: Sequence[int]) -> None:
        """Unites the rows of inputs with those of what a node concatenates of them and as many others, or a multiple of
        them.

        Such as two views of a batch that go through one network at once, or labelled and unlabelled rows.
        """
        rows = [next(iter(graph.types[value].shape), 0) for value in node.inputs]
        are_put_together = len(rows) > 1 and {(operand, 0, 0) for operand in range(len(rows))} <= {*rule.moves}
        if not are_put_together or any(n % max(min(rows), 1) for n in rows):
            return
        heads = {self.root(firsts[value]) for value in graph.inputs if graph.types[value].rank}
        for value in node.inputs:
            if self.root(firsts[value]) in heads:
                self._unite(firsts[value], firsts[node.outputs[0]])

    def _loop_dims(self, node: Node, control: Control, firsts: Sequence[int]) -> tuple[int, ...]:
        """The dimension that a loop with independent iterations runs over, which is that of all its slices; or none."""
        if not stands_alone(node):
            return ()
        sides = (
            *zip(node.inputs, control.operands, strict=True),
            *zip(node.outputs, control.results, strict=True),
        )
        first, *others = (firsts[value] for value, port_use in sides if port_use.stacked)
        for other in others:
            self._unite(first, other)
        return (first,)

    @staticmethod
    def unchanged_carries(node: Node) -> tuple[bool, ...] | None:
        """Whether each carry of a loop over slices with independent iterations never changes, be it behind the barrier
        of a recomputation; the other carries are sums. None for any other node.
        """
        if (scan := scan_of(node)) is None or len(node.inputs) == scan.fixed:
            return None
        (body,) = node.subgraphs
        carries = list(zip(body.inputs[scan.constants :], body.outputs[: scan.carries], strict=False))
        unchanged = tuple(begin == _passed_on(body, end) for begin, end in carries)
        summed = (stays or _is_summed(body, begin, end) for stays, (begin, end) in zip(unchanged, carries, strict=True))
        return unchanged if all(summed) else None

    def _numbered(self, ranks: Sequence[int]) -> list[int]:
        """The number of the first dimension of each value of these ranks, which are new."""
        firsts: list[int] = []
        for rank in ranks:
            firsts.append(len(self._parents))
            self._parents.extend(range(len(self._parents), len(self._parents) + rank))
        return firsts

    def _unite_port(self, first: int, rank: int, ports: Sequence[int], port_use: PortUse) -> None:
        """Unites the dimensions of a value with those of the port that it goes through."""
        for dim in range(int(port_use.stacked), rank):
            self._unite(first + dim, ports[port_use.port] + dim - port_use.stacked)

    def _unite_factors(
        self, rule: ShardingRule, read: Sequence[int], made: Sequence[int], apart: Collection[int]
    ) -> tuple[list[int], list[int]]:
        """(the dimensions that an operator keeps, those that it sums), one for each factor, united with its others.

        Factors `apart` are split, and go on as another one.
        """
        by_factor: dict[int, int] = {}
        for firsts, sides in ((made, rule.results), (read, rule.operands)):
            for first, factors in zip(firsts, sides, strict=True):
                for dim, factor in enumerate(factors):
                    if factor >= 0 and factor not in apart and not rule.factors[factor].size % self.multiple:
                        self._unite(first + dim, by_factor.setdefault(factor, first + dim))
        kept = {factor for factors in rule.results for factor in factors} - {-1}
        return [by_factor[f] for f in kept if f in by_factor], [by_factor[f] for f in by_factor if f not in kept]

    def _unite(self, a: int, b: int) -> None:
        self._parents[self.root(a)] = self.root(b)

    def root(self, dim: int) -> int:
        """The dimension that stands for the class of this one."""
        while self._parents[dim] != dim:
            self._parents[dim] = self._parents[self._parents[dim]]
            dim = self._parents[dim]
        return dim

    def works(self) -> list[Work]:
        """The work of each operator, of those of the forward pass if there is one."""
        has_forward = any(operator.is_forward for operator in self._operators)
        works: list[Work] = []
        for flops, is_forward, kept, summed in self._operators:
            if is_forward or not has_forward:
                kept_classes, summed_classes = frozenset(map(self.root, kept)), frozenset(map(self.root, summed))
                mixed = kept_classes & summed_classes
                works.append(Work(flops, kept_classes - mixed, summed_classes, mixed))
        return works


@remembered
def dim_classes(graph: Graph, single: bool = False) -> tuple[DimClasses, Numbering]:
    """The classes of dimensions of a program, with the numbers of its dimensions, cached on the graph."""
    dims = DimClasses(single=single)
    return dims, dims.add(graph)


def stands_alone(node: Node) -> bool:
    """Whether a node is a loop over slices whose iterations are independent: its carries are sums, or never change."""
    if (scan := scan_of(node)) is None or len(node.inputs) == scan.fixed:
        return False
    (body,) = node.subgraphs
    ends = body.outputs[: scan.carries]
    carries = zip(body.inputs[scan.constants :], ends, strict=False)
    return all(begin == end or _is_summed(body, begin, end) for begin, end in carries)


def _passed_on(body: Graph, value: int) -> int:
    """The value that another one is, before barriers and casts to the dtype that it has."""
    rules = rules_of(body)
    while (index := body.producers.get(value)) is not None:
        node, rule = body.nodes[index], rules[index]
        before = node.inputs[node.outputs.index(value)] if rule.alias else node.inputs[0] if rule.casts else value
        if before == value or body.types[before] != body.types[value]:
            break
        value = before
    return value


def _is_summed(body: Graph, value: int, end: int) -> bool:
    """Whether all that a body does with an input is to add to it what it returns at the `end`."""
    rules = rules_of(body)
    while value != end:
        readers = body.consumers.get(value, ())
        if len(readers) != 1 or value in body.outputs:
            return False
        node, rule = body.nodes[readers[0]], rules[readers[0]]
        is_same = rule.casts and body.types[value] == body.types[node.outputs[0]]
        is_first = rule.accumulates or node.inputs[0] == value  # the second operand of a difference is not added
        if not is_same and not (rule.sums and is_first and node.inputs.count(value) == 1):
            return False
        (value,) = node.outputs
    return not body.consumers.get(end) and body.outputs.count(end) == 1


def split_for_loop(graph: Graph, node: Node, rule: ShardingRule) -> Iterator[tuple[int, int]]:
    """(a dimension of a node's operand, the dimension of its result that goes on) where the node splits off the first
    one for a loop, as a batch in parts whose gradients are added by hand.
    """
    for reader in graph.consumers.get(node.outputs[0], ()) if rule.splits else ():
        control = control_of(graph.nodes[reader], graph)
        port_uses = zip(graph.nodes[reader].inputs, control.operands, strict=True) if control else ()
        if any(use.stacked for value, use in port_uses if value == node.outputs[0]):
            yield from rule.splits
