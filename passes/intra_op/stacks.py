"""Seconds of copying slices out of stacked arrays and into them, in loops over layers.

Written out layer by layer, a program needs no such copies. XLA copies a slice into its stack unless the operator that
makes it writes it there itself, which it does where no other operator reads it and where it is no product; and it
copies a slice out for a product, while other operators read it in place.

Reference: the bodies of loops over the layers of a GPT that XLA compiles (jaxlib 0.10.2): for H100 32 kernels of 53
write stacks going forward, 12 of 64 read and 12 write them going backward; for CPUs 31 of 68 write them going forward,
8 of 77 read and 12 write them going backward. `python -m benchmarks.scanned_layers` holds steps beside each other that
stack more and less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from passes.cluster import Mesh
from passes.ir import Body, Control
from passes.memory import compiler_of
from passes.placement import Grouping

_PASSES = 2
"""The times that the bytes of a copy pass memory: it reads an array and writes it."""

_PASSES_TO_BEGIN = MappingProxyType({"cpu": 2, "gpu": 0, "tpu": 0})
"""The times that a stack's bytes pass memory before a loop writes into it. XLA (jaxlib 0.10.2) begins with zeros: for
CPUs it copies them into each stack, and for TPUs it leaves them out. For GPUs a kernel writes them into all, which is
not charged: scanned steps are predicted within 3 % of XLA:GPU's own estimates without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The slices of a stack that a loop copies each time that it runs, and those that it allocates."""

    slices: int = 0
    begun: int = 0

    def seconds(self, nbytes: float, mesh: Mesh) -> float:
        """The seconds of copying slices of `nbytes` on one device of a mesh; 0 where software unrolls its loops."""
        device = mesh.cluster.group().device
        if device.unrolls:
            return 0.0
        passes = _PASSES * self.slices + _PASSES_TO_BEGIN[compiler_of(device)] * self.begun
        return passes * nbytes / device.achieved_bytes_per_second + self.slices * device.launch_seconds


def copies(control: Control, groupings: Sequence[Grouping]) -> Mapping[int, Copies]:
    """The copies of slices that a loop makes each time that it runs, by the port that the slices enter or leave by.

    Loops with a whole step in each iteration make none: what microbatches hand on are arrays of their own.
    """
    taken, kept = ({use.port for use in uses if use.stacked} for uses in (control.operands, control.results))
    of_port: dict[int, Copies] = {}
    for body, grouping in zip(control.bodies, groupings, strict=True):
        if body.is_step:
            continue
        for value, port in zip(body.graph.inputs, body.inputs, strict=True):
            if port in taken and _is_multiplied(body, grouping, value):
                of_port[port] = Copies(slices=body.trips)
        for value, port in zip(body.graph.outputs, body.outputs, strict=True):
            if port in kept:
                is_copied = not _is_written_there(body, grouping, value)
                of_port[port] = Copies(slices=body.trips if is_copied else 0, begun=body.trips)
    return of_port


def _is_multiplied(body: Body, grouping: Grouping, value: int) -> bool:
    """Whether a product reads a value of a body."""
    return any(grouping.rules[reader].is_product for reader in body.graph.consumers.get(value, ()))


def _is_written_there(body: Body, grouping: Grouping, value: int) -> bool:
    """Whether the operator that makes a value of a body writes only that, and straight into the stack."""
    producer = body.graph.producers.get(value)
    is_made = producer is not None and not grouping.rules[producer].is_product
    return is_made and not body.graph.consumers.get(value) and body.graph.outputs.count(value) == 1
