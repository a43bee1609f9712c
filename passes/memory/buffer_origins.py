"""The origins of buffers: the array that is in each by its name, its cause, and the layer that computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from passes.ir import Graph, Phase
from passes.layers import layer_names
from passes.memory.holders import Holder, phase_of
from passes.memory.liveness import Buffer
from passes.memory.operations import Operation
from passes.memory.packing import Span


class Origins:
    """The names of a graph's values and the phases of its nodes, by which buffers are reported."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.input_names = dict(zip(graph.inputs, graph.input_names, strict=False))
        self.phases: list[Phase] = [phase_of(node) for node in graph.nodes]

    def holder(self, made: Made, nbytes: int) -> Holder:
        """A buffer of that size by name and cause; nothing is said of the readers of what is moved out of a loop."""
        written = [made.operations[o] for o in made.buffer.operations]
        cause = self._cause(made, written)
        node = self.graph.producers.get(written[-1].value, written[-1].node)
        maker = self.graph.nodes[node] if 0 <= node < len(self.graph.nodes) else None
        layer = layer_names.layer_of(maker.scope, maker.source) if maker else layer_names.UPDATE
        return Holder(name=self._name(written[-1].value), nbytes=nbytes, cause=cause, layer=layer)

    def _cause(self, made: Made, written: Sequence[Operation]) -> str:
        if made.readers is None:
            return "collective buffers"
        readers = {self._when(made.operations[r].node) for o in made.buffer.operations for r in made.readers.get(o, ())}
        makers = {self._when(self.graph.producers.get(o.value, o.node)) for o in written}
        if "backward" in makers and "apply" in readers:
            return "gradients"
        if any(o.kind in ("collective", "result") for o in written):
            return "collective buffers"
        return "saved for backward" if "forward" in makers and "backward" in readers else "transients"

    def _when(self, node: int) -> Phase:
        return self.phases[node] if 0 <= node < len(self.phases) else "apply"

    def _name(self, value: int) -> str:
        """A value's input name, or the primitive that computes it, with its source line."""
        if value in self.input_names:
            return self.input_names[value]
        if value not in self.graph.producers:
            return "constant"
        node = self.graph.nodes[self.graph.producers[value]]
        return f"{node.primitive} at {node.source}" if node.source else node.primitive


class Made(NamedTuple):
    """A buffer of a program's `operations`, and the `readers` of each where they are known."""

    origins: Origins
    operations: Sequence[Operation]
    buffer: Buffer
    readers: Mapping[int, Sequence[int]] | None = None


def holder_of(span: Span) -> Holder:
    """The array in a span that was made of a buffer, by name and cause."""
    made = cast("Made", span.made_by)
    return made.origins.holder(made, span.nbytes)
