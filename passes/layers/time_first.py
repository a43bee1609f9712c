"""Batches whose rows lie along the second dimension of inputs, behind time.

A loop runs over the first one, an iteration after the other, or each of its positions attends to all others: only the
second can be cut without sending activations.
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.ir import Graph, Node, control_of, scan_of
from passes.layers.batch import ALMOST
from passes.layers.dims import DimClasses, Numbering, Work, dim_classes, stands_alone
from passes.rules import remembered, rules_of

_BOTH = 2
"""Dimensions of an input of which one has the rows: time and these, or these alone."""


@remembered
def row_dims(graph: Graph, batch: tuple[int, ...], others: tuple[int, ...] = ()) -> dict[int, int]:
    """The dimension along which inputs have the batch's rows, by position; empty where that is everyone's first.

    Of the `batch`, that is an input's second dimension where loops run over the first, each iteration after the one
    before, and no less work is done along the second; or where positions along the first alone attend to each other.
    `others` may have the same rows without time, as lengths do.
    """
    dims, numbering = dim_classes(graph)
    values = {i: graph.inputs[i] for i in (*batch, *others)}
    classes = {
        i: [dims.root(numbering.firsts[v] + d) for d in range(min(graph.types[v].rank, _BOTH))]
        for i, v in values.items()
    }
    over = _run_over(graph, dims, numbering) if _has_ordered_loop(graph) else set[int]()
    works = dims.works()
    attended = {each[0] for each in classes.values() if len(each) == _BOTH and _attends(works, *each)}
    heads = {classes[i][0] for i in batch if classes[i]} - attended
    behind = {i: each[1] for i, each in classes.items() if len(each) == _BOTH and each[0] in over | attended}
    choices = {c for i, c in behind.items() if i in batch or c in heads}
    if not choices:
        return {}
    along = {c: sum(work.flops for work in works if c in work.kept) for c in choices | heads}
    rows = max(sorted(choices), key=along.__getitem__)
    is_summed = sum(work.flops for work in works if rows in work.summed) > along[rows] / 2  # as features are
    is_less = not along[rows] or along[rows] < ALMOST * max(map(along.__getitem__, heads), default=0)
    if is_summed or (rows not in heads and is_less):
        return {}
    return {i: each.index(rows) for i, each in classes.items() if rows in each}


def _attends(works: Sequence[Work], first: int, second: int) -> bool:
    """Whether positions along the first of two classes of dimensions attend to each other, each row along the second
    by itself, and most of the work along the second is done along the first too.
    """
    mixes = any(first in work.mixed and second in work.kept for work in works)
    if not mixes or any(second in work.mixed for work in works):
        return False
    along = sum(work.flops for work in works if second in work.kept)
    both = sum(work.flops for work in works if second in work.kept and first in (*work.kept, *work.mixed))
    return both > along / 2


def _run_over(graph: Graph, dims: DimClasses, numbering: Numbering) -> set[int]:
    """The classes of dimensions that loops run over in order, and of those that these are slices or shifts of."""
    over, firsts = set[int](), numbering.firsts
    for index in reversed(range(len(graph.nodes))):
        node, rule, control = graph.nodes[index], rules_of(graph)[index], control_of(graph.nodes[index], graph)
        if control is not None and _is_ordered(node):
            stacked = (v for v, use in zip(node.inputs, control.operands, strict=True) if use.stacked)
            over |= {dims.root(firsts[v]) for v in stacked}
        if control is not None:
            for body, inside in zip(control.bodies, numbering.bodies[index], strict=True):
                over |= _run_over(body.graph, dims, inside)
        for operand, before, after in rule.moves:
            if any(dims.root(firsts[made] + after) in over for made in node.outputs):
                over.add(dims.root(firsts[node.inputs[operand]] + before))
    return over


def _has_ordered_loop(graph: Graph) -> bool:
    """Whether some loop of a program goes over slices one after the other."""
    return any(_is_ordered(node) or any(map(_has_ordered_loop, node.subgraphs)) for node in graph.nodes)


def _is_ordered(node: Node) -> bool:
    return scan_of(node) is not None and not stands_alone(node)
