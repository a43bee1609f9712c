"""The collectives of expert parallelism, derived from the program alone, and the seconds of data parallelism with it.

A weight holds experts where a product shares a dimension with it that the result has too: [experts, group, slot, h] by
[experts, h, w]. Experts are cut over the devices that the batch is cut over, so tokens meet them by exchanges: what
enters the first product of a layer's experts goes from the batch's placement to that of the experts, what the last one
makes goes back, and so do their gradients: two all-to-alls a layer forward, two backward, of all slots by the number of
devices each; as many more as are recomputed. No parameter of an expert is sent, no gradient of it reduced: the device
that has it sees all its tokens.

Reference: Lepikhin et al., "GShard" (2006.16668), section 3.2; Rajbhandari et al., "DeepSpeed-MoE" (ICML 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.causes import Program, computes_activations, layer_of, when
from benchmarks.megatron import is_matrix
from benchmarks.regions import Region, Value
from benchmarks.verdicts import Allowed, Verdict, on_wire, seconds_of
from passes.ir import Node
from passes.rules import rule_of


@dataclass(kw_only=True)
class _Layer:
    """One layer's experts in one pass: the value that enters their first product, and the last product's result."""

    region: Region
    node: Node
    entering: int
    leaving: int


@dataclass(kw_only=True)
class Experts:
    """The layers of experts of a program and the positions of the parameters that hold them.

    `numbers` are how many experts each weight holds.
    """

    program: Program
    layers: list[_Layer] = field(default_factory=list[_Layer])
    parameters: set[int] = field(default_factory=set[int])
    numbers: set[int] = field(default_factory=set[int])
    inside: dict[Value, _Layer] = field(default_factory=dict[Value, _Layer])

    def __post_init__(self) -> None:
        for region in self.program.root.all():
            for index, node in enumerate(region.graph.nodes):
                if index not in region.controls and computes_activations(node):
                    self._node(region, node)

    def _node(self, region: Region, node: Node) -> None:
        """Records a product with experts; its result is followed through operators of its size to the next one."""
        graph, here, rule = region.graph, region.number, rule_of(node, region.graph)
        pairs = list(zip(node.inputs, rule.operands, strict=True))
        if rule.light or rule.alias:
            known = [v for v in node.inputs if (here, v) in self.inside]
            for value in node.outputs if known else ():
                if graph.types[value].size == graph.types[known[0]].size:
                    self.inside[here, value] = self.inside[here, known[0]]
            return
        activations = [(v, fs) for v, fs in pairs if self.program.depends_on_batch((here, v))]
        weights = [(v, fs) for v, fs in pairs if is_matrix(self.program, region, v)]
        if len(activations) != 1 or len(weights) != 1:
            return
        shared = (
            set(activations[0][1]) & set(weights[0][1]) & {f for factors in rule.results for f in factors if f >= 0}
        )
        if not shared:
            return
        layer = self.inside.get((here, activations[0][0]))
        if layer is None:
            layer = _Layer(region=region, node=node, entering=activations[0][0], leaving=-1)
            self.layers.append(layer)
        layer.leaving = node.outputs[0]
        self.inside[here, node.outputs[0]] = layer
        self.parameters.add(self.program.sources[here, weights[0][0]].bit_length() - 1)
        self.numbers.add(math.prod(rule.factors[f].size for f in shared))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the plan cuts experts over."""
        graph, inputs = self.program.graph, self.program.plan.inputs
        cut = [
            axis
            for i in sorted(self.parameters)
            for size, axes in zip(graph.types[graph.inputs[i]].shape, inputs[i].dims, strict=True)
            for axis in axes
            if size in self.numbers
        ]
        return tuple(dict.fromkeys(cut))

    def exchanges(self, axes: Sequence[str]) -> Iterator[Allowed]:
        """The all-to-alls of experts and batch that are cut over `axes`."""
        for layer in self.layers:
            phases = ["recomputed"] if when(layer.node) == "recomputed" else ["forward", "backward"]
            for value in (layer.entering, layer.leaving):
                for phase in phases:
                    yield self._exchange(layer, value, phase, axes)

    def _exchange(self, layer: _Layer, value: int, phase: str, axes: Sequence[str]) -> Allowed:
        mesh, trips = self.program.mesh, layer.region.trips
        nbytes = layer.region.graph.types[value].nbytes // math.prod(map(mesh.axis_size, axes))
        return Allowed(
            role="activation gradient" if phase == "backward" else "activation",
            phase=phase,
            axes=tuple(axes),
            layer=layer_of(layer.node.scope),
            count=trips,
            nbytes=nbytes * trips,
            wire=on_wire("all_to_all", nbytes * trips),
            seconds=trips * seconds_of(self.program, "all_to_all", axes, nbytes),
        )


def seconds_with_experts(program: Program, verdict: Verdict) -> float | None:
    """Seconds of a data-parallel or ZeRO step with experts cut over all devices, and without what is unexplained in it.

    None where it has no experts, or where the devices do not divide them.
    """
    experts, mesh = Experts(program=program), program.mesh
    if not experts.layers or any(number % mesh.size for number in experts.numbers):
        return None
    remaining = sum(s.seconds * s.waited_share for s in program.sent() if s.parameter in experts.parameters)
    remaining -= sum(f.waited_seconds for f in verdict.findings if f.sent.parameter in experts.parameters)
    sent = sum(exchange.seconds for exchange in experts.exchanges(mesh.axes))
    return program.plan.step_seconds - verdict.waited_seconds - remaining + sent
