"""The stage of every node of a step's loop: forward operators are cut where the layers are, and the others follow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from passes.ir import Graph, Node
from passes.layers import forward
from passes.rules import rules_of
from passes.transforms.late_summands import summed


@dataclass(slots=True, kw_only=True)
class StageAssignment:
    """The stages of a loop's body that begin at nodes `firsts`: `stage` of its nodes, `made` of the values that they
    make.

    Nodes that are made `anywhere` have none; `late` ones run after the backward pass has begun.
    """

    body: Graph
    firsts: tuple[int, ...]
    late: set[int]
    anywhere: frozenset[int]
    stage: dict[int, int] = field(default_factory=dict[int, int])
    made: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        places: dict[str, set[int]] = {}
        for index, node in enumerate(self.body.nodes):
            if index in self.anywhere:
                continue
            if forward.adds_up(node):
                at = max((self.made[v] for v in node.inputs if v in self.made), default=0)
            elif index not in self.late:
                at = max(bisect_right(self.firsts, index) - 1, 0)
                places.setdefault(node.scope, set()).add(at)
            else:
                at = self._backward_stage(node, places)
            self.stage[index] = at
            self.made.update(dict.fromkeys(node.outputs, at))
        added_up: set[int] = set()  # nodes that add up summands of sums over microbatches, which each stage does itself
        for index in sorted(self.late & self.stage.keys(), reverse=True):
            node = self.body.nodes[index]
            readers = {reader for value in node.outputs for reader in self.body.consumers.get(value, ())}
            if forward.adds_up(node) or (readers and readers <= added_up):
                if forward.adds_up(node) or summed(self.body, node, self.made):
                    added_up.add(index)
                continue
            at = self._reading_stage(index, readers)
            self.stage[index] = at
            self.made.update(dict.fromkeys(node.outputs, at))

    def _reading_stage(self, index: int, readers: Collection[int]) -> int:
        """The stage before, if it alone reads what a light backward operator makes, and is sent less to make it itself.

        As a cotangent in half, beside the whole one that it is sent for a residual stream, or in a wider type.
        """
        body, node, at = self.body, self.body.nodes[index], self.stage[index]
        stages = {self.stage[reader] for reader in readers if reader in self.stage}
        is_returned = not body.returned.isdisjoint(node.outputs)
        if is_returned or len(stages) != 1 or not rules_of(body)[index].light:
            return at
        (before,) = stages
        sent = [v for v in node.inputs if v in self.made and not self._is_at_hand(v, before, index)]
        if before >= at or any(body.producers.get(v) not in self.late for v in sent):
            return at
        spared = sum(body.types[v].nbytes for v in node.outputs)
        return before if sum(body.types[v].nbytes for v in sent) < spared else at

    def _is_at_hand(self, value: int, at: int, index: int) -> bool:
        """Whether a stage has a value without the node `index`: it makes it, or another of its operators reads it."""
        return self.made[value] == at or any(
            self.stage.get(reader) == at for reader in self.body.consumers[value] if reader != index
        )

    def _backward_stage(self, node: Node, places: Mapping[str, set[int]]) -> int:
        """The stage of its forward operator, if all operands exist there by then; else that of the saved values."""
        producers = self.body.producers
        backward = [self.made[v] for v in node.inputs if v in self.made and producers[v] in self.late]
        latest = min(backward, default=len(self.firsts) - 1)
        same_scope = places.get(forward.forward_scope(node.scope), set[int]())
        if len(same_scope) == 1 and (only := next(iter(same_scope))) <= latest:
            return only
        saved = {v: at for v in node.inputs if (at := self._at_hand(v, latest, node)) is not None}
        return saved[max(saved, key=lambda v: self.body.types[v].nbytes)] if saved else latest

    def _at_hand(self, value: int, latest: int, reader: Node) -> int | None:
        """The last stage up to `latest` that made or read a value of the forward pass, a weight or the batch.

        If an operator of which `reader` may be the transpose reads it, that is its stage: the gradient of a weight is
        where the weight is read, even if the other factor is handed on, as the residual stream is. A literal is
        everywhere.
        """
        if value in self.body.literals or self.body.producers.get(value) in self.late:
            return None
        readers = [
            r for r in self.body.consumers[value] if r not in self.late and self.stage.get(r, latest + 1) <= latest
        ]
        transposed = [self.stage[r] for r in readers if self._may_be_transposes(self.body.nodes[r], reader)]
        made = [self.made[value]] if self.made.get(value, latest + 1) <= latest else []
        return max(transposed or [*made, *(self.stage[r] for r in readers)], default=None)

    def _may_be_transposes(self, forward: Node, backward: Node) -> bool:
        """Whether two operators may be transposes of each other: they are of one kind, with arrays of the
        same sizes.
        """
        return forward.primitive == backward.primitive and self._sizes(forward) == self._sizes(backward)

    def _sizes(self, node: Node) -> list[int]:
        return sorted(self.body.types[v].nbytes for v in (*node.inputs, *node.outputs))
