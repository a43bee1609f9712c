"""Hashes of stages that are equal if the stages are one program but for names and the order of arguments and updates.

A model's layers apply the same operators in the same order, but their arguments and updates come in the order of their
names, in which layer 10 stands before layer 2. Values are therefore numbered in the order in which the loop over
microbatches reads them, and other nodes in the order in which the first numbered value that they read leads to them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from passes.ir import Graph, Node, StatePairs, phase
from passes.transforms import Part


def structural_hash(part: Part, state_pairs: StatePairs) -> str:
    """16 hex digits that are equal for equal stages; `state_pairs` are the (output, input) positions of its state.

    Stages with equal digits have the same nodes with the same operands, in the same phases of a step, and send and keep
    the same values.
    """
    graph, body, loop = part.graph, part.body, part.graph.nodes[part.loop]
    names, inside = _Names(graph), _Names(body)
    lines = [f"{inside.line(node)} {index in part.forward}" for index, node in enumerate(body.nodes)]
    fixed, carried = part.scan.constants, part.scan.carries
    roles = ["fixed"] * fixed + [f"until {inside.of(value)}" for value in body.outputs[:carried]]
    entering = _paired(inside, body.inputs, loop.inputs, roles)
    leaving = _paired(inside, body.outputs, loop.outputs, ["carried"] * carried)
    lines += [f"{inner} {role} is {names.of(outer)}" for inner, role, outer in (*entering, *leaving)]
    order = _reached(graph, part.loop, [outer for _, _, outer in (*entering, *leaving)])
    lines += [names.line(graph.nodes[index]) for index in order]
    lines += [repr(sorted(map(inside.of, body.constants))), repr(sorted(loop.params.items()))]
    for values in (graph.inputs, graph.constants, graph.outputs, part.boundary_values):
        lines.append(repr(sorted(map(names.of, values))))
    lines.append(repr(sorted((names.of(graph.outputs[o]), names.of(graph.inputs[i])) for o, i in state_pairs)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _paired(
    inside: _Names, inner: Sequence[int], outer: Sequence[int], roles: Sequence[str]
) -> list[tuple[str, str, int]]:
    """(value of the loop's body, its role there, its value outside the loop); without another role it is a
    microbatch's.
    """
    given = (*roles, *["each"] * (len(inner) - len(roles)))
    return sorted(zip(map(inside.of, inner), given, outer, strict=True))


class _Names:
    """The numbers of values, given in the order in which they are first asked for, with their types as text."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[int, str] = {}

    def of(self, value: int) -> str:
        if value not in self.known:
            type, literals = self.graph.types[value], self.graph.literals
            name = repr(literals[value]) if value in literals else f"%{len(self.known):06}"
            self.known[value] = f"{name}:{type}"
        return self.known[value]

    def line(self, node: Node) -> str:
        """A node as text, with fingerprints in place of its bodies."""
        reads, writes = (" ".join(map(self.of, values)) for values in (node.inputs, node.outputs))
        bodies = " ".join(body.fingerprint for body in node.subgraphs)
        return f"{writes}={node.primitive} {reads} {sorted(node.params.items())!r} {phase(node)} {bodies}"


def _reached(graph: Graph, loop: int, named: Iterable[int]) -> Iterator[int]:
    """The nodes outside the loop, each once, in an order that follows from that of the `named` values."""
    done, pending = {loop}, list(named)
    for value in pending:
        for index in (graph.producers.get(value), *graph.consumers.get(value, ())):
            for producer in _with_makers(graph, index, done):
                pending.extend(graph.nodes[producer].outputs)
                yield producer
    for index in range(len(graph.nodes)):
        yield from _with_makers(graph, index, done)


def _with_makers(graph: Graph, index: int | None, done: set[int]) -> Iterator[int]:
    """A node after the nodes that make its operands, in the operands' order, without those that are done."""
    stack = [] if index is None or index in done else [index]
    while stack:
        makers = [graph.producers.get(value) for value in graph.nodes[stack[-1]].inputs]
        missing = [maker for maker in makers if maker is not None and maker not in done]
        if missing:
            stack.append(missing[0])
            continue
        if (last := stack.pop()) not in done:
            done.add(last)
            yield last
