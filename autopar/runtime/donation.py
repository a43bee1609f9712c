"""Donated arguments of a pipeline: which of its inputs give up their buffers, and to which outputs of which segment.

A step in one program leaves that to `jax.jit`. A pipeline's state is updated by segments of several stages: the last
segment that reads an input reuses its buffer for an output of the same type and sharding, its own next value if
possible. Inputs that no segment can reuse, but `jax.jit` would, are deleted after the step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.frontend import Traced
from autopar.runtime.program import Feed, Free, Instruction, Run, Segment, Send, Slot
from passes.ir import Graph, TensorType

Pair = tuple[int, int]
"""Positions of an input and of the output that takes its buffer."""


def reused(traced: Traced) -> frozenset[int]:
    """The donated inputs whose buffers `jax.jit` would give to outputs: only these are gone after a call.

    Each output in order takes the first donated input that is left with its shape and dtype; inputs that its program
    does not read are not part of that program.
    """
    graph = traced.graph
    unclaimed: dict[TensorType, deque[int]] = {}
    for position, (value, donated, read) in enumerate(zip(graph.inputs, traced.donated, traced.read, strict=True)):
        if donated and read:
            type = graph.types[value]
            if position in traced.stacked:
                count, rows, *inner_shape = type.shape
                type = replace(type, shape=(count * rows, *inner_shape))
            unclaimed.setdefault(type, deque()).append(position)
    positions: set[int] = set()
    for value in graph.outputs:
        if queue := unclaimed.get(graph.types[value]):
            positions.add(queue.popleft())
    return frozenset(positions)


def unread(graph: Graph) -> frozenset[int]:
    """The inputs that nothing in the graph reads, such as an array without elements."""
    read = {v for node in graph.nodes for v in node.inputs} | set(graph.outputs)
    return frozenset(i for i, value in enumerate(graph.inputs) if value not in read)


def shared(instructions: Iterable[Instruction]) -> Mapping[Slot, Slot]:
    """The slot that stands for all slots whose arrays may share a buffer, by each such slot; other slots are left out.

    A transfer between stages of one submesh may return the same array.
    """
    representative: dict[Slot, Slot] = {}
    for instruction in instructions:
        if isinstance(instruction, Send):
            source = instruction.struct.sharding
            if source is None or source.device_set & instruction.sharding.device_set:
                representative[instruction.target] = representative.get(instruction.source, instruction.source)
    return representative


def donating(
    instructions: Sequence[Instruction],
    segments: Sequence[Segment],
    feeds: Sequence[Feed],
    arguments: frozenset[int],
    successors: Mapping[int, int],
) -> tuple[list[Instruction], list[Segment]]:
    """The instructions and segments in which the buffers of these `arguments` are reused.

    `successors` maps a value of the step to its next value, where that is known.
    """
    representative = shared(instructions)
    last = {
        representative.get(slot, slot): at
        for at, instruction in enumerate(instructions)
        for slot in _touched(instruction)
    }
    fed = Counter(representative.get(feed.slot, feed.slot) for feed in feeds)
    given = {
        f.slot
        for f in feeds
        if f.slice is None and f.argument in arguments and fed[representative.get(f.slot, f.slot)] == 1
    }
    runs = Counter(instruction.segment for instruction in instructions if isinstance(instruction, Run))
    rewritten, changed = list(instructions), list(segments)
    for at, instruction in enumerate(instructions):
        if not isinstance(instruction, Run) or runs[instruction.segment] > 1:
            continue
        reads = Counter(representative.get(slot, slot) for slot in instruction.inputs)
        free = [
            i
            for i, slot in enumerate(instruction.inputs)
            if slot in given
            and last[representative.get(slot, slot)] == at
            and reads[representative.get(slot, slot)] == 1
        ]
        segment = segments[instruction.segment]
        pairs = _paired(segment, free, successors)
        if pairs:
            inputs, outputs = _orders(segment, pairs)
            changed[instruction.segment] = _reordered(segment, inputs, outputs, len(pairs))
            rewritten[at] = replace(
                instruction,
                inputs=tuple(instruction.inputs[i] for i in inputs),
                outputs=tuple(instruction.outputs[o] for o in outputs),
            )
    return rewritten, changed


def _touched(instruction: Instruction) -> tuple[Slot, ...]:
    match instruction:
        case Run():
            return (*instruction.inputs, *instruction.outputs)
        case Send():
            return (instruction.source, instruction.target)
        case Free():
            return ()


def _paired(segment: Segment, free: Sequence[int], successors: Mapping[int, int]) -> list[Pair]:
    """The pairs of an input at `free` and an output that can take its buffer: first its next value, then any of its
    type.
    """

    def fits(i: int, o: int) -> bool:
        mine, theirs = segment.in_structs[i], segment.out_structs[o]
        alike = (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        return alike and segment.in_shardings[i] == segment.out_shardings[o]

    unpaired = dict(enumerate(segment.outputs))
    pairs: list[Pair] = []
    for by_name in (True, False):
        for i in free:
            if any(i == taken for taken, _ in pairs):
                continue
            value, _ = segment.inputs[i]
            outputs = (o for o, (v, _) in unpaired.items() if not by_name or v == successors.get(value))
            if (o := next((o for o in outputs if fits(i, o)), None)) is not None:
                del unpaired[o]
                pairs.append((i, o))
    return pairs


def _orders(segment: Segment, pairs: Sequence[Pair]) -> tuple[list[int], list[int]]:
    """The orders of inputs and of outputs in which `jax.jit` pairs them as planned.

    It gives each output in order the first donated input of its type that is left.
    """
    inputs, outputs = [i for i, _ in pairs], [o for _, o in pairs]
    inputs += [i for i in range(len(segment.inputs)) if i not in inputs]
    outputs += [o for o in range(len(segment.outputs)) if o not in outputs]
    return inputs, outputs


def _reordered(segment: Segment, inputs: Sequence[int], outputs: Sequence[int], donated: int) -> Segment:
    """The segment with inputs and outputs in these orders; its first `donated` inputs are donated."""
    places = [inputs.index(i) for i in range(len(inputs))]
    function = segment.function

    def reordered(*given: object) -> tuple[object, ...]:
        results = function(*(given[place] for place in places))
        return tuple(results[o] for o in outputs)

    return replace(
        segment,
        function=reordered,
        inputs=tuple(segment.inputs[i] for i in inputs),
        outputs=tuple(segment.outputs[o] for o in outputs),
        in_shardings=tuple(segment.in_shardings[i] for i in inputs),
        out_shardings=tuple(segment.out_shardings[o] for o in outputs),
        in_structs=tuple(segment.in_structs[i] for i in inputs),
        out_structs=tuple(segment.out_structs[o] for o in outputs),
        donated=tuple(range(donated)),
    )
