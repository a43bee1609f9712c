"""Donated arguments of a pipeline: which of its inputs give their buffers away, and to which outputs of which segment.

A step in one program leaves that to `jax.jit`. A pipeline's state is updated by segments of several stages: the last
segment that reads an input takes its buffer for an output of the same type and sharding, its own next value if that is
there. What no segment can reuse, but `jax.jit` would, is deleted behind the step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.frontend import Traced
from autopar.runtime.program import Feed, Free, Instruction, Run, Segment, Send, Slot
from passes.ir import TensorType

Pair = tuple[int, int]
"""Positions of an input and of the output that takes its buffer."""


def reused(traced: Traced) -> frozenset[int]:
    """The donated inputs whose buffers `jax.jit` would give to outputs: those are gone after a call, others are not.

    Outputs in order each take the first donated input that is left of their shape and dtype; inputs that nothing reads
    are none of the program's.
    """
    graph = traced.graph
    read = {v for node in graph.nodes for v in node.inputs} | set(graph.outputs)
    left: dict[TensorType, deque[int]] = {}
    for position, (value, donated) in enumerate(zip(graph.inputs, traced.donated, strict=True)):
        if donated and value in read:
            type = graph.types[value]
            if position in traced.stacked:
                count, rows, *rest = type.shape
                type = replace(type, shape=(count * rows, *rest))
            left.setdefault(type, deque()).append(position)
    found: set[int] = set()
    for value in graph.outputs:
        if queue := left.get(graph.types[value]):
            found.add(queue.popleft())
    return frozenset(found)


def shared(instructions: Iterable[Instruction]) -> Mapping[Slot, Slot]:
    """For slots whose arrays may share buffers, one slot that stands for all of them; others stand for themselves.

    A transfer between stages of one submesh may hand on the very array.
    """
    found: dict[Slot, Slot] = {}
    for instruction in instructions:
        if isinstance(instruction, Send):
            source = instruction.struct.sharding
            if source is None or source.device_set & instruction.sharding.device_set:
                found[instruction.target] = found.get(instruction.source, instruction.source)
    return found


def donating(
    instructions: Sequence[Instruction],
    segments: Sequence[Segment],
    feeds: Sequence[Feed],
    arguments: frozenset[int],
    successors: Mapping[int, int],
) -> tuple[list[Instruction], list[Segment]]:
    """Instructions and segments in which the buffers of these `arguments` are reused by the last that reads them.

    `successors` maps a value of the step to its next value, where that is known.
    """
    one = shared(instructions)
    last = {one.get(slot, slot): at for at, each in enumerate(instructions) for slot in _touched(each)}
    fed = Counter(one.get(feed.slot, feed.slot) for feed in feeds)
    given = {f.slot for f in feeds if f.slice is None and f.argument in arguments and fed[one.get(f.slot, f.slot)] == 1}
    runs = Counter(each.segment for each in instructions if isinstance(each, Run))
    found, changed = list(instructions), list(segments)
    for at, each in enumerate(instructions):
        if not isinstance(each, Run) or runs[each.segment] > 1:
            continue
        here = Counter(one.get(slot, slot) for slot in each.inputs)
        free = [
            i
            for i, slot in enumerate(each.inputs)
            if slot in given and last[one.get(slot, slot)] == at and here[one.get(slot, slot)] == 1
        ]
        segment = segments[each.segment]
        pairs = _paired(segment, free, successors)
        if pairs:
            inputs, outputs = _orders(segment, pairs)
            changed[each.segment] = _reordered(segment, inputs, outputs, len(pairs))
            found[at] = replace(
                each,
                inputs=tuple(each.inputs[i] for i in inputs),
                outputs=tuple(each.outputs[o] for o in outputs),
            )
    return found, changed


def _touched(instruction: Instruction) -> tuple[Slot, ...]:
    match instruction:
        case Run():
            return (*instruction.inputs, *instruction.outputs)
        case Send():
            return (instruction.source, instruction.target)
        case Free():
            return ()


def _paired(segment: Segment, free: Sequence[int], successors: Mapping[int, int]) -> list[Pair]:
    """Outputs that can take the buffers of the inputs at `free`: an input's next value first, then what is like it."""

    def fits(i: int, o: int) -> bool:
        mine, theirs = segment.in_structs[i], segment.out_structs[o]
        alike = (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        return alike and segment.in_shardings[i] == segment.out_shardings[o]

    left = dict(enumerate(segment.outputs))
    found: list[Pair] = []
    for by_name in (True, False):
        for i in free:
            if any(i == taken for taken, _ in found):
                continue
            value, _ = segment.inputs[i]
            ways = (o for o, (v, _) in left.items() if not by_name or v == successors.get(value))
            if (o := next((o for o in ways if fits(i, o)), None)) is not None:
                del left[o]
                found.append((i, o))
    return found


def _orders(segment: Segment, pairs: Sequence[Pair]) -> tuple[list[int], list[int]]:
    """Inputs and outputs in an order in which `jax.jit` pairs them so: it has no other way to be told.

    It gives each output in order the first donated input that is left of its type.
    """
    inputs, outputs = [i for i, _ in pairs], [o for _, o in pairs]
    inputs += [i for i in range(len(segment.inputs)) if i not in inputs]
    outputs += [o for o in range(len(segment.outputs)) if o not in outputs]
    return inputs, outputs


def _reordered(segment: Segment, inputs: Sequence[int], outputs: Sequence[int], donated: int) -> Segment:
    """The segment with inputs and outputs in this order; the first `donated` inputs are."""
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
