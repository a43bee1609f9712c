"""Loops that add up losses and what these are divided by, such as a count of tokens: the count in a loop of its own.

Logits that are computed in chunks are a scan whose carries are a sum of losses and the number of tokens that have one.
Microbatches need that number of the whole batch before their first gradient. It comes from the batch alone, and can be
computed before the loop over microbatches, but for the loop that makes it with the losses. That becomes two:

    counts    the results that the batch alone decides, and what of the body they are made of
    rest      the others, and what those are made of

The results are the same. What both loops need, such as a mask, is computed in each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from autopar import jax_compat
from autopar.frontend import Body, Equation, Traced
from passes.errors import InternalError
from passes.ir import Graph, Node, Scan, TensorType, has_effect, scan_of
from passes.layers import batch_inputs


def with_counts_apart(traced: Traced) -> Traced | None:
    """The same step with what its loops make of the batch alone in loops of their own; None if they make nothing else.

    The result is cached on the graph.
    """
    memo = traced.graph.memo
    known = cast("tuple[Traced, Traced | None] | None", memo.get(with_counts_apart))
    if known is None or not _is_alike(known[0], traced):
        memo[with_counts_apart] = known = traced, _parted(traced)
    return known[1]


def _is_alike(first: Traced, second: Traced) -> bool:
    """Whether two traced steps of the same graph have the same batch and equations."""
    return first.equations is second.equations and (first.state_pairs, first.named) == (
        second.state_pairs,
        second.named,
    )


def _parted(traced: Traced) -> Traced | None:
    """The same step with counts in loops of their own; None if there are none."""
    graph = traced.graph
    batch = {graph.inputs[i] for i in batch_inputs(graph, traced.state_pairs, traced.named)}
    others = {v for v in graph.inputs if v not in batch and not graph.types[v].is_key}
    of_batch, of_others = made_of(graph, batch), made_of(graph, others)
    types, nodes, equations = list(graph.types), list[Node](), list[Equation]()
    for node, equation in zip(graph.nodes, traced.equations, strict=True):
        counts = _counts(graph, node, of_batch, of_others)
        parts = (counts, [p for p in range(len(node.outputs)) if p not in counts]) if counts else ()
        for part in parts:
            loop = _Loop.of(node, equation, part)
            nodes.append(loop.node(types))
            equations.append(loop.equation())
        if not parts:
            nodes.append(node)
            equations.append(equation)
    if len(nodes) == len(graph.nodes):
        return None
    written = replace(graph, types=tuple(types), nodes=tuple(nodes))
    written.verify()
    return replace(traced, graph=written, equations=tuple(equations))


def _counts(graph: Graph, node: Node, of_batch: set[int], of_others: set[int]) -> list[int]:
    """The positions of a loop's results that the batch alone decides and that something reads; none if all are such.

    What a loop saves for its backward loop stays where it is: computed up front it would be there for the whole batch.
    """
    if scan_of(node) is None or of_others.isdisjoint(node.outputs) or has_effect(node):
        return []
    return [
        position
        for position, value in enumerate(node.outputs)
        if value in of_batch and value not in of_others
        if value in graph.returned or any(not graph.nodes[i].subgraphs for i in graph.consumers.get(value, ()))
    ]


def made_of(graph: Graph, sources: Iterable[int]) -> set[int]:
    """The values that sources are part of, themselves included."""
    made = set(sources)
    for node in graph.nodes:
        if made.isdisjoint(node.inputs):
            continue
        if (scan := scan_of(node)) is not None:
            inside = _made_inside(node, scan, made)
            results = zip(node.outputs, node.subgraphs[0].outputs, strict=True)
            made.update(value for value, result in results if result in inside)
        elif node.primitive == jax_compat.optimization_barrier_p.name:
            made.update(b for a, b in zip(node.inputs, node.outputs, strict=True) if a in made)
        else:
            made.update(node.outputs)
    return made


def _made_inside(node: Node, scan: Scan, made: Collection[int]) -> set[int]:
    """The values of a loop's body that are made of these operands, in any of its iterations."""
    (body,) = node.subgraphs
    sources = {inner for value, inner in zip(node.inputs, body.inputs, strict=True) if value in made}
    while True:
        inside = made_of(body, sources)
        carries = zip(body.inputs[scan.constants : scan.fixed], body.outputs, strict=False)
        carried = {entering for entering, leaving in carries if leaving in inside}
        if carried <= sources:
            return inside
        sources |= carried


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """A part of a loop: the results at some positions, the carries that they need, and the nodes that make these.

    `origin` and `written` are the whole loop; `results` are the positions of the results that are wanted, `kept` of
    those that the part has, `operands` of its operands, and `nodes` the numbers of the body's nodes.
    """

    origin: Node
    written: Equation
    scan: Scan
    results: frozenset[int]
    kept: tuple[int, ...]
    operands: tuple[int, ...]
    nodes: tuple[int, ...]

    @staticmethod
    def of(node: Node, equation: Equation, results: Sequence[int]) -> _Loop:
        """The part of a loop that makes the results at these positions."""
        (body,), scan = node.subgraphs, scan_of(node)
        if scan is None:
            raise InternalError(f"{node.primitive} is parted as a loop")
        entering = body.inputs[scan.constants : scan.fixed]
        kept = set(results)
        while True:
            nodes, read = _makers(body, [body.outputs[p] for p in kept])
            carried = {p for p, value in enumerate(entering) if value in read}
            if carried <= kept:
                break
            kept |= carried
        carries = {scan.constants + p for p in kept if p < scan.carries}
        plain = {i for i, v in enumerate(body.inputs) if v in read and not scan.constants <= i < scan.fixed}
        return _Loop(
            origin=node,
            written=equation,
            scan=scan,
            results=frozenset(results),
            kept=tuple(sorted(kept)),
            operands=tuple(sorted(carries | plain)),
            nodes=tuple(sorted(nodes)),
        )

    def node(self, types: list[TensorType]) -> Node:
        """The part as a node; what it makes beside its results are new values, whose types are added."""
        outputs: list[int] = []
        for position in self.kept:
            value = self.origin.outputs[position]
            if position not in self.results:
                types.append(types[value])
                value = len(types) - 1
            outputs.append(value)
        return replace(
            self.origin,
            inputs=tuple(self.origin.inputs[i] for i in self.operands),
            outputs=tuple(outputs),
            params={**self.origin.params, **self._counts()},
            subgraphs=(self._body(),),
        )

    def equation(self) -> Equation:
        """The part as an equation, with the parameters that lowering reads."""
        (body,) = self.written.bodies
        graph = self._body()
        arrays = dict(zip(body.graph.constants, body.constants, strict=True))
        part = Body(
            graph=graph,
            equations=tuple(body.equations[i] for i in self.nodes),
            constants=tuple(arrays[v] for v in graph.constants),
        )
        params = {name: self.written.params[name] for name in ("length", "reverse", "unroll")}
        return replace(self.written, params={**params, **self._counts()}, bodies=(part,))

    def _counts(self) -> dict[str, int]:
        constants = sum(i < self.scan.constants for i in self.operands)
        return {"num_consts": constants, "num_carry": sum(p < self.scan.carries for p in self.kept)}

    def _body(self) -> Graph:
        (body,) = self.origin.subgraphs
        return body.part(self.nodes, [body.inputs[i] for i in self.operands], [body.outputs[p] for p in self.kept])


def _makers(graph: Graph, values: Iterable[int]) -> tuple[set[int], set[int]]:
    """(the nodes that values are made of, all values that these read and the values themselves)."""
    nodes, pending, read = set[int](), list(values), set[int]()
    while pending:
        value = pending.pop()
        read.add(value)
        index = graph.producers.get(value)
        if index is not None and index not in nodes:
            nodes.add(index)
            pending.extend(graph.nodes[index].inputs)
    return nodes, read
