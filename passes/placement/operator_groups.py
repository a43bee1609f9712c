"""Groups of operators that are placed together: each heavy operator alone, light operators with the value that they
follow.

XLA fuses elementwise operators, reductions and reshapes into their neighbours, and a plan that reshards between them
gains nothing, so one choice covers them all. Inside an operator group, dimensions that the members' rules identify form
one *class*; a strategy gives every mesh axis one class, or none, or lets the group's values stay partial over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.gc_pause import without_gc
from passes.ir import Control, Graph, Node, Phase, control_of, phase
from passes.placement.operator_group import OperatorGroup, has_other_rows, reduce_apart
from passes.placement.reshardings import is_free
from passes.rules import ShardingRule, remembered, replicate, rules_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """The operator groups of a graph; `home[v]` is the group that writes or absorbs value v, and `roots` sees through
    aliases.

    `rules` are the nodes' sharding rules; the graph may be `inside` a loop or branch. `loose` are graph inputs that
    several operators read, whose placements are nodes of their own. `controls` are the loops and branches by node,
    which belong to no group, and `bodies` the groupings of their bodies.
    """

    operator_groups: tuple[OperatorGroup, ...]
    home: dict[int, int]
    roots: dict[int, int]
    rules: tuple[ShardingRule, ...]
    free: frozenset[int]
    loose: tuple[int, ...]
    controls: Mapping[int, Control]
    bodies: Mapping[int, tuple[Grouping, ...]]
    inside: bool = False

    def operator_group_of(self, node: Node) -> int | None:
        """The operator group that writes the results of a node; None if no group does."""
        return self.home.get(node.outputs[0]) if node.outputs else None


class _Grouper:
    def __init__(
        self, graph: Graph, rules: Sequence[ShardingRule], controls: Mapping[int, Control], inside: bool
    ) -> None:
        self.graph, self.inside = graph, inside
        self.rules, self.controls = rules, controls
        self.operator_groups: list[OperatorGroup] = []
        self.home: dict[int, int] = {}
        self.roots: dict[int, int] = {}
        self.free: set[int] = set()
        self.followers: dict[tuple[int, Phase, bool], int] = {}
        # What arrives where the user has it may be brought elsewhere before it is read, as by an operator that takes
        # a dimension whole.
        placed_by_user = {graph.inputs[position] for position in graph.pinned}
        free = (v for v in graph.inputs if v not in graph.returned and v not in placed_by_user)
        once = (v for v in free if len(graph.consumers.get(v, ())) == 1)
        self.single = {v for v in once if not inside and graph.consumers[v][0] not in controls}
        self.sizes = {id(type): type.size for type in {id(type): type for type in graph.types}.values()}
        self.scalar: dict[int, bool] = {}

    def run(self) -> Grouping:
        for index, node in enumerate(self.graph.nodes):
            if is_free(self.graph, index):
                self.free.update(node.outputs)
            elif self.rules[index].alias:
                for value, result in zip(node.inputs, node.outputs, strict=True):
                    self.roots[result] = self.roots.get(value, value)
            elif index not in self.controls:
                self._place(index)
        operator_groups = [operator_group for operator_group in self.operator_groups if operator_group.members]
        renumbered = {id(operator_group): i for i, operator_group in enumerate(operator_groups)}
        operator_group_of_value = {value: renumbered[id(self.operator_groups[b])] for value, b in self.home.items()}
        return Grouping(
            operator_groups=tuple(operator_groups),
            home=operator_group_of_value,
            roots=self.roots,
            rules=tuple(self.rules),
            free=frozenset(self.free),
            loose=tuple(value for value in self.graph.inputs if value not in operator_group_of_value),
            controls=self.controls,
            bodies={i: tuple(group(b.graph, inside=True) for b in c.bodies) for i, c in self.controls.items()},
            inside=self.inside,
        )

    def _place(self, index: int) -> None:
        node, rule, operator_group_of_value = self.graph.nodes[index], self.rules[index], self.home
        when = phase(node)
        host = self._host(index, when) if rule.light else None
        if host is None:
            self.operator_groups.append(OperatorGroup(phase=when, light=rule.light))
            host = len(self.operator_groups) - 1
        operator_group = self.operator_groups[host]
        for value in node.inputs if rule.light else ():
            other_group = operator_group_of_value.get(value, host)
            if other_group != host and self.operator_groups[other_group].rooted:
                self._absorb(host, other_group, index)
        operator_group.join(index, self.graph, rule, self.roots)
        self._agree(operator_group, host, node)
        # What a heavy operator alone reads, as a half-precision copy of a weight, may lie otherwise than it is read.
        for value in node.inputs if rule.light else ():
            if value in self.single and value not in operator_group_of_value:
                operator_group.inputs.append(value)
                operator_group_of_value[value] = host
        if operator_group.rooted:
            makers = [(v, self.graph.producers[v]) for v in node.inputs if v in self.graph.producers]
            operator_group.rooted = all(
                operator_group_of_value.get(v, host) == host and maker not in self.controls for v, maker in makers
            )
        for value in node.outputs:
            operator_group_of_value[value] = host

    def _agree(self, operator_group: OperatorGroup, host: int, node: Node) -> None:
        """Makes one class of those that stand for dimensions of one class in the operator group that they come from,
        or, for rows, in the first one of all, through whichever others.

        A gradient that is summed over the batch, and broadcast again to be multiplied with another value of the batch,
        would otherwise have the batch on two classes, of which an axis may have one.
        """
        for read in node.inputs:
            value = self.roots.get(read, read)
            number = self.home.get(value, host)
            if number == host or value not in operator_group.value_classes:
                continue
            source = self.operator_groups[number]
            rows = source.value_classes.get(value, ()), operator_group.value_classes[value]
            for d, (theirs, ours) in enumerate(zip(*rows, strict=False)):
                if theirs >= 0 and ours >= 0:
                    operator_group.meet(ours, source, (number, source.find(theirs)), leads=d == 0)

    def _host(self, index: int, when: Phase) -> int | None:
        """The operator group that a light node joins: that of its largest operand in its own phase; of equals the
        latest.

        A mask that is repeated does not count: the scores of several layers would follow the same one.
        """
        graph, node = self.graph, self.graph.nodes[index]
        producers, literals, roots = graph.producers, graph.literals, self.roots
        operands = [roots.get(v, v) for v in node.inputs if v not in literals and v not in self.free]
        computed = [value for value in operands if value in producers]
        scalar = self._is_scalar(index)
        if len(computed) > 1:
            computed = sorted(computed, key=self._rank, reverse=True) if scalar else [max(computed, key=self._rank)]
        adds = not scalar and self._adds(index, operands, when)
        for value in computed:
            spread = not graph.types[value].rank  # over arrays that have no dimension in common
            made_by = self.home.get(value)
            operator_group = self.operator_groups[made_by] if made_by is not None else None
            joins = (
                operator_group and operator_group.light and operator_group.phase == when and operator_group.adds == adds
            ) and operator_group.agrees([roots.get(v, v) for v in node.inputs], self.rules[index])
            if operator_group and joins and not self._is_fetched_cast(value, operator_group, index):
                if (scalar or spread) and any(operator_group.value_classes.values()):
                    continue
                has_others = has_other_rows(operands, operator_group, self.home, self.operator_groups)
                return None if has_others or _is_of_others(value, operands, operator_group, graph) else made_by
            if not scalar:
                key = (value, when, adds)
                if spread or key not in self.followers:
                    self.operator_groups.append(OperatorGroup(phase=when, light=True, adds=adds))
                    self.followers[key] = len(self.operator_groups) - 1
                return self.followers[key]
        return None

    def _is_fetched_cast(self, value: int, operator_group: OperatorGroup, index: int) -> bool:
        """Whether a value is a cast of an input that a heavy operator of its phase reads uncast, and a node is no cast.

        What is cut before the cast is then fetched after it, for both: a transpose follows the copy, not the cast.
        """
        nodes, maker = self.graph.nodes, self.graph.producers[value]
        if not operator_group.rooted or not self.rules[maker].casts or self.rules[index].casts:
            return False
        readers = self.graph.consumers[value]
        return any(not self.rules[r].light and phase(nodes[r]) == operator_group.phase for r in readers)

    def _adds(self, index: int, operands: Sequence[int], when: Phase) -> bool:
        """Whether a node adds results of heavy operators of its own phase, or sums of those."""
        if not self.rules[index].adds:
            return False
        numbers = [self.home.get(self._as_made(value)) for value in operands]
        sources = [self.operator_groups[number] if number is not None else None for number in numbers]
        return all(source and source.phase == when and (source.adds or not source.light) for source in sources)

    def _as_made(self, value: int) -> int:
        """The value before its dimensions were permuted, as those of the gradient of a transposed weight are."""
        while (maker := self.graph.producers.get(value)) is not None and self.rules[maker].permutes:
            (read,) = self.graph.nodes[maker].inputs
            value = self.roots.get(read, read)
        return value

    def _rank(self, value: int) -> tuple[int, bool, bool, int]:
        number, maker = self.home.get(value), self.graph.producers[value]
        rooted = number is not None and self.operator_groups[number].rooted
        type, repeats = self.graph.types[value], self.rules[maker].repeats
        is_mask = type.dtype == "bool" and any(map(repeats, range(type.rank)))
        return self.sizes[id(type)], not rooted, not is_mask, maker

    def _is_scalar(self, index: int) -> bool:
        """Whether a node reads and writes scalars alone; computed once for all nodes that share a rule."""
        is_scalar = self.scalar.get(id(self.rules[index]))
        if is_scalar is None:
            node = self.graph.nodes[index]
            is_scalar = all(self.graph.types[v].rank == 0 for v in (*node.inputs, *node.outputs))
            self.scalar[id(self.rules[index])] = is_scalar
        return is_scalar

    def _absorb(self, host: int, guest: int, index: int) -> None:
        """Moves an operator group that only transforms inputs for this node (a moment scaled by its decay) into the
        host.
        """
        source, target = self.operator_groups[guest], self.operator_groups[host]
        if not (source.light and source.rooted and source.members and source.phase == target.phase):
            return
        graph = self.graph
        inside = {*source.members, *target.members, index}
        written = [value for member in source.members for value in graph.nodes[member].outputs]
        if any(v in graph.returned or not inside.issuperset(graph.consumers.get(v, ())) for v in written):
            return
        has_dims = any(source.value_classes.values())
        are_alike = has_dims == any(target.value_classes.values()) and not reduce_apart(source, target, self.rules)
        if (target.members and not are_alike) or (has_dims and self._is_scalar(index)):
            return  # sums of several arrays, as penalties on weights are, would place those as one
        offset = len(target.parents)
        target.parents.extend(parent + offset for parent in source.parents)

        def moved(classes: list[int]) -> list[int]:
            return [target.find(cls + offset) if cls >= 0 else -1 for cls in classes]

        target.factor_classes |= {member: moved(classes) for member, classes in source.factor_classes.items()}
        for value, classes in source.value_classes.items():
            known = target.value_classes.get(value)
            if known is None:
                target.value_classes[value] = moved(classes)
                continue
            for theirs, ours in zip(classes, known, strict=True):
                if theirs >= 0 and ours >= 0:
                    target.unite(theirs + offset, ours)
        target.members.extend(source.members)
        target.inputs.extend(source.inputs)
        self.home.update(dict.fromkeys((*written, *source.inputs), host))
        self.operator_groups[guest] = OperatorGroup(phase=source.phase, light=True)


def _is_of_others(value: int, operands: Sequence[int], operator_group: OperatorGroup, graph: Graph) -> bool:
    """Whether a value, read beside a larger graph input, was read beside other larger values in its own group.

    Such is a scale that two batches share: what is made of each is placed as its own rows are.
    """
    size, sizes = graph.types[value].size, {v: graph.types[v].size for v in operands if v not in graph.producers}
    known = operator_group.value_classes
    is_with_new = any(other > size and v not in known for v, other in sizes.items())
    return is_with_new and any(graph.types[v].size > size for v in known)


@remembered
@without_gc()
def group(graph: Graph, *, inside: bool = False) -> Grouping:
    """The operator groups of a graph, in order of their first member, cached on the graph.

    Light operators join the group of their largest, latest operand. `inside` a loop or branch no group absorbs an
    input.
    """
    rules = rules_of(graph)
    controls = {i: control for i, node in enumerate(graph.nodes) if (control := control_of(node, graph))}
    placed = list(rules)
    for index in controls:
        node = graph.nodes[index]
        reads, writes = (tuple([graph.types[v] for v in values]) for values in (node.inputs, node.outputs))
        placed[index] = replicate(reads, writes, reason="")
    return _Grouper(graph, placed, controls, inside).run()
