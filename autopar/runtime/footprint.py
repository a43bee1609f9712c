"""Bytes of one device that compiled programs need, by XLA's own count, held against what a device may need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding

from autopar.errors import explain
from autopar.jax_compat import Device
from autopar.plan import Plan
from autopar.runtime.program import Feed, Free, Program, Run, Send, Slot
from passes.errors import OverBudgetError
from passes.intra_op import away
from passes.plan import PipelinePlan
from passes.planners import allowed, held
from passes.text import quantities

CPU = "cpu"


def compiled_nbytes(analysis: Any) -> int:
    """The peak of one device by XLA's `memory_analysis()`: arguments, results that alias none of them, and the rest."""
    kept = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return kept + analysis.temp_size_in_bytes


def needed_nbytes(plan: Plan, analysis: Any) -> int:
    """What a device needs for the compiled form of a plan.

    XLA's CPU compiler counts what lies in the host's memory as a device's; that much is taken off, as in the plan.
    """
    apart = analysis.host_argument_size_in_bytes > 0
    return compiled_nbytes(analysis) - (0 if apart else away(plan.offloaded_nbytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a device may need and `words` for it; where the function is written; whether its plans are searched for."""

    nbytes: float
    words: str
    source: str
    searched: bool

    def error(self, plan: Plan | PipelinePlan, needed: int) -> OverBudgetError:
        """What is said of a plan whose compiled form needs more."""
        less = int(self.nbytes * self.nbytes / needed)
        ways = f"plan for less with memory_limit={less:,} (bytes)" if self.searched else "use planner=autopar.Auto()"
        return OverBudgetError(
            explain(
                self.words,
                f"compiled, the step needs {needed:,} bytes ({quantities.nbytes(needed)}) on a device, where "
                f"{plan.peak_nbytes:,} bytes ({quantities.nbytes(plan.peak_nbytes)}) were planned ({held(plan)})",
                self.source,
                f"{ways}, give it more devices or a smaller batch, or allow it with memory_limit={needed:,} (bytes)",
            ),
            leanest=plan,
        )


def limit_of(
    plan: Plan | PipelinePlan, devices: Sequence[Device], asked: int | None, source: str, *, searched: bool
) -> Limit | None:
    """What the compiled form of a plan may need on these devices: as asked for, else the devices' own memory.

    None where nothing was asked for and the devices are virtual ones, which share the memory of their machine.
    """
    if asked is None and devices[0].platform == CPU:
        return None
    nbytes, words = allowed(plan.cluster, asked)
    return None if math.isinf(nbytes) else Limit(nbytes=nbytes, words=words, source=source, searched=searched)


def pipeline_nbytes(program: Program, executables: Sequence[Any]) -> int:
    """The peak of the fullest device of a pipeline's step: what lies there and what its segments need, in order.

    Arguments that are not donated stay all the while, results from where they are made.
    """
    walk = _Walk(program)
    for instruction in program.instructions:
        match instruction:
            case Run():
                walk.run(instruction, executables[instruction.segment].memory_analysis())
            case Send():
                walk.come(instruction.target)
            case Free():
                for slot in instruction.slots:
                    walk.leave(slot)
    return max(walk.peaks.values(), default=0)


class _Walk:
    """What lies on the stages as a program goes on; a stage is named by the first of its devices."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sizes = _sizes(program)
        self.staying = {feed.slot for feed in program.feeds if feed.slice is None}
        self.live: dict[int, int] = {}
        self.peaks: dict[int, int] = {}
        for slot in (*(feed.slot for feed in program.feeds), *(slot for slot, _, _ in program.constants)):
            self.come(slot)
        for stage, nbytes in self._cut(program.feeds).items():  # a batch is there whole as its microbatches are made
            self._reach(stage, nbytes)

    def come(self, slot: Slot) -> None:
        stage, nbytes = self.sizes.get(slot, (-1, 0))
        self.live[stage] = self.live.get(stage, 0) + nbytes
        self._reach(stage, 0)

    def leave(self, slot: Slot) -> None:
        if slot not in self.staying:
            stage, nbytes = self.sizes[slot]
            self.live[stage] -= nbytes

    def run(self, instruction: Run, analysis: Any) -> None:
        segment = self.program.segments[instruction.segment]
        made = analysis.output_size_in_bytes - analysis.alias_size_in_bytes + analysis.temp_size_in_bytes
        slots = (*instruction.outputs, *instruction.inputs)
        if slots:
            self._reach(self.sizes[slots[0]][0], made)
        for i in segment.donated:
            self.staying.discard(instruction.inputs[i])
            self.leave(instruction.inputs[i])
        for slot in instruction.outputs:
            self.come(slot)

    def _reach(self, stage: int, more: int) -> None:
        self.peaks[stage] = max(self.peaks.get(stage, 0), self.live.get(stage, 0) + more)

    def _cut(self, feeds: Sequence[Feed]) -> Mapping[int, int]:
        found: dict[int, int] = {}
        for feed in feeds:
            if feed.slice is not None and feed.slot in self.sizes:
                stage, nbytes = self.sizes[feed.slot]
                found[stage] = found.get(stage, 0) + nbytes
        return found


def _sizes(program: Program) -> dict[Slot, tuple[int, int]]:
    """(stage, bytes of one device) of every slot that something reads or writes."""
    found: dict[Slot, tuple[int, int]] = {}
    for instruction in program.instructions:
        match instruction:
            case Run():
                segment = program.segments[instruction.segment]
                reads = zip(instruction.inputs, segment.in_structs, segment.in_shardings, strict=True)
                writes = zip(instruction.outputs, segment.out_structs, segment.out_shardings, strict=True)
                found |= {slot: _size(struct, sharding) for slot, struct, sharding in (*reads, *writes)}
            case Send(struct=struct):
                if struct.sharding is not None:
                    found[instruction.source] = _size(struct, struct.sharding)
                found[instruction.target] = _size(struct, instruction.sharding)
            case Free():
                pass
    return found


def _size(struct: jax.ShapeDtypeStruct, sharding: Sharding) -> tuple[int, int]:
    stage = min(device.id for device in sharding.device_set)
    return stage, math.prod(sharding.shard_shape(struct.shape)) * struct.dtype.itemsize
