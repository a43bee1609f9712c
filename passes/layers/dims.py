"""Dimensions of a program's values in classes of those that operators cut together, through loops and branches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from passes.ir import Control, Graph, Node, PortUse, control_of, phase, scan_of
from passes.rules import ShardingRule, rules_of


@dataclass(frozen=True, slots=True)
class Numbered:
    """The number of the first dimension of each value of a graph, and the same of the bodies of its loops and branches,
    by node.
    """

    firsts: Sequence[int]
    bodies: Mapping[int, tuple[Numbered, ...]]


@dataclass(slots=True)
class Dims:
    """The dimensions of all values, those of bodies included, by number, in classes of those that are cut together;
    of a `single` element, which nothing cuts, only if asked for.

    Asked for those of a `multiple` of so many, classes hold dimensions along which elements keep their order: two
    batches that are put together, and one that is split for a loop, are other classes then.
    """

    single: bool = False
    multiple: int = 1
    parents: list[int] = field(default_factory=list[int])
    nodes: list[tuple[float, bool, list[int], list[int]]] = field(default_factory=list)
    """Each operator: its flops, whether it is of the forward pass, its dimensions kept and those summed up."""
    trips: dict[int, int] = field(default_factory=dict[int, int])
    """The dimension that a loop of the program runs over, by its node, where its iterations stand alone."""

    def enter(self, graph: Graph, times: float = 1.0, around: tuple[int, ...] | None = None) -> Numbered:
        """The numbers of the dimensions of a graph that runs so many times, all of it followed.

        It runs for every element along the dimensions of the loops `around` it; the program itself has None.
        """
        firsts = self._numbered([type.rank for type in graph.types])
        bodies: dict[int, tuple[Numbered, ...]] = {}
        for index, (node, rule) in enumerate(zip(graph.nodes, rules_of(graph), strict=True)):
            if (control := control_of(node, graph)) is not None:
                trips, bodies[index] = self._enter_control(graph, node, control, firsts, times, around or ())
                if trips and around is None:
                    self.trips[index] = trips[0]
            elif rule.alias:
                for before, after in zip(node.inputs, node.outputs, strict=True):
                    self._hang(firsts[before], graph.types[before].rank, firsts, PortUse(port=after))
            else:
                if around is None and self.multiple == 1:
                    self._join_batches(graph, node, rule, firsts)
                kept, summed = self._enter_operator(graph, node, rule, firsts)
                self.nodes.append((times * rule.flops, phase(node) == "forward", [*kept, *(around or ())], summed))
        return Numbered(firsts, bodies)

    def _enter_control(
        self, graph: Graph, node: Node, control: Control, firsts: Sequence[int], times: float, around: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[Numbered, ...]]:
        """(the dimension that a loop runs over, if its iterations stand alone; the numbers in all bodies).

        Dimensions of values on either side of a port are cut together.
        """
        ports = self._numbered([port.type.rank for port in control.ports])
        port_uses = (
            *zip(node.inputs, control.operands, strict=True),
            *zip(node.outputs, control.results, strict=True),
        )
        for value, port_use in port_uses:
            self._hang(firsts[value], graph.types[value].rank, ports, port_use)
        trips = self._trips(node, control, firsts)
        bodies: list[Numbered] = []
        for body in control.bodies:
            inside = self.enter(body.graph, times * body.trips * body.share, (*around, *trips))
            with_ports = (
                *zip(body.graph.inputs, body.inputs, strict=True),
                *zip(body.graph.outputs, body.outputs, strict=True),
            )
            for value, port in with_ports:
                self._hang(inside.firsts[value], body.graph.types[value].rank, ports, PortUse(port=port))
            bodies.append(inside)
        return trips, tuple(bodies)

    def _enter_operator(
        self, graph: Graph, node: Node, rule: ShardingRule, firsts: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """The dimensions that an operator keeps, and those that it sums up; operands' are cut with results'."""
        read, made = [firsts[v] for v in node.inputs], [firsts[v] for v in node.outputs]
        apart = list(split_for_loop(graph, node, rule)) if self.multiple == 1 else []
        for before, after in apart:
            self._join(read[0] + before, made[0] + after)
        kept, summed = self._follow(rule, read, made, {rule.operands[0][before] for before, _ in apart})
        if self.single and rule.single is not None:
            more = self._follow(rule.single, read, made, ())
            kept, summed = kept + more[0], summed + more[1]
        return kept, summed

    def _join_batches(self, graph: Graph, node: Node, rule: ShardingRule, firsts: Sequence[int]) -> None:
        """Joins rows of inputs with what a node makes of them and as many others, or some times as many: two views of a
        batch that go through one network at once, or labelled and unlabelled rows.
        """
        rows = [next(iter(graph.types[value].shape), 0) for value in node.inputs]
        are_put_together = len(rows) > 1 and {(operand, 0, 0) for operand in range(len(rows))} <= {*rule.moves}
        if not are_put_together or any(n % max(min(rows), 1) for n in rows):
            return
        heads = {self.root(firsts[value]) for value in graph.inputs if graph.types[value].rank}
        for value in node.inputs:
            if self.root(firsts[value]) in heads:
                self._join(firsts[value], firsts[node.outputs[0]])

    def _trips(self, node: Node, control: Control, firsts: Sequence[int]) -> tuple[int, ...]:
        """The dimension that a loop runs over, where its iterations stand alone: that of all its slices."""
        if not stands_alone(node):
            return ()
        sides = (
            *zip(node.inputs, control.operands, strict=True),
            *zip(node.outputs, control.results, strict=True),
        )
        first, *others = (firsts[value] for value, port_use in sides if port_use.stacked)
        for other in others:
            self._join(first, other)
        return (first,)

    def _numbered(self, ranks: Sequence[int]) -> list[int]:
        firsts: list[int] = []
        for rank in ranks:
            firsts.append(len(self.parents))
            self.parents.extend(range(len(self.parents), len(self.parents) + rank))
        return firsts

    def _hang(self, first: int, rank: int, ports: Sequence[int], port_use: PortUse) -> None:
        """Joins the dimensions of a value with those of the port that it hangs on."""
        for dim in range(int(port_use.stacked), rank):
            self._join(first + dim, ports[port_use.port] + dim - port_use.stacked)

    def _follow(
        self, rule: ShardingRule, read: Sequence[int], made: Sequence[int], apart: Collection[int]
    ) -> tuple[list[int], list[int]]:
        """(the dimensions that an operator keeps, those that it sums up), one of each factor, joined with the rest.

        Factors `apart` are split, and go on as another one.
        """
        by_factor: dict[int, int] = {}
        for firsts, sides in ((made, rule.results), (read, rule.operands)):
            for first, factors in zip(firsts, sides, strict=True):
                for dim, factor in enumerate(factors):
                    if factor >= 0 and factor not in apart and not rule.factors[factor].size % self.multiple:
                        self._join(first + dim, by_factor.setdefault(factor, first + dim))
        kept = {factor for factors in rule.results for factor in factors} - {-1}
        return [by_factor[f] for f in kept if f in by_factor], [by_factor[f] for f in by_factor if f not in kept]

    def _join(self, a: int, b: int) -> None:
        self.parents[self.root(a)] = self.root(b)

    def root(self, dim: int) -> int:
        """The dimension that stands for the class of this one."""
        while self.parents[dim] != dim:
            self.parents[dim] = self.parents[self.parents[dim]]
            dim = self.parents[dim]
        return dim

    def works(self) -> list[tuple[float, set[int], set[int]]]:
        """(the flops of each operator, of the forward pass if there is one, the classes that it keeps and sums up none
        of, those that it sums up).
        """
        return list(self._works(any(is_forward for _, is_forward, _, _ in self.nodes)))

    def _works(self, forward: bool) -> Iterator[tuple[float, set[int], set[int]]]:
        for flops, is_forward, kept, summed in self.nodes:
            if is_forward or not forward:
                gone = set(map(self.root, summed))
                yield flops, set(map(self.root, kept)) - gone, gone


def stands_alone(node: Node) -> bool:
    """Whether a node is a loop over slices whose iterations need nothing of each other: all that they carry are sums of
    what each of them adds, and what none of them changes.
    """
    if (scan := scan_of(node)) is None or len(node.inputs) == scan.fixed:
        return False
    (body,) = node.subgraphs
    ends = body.outputs[: scan.carries]
    carries = zip(body.inputs[scan.constants :], ends, strict=False)
    return all(begin == end or _is_summed(body, begin, end) for begin, end in carries)


def _is_summed(body: Graph, value: int, end: int) -> bool:
    """Whether nothing is done with a value that a body takes but to add to it what is returned at the `end`."""
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
    """(a dimension of a node's operand, that of its result which goes on) where the node splits the first off for a
    loop to run over: a batch in parts, whose gradients are added up by hand.
    """
    for reader in graph.consumers.get(node.outputs[0], ()) if rule.splits else ():
        control = control_of(graph.nodes[reader], graph)
        port_uses = zip(graph.nodes[reader].inputs, control.operands, strict=True) if control else ()
        if any(use.stacked for value, use in port_uses if value == node.outputs[0]):
            yield from rule.splits
