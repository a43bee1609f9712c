"""The inputs that are a step's batch: those whose leading dimension runs through the work of the forward pass.

Dimensions that operators cut together are one class. The batch's is the class along which most work is done and nothing
is summed: features are contracted by products, positions and masks have their dimension second in other arrays, and the
dimension of a key or of a vector of learning rates leads nowhere.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from passes.ir import Graph, Node, StatePairs, control_of, scan_of
from passes.layers.dims import DimClasses, Work, dim_classes, stands_alone
from passes.rules import remembered

OTHERWISE = "name the batch with batch_argnums= or batch_argnames="
"""The remedy of an error where another input than the batch was taken for it."""

ALMOST = 0.9
"""Classes with this share of the most work are equally likely to be the batch's; it is then the one that only leads."""

WORTH = 0.01
"""The share of the batch's work from which another class, apart from it, is a second batch: unlabelled rows beside
labelled ones, or as many rows of another tower, each of which is compared with every row of the first.

A class that is summed in more work of the batch than it does itself is none: those are features, such as the rows of
weights that are adapted or scaled before they are used, and not updated.
"""


def batch_inputs(graph: Graph, state_pairs: StatePairs = (), named: Sequence[bool] = ()) -> tuple[int, ...]:
    """The positions of the inputs that are the batch, along dimension 0; empty where no input can be.

    The user may have said so of each input (`named`). Otherwise, inputs that `state_pairs` name are state, unless the
    step returns all that it takes; then inputs that it returns unchanged may be the batch. An input that nothing reads
    is the batch only where no other can be. The result is cached on the graph.
    """
    if any(named):
        return tuple(i for i, is_batch in enumerate(named) if is_batch and has_rows(graph, i))
    return _looked_like(graph, tuple(state_pairs))


@remembered
def _looked_like(graph: Graph, state_pairs: StatePairs) -> tuple[int, ...]:
    """The inputs that look like the batch."""
    state = {i for _, i in state_pairs}
    unchanged = sorted(i for o, i in state_pairs if graph.outputs[o] == graph.inputs[i] and has_rows(graph, i))
    others = [i for i in range(len(graph.inputs)) if i not in state and has_rows(graph, i)]
    read = {i for i, value in enumerate(graph.inputs) if graph.consumers.get(value)}
    choices = ([i for i in others if i in read], [i for i in unchanged if i in read], others, unchanged)
    candidates = next((choice for choice in choices if choice), unchanged)
    if len(candidates) < 2:
        return tuple(candidates)
    rows = {i: graph.types[graph.inputs[i]].shape[0] for i in candidates}
    if set(rows.values()) > {1} and (one_row := _one_row(_Along.of(graph, candidates, single=True), rows)):
        return one_row
    along = _Along.of(graph, candidates, state=state)
    if not along.most:
        return tuple(candidates)
    heads = along.heads
    first = max(along.leading(), key=lambda i: (heads[i] not in along.stacked, heads[i] not in along.inner, i))
    batch = along.beside(first, rows)
    return tuple(i for i in candidates if along.heads[i] in batch)


def _one_row(along: _Along, rows: Mapping[int, int]) -> tuple[int, ...]:
    """The inputs that are a batch of a single row; empty if the batch has more rows. `rows` has the inputs that may be
    it.

    A row goes through all work, weights and positions through less of it, so more work decides between dimensions that
    only lead. A dimension that leads where the row's own is gone, as positions do, counts as the row's.
    """
    if not along.most:
        return ()
    heads, work = along.heads, along.work
    first = max(along.leading(), key=lambda i: (heads[i] not in along.inner, work[heads[i]], rows[i] > 1, i))
    alike = [i for i in rows if heads[i] == heads[first]]
    ours = [i for i in alike if rows[i] == 1]
    if not ours or (len(ours) < len(alike) and not any(heads[first] in along.dims[i][1:] for i in ours)):
        return ()
    single = {i: 1 for i in rows if rows[i] == 1}
    batch = along.beside(ours[0], single)
    return tuple(i for i in single if heads[i] in batch)


def rows_along(graph: Graph, batch: Mapping[int, int], values: Collection[int]) -> dict[int, int]:
    """The dimension of each value along which it has the rows that inputs have along that which `batch` names.

    Values without rows, or with rows along more than one dimension, are left out.
    """
    dims, numbering = dim_classes(graph)
    firsts = numbering.firsts
    heads = {dims.root(firsts[value] + dim) for value, dim in batch.items() if graph.types[value].rank}
    ranks = {value: graph.types[value].rank for value in values}
    along = {v: [d for d in range(rank) if dims.root(firsts[v] + d) in heads] for v, rank in ranks.items()}
    return {value: of_rows[0] for value, of_rows in along.items() if len(of_rows) == 1}


def loops_over_batch(
    graph: Graph, state_pairs: StatePairs = (), named: Sequence[bool] = (), parts: int = 1
) -> dict[int, tuple[bool, ...]]:
    """The nodes that are loops over rows of the batch, each row by itself (`jax.lax.map` and its gradient); with each,
    whether its carries go on unchanged.

    A loop over microbatches, of which each has rows for all of the `parts`, stays one after the other.
    """
    if not any(stands_alone(node) for node in graph.nodes):
        return {}
    dims, numbering = dim_classes(graph)
    firsts = numbering.firsts
    batch = {dims.root(firsts[graph.inputs[i]]) for i in batch_inputs(graph, state_pairs, named)}
    over_rows = (i for i, dim in dims.loop_dims.items() if dims.root(dim) in batch)
    return {
        i: _unchanged(graph.nodes[i]) for i in over_rows if not _is_over_microbatches(graph, i, dims, firsts, parts)
    }


def _unchanged(node: Node) -> tuple[bool, ...]:
    """Whether each carry of a loop over slices leaves an iteration as it came."""
    scan, (body,) = scan_of(node), node.subgraphs
    begins = body.inputs[scan.constants : scan.fixed] if scan else ()
    return tuple(begin == end for begin, end in zip(begins, body.outputs, strict=False))


def _is_over_microbatches(graph: Graph, index: int, dims: DimClasses, firsts: Sequence[int], parts: int) -> bool:
    """Whether a loop has a forward and a backward pass for each microbatch, and not for each row, as one that clips or
    adapts to the gradient of each has.

    Slices of one size are microbatches, unless there are `parts` of the loop's length and not of theirs, or products
    sum up along them: those are features.
    """
    node = graph.nodes[index]
    control, scan = control_of(node, graph), scan_of(node)
    if control is None or scan is None or not any(body.is_step for body in control.bodies):
        return False
    slices = [v for v in node.inputs[scan.fixed :] if graph.types[v].rank > 1]
    if not slices or scan.length % parts:
        return bool(slices)
    inner = {dims.root(firsts[v] + 1) for v in slices}
    kept = sum(flops for flops, kept, *_ in dims.works() if not inner.isdisjoint(kept))
    summed = sum(flops for flops, _, summed, _ in dims.works() if not inner.isdisjoint(summed))
    rows = {graph.types[v].shape[1] for v in slices}
    return len(rows) == 1 and not any(n % parts for n in rows) and summed < kept / 2


def has_rows(graph: Graph, position: int) -> bool:
    """Whether an input may be a part of a batch: it has a leading dimension with elements, and is not a single key."""
    value = graph.inputs[position]
    type, readers = graph.types[value], [graph.nodes[reader] for reader in graph.consumers.get(value, ())]
    made = (graph.types[v] for node in readers if not node.subgraphs for v in node.outputs)
    is_raw_key = type.rank == 1 and any(other.is_key and not other.rank for other in made)
    return bool(type.rank and type.size) and not type.is_key and not is_raw_key


def taken_for(graph: Graph, positions: Sequence[int]) -> str:
    """The inputs that were taken for the batch, with their types, as text for an error; the first few of many."""
    names = dict(enumerate(graph.input_names))
    words = [f"{names.get(i) or f'input {i}'} {graph.types[graph.inputs[i]]}" for i in positions]
    return f"taken for the batch: {', '.join(words[:3])}" + (f" and {len(words) - 3} more" if len(words) > 3 else "")


@dataclass(frozen=True, kw_only=True)
class _Along:
    """The work along the leading dimension of each input that may be the batch.

    `dims` are the classes of its dimensions, by position; `inner` those that some input has in another place than the
    first, and `stacked` those that lead in most of the state, as several models side by side do; `works` is the work of
    each operator.
    """

    dims: Mapping[int, Sequence[int]]
    inner: frozenset[int]
    stacked: frozenset[int]
    works: Sequence[Work]

    @classmethod
    def of(
        cls, graph: Graph, candidates: Sequence[int], *, state: Collection[int] = (), single: bool = False
    ) -> _Along:
        """The classes of the dimensions of the inputs at these positions; those of a `single` element only if asked
        for.
        """
        dims, numbering = dim_classes(graph, single)
        firsts = numbering.firsts
        classes = {v: [dims.root(firsts[v] + d) for d in range(graph.types[v].rank)] for v in graph.inputs}
        kept = (graph.inputs[i] for i in state)
        leading = Counter(classes[v][0] for v in kept if classes[v] and graph.consumers.get(v))
        return cls(
            dims={i: classes[graph.inputs[i]] for i in candidates},
            inner=frozenset(itertools.chain.from_iterable(each[1:] for each in classes.values())),
            stacked=frozenset(head for head, count in leading.items() if 2 * count > leading.total()),
            works=dims.works(),
        )

    @cached_property
    def heads(self) -> Mapping[int, int]:
        """The class of the leading dimension of each input, by position."""
        return {i: dims[0] for i, dims in self.dims.items()}

    @cached_property
    def work(self) -> Mapping[int, float]:
        """Class of a leading dimension -> the flops of the operators that keep it."""
        return {head: sum(flops for flops, kept, *_ in self.works if head in kept) for head in set(self.heads.values())}

    @property
    def most(self) -> float:
        return max(self.work.values())

    def leading(self) -> list[int]:
        """The inputs along whose leading dimension about most work is done."""
        return [i for i, head in self.heads.items() if self.work[head] >= ALMOST * self.most]

    def beside(self, first: int, rows: Mapping[int, int]) -> set[int]:
        """The classes of the batch that this input is a part of: its own, and those of a second batch.

        `rows` has the number of rows of each input that may be in it.
        """
        heads, batch, extents = self.heads, {self.heads[first]}, {rows[first]}
        of_batch = [(flops, kept, summed) for flops, kept, summed, _ in self.works if heads[first] in kept]
        for i in sorted(rows, key=lambda i: self.work[heads[i]], reverse=True):
            head_work = self.work[heads[i]]
            shared = sum(flops for flops, kept, _ in of_batch if heads[i] in kept)
            within = sum(flops for flops, _, summed in of_batch if heads[i] in summed)  # as features are
            is_alike = rows[i] in extents
            is_apart = shared < head_work / 2 and (head_work >= WORTH * self.most or (head_work and is_alike))
            is_paired = is_alike and heads[i] not in self.inner and head_work - shared >= WORTH * self.most
            if (is_apart or is_paired) and within <= head_work:
                batch.add(heads[i])
                extents.add(rows[i])
        return batch
