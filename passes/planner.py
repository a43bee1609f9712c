"""The whole algorithm: group operators, lay out a mesh, tabulate strategies, solve, and read the plan off the answer.

    group      light operators follow heavy ones                                     passes/bundles.py
    enter      bodies of loops and branches join the program by slots                passes/control.py
    lay out    every way to arrange the devices as one or two axes                   passes/mesh.py
    tabulate   each bundle's legal shardings, priced; reshardings between them       passes/problem.py
    solve      one strategy per bundle at the least total seconds                    passes/intra_op.py
    read off   placements, then the moves between them, then collectives and bytes   passes/moves.py, passes/memory.py

and for a pipeline, around that:

    microbatch the batch axis in time: what is once before, a loop, once after       passes/microbatch.py
    layers     places in the forward pass that little crosses                        passes/layers.py
    price      each layer as a stage of its own, on every mesh of every submesh      passes/stage_table.py
    partition  layers, submeshes, microbatches and schedules into stages             passes/inter_op.py
    cut        each stage as a program with a loop, planned by the path above        passes/stages.py
    simulate   tasks in the order of the schedule, transfers between them            passes/simulate.py

Hand-made planners run the same path on a mesh and under restrictions of their own (passes/restrictions.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from passes import inter_op, pipelines, stages
from passes.bundles import Grouping, group
from passes.cluster import Cluster
from passes.errors import NoLegalPlanError, PlanningError, explain
from passes.intra_op import Answer, SolverOptions, solve
from passes.ir import Graph
from passes.memory import peak_nbytes
from passes.mesh import Mesh, shapes
from passes.moves import Schedule, due, moves
from passes.moves import collectives as collectives_of
from passes.phases import PHASES, Phase
from passes.pipeline import DISPATCH_SECONDS, PipelinePlan
from passes.plan import Plan, Solution
from passes.plan_parts import operators
from passes.problem import Assembly, assemble, without_dominated
from passes.resharding import Resharder
from passes.rules import pinned_mesh
from passes.stage_table import StageCosts
from passes.stages import Part

Tied = tuple[tuple[int, int], ...]
Restriction = Callable[[Assembly], Assembly]


class Planner(Protocol):
    """Anything that turns a graph and a cluster into a plan."""

    def plan(
        self, graph: Graph, cluster: Cluster, *, tied: Tied = (), donated: Sequence[bool] = ()
    ) -> Plan | PipelinePlan:
        """The plan of `graph` on `cluster`; `tied` pairs (output, input) positions that are one state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """The cheapest placements on the best logical mesh of at most `max_axes` axes, in stages where that is cheaper.

    With `pipeline`, stages are searched too: the forward pass is grouped into `layers`, and numbers of microbatches
    and `schedules` are tried; a plan without stages competes on equal terms. That takes minutes for a large model.
    """

    max_axes: int = 2
    pipeline: bool = False
    layers: int = 8
    schedules: tuple[str, ...] = ("1f1b", "eager-1f1b")
    solver: SolverOptions = field(default_factory=SolverOptions)

    def searches(self, cluster: Cluster) -> bool:
        """Whether stages are searched on this cluster."""
        return self.pipeline and cluster.n_devices > 1

    def plan(self, graph: Graph, cluster: Cluster, *, tied: Tied = (), donated: Sequence[bool] = ()) -> Plan:
        if not isinstance(cast(object, self.max_axes), int) or self.max_axes < 1:
            rule = "a mesh has a whole number of axes, one or more"
            raise PlanningError(explain(f"Auto(max_axes={self.max_axes!r})", rule, "", "leave it out for 2"))
        return best("auto", graph, self._laid_out(cluster, cluster.n_devices), tied, donated, self.solver)

    def search(
        self,
        graph: Graph,
        cluster: Cluster,
        microbatched: Mapping[int, Graph],
        *,
        tied: Tied = (),
        donated: Sequence[bool] = (),
    ) -> Plan | PipelinePlan:
        """The cheapest of: no stages and no microbatches, as `plan` has it; and what a search over layers, submeshes,
        meshes, microbatches and schedules finds, given the step in each number of microbatches.
        """
        found: list[Plan | PipelinePlan] = [self.plan(graph, cluster, tied=tied, donated=donated)]
        table = StageCosts(
            graphs=microbatched,
            tied=tied,
            cluster=cluster,
            n_layers=self.layers,
            meshes=lambda n: self._laid_out(cluster, n),
            solve=lambda part, mesh, ties: best("layer", part.graph, [mesh], ties, (), self.solver),
        )
        group = cluster.group()
        partition = inter_op.partition(
            self.layers,
            inter_op.Submesh(hosts=group.hosts, devices_per_host=group.devices_per_host),
            inter_op.submeshes(cluster, every=False),
            table,
            schedules=self.schedules,
            microbatches=tuple(microbatched),
            memory_limit=group.device.memory_nbytes,
            dispatch_seconds=DISPATCH_SECONDS,
            idle=False,
        )
        found.append(self._realised(partition, table, cluster, donated))
        fitting = [plan for plan in found if plan.peak_nbytes <= group.device.memory_nbytes]
        return min(fitting or found, key=lambda plan: plan.step_seconds)

    def _realised(
        self, partition: inter_op.Partition, table: StageCosts, cluster: Cluster, donated: Sequence[bool]
    ) -> Plan | PipelinePlan:
        """The stages that the search has chosen, planned as they are."""
        count = partition.microbatches
        graph, sizes = table.graphs[count], [stage.submesh.n_devices for stage in partition.stages]
        if len(sizes) == 1:
            plan = best("auto", graph, self._laid_out(cluster, sizes[0]), table.tied, donated, self.solver)
            return replace(plan, microbatches=count)
        firsts = table.firsts(count)
        begins = tuple(firsts[stage.first] for stage in partition.stages)

        def plan_stage(part: Part, stage: int) -> Plan:
            meshes, ties = self._laid_out(cluster, sizes[stage]), stages.ties(part, graph, table.tied)
            return best(f"stage {stage}", part.graph, meshes, ties, (), self.solver)

        return pipelined("auto", graph, cluster, table.tied, begins, partition.schedule, plan_stage)

    def _laid_out(self, cluster: Cluster, n_devices: int) -> list[Mesh]:
        return layouts(cluster, n_devices, self.max_axes)


def pipelined(
    name: str,
    graph: Graph,
    cluster: Cluster,
    tied: Tied,
    firsts: Sequence[int],
    schedule: str,
    plan_stage: Callable[[Part, int], Plan],
    chunks: int = 1,
) -> PipelinePlan:
    """The pipeline whose stages begin at body nodes `firsts`, each planned by itself."""
    cut = stages.cut(graph, firsts, tied)
    plans = [plan_stage(part, k) for k, part in enumerate(cut.parts)]
    return pipelines.joined(name, graph, cluster, cut, firsts, plans, schedule, chunks)


def layouts(cluster: Cluster, n_devices: int, max_axes: int) -> list[Mesh]:
    """Every way to lay out the first devices of a cluster that differs there."""
    return [_mesh(cluster, sizes) for sizes in _distinct(cluster, shapes(n_devices, max_axes=max_axes))]


def best(
    name: str,
    graph: Graph,
    meshes: Sequence[Mesh],
    tied: Tied,
    donated: Sequence[bool],
    options: SolverOptions,
    restrict: Restriction | None = None,
    refetch: bool = False,
) -> Plan:
    """The cheapest plan over the meshes."""
    start = time.perf_counter()
    grouping = group(graph)
    grouped = time.perf_counter()
    phases = {"bundles": grouped - start, "tables": 0.0, "build": 0.0, "solve": 0.0}
    found: list[tuple[Assembly, Answer, Resharder]] = []
    illegal: list[NoLegalPlanError] = []
    for mesh in _allowed(graph, meshes):
        began = time.perf_counter()
        resharder = Resharder(mesh)
        try:
            assembly = assemble(graph, mesh, grouping, resharder, tied, refetch=refetch)
            assembly = restrict(assembly) if restrict else assembly
            phases["tables"] += time.perf_counter() - began
            answer = solve(without_dominated(assembly, resharder), options)
        except NoLegalPlanError as error:
            illegal.append(error)
            continue
        phases["build"] += answer.build_seconds
        phases["solve"] += answer.solve_seconds
        found.append((assembly, answer, resharder))
    if not found:
        raise illegal[-1]
    assembly, answer, resharder = min(found, key=lambda one: one[1].objective)
    return _read_off(name, assembly, answer, resharder, tied, donated, phases, refetch)


def _allowed(graph: Graph, meshes: Sequence[Mesh]) -> Sequence[Mesh]:
    """The meshes, or the one that the program's own `shard_map`s name, if a planner's mesh has its sizes."""
    pinned = pinned_mesh(graph)
    if pinned is None:
        return meshes
    names, sizes = tuple(pinned), tuple(pinned.values())
    same = [mesh for mesh in meshes if sorted(mesh.sizes) == sorted(s for s in sizes if s > 1)]
    if not same:
        asked = ", ".join(f"{name}={size}" for name, size in pinned.items())
        tried, count = " or ".join(map(str, meshes)), math.prod(sizes)
        remedy = f"give it a mesh of that shape, or plan with Auto(max_axes={max(2, len(sizes))})"
        if count != meshes[0].size:
            remedy = f"give it a mesh of all devices, or plan for its own {count}: devices=jax.devices()[:{count}]"
        raise PlanningError(
            explain(
                f"a shard_map over the mesh ({asked})",
                "a shard_map runs on the very mesh that it names, with all of its devices",
                f"this planner tried {tried}",
                remedy,
            )
        )
    return [Mesh(axes=names, sizes=sizes, cluster=same[0].cluster)]


def _read_off(
    name: str,
    assembly: Assembly,
    answer: Answer,
    resharder: Resharder,
    tied: Tied,
    donated: Sequence[bool],
    phases: dict[str, float],
    refetch: bool,
) -> Plan:
    """The plan that an answer stands for: placements, the moves between them, and what both cost."""
    graph, mesh, grouping = assembly.root.graph, assembly.mesh, assembly.root.grouping
    layout = assembly.layout(answer.choice)
    schedule = moves(graph, layout, resharder, refetch=refetch)
    donated = donated or (False,) * len(graph.inputs)
    compute = assembly.root.compute_seconds(answer.choice)
    moving, moved = _move_seconds(graph, schedule, resharder)
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
        collectives=collectives_of(graph, schedule, mesh),
        seconds={"compute": sum(compute.values()), **moving},
        phases={name: compute.get(name, 0.0) + moved.get(name, 0.0) for name in PHASES if name in compute | moved},
        nbytes=peak_nbytes(graph, grouping, mesh, layout, schedule, tied, donated),
        solution=Solution(
            planner=name,
            status=answer.status,
            objective=answer.objective,
            bound=answer.bound,
            phase_seconds=phases,
        ),
        replicated=tuple(dict.fromkeys(_uncut(graph, grouping))),
        refetch=refetch,
    )


def _uncut(graph: Graph, grouping: Grouping) -> Iterator[str]:
    """The operators that no rule cuts, those of loops and branches included."""
    for index, (node, rule) in enumerate(zip(graph.nodes, grouping.rules, strict=True)):
        if rule.reason:
            yield f"{node.primitive} at {node.source}"
        if index in grouping.controls:
            for body, inner in zip(grouping.controls[index].bodies, grouping.bodies[index], strict=True):
                yield from _uncut(body.graph, inner)


def _move_seconds(
    graph: Graph, schedule: Schedule, resharder: Resharder
) -> tuple[dict[str, float], dict[Phase, float]]:
    """Seconds of all moves by kind of collective (`copies` are the local steps), and by phase."""
    by_kind: dict[str, float] = {}
    by_phase: dict[Phase, float] = {}
    for one in due(graph, schedule):
        spec = one.move.before
        for step in one.move.steps:
            before, spec = spec, step.apply(spec)
            spent = one.trips * one.share * resharder.cost(one.type, before, spec)
            cause = "copies" if step.is_local else step.kind
            by_kind[cause] = by_kind.get(cause, 0.0) + spent
            by_phase[one.phase] = by_phase.get(one.phase, 0.0) + spent
    return by_kind, by_phase


def _mesh(cluster: Cluster, sizes: tuple[int, ...]) -> Mesh:
    return Mesh(axes=("x", "y", "z")[: len(sizes)], sizes=sizes, cluster=cluster)


def named(cluster: Cluster, *axes: tuple[str, int]) -> Mesh:
    used = [(name, size) for name, size in axes if size > 1]
    return Mesh(axes=tuple(name for name, _ in used), sizes=tuple(size for _, size in used), cluster=cluster)


def _distinct(cluster: Cluster, sizes: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    """The shapes that differ on this cluster: on one host all devices are equally far apart and order is naming."""
    if cluster.group().hosts > 1:
        return list(sizes)
    return list(dict.fromkeys(tuple(sorted(shape)) for shape in sizes))
