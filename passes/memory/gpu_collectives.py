"""The collectives of a program as XLA's GPU compiler joins them, up to 30 MiB at a time.

They are joined in the order in which the outputs come to them: the first one that is not joined yet begins, and the
next ones follow until one is too many, or waits for one that is there. All-reduces of one dtype are laid side by side
first, reduced in that place, and cut apart by what reads them; all-gathers and reduce-scatters are sent together from
where they are.

Reference: CombineInstructionsByKey of xla/service/collective_combiner_utils.h under AllGatherCombiner,
AllReduceCombiner and ReduceScatterCombiner, and AllReduceContiguous, with
`xla_gpu_all_reduce_combine_threshold_bytes` and its like at their defaults, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from passes.memory.all_reduces import in_order, join, mask_of, parts
from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.gpu_fusion import RENAMED
from passes.memory.gpu_tasks import at_once, reads_of
from passes.memory.operations import Operation

COMBINED_NBYTES = 30 * 2**20
COMBINED = 256
"""The bytes and the number of tensors that are sent as one at most."""

KINDS = ("all_gather", "all_reduce", "reduce_scatter")
"""The kinds of collectives that are combined, in the order in which that is done."""


def with_combined(program: DeviceProgram, kernels: Sequence[Kernel]) -> tuple[DeviceProgram, Sequence[Kernel]]:
    """The program with collectives combined, and its kernels, which were fused before that."""
    operations, place = combined(program.operations, program.outputs, kernels)
    if len(operations) == len(program.operations):
        return program, kernels
    added = set(range(len(operations))) - set(place)
    moved = {place[kernel.operation]: _moved(kernel, place, operations) for kernel in kernels}
    for index in sorted(added):
        reads = tuple(dict.fromkeys(o for o in operations[index].operands if o in moved))  # numbers are not in memory
        over = reads if operations[index].name == "all_reduce" else ()
        moved[index] = Kernel(operation=index, reads=reads, over=over)
    for index, kernel in moved.items():
        if not added.isdisjoint(reads := operations[index].operands) and index not in added:
            moved[index] = replace(kernel, reads=reads, over=())

    def placed(old: Iterable[int]) -> tuple[int, ...]:
        return tuple([place[o] for o in old])

    combined_program = replace(
        program,
        operations=operations,
        inputs=placed(program.inputs),
        constants=placed(program.constants),
        outputs=placed(program.outputs),
        hoisted=placed(program.hoisted),
        sending=frozenset(placed(program.sending)),
    )
    return combined_program, [moved[index] for index in sorted(moved)]


def _moved(kernel: Kernel, place: Sequence[int], operations: Sequence[Operation]) -> Kernel:
    """A kernel at the new positions of its operations; it writes over none that is another name by now."""
    return replace(
        kernel,
        operation=place[kernel.operation],
        reads=tuple([place[o] for o in kernel.reads]),
        over=tuple([place[o] for o in kernel.over if operations[place[o]].kind not in RENAMED]),
        joint=tuple(sorted(place[o] for o in kernel.joint)),
    )


def combined(
    operations: Sequence[Operation], outputs: Sequence[int], kernels: Sequence[Kernel]
) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with collectives combined, in a valid order, and the new position of each old one.

    The order is that of the kernels that they were fused into.
    """
    joined = list(operations)
    for part in _parts(operations, outputs, kernels):
        if operations[part[0]].name == "all_reduce":
            _lay_out(joined, part)
        else:
            join(joined, part)
    return in_order(operations, joined)


def _parts(operations: Sequence[Operation], outputs: Sequence[int], fused: Sequence[Kernel]) -> Iterator[list[int]]:
    """The collectives that are sent as one, two or more."""
    every = [i for i, o in enumerate(operations) if o.kind == "collective" and o.name in KINDS]
    if len(every) < 2:
        return
    bits = {m: 1 << bit for bit, m in enumerate(every)}
    kernels, behind = _as_kernels(operations, fused), _behind(operations, bits, fused)
    first = partial(_first, operations, behind=behind, bits=bits)
    for kind in KINDS:
        yield from parts(kernels, outputs, [m for m in every if operations[m].name == kind], behind, bits, first)


def _as_kernels(operations: Sequence[Operation], every: Sequence[Kernel]) -> list[Operation]:
    """The operations, each with what its kernel reads as operands; those without a kernel are no operands.

    Where a kernel takes in what makes an operand, what that reads is listed last: so long sums end up backwards. Of
    kernels that are one, each has the operands of all.

    Reference: HloFusionInstruction::FuseInstruction, as of jaxlib 0.10.
    """
    written = {kernel.operation for kernel in every}
    kernels: list[Operation] = []
    for index, operation in enumerate(operations):
        if index not in written:  # no kernel lists it
            kernels.append(operation)
            continue
        listed = dict.fromkeys(operation.operands)
        if not written.issuperset(listed):
            pending, met = list(listed), set(listed)
            for o in pending:
                if o not in written:
                    del listed[o]
                    appended = [below for below in dict.fromkeys(operations[o].operands) if below not in met]
                    met.update(appended)
                    pending.extend(appended)
                    listed.update(dict.fromkeys(appended))
        kernels.append(operation.reading(tuple(listed)))
    read = list(kernels)
    for kernel in every:
        if kernel.joint:
            listed = dict.fromkeys(o for made in kernel.joint for o in kernels[made].operands)
            read[kernel.operation] = read[kernel.operation].reading(tuple([o for o in listed if o not in kernel.joint]))
    return read


def _behind(operations: Sequence[Operation], bits: Mapping[int, int], every: Sequence[Kernel]) -> dict[int, int]:
    """The members that each member waits for, as their bits, given the kernels."""
    waits: dict[int, int] = {}
    for group in at_once(every):
        reads = reads_of(group)
        for kernel in group:
            waits[kernel.operation] = mask_of(reads, waits, bits)
    return {m: waits.get(m, 0) for m in bits}


def _first(
    operations: Sequence[Operation], members: Sequence[int], *, behind: Mapping[int, int], bits: Mapping[int, int]
) -> list[int]:
    """The first members that are sent as one."""
    first = operations[members[0]]
    part, joint, nbytes, key = [members[0]], bits[members[0]], first.nbytes, _key(first)
    for m in members[1:] if nbytes <= COMBINED_NBYTES else ():
        if _key(operations[m]) != key or operations[m].nbytes > COMBINED_NBYTES:
            continue
        nbytes += operations[m].nbytes
        if nbytes > COMBINED_NBYTES or behind[m] & joint or len(part) == COMBINED:
            break
        part.append(m)
        joint |= bits[m]
    return part


def _key(operation: Operation) -> object:
    """The key of collectives that may be one."""
    if operation.name == "all_gather":
        return cast("tuple[object, ...]", operation.tag)[:3]
    return cast("tuple[object, ...]", operation.tag)[:3], operation.dtype


def _lay_out(operations: list[Operation], members: Sequence[int]) -> None:
    """Makes all-reduces cuts of one, of an array in which they lie side by side; both are added."""
    last, reads = operations[members[-1]], tuple(operations[m].operands[0] for m in members)
    elements = (sum(operations[m].size for m in members),)
    beside = len(operations)
    operations.append(
        last._replace(kind="opaque", operands=reads, shape=elements, value=-1, tag=("concatenate", beside))
    )
    operations.append(last._replace(operands=(beside,), shape=elements, value=-1, tag=("all_reduce", beside)))
    for m in members:
        operations[m] = operations[m]._replace(kind="opaque", operands=(beside + 1,), tag=("slice", m))
