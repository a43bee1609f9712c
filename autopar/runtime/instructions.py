"""A pipeline's plan as a program: which segments there are, and what is run, sent and freed in which order.

One total order is written down: each stage's tasks in the order of its schedule, stages merged by simulated start, a
transfer right behind what makes its value, a value freed behind its last use. A stage's program is cut into segments
where it waits for another stage or for its next task: before the loop, each kind of task, and after the loop once for
every round of waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from autopar import jax_compat
from autopar.frontend import Body, Equation, Traced
from autopar.jax_compat import Device
from autopar.lowering import device_mesh
from autopar.runtime.donation import donating, reused, shared
from autopar.runtime.program import Donation, Feed, Held, Instruction, Program, Run, Segment, Send, Slot, freed
from autopar.runtime.segments import Stage, counts, inner_constants, segment_of, struct_of, task_nodes
from passes.errors import InternalError
from passes.inter_op import Task
from passes.ir import Graph, TensorType
from passes.pipeline import homes
from passes.placement import Layout, is_free
from passes.plan import PipelinePlan
from passes.sharding import ShardingSpec
from passes.transforms import Part, Stages, loop_of


def build(traced: Traced, plan: PipelinePlan, stages: Stages, devices: Sequence[Device]) -> Program:
    """The program of a planned pipeline on the first devices, stage after stage."""
    return _Builder(traced, plan, stages, devices).run()


class _Builder:
    def __init__(self, traced: Traced, plan: PipelinePlan, stages: Stages, devices: Sequence[Device]) -> None:
        self.traced, self.plan, self.stages = traced, plan, stages
        loop = loop_of(traced.graph)
        if loop is None:
            raise InternalError("a pipeline's program has a loop over microbatches")
        self.loop_body = traced.equations[loop].bodies[0]
        self.graph = traced.graph
        self.segments: list[Segment] = []
        self.feeds: list[Feed] = []
        self.constants: list[tuple[Slot, Any, Sharding]] = []
        self.instructions: list[Instruction] = []
        self.slots: dict[Any, Slot] = {}
        self.n_slots = 0
        self.stage_list = [self._stage(k, part, devices) for k, part in enumerate(stages.parts)]

    def _stage(self, number: int, part: Part, devices: Sequence[Device]) -> Stage:
        first, plan = self.plan.offsets[number], self.plan.stages[number]
        own = devices[first : first + plan.mesh.size]
        equations = tuple(self._equation(origin) for origin in part.origins)
        inside = tuple(self._equation(origin) for origin in part.inside)
        constants = dict(zip(self.graph.constants, self.traced.constants, strict=True))
        return Stage(
            number=number,
            part=part,
            plan=plan,
            body=Body(
                graph=part.graph, equations=equations, constants=tuple(constants[v] for v in part.graph.constants)
            ),
            mesh=device_mesh(plan.mesh, own) if plan.mesh.axes else None,
            device=own[0],
            loop_equations=inside,
        )

    def _equation(self, origin: tuple[str, int]) -> Equation:
        kind, index = origin
        return self.traced.equations[index] if kind == "step" else self.loop_body.equations[index]

    def fresh(self) -> Slot:
        self.n_slots += 1
        return self.n_slots - 1

    def run(self) -> Program:
        for stage in self.stage_list:
            self._feed(stage)
        self._exchange(range(len(self.stage_list)))
        for stage in self.stage_list:
            self._before(stage)
        tasks = {stage.number: self._tasks(stage) for stage in self.stage_list}
        for task in self.plan.order():
            self._task(self.stage_list[task.stage], tasks[task.stage], task)
        self._after()
        results, gone = self._results(), reused(self.traced)
        inputs, outputs = self.graph.inputs, self.graph.outputs
        successors = {inputs[position]: outputs[output] for output, position in self.traced.state_pairs}
        instructions, segments = donating(self.instructions, self.segments, self.feeds, gone, successors)
        program = Program(
            segments=tuple(segments),
            feeds=tuple(self.feeds),
            constants=tuple(self.constants),
            instructions=tuple(freed(instructions, segments, results, self.constants)),
            results=results,
            n_slots=self.n_slots,
            donation=Donation(positions=tuple(sorted(gone)), names=self.graph.input_names),
        )
        program.verify()
        return program

    def _results(self) -> tuple[Slot, ...]:
        """The slots of outputs, each an array of its own: what the caller may donate is no argument and no constant."""
        one = shared(self.instructions)
        taken = {
            one.get(slot, slot) for slot in (*(f.slot for f in self.feeds), *(slot for slot, _, _ in self.constants))
        }
        found: list[Slot] = []
        for position, value in enumerate(self.graph.outputs):
            stage = self.stage_list[self.stages.owners[position]]
            spec = dict(zip(stage.part.graph.outputs, stage.layout.outputs, strict=True))[value]
            slot = self.slots[stage.number, value, spec]
            if one.get(slot, slot) in taken:
                slot = self._copied(stage, (value, spec), slot)
            taken.add(one.get(slot, slot))
            found.append(slot)
        return tuple(found)

    def _copied(self, stage: Stage, held: Held, slot: Slot) -> Slot:
        """The slot of a copy."""
        value, spec = held
        sharding, struct = stage.sharding(spec), struct_of(stage.part.graph.types[value], spec, stage)
        segment = Segment(
            name=f"copy {stage.number}",
            stage=stage.number,
            function=lambda x: (x,),
            inputs=(held,),
            outputs=(held,),
            in_shardings=(sharding,),
            out_shardings=(sharding,),
            in_structs=(struct,),
            out_structs=(struct,),
            platform=stage.device.platform,
        )
        self.segments.append(segment)
        run = Run(segment=len(self.segments) - 1, inputs=(slot,), outputs=(self.fresh(),))
        self.instructions.append(run)
        return run.outputs[0]

    # Arguments

    def _feed(self, stage: Stage) -> None:
        """Slots for the arguments that a stage reads; another stage's state comes from there."""
        graph = stage.part.graph
        positions = {value: i for i, value in enumerate(self.graph.inputs)}
        for value, spec in zip(graph.inputs, stage.layout.inputs, strict=True):
            position = positions.get(value)
            if position is None:
                continue
            stacked = position in self.traced.stacked
            outside = any(index != stage.part.loop for index in graph.consumers.get(value, ()))
            if outside if stacked else self.stages.homes[position] == stage.number:
                slot = self.slots[stage.number, value, spec] = self.fresh()
                self.feeds.append(Feed(argument=position, slot=slot, sharding=stage.sharding(spec)))

    def _exchange(self, stages: Iterable[int]) -> None:
        """Sends what stages read of values that live elsewhere and are there by now."""
        for number in stages:
            stage = self.stage_list[number]
            for value, spec in zip(stage.part.graph.inputs, stage.layout.inputs, strict=True):
                key = (number, value, spec)
                if key in self.slots or value in stage.part.streams:
                    continue
                for other in self.stage_list:
                    outputs = zip(other.part.graph.outputs, other.layout.outputs, strict=True)
                    inputs = zip(other.part.graph.inputs, other.layout.inputs, strict=True)
                    have = [(v, s) for v, s in (*outputs, *inputs) if v == value]
                    found = next((h for h in have if (other.number, *h) in self.slots), None)
                    if other.number != number and found:
                        slot = self.slots[key] = self.fresh()
                        type = stage.part.graph.types[value]
                        self._send(self.slots[other.number, *found], slot, type, other, found[1], stage, spec)
                        break

    # Before the loop

    def _before(self, stage: Stage) -> None:
        """Brings constants and sums to where the loop wants them, and computes what comes before it."""
        graph, loop = stage.part.graph, stage.part.loop
        node, placement = graph.nodes[loop], stage.loop_placement
        n_held = sum(counts(node.params))
        late = {v for n in graph.nodes[loop + 1 :] for v in n.inputs} | set(graph.outputs)
        home = homes(stage.part.graph, stage.layout)
        wanted: list[Held] = list(zip(node.inputs[:n_held], placement.operands[:n_held], strict=True))
        made = {v for n in graph.nodes[:loop] for v in n.outputs}
        free = {v for i, n in enumerate(graph.nodes) if is_free(graph, i) for v in n.outputs}
        wanted += [(v, home[v]) for v in sorted(made & late - free)]
        wanted = [held for held in dict.fromkeys(wanted) if (stage.number, *held) not in self.slots]
        nodes = list(range(loop))
        self._run(stage, f"before {stage.number}", stage.body, nodes, stage.layout, home, wanted)

    def _run(
        self,
        stage: Stage,
        name: str,
        body: Body,
        nodes: Sequence[int],
        layout: Layout,
        home: Mapping[int, ShardingSpec],
        wanted: Sequence[Held],
    ) -> None:
        """A segment that runs once a step, on slots that are there."""
        if not wanted:
            return
        segment = segment_of(stage, name, body, nodes, layout, home, wanted)
        inputs = tuple(self.slots[stage.number, *held] for held in segment.inputs)
        outputs = tuple(self.fresh() for _ in wanted)
        self.slots.update({(stage.number, *held): slot for held, slot in zip(wanted, outputs, strict=True)})
        self.segments.append(segment)
        self.instructions.append(Run(segment=len(self.segments) - 1, inputs=inputs, outputs=outputs))

    # The loop

    def _tasks(self, stage: Stage) -> _Tasks:
        """The segments of a stage's tasks, compiled forms not yet made."""
        part, inner = stage.part, stage.loop_placement.bodies[0]
        body, node = part.body, part.graph.nodes[part.loop]
        constants, carries = counts(node.params)
        home = homes(body, inner)
        ends = dict(zip(body.outputs, inner.outputs, strict=True))
        start = body.inputs[constants : constants + carries]
        totals = dict(zip(start, body.outputs[:carries], strict=True))
        home |= {v: home[begin] for begin, v in totals.items()}
        sent = [v for v in part.streams.values() if v in body.outputs]
        rows = list(body.outputs[carries : len(body.outputs) - len(sent)])
        groups = task_nodes(part, sent, self.plan.splits_backward)
        whole = Body(graph=body, equations=stage.loop_equations, constants=inner_constants(self.loop_body, body))
        made_in = {v: kind for kind, nodes in groups.items() for i in nodes for v in body.nodes[i].outputs}
        kinds = list(groups)
        segments: dict[str, int] = {}
        for kind, nodes in groups.items():
            later = kinds[kinds.index(kind) + 1 :]
            read_later = {v for k in later for i in groups[k] for v in body.nodes[i].inputs}
            made = [v for i in nodes if not is_free(body, i) for v in body.nodes[i].outputs]
            wanted: list[Held] = [(v, home[v]) for v in made if v in read_later or v in totals.values()]
            wanted += [(v, ends[v]) for v in made if v in sent or v in rows]
            wanted = list(dict.fromkeys(wanted))
            if not wanted:
                continue
            begins = {v for v in start if made_in.get(totals[v]) == kind}
            segment = segment_of(stage, f"{kind} {stage.number}", whole, nodes, inner, home, wanted, donated=begins)
            segments[kind] = len(self.segments)
            self.segments.append(segment)
        streams = {inner_value: outer for outer, inner_value in part.streams.items()}
        return _Tasks(segments=segments, home=home, totals=totals, streams=streams, sent=tuple(sent), ends=ends)

    def _task(self, stage: Stage, tasks: _Tasks, task: Task) -> None:
        kind, k, m = task.kind, stage.number, task.microbatch
        if kind not in tasks.segments:
            return
        segment = self.segments[tasks.segments[kind]]
        inputs = tuple(self._inside(stage, tasks, held, m) for held in segment.inputs)
        outputs = tuple(self.fresh() for _ in segment.outputs)
        self.instructions.append(Run(segment=tasks.segments[kind], inputs=inputs, outputs=outputs, task=task))
        ending = {total: start for start, total in tasks.totals.items()}
        for (value, spec), slot in zip(segment.outputs, outputs, strict=True):
            if value in ending:
                self.slots[k, "sum", value] = slot
            self.slots[k, "slice", value, spec, m] = slot
            if value in tasks.sent and spec == tasks.ends[value]:
                self._send_slice(stage, value, spec, slot, m)

    def _send_slice(self, stage: Stage, value: int, held: ShardingSpec, source: Slot, m: int) -> None:
        for other in self.stage_list:
            stream = next(
                (s for s, v in other.part.streams.items() if v == value and s in other.part.graph.inputs), None
            )
            if stream is None:
                continue
            body, inner = other.part.body, other.loop_placement.bodies[0]
            spec = dict(zip(body.inputs, inner.inputs, strict=True))[value]
            slot = self.slots[other.number, "slice", value, spec, m] = self.fresh()
            self._send(source, slot, body.types[value], stage, held, other, spec)

    def _send(
        self,
        source: Slot,
        target: Slot,
        type: TensorType,
        sender: Stage,
        held: ShardingSpec,
        to: Stage,
        spec: ShardingSpec,
    ) -> None:
        struct = jax.ShapeDtypeStruct(type.shape, jax_compat.dtype_of(type.dtype), sharding=sender.sharding(held))
        self.instructions.append(Send(source=source, target=target, struct=struct, sharding=to.sharding(spec)))

    def _inside(self, stage: Stage, tasks: _Tasks, held: Held, m: int) -> Slot:
        """The slot of what a task reads: a slice, a sum so far, or what the loop holds."""
        (value, spec), k = held, stage.number
        part = stage.part
        body, node = part.body, part.graph.nodes[part.loop]
        if (k, "slice", value, spec, m) in self.slots:
            return self.slots[k, "slice", value, spec, m]
        constants, carries = counts(node.params)
        position = body.inputs.index(value)
        outer = node.inputs[position]
        if position < constants:
            return self.slots[k, outer, spec]
        if position < constants + carries:
            total = tasks.totals[value]
            return self.slots.get((k, "sum", total)) or self._zero(stage, outer, value, spec)
        return self._slice(stage, outer, value, spec, m)

    def _zero(self, stage: Stage, outer: int, value: int, spec: ShardingSpec) -> Slot:
        """The sum before the first microbatch, an array of its own for each: it is donated."""
        key = (stage.number, "zero", value)
        if key not in self.slots:
            struct = struct_of(stage.part.body.types[value], spec, stage)
            segment = Segment(
                name=f"zero {stage.number}",
                stage=stage.number,
                function=lambda: (jnp.zeros(struct.shape, struct.dtype),),
                inputs=(),
                outputs=((value, spec),),
                in_shardings=(),
                out_shardings=(stage.sharding(spec),),
                in_structs=(),
                out_structs=(struct,),
            )
            self.segments.append(segment)
            self.slots[key] = self.fresh()
            run = Run(segment=len(self.segments) - 1, inputs=(), outputs=(self.slots[key],))
            self.instructions.append(run)
        return self.slots[key]

    def _slice(self, stage: Stage, outer: int, value: int, spec: ShardingSpec, m: int) -> Slot:
        """A microbatch of the batch, or its number."""
        key = (stage.number, "slice", value, spec, m)
        slot = self.slots[key] = self.fresh()
        positions = {v: i for i, v in enumerate(self.graph.inputs)}
        if outer in positions:
            sharding = stage.sharding(spec)
            self.feeds.append(Feed(argument=positions[outer], slot=slot, sharding=sharding, slice=m))
        else:
            type = stage.part.body.types[value]
            if type.shape:
                raise InternalError(f"value {outer} of the step is read in slices and is no argument")
            self.constants.append((slot, np.asarray(m, type.dtype), stage.sharding(spec)))
        return slot

    # After the loop

    def _after(self) -> None:
        """Rounds: each stage runs all that it can, then what others wait for is sent."""
        for stage in self.stage_list:
            self._finish_loop(stage)
        ran: dict[int, set[int]] = {stage.number: set() for stage in self.stage_list}
        while True:
            self._exchange(range(len(self.stage_list)))
            progress = False
            for stage in self.stage_list:
                progress |= self._round(stage, ran[stage.number])
            if not progress:
                break
        for stage in self.stage_list:
            missing = [v for v, s in self._outputs(stage) if (stage.number, v, s) not in self.slots]
            if missing:
                raise InternalError(f"stage {stage.number} never makes {missing}")

    def _outputs(self, stage: Stage) -> list[Held]:
        outputs = zip(stage.part.graph.outputs, stage.layout.outputs, strict=True)
        return [(v, s) for v, s in outputs if v not in stage.part.streams]

    def _finish_loop(self, stage: Stage) -> None:
        """The loop's results as values of the step: sums as they are, rows joined."""
        part = stage.part
        node, body = part.graph.nodes[part.loop], part.body
        constants, carries = counts(node.params)
        results = stage.loop_placement.results
        for i, (value, total) in enumerate(zip(node.outputs[:carries], body.outputs[:carries], strict=True)):
            start = body.inputs[constants + i]
            spec = dict(zip(body.inputs, stage.loop_placement.bodies[0].inputs, strict=True))[start]
            slot = self.slots.get((stage.number, "sum", total))
            self.slots[stage.number, value, results[i]] = (
                slot if slot is not None else self._zero(stage, node.inputs[constants + i], start, spec)
            )
        inner = dict(zip(body.outputs, stage.loop_placement.bodies[0].outputs, strict=True))
        for i in range(carries, len(node.outputs)):
            value, row = node.outputs[i], body.outputs[i]
            if value in part.streams:
                continue
            self._join_rows(stage, value, row, inner[row], results[i])

    def _join_rows(self, stage: Stage, value: int, row: int, spec: ShardingSpec, joined: ShardingSpec) -> None:
        count = self.stages.microbatches
        rows = tuple(self.slots[stage.number, "slice", row, spec, m] for m in range(count))
        type = stage.part.body.types[row]
        struct = jax.ShapeDtypeStruct(type.shape, jax_compat.dtype_of(type.dtype))
        segment = Segment(
            name=f"rows {stage.number}",
            stage=stage.number,
            function=lambda *xs: (jnp.stack(xs),),
            inputs=((row, spec),) * count,
            outputs=((value, joined),),
            in_shardings=(stage.sharding(spec),) * count,
            out_shardings=(stage.sharding(joined),),
            in_structs=(struct,) * count,
            out_structs=(struct_of(stage.part.graph.types[value], joined, stage),),
        )
        slot = self.slots[stage.number, value, joined] = self.fresh()
        self.segments.append(segment)
        self.instructions.append(Run(segment=len(self.segments) - 1, inputs=rows, outputs=(slot,)))

    def _round(self, stage: Stage, ran: set[int]) -> bool:
        """Runs what can run; says whether anything did.

        While a stage waits for others it runs what they wait for and no more, so that state is updated in one segment,
        which has a use for its buffers.
        """
        graph, home = stage.part.graph, homes(stage.part.graph, stage.layout)
        free = {v for i, n in enumerate(graph.nodes) if is_free(graph, i) for v in n.outputs}
        here = {v for v in home if (stage.number, v, home[v]) in self.slots}
        here |= free | set(graph.literals) | set(graph.constants)
        nodes = [i for i in range(len(graph.nodes)) if i > stage.part.loop and i not in ran]
        can: list[int] = []
        made: set[int] = set()
        for index in nodes:
            if all(v in here or v in made for v in graph.nodes[index].inputs):
                can.append(index)
                made.update(graph.nodes[index].outputs)
        outputs = [(v, s) for v, s in self._outputs(stage) if v in made or v in here]
        if len(can) < len(nodes):
            outputs = [(v, s) for v, s in outputs if self._is_read_elsewhere(stage, v)]
            can = _leading_to(graph, can, [v for v, _ in outputs])
            made = {v for i in can for v in graph.nodes[i].outputs}
        left = [i for i in nodes if i not in can]
        read_later = {v for i in left for v in graph.nodes[i].inputs}
        wanted: list[Held] = [*((v, home[v]) for v in sorted(made & read_later - free)), *outputs]
        wanted = [held for held in dict.fromkeys(wanted) if (stage.number, *held) not in self.slots]
        ran.update(can)
        if not wanted:
            return bool(can)
        loose = [i for i in range(len(graph.nodes)) if is_free(graph, i)]
        self._run(stage, f"after {stage.number}", stage.body, sorted({*loose, *can}), stage.layout, home, wanted)
        return True

    def _is_read_elsewhere(self, stage: Stage, value: int) -> bool:
        return any(value in other.part.graph.inputs for other in self.stage_list if other is not stage)


def _leading_to(graph: Graph, nodes: Sequence[int], values: Iterable[int]) -> list[int]:
    """Those of the nodes that the values are made of."""
    live, found = set(values), list[int]()
    for index in reversed(nodes):
        if not live.isdisjoint(graph.nodes[index].outputs):
            found.append(index)
            live.update(graph.nodes[index].inputs)
    return found[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tasks:
    """A stage's segments by kind of task; where body values are at home, which sums end in which, what is sent."""

    segments: Mapping[str, int]
    home: Mapping[int, ShardingSpec]
    totals: Mapping[int, int]
    streams: Mapping[int, int]
    sent: tuple[int, ...]
    ends: Mapping[int, ShardingSpec]
