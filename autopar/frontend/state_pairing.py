"""The results that are the next call's arguments: a train step's parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from autopar.jax_compat import PyTreeDef
from passes.ir import Graph, Phase, StatePairs, phase


def state_pairs(graph: Graph, in_tree: PyTreeDef, out_tree: PyTreeDef, donated: Sequence[bool]) -> StatePairs:
    """(output, input) leaves of each argument that some part of the output repeats in structure and types.

    Donated arguments choose first, and each takes the first match: the whole output, one of its parts, or a part of
    those. A lone array, which looks like any other, is taken for state only if it is donated or updated: all arguments
    before it are state, and the result is made of it and of gradients after the backward pass.

    An argument that comes back with some leaves of other types is paired but for those leaves, and one that comes back
    in pieces is paired piece by piece: if it is donated, or if it has more than one array and is updated.
    """
    args, kwargs = _Subtree(0, in_tree).children()
    pairing = _Pairing(graph, donated, _results(out_tree))
    arguments = sorted((*args.children(), *kwargs.children()), key=pairing.is_donated, reverse=True)
    unpaired = [argument for argument in arguments if not pairing.pair(argument, pairing.may_be_state)]
    while unpaired:
        in_pieces = [argument for argument in unpaired if not pairing.pair(argument, pairing.is_changed, exact=False)]
        pieces = [piece for argument in in_pieces for piece in argument.children()]
        unpaired = [piece for piece in pieces if not pairing.pair(piece, pairing.is_changed)]
    return tuple(sorted(pairing.pairs))


@dataclass(frozen=True, slots=True)
class _Subtree:
    """Consecutive leaves of a pytree that form a tree of their own."""

    first: int
    tree: PyTreeDef

    @property
    def leaves(self) -> range:
        return range(self.first, self.first + self.tree.num_leaves)

    def children(self) -> Iterator[_Subtree]:
        first = self.first
        for child in self.tree.children():
            yield _Subtree(first, child)
            first += child.num_leaves


def _results(tree: PyTreeDef) -> list[_Subtree]:
    """The output, its parts, and the parts of those."""
    whole = _Subtree(0, tree)
    parts = list(whole.children())
    return [whole, *parts, *(inner for part in parts for inner in part.children())]


@dataclass(slots=True)
class _Pairing:
    """The `pairs` of (output, input) leaves so far; no leaf is in two."""

    graph: Graph
    donated: Sequence[bool]
    results: Sequence[_Subtree]
    pairs: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    taken: set[int] = field(default_factory=set[int])

    def pair(self, argument: _Subtree, is_state: Callable[[_Subtree, _Subtree], bool], *, exact: bool = True) -> bool:
        """Whether an argument is paired with a result; if so, with the first of its structure that `is_state` accepts.

        If it is to be `exact`, all types are the same; otherwise those of most leaves, which are paired.
        """
        graph = self.graph
        for result in self.results if argument.tree.num_leaves else ():
            if result.tree != argument.tree or not self.taken.isdisjoint(result.leaves):
                continue
            leaves = zip(result.leaves, argument.leaves, strict=True)
            same = [(o, i) for o, i in leaves if graph.types[graph.outputs[o]] == graph.types[graph.inputs[i]]]
            enough = argument.tree.num_leaves if exact else argument.tree.num_leaves // 2 + 1
            if len(same) >= enough and is_state(argument, result):
                self.pairs += same
                self.taken.update(result.leaves)
                return True
        return False

    def is_donated(self, argument: _Subtree) -> bool:
        return all(self.donated[i] for i in argument.leaves)

    def may_be_state(self, argument: _Subtree, result: _Subtree) -> bool:
        """Whether an argument that a result resembles may be state, by all that is known."""
        if argument.tree.num_leaves > 1 or self.is_donated(argument):
            return True
        paired = {i for _, i in self.pairs}
        return paired.issuperset(range(argument.first)) and self._is_updated(argument, result)

    def is_changed(self, argument: _Subtree, result: _Subtree) -> bool:
        """Whether an argument, or a piece of one, is certainly state that comes back as a result."""
        return self.is_donated(argument) or (argument.tree.num_leaves > 1 and self._is_updated(argument, result))

    def _is_updated(self, argument: _Subtree, result: _Subtree) -> bool:
        """Whether nodes of the apply phase alone make a result of an argument and of a value of the backward pass.

        New state of other types does not count: what is made of a batch with it, such as a reconstruction, is no
        update.
        """
        graph = self.graph
        types = {graph.types[graph.inputs[i]] for i in argument.leaves}
        others = {graph.outputs[o] for o, _ in self.pairs if graph.types[graph.outputs[o]] not in types}
        waiting, phases = [graph.outputs[o] for o in result.leaves], set[Phase]()
        seen = set(waiting)
        while waiting:
            producer = graph.producers.get(waiting.pop())
            if producer is None:
                continue
            node = graph.nodes[producer]
            phases.add(phase(node))
            if phase(node) == "apply":
                inputs = [v for v in node.inputs if v not in others]
                waiting += [v for v in inputs if v not in seen]
                seen.update(inputs)
        return "backward" in phases and not seen.isdisjoint(graph.inputs[i] for i in argument.leaves)
