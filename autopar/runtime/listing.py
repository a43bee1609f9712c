"""A pipeline's program under construction: its segments and instructions so far, and the slot of every value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from autopar import jax_compat
from autopar.frontend import Body
from autopar.jax_compat import Device
from autopar.runtime.program import Feed, Held, Instruction, Run, Segment, Send, Slot
from autopar.runtime.segments import Stage, segment_of
from passes.inter_op import Task
from passes.ir import TensorType
from passes.placement import Layout
from passes.sharding import ShardingSpec


class Listing:
    """The segments and instructions of a program so far; `slots` are those of values, by stage and placement."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.feeds: list[Feed] = []
        self.constants: list[tuple[Slot, Any, Sharding]] = []
        self.instructions: list[Instruction] = []
        self.slots: dict[tuple[int, int, ShardingSpec], Slot] = {}
        self.n_slots = 0

    def fresh(self) -> Slot:
        """A slot that nothing uses yet."""
        self.n_slots += 1
        return self.n_slots - 1

    def add(self, segment: Segment) -> int:
        """The number of a segment, which is added."""
        self.segments.append(segment)
        return len(self.segments) - 1

    def run(self, segment: int, inputs: Sequence[Slot], task: Task | None = None) -> tuple[Slot, ...]:
        """The slots of a segment's outputs; an instruction that runs it on these inputs is added."""
        outputs = tuple(self.fresh() for _ in self.segments[segment].outputs)
        self.instructions.append(Run(segment=segment, inputs=tuple(inputs), outputs=outputs, task=task))
        return outputs

    def compute(
        self,
        stage: Stage,
        name: str,
        body: Body,
        nodes: Sequence[int],
        layout: Layout,
        specs: Mapping[int, ShardingSpec],
        needed: Sequence[Held],
    ) -> None:
        """Adds a segment that runs once a step, on slots that exist."""
        if not needed:
            return
        segment = segment_of(stage, name, body, nodes, layout, specs, needed)
        inputs = [self.slots[stage.number, *value_and_spec] for value_and_spec in segment.inputs]
        outputs = self.run(self.add(segment), inputs)
        self.slots.update(
            {(stage.number, *value_and_spec): slot for value_and_spec, slot in zip(needed, outputs, strict=True)}
        )

    def send(
        self,
        source: Slot,
        type: TensorType,
        sender: Stage,
        spec_held: ShardingSpec,
        receiver: Stage,
        spec: ShardingSpec,
    ) -> Slot:
        """The slot of an array of `sender` on the submesh of `receiver`, in another placement; the transfer
        is added.
        """
        target = self.fresh()
        struct = jax.ShapeDtypeStruct(type.shape, jax_compat.dtype_of(type.dtype), sharding=sender.sharding(spec_held))
        self.instructions.append(Send(source=source, target=target, struct=struct, sharding=receiver.sharding(spec)))
        return target

    def broadcast(
        self, source: Slot, struct: jax.ShapeDtypeStruct, sharding: Sharding, devices: Sequence[Device]
    ) -> Slot:
        """The slot of an array on all of the devices."""
        mesh = Mesh(np.asarray(devices, dtype=object), ("device",), axis_types=(AxisType.Auto,))
        target, everywhere = self.fresh(), NamedSharding(mesh, PartitionSpec())
        struct = jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
        self.instructions.append(Send(source=source, target=target, struct=struct, sharding=everywhere))
        return target

    def exchange(self, stages: Sequence[Stage]) -> None:
        """Sends the values that stages read, that are on other stages and exist by now."""
        for stage in stages:
            for value, spec in zip(stage.part.graph.inputs, stage.layout.inputs, strict=True):
                if (stage.number, value, spec) not in self.slots and value not in stage.part.boundary_values:
                    self._bring(stages, stage, value, spec)

    def _bring(self, stages: Sequence[Stage], stage: Stage, value: int, spec: ShardingSpec) -> None:
        """Sends a value from the first other stage that has it."""
        for other in stages:
            outputs = zip(other.part.graph.outputs, other.layout.outputs, strict=True)
            inputs = zip(other.part.graph.inputs, other.layout.inputs, strict=True)
            have = [(v, s) for v, s in (*outputs, *inputs) if v == value]
            existing = next((candidate for candidate in have if (other.number, *candidate) in self.slots), None)
            if other is not stage and existing:
                source, type = self.slots[other.number, *existing], stage.part.graph.types[value]
                self.slots[stage.number, value, spec] = self.send(source, type, other, existing[1], stage, spec)
                return
