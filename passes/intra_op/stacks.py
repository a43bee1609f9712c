"""Seconds of the slices that a loop over layers takes out of stacked arrays and writes into them, one by one.

No operator of the body has them: written out layer by layer, a program needs neither. XLA copies a slice into its stack
unless the operator that makes it writes it there itself, which it does where no other reads it and where it is no
product; and it copies a slice out for a product, while other operators read it in its place.

Reference: the bodies of loops over the layers of a GPT that XLA compiles (jaxlib 0.10.2): for H100 32 kernels of 53
write stacks going forward, 12 of 64 read and 12 write them going backward; for CPUs 31 of 68 write them going forward,
8 of 77 read and 12 write them going backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from passes.cluster import Mesh
from passes.ir import Body, Control
from passes.placement import Grouping

_PASSES = 2
"""A copy reads an array and writes it: the times that its bytes pass memory."""


def copies(control: Control, groupings: Sequence[Grouping]) -> Mapping[int, int]:
    """The copies of slices that a loop makes each time that it runs, by the port that the slices come or leave by.

    Loops with a whole step in each iteration have none: what microbatches hand on are arrays of their own.
    """
    taken, kept = ({use.port for use in uses if use.stacked} for uses in (control.operands, control.results))
    numbers: dict[int, int] = {}
    for body, grouping in zip(control.bodies, groupings, strict=True):
        if body.is_step:
            continue
        entering = [(v, port) for v, port in zip(body.graph.inputs, body.inputs, strict=True) if port in taken]
        leaving = [(v, port) for v, port in zip(body.graph.outputs, body.outputs, strict=True) if port in kept]
        copied = [port for v, port in entering if _is_multiplied(body, grouping, v)]
        copied += [port for v, port in leaving if not _is_written_there(body, grouping, v)]
        numbers |= dict.fromkeys(copied, body.trips)
    return numbers


def copy_seconds(nbytes: float, mesh: Mesh) -> float:
    """The seconds of a copy of so many bytes on one device of a mesh."""
    device = mesh.cluster.group().device
    return _PASSES * nbytes / device.achieved_bytes_per_second + device.launch_seconds


def _is_multiplied(body: Body, grouping: Grouping, value: int) -> bool:
    """Whether a product reads a value of a body."""
    return any(grouping.rules[reader].is_product for reader in body.graph.consumers.get(value, ()))


def _is_written_there(body: Body, grouping: Grouping, value: int) -> bool:
    """Whether the operator that makes a value of a body writes nothing but its slice of the stack."""
    producer = body.graph.producers.get(value)
    is_made = producer is not None and not grouping.rules[producer].is_product
    return is_made and not body.graph.consumers.get(value) and body.graph.outputs.count(value) == 1
