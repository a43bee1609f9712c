"""A pipeline's plan as a program: its segments, and the order in which they run and values are sent and freed.

There is one total order: each stage's tasks in the order of its schedule, stages merged by simulated start, a transfer
right after the instruction that makes its value, a value freed after its last use. A stage's program is cut into
segments wherever it waits for another stage or for its next task: before the loop, for each kind of task, and after the
loop once for every round of waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.frontend import Body, Equation, Traced
from autopar.jax_compat import Device
from autopar.lowering import device_mesh
from autopar.runtime.donation import donating, reused, shared
from autopar.runtime.listing import Listing
from autopar.runtime.loop_tasks import Loop, tasks_of
from autopar.runtime.program import Donation, Feed, Held, Program, Segment, Slot, freed
from autopar.runtime.rounds import write_rounds
from autopar.runtime.segments import Stage, counts, struct_of
from passes.errors import InternalError
from passes.pipeline import value_specs
from passes.placement import is_free
from passes.plan import PipelinePlan
from passes.transforms import Part, Stages, loop_of


def build(traced: Traced, plan: PipelinePlan, stages: Stages, devices: Sequence[Device]) -> Program:
    """The program of a planned pipeline on the first devices, stage after stage."""
    index = loop_of(traced.graph)
    if index is None:
        raise InternalError("a pipeline's program has a loop over microbatches")
    body = traced.equations[index].bodies[0]
    listing, arguments = Listing(), {value: i for i, value in enumerate(traced.graph.inputs)}
    program_stages = [_stage(number, part, traced, body, plan, devices) for number, part in enumerate(stages.parts)]
    for stage in program_stages:
        _feed(stage, listing, arguments, traced, stages.input_stages)
    listing.exchange(program_stages)
    for stage in program_stages:
        _before(stage, listing)
    tasks = [tasks_of(stage, listing, body, splits_backward=plan.splits_backward) for stage in program_stages]
    loop = Loop(
        listing=listing, stages=program_stages, tasks=tasks, arguments=arguments, microbatches=stages.microbatches
    )
    for task in plan.order():
        loop.run(task)
    for stage in program_stages:
        loop.finish(stage)
    write_rounds(program_stages, listing)
    return _finished(traced, listing, _results(traced, program_stages, stages, listing, devices))


def _stage(
    number: int, part: Part, traced: Traced, loop_body: Body, plan: PipelinePlan, devices: Sequence[Device]
) -> Stage:
    """A stage with its plan, on its own devices."""
    first, stage_plan = plan.offsets[number], plan.stages[number]
    submesh_devices = devices[first : first + stage_plan.mesh.size]
    constants = dict(zip(traced.graph.constants, traced.constants, strict=True))

    def equation(origin: tuple[str, int]) -> Equation:
        kind, index = origin
        return traced.equations[index] if kind == "step" else loop_body.equations[index]

    return Stage(
        number=number,
        part=part,
        plan=stage_plan,
        body=Body(
            graph=part.graph,
            equations=tuple(map(equation, part.origins)),
            constants=tuple(constants[v] for v in part.graph.constants),
        ),
        mesh=device_mesh(stage_plan.mesh, submesh_devices) if stage_plan.mesh.axes else None,
        device=submesh_devices[0],
        loop_equations=tuple(map(equation, part.inside)),
    )


def _feed(
    stage: Stage, listing: Listing, arguments: Mapping[int, int], traced: Traced, input_stages: Sequence[int]
) -> None:
    """Adds slots for the arguments that a stage reads; state of another stage is sent from there."""
    graph = stage.part.graph
    for value, spec in zip(graph.inputs, stage.layout.inputs, strict=True):
        position = arguments.get(value)
        if position is None:
            continue
        stacked = position in traced.stacked
        outside = any(index != stage.part.loop for index in graph.consumers.get(value, ()))
        if outside if stacked else input_stages[position] == stage.number:
            slot = listing.slots[stage.number, value, spec] = listing.fresh()
            listing.feeds.append(Feed(argument=position, slot=slot, sharding=stage.sharding(spec)))


def _before(stage: Stage, listing: Listing) -> None:
    """Brings constants and sums to the placements that the loop needs, and computes all that precedes the loop."""
    graph, loop = stage.part.graph, stage.part.loop
    node, placement = graph.nodes[loop], stage.loop_placement
    n_held = sum(counts(node.params))
    late = {v for n in graph.nodes[loop + 1 :] for v in n.inputs} | set(graph.outputs)
    specs = value_specs(graph, stage.layout)
    needed: list[Held] = list(zip(node.inputs[:n_held], placement.operands[:n_held], strict=True))
    computed = {v for n in graph.nodes[:loop] for v in n.outputs}
    free = {v for i, n in enumerate(graph.nodes) if is_free(graph, i) for v in n.outputs}
    needed += [(v, specs[v]) for v in sorted(computed & late - free)]
    needed = [
        value_and_spec
        for value_and_spec in dict.fromkeys(needed)
        if (stage.number, *value_and_spec) not in listing.slots
    ]
    listing.compute(stage, f"before {stage.number}", stage.body, range(loop), stage.layout, specs, needed)


def _results(
    traced: Traced, program_stages: Sequence[Stage], stages: Stages, listing: Listing, devices: Sequence[Device]
) -> tuple[Slot, ...]:
    """The slots of outputs, each an array of its own: as the caller may donate it, it is no argument and no constant.

    Of several processes each is sent the outputs that are single numbers, so that a loss can be read on all.
    """
    are_of_several = len({device.process_index for device in devices}) > 1
    representative = shared(listing.instructions)
    given = (*(feed.slot for feed in listing.feeds), *(slot for slot, _, _ in listing.constants))
    taken = {representative.get(slot, slot) for slot in given}
    slots: list[Slot] = []
    for position, value in enumerate(traced.graph.outputs):
        stage = program_stages[stages.output_stages[position]]
        spec = dict(zip(stage.part.graph.outputs, stage.layout.outputs, strict=True))[value]
        slot = listing.slots[stage.number, value, spec]
        if representative.get(slot, slot) in taken:
            slot = _copied(stage, (value, spec), slot, listing)
        elif are_of_several and traced.graph.types[value].shape == ():
            struct = struct_of(traced.graph.types[value], spec, stage)
            slot = listing.broadcast(slot, struct, stage.sharding(spec), devices)
        taken.add(representative.get(slot, slot))
        slots.append(slot)
    return tuple(slots)


def _copied(stage: Stage, value_and_spec: Held, slot: Slot, listing: Listing) -> Slot:
    """The slot of a copy of an array."""
    value, spec = value_and_spec
    sharding, struct = stage.sharding(spec), struct_of(stage.part.graph.types[value], spec, stage)
    segment = Segment(
        name=f"copy {stage.number}",
        stage=stage.number,
        function=lambda x: (x,),
        inputs=(value_and_spec,),
        outputs=(value_and_spec,),
        in_shardings=(sharding,),
        out_shardings=(sharding,),
        in_structs=(struct,),
        out_structs=(struct,),
        platform=stage.platform,
    )
    (copy,) = listing.run(listing.add(segment), (slot,))
    return copy


def _finished(traced: Traced, listing: Listing, results: tuple[Slot, ...]) -> Program:
    """The program with buffers donated where possible and values freed after their last use."""
    gone = reused(traced)
    inputs, outputs = traced.graph.inputs, traced.graph.outputs
    successors = {inputs[position]: outputs[output] for output, position in traced.state_pairs}
    instructions, segments = donating(listing.instructions, listing.segments, listing.feeds, gone, successors)
    program = Program(
        segments=tuple(replace(segment, user_options=traced.options.compiler_options) for segment in segments),
        feeds=tuple(listing.feeds),
        constants=tuple(listing.constants),
        instructions=tuple(freed(instructions, segments, results, listing.constants)),
        results=results,
        n_slots=listing.n_slots,
        donation=Donation(positions=tuple(sorted(gone)), names=traced.graph.input_names),
    )
    program.verify()
    return program
