"""The arrays of a device while a step runs: those at the peak by cause, and what a compiler's model reports of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from passes.ir import Node, Phase, phase

CAUSES = (
    "parameters",
    "optimizer state",
    "other arguments",
    "outputs",
    "gradients",
    "saved for backward",
    "collective buffers",
    "transients",
)
PERSISTENT = CAUSES[:3]
HOLDERS = 10
"""The largest holders of bytes that a report names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """An array at the peak: an input by its name, anything else by its primitive and source line, and its `layer`."""

    name: str
    nbytes: int
    cause: str
    layer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one device: at the peak by cause, `where` it is, its largest `holders`, and `over_time`, [kernels].

    `layers` are those of temporaries at the peak by the layer of the model that computes them.
    """

    nbytes: Mapping[str, int]
    where: str
    holders: tuple[Holder, ...]
    over_time: tuple[int, ...]
    layers: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def peak_nbytes(self) -> int:
        """All causes together."""
        return sum(self.nbytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Temporaries:
    """The bytes that a step needs on one device beside arguments and outputs, by a compiler's model.

    `holders` are live together at the busiest moment, which is at the source line `where`; `gaps_nbytes` are lost
    between them and in tables of copies; `over_time` are live bytes as each kernel runs, gaps left out, [kernels].
    """

    where: str
    holders: tuple[Holder, ...]
    gaps_nbytes: int
    over_time: tuple[int, ...]


def phase_of(node: Node) -> Phase:
    """The phase of a node; that of a loop over microbatches is `backward`, where its gradients are made."""
    own_phase = phase(node)
    if own_phase != "apply" or not node.subgraphs:
        return own_phase
    inside = {phase_of(inner) for body in node.subgraphs for inner in body.nodes}
    if "backward" in inside:
        return "backward"
    return "forward" if "forward" in inside else "apply"
