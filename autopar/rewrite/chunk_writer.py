"""A program under construction in which some values are in pieces along dimension 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
from jax import lax

from autopar import jax_compat
from autopar.frontend import Equation, Traced, Writer
from autopar.lowering import body_of
from autopar.runtime import Pieces
from passes.ir import Graph, Node, TensorType
from passes.step import MOST_CHUNKS


@cache
def n_pieces(trips: int, stages: int) -> int:
    """The number of equal pieces into which a loop is cut for `stages` stages.

    That is one for each stage, if that is not too many, and more where the stage with most trips then has fewer.
    """
    divisors = [d for d in range(1, trips + 1) if trips % d == 0]
    enough = [d for d in divisors if stages <= d <= max(MOST_CHUNKS, stages)]
    fewest = max(d for d in divisors if d <= stages)
    return min(enough, key=lambda pieces: (-(-pieces // stages) * trips // pieces, pieces), default=fewest)


class ChunkWriter:
    """A program under construction, of whole values and pieces.

    Values keep their numbers where they are whole; pieces get new ones. `cut` has the pieces of values that have any,
    `apart` the values that exist in pieces only.
    """

    def __init__(self, traced: Traced, stages: int) -> None:
        self.traced, self.stages = traced, stages
        self.graph: Graph = traced.graph
        self.writer = Writer(body_of(traced))
        self.types = self.writer.types
        self.optional: set[int] = set()  # nodes that may go if nothing reads them
        self.cut: dict[int, tuple[int, ...]] = {}
        self.apart: set[int] = set()

    # Values

    def count(self, value: int) -> int:
        """The number of pieces of a value that is cut."""
        shape = self.graph.types[value].shape
        return n_pieces(shape[0], self.stages) if shape and shape[0] else 1

    def fresh(self, type: TensorType) -> int:
        """The number of a new value."""
        return self.writer.fresh(type)

    def fresh_pieces(self, value: int) -> tuple[int, ...]:
        """The numbers of new pieces of a value."""
        type, count = self.graph.types[value], self.count(value)
        piece = TensorType(shape=(type.shape[0] // count, *type.shape[1:]), dtype=type.dtype)
        return tuple(self.fresh(piece) for _ in range(count))

    def take_apart(self, value: int, pieces: tuple[int, ...]) -> None:
        """Records that a value exists in these pieces only."""
        self.cut[value] = pieces
        self.apart.add(value)

    def sliced(self, value: int) -> tuple[int, ...]:
        """The pieces of a value that exists whole."""
        self.cut[value] = pieces = self.fresh_pieces(value)
        shape, rows = self.graph.types[value].shape, self.types[pieces[0]].shape[0]
        for i, piece in enumerate(pieces):
            params = {
                "start_indices": (i * rows, *(0 for _ in shape[1:])),
                "limit_indices": ((i + 1) * rows, *shape[1:]),
                "strides": None,
            }
            self.append(lax.slice_p, params, (value,), (piece,), like=self.graph.producers.get(value))
        return pieces

    def join(self, value: int, *, like: int | None) -> None:
        """Joins the pieces of a value that has no whole, in the scope of node `like`."""
        self.apart.discard(value)
        self.append(lax.concatenate_p, {"dimension": 0}, self.cut[value], (value,), like=like)

    # Nodes

    def append(
        self,
        primitive: jax_compat.Primitive,
        params: Mapping[str, Any],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        like: int | None,
    ) -> None:
        """Writes a new node, in the scope of another; it is removed if nothing reads it."""
        self.optional.add(len(self.writer.nodes))
        origin = None if like is None else self.graph.nodes[like]
        self.writer.add_operation(primitive, params, inputs, outputs, origin)

    def again(self, index: int, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        """Writes a node once more, on other values of the same meaning."""
        node = replace(self.graph.nodes[index], inputs=inputs, outputs=outputs)
        self.write(node, self.traced.equations[index], optional=True)

    def write(self, node: Node, equation: Equation, *, optional: bool) -> None:
        """Writes a node; an `optional` one is removed if nothing reads it."""
        if optional:
            self.optional.add(len(self.writer.nodes))
        self.writer.add(node, equation)

    # The program

    def finish(self, given: frozenset[int]) -> tuple[Traced, Pieces]:
        """The program, and how its inputs and outputs are cut; the inputs `given` come in pieces."""
        graph, state_pairs = self.graph, self.traced.state_pairs
        in_state = {graph.outputs[o] for o, i in state_pairs if i in given}
        ins = [self.cut[v] if i in given else (v,) for i, v in enumerate(graph.inputs)]
        outs = [self.cut[v] if v in in_state or v in self.apart else (v,) for v in graph.outputs]
        picked = self._live({v for pieces in outs for v in pieces})
        written = Graph(
            types=tuple(self.types),
            nodes=tuple(self.writer.nodes[i] for i in picked),
            inputs=tuple(v for pieces in ins for v in pieces),
            outputs=tuple(v for pieces in outs for v in pieces),
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
            equations=tuple(self.writer.equations[i] for i in picked),
            in_tree=jax.tree.structure((0,) * len(written.inputs)),
            out_tree=jax.tree.structure((0,) * len(written.outputs)),
            donated=tuple(flag for flag, pieces in zip(self.traced.donated, ins, strict=True) for _ in pieces),
            read=tuple(flag for flag, pieces in zip(self.traced.read, ins, strict=True) for _ in pieces),
            named=tuple(flag for flag, pieces in zip(self.traced.named, ins, strict=False) for _ in pieces),
            weak=tuple(flag for flag, pieces in zip(self.traced.weak, outs, strict=True) for _ in pieces),
            state_pairs=tuple(sorted(pairs)),
        )
        return program, Pieces(inputs=tuple(map(len, ins)), outputs=tuple(map(len, outs)))

    def _live(self, outputs: set[int]) -> list[int]:
        """The written nodes that these outputs need, and those that are not optional."""
        live, picked = set(outputs), list[int]()
        for index in reversed(range(len(self.writer.nodes))):
            node = self.writer.nodes[index]
            if index not in self.optional or not live.isdisjoint(node.outputs):
                live.update(node.inputs)
                picked.append(index)
        return picked[::-1]


def _firsts(pieces_of: Sequence[Sequence[int]]) -> list[int]:
    """The position at which the pieces of each value begin."""
    return [sum(len(pieces) for pieces in pieces_of[:i]) for i in range(len(pieces_of))]


def _names(names: Sequence[str], pieces_of: Sequence[Sequence[int]], types: Sequence[TensorType]) -> tuple[str, ...]:
    all_names: list[str] = []
    for name, pieces in zip(names, pieces_of, strict=False):
        if len(pieces) == 1:
            all_names.append(name)
            continue
        rows = types[pieces[0]].shape[0]
        all_names += [f"{name}[{i * rows}:{(i + 1) * rows}]" for i in range(len(pieces))]
    return tuple(all_names)
