"""Loops over layers in chunks, so that a pipeline can be cut between them: a `scan` of N trips as k scans of N / k.

A stacked operand of such a loop comes in pieces along dimension 0, and so do its stacked results. Elementwise
operations on pieces are computed piece by piece: gradients, moments and updates stay apart, and the state that they
update enters and leaves the program in pieces. Each piece is then on the stage of its layers and nowhere else.

Only loops over weights are cut: one stacked operand is made of state alone. A loop over time stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from jax import lax

from autopar import jax_compat
from autopar.frontend import Traced
from autopar.rewrite.chunk_writer import ChunkWriter, n_pieces
from autopar.runtime import Pieces
from passes.errors import InternalError
from passes.ir import Graph, Node, phase, scan_of
from passes.rules import ShardingRule, rule_of
from passes.sharding import ANY

_JOINS: Mapping[str, jax_compat.Primitive] = MappingProxyType(
    {"add": lax.add_p, "max": lax.max_p, "min": lax.min_p, "and": lax.and_p, "or": lax.or_p, ANY: lax.or_p}
)
"""The operation that joins two pieces' results, by `ShardingRule.joins`."""


def in_pieces(traced: Traced, stages: int) -> tuple[Traced, Pieces | None]:
    """The program for `stages` stages, with its loops over layers in chunks; the program itself, and None, if there are
    none.

    The new program takes and returns flat tuples.
    """
    demanded: frozenset[int] = frozenset()
    if stages < 2 or not any(map(scan_of, traced.graph.nodes)):
        return traced, None
    while True:
        cutter = _Cutter(traced, stages, demanded)
        cutter.run()
        if cutter.requested <= demanded:
            break
        demanded |= cutter.requested
    return cutter.program.finish(demanded) if cutter.has_cut else (traced, None)


class _Cutter:
    """The node-by-node decision of what is computed whole and what in pieces; `program` is the result.

    The inputs `given` come in pieces; `requested` are those that should.
    """

    def __init__(self, traced: Traced, stages: int, given: frozenset[int]) -> None:
        self.program = ChunkWriter(traced, stages)
        self.traced, self.stages, self.given = traced, stages, given
        self.graph: Graph = traced.graph
        self.state = {self.graph.inputs[i]: i for _, i in traced.state_pairs}
        self.steady = _steady(self.graph, set(self.state))
        self.requested: set[int] = set()
        self.has_cut = False
        for i in given:
            value = self.graph.inputs[i]
            self.program.take_apart(value, self.program.fresh_pieces(value))

    def run(self) -> None:
        for index, node in enumerate(self.graph.nodes):
            if self._is_cut(node):
                self._loop(index)
            elif self.program.apart.isdisjoint(node.inputs):
                self._copy(index)
            elif any(roles := self._roles(node)):
                self._piecewise(index, roles)
            elif self._join_of(node):
                self._reduce(index)
            else:
                self._copy(index)
        for output, position in self.traced.state_pairs:
            value = self.graph.outputs[output]
            if value in self.program.apart and self._is_plain(value):
                self.requested.add(position)
            if position in self.given:
                self._pieces(value)

    # What is cut

    def _is_plain(self, value: int) -> bool:
        return not self.graph.types[value].dtype.startswith(("key<", "float0"))

    def _is_cut(self, node: Node) -> bool:
        """Whether a node is a loop over layers."""
        scan = scan_of(node)
        if scan is None:
            return False
        (body,) = node.subgraphs
        heavy = any(inner.subgraphs or not rule_of(inner, body).light for inner in body.nodes)
        over_layers = any(v in self.program.cut or v in self.steady for v in node.inputs[scan.fixed :])
        return heavy and over_layers and scan.length > 1 and n_pieces(scan.length, self.stages) > 1

    def _roles(self, node: Node) -> tuple[bool, ...]:
        """Whether each operand comes in chunks where the result does; empty if the node needs whole operands."""
        if node.subgraphs or len(node.outputs) != 1:
            return ()
        rule, (result,) = rule_of(node, self.graph), node.outputs
        if rule.alias:  # a barrier behind one array is one behind each piece
            return (True,) * (self.program.count(result) > 1)
        if not _is_itself(rule) or not self.graph.types[result].rank:
            return ()
        factor = rule.results[0][0]
        if factor < 0 or rule.factors[factor].reduction or self.program.count(result) == 1:
            return ()
        if any(factor in dims[1:] for dims in rule.operands):
            return ()
        return tuple(dims[:1] == (factor,) for dims in rule.operands)

    def _join_of(self, node: Node) -> str:
        """The operation that joins the results of chunks of a node that reduces dimension 0; empty for any
        other node.
        """
        joins = () if node.subgraphs else rule_of(node, self.graph).joins
        return joins[0] if joins else ""

    # Values whole and in pieces

    def _pieces(self, value: int) -> tuple[int, ...]:
        """A value in pieces: computed piece by piece where that is cheap, else sliced."""
        program = self.program
        if value in program.cut:
            return program.cut[value]
        if value in self.state and self._is_plain(value):
            self.requested.add(self.state[value])
        producer = self.graph.producers.get(value)
        if producer is not None:
            node = self.graph.nodes[producer]
            late = phase(node) == "apply" or value in self.steady
            if not node.subgraphs and len(node.outputs) == 1 and rule_of(node, self.graph).repeats(0):
                return self._repeated(producer)
            if late and any(roles := self._roles(node)):
                self._piecewise(producer, roles)
                program.apart.discard(value)  # for it was made whole before
                return program.cut[value]
        return program.sliced(value)

    def _whole(self, value: int, reader: Node) -> None:
        """Makes sure that a value exists whole.

        For an update the pieces are joined after the loop over microbatches, not once in each.
        """
        if value in self.program.apart:
            self.program.join(value, like=None if phase(reader) == "apply" else self.graph.producers.get(value))

    # Nodes

    def _copy(self, index: int) -> None:
        """The node as it was, of whole operands."""
        node = self.graph.nodes[index]
        for value in node.inputs:
            self._whole(value, node)
        self.program.write(node, self.traced.equations[index], optional=any(self._roles(node)))

    def _piecewise(self, index: int, roles: Sequence[bool]) -> None:
        """Writes a node piece by piece."""
        node = self.graph.nodes[index]
        (result,) = node.outputs
        operands = [self._pieces(v) if cut else () for v, cut in zip(node.inputs, roles, strict=True)]
        for value, cut in zip(node.inputs, roles, strict=True):
            if not cut:
                self._whole(value, node)
        new_pieces = self.program.fresh_pieces(result)
        for i, piece in enumerate(new_pieces):
            inputs = tuple(pieces[i] if pieces else v for v, pieces in zip(node.inputs, operands, strict=True))
            self.program.again(index, inputs, (piece,))
        self.program.take_apart(result, new_pieces)

    def _repeated(self, index: int) -> tuple[int, ...]:
        """The chunks of a result that repeats along dimension 0: one, many times."""
        node, equation, program = self.graph.nodes[index], self.traced.equations[index], self.program
        (result,) = node.outputs
        pieces = program.fresh_pieces(result)
        shape = {rule_of(node, self.graph).shape_parameter: program.types[pieces[0]].shape}
        program.append(equation.primitive, dict(equation.params) | shape, node.inputs, pieces[:1], like=index)
        program.cut[result] = pieces[:1] * len(pieces)
        return program.cut[result]

    def _reduce(self, index: int) -> None:
        """Writes a reduction of each piece, then of their results."""
        node, program = self.graph.nodes[index], self.program
        (operand,), (result,) = node.inputs, node.outputs
        type, join = self.graph.types[result], _JOINS[self._join_of(node)]
        parts = [program.fresh(type) for _ in program.cut[operand]]
        for piece, part in zip(program.cut[operand], parts, strict=True):
            program.again(index, (piece,), (part,))
        first, *other_parts = parts
        for n, other in enumerate(other_parts):
            total = result if n == len(other_parts) - 1 else program.fresh(type)
            program.append(join, {}, (first, other), (total,), like=index)
            first = total

    def _loop(self, index: int) -> None:
        """Writes a loop as shorter ones in a row, the last trips first if it runs in reverse."""
        node, equation, program = self.graph.nodes[index], self.traced.equations[index], self.program
        scan = scan_of(node)
        if scan is None:
            raise InternalError(f"{node.primitive} is cut as a loop")
        count = n_pieces(scan.length, self.stages)
        constants, carried = node.inputs[: scan.constants], node.inputs[scan.constants : scan.fixed]
        for value in (*constants, *carried):
            self._whole(value, node)
        stacked = [self._pieces(v) for v in node.inputs[scan.fixed :]]
        rows = [program.fresh_pieces(v) for v in node.outputs[scan.carries :]]
        trips = scan.length // count
        changed: dict[str, Any] = {"length": trips, "unroll": min(cast("int", equation.params["unroll"]), trips)}
        order = list(reversed(range(count))) if node.params["reverse"] else list(range(count))
        for i in order:
            ends = node.outputs[: scan.carries]
            if i != order[-1]:
                ends = tuple(program.fresh(self.graph.types[v]) for v in ends)
            shorter = replace(
                node,
                inputs=(*constants, *carried, *(pieces[i] for pieces in stacked)),
                outputs=(*ends, *(pieces[i] for pieces in rows)),
                params={**node.params, **changed},
                scope=f"{node.scope}/piece {i}".lstrip("/"),
            )
            program.write(shorter, replace(equation, params={**equation.params, **changed}), optional=False)
            carried = ends
        for value, pieces in zip(node.outputs[scan.carries :], rows, strict=True):
            program.take_apart(value, pieces)
        self.has_cut = True


def _is_itself(rule: ShardingRule) -> bool:
    """Whether an operator on pieces is the same primitive with the same parameters, and cheap."""
    return rule.light and not (rule.reason or rule.alias or rule.pinned or rule.localized)


def _steady(graph: Graph, state: set[int]) -> set[int]:
    """Values that are made of state alone."""
    fixed = {*graph.literals, *graph.constants}
    steady = set(state)
    for node in graph.nodes:
        read = [v for v in node.inputs if v not in fixed]
        if all(v in steady for v in read):
            (steady if read else fixed).update(node.outputs)
    return steady
