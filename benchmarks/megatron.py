"""The collectives that Megatron has for activations, found by a walk through the forward pass.

`benchmarks.textbook` says which they are and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.causes import Program, computes_activations, layer_of, when
from benchmarks.regions import Region, Value
from benchmarks.verdicts import Allowed, Style, on_wire, seconds_of
from passes.cluster import collectives
from passes.ir import Node, phase
from passes.rules import ShardingRule, rule_of


def is_matrix(program: Program, region: Region, value: int) -> bool:
    """Whether a value depends on one parameter alone, and is a matrix."""
    bits = program.sources.get((region.number, value), 0)
    only = bits.bit_count() == 1 and (bits.bit_length() - 1) in program.parameters
    return only and region.graph.types[value].rank > 1


def megatron(program: Program, style: Style) -> Iterator[Allowed]:
    """The collectives of activations over the axes `tensor`; none where the style has no such axes."""
    if style.tensor:
        yield from _Walk(program=program, style=style).run()


@dataclass(kw_only=True)
class _Walk:
    """A walk through the forward pass.

    `cut` are the dimensions of each activation that are cut over `tensor`, none where it is whole. `same` is the value
    that a value is a copy of, and `read` are the whole activations, by that value, that products have read.
    """

    program: Program
    style: Style
    cut: dict[Value, frozenset[int]] = field(default_factory=dict[Value, frozenset[int]])
    same: dict[Value, Value] = field(default_factory=dict[Value, Value])
    read: set[Value] = field(default_factory=set[Value])
    allowed: list[Allowed] = field(default_factory=list[Allowed])

    @property
    def parts(self) -> int:
        """The number of devices along `tensor`."""
        return math.prod(map(self.program.mesh.axis_size, self.style.tensor))

    def run(self) -> list[Allowed]:
        self._region(self.program.root)
        return self.allowed

    def _region(self, region: Region) -> None:
        graph = region.graph
        for index, node in enumerate(graph.nodes):
            if index in region.controls:
                self._control(region, index)
            elif computes_activations(node):
                self._node(region, node, rule_of(node, graph))

    def _control(self, region: Region, index: int) -> None:
        control, bodies = region.controls[index]
        node, here = region.graph.nodes[index], region.number
        ports: dict[int, frozenset[int]] = {}
        for value, port_use in zip(node.inputs, control.operands, strict=True):
            dims = self.cut.get((here, value), frozenset())
            ports[port_use.port] = frozenset(d - port_use.stacked for d in dims if d >= port_use.stacked)
        for body, inner in zip(control.bodies, bodies, strict=True):
            for value, port in zip(body.graph.inputs, body.inputs, strict=True):
                self.cut[inner.number, value] = ports.get(port, frozenset())
            self._region(inner)
            for value, port in zip(body.graph.outputs, body.outputs, strict=True):
                ports[port] = self.cut.get((inner.number, value), frozenset())
        for value, port_use in zip(node.outputs, control.results, strict=True):
            dims = ports.get(port_use.port, frozenset())
            self.cut[here, value] = frozenset(d + port_use.stacked for d in dims)

    def _node(self, region: Region, node: Node, rule: ShardingRule) -> None:
        here, graph = region.number, region.graph
        if rule.alias:
            for value, result in zip(node.inputs, node.outputs, strict=True):
                self._copy((here, value), (here, result))
            return
        batch = self.program.batch
        pairs = list(zip(node.inputs, rule.operands, strict=True))
        activations = [(v, f) for v, f in pairs if (here, v) in batch and self.program.depends_on_batch((here, v))]
        if not activations:
            return
        weights = [(v, f) for v, f in pairs if is_matrix(self.program, region, v)]
        cut = [(v, f, frozenset(f[d] for d in self.cut.get((here, v), ()))) for v, f in activations]
        made = {f for factors in rule.results for f in factors if f >= 0}
        cut_factors = frozenset().union(*(cut_by for _, _, cut_by in cut))
        if weights and not rule.light:
            self._product(region, node, rule, cut_factors, made, activations, weights)
            return
        kept = frozenset(
            f for f in cut_factors if f in made and all(f in cut_by or f not in fs for _, fs, cut_by in cut)
        )
        reduced = frozenset(f for f in cut_factors if f not in made and f >= 0)
        if cut_factors and not kept:
            meets = not reduced
            result = max(node.outputs, key=lambda v: graph.types[v].nbytes)
            # A product's gradient is cut as its operands are, of a whole gradient: none comes back.
            mirrored = rule.light and not meets
            self._send(region, node, result, "all_gather" if meets else "all_reduce", mirrored=mirrored)
        for value, factors in zip(node.outputs, rule.results, strict=True):
            self.cut[here, value] = frozenset(d for d, f in enumerate(factors) if f in kept)
        if (
            len(activations) == 1
            and len(pairs) == 1
            and graph.types[node.outputs[0]].size == graph.types[activations[0][0]].size
        ):
            self.same[here, node.outputs[0]] = self._root((here, activations[0][0]))

    def _product(
        self,
        region: Region,
        node: Node,
        rule: ShardingRule,
        cut_factors: frozenset[int],
        made: set[int],
        activations: Sequence[tuple[int, tuple[int, ...]]],
        weights: Sequence[tuple[int, tuple[int, ...]]],
    ) -> None:
        """Adds what a product of an activation with a weight sends, by which of the weight's dimensions are cut."""
        of_weights = {f for _, factors in weights for f in factors if f >= 0}
        shared = {f for _, factors in activations for f in factors}
        unfinished = frozenset(cut_factors & made)
        if cut_factors and unfinished:
            kept = unfinished
        # Rows are cut; an embedding shares no dimension with the tokens that it is read at.
        elif cut_factors or not of_weights & shared:
            kept = frozenset()
            self._send(region, node, node.outputs[0], "all_reduce", mirrored=False)
        else:
            kept = frozenset(f for f in of_weights - shared if f in made and rule.factors[f].size % self.parts == 0)
            self._columns(region, node, activations[0][0], rows=not kept)
        for value, factors in zip(node.outputs, rule.results, strict=True):
            self.cut[region.number, value] = frozenset(d for d, f in enumerate(factors) if f in kept)

    def _columns(self, region: Region, node: Node, value: int, *, rows: bool) -> None:
        """Adds what a product sends that reads a whole activation; with the weight cut by `rows`, its result too."""
        kind = "all_gather" if rows else "all_reduce"
        if rows:
            self._send(region, node, node.outputs[0], "all_reduce", mirrored=False)
        if self.style.sequence:
            self._add(region, node, value, "all_gather", "recomputed" if when(node) == "recomputed" else "backward")
        root = self._root((region.number, value))
        if root not in self.read and phase(node) == "forward" and self._has_gradient(region, value):
            self.read.add(root)
            self._add(region, node, value, kind, "backward")

    def _has_gradient(self, region: Region, value: int) -> bool:
        """Whether a value depends on a parameter: only then the backward pass goes on."""
        bits = self.program.sources.get((region.number, value), 0)
        return any(bits >> i & 1 for i in self.program.parameters)

    def _copy(self, value: Value, result: Value) -> None:
        self.cut[result] = self.cut.get(value, frozenset())
        self.same[result] = self._root(value)

    def _root(self, value: Value) -> Value:
        return self.same.get(value, value)

    def _send(self, region: Region, node: Node, value: int, kind: collectives.Kind, *, mirrored: bool) -> None:
        self._add(region, node, value, kind, "recomputed" if when(node) == "recomputed" else "forward")
        if mirrored and phase(node) == "forward":
            self._add(region, node, value, kind, "backward")

    def _add(self, region: Region, node: Node, value: int, kind: collectives.Kind, phase: str) -> None:
        mesh, type = self.program.mesh, region.graph.types[value]
        parts = math.prod(map(mesh.axis_size, self.style.data)) if (region.number, value) in self.program.batch else 1
        nbytes = type.nbytes // parts
        self.allowed.append(
            Allowed(
                role="activation gradient" if phase == "backward" else "activation",
                phase=phase,
                axes=self.style.tensor,
                layer=layer_of(node.scope),
                count=region.trips,
                nbytes=nbytes * region.trips,
                wire=on_wire(kind, nbytes * region.trips),
                seconds=region.trips * seconds_of(self.program, kind, self.style.tensor, nbytes),
            )
        )
