"""An operator group: operators that are placed together, and the classes of their dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from passes.ir import Graph, Phase
from passes.rules import ShardingRule


@dataclass(slots=True, kw_only=True)
class OperatorGroup:
    """An operator group: its members in order, the graph inputs that it absorbs, and the class of every factor and
    value dimension.

    Classes are kept as their representatives: classes that become one are renamed wherever they stand. `value_classes`
    covers values that members read from elsewhere too: two readers of one value agree on its dimensions, on whichever
    side of a barrier they stand. A `rooted` operator group transforms graph inputs only. One that `adds` only adds up
    what heavy operators make, and what reads the sum is another: so summands may be added first and reduced once,
    before the rest cuts the sum. `outside` has a class of ours for classes of other groups, by their numbers: what
    stands for one dimension there does so here, on both sides of a reduction; so is `repeated`, of what gradients of
    one row of classes are repeated along. Built up by `group` and not changed afterwards.
    """

    phase: Phase
    light: bool
    rooted: bool = True
    adds: bool = False
    members: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    factor_classes: dict[int, list[int]] = field(default_factory=dict)
    value_classes: dict[int, list[int]] = field(default_factory=dict)
    outside: dict[tuple[int, int], int] = field(default_factory=dict)
    origins: dict[int, tuple[int, int] | None] = field(default_factory=dict)

    def find(self, cls: int) -> int:
        """The class that stands for this one now."""
        while cls >= 0 and self.parents[cls] != cls:
            cls = self.parents[cls]
        return cls

    def new_class(self) -> int:
        self.parents.append(len(self.parents))
        return len(self.parents) - 1

    def unite(self, a: int, b: int) -> bool:
        """Whether two classes are one afterwards; not if some value or operator has both."""
        a, b = self.find(a), self.find(b)
        if a == b:
            return True
        lower, higher = min(a, b), max(a, b)
        renamed: list[list[int]] = []
        for rows in (self.value_classes, self.factor_classes):
            for row in rows.values():
                if higher in row:
                    if lower in row:
                        return False
                    renamed.append(row)
        self.parents[higher] = lower
        if higher in self.origins:
            self.origins.setdefault(lower, self.origins[higher])
        for row in renamed:
            row[:] = [lower if cls == higher else cls for cls in row]
        return True

    def meet(self, ours: int, source: OperatorGroup, theirs: tuple[int, int], *, leads: bool) -> None:
        """Makes one class of a class of ours and those that came from where it does: a class of the `source`, by
        number, or, if it `leads` a value there, the first that it has been.
        """
        begin = source.origins.get(theirs[1], theirs if leads else None)
        self.origins.setdefault(ours, begin)
        for origin in (theirs, begin or theirs) if self.light else ():
            self.unite(self.outside.setdefault(origin, ours), ours)

    def agrees(self, reads: Sequence[int], rule: ShardingRule) -> bool:
        """Whether no two operands of a node, that have a dimension in common, have it on two dimensions of one value.

        As the gradient of what rows are compared with, and that of the rows themselves: sums over either side of pairs.
        """
        classes: dict[int, int] = {}
        for value, factors in zip(reads, rule.operands, strict=True):
            for cls, factor in zip(self.value_classes.get(value, ()), factors, strict=False):
                other = classes.setdefault(factor, cls) if cls >= 0 and factor >= 0 else cls
                if other != cls and any({other, cls} <= {*row} for row in self.value_classes.values()):
                    return False
        return True

    @property
    def classes(self) -> list[int]:
        """The distinct classes, in order of appearance."""
        return list(dict.fromkeys(cls for classes in self.factor_classes.values() for cls in classes if cls >= 0))

    def join(self, index: int, graph: Graph, rule: ShardingRule, roots: Mapping[int, int]) -> None:
        """Adds a node; its dimensions take the classes of the operands that the operator group already has.

        `roots` maps values behind a barrier to those before it: both are one array, and have one set of classes.
        """
        node = graph.nodes[index]
        reads = [roots.get(value, value) for value in node.inputs]
        self.factor_classes[index] = classes = [-1] * len(rule.factors)
        agreed: tuple[list[int], tuple[int, ...]] | None = None
        for value, factors in zip(reads, rule.operands, strict=True):
            row = self.value_classes.get(value)
            if not row or (agreed and agreed == (row, factors)):
                continue  # nothing to agree on, or all of it is agreed on already
            agreed = row, factors
            for held_class, factor in zip(row, factors, strict=False):
                if held_class < 0 or factor < 0 or held_class in classes:
                    continue  # nothing to agree on, or another factor has it already
                if classes[factor] < 0:
                    classes[factor] = held_class
                else:
                    self.unite(classes[factor], held_class)
        if -1 in classes:
            for factor, properties in enumerate(rule.factors):
                if properties.size and classes[factor] < 0:
                    classes[factor] = self.new_class()
        self.members.append(index)
        for values, dims in ((reads, rule.operands), (node.outputs, rule.results)):
            for value, factors in zip(values, dims, strict=True):
                if value not in self.value_classes and value not in graph.literals:
                    self.value_classes[value] = [classes[f] if f >= 0 else -1 for f in factors] if factors else []


def reduce_apart(source: OperatorGroup, target: OperatorGroup, rules: Sequence[ShardingRule]) -> bool:
    """Whether two groups without a value in common both reduce a dimension.

    As one group, two sums over the batch that a loop adds to one carry would have it on two classes.
    """
    if not source.value_classes.keys().isdisjoint(target.value_classes):
        return False
    groups = source, target
    return all(any(f.size and f.reduction for m in group.members for f in rules[m].factors) for group in groups)


def has_other_rows(
    values: Sequence[int], host: OperatorGroup, home: Mapping[int, int], groups: Sequence[OperatorGroup]
) -> bool:
    """Whether a group, the host, repeats one of these values along its first dimension, and others of them, which have
    a `home` in other groups, have rows of another batch than those that the host makes it of.

    As where the gradient of a bias by one batch goes on to another batch: in one group, two batches would lie on two
    classes, of which an axis may have one.
    """
    rows = (host.value_classes.get(value, ()) for value in values)
    if not any(row and row[0] >= 0 and host.find(row[0]) not in host.origins for row in rows):
        return False
    begins = {begin for begin in host.origins.values() if begin}
    elsewhere = [(value, home[value]) for value in values if value in home and groups[home[value]] is not host]
    others = {_begin(value, number, groups[number]) for value, number in elsewhere} - {None}
    return bool(begins and others) and begins.isdisjoint(others)


def _begin(value: int, number: int, source: OperatorGroup) -> tuple[int, int] | None:
    """The class that a value's rows come from, with the number of its group; None for a value without rows."""
    first = source.find(next(iter(source.value_classes.get(value, ())), -1))
    return (source.origins.get(first) or (number, first)) if first >= 0 else None
