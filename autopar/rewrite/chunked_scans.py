"""Loops over layers in pieces, so that a pipeline can be cut between them: a `scan` of N trips as k of N / k.

A stacked operand of such a loop comes in pieces along dimension 0, and so do its stacked results. What is computed
element by element of pieces is computed piece by piece: gradients, moments and updates stay apart, and the state that
they update enters and leaves the program in pieces. Each piece then lives with its layers and nowhere else.

Only loops over weights are cut: one stacked operand is made of state alone. A loop over time stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, cast

import jax
from jax import lax

from autopar import jax_compat
from autopar.frontend import Equation, Traced, plain_params
from autopar.runtime import Pieces
from passes.ir import Graph, Node, TensorType, phase
from passes.rules import rule_of

_SHAPED = frozenset(
    "broadcast_in_dim reshape slice dynamic_slice dynamic_update_slice gather iota random_bits rng_bit_generator split "
    "ffi_call pallas_call shard_map sharding_constraint".split()
)
"""Primitives whose parameters say the shape of a result."""

_REDUCTIONS: Mapping[str, jax_compat.Primitive] = MappingProxyType(
    {
        "reduce_sum": lax.add_p,
        "reduce_max": lax.max_p,
        "reduce_min": lax.min_p,
        "reduce_and": lax.and_p,
        "reduce_or": lax.or_p,
    }
)
"""What joins the reductions of pieces."""


MOST = 64
"""The most pieces that a loop is cut into so that each stage gets one, where its trips do not divide evenly."""


def in_pieces(traced: Traced, stages: int) -> tuple[Traced, Pieces | None]:
    """The program for `stages` stages, its loops over layers in pieces; as it was, and None, if there are none.

    The new program takes and returns flat tuples.
    """
    asked: frozenset[int] = frozenset()
    if stages < 2 or not any(node.primitive == "scan" for node in traced.graph.nodes):
        return traced, None
    while True:
        cutter = _Cutter(traced, stages, asked)
        cutter.run()
        if cutter.asked <= asked:
            break
        asked |= cutter.asked
    return cutter.finish() if cutter.has_cut else (traced, None)


@cache
def n_pieces(trips: int, stages: int) -> int:
    """In how many equal pieces a loop is cut for `stages` stages: as few as give each one, if that is not too many."""
    divisors = [d for d in range(1, trips + 1) if trips % d == 0]
    fewest = max(d for d in divisors if d <= stages)
    return min((d for d in divisors if stages <= d <= max(MOST, stages)), default=fewest)


class _Cutter:
    """A program being written anew. Values keep their numbers where they are whole; their pieces get new ones.

    `cut` holds the pieces of values that have any, `apart` those values that exist in pieces only.
    """

    def __init__(self, traced: Traced, stages: int, asked: frozenset[int]) -> None:
        self.traced, self.stages = traced, stages
        self.graph: Graph = traced.graph
        self.state = {self.graph.inputs[i]: i for _, i in traced.state_pairs}
        self.steady = _steady(self.graph, set(self.state))
        self.types = list(self.graph.types)
        self.nodes: list[Node] = []
        self.equations: list[Equation] = []
        self.optional: set[int] = set()  # nodes that may go if nothing reads them
        self.cut: dict[int, tuple[int, ...]] = {}
        self.apart: set[int] = set()
        self.given = asked  # inputs that come in pieces
        self.asked: set[int] = set()  # those that should
        self.has_cut = False
        for i in asked:
            value = self.graph.inputs[i]
            self._take_apart(value, self._fresh_pieces(value))

    def run(self) -> None:
        for index, node in enumerate(self.graph.nodes):
            if self._is_cut(node):
                self._loop(index)
            elif self.apart.isdisjoint(node.inputs):
                self._copy(index)
            elif any(roles := self._roles(node)):
                self._piecewise(index, roles)
            elif self._reduces(node):
                self._reduce(index)
            else:
                self._copy(index)
        for output, position in self.traced.state_pairs:
            value = self.graph.outputs[output]
            if value in self.apart and self._is_plain(value):
                self.asked.add(position)
            if position in self.given:
                self._pieces(value)

    # What is cut

    def _count(self, value: int) -> int:
        shape = self.graph.types[value].shape
        return n_pieces(shape[0], self.stages) if shape and shape[0] else 1

    def _is_plain(self, value: int) -> bool:
        return not self.graph.types[value].dtype.startswith(("key<", "float0"))

    def _is_cut(self, node: Node) -> bool:
        """Whether a node is a loop over layers."""
        if node.primitive != "scan" or not node.subgraphs:
            return False
        (body,) = node.subgraphs
        n_fixed = cast("int", node.params["num_consts"]) + cast("int", node.params["num_carry"])
        length = cast("int", node.params["length"])
        heavy = any(inner.subgraphs or not rule_of(inner, body).light for inner in body.nodes)
        over_layers = any(v in self.cut or v in self.steady for v in node.inputs[n_fixed:])
        return heavy and over_layers and length > 1 and n_pieces(length, self.stages) > 1

    def _roles(self, node: Node) -> tuple[bool, ...]:
        """For each operand whether it comes in pieces where the result does; nothing if the node needs the whole."""
        if node.subgraphs or len(node.outputs) != 1 or node.primitive in _SHAPED:
            return ()
        rule, (result,) = rule_of(node, self.graph), node.outputs
        if rule.reason or rule.alias or rule.pinned or not rule.light or not self.graph.types[result].rank:
            return ()
        factor = rule.results[0][0]
        if factor < 0 or rule.factors[factor].reduction or self._count(result) == 1:
            return ()
        if any(factor in dims[1:] for dims in rule.operands):
            return ()
        return tuple(dims[:1] == (factor,) for dims in rule.operands)

    def _reduces(self, node: Node) -> bool:
        return (
            node.primitive in _REDUCTIONS
            and len(node.inputs) == 1
            and 0 in cast("tuple[int, ...]", node.params["axes"])
        )

    # Values whole and in pieces

    def _fresh(self, type: TensorType) -> int:
        self.types.append(type)
        return len(self.types) - 1

    def _fresh_pieces(self, value: int) -> tuple[int, ...]:
        type, count = self.graph.types[value], self._count(value)
        piece = TensorType(shape=(type.shape[0] // count, *type.shape[1:]), dtype=type.dtype)
        return tuple(self._fresh(piece) for _ in range(count))

    def _take_apart(self, value: int, pieces: tuple[int, ...]) -> None:
        self.cut[value] = pieces
        self.apart.add(value)

    def _pieces(self, value: int) -> tuple[int, ...]:
        """A value in pieces: computed so where that is cheap, else sliced."""
        if value in self.cut:
            return self.cut[value]
        if value in self.state and self._is_plain(value):
            self.asked.add(self.state[value])
        made = self.graph.producers.get(value)
        if made is not None:
            node = self.graph.nodes[made]
            late = phase(node) == "apply" or value in self.steady
            if node.primitive == "broadcast_in_dim" and 0 not in cast(
                "tuple[int, ...]", node.params["broadcast_dimensions"]
            ):
                return self._broadcast(made)
            if late and any(roles := self._roles(node)):
                self._piecewise(made, roles)
                self.apart.discard(value)  # for it was made whole before
                return self.cut[value]
        pieces = self._fresh_pieces(value)
        shape, rows = self.graph.types[value].shape, self.types[pieces[0]].shape[0]
        for i, piece in enumerate(pieces):
            params = {
                "start_indices": (i * rows, *(0 for _ in shape[1:])),
                "limit_indices": ((i + 1) * rows, *shape[1:]),
                "strides": None,
            }
            self._append(lax.slice_p, params, (value,), (piece,), like=made)
        self.cut[value] = pieces
        return pieces

    def _whole(self, value: int, reader: Node | None = None) -> None:
        """Makes sure that a value is there whole.

        For an update the pieces are joined after the loop over microbatches, not once in each.
        """
        if value not in self.apart:
            return
        self.apart.discard(value)
        late = reader is None or phase(reader) == "apply"
        made = None if late else self.graph.producers.get(value)
        self._append(lax.concatenate_p, {"dimension": 0}, self.cut[value], (value,), like=made)

    # Nodes

    def _append(
        self,
        primitive: jax_compat.Primitive,
        params: Mapping[str, Any],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        like: int | None,
    ) -> None:
        """A node of our own, in the scope of another."""
        origin = None if like is None else self.graph.nodes[like]
        node = Node(
            primitive=primitive.name,
            inputs=inputs,
            outputs=outputs,
            params=plain_params(params),
            source=origin.source if origin else "",
            scope=origin.scope if origin else "",
        )
        self.optional.add(len(self.nodes))
        self.nodes.append(node)
        self.equations.append(Equation(primitive=primitive, params=params))

    def _copy(self, index: int) -> None:
        """The node as it was, of whole operands."""
        node = self.graph.nodes[index]
        for value in node.inputs:
            self._whole(value, node)
        if any(self._roles(node)):
            self.optional.add(len(self.nodes))
        self.nodes.append(node)
        self.equations.append(self.traced.equations[index])

    def _again(self, index: int, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        """The node once more, of other values of the same meaning."""
        self.optional.add(len(self.nodes))
        self.nodes.append(replace(self.graph.nodes[index], inputs=inputs, outputs=outputs))
        self.equations.append(self.traced.equations[index])

    def _piecewise(self, index: int, roles: Sequence[bool]) -> None:
        """A node piece by piece."""
        node = self.graph.nodes[index]
        (result,) = node.outputs
        operands = [self._pieces(v) if cut else () for v, cut in zip(node.inputs, roles, strict=True)]
        for value, cut in zip(node.inputs, roles, strict=True):
            if not cut:
                self._whole(value, node)
        made = self._fresh_pieces(result)
        for i, piece in enumerate(made):
            inputs = tuple(held[i] if held else v for v, held in zip(node.inputs, operands, strict=True))
            self._again(index, inputs, (piece,))
        self._take_apart(result, made)

    def _broadcast(self, index: int) -> tuple[int, ...]:
        """What repeats along dimension 0 is one piece, many times."""
        node, equation = self.graph.nodes[index], self.traced.equations[index]
        (result,) = node.outputs
        pieces = self._fresh_pieces(result)
        params = dict(equation.params) | {"shape": self.types[pieces[0]].shape}
        self._append(equation.primitive, params, node.inputs, pieces[:1], like=index)
        self.cut[result] = pieces[:1] * len(pieces)
        return self.cut[result]

    def _reduce(self, index: int) -> None:
        """A reduction of each piece, then of what they give."""
        node = self.graph.nodes[index]
        (operand,), (result,) = node.inputs, node.outputs
        type = self.graph.types[result]
        parts = [self._fresh(type) for _ in self.cut[operand]]
        for piece, part in zip(self.cut[operand], parts, strict=True):
            self._again(index, (piece,), (part,))
        first, *others = parts
        for n, other in enumerate(others):
            total = result if n == len(others) - 1 else self._fresh(type)
            self._append(_REDUCTIONS[node.primitive], {}, (first, other), (total,), like=index)
            first = total

    def _loop(self, index: int) -> None:
        """A loop as shorter ones in a row, the last trips first if it runs in reverse."""
        node, equation = self.graph.nodes[index], self.traced.equations[index]
        n_held, n_carries = cast("int", node.params["num_consts"]), cast("int", node.params["num_carry"])
        length = cast("int", node.params["length"])
        count = n_pieces(length, self.stages)
        held, carried = node.inputs[:n_held], node.inputs[n_held : n_held + n_carries]
        for value in (*held, *carried):
            self._whole(value, node)
        stacked = [self._pieces(v) for v in node.inputs[n_held + n_carries :]]
        rows = [self._fresh_pieces(v) for v in node.outputs[n_carries:]]
        changed: dict[str, Any] = {"length": length // count}
        changed["unroll"] = min(cast("int", equation.params["unroll"]), length // count)
        order = list(reversed(range(count))) if node.params["reverse"] else list(range(count))
        for i in order:
            ends = node.outputs[:n_carries]
            if i != order[-1]:
                ends = tuple(self._fresh(self.graph.types[v]) for v in ends)
            self.nodes.append(
                replace(
                    node,
                    inputs=(*held, *carried, *(pieces[i] for pieces in stacked)),
                    outputs=(*ends, *(pieces[i] for pieces in rows)),
                    params={**node.params, **changed},
                    scope=f"{node.scope}/piece {i}".lstrip("/"),
                )
            )
            self.equations.append(replace(equation, params={**equation.params, **changed}))
            carried = ends
        for value, pieces in zip(node.outputs[n_carries:], rows, strict=True):
            self._take_apart(value, pieces)
        self.has_cut = True

    # The program

    def finish(self) -> tuple[Traced, Pieces]:
        """What was written, and how its inputs and outputs are cut."""
        graph, state_pairs = self.graph, self.traced.state_pairs
        in_state = {graph.outputs[o] for o, i in state_pairs if i in self.given}
        ins = [self.cut[v] if i in self.given else (v,) for i, v in enumerate(graph.inputs)]
        outs = [self.cut[v] if v in in_state or v in self.apart else (v,) for v in graph.outputs]
        live = {v for held in outs for v in held}
        picked: list[int] = []
        for index in reversed(range(len(self.nodes))):
            node = self.nodes[index]
            if index not in self.optional or not live.isdisjoint(node.outputs):
                live.update(node.inputs)
                picked.append(index)
        picked.reverse()
        written = Graph(
            types=tuple(self.types),
            nodes=tuple(self.nodes[i] for i in picked),
            inputs=tuple(v for held in ins for v in held),
            outputs=tuple(v for held in outs for v in held),
            constants=graph.constants,
            literals=graph.literals,
            input_names=_names(graph.input_names, ins, self.types),
            output_names=_names(graph.output_names, outs, self.types),
        )
        written.verify()
        firsts_in, firsts_out = _firsts(ins), _firsts(outs)
        pairs = [
            (firsts_out[o] + n, firsts_in[i] + n)
            for o, i in state_pairs
            if len(outs[o]) == len(ins[i])
            for n in range(len(ins[i]))
        ]
        program = replace(
            self.traced,
            graph=written,
            equations=tuple(self.equations[i] for i in picked),
            in_tree=jax.tree.structure((0,) * len(written.inputs)),
            out_tree=jax.tree.structure((0,) * len(written.outputs)),
            donated=tuple(flag for flag, held in zip(self.traced.donated, ins, strict=True) for _ in held),
            weak=tuple(flag for flag, held in zip(self.traced.weak, outs, strict=True) for _ in held),
            state_pairs=tuple(sorted(pairs)),
        )
        return program, Pieces(inputs=tuple(map(len, ins)), outputs=tuple(map(len, outs)))


def _steady(graph: Graph, state: set[int]) -> set[int]:
    """Values that are made of state alone."""
    fixed = {*graph.literals, *graph.constants}
    found = set(state)
    for node in graph.nodes:
        read = [v for v in node.inputs if v not in fixed]
        if all(v in found for v in read):
            (found if read else fixed).update(node.outputs)
    return found


def _firsts(held: Sequence[Sequence[int]]) -> list[int]:
    """Where each one's pieces begin."""
    return [sum(len(one) for one in held[:i]) for i in range(len(held))]


def _names(names: Sequence[str], held: Sequence[Sequence[int]], types: Sequence[TensorType]) -> tuple[str, ...]:
    found: list[str] = []
    for name, pieces in zip(names, held, strict=False):
        if len(pieces) == 1:
            found.append(name)
            continue
        rows = types[pieces[0]].shape[0]
        found += [f"{name}[{i * rows}:{(i + 1) * rows}]" for i in range(len(pieces))]
    return tuple(found)
