"""The plan of an answer to the integer program: placements, the reshardings between them, seconds, and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from passes.cluster import collectives
from passes.errors import PlanMismatchError
from passes.gc_pause import without_gc
from passes.intra_op.assembly import Assembly
from passes.intra_op.computing import compute_seconds
from passes.intra_op.flops import model_flops
from passes.intra_op.offloading import away, idle_state, offloaded_nbytes, transfer_seconds
from passes.ir import PHASES, Graph, Phase, StatePairs
from passes.memory import Memory, peak
from passes.placement import Grouping, Layout, Occurrence, Pack, ReshardingPlan, group, occurrences, resharding_plan
from passes.placement import collectives as collectives_of
from passes.plan import MemoryReport, Plan, Solution, operators
from passes.sharding import Resharder
from passes.solver import Answer

EQUAL = 1e-6
"""The share by which seconds may differ that were added in another order."""


@without_gc()
def extract_plan(
    planner: str,
    assembly: Assembly,
    answer: Answer,
    resharder: Resharder,
    memory_of: Callable[[Layout, ReshardingPlan], Memory],
    phase_seconds: Mapping[str, float],
) -> Plan:
    """The plan that an answer to the sharding problem stands for, as one of this planner.

    It has the placements, the reshardings between them, and the seconds and bytes of both: `memory_of` them.
    `phase_seconds` are those that each part of the search took.
    """
    graph, mesh, grouping = assembly.root.graph, assembly.mesh, assembly.root.grouping
    layout, choice = assembly.layout(answer.choice), assembly.placements_of(answer.choice)
    reshardings = resharding_plan(graph, layout, resharder, regather=assembly.regather)
    compute = assembly.root.compute_seconds(choice)
    moving, moved = move_seconds(graph, reshardings, resharder)
    memory = memory_of(layout, reshardings)
    return Plan(
        fingerprint=graph.fingerprint,
        cluster=mesh.cluster,
        mesh=mesh,
        operators=operators(graph, layout.placements),
        inputs=layout.inputs,
        outputs=layout.outputs,
        input_names=graph.input_names,
        output_names=graph.output_names,
        input_types=tuple(graph.types[v] for v in graph.inputs),
        output_types=tuple(graph.types[v] for v in graph.outputs),
        collectives=collectives_of(graph, reshardings, mesh),
        seconds={"compute": sum(compute.values()), **moving},
        phases=_added(compute, moved),
        computing={name: compute[name] for name in PHASES if name in compute},
        flops=model_flops(graph),
        nbytes={cause: size for cause, size in memory.nbytes.items() if size},
        memory=MemoryReport.of(memory),
        solution=Solution(
            planner=planner,
            status=answer.status,
            objective=answer.objective,
            bound=answer.bound,
            phase_seconds=dict(phase_seconds),
        ),
        replicated=tuple(dict.fromkeys(_uncut(graph, grouping))),
        regather=assembly.regather,
    )


@without_gc()
def accounted(plan: Plan, graph: Graph, state_pairs: StatePairs, donated: Sequence[bool]) -> Plan:
    """The plan with the collectives, seconds and bytes that follow from its placements.

    An edited plan still has the numbers of the plan that it was made of. How far it is from the optimum is then
    unknown. Raises PlanMismatchError where it offloads anything but state that the apply phase alone reads.
    """
    _check_offloaded(plan, graph, state_pairs)
    layout, mesh, resharder, grouping = plan.layout, plan.mesh, Resharder(plan.mesh), group(graph)
    reshardings = resharding_plan(graph, layout, resharder, regather=plan.regather)
    sent = collectives_of(graph, reshardings, mesh)
    memory = peak(graph, grouping, mesh, layout, reshardings, state_pairs, donations(graph, donated))
    nbytes = {cause: size for cause, size in memory.nbytes.items() if size}
    host_nbytes = offloaded_nbytes(graph, layout, plan.offloaded, mesh)
    if elsewhere := away(host_nbytes):
        nbytes["optimizer state"] -= elsewhere
    compute = compute_seconds(graph, grouping, mesh, layout)
    computing = {name: compute[name] for name in PHASES if name in compute}
    computing = plan.computing if _alike(computing, plan.computing) else computing
    plan = replace(plan, computing=computing, flops=model_flops(graph))
    moving, moved = move_seconds(graph, reshardings, resharder)
    offload_seconds = {"offload": transfer_seconds(host_nbytes, mesh)} if plan.offloaded else {}
    seconds = {"compute": sum(compute.values()), **offload_seconds, **moving}
    if _alike(seconds, plan.seconds) and sent == plan.collectives and nbytes == plan.nbytes:
        return replace(plan, counted_for="") if plan.is_stale else plan
    solution = replace(plan.solution.unproven(), objective=sum(seconds.values()))
    return replace(
        plan,
        collectives=sent,
        seconds=seconds,
        phases=_added(compute, moved),
        nbytes=nbytes,
        memory=MemoryReport.of(memory).less(elsewhere),
        solution=solution,
        counted_for="",
    )


def donations(graph: Graph, donated: Sequence[bool]) -> Sequence[bool]:
    """Whether the memory of each input may be reused: `donated`, or that of none where nothing is said."""
    return donated or (False,) * len(graph.inputs)


def _added(compute: Mapping[Phase, float], moved: Mapping[Phase, float]) -> dict[str, float]:
    """Seconds of computing and of reshardings together, by phase."""
    return {name: compute.get(name, 0.0) + moved.get(name, 0.0) for name in PHASES if name in compute or name in moved}


def _uncut(graph: Graph, grouping: Grouping) -> Iterator[str]:
    """The operators whose rule allows no cut, those in loops and branches included."""
    for index, (node, rule) in enumerate(zip(graph.nodes, grouping.rules, strict=True)):
        if rule.reason and not rule.once:
            yield f"{node.primitive} at {node.source}"
        if index in grouping.controls:
            for body, inner in zip(grouping.controls[index].bodies, grouping.bodies[index], strict=True):
                yield from _uncut(body.graph, inner)


def _check_offloaded(plan: Plan, graph: Graph, state_pairs: StatePairs) -> None:
    """Raises PlanMismatchError where a plan offloads anything but state that the apply phase alone reads."""
    idle = idle_state(graph, state_pairs) if plan.offloaded else ()
    busy = [i for i in plan.offloaded if i not in idle]
    if busy:
        name = plan.input_names[busy[0]] if plan.input_names else busy[0]
        raise PlanMismatchError(
            f"input {name} is offloaded, and is no state that the apply phase alone reads; leave {busy[0]} out of the "
            "plan's `offloaded`"
        )


def _alike(these: Mapping[str, float], those: Mapping[str, float]) -> bool:
    """Whether seconds by cause are equal but for rounding."""
    return all(math.isclose(these.get(c, 0.0), those.get(c, 0.0), rel_tol=EQUAL) for c in (*these, *those))


def move_seconds(
    graph: Graph, reshardings: ReshardingPlan, resharder: Resharder
) -> tuple[dict[str, float], dict[Phase, float]]:
    """Seconds of all reshardings by kind of collective (local steps are `copies`), and by phase."""
    by_kind: dict[str, float] = {}
    by_phase: dict[Phase, float] = {}
    for occurrence, cause, spent in moves(graph, reshardings, resharder):
        by_kind[cause] = by_kind.get(cause, 0.0) + spent
        by_phase[occurrence.phase] = by_phase.get(occurrence.phase, 0.0) + spent
    return by_kind, by_phase


def moves(graph: Graph, reshardings: ReshardingPlan, resharder: Resharder) -> Iterator[tuple[Occurrence, str, float]]:
    """(occurrence, kind of collective or `copies`, seconds) of each step of each resharding."""
    for occurrence in occurrences(graph, reshardings):
        spec = occurrence.move.before
        runs = occurrence.trips * occurrence.share * _exposed_share(occurrence, resharder)
        for step in occurrence.move.steps:
            spec_before, spec = spec, step.apply(spec)
            spent = runs * resharder.cost(occurrence.type, spec_before, spec)
            yield occurrence, "copies" if step.is_local else step.kind, spent


def _exposed_share(occurrence: Occurrence, resharder: Resharder) -> float:
    """The share of a resharding's seconds that prolongs the step; 1 if computing waits for all of it.

    Each of its steps has the same share, so that they add up to what the search reckoned with. A reduction in a pack
    that computing waits for has its share of the pack's seconds, of which a search of one value after another knows
    nothing.
    """
    if occurrence.behind is None:
        return _packed_share(occurrence.pack, resharder) if occurrence.pack else 1.0
    ends = occurrence.type, occurrence.move.before, occurrence.move.after
    alone = resharder.cost(*ends)
    return resharder.cost(*ends, occurrence.behind) / alone if alone else 1.0


def _packed_share(pack: Pack, resharder: Resharder) -> float:
    """The seconds of a pack's one all-reduce as a share of what its reductions take one after another."""
    ends = [(type, move.before, move.after) for move, type in zip(pack.reductions, pack.types, strict=True)]
    alone = sum(resharder.cost(*each) for each in ends)
    mesh = resharder.mesh
    nbytes, launch = float(pack.nbytes(mesh)), mesh.cluster.group().device.launch_seconds
    steps = pack.reductions[0].steps
    together = sum(collectives.seconds("all_reduce", nbytes, mesh.group(step.axes)) for step in steps)
    together += len(steps) * len(ends) * launch
    return min(1.0, together / alone) if alone else 1.0
