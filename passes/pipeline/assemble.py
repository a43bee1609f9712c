"""Pipelines assembled from planned stages, with their costs: seconds of tasks, bytes in flight, transfers."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from itertools import accumulate
from types import MappingProxyType

from passes.cluster import Cluster, Mesh, boundary_seconds
from passes.errors import InternalError, PlanningError, explain
from passes.inter_op import StageCost, Transfer
from passes.intra_op import computing, extract, layer_costs
from passes.ir import Graph
from passes.layers import layer_names
from passes.memory import peak
from passes.pipeline.segments import Needs, needs
from passes.placement import Layout, collectives, group, is_free, resharding_plan
from passes.plan import AnyPlan, MemoryReport, PipelinePlan, Plan, operators
from passes.sharding import Resharder
from passes.step import Step
from passes.text import count
from passes.transforms import Part, Stages, loop_of, stages


def body_of(graph: Graph) -> Graph:
    """The program of a microbatch: the body of the loop over them."""
    index = loop_of(graph)
    if index is None:
        raise InternalError("a pipeline is planned from a step in microbatches")
    return graph.nodes[index].subgraphs[0]


def check_submeshes(stages: int, submeshes: Sequence[int], cluster: Cluster) -> tuple[int, ...]:
    """The number of devices of each stage; warns of devices that no stage has.

    Raises PlanningError where these do not fit the cluster.
    """
    call = f"Pipeline(stages={stages!r}" + (f", submeshes={tuple(submeshes)!r})" if submeshes else ")")
    if submeshes and len(submeshes) != stages:
        rule = "there is one submesh for each stage, of one device or more"
        raise PlanningError(explain(call, rule, "", "leave submeshes out for equal ones"))
    devices = cluster.n_devices
    if not submeshes and devices % stages:
        rule = f"{count(devices, 'device')} of cluster {cluster.name!r} cannot be spread evenly over {stages} stages"
        uneven = tuple(devices // stages + (k < devices % stages) for k in range(stages))
        remedy = f"say how many each stage has: submeshes={uneven}" if devices >= stages else "use fewer stages"
        raise PlanningError(explain(call, rule, "", remedy))
    sizes = tuple(submeshes) or (devices // stages,) * stages
    if sum(sizes) > devices:
        rule = f"these are {sum(sizes)} devices, and cluster {cluster.name!r} has {devices}"
        raise PlanningError(explain(call, rule, "", "give the stages fewer devices"))
    if idle := devices - sum(sizes):
        rule = f"{idle:,} of {count(devices, 'device')} of cluster {cluster.name!r} stand idle: no stage has them"
        warnings.warn(explain(call, rule, "", "give them to a stage, or plan for a smaller cluster"), stacklevel=2)
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The part of a pipeline that does not depend on its stages: who planned it, and in which order they run.

    Each group of devices has `chunks` stages in turn.
    """

    planner: str
    cluster: Cluster
    schedule: str
    chunks: int = 1


def pipelined(
    step: Step, firsts: Sequence[int], plan_stage: Callable[[Step, int], Plan], options: PipelineOptions
) -> PipelinePlan:
    """The pipeline whose stages begin at the nodes `firsts` of the loop body.

    `plan_stage(part, k)` plans stage k, a step of its own.
    """
    cut = stages.cut(step.graph, firsts, step.state_pairs)
    plans = [plan_stage(part, k) for k, part in enumerate(step.parts(cut))]
    return assemble_pipeline(step, cut, plans, options)


def restated(plan: Plan, planned: Graph, step: Step) -> Plan:
    """The plan of a stage, `planned`, for a `step` of the same fingerprint, with the step's own operators and names."""
    graph = step.graph
    named = replace(
        plan,
        operators=operators(graph, plan.layout.placements),
        input_names=graph.input_names,
        output_names=graph.output_names,
    )
    layers = layer_names.renamed(planned, graph)
    if layers and sources(planned) == sources(graph):
        names = dict(
            zip((*plan.output_names, *plan.input_names), (*graph.output_names, *graph.input_names), strict=True)
        )
        names |= layers
        return replace(named, memory=plan.memory and plan.memory.renamed(names))
    layout, mesh = plan.layout, plan.mesh
    reshardings = resharding_plan(graph, layout, Resharder(mesh), regather=plan.regather)
    donated = extract.donations(graph, step.donated)
    memory = peak(graph, group(graph), mesh, layout, reshardings, step.state_pairs, donated)
    return replace(named, collectives=collectives(graph, reshardings, mesh), memory=MemoryReport.of(memory))


def sources(graph: Graph) -> list[object]:
    """The source line of each operator, those of loops and branches included."""
    return [(node.source, *map(sources, node.subgraphs)) for node in graph.nodes]


def assemble_pipeline(
    step: Step,
    cut: Stages,
    plans: Sequence[Plan],
    options: PipelineOptions,
    known: dict[object, StageCost] | None = None,
) -> PipelinePlan:
    """The pipeline of a step that is `cut` into stages, of which these are the plans.

    `known` has the costs of stages from earlier calls; those of new ones are added to it.
    """
    graph, cluster = step.graph, options.cluster
    cost_by_key = {} if known is None else known

    def cost(part: Part, plan: Plan) -> StageCost:
        pairs = stages.state_pairs_of(part, graph, step.state_pairs)
        given = stages.donations(part, graph, step.donated)
        phases = tuple(sorted(plan.phases.items()))
        key = part.graph.fingerprint, plan.layout, plan.mesh, phases, pairs, given
        if key not in cost_by_key:  # most stages of a deep model are alike
            cost_by_key[key] = stage_cost(part, plan, needs(part, plan.layout, plan.mesh, pairs, given))
        return cost_by_key[key]

    readers = Counter(v for part in cut.parts for v in part.boundary_values if v in part.graph.inputs)
    sent = [sent_nbytes(part, readers) for part in cut.parts]
    plan = PipelinePlan(
        fingerprint=graph.fingerprint,
        cluster=cluster,
        planner=options.planner,
        schedule_name=options.schedule,
        chunks=options.chunks,
        microbatches=cut.microbatches,
        firsts=cut.firsts,
        stages=tuple(plans),
        costs=tuple(cost(part, plan) for part, plan in zip(cut.parts, plans, strict=True)),
        transfers=tuple(_transfer(cluster, plans, options.chunks, sent, k) for k in range(len(plans) - 1)),
        sent_nbytes=tuple(forward + backward for forward, backward in sent),
        input_names=graph.input_names,
        output_names=graph.output_names,
    )
    plan.verify()
    return plan


@singledispatch
def recounted(plan: AnyPlan, step: Step) -> AnyPlan:
    """The plan with the numbers that follow from its placements."""
    raise InternalError(f"what a {type(plan).__name__} sends and holds cannot be counted")


@recounted.register
def _(plan: Plan, step: Step) -> Plan:
    return extract.accounted(plan, step.graph, step.state_pairs, step.donated)


@recounted.register
def _(plan: PipelinePlan, step: Step) -> PipelinePlan:
    cut = stages.cut(step.graph, plan.firsts, step.state_pairs)
    plans = [
        extract.accounted(stage, part.graph, part.state_pairs, part.donated)
        for part, stage in zip(step.parts(cut), plan.stages, strict=True)
    ]
    options = PipelineOptions(
        planner=plan.planner, cluster=plan.cluster, schedule=plan.schedule_name, chunks=plan.chunks
    )
    return assemble_pipeline(step, cut, plans, options)


@singledispatch
def layered(plan: AnyPlan, step: Step) -> AnyPlan:
    """The plan with the cost of each layer of the model."""
    raise InternalError(f"the layers of a {type(plan).__name__} are not known")


@layered.register
def _(plan: Plan, step: Step) -> Plan:
    return layer_costs(plan, step.graph)


@layered.register
def _(plan: PipelinePlan, step: Step) -> PipelinePlan:
    cut = stages.cut(step.graph, plan.firsts, step.state_pairs)
    known: dict[object, tuple[Plan, Graph]] = {}
    planned: list[Plan] = []
    for part, stage in zip(cut.parts, plan.stages, strict=True):
        key = part.graph.fingerprint, stage.layout, stage.mesh, stage.regather
        planned.append(layer_costs(stage, part.graph, known.get(key)))
        known.setdefault(key, (planned[-1], part.graph))
    return replace(plan, stages=tuple(planned))


def stage_cost(part: Part, plan: Plan, needed: Needs) -> StageCost:
    """The cost of a stage by its plan, with the bytes that it needs besides arguments and what microbatches keep."""
    cost = layout_cost(part, plan.layout, plan.mesh, plan.phases)
    return replace(
        cost,
        persistent_nbytes=cost.persistent_nbytes + needed.entering,
        working_nbytes=needed.working,
        finish_nbytes=needed.finish,
    )


def layout_cost(part: Part, layout: Layout, mesh: Mesh, seconds: Mapping[str, float]) -> StageCost:
    """The cost of a stage by a layout: seconds of one microbatch's tasks and of the update, and bytes that stay or are
    kept.
    """
    length = part.scan.length
    backward = seconds.get("backward", 0.0) / length
    share = computing.weight_gradient_share(
        part.body, group(part.body), mesh, layout.placements[part.loop].bodies[0], _sent(part)
    )
    return StageCost(
        forward_seconds=seconds.get("forward", 0.0) / length,
        backward_seconds=backward,
        input_gradient_seconds=(1 - share) * backward,
        weight_gradient_seconds=share * backward,
        finish_seconds=seconds.get("apply", 0.0),
        in_flight_nbytes=_kept_nbytes(part, layout, mesh),
        persistent_nbytes=_persistent_nbytes(part, layout, mesh),
    )


def _sent(part: Part) -> frozenset[int]:
    """The values of the body that are sent to other stages."""
    return frozenset(inner for value, inner in part.boundary_values.items() if value in part.graph.outputs)


def saved_values(part: Part) -> frozenset[int]:
    """The values of the body that the forward of a microbatch keeps for its backward, received ones included."""
    body = part.body
    boundary_values = set(part.boundary_values.values()) & set(body.inputs)
    for index in part.forward:
        if not is_free(body, index):
            boundary_values |= set(body.nodes[index].outputs)
    read = {v for i, node in enumerate(body.nodes) if i not in part.forward for v in node.inputs}
    return frozenset(read & boundary_values)


def _kept_nbytes(part: Part, layout: Layout, mesh: Mesh) -> int:
    """Bytes of one device that the forward of a microbatch keeps for its backward, received values included."""
    body, inside = part.body, layout.placements[part.loop].bodies[0]
    specs = dict(zip(body.inputs, inside.inputs, strict=True))
    for index in part.forward:
        specs |= zip(body.nodes[index].outputs, inside.placements[index].results, strict=True)
    return sum(specs[v].local_nbytes(body.types[v], mesh) for v in saved_values(part))


def _persistent_nbytes(part: Part, layout: Layout, mesh: Mesh) -> int:
    """Bytes of one device of parameters, state and summed gradients."""
    graph = part.graph
    inputs = zip(graph.inputs, layout.inputs, strict=True)
    nbytes = sum(s.local_nbytes(graph.types[v], mesh) for v, s in inputs if v not in part.boundary_values)
    loop = graph.nodes[part.loop]
    results = zip(loop.outputs, layout.placements[part.loop].results, strict=True)
    return nbytes + sum(s.local_nbytes(graph.types[v], mesh) for v, s in results if v not in part.boundary_values)


def sent_nbytes(part: Part, readers: Mapping[int, int] = MappingProxyType({})) -> tuple[int, int]:
    """Bytes that a stage sends to later stages, and to earlier ones, with each microbatch.

    A stream is sent to each of its `readers`, as what an encoder hands to all stages of a decoder; by default to one.
    """
    onward = {value for i in part.forward for value in part.body.nodes[i].outputs}
    sent = [(v, inner) for v, inner in part.boundary_values.items() if v in part.graph.outputs]
    nbytes = {inner: readers.get(v, 1) * part.body.types[inner].nbytes for v, inner in sent}
    forward = sum(nbytes[inner] for inner in nbytes.keys() & onward)
    return forward, sum(nbytes.values()) - forward


def _transfer(
    cluster: Cluster, plans: Sequence[Plan], chunks: int, sent: Sequence[tuple[int, int]], stage: int
) -> Transfer:
    """Seconds of a microbatch between a stage and the next, forward and backward."""
    hosts, groups = cluster.group(), len(plans) // chunks
    ends = [0, *accumulate(plan.mesh.size for plan in plans[:groups])]
    senders, receivers = (range(ends[k % groups], ends[k % groups + 1]) for k in (stage, stage + 1))
    return Transfer(
        forward_seconds=boundary_seconds(hosts, senders, receivers, sent[stage][0]),
        backward_seconds=boundary_seconds(hosts, receivers, senders, sent[stage + 1][1]),
    )
