"""The bytes of one device that compiled programs need, by XLA's own account, and the limit that they must keep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding

from autopar.errors import explain
from autopar.jax_compat import Device
from autopar.runtime.program import Feed, Free, Program, Run, Send, Slot
from passes.errors import OverBudgetError
from passes.intra_op import away
from passes.memory import is_tpu
from passes.plan import AnyPlan, Plan
from passes.planners import allowed, largest_holders
from passes.text import quantities

CPU = "cpu"


def temporaries_nbytes(plan: Plan, analysis: Any) -> int:
    """The bytes of a device that temporaries need by XLA's `memory_analysis()`.

    Its TPU compiler counts the gaps between them twice, as its own account of buffers shows (libtpu 0.0.42, option
    `xla_dump_to`): they need the mean of its number and of what is live at once outside of loops. For the latter the
    analysis has an upper bound, the most that is live at once in any memory and in loops. So this is an upper bound,
    too: it is exact where nothing loops and less is live on the chip, 6 % too high in four layers that are scanned, and
    up to a third in steps of a few megabytes.
    """
    nbytes: int = analysis.temp_size_in_bytes
    if not is_tpu(plan.mesh.cluster.group().device) or not analysis.peak_memory_in_bytes:
        return nbytes
    live_nbytes = analysis.peak_memory_in_bytes - _permanent_nbytes(analysis)
    return nbytes - max(0, nbytes - live_nbytes) // 2


def _permanent_nbytes(analysis: Any) -> int:
    """The bytes of arguments and of results that are not written over any."""
    return analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes


def needed_nbytes(plan: Plan, analysis: Any) -> int:
    """The bytes of a device that the compiled program of a plan needs: arguments, unaliased results, and temporaries.

    XLA's CPU compiler counts arrays in the host's memory as the device's; those bytes are subtracted, as in the plan.
    """
    apart = analysis.host_argument_size_in_bytes > 0
    nbytes = _permanent_nbytes(analysis) + temporaries_nbytes(plan, analysis)
    return nbytes - (0 if apart else away(plan.offloaded_nbytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The bytes that a device may need, with `words` for the limit, the function's source, and whether plans are
    searched for.
    """

    nbytes: float
    words: str
    source: str
    searched: bool

    def error(self, plan: AnyPlan, needed: int) -> OverBudgetError:
        """The error for a plan whose compiled program needs more."""
        less = int(self.nbytes * self.nbytes / needed)
        remedy = f"plan for less with memory_limit={less:,} (bytes)" if self.searched else "use planner=autopar.Auto()"
        return OverBudgetError(
            explain(
                self.words,
                f"compiled, the step needs {needed:,} bytes ({quantities.nbytes(needed)}) on a device, where "
                f"{plan.peak_nbytes:,} bytes ({quantities.nbytes(plan.peak_nbytes)}) were planned "
                f"({largest_holders(plan)})",
                self.source,
                f"{remedy}, give it more devices or a smaller batch, or allow it with memory_limit={needed:,} (bytes)",
            ),
            least_memory_plan=plan,
        )


def limit_of(
    plan: AnyPlan, devices: Sequence[Device], memory_limit: int | None, source: str, *, searched: bool
) -> Limit | None:
    """The limit for the compiled program of a plan on these devices: `memory_limit`, or else the devices' own memory.

    None if the user gives no limit and the devices are virtual ones, which share the memory of their machine.
    """
    if memory_limit is None and devices[0].platform == CPU:
        return None
    nbytes, description = allowed(plan.cluster, memory_limit)
    return None if math.isinf(nbytes) else Limit(nbytes=nbytes, words=description, source=source, searched=searched)


def pipeline_nbytes(program: Program, executables: Sequence[Any]) -> int:
    """The peak bytes, during a pipeline's step, of the device that needs most."""
    return max(pipeline_peaks(program, executables).values(), default=0)


def pipeline_peaks(program: Program, executables: Sequence[Any]) -> Mapping[int, int]:
    """The peak bytes of one device of each of a pipeline's stages, by the first device's id: arrays and what segments
    need.

    Arguments that are not donated are there throughout, results from where they are made. Segments of other processes
    have no executable here; their bytes are counted there.
    """
    walk = _Walk(program)
    for instruction in program.instructions:
        match instruction:
            case Run():
                executable = executables[instruction.segment]
                walk.run(instruction, executable and executable.memory_analysis())
            case Send():
                walk.come(instruction.target)
            case Free():
                for slot in instruction.slots:
                    walk.leave(slot)
    return walk.peaks


class _Walk:
    """The bytes on every stage in the course of a program; a stage is named by the first of its devices."""

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
        new_nbytes = 0
        if analysis:
            new_nbytes = analysis.output_size_in_bytes - analysis.alias_size_in_bytes + analysis.temp_size_in_bytes
        slots = (*instruction.outputs, *instruction.inputs)
        if slots:
            self._reach(self.sizes[slots[0]][0], new_nbytes)
        for i in segment.donated:
            self.staying.discard(instruction.inputs[i])
            self.leave(instruction.inputs[i])
        for slot in instruction.outputs:
            self.come(slot)

    def _reach(self, stage: int, more: int) -> None:
        self.peaks[stage] = max(self.peaks.get(stage, 0), self.live.get(stage, 0) + more)

    def _cut(self, feeds: Sequence[Feed]) -> Mapping[int, int]:
        slices: dict[int, int] = {}
        for feed in feeds:
            if feed.slice is not None and feed.slot in self.sizes:
                stage, nbytes = self.sizes[feed.slot]
                slices[stage] = slices.get(stage, 0) + nbytes
        return slices


def _sizes(program: Program) -> dict[Slot, tuple[int, int]]:
    """(stage, bytes of one device) of every slot that an instruction reads or writes."""
    sizes: dict[Slot, tuple[int, int]] = {}
    for instruction in program.instructions:
        match instruction:
            case Run():
                segment = program.segments[instruction.segment]
                reads = zip(instruction.inputs, segment.in_structs, segment.in_shardings, strict=True)
                writes = zip(instruction.outputs, segment.out_structs, segment.out_shardings, strict=True)
                sizes |= {slot: _size(struct, sharding) for slot, struct, sharding in (*reads, *writes)}
            case Send(struct=struct):
                if struct.sharding is not None:
                    sizes[instruction.source] = _size(struct, struct.sharding)
                sizes[instruction.target] = _size(struct, instruction.sharding)
            case Free():
                pass
    return sizes


def _size(struct: jax.ShapeDtypeStruct, sharding: Sharding) -> tuple[int, int]:
    stage = min(device.id for device in sharding.device_set)
    return stage, math.prod(sharding.shard_shape(struct.shape)) * struct.dtype.itemsize
