"""The tables of a program for TPUs, which lie beside the chip from the beginning to the end: one for each copy to the
chip or from it, and one for each kernel that writes several arrays.

Reference: offsets that libtpu 0.0.42 writes with `xla_dump_to`: on v5p 40 small steps have 87 to 718 tables and two of
gigabytes 191 and 321, a Wide-ResNet on v5e 720; every argument is copied once. Where nothing else would lie beside the
chip, there are none: `memory_analysis()` has no temporaries then.
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.liveness import Lifetimes
from passes.memory.two_cores import is_loop

TABLE_NBYTES = 16 * 2**10
"""The bytes from one table to the next, by those offsets."""


def tables(program: DeviceProgram, kernels: Sequence[Kernel], lifetimes: Lifetimes) -> int:
    """The number of tables of a program.

    Every argument is copied to the chip, every result of a loop from it, and to it what lies beside it, sums that
    products take included, unless the next kernel alone reads that. One kernel writes a new value and the one that
    follows from it, and one the sums of an array and what else it makes of it.
    """
    operations, returned = program.operations, set(program.outputs)
    loops = {kernel.operation for kernel in kernels if is_loop(operations, kernel)}
    arguments = [o for o in program.inputs if lifetimes.readers.get(o)]
    results = [o for o in returned & loops if operations[o].kind != "input"]
    cut = {kernel.operation for kernel in kernels} - loops
    cut |= {k.operation for k in kernels if operations[k.operation].kind == "reduce" and not cut.isdisjoint(k.reads)}
    at = {o: position for position, o in enumerate(lifetimes.order)}
    copied = [o for o in cut - returned if any(at[r] > at[o] + 1 for r in lifetimes.readers.get(o, ()))]
    updates = [kernel for kernel in kernels if kernel.operation in returned and not returned.isdisjoint(kernel.reads)]
    added = {
        max(kernel.reads, key=lambda o: operations[o].size)
        for kernel in kernels
        if operations[kernel.operation].kind == "reduce" and kernel.reads
    }
    return len(arguments) + len(results) + len(copied) + len(updates) + len(added)
