"""The reduce-scatters that XLA's GPU compiler sends in the next iteration of a loop.

Where a loop reduces and scatters an array and only stacks what it receives, XLA sends it while the next iteration is
computed: the first iteration is computed before the loop, what is to be sent is carried from each iteration to the
next, and what the last one made is sent after the loop. So the gradients of a whole layer are in memory beside the next
layer's. Of what lies in another order than it is read in, the loop reads a copy, and the iteration before it the
original: both are in memory.

Reference: CollectivePipeliner with PipeliningDirection::kForward, which gpu_compiler.cc runs for reduce-scatters alone
by default, and what `xla_dump_to` has of scanned GPT and LLaMA under ZeRO-3 (`loop_peel_param`), as of jaxlib 0.10.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from passes.memory.operations import Operation

FORMATTING = frozenset({"bitcast", "transpose"})
"""Kinds that only change how an array lies; conversions may stand between a collective and the stack, too."""


def carried_on(
    operations: Sequence[Operation], outputs: Sequence[int], stacked: Sequence[int]
) -> tuple[list[Operation], list[int]]:
    """The operations of a loop's body with collectives that send what the iteration before made, and the outputs that
    stack what these receive.

    What the iteration before made is in as many new inputs before all other operations. The last operation, if there
    are any, is a new one that waits for what is carried on.
    """
    readers = Counter(o for operation in operations for o in operation.operands)
    readers.update(outputs)
    sent = dict[int, tuple[int, int]]()
    for output in stacked:
        (made,) = operations[outputs[output]].operands[:1]
        if (reader := _sent(operations, made, readers)) >= 0:
            sent[reader] = (output, operations[reader].operands[0])
    if not sent:
        return list(operations), []
    first, entering = len(sent), list[Operation]()
    changed = [operation.reading(tuple([o + first for o in operation.operands])) for operation in operations]
    for reader, (output, made) in sent.items():
        changed[reader] = changed[reader].reading((len(entering), *changed[reader].operands[1:]))
        entering.append(operations[made]._replace(kind="input", operands=(), tag=("pending", output)))
    carried = tuple([made + first for _, made in sent.values()])
    end = Operation("opaque", carried, (0,), "bool", -1, tag=("pending", carried))
    return [*entering, *changed, end], [output for output, _ in sent.values()]


def _sent(operations: Sequence[Operation], made: int, readers: Counter[int]) -> int:
    """The operation that first reads what a reduce-scatter sends of which a stacked array follows alone, -1 if none."""
    *_, received = _below(operations, made, readers)
    if operations[received].name != "reduce_scatter" or readers[received] > 1:
        return -1
    (sent,) = operations[received].operands
    reader = received
    while operations[sent].kind in FORMATTING and readers[sent] == 1:
        reader, (sent,) = sent, operations[sent].operands
    return -1 if operations[sent].kind in ("input", "literal") else reader


def _below(operations: Sequence[Operation], index: int, readers: Counter[int]) -> Iterator[int]:
    """The operations that one follows from alone, itself first, each read by the one above it only."""
    yield index
    while operations[index].kind in FORMATTING or operations[index].is_conversion:
        if readers[index] > 1:
            return
        (index,) = operations[index].operands
        yield index
