"""The first iteration of a loop that sends in each iteration what the one before made, which runs before the loop.

The values of its body are lowered where the loop stands: the iteration reads slices of the stacks, changes the carries
and fills the first part of each stack. What it would send is carried into the loop, and what the last iteration made is
sent after it. All that can run beside the first iteration, as the rest of the forward pass, may do so.

Reference: CollectivePipeliner::TransformLoopForward, as of jaxlib 0.10; see passes/memory/gpu_pipelining.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.ir import Body, Control, TensorType
from passes.memory.device_lowering import Context, Lowering, rooms
from passes.memory.device_program import Interface
from passes.memory.operations import Kind, Operations
from passes.placement import Layout, Resharding, ReshardingPlan, shared
from passes.sharding import ShardingSpec


@dataclass(frozen=True, slots=True)
class FirstIteration:
    """The body of a loop as it is lowered before it; `pending` are the ports of stacks of what is sent."""

    body: Body
    context: Context
    layout: Layout
    reshardings: ReshardingPlan
    interface: Interface
    pending: tuple[int, ...]

    def around(
        self,
        operations: Operations,
        index: int,
        control: Control,
        entering: Mapping[int, int],
        results: Sequence[TensorType],
        read: Sequence[int],
    ) -> list[int]:
        """The results of the loop, with the iteration before it and what is sent after it."""
        begun, at, value = len(operations.every), operations.at, operations.value
        lowering = self._lowered(operations, entering)
        made = {port: self._made(lowering, port) for port in self.body.outputs}
        carried = {port: made[port] for port in entering.keys() & made.keys()}
        room = rooms(operations, index, control, {**entering, **carried}, results)
        # Inside the loop its own program has what is carried on, which is freed where it is sent.
        pending = operations.add("opaque", [made[port] for port in self.pending], (0,), "bool", ("pending", index))
        for position, use in enumerate(control.results):
            if use.port in made.keys() - carried.keys() - set(self.pending):
                filled = (room[position], made[use.port])
                room[position] = self._named(operations, "update", filled, ("first", index, position))
        loop = operations.add("loop", (*read, pending, *dict.fromkeys(room.values())), (0,), "bool", index)
        received = self._received(lowering, loop, made)
        outputs = list[int]()
        for position, use in enumerate(control.results):
            whole = self._named(operations, "part", (room[position], loop), operations[room[position]].tag)
            if use.port in received:
                filled = (whole, received[use.port])
                whole = self._named(operations, "update", filled, ("last", index, position))
            outputs.append(whole)
        operations.every[begun:] = [o._replace(node=at, value=value) for o in operations.every[begun:]]
        operations.at, operations.value = at, value
        return outputs

    def _named(self, operations: Operations, kind: Kind, operands: tuple[int, ...], tag: object) -> int:
        """An operation as large as its first operand."""
        first = operations[operands[0]]
        return operations.add(kind, operands, first.shape, first.dtype, tag)

    def _lowered(self, operations: Operations, entering: Mapping[int, int]) -> Lowering:
        """The values of the body, all but those that are sent after the loop where they leave."""
        graph, layout = self.body.graph, shared(self.layout)
        lowering = Lowering(graph, self.context, self.reshardings.same, operations)
        for position, (value, spec) in enumerate(zip(graph.inputs, layout.inputs, strict=True)):
            entered = entering[self.body.inputs[position]]
            lowering.begin(value, spec, entered, sliced=position in self.interface.sliced)
        lowering.follow(layout, self.reshardings)
        lowering.bring(len(graph.nodes), [move for move in self.reshardings.before[-1] if not self._is_late(move)])
        return lowering

    def _is_late(self, move: Resharding) -> bool:
        """Whether a move of what leaves the body is made in the next iteration, or after the loop."""
        return any(self._leaving(port)[0] == move.value for port in self.pending)

    def _leaving(self, port: int) -> tuple[int, ShardingSpec]:
        """The value in the body of what leaves by a port, and its placement there."""
        position = self.body.outputs.index(port)
        return self.body.graph.outputs[position], self.layout.outputs[position]

    def _made(self, lowering: Lowering, port: int) -> int:
        """The operation that the iteration makes for a port, before it is sent where that is pending."""
        value, spec = self._leaving(port)
        return lowering.made[value] if port in self.pending else lowering.read(value, spec, "forward")

    def _received(self, lowering: Lowering, loop: int, made: Mapping[int, int]) -> dict[int, int]:
        """The operations that are received of the last iteration, by port, given what the first one makes."""
        operations = lowering.operations
        for port in self.pending:
            first = operations[made[port]]
            sent = operations.add("result", (loop,), first.shape, first.dtype, (loop, "pending", port))
            lowering.made[self._leaving(port)[0]] = sent
        lowering.bring(len(self.body.graph.nodes), [m for m in self.reshardings.before[-1] if self._is_late(m)])
        return {port: lowering.read(*self._leaving(port), "forward") for port in self.pending}
