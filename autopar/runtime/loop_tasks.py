"""The loop over microbatches as instructions: a segment for each kind of a stage's tasks, run once a microbatch.

A task reads slices of microbatches, running sums, and values that the loop reads in every microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.frontend import Body
from autopar.runtime.listing import Listing
from autopar.runtime.program import Feed, Held, Segment, Slot
from autopar.runtime.segments import Stage, counts, inner_constants, segment_of, struct_of, task_nodes
from passes.errors import InternalError
from passes.inter_op import Task
from passes.pipeline import reduced, value_specs
from passes.placement import is_free, resharding_plan
from passes.sharding import Resharder, ShardingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTasks:
    """The segments of a stage by kind of task, which body values their sums end in, and what they send."""

    segments: Mapping[str, int]
    totals: Mapping[int, int]
    sent: tuple[int, ...]
    ends: Mapping[int, ShardingSpec]


def tasks_of(stage: Stage, listing: Listing, loop_body: Body, *, splits_backward: bool) -> StageTasks:
    """The segments of a stage's tasks, which are added to the listing and not compiled yet."""
    part, inner = stage.part, stage.loop_placement.bodies[0]
    body, node = part.body, part.graph.nodes[part.loop]
    constants, carries = counts(node.params)
    specs = value_specs(body, inner)
    ends = dict(zip(body.outputs, inner.outputs, strict=True))
    start = body.inputs[constants : constants + carries]
    totals = dict(zip(start, body.outputs[:carries], strict=True))
    specs |= {v: specs[begin] for begin, v in totals.items()}
    sent = [v for v in part.boundary_values.values() if v in body.outputs]
    rows = list(body.outputs[carries : len(body.outputs) - len(sent)])
    groups = task_nodes(part, sent, splits_backward)
    loop = Body(graph=body, equations=stage.loop_equations, constants=inner_constants(loop_body, body))
    made_in = {v: kind for kind, nodes in groups.items() for i in nodes for v in body.nodes[i].outputs}
    kinds = list(groups)
    reshardings = resharding_plan(body, inner, Resharder(stage.plan.mesh))
    segments: dict[str, int] = {}
    for kind, nodes in groups.items():
        later = [i for k in kinds[kinds.index(kind) + 1 :] for i in groups[k]]
        read_later = {v for i in later for v in body.nodes[i].inputs}
        computed = [v for i in nodes if not is_free(body, i) for v in body.nodes[i].outputs]
        handed_on = {
            value: spec
            for value, spec in reduced(body, inner, reshardings, nodes, later).items()
            if value not in totals.values()
        }
        onward = specs | handed_on
        kept = [v for v in computed if v in read_later or v in totals.values()]
        needed: list[Held] = [(v, onward[v]) for v in (*kept, *handed_on)]
        needed += [(v, ends[v]) for v in computed if v in sent or v in rows]
        needed = list(dict.fromkeys(needed))
        if needed:
            begins = {v for v in start if made_in.get(totals[v]) == kind}
            name = f"{kind} {stage.number}"
            segments[kind] = listing.add(segment_of(stage, name, loop, nodes, inner, specs, needed, donated=begins))
        specs = onward
    return StageTasks(segments=segments, totals=totals, sent=tuple(sent), ends=ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The loop under construction: the slots of microbatches' slices, of running sums and of their initial zeros, by
    stage.

    `arguments` are the positions of the step's inputs.
    """

    listing: Listing
    stages: Sequence[Stage]
    tasks: Sequence[StageTasks]
    arguments: Mapping[int, int]
    microbatches: int
    slices: dict[tuple[int, int, ShardingSpec, int], Slot] = field(default_factory=dict)
    sums: dict[tuple[int, int], Slot] = field(default_factory=dict)
    zeros: dict[tuple[int, int], Slot] = field(default_factory=dict)

    def run(self, task: Task) -> None:
        """Adds a task, and after it the transfers of its results to other stages."""
        stage, tasks = self.stages[task.stage], self.tasks[task.stage]
        if task.kind not in tasks.segments:
            return
        number = tasks.segments[task.kind]
        segment = self.listing.segments[number]
        inputs = [self._read(stage, value_and_spec, task.microbatch) for value_and_spec in segment.inputs]
        outputs = self.listing.run(number, inputs, task)
        totals = set(tasks.totals.values())
        for (value, spec), slot in zip(segment.outputs, outputs, strict=True):
            if value in totals:
                self.sums[stage.number, value] = slot
            self.slices[stage.number, value, spec, task.microbatch] = slot
            if value in tasks.sent and spec == tasks.ends[value]:
                self._send(stage, value, spec, slot, task.microbatch)

    def _send(self, stage: Stage, value: int, spec_held: ShardingSpec, source: Slot, microbatch: int) -> None:
        """Sends a slice to every stage that reads it."""
        for receiver in self.stages:
            part = receiver.part
            if not any(v == value and stream in part.graph.inputs for stream, v in part.boundary_values.items()):
                continue
            body, inner = part.body, receiver.loop_placement.bodies[0]
            spec = dict(zip(body.inputs, inner.inputs, strict=True))[value]
            slot = self.listing.send(source, body.types[value], stage, spec_held, receiver, spec)
            self.slices[receiver.number, value, spec, microbatch] = slot

    def _read(self, stage: Stage, value_and_spec: Held, microbatch: int) -> Slot:
        """The slot of a value that a task reads: a slice, a running sum, or a value from outside the loop."""
        value, spec = value_and_spec
        part, key = stage.part, (stage.number, value, spec, microbatch)
        if key in self.slices:
            return self.slices[key]
        node = part.graph.nodes[part.loop]
        constants, carries = counts(node.params)
        position = part.body.inputs.index(value)
        outer = node.inputs[position]
        if position < constants:
            return self.listing.slots[stage.number, outer, spec]
        if position < constants + carries:
            return self.total(stage, value, spec)
        slot = self.slices[key] = self._slice(stage, outer, value_and_spec, microbatch)
        return slot

    def _slice(self, stage: Stage, outer: int, value_and_spec: Held, microbatch: int) -> Slot:
        """The slot of one microbatch of the batch, or of its number."""
        (value, spec), slot = value_and_spec, self.listing.fresh()
        sharding, type = stage.sharding(spec), stage.part.body.types[value]
        if outer in self.arguments:
            feed = Feed(argument=self.arguments[outer], slot=slot, sharding=sharding, slice=microbatch)
            self.listing.feeds.append(feed)
        elif type.shape:
            raise InternalError(f"value {outer} of the step is read in slices and is no argument")
        else:
            self.listing.constants.append((slot, np.asarray(microbatch, type.dtype), sharding))
        return slot

    def total(self, stage: Stage, start: int, spec: ShardingSpec) -> Slot:
        """The slot of the running sum that begins as the body's input `start`.

        Before the first microbatch it is zero, an array of its own for each sum, as it is donated.
        """
        total = stage.number, self.tasks[stage.number].totals[start]
        if total in self.sums:
            return self.sums[total]
        key = stage.number, start
        if key not in self.zeros:
            struct = struct_of(stage.part.body.types[start], spec, stage)
            segment = Segment(
                name=f"zero {stage.number}",
                stage=stage.number,
                function=lambda: (jnp.zeros(struct.shape, struct.dtype),),
                inputs=(),
                outputs=((start, spec),),
                in_shardings=(),
                out_shardings=(stage.sharding(spec),),
                in_structs=(),
                out_structs=(struct,),
                platform=stage.platform,
            )
            (self.zeros[key],) = self.listing.run(self.listing.add(segment), ())
        return self.zeros[key]

    def finish(self, stage: Stage) -> None:
        """Adds the loop's results as values of the step: sums as they are, rows joined."""
        part = stage.part
        node, body, placement = part.graph.nodes[part.loop], part.body, stage.loop_placement
        inner, slots = placement.bodies[0], self.listing.slots
        constants, carries = counts(node.params)
        begins = dict(zip(body.inputs, inner.inputs, strict=True))
        ends = dict(zip(body.outputs, inner.outputs, strict=True))
        results = zip(node.outputs, placement.results, strict=True)
        for i, (value, spec) in enumerate(results):
            if i < carries:
                start = body.inputs[constants + i]
                slots[stage.number, value, spec] = self.total(stage, start, begins[start])
            elif value not in part.boundary_values:
                row = body.outputs[i]
                slots[stage.number, value, spec] = self._joined(stage, (row, ends[row]), (value, spec))

    def _joined(self, stage: Stage, row: Held, joined: Held) -> Slot:
        """The slot of all microbatches' rows as one array."""
        rows = [self.slices[stage.number, *row, m] for m in range(self.microbatches)]
        type = stage.part.body.types[row[0]]
        struct = jax.ShapeDtypeStruct(type.shape, jax_compat.dtype_of(type.dtype))
        segment = Segment(
            name=f"rows {stage.number}",
            stage=stage.number,
            function=lambda *xs: (jnp.stack(xs),),
            inputs=(row,) * len(rows),
            outputs=(joined,),
            in_shardings=(stage.sharding(row[1]),) * len(rows),
            out_shardings=(stage.sharding(joined[1]),),
            in_structs=(struct,) * len(rows),
            out_structs=(struct_of(stage.part.graph.types[joined[0]], joined[1], stage),),
            platform=stage.platform,
        )
        (slot,) = self.listing.run(self.listing.add(segment), rows)
        return slot
