"""The time that arrays lie beside the chip where two cores share every kernel, each with a memory of its own.

A loop over elements runs on both cores alike, and its result may be written on the chip. Products, gathers, scatters
and collectives are cut, either core has a part of the result, and so it is written beside the chip. The first kernel
that reads it does so there. Meanwhile it is copied to both cores, where the second and all others find it if there is
room: from then on it has no place beside the chip. So it is with arguments, whose places are free once they are copied.

Reference: memory spaces and live ranges that libtpu 0.0.42 writes with `xla_dump_to` for TPU v5p, of which every result
of a loop was on the chip (260 of 265) and none of another kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.gpu_fusion import FUSIBLE
from passes.memory.liveness import Buffer, Lifetimes
from passes.memory.operations import Operation

LOOPS = frozenset({*FUSIBLE, "reduce"}) - {"gather"}
"""Kinds of which a kernel is a loop over elements."""

UNCOUNTED = frozenset({"literal", "bitcast"})
"""Kinds that are no operation of a kernel."""


def beside_chip(
    program: DeviceProgram, kernels: Sequence[Kernel], lifetimes: Lifetimes, begins: Sequence[int]
) -> Callable[[Buffer], int]:
    """The last moment in which a buffer has to lie beside the chip, -1 where it may be on the chip all the while.

    Kernel k begins in moment `begins[k]`. Sums are no readers: what writes an array takes those of it as well.
    """
    cut = {kernel.operation for kernel in kernels if not is_loop(program.operations, kernel)}
    at = dict(zip(lifetimes.order, begins, strict=False))

    def moment(buffer: Buffer) -> int:
        if cut.isdisjoint(buffer.operations):
            return -1
        last = begins[buffer.last + 1] - 1
        made = buffer.operations[-1]
        if made not in cut:
            return last
        readers = lifetimes.readers.get(made, ())
        read = sorted(at[reader] for reader in readers if program.operations[reader].kind != "reduce")
        return min([last, *read[1:2]])

    return moment


def is_loop(operations: Sequence[Operation], kernel: Kernel) -> bool:
    """Whether a kernel has several operations, each a loop over elements, or is an argument, which may be copied."""
    if operations[kernel.operation].kind == "input":
        return True
    reads, within, seen = set(kernel.reads), [kernel.operation], set[int]()
    while within:
        index = within.pop()
        if index in seen or index in reads:
            continue
        if operations[index].kind not in LOOPS:
            return False
        seen.add(index)
        within.extend(operations[index].operands)
    return sum(operations[index].kind not in UNCOUNTED for index in seen) > 1
