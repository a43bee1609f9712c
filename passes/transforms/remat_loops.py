"""Recomputation inside loops over layers: the backward loop recomputes what an iteration does not keep.

A `scan` of the forward pass stacks values that the `scan` of the backward pass reads, an iteration at a time. Less is
stacked if the body of the second begins with copies of nodes of the first's. Two loops are two computations to XLA:
nothing merges the copies with the first ones, so no barrier is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from passes.errors import InternalError
from passes.ir import Graph, Node, Scan, has_effect, phase, scan_of
from passes.placement import is_free
from passes.rules import rule_of
from passes.transforms.remat_policy import Kept, is_kept, transposed


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyOrigins:
    """The origins of the nodes and constants of a new body: (the loop's node, position in its old body)."""

    nodes: tuple[tuple[int, int], ...]
    constants: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop of the forward pass and the loop of the backward pass that reads its stacked results, by their nodes."""

    forward: int
    backward: int


def loops(graph: Graph) -> tuple[Loop, ...]:
    """The loops that could stack less, each backward loop once."""
    loop_of: dict[int, Loop] = {}
    for index, node in enumerate(graph.nodes):
        scan = scan_of(node)
        if scan is None or phase(node) != "forward":
            continue
        readers = {r for v in node.outputs[scan.carries :] for r in graph.consumers.get(v, ())}
        for late in sorted(readers):
            backward = graph.nodes[late]
            again, loop = scan_of(backward), Loop(forward=index, backward=late)
            same = again is not None and again.length == scan.length
            if same and phase(backward) == "backward" and late not in loop_of and _gone(graph, loop, "inputs"):
                loop_of[late] = loop
                break
    return tuple(sorted(loop_of.values(), key=lambda loop: loop.forward))


def recompute_loop(graph: Graph, loop: Loop, kept: Kept) -> tuple[Graph, Mapping[int, BodyOrigins]]:
    """The program whose loop stacks only what `kept` says, and the origins of the bodies of its two nodes."""
    gone = _gone(graph, loop, kept)
    return _Rewriting(graph, loop, kept, gone).run() if gone else (graph, {})


def _scan(node: Node) -> Scan:
    """A node that is known to be a loop."""
    scan = scan_of(node)
    if scan is None:
        raise InternalError(f"{node.primitive} in place of a loop over layers")
    return scan


def _gone(graph: Graph, loop: Loop, kept: Kept) -> dict[int, int]:
    """The stacked results of the forward loop that need not be stacked, each with the value of its body."""
    early, late = graph.nodes[loop.forward], graph.nodes[loop.backward]
    (body,) = early.subgraphs
    first, fixed = _scan(early), _scan(late).fixed
    carries, carried = first.carries, set(body.inputs[first.constants : first.fixed])
    values: dict[int, int] = {}
    for outer, inner in zip(early.outputs[carries:], body.outputs[carries:], strict=True):
        producer = body.producers.get(inner)
        again = inner not in carried if producer is None else not is_kept(body, producer, kept)
        alone = set(graph.consumers.get(outer, ())) == {loop.backward} and outer not in late.inputs[:fixed]
        if again and alone and outer not in graph.returned:
            values[outer] = inner
    return values


class _Rewriting:
    """A forward and a backward loop while they are rewritten.

    `early` and `late` are the old nodes, `number` gives values of the first body their numbers in the second.
    """

    def __init__(self, graph: Graph, loop: Loop, kept: Kept, gone: Mapping[int, int]) -> None:
        self.graph, self.loop, self.gone = graph, loop, gone
        self.early, self.late = graph.nodes[loop.forward], graph.nodes[loop.backward]
        self.first, self.second = _scan(self.early), _scan(self.late)
        (self.source,), (self.target,) = self.early.subgraphs, self.late.subgraphs
        self.copied = _copied(self.source, set(gone.values()), kept)
        self.types = list(graph.types)
        self.inner_types = list(self.target.types)
        self.number: dict[int, int] = {}
        self.loop_constants: list[int] = []  # what the backward loop reads besides: constants of it,
        self.sliced: list[int] = []  # and stacks
        self.entering: dict[int, int] = {}  # the number of each in its body
        self.stacked: list[int] = []  # values of the first body that are stacked besides, in their order
        self.constants: list[int] = []
        self.literals = dict(self.target.literals)

    def run(self) -> tuple[Graph, Mapping[int, BodyOrigins]]:
        computed = {v for index in self.copied for v in self.source.nodes[index].outputs}
        read = {v for index in self.copied for v in self.source.nodes[index].inputs}
        for value in sorted((read | set(self.gone.values())) - computed):
            self.number[value] = self._enter(value)
        copies = [self._copy(self.source.nodes[index]) for index in self.copied]
        late, late_origins = self._late(copies)
        early, early_origins = self._early()
        nodes = list(self.graph.nodes)
        nodes[self.loop.forward], nodes[self.loop.backward] = early, late
        graph = replace(self.graph, types=tuple(self.types), nodes=tuple(nodes))
        graph.verify()
        return graph, {self.loop.forward: early_origins, self.loop.backward: late_origins}

    def _fresh(self, value: int) -> int:
        """A number in the second body for a value of the first."""
        self.inner_types.append(self.source.types[value])
        return len(self.inner_types) - 1

    def _enter(self, value: int) -> int:
        """Brings a value of the first body, which no copy computes, into the second."""
        if value in self.source.literals:
            number = self._fresh(value)
            self.literals[number] = self.source.literals[value]
            return number
        if value in self.source.constants:
            self.constants.append(self.source.constants.index(value))
            return self._fresh(value)
        place = self.source.inputs.index(value) if value in self.source.inputs else -1
        if 0 <= place < self.first.constants:
            return self._read(self.early.inputs[place], value, self.loop_constants, slice(0, self.second.constants))
        stacks = slice(self.second.fixed, None)
        outer = self.early.inputs[place] if place >= self.first.fixed else self._stack(value)
        return self._read(outer, value, self.sliced, stacks)

    def _read(self, outer: int, value: int, besides: list[int], known: slice) -> int:
        """The number in its body of an operand of the backward loop, which is added if the loop lacks it."""
        for operand, number in zip(self.late.inputs[known], self.target.inputs[known], strict=True):
            if operand == outer:
                return number
        if outer not in self.entering:
            besides.append(outer)
            self.entering[outer] = self._fresh(value)
        return self.entering[outer]

    def _stack(self, value: int) -> int:
        """The stack of a value of the first body, which is added if the loop lacks it."""
        carries = self.first.carries
        for outer, inner in zip(self.early.outputs[carries:], self.source.outputs[carries:], strict=True):
            if inner == value:
                return outer
        type = self.source.types[value]
        self.types.append(replace(type, shape=(self.first.length, *type.shape)))
        self.stacked.append(value)
        return len(self.types) - 1

    def _copy(self, node: Node) -> Node:
        inputs = tuple(self.number[v] for v in node.inputs)
        self.number |= {v: self._fresh(v) for v in node.outputs}
        outputs = tuple(self.number[v] for v in node.outputs)
        return replace(node, inputs=inputs, outputs=outputs, scope=transposed(node.scope))

    def _late(self, copies: Sequence[Node]) -> tuple[Node, BodyOrigins]:
        """The backward loop, each iteration of which begins with the copies."""
        late, target = self.late, self.target
        constants, fixed = self.second.constants, self.second.fixed
        stays = [k for k in range(fixed, len(late.inputs)) if late.inputs[k] not in self.gone]
        again = {
            target.inputs[k]: self.number[self.gone[late.inputs[k]]]
            for k in range(fixed, len(late.inputs))
            if late.inputs[k] in self.gone
        }
        entering = self.entering

        def ordered(operands: Sequence[int], carried: Sequence[int], sliced: Sequence[int]) -> tuple[int, ...]:
            return (*operands[:constants], *carried, *operands[constants:fixed], *(operands[k] for k in stays), *sliced)

        nodes = [*copies]
        nodes += [replace(node, inputs=tuple(again.get(v, v) for v in node.inputs)) for node in target.nodes]
        numbers = [self.number[self.source.constants[position]] for position in self.constants]
        entered = [entering[v] for v in self.loop_constants]
        body = replace(
            target,
            types=tuple(self.inner_types),
            nodes=tuple(nodes),
            inputs=ordered(target.inputs, entered, [entering[v] for v in self.sliced]),
            outputs=tuple(again.get(v, v) for v in target.outputs),
            constants=(*target.constants, *numbers),
            literals=self.literals,
            input_names=(),
        )
        node = replace(
            late,
            inputs=ordered(late.inputs, self.loop_constants, self.sliced),
            params={**late.params, **replace(self.second, constants=constants + len(self.loop_constants)).params()},
            subgraphs=(body,),
        )
        backward, forward = self.loop.backward, self.loop.forward
        origins = BodyOrigins(
            nodes=(*((forward, i) for i in self.copied), *((backward, i) for i in range(len(target.nodes)))),
            constants=(*((backward, i) for i in range(len(target.constants))), *((forward, i) for i in self.constants)),
        )
        return node, origins

    def _early(self) -> tuple[Node, BodyOrigins]:
        """The forward loop, which computes only what it stacks or carries."""
        early, source, carries = self.early, self.source, self.first.carries
        pairs = list(zip(early.outputs[carries:], source.outputs[carries:], strict=True))
        stays = [(outer, inner) for outer, inner in pairs if outer not in self.gone]
        firsts = len(self.types) - len(self.stacked)
        stays += [(firsts + n, value) for n, value in enumerate(self.stacked)]
        outputs = (*source.outputs[:carries], *(inner for _, inner in stays))
        needed = list(_needed(source, outputs))
        body = replace(source, nodes=tuple(source.nodes[i] for i in needed), outputs=outputs, output_names=())
        node = replace(early, outputs=(*early.outputs[:carries], *(outer for outer, _ in stays)), subgraphs=(body,))
        forward = self.loop.forward
        return node, BodyOrigins(
            nodes=tuple((forward, i) for i in needed),
            constants=tuple((forward, i) for i in range(len(source.constants))),
        )


def _copied(body: Graph, targets: set[int], kept: Kept) -> tuple[int, ...]:
    """The nodes that compute the `targets` from what is kept, in order."""
    copied: list[int] = []
    needed = set(targets)
    for index in reversed(range(len(body.nodes))):
        node = body.nodes[index]
        if not needed.isdisjoint(node.outputs) and (is_free(body, index) or not is_kept(body, index, kept)):
            copied.append(index)
            needed.update(node.inputs)
    return tuple(reversed(copied))


def _stays(node: Node, body: Graph) -> bool:
    """Whether a node has an effect or a barrier's order besides its results."""
    return not node.outputs or has_effect(node) or (not node.subgraphs and rule_of(node, body).once)


def _needed(body: Graph, outputs: Sequence[int]) -> Iterator[int]:
    """The nodes that outputs depend on, and those that have an effect."""
    needed = set(outputs)
    nodes: list[int] = []
    for index in reversed(range(len(body.nodes))):
        node = body.nodes[index]
        if not needed.isdisjoint(node.outputs) or _stays(node, body):
            needed.update(node.inputs)
            nodes.append(index)
    yield from reversed(nodes)
