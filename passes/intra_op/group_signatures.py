"""The signatures of operator groups: their structure without value numbers, by which equal groups share a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.intra_op.group_walks import Where
from passes.intra_op.sums_in_products import factors_of_sums, summed_operand
from passes.ir import Graph
from passes.placement import Background, Grouping, OperatorGroup
from passes.sharding import Behind

MOST_CLASSES = 12
"""The most classes of one operator group that an axis may cut: with two axes there are twice their square of choices.
Steps of 88 kinds have up to 7. A scan by halving (`lax.associative_scan`) has some for each half, 47 at 256 elements,
and planning took a minute for the halves of halves.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSignature:
    """The structure of an operator group without value numbers: groups of equal signatures have equal tables.

    `operators` are numbers of one tabulator. `operands` holds the place of each operand of each member: (`in`, k) for
    the k-th value of the group, (`out`, k) for the k-th value read from outside, None for literals and free values.
    `options` are the classes that an axis may cut, `classes` those of the members' factors. Readers make `unread`
    (member, operand) pairs and `unwritten` values anew. `summed` may come in partial, `factors` in place of a member's
    first operand. It may be `inside` a loop. `behind` is the computing that hides values (by place) which members take
    whole and nothing else waits for, such as the gradient of a norm's scale that is rounded to bfloat16.
    """

    operators: tuple[int, ...]
    operands: tuple[tuple[Where | None, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    visible: tuple[int, ...]
    absorbed: tuple[int, ...]
    classes: tuple[tuple[int, ...], ...]
    options: tuple[int, ...]
    light: bool
    summed: int | None = None
    factors: frozenset[tuple[int, int]] = frozenset()
    unread: frozenset[tuple[int, int]] = frozenset()
    unwritten: frozenset[int] = frozenset()
    inside: bool = False
    behind: tuple[tuple[int, Behind], ...] = ()


def signature_of(
    operator_group: OperatorGroup,
    graph: Graph,
    grouping: Grouping,
    visible: frozenset[int],
    operators: Sequence[int],
    remade: frozenset[int] = frozenset(),
    background: Background | None = None,
) -> tuple[GroupSignature, list[int], list[int]]:
    """(signature, values inside, values read) of an operator group; positions in the signature index these lists.

    Values `remade` are made anew by their readers. The `background` knows what is hidden behind computing.
    """
    members = sorted(operator_group.members)
    nodes = [graph.nodes[member] for member in members]
    inside = {value: k for k, value in enumerate(dict.fromkeys(operator_group.inputs))}
    for node in nodes:
        for value in node.outputs:
            inside.setdefault(value, len(inside))
    read: dict[int, int] = {}

    def where(value: int) -> Where | None:
        if value in inside:
            return "in", inside[value]
        if value in graph.literals or value in grouping.free:
            return None
        return "out", read.setdefault(value, len(read))

    signature = GroupSignature(
        operators=tuple([operators[member] for member in members]),
        operands=tuple([tuple([where(value) for value in node.inputs]) for node in nodes]),
        makes=tuple([tuple([inside[value] for value in node.outputs]) for node in nodes]),
        visible=tuple([k for value, k in inside.items() if value in visible]),
        absorbed=tuple([inside[value] for value in operator_group.inputs]),
        classes=tuple(
            [tuple([operator_group.find(cls) for cls in operator_group.factor_classes[member]]) for member in members]
        ),
        options=_largest(operator_group, graph, grouping),
        light=operator_group.light,
        summed=summed_operand(graph, grouping, members[0]),
        factors=factors_of_sums(graph, grouping, members),
        unread=frozenset([(m, o) for m, node in enumerate(nodes) for o, v in enumerate(node.inputs) if v in remade]),
        unwritten=frozenset([k for value, k in inside.items() if value in remade]),
        inside=grouping.inside,
        behind=_behind(members, graph, grouping, inside, background) if background else (),
    )
    return signature, list(inside), list(read)


def _largest(operator_group: OperatorGroup, graph: Graph, grouping: Grouping) -> tuple[int, ...]:
    """The classes that axes may cut, in order of appearance; at most `MOST_CLASSES` and those of inputs and
    constraints.
    """
    classes = operator_group.classes
    if len(classes) <= MOST_CLASSES:
        return tuple(classes)
    sizes = Counter[int]()
    kept = {operator_group.find(cls) for value in operator_group.inputs for cls in operator_group.value_classes[value]}
    for member in operator_group.members:
        ours = {operator_group.find(cls) for cls in operator_group.factor_classes[member]}
        elements = sum(graph.types[value].size for value in graph.nodes[member].outputs)
        sizes.update(dict.fromkeys(ours, elements))
        if grouping.rules[member].is_bound:
            kept |= ours
    kept.update(sorted(classes, key=lambda cls: -sizes[cls])[:MOST_CLASSES])
    return tuple([cls for cls in classes if cls in kept])


def _behind(
    members: Sequence[int], graph: Graph, grouping: Grouping, inside: Mapping[int, int], background: Background
) -> tuple[tuple[int, Behind], ...]:
    """The computing that hides each value, by its place in the group, which a member takes whole, as none takes sums
    of it.
    """
    places = dict[int, Behind]()
    for member in members:
        rule = grouping.rules[member]
        for operand, value in enumerate(graph.nodes[member].inputs):
            takes_sums = any(operand in factor.partial for factor in rule.factors)
            if value in inside and not takes_sums and (behind := background.behind(value)) is not None:
                places[inside[value]] = behind
    return tuple(places.items())
