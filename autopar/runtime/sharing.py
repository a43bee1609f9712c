"""The part of a pipeline's program that one of several processes runs.

Every process has the whole program and issues, in its order, the instructions in which its devices take part. A process
waits in two places. Before it issues a task it waits until fewer than `IN_FLIGHT` earlier ones are unfinished, or on
CPUs none that spans processes. And where an array comes from another process, its devices wait for the contents, or on
CPUs, if the array is large, the process does before it issues its reader. `waiting` has these rules as a graph, in
which `agree` looks for cycles before the first step.

**No schedule deadlocks.** Suppose that every process waits, and take the instruction that comes first in the program's
order of all that are issued and unfinished, or are next to be issued. Everything before it is finished, on all
processes: otherwise that would come first. So what it reads is there; the queues of its devices are empty, as they hold
instructions in the same order; the other processes that take part in it have nothing before it either, and issue their
share; and finished instructions close no window. So it can run, and nothing waits for ever.

On CPUs tasks that span processes run one at a time, because XLA would run two of them in any order, each in a thread of
a small pool, and their collectives would meet those of others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Sharding

from autopar.distributed import Processes, digest_of
from autopar.runtime.donation import shared
from autopar.runtime.program import Free, Instruction, Program, Run, Send, Slot
from autopar.runtime.transfer_plan import type_text, where
from autopar.runtime.waiting import check


@dataclass(frozen=True, slots=True)
class Window:
    """The tasks of this process that may be unfinished: `limit` of them at most, each with one of its outputs."""

    limit: int
    unfinished: deque[jax.Array] = field(default_factory=deque)

    def make_room(self) -> None:
        """Waits until one more task may be issued."""
        while len(self.unfinished) >= self.limit:
            output = self.unfinished.popleft()
            # What has been donated cannot be waited for; a later task, which read it, is finished later.
            while output.is_deleted() and self.unfinished:
                output = self.unfinished.popleft()
            if not output.is_deleted():
                output.block_until_ready()

    def add(self, output: jax.Array) -> None:
        """Adds a task, of which this is an output."""
        self.unfinished.append(output)


def spans(sharding: Sharding) -> bool:
    """Whether the collectives of a task with this sharding must not run beside others: it spans processes, on CPUs."""
    return not sharding.is_fully_addressable and all(device.platform == "cpu" for device in sharding.device_set)


def signs(program: Program) -> Mapping[int, Slot]:
    """The slot that shows when a task is finished, by its instruction: of a small output that is not donated."""
    donated = {
        instruction.inputs[i]
        for instruction in program.instructions
        if isinstance(instruction, Run)
        for i in program.segments[instruction.segment].donated
    }
    chosen: dict[int, Slot] = {}
    for at, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            structs = program.segments[instruction.segment].out_structs
            outputs = zip(instruction.outputs, structs, strict=True)
            chosen[at] = min((slot in donated, math.prod(struct.shape), slot) for slot, struct in outputs)[2]
    return chosen


def result_types(program: Program) -> tuple[tuple[tuple[int, ...], Any, Sharding], ...]:
    """The (shape, dtype, sharding) of each result."""
    types: dict[Slot, tuple[tuple[int, ...], Any, Sharding]] = {}
    for instruction in program.instructions:
        match instruction:
            case Run():
                segment = program.segments[instruction.segment]
                for slot, struct, sharding in zip(
                    instruction.outputs, segment.out_structs, segment.out_shardings, strict=True
                ):
                    types[slot] = struct.shape, struct.dtype, sharding
            case Send(struct=struct):
                types[instruction.target] = struct.shape, struct.dtype, instruction.sharding
            case Free():
                pass
    return tuple(types[slot] for slot in program.results)


def agree(processes: Processes, program: Program, lowered: Sequence[Any]) -> None:
    """Raises DisagreementError if processes have different instructions, or different programs of a shared segment, or
    would wait for each other.

    A segment is lowered by the processes that run it.
    """
    text = "\n".join(map(_text, program.instructions))
    processes.agree("the pipeline", {"its list of instructions": digest_of(text)})
    check(program, processes.ranks)
    digests = {
        f"segment {number} ({segment.name})": digest_of(lowered[number].as_text())
        for number, segment in enumerate(program.segments)
        if lowered[number]
    }
    processes.agree_on_segments(digests)


def _text(instruction: Instruction) -> str:
    """An instruction with what it needs of devices, as text."""
    if not isinstance(instruction, Send):
        return str(instruction)
    struct, source = instruction.struct, instruction.struct.sharding
    sides = f"{where(source)} -> {where(instruction.sharding)}"
    return f"send {instruction.source} to {instruction.target}: {type_text(struct.shape, struct.dtype)}, {sides}"


def vulnerable(program: Program) -> frozenset[Slot]:
    """The slots whose arrays may be donated or deleted while another process still reads what it was sent of them.

    These are arguments, results, and what a later task gives its buffer to.
    """
    representative = shared(program.instructions)
    gone = {feed.slot for feed in program.feeds} | set(program.results)
    for instruction in program.instructions:
        if isinstance(instruction, Run):
            gone |= {instruction.inputs[i] for i in program.segments[instruction.segment].donated}
    buffers = {representative.get(slot, slot) for slot in gone}
    sources = {i.source for i in program.instructions if isinstance(i, Send)}
    return frozenset(slot for slot in sources if representative.get(slot, slot) in buffers)
